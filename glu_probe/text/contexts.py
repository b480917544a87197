"""Where in the text a neuron does most: the strongest contexts of each sign quadrant of (a, b), in bounded memory.

A neuron S(a) b v has four regimes, by the signs of a and b; a summary over all tokens hides them. b is taken in the
canonical gauge of the sample, so that quadrants and values belong to the function and not to its parametrisation.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..activations import Activation
from ..checkpoint.sites import Site
from ..errors import BadOption
from .tokens import Tokens

QUADRANTS = ("plus_plus", "plus_minus", "minus_plus", "minus_minus")  # signs of a and b
_BEFORE, _AFTER = 12, 4  # tokens of a window around the one in question
_PER_MLP = 3  # neurons where they are chosen by a measure
_PAIRS = re.compile(r"\s*\d+\s*:\s*\d+\s*(,\s*\d+\s*:\s*\d+\s*)*")

Neurons = Sequence[tuple[int, int] | tuple[int, int | str, int]] | str | None


def choose_neurons(neurons: Neurons, frame: pd.DataFrame, sites: Sequence[Site]) -> dict[Site, list[int]]:
    """The neurons that are meant, by MLP.

    Args:
        neurons: pairs (layer, neuron), or triples (layer, expert, neuron) where a layer has several MLPs; the pairs as
            text, "27:100,5:3"; the name of a column of the neuron frame, for the three highest of each MLP; None for
            the column output_energy, or value_gain where that is missing.
        frame: the neuron frame of the weight report.
        sites: MLPs that can be listened to.

    Raises:
        BadOption: there is no such neuron or column, or it has no values.
    """
    if isinstance(neurons, str) and _PAIRS.fullmatch(neurons):
        pairs = (pair.split(":") for pair in neurons.split(","))
        neurons = [(int(layer), int(neuron)) for layer, neuron in pairs]
    if neurons is None or isinstance(neurons, str):
        return _highest(neurons, frame, sites)
    chosen: dict[Site, list[int]] = {}
    for place in neurons:
        layer, *expert, neuron = place
        here = [site for site in sites if site.layer == layer and (not expert or site.expert == expert[0])]
        if len(here) != 1:
            raise BadOption(
                f"layer {layer} has {len(here)} MLPs that can be listened to{f' for {expert[0]!r}' if expert else ''}",
                hint=f"Give (layer, expert, neuron), with experts {', '.join(repr(site.expert) for site in here)}"
                if here
                else f"There are layers {', '.join(map(str, dict.fromkeys(site.layer for site in sites)))}",
            )
        if not 0 <= neuron < here[0].d_mlp:
            raise BadOption(f"layer {layer} has no neuron {neuron}", hint=f"It has neurons 0 to {here[0].d_mlp - 1}")
        if neuron not in chosen.setdefault(here[0], []):
            chosen[here[0]].append(neuron)
    if not chosen:
        raise BadOption("no neurons are given", hint="Give (layer, neuron) pairs, or the name of a measure")
    return chosen


def _highest(name: str | None, frame: pd.DataFrame, sites: Sequence[Site]) -> dict[Site, list[int]]:
    if name is None:
        name = "output_energy" if frame["output_energy"].notna().any() else "value_gain"
    if name not in frame or frame[name].dtype.kind != "f":
        numbers = [column for column in frame if frame[column].dtype.kind == "f"]
        near = difflib.get_close_matches(name, numbers, n=3)
        raise BadOption(
            f"{name!r} is not a measure of neurons",
            hint=f"Did you mean {' or '.join(near)}?"
            if near
            else "Write LAYER:NEURON,LAYER:NEURON or a measure's name",
        )
    chosen = {}
    for site in sites:
        values = frame.loc[rows_of(frame, site), name].to_numpy(dtype=float)
        known = np.flatnonzero(np.isfinite(values))
        if known.size:
            chosen[site] = known[np.argsort(-values[known], kind="stable")][:_PER_MLP].tolist()
    if not chosen:
        raise BadOption(f"every value of {name!r} is missing", hint="Choose neurons by another measure, or by number")
    return chosen


def rows_of(frame: pd.DataFrame, site: Site) -> np.ndarray:
    """Which rows of a neuron frame are this MLP's, as a mask."""
    expert = "" if site.expert is None else str(site.expert)
    mask = (frame["tower"] == site.tower) & (frame["layer"] == site.layer) & (frame["expert"].fillna("") == expert)
    return mask.to_numpy(dtype=bool)


