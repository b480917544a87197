"""One neuron on one card: numbers against its layer, neighbours, tokens, contexts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from .arguments import whole_number
from .checkpoint.checkpoint import Checkpoint, open_checkpoint
from .checkpoint.sites import Site
from .errors import BadOption
from .measures.io_classes import IO_CLASSES
from .measures.neighbours import FACTORS, nearest_neighbours
from .measures.neuron import flags, neuron_measures
from .measures.products import row_products
from .measures.registry import MEASURES, NEURON_MEASURES
from .neurons import GatedLayer
from .report import Report
from .vocabulary import Reading, read_tokens, tokens_frame

Contexts = Report | str | os.PathLike | None


@dataclass(frozen=True, eq=False, repr=False)
class NeuronCard:
    """What there is to know of one neuron. Prints as text, and as tables in a notebook.

    Attributes:
        model, tower, layer, expert, neuron: which one it is.
        io_class: its input-output class at threshold 1/2, None where a cosine is missing.
        flags: what is odd about it ("zero_gate", "duplicated", ...).
        measures: a row per measure: measure, value, layer_median, percentile (of neurons in the layer that lie below, 0 to
            100), gauge (False for those that are a choice of coordinates), meaning.
        neighbours: its nearest neighbours in q, k and v; see `glu_probe.measures.nearest_neighbours`.
        tokens: what it reads and writes in terms of the vocabulary: factor, side, rank, token_id, token, cosine, null; k and v
            flipped together so that E[ab] >= 0 on isotropic input.
        contexts: where in a text it does most, by sign quadrant of (a, b): rows of `Report.contexts`.
        missing: part of the card ("tokens of query", "contexts", ...) to the reason why it is not there.
        notes: how tokens were read, and what a reader must know of the checkpoint, one sentence each.
    """

    model: str
    tower: str
    layer: int
    expert: int | str | None
    neuron: int
    io_class: str | None
    flags: list[str]
    measures: pd.DataFrame
    neighbours: pd.DataFrame
    tokens: pd.DataFrame
    contexts: pd.DataFrame
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"NeuronCard({self.model}: {self.place})"

    @property
    def place(self) -> str:
        """Where it stands, in words."""
        tower = "" if self.tower == "text" else f"{self.tower} "
        expert = "" if self.expert is None else f", expert {self.expert}"
        return f"{tower}layer {self.layer}{expert}, neuron {self.neuron}"

    def to_dict(self) -> dict[str, Any]:
        """Everything on it, JSON-ready; frames as lists of rows, with None for what is missing."""
        frames = {name: getattr(self, name) for name in ("measures", "neighbours", "tokens", "contexts")}
        rest = ("model", "tower", "layer", "expert", "neuron", "io_class", "flags")
        rows = {
            name: json.loads(frame.to_json(orient="records", double_precision=15)) for name, frame in frames.items()
        }
        return {name: getattr(self, name) for name in rest} | rows | {"missing": self.missing, "notes": self.notes}

    def __str__(self) -> str:
        from .card_text import card_text

        return card_text(self)

    def _repr_html_(self) -> str:
        from .card_text import card_html

        return card_html(self)


def neuron_card(
    model: str | os.PathLike | Checkpoint,
    layer: int,
    neuron: int,
    expert: int | str | None = None,
    report: Contexts = None,
    *,
    tower: str = "text",
    top: int = 10,
    neighbours: int = 5,
    tokenizer: Any = None,
    **options: Any,
) -> NeuronCard:
    """Everything that is known of one neuron.

    Args:
        model: a reference as `open_checkpoint` takes it, or an opened checkpoint.
        layer, neuron, expert, tower: which one; see `Checkpoint.layer`.
        report: a report of this model, or its directory, with contexts of the neuron: one of `probe_text(contexts=...)`.
        top: tokens on each side; 0 to read no vocabulary.
        neighbours: nearest neighbours in each factor.
        tokenizer: a transformers tokenizer, instead of the one that comes with the model.
        **options: of `open_checkpoint`, if `model` is a reference.

    Raises:
        BadOption: there is no such neuron, or the report is of another model.
        GluProbeError: another of its subclasses, as of `open_checkpoint` and `load_report`.
    """
    top, neighbours = whole_number("top", top, 0), whole_number("neighbours", neighbours, 0)
    checkpoint = _opened(model, options)
    site = checkpoint.site(layer, expert, tower)
    if isinstance(neuron, bool) or not isinstance(neuron, (int, np.integer)) or not 0 <= neuron < site.d_mlp:
        raise BadOption(
            f"there is no neuron {neuron!r}", where=f"layer {layer}", hint=f"It has neurons 0 to {site.d_mlp - 1}"
        )
    missing: dict[str, str] = {}
    contexts = _contexts(
        report, checkpoint, site, int(neuron), missing
    )  # what is wrong with it is said before the work
    factors = checkpoint.load(site).detach()
    products = row_products(factors)
    values, odd = neuron_measures(factors, products), flags(factors, products)
    near = nearest_neighbours(factors, int(neuron), neighbours, products=products)
    if neighbours:
        none = [factor for factor in FACTORS if not (near["factor"] == factor).any()]
        missing |= {f"neighbours of {factor}": "its row is zero or not finite, or there is no other" for factor in none}
    reading = read_tokens(checkpoint, site, factors, neuron, count=top, tokenizer=tokenizer) if top else _no_reading()
    missing |= {f"tokens of {factor}": reason for factor, reason in reading.missing.items()}
    index = int(values["io_class"][neuron])
    return NeuronCard(
        model=checkpoint.name, tower=site.tower, layer=site.layer, expert=site.expert, neuron=int(neuron),
        io_class=IO_CLASSES[index] if index >= 0 else None,
        flags=[name for name, where in odd.items() if where[neuron]],
        measures=_measures(values, neuron), neighbours=near, tokens=reading.tokens, contexts=contexts,
        missing=missing, notes=[*_about(factors), *reading.notes, *checkpoint.notes],
    )  # fmt: skip


def _opened(model: Any, options: dict[str, Any]) -> Checkpoint:
    if isinstance(model, Checkpoint):
        if options:
            raise BadOption(
                f"{', '.join(sorted(options))} given for a checkpoint that is already open",
                hint="Give them to open_checkpoint",
            )
        return model
    if not isinstance(model, (str, os.PathLike)):
        raise BadOption(
            f"a card cannot be made from {type(model).__name__}", hint="Give a model's name, a path, or a Checkpoint"
        )
    return open_checkpoint(model, **options)


def _contexts(
    report: Contexts, checkpoint: Checkpoint, site: Site, neuron: int, missing: dict[str, str]
) -> pd.DataFrame:
    """The rows of the report about this neuron; where there are none, the reason goes to `missing`."""
    none = pd.DataFrame({name: pd.Series(dtype=object) for name in ("quadrant", "rank", "value", "token", "window")})
    place = f"{site.layer}:{neuron}"
    if report is None:
        missing["contexts"] = "no report is given; `glu-probe activations` makes one"
        return none
    if not isinstance(report, Report):
        report = Report.load(report)
    other = report.provenance.get("model")
    if other != checkpoint.name:
        raise BadOption(
            f"the report is of {other!r}, not of {checkpoint.name!r}",
            hint="Give the report of the model that the card is of",
        )
    if report.contexts is None:
        missing["contexts"] = (
            f"the report has none; `glu-probe activations ... --contexts 5 --neurons {place}` makes some"
        )
        return none
    frame = report.contexts
    expert = "" if site.expert is None else str(site.expert)
    here = (frame["tower"] == site.tower) & (frame["layer"] == site.layer) & (frame["expert"].fillna("") == expert)
    found = frame[here & (frame["neuron"] == neuron)].reset_index(drop=True)
    if not len(found):
        missing["contexts"] = f"the report has those of other neurons; `--neurons {place}` asks for this one"
    return found


def _measures(values: dict[str, np.ndarray], neuron: int) -> pd.DataFrame:
    rows = []
    for name in NEURON_MEASURES:
        known = values[name][np.isfinite(values[name])]
        value = float(values[name][neuron])
        below = float((known < value).mean() * 100) if np.isfinite(value) else np.nan
        median = float(np.median(known)) if known.size else np.nan
        measure = MEASURES[name]
        rows.append((name, value, median, below, "gauge" in measure.invariant, measure.meaning))
    return pd.DataFrame(rows, columns=["measure", "value", "layer_median", "percentile", "gauge", "meaning"])


def _about(layer: GatedLayer) -> list[str]:
    reason = layer.functional_note()
    return [] if reason is None else [f"measures of its function are missing: {reason}"]


def _no_reading() -> Reading:
    return Reading(tokens_frame(), dict.fromkeys(FACTORS, "it was not asked for"), [])
