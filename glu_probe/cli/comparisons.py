"""The command that puts models beside each other: `compare`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from .application import app
from .options import AsJson, Exact, Folding, Fresh, Layers, Out, Samples, Seed, spread
from .printing import echo, notes, print_json, progress
from .saving import command_line, output_directory


@app.command(
    epilog="Examples: glu-probe compare base tuned -o compared; glu-probe compare org/name@step1000 org/name@step2000 "
    "org/name@main -o run; glu-probe compare smollm2-report gemma-report -o sizes"
)
@spread
def compare(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help="Models, or directories of saved reports; the first is the base."),
    ],
    out: Out,
    *,
    align: Annotated[
        str | None,
        typer.Option(
            metavar="layer|depth", help="By index, or by relative depth; by default as the models' depths allow."
        ),
    ] = None,
    layers: Layers = None,
    neurons: Annotated[
        bool | None,
        typer.Option("--neurons/--no-neurons", help="Follow single neurons; by default where both have the same ones."),
    ] = None,
    rounding: Annotated[
        bool, typer.Option(help="Measure what rounding of the weights explains; takes as long again.")
    ] = True,
    opening: Folding,
    seed: Seed = 0,
    samples: Samples = None,
    exact: Exact = False,
    fresh: Fresh = False,
    figures: Annotated[bool, typer.Option(help="Draw figures and compare.html.")] = True,
    as_json: AsJson = False,
) -> None:
    """Compare models: base and tuned, revisions, sizes, quantisations."""
    from ..across.comparing import compare as run

    chosen = {
        field.name: value
        for field in dataclasses.fields(opening)
        if (value := getattr(opening, field.name)) != field.default
    }
    with output_directory(out, "comparison", fresh=fresh, after_failure=lambda: f"nothing was written to {out}"):
        result = run(
            *models, align=align, neurons=neurons, rounding=rounding, layers=layers, seed=seed, samples=samples, exact=exact,
            progress=_bar, **chosen,
        )  # fmt: skip
    result.provenance["command"] = command_line()
    notes(result.provenance["notes"])
    notes(result.save(out, figures=figures))
    if as_json:
        print_json({"directory": str(out), "findings": result.findings, "provenance": result.provenance})
        return
    echo("\n".join(result.findings))
    frames = "layers, differences, neurons, mlps, provenance"
    echo(f"\nwrote {out / 'compare.html' if figures else f'{out}: {frames}'}")


def _bar(what: str, steps: Iterable[Any]) -> Iterable[Any]:
    return progress(what, unit="MLPs")(steps)
