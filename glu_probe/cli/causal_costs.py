"""The command that measures what breaking a symmetry costs: `causal`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .application import app
from .options import AsJson, Device, Dtype, Fresh, Layers, Length, Model, Opening, Out, Text, spread
from .printing import echo, estimate, notes, number, print_json, progress, records
from .saving import command_line, parts_directory

if TYPE_CHECKING:
    import pandas as pd

    from ..checkpoint.checkpoint import Checkpoint


@app.command(
    epilog="Example: glu-probe causal HuggingFaceTB/SmolLM2-135M --text book.txt -o smollm2-causal --layers 0:8"
)
@spread
def causal(
    model: Model,
    out: Out,
    *,
    text: Text = None,
    layers: Layers = None,
    interventions: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Which; all by default. `glu-probe ls interventions` says what there is."),
    ] = None,
    together: Annotated[bool, typer.Option("--together", help="Edit all these layers at once, not in turn.")] = False,
    tokens: Annotated[int, typer.Option(min=2, help="At most so many tokens to measure costs on.")] = 2048,
    calibration: Annotated[int, typer.Option(min=2, help="At most so many others for gauges and fits.")] = 4096,
    length: Length = 256,
    spare: Annotated[
        int, typer.Option(min=0, help="Run each intervention again with so many neurons left alone; 0 not to.")
    ] = 1,
    subset: Annotated[
        str | None,
        typer.Option(
            metavar="MEASURE:SHARE",
            help="Edit only the neurons that are highest by a measure, as exchange_asymmetry:0.1, and as a control as many "
            "random others of the same output energy.",
        ),
    ] = None,
    first_position: Annotated[
        bool, typer.Option("--first-position", help="Edit the first position of every sequence too.")
    ] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    opening: Opening,
    seed: Annotated[int, typer.Option(min=0, help="Of the random controls.")] = 0,
    fresh: Fresh = False,
    figures: Annotated[bool, typer.Option(help="Draw figures.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure what breaking a symmetry costs the model: loss and KL with a layer's neurons changed.

    Finished layers are kept in DIR/parts until all are: the same command goes on where it was interrupted. The first
    position of every sequence is left alone unless asked for; models park a massive activation there.
    """
    from ..text.causal import DEFAULT
    from ..text.causal import causal as run
    from ..text.saving import save_costs
    from ..text.texts import read_texts

    checkpoint = opening.open(model)
    source = [document.text for document in read_texts(text)] if text == "-" else text  # it can be read once
    common: dict[str, Any] = {
        "layers": layers,
        "length": length,
        "first_position": first_position,
        "device": device,
        "dtype": dtype,
    }
    with parts_directory(out, "costs", fresh=fresh) as parts:
        costs = run(
            checkpoint,
            source,
            interventions=DEFAULT if interventions is None else [name.strip() for name in interventions.split(",")],
            together=together,
            tokens=tokens,
            calibration=calibration,
            spare=spare,
            subset=None if subset is None else _subset(subset, checkpoint, source, tokens + calibration, common),
            seed=seed,
            parts=parts,
            progress=progress(checkpoint.name, unit="batches"),
            estimate=estimate("the runs take"),
            **common,
        )
        notes(checkpoint.notes)
        facts = checkpoint.provenance()
        notes(save_costs(costs, out, facts=facts, command=command_line(), figures=figures))
    if as_json:
        rows = records(costs, decimals=15)
        print_json({"directory": str(out), "costs": rows, "provenance": {**facts, **costs.attrs}})
        return
    echo(_costs_text(costs))
    echo(f"\nwrote {out / 'causal.csv'}")


def _subset(words: str, checkpoint: Checkpoint, text: Any, tokens: int, common: dict[str, Any]) -> tuple:
    """(measure, share), with the frame where the measure is one on text."""
    from ..errors import BadOption

    measure, _, said = words.rpartition(":")
    try:
        share = float(said)
    except ValueError:
        share = -1.0
    if not measure or not 0 < share <= 0.5:
        raise BadOption(
            f"subset {words!r} is not understood",
            hint="Write MEASURE:SHARE, as exchange_asymmetry:0.1; a share is at most 0.5",
        )
    from ..text.targets import refuse_unknown_measure

    refuse_unknown_measure(measure)
    if not measure.endswith("_text"):
        return measure, share
    from ..text.activations import probe_text

    return measure, share, probe_text(checkpoint, text, tokens=tokens, **common).neurons


def _costs_text(costs: pd.DataFrame) -> str:
    """A line for every intervention and kind of neurons."""
    lines = [
        f"{costs['n_tokens'].iloc[0]} tokens of {costs['n_sequences'].iloc[0]} sequences, "
        f"{costs.attrs['clean_loss']:.3f} nats each; nats that are added, median over layers and where most",
        f"{'intervention':<16} {'loss':>9} {'KL':>9} {'spared':>9} {'most KL':>9}  in layer",
    ]
    for (name, neurons), rows in costs.groupby(["intervention", "neurons"], sort=False):
        most = rows.loc[rows["kl"].idxmax()] if rows["kl"].notna().any() else rows.iloc[0]
        middle = [number(rows[column].median()) for column in ("delta_loss", "kl", "kl_spared")]
        cells = " ".join(f"{cell:>9}" for cell in (*middle, number(most["kl"])))
        lines.append(f"{name:<16} {cells}  {most['layers']}" + ("" if neurons == "all" else f"  ({neurons})"))
    return "\n".join(lines)
