"""The command that measures on text: `activations`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .application import app
from .options import AsJson, Device, Dtype, Figures, Folding, Fresh, Layers, Length, Model, Seed, Text, spread
from .printing import echo, estimate, print_json, progress, records
from .reports import weight_report
from .saving import save_report, written


@app.command(epilog="Example: glu-probe activations HuggingFaceTB/SmolLM2-135M --text book.txt -o smollm2-text")
@spread
def activations(
    model: Model,
    *,
    text: Text = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Where to write the report; made if need be.")
    ] = None,
    layers: Layers = None,
    tokens: Annotated[int, typer.Option(min=0, help="At most so many tokens of it; 0 for all.")] = 16_384,
    length: Length = 256,
    first_position: Annotated[
        bool, typer.Option("--first-position", help="Let the first position of every sequence take part.")
    ] = False,
    contexts: Annotated[
        int,
        typer.Option(min=0, metavar="K", help="Keep the K strongest contexts of each sign quadrant of some neurons."),
    ] = 0,
    neurons: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER:NEURON,...|MEASURE",
            help="Which neurons --contexts is for: these, or the 3 of each layer that are highest by a measure.",
        ),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    opening: Folding,
    seed: Seed = 0,
    fresh: Fresh = False,
    figures: Figures = True,
    as_json: AsJson = False,
) -> None:
    """Run a text through the model and measure what its gated MLPs do.

    The weight report is made along with it, and each measure on text stands beside its value on Gaussian input. Needs
    memory for the whole model.
    """
    from ..text.activations import probe_text

    checkpoint = opening.open(model)
    result = save_report(
        out,
        figures,
        lambda: probe_text(
            checkpoint,
            text,
            layers=layers,
            tokens=tokens or None,
            length=length,
            first_position=first_position,
            contexts=contexts,
            neurons=neurons,
            device=device,
            dtype=dtype,
            report=lambda: weight_report(checkpoint, layers=layers, seed=seed),
            progress=progress("text", unit="batches"),
            estimate=estimate("running the text takes"),
        ),
        fresh=fresh,
    )
    if as_json:
        found = [] if result.contexts is None else records(result.contexts)
        facts = {"findings": result.findings, "contexts": found, "provenance": result.provenance}
        print_json({"directory": None if out is None else str(out), **facts})
        return
    echo("\n".join(result.findings))
    if result.contexts is not None:
        echo("")
        for row in result.contexts.itertuples():
            place = f"layer {row.layer} neuron {row.neuron}"
            echo(f"{place} {row.quadrant:<11} {row.value:>9.3g} {row.token!r} in {row.window!r}")
    if out is not None:
        echo(written(out, figures))
