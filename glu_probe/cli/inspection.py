"""Commands that say how a checkpoint is read: `inspect` and `check`."""

from __future__ import annotations

from typing import Annotated

import typer

from .application import app
from .options import AsJson, Layers, Model, Opening, spread
from .printing import echo, notes, print_json, progress, records


@app.command(epilog="Example: glu-probe inspect HuggingFaceTB/SmolLM2-135M")
@spread
def inspect(model: Model, *, opening: Opening, as_json: AsJson = False) -> None:
    """Say what a checkpoint holds, from headers."""
    from ..overview import layout_text

    checkpoint = opening.open(model)
    if as_json:
        print_json({**checkpoint.provenance(), "mlps": records(checkpoint.describe())})
        return
    notes(checkpoint.notes)
    echo(layout_text(checkpoint))


@app.command(epilog="Example: glu-probe check HuggingFaceTB/SmolLM2-135M")
@spread
def check(
    model: Model,
    *,
    layers: Layers = None,
    opening: Opening,
    seed: Annotated[int, typer.Option(min=0, help="Of the random input.")] = 0,
    max_gb: Annotated[float, typer.Option(min=0, help="Compare no MLP that needs more memory, in GB.")] = 16.0,
    as_json: AsJson = False,
) -> None:
    """Ask transformers' own modules whether a checkpoint is read rightly.

    Says how the tensors are read, then runs a few MLPs (by default of the first, middle and last layer of each kind)
    as transformers builds them and as the factors that are measured. No code of the repository is run. Exit code 3 if
    they differ; 0 if they agree or could not be compared, which is said.
    """
    from ..checking import check as compare

    checkpoint = opening.open(model)
    result = compare(
        checkpoint, layers=layers, seed=seed, max_gb=max_gb, progress=progress(checkpoint.name, unit="MLPs")
    )
    if as_json:
        rows = records(result.frame, decimals=15)
        print_json({**checkpoint.provenance(), "ok": result.ok, "compared_with": result.reference, "mlps": rows})
    else:
        notes(checkpoint.notes)
        echo(str(result))
    if not result.ok:
        raise typer.Exit(3)
