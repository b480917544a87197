"""The command that shows one neuron: `neuron`."""

from __future__ import annotations

from typing import Annotated

import typer

from .application import app
from .options import AsJson, InputFolding, Model, spread
from .printing import echo, notes, number, print_json


@app.command(epilog="Example: glu-probe neuron HuggingFaceTB/SmolLM2-135M 27 100")
@spread
def neuron(
    model: Model,
    layer: Annotated[int, typer.Argument(min=0, help="Layer index.")],
    neuron: Annotated[int, typer.Argument(min=0, help="Neuron index.")],
    *,
    expert: Annotated[str | None, typer.Option(help="Routed expert's index, or shared.")] = None,
    opening: InputFolding,
    as_json: AsJson = False,
) -> None:
    """Show one neuron against its layer."""
    from ..card import neuron_card

    checkpoint = opening.open(model)
    which = int(expert) if expert is not None and expert.isdigit() else expert
    factors = checkpoint.layer(layer, expert=which)
    card = neuron_card(factors, neuron)
    if as_json:
        measures = {row.measure: None if row.value != row.value else row.value for row in card.itertuples()}
        place = {"model": checkpoint.name, "layer": layer, "neuron": neuron}
        print_json({**place, **card.attrs, "measures": measures})
        return
    notes(checkpoint.notes)
    echo(f"{checkpoint.name}, layer {layer}, neuron {neuron}: {card.attrs['io_class'] or 'no class'}")
    if card.attrs["flags"]:
        echo(f"flags: {', '.join(card.attrs['flags'])}")
    echo(f"\n{'measure':<20} {'value':>12} {'layer median':>13} {'percentile':>11}")
    for row in card.itertuples():
        percentile = "-" if row.percentile != row.percentile else f"{row.percentile:.0f}"
        name = row.measure + " *" * (row.measure in card.attrs["gauge_dependent"])
        echo(f"{name:<20} {number(row.value):>12} {number(row.layer_median):>13} {percentile:>11}")
    echo("* a choice of coordinates: says nothing by itself")
