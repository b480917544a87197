"""Commands that say how a checkpoint is read: `inspect` and `check`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .application import app
from .options import AsJson, Layers, Model, Opening, spread
from .printing import echo, notes, print_json, progress, records


@app.command(epilog="Example: glu-probe inspect HuggingFaceTB/SmolLM2-135M --plan --bandwidth 100MB/s")
@spread
def inspect(
    model: Model,
    *,
    opening: Opening,
    plan: Annotated[bool, typer.Option("--plan", help="Say what a report would take: bytes, memory, time.")] = False,
    bandwidth: Annotated[
        str | None, typer.Option(metavar="RATE", help="With --plan: of the files, as 400MB/s. By default 2GB/s.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --plan: MLPs measured at once. By default 1.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With --plan: bound of each worker. By default 1GB.")
    ] = None,
    gflops: Annotated[
        float | None,
        typer.Option(
            metavar="RATE", help="With --plan: of each worker, in 1e9 operations a second. Measured by default."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint holds, and what a report would take.

    From headers alone. A plan counts what the code would read and compute, and takes the longer of both for the time, as
    one MLP is read while another is measured.
    """
    from ..overview import layout_text

    options = {"bandwidth": bandwidth, "workers": workers, "memory": memory, "gflops": gflops}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if given and not plan:
        from ..errors import BadOption

        raise BadOption(f"--{next(iter(given))} without --plan", hint="It says what a plan is made for: add --plan")
    checkpoint = opening.open(model)
    planned = None
    if plan:
        from ..plan import plan as planning
        from ..plan_text import plan_text

        planned = planning(checkpoint, **given)
    if as_json:
        facts = {**checkpoint.provenance(), "mlps": records(checkpoint.describe())}
        print_json(facts if planned is None else {**facts, "plan": planned.facts()})
        return
    notes(checkpoint.notes)
    echo(layout_text(checkpoint))
    if planned is not None:
        echo(f"\nplan of a report:\n{plan_text(planned)}")


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
