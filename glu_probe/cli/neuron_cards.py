"""The command that shows one neuron: `neuron`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .application import app
from .options import AsJson, Folding, Model, spread
from .printing import echo, print_json


@app.command(epilog="Example: glu-probe neuron HuggingFaceTB/SmolLM2-135M 27 100 --report smollm2-text")
@spread
def neuron(
    model: Model,
    layer: Annotated[int, typer.Argument(min=0, help="Layer index.")],
    neuron: Annotated[int, typer.Argument(min=0, help="Neuron index.")],
    *,
    expert: Annotated[str | None, typer.Option(help="Routed expert's index, or shared.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="What `glu-probe activations --contexts` wrote, for the neuron's contexts."),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="So many tokens on each side; 0 to read no vocabulary.")] = 10,
    opening: Folding,
    as_json: AsJson = False,
) -> None:
    """Show one neuron: its numbers against its layer, its nearest neighbours, the tokens it reads and writes, and the
    contexts in which it does most.

    "By chance" is the largest cosine to be expected of as many isotropic directions, "typical" the median over the
    layer's neurons.
    """
    from ..card import neuron_card

    which = int(expert) if expert is not None and expert.isdigit() else expert
    card = neuron_card(opening.open(model), layer, neuron, which, report, top=top)
    if as_json:
        print_json(card.to_dict())
    else:
        echo(str(card))