@dataclass
class _Kept:
    """The strongest so far of one MLP's neurons, [neuron, quadrant, rank] each; value 0 where there is none yet."""

    neurons: list[int]
    act: Activation
    gauge: Float[Tensor, " neuron"]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


class TopContexts:
    """The tokens with the largest |S(a) b| of each quadrant, for some neurons.

    Memory is that of what is kept: it does not grow with the text.
    """

    def __init__(self, chosen: Mapping[Site, list[int]], count: int) -> None:
        """For these neurons, `count` contexts in each quadrant."""
        self.chosen, self.count = dict(chosen), count
        self._kept: dict[Site, _Kept] = {}

    def start(self, site: Site, act: Activation, gauge: Float[Tensor, " d_mlp"]) -> None:
        """Before the first `update` of an MLP: its gate, and what its b are multiplied by."""
        neurons = self.chosen[site]
        shape = (len(neurons), len(QUADRANTS), self.count)
        arrays = {"value": np.zeros(shape), "sequence": np.full(shape, -1), "position": np.full(shape, -1)}
        self._kept[site] = _Kept(neurons, act, gauge[neurons], arrays)

    def update(
        self,
        site: Site,
        a: Float[Tensor, "position d_mlp"],
        b: Float[Tensor, "position d_mlp"],
        sequence: int,
        first: int,
    ) -> None:
        """Add the tokens of one sequence, as the model computes them.

        Args:
            site: the MLP.
            a, b: its pre-activations, from position `first` of the sequence on.
            sequence: its number.
            first: position of the first row.
        """
        if site not in self._kept:
            return
        kept = self._kept[site]
        a, b = a[:, kept.neurons], b[:, kept.neurons]
        b = b * kept.gauge.to(b)
        g = (kept.act(a) * b).T  # [neuron, position]
        quadrant = (2 * (a <= 0) + (b <= 0).long()).T
        # a ReLU that is off is in no context: values of exactly 0 are never kept
        sizes = torch.stack([torch.where(quadrant == index, g.abs(), 0.0) for index in range(len(QUADRANTS))], 1)
        _, best = sizes.topk(min(self.count, sizes.shape[-1]), dim=-1)
        inside = sizes.gather(-1, best) > 0
        values = torch.where(inside, g[:, None].expand_as(sizes).gather(-1, best), 0.0)
        found = {
            "value": values.double().cpu().numpy(),
            "position": (best + first).cpu().numpy(),
            "sequence": np.full(tuple(best.shape), sequence),
        }
        joined = {name: np.concatenate([kept.arrays[name], found[name]], axis=-1) for name in kept.arrays}
        # ties go to the earlier place, so that the order in which sequences come does not matter
        order = np.lexsort((joined["position"], joined["sequence"], -np.abs(joined["value"])), axis=-1)[
            ..., : self.count
        ]
        kept.arrays = {name: np.take_along_axis(values, order, axis=-1) for name, values in joined.items()}

    def frame(self, model: str, tokens: Tokens, tokenizer: Any) -> pd.DataFrame:
        """One row per context: model, tower, layer, expert, neuron, quadrant, rank, value, sequence, position, token, window.

        `value` is S(a) b with b in the canonical gauge; `window` the text around the token. Quadrants in which the
        neuron never is have no rows.
        """
        rows = []
        for site, kept in self._kept.items():
            for index in np.ndindex(*kept.arrays["value"].shape):
                if kept.arrays["value"][index] == 0:
                    continue
                sequence, position = (int(kept.arrays[name][index]) for name in ("sequence", "position"))
                ids = tokens.sequences[sequence].tolist()
                rows.append(
                    {
                        "model": model,
                        "tower": site.tower,
                        "layer": site.layer,
                        "expert": None if site.expert is None else str(site.expert),
                        "neuron": kept.neurons[index[0]],
                        "quadrant": QUADRANTS[index[1]],
                        "rank": index[2] + 1,
                        "value": kept.arrays["value"][index],
                        "sequence": sequence,
                        "position": position,
                        "token": tokenizer.decode([ids[position]]),
                        "window": tokenizer.decode(ids[max(0, position - _BEFORE) : position + _AFTER + 1]),
                    }
                )
        columns = ("model", "tower", "layer", "expert", "neuron", "quadrant", "rank", "value", "sequence", "position")
        frame = pd.DataFrame(rows, columns=[*columns, "token", "window"])
        words = dict.fromkeys(("model", "tower", "expert", "quadrant", "token", "window"), "string")
        numbers = {"layer": "int32", "neuron": "int32", "rank": "int32", "sequence": "int32", "position": "int32"}
        return frame.astype(words | numbers | {"value": "float32"})
