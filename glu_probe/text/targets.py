"""Which neurons are edited at once, in which MLPs, and which of them change most."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..checkpoint.sites import Site
from ..errors import BadOption
from ..measures.registry import NEURON_MEASURES, TEXT_MEASURES

PerNeuron = Float[Tensor, " d_mlp"]
Place = tuple[Site, int]  # a neuron

_CLOSE = 0.01  # energies of a subset and its control differ by less, if that can be had
_JITTER = 2  # places to either side of the neuron of nearest energy
_SWAPS = 100
_RANKED = 64  # neurons of an MLP
_ON_TEXT = tuple(name for name, measure in TEXT_MEASURES.items() if measure.level == "neuron")


@dataclass(frozen=True, eq=False)
class Target:
    """What is edited at once.

    Attributes:
        layers: their indices in words, "7", "0-7" or "0,4-7".
        sites: the MLPs.
        neurons: "all", or which of them.
        masks: for a subset, 1 for neurons that are edited and 0 for the others.
        energy_share: of the output energy of these MLPs on the calibration text, the edited neurons' part.
        other_energy_share: that of the subset it is to be compared with, NaN if there is none.
    """

    layers: str
    sites: tuple[Site, ...]
    neurons: str = "all"
    masks: Mapping[Site, PerNeuron] | None = None
    energy_share: float = 1.0
    other_energy_share: float = float("nan")

    @property
    def first(self) -> int:
        """The lowest layer."""
        return min(site.layer for site in self.sites)

    @property
    def expert(self) -> int | str | None:
        """Its group of experts, where all of it is in one."""
        names = {site.expert for site in self.sites}
        return names.pop() if len(names) == 1 else None

    def label(self, place: Place) -> str:
        """A neuron in words: its index, with the layer in front where there are several MLPs."""
        site, neuron = place
        return str(neuron) if len(self.sites) == 1 else f"{site.layer}:{neuron}"


def targets_of(sites: Sequence[Site], together: bool) -> list[Target]:
    """One target per MLP, or one for all."""
    if together:
        return [Target(_span({site.layer for site in sites}), tuple(sites))]
    return [Target(str(site.layer), (site,)) for site in sites]


def _span(layers: set[int]) -> str:
    """Indices in words.

    >>> _span({0, 4, 5, 6})
    '0,4-6'
    """
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def with_subsets(
    targets: Sequence[Target],
    energies: Mapping[Site, PerNeuron],
    measure: str,
    share: float,
    frame: pd.DataFrame,
    seed: int,
) -> list[Target]:
    """Each target twice: its neurons with the largest values, and as many random others of the same output energy.

    Args:
        targets: whole MLPs.
        energies: E[g^2] |v|^2 of every neuron.
        measure: column of the frame.
        share: of the neurons of each MLP, up to a half.
        frame: neurons, with tower, layer and expert.
        seed: of the random ones, which depend on nothing else but the MLP.

    Raises:
        BadOption: there is no such column, or no such share.
    """
    chosen = {}
    for target in targets:
        for site in target.sites:
            values = _values(site, measure, share, frame)
            rng = np.random.default_rng([seed, site.layer, site.group == "shared"])
            chosen[site] = _top_and_control(values, share, energies[site].double().numpy(), rng)
    out = []
    for target in targets:
        whole = sum(energies[site].double().sum() for site in target.sites)
        masks = [{site: chosen[site][which] for site in target.sites} for which in (0, 1)]
        shares = [float(sum((energies[s].double() * m[s]).sum() for s in target.sites) / whole) for m in masks]
        words = (f"top {100 * share:g} % by {measure}", "random of equal energy")
        out += [
            Target(target.layers, target.sites, words[which], masks[which], shares[which], shares[1 - which])
            for which in (0, 1)
        ]
    return out


def refuse_unknown_measure(measure: str, known: Iterable[str] = ()) -> None:
    """Make sure that a column of the neuron frame, on Gaussian input or on text, can have this name.

    Args:
        measure: the name.
        known: further columns that there are.

    Raises:
        BadOption: it is none; the hint has those that there are.
    """
    if measure not in {*NEURON_MEASURES, *_ON_TEXT, *known}:
        near = difflib.get_close_matches(measure, [*NEURON_MEASURES, *_ON_TEXT], n=1)
        hint = f"Did you mean {near[0]}? {_known()}" if near else _known()
        raise BadOption(f"there is no measure of neurons called {measure!r}", hint=hint)


def _known() -> str:
    return f"There are {', '.join(NEURON_MEASURES)}; and on text {', '.join(_ON_TEXT)}"


def _values(site: Site, measure: str, share: float, frame: pd.DataFrame) -> np.ndarray:
    absent = [name for name in ("tower", "layer", "expert", measure) if name not in frame]
    if absent:
        if absent == [measure]:
            refuse_unknown_measure(measure, [name for name in frame if pd.api.types.is_numeric_dtype(frame[name])])
        raise BadOption(f"the neuron frame has no column {absent[0]!r}", hint="Give report.neurons as it is")
    if not pd.api.types.is_numeric_dtype(frame[measure]):
        raise BadOption(f"{measure!r} is no number by which neurons could be ordered", hint=_known())
    expert = frame["expert"].astype(object).where(frame["expert"].notna(), None)
    here = (frame["tower"] == site.tower) & (frame["layer"] == site.layer)
    rows = frame[here & (expert.isna() if site.expert is None else expert.astype(str) == str(site.expert))]
    values = rows[measure].to_numpy(dtype=float)
    if len(values) != site.d_mlp:
        raise BadOption(
            f"the neuron frame has {len(values)} neurons of {site.where}, and the model {site.d_mlp}",
            hint="Give the frame of a report of the same layers",
        )
    if not 0 < share <= 0.5 or np.isfinite(values).sum() < 2 * _count(share, len(values)):
        raise BadOption(
            f"{share!r} of the neurons of {site.where} cannot be chosen by {measure} with as many others left",
            hint="Give a share above 0 and up to 0.5, and a measure that most neurons have",
        )
    return values


def _count(share: float, neurons: int) -> int:
    return max(1, round(share * neurons))


def _top_and_control(
    values: np.ndarray, share: float, energy: np.ndarray, rng: np.random.Generator
) -> tuple[PerNeuron, PerNeuron]:
    """Masks of the neurons with the largest values, and of random others, alike one by one and in their sum."""
    top = np.argsort(-np.where(np.isfinite(values), values, -np.inf), kind="stable")[: _count(share, len(values))]
    outside = np.setdiff1d(np.arange(len(values)), top)
    left = outside[np.argsort(energy[outside], kind="stable")].tolist()  # by energy
    control = []
    for neuron in rng.permutation(top):
        at = int(np.searchsorted(energy[left], energy[neuron])) + int(rng.integers(-_JITTER, _JITTER + 1))
        control.append(left.pop(min(max(at, 0), len(left) - 1)))
    _balance(control, left, energy, float(energy[top].sum()), rng)
    masks = torch.zeros(2, len(values))
    masks[0, torch.from_numpy(top.copy())] = 1
    masks[1, torch.tensor(control)] = 1
    return masks[0], masks[1]


def _balance(control: list[int], left: list[int], energy: np.ndarray, wanted: float, rng: np.random.Generator) -> None:
    """Swap neurons of the control for others until its energy is as wanted, or no swap brings it nearer."""
    for _ in range(_SWAPS if left else 0):
        gap = wanted - energy[control].sum()
        if abs(gap) <= _CLOSE * wanted:
            return
        left.sort(key=lambda neuron: energy[neuron])
        inside, outside = energy[control], energy[left]
        above = np.minimum(np.searchsorted(outside, inside + gap), len(left) - 1)
        near = np.stack([np.maximum(above - 1, 0), above])  # [2, control]: of which one fits best
        gaps = np.abs(gap - (outside[near] - inside))
        fitting = np.argwhere(gaps <= _CLOSE * wanted)
        side, place = rng.choice(fitting) if len(fitting) else np.unravel_index(gaps.argmin(), gaps.shape)
        if not gaps[side, place] < abs(gap):
            return
        at = near[side, place]
        control[place], left[at] = left[at], control[place]


def ranking(target: Target, changes: Mapping[Site, PerNeuron]) -> list[Place]:
    """The target's neurons by falling energy of their change, at most 64 of each MLP; those that do not change are left out."""
    every: list[tuple[float, Any, int]] = []
    for site in target.sites:
        energy = changes[site] if target.masks is None else changes[site] * target.masks[site]
        top = energy.topk(min(_RANKED, len(energy)))
        every += [
            (value, site, neuron) for value, neuron in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        ]
    every.sort(key=lambda one: -one[0])
    return [(site, neuron) for value, site, neuron in every if value > 0]
