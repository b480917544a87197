"""How far each neuron moved from one checkpoint to another, in ways that no choice of coordinates can change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..neurons import GatedLayer

PerNeuron = Float[np.ndarray, " d_mlp"]
_ROWS = 256
_SAMPLED = 128  # neurons whose counterpart is looked for in every pair of MLPs
_SUSPECTS = 512  # at most so many more, where only single neurons are out of place
_FAR = 0.5  # movement from which on a neuron's counterpart is looked for elsewhere
_ALIKE = 0.5  # mean |cosine| of the factors of two neurons that have something to do with each other
_CLEARLY = 0.1  # by how much another index must fit better


@dataclass(frozen=True)
class Counterparts:
    """Which neuron of the other MLP is which of the base.

    Attributes:
        identity: "index" (neuron i is neuron i), "permuted" (some or all are found at another index) or "unrelated".
        order: [d_mlp] index in the other MLP, -1 where none is left.
        own: share of sampled neurons whose most similar counterpart is at their own index.
        elsewhere: number of neurons found at another index.
    """

    identity: str
    order: Int[np.ndarray, " d_mlp"]
    own: float
    elsewhere: int


def counterparts(base: GatedLayer, other: GatedLayer) -> Counterparts:
    """Find out whether neurons keep their index.

    Two neurons are alike by the mean of cos(q, q'), |cos(k, k')| and |cos(v, v')|. Of 128 neurons the most similar one in the
    other MLP is looked for; the MLPs are unrelated if it is at the same index for less than half of them and not even
    alike (0.5) for half of them. Where some are alike to others, or single neurons seem to have moved far, those are looked
    for among all. Cost: 6 d_mlp d_model flops for every neuron that is looked for.
    """
    size = base.d_mlp
    order = np.arange(size)
    others = _units(other)
    usable = np.flatnonzero(_usable(base))
    if not usable.size:
        return Counterparts("unrelated", order, np.nan, 0)
    sampled = usable[np.unique(np.linspace(0, usable.size - 1, min(_SAMPLED, usable.size)).astype(int))]
    best, score, at_home = _most_similar(base, others, sampled)
    home = at_home >= score - 1e-6  # copies of one neuron are as good as each other
    own = float(home.mean())
    away = ~home & (score >= _ALIKE) & (score > at_home + _CLEARLY)
    if own < 0.5 and np.median(score) < _ALIKE:
        return Counterparts("unrelated", order, own, 0)
    suspects = usable[movement(base, other)["movement"][usable] > _FAR]
    if not away.any():
        suspects = suspects[:_SUSPECTS]
    if not suspects.size:
        return Counterparts("index", order, own, 0)
    best, score, at_home = _most_similar(base, others, suspects)
    found = (score >= _ALIKE) & (score > at_home + _CLEARLY)
    order = _reordered(order, suspects[found], best[found], score[found])
    elsewhere = int(((order != np.arange(size)) & (order >= 0)).sum())
    return Counterparts("permuted" if elsewhere else "index", order, own, elsewhere)


def _reordered(order: np.ndarray, neurons: np.ndarray, targets: np.ndarray, score: np.ndarray) -> np.ndarray:
    """The order with these neurons at their targets; of several with one target the most similar one stays."""
    order = order.copy()
    taken: set[int] = set()
    for place in np.argsort(-score, kind="stable"):
        target = int(targets[place])
        order[neurons[place]] = -1 if target in taken else target
        taken.add(target)
    remaining = np.setdiff1d(np.arange(len(order)), neurons)
    order[remaining[np.isin(remaining, list(taken))]] = -1
    return order


def _units(layer: GatedLayer) -> dict[str, Tensor]:
    return {role: torch.nn.functional.normalize(getattr(layer, role), dim=1) for role in ("query", "key", "value")}


def _usable(layer: GatedLayer) -> np.ndarray:
    """Neurons of which no row is zero or not finite."""
    norms = [
        torch.linalg.vector_norm(getattr(layer, role), dim=1, dtype=torch.float64) for role in ("query", "key", "value")
    ]
    return torch.stack([(norm > 0) & norm.isfinite() for norm in norms]).all(0).numpy()


def _most_similar(
    base: GatedLayer, others: dict[str, Tensor], neurons: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each: the index of the most similar neuron, how similar it is, and how similar the one at the own index is."""
    best, score, at_home = [], [], []
    for start in range(0, len(neurons), _ROWS):
        rows = torch.from_numpy(neurons[start : start + _ROWS])
        total: Tensor | None = None
        for role, unit in others.items():
            cosine = torch.nn.functional.normalize(getattr(base, role)[rows], dim=1) @ unit.T
            cosine = cosine if role == "query" else cosine.abs_()
            total = cosine if total is None else total.add_(cosine)
        assert total is not None  # there are three roles
        total = torch.nan_to_num_(total, nan=-3.0).div_(3)
        top = total.max(dim=1)
        best.append(top.indices)
        score.append(top.values)
        at_home.append(total.gather(1, rows[:, None])[:, 0])
    return torch.cat(best).numpy(), torch.cat(score).double().numpy(), torch.cat(at_home).double().numpy()


def movement(
    base: GatedLayer, other: GatedLayer, order: Int[np.ndarray, " d_mlp"] | None = None
) -> dict[str, PerNeuron]:
    """How far neuron i of the base is from neuron order[i] of the other; missing where that is -1 or a row is zero.

    * angle_q, angle_k, angle_v: between the directions of the factors, degrees from 0 to 180. The sign of (k, v) is no
      part of a neuron: it is taken, for both together, as it fits best. Their scale does not enter.
    * query_norm_relative: |q'| / |q| - 1.
    * value_gain_relative: |k'||v'| / (|k||v|) - 1; the norms of k and v alone are a choice of coordinates.
    * movement: |T' - T| / |T| with T = q (x) k (x) v, the neuron without its activation: 0 unmoved, sqrt(2) for a neuron of
      the same size that has nothing to do with it.

    Biases are not looked at.
    """
    size = base.d_mlp
    order = np.arange(size) if order is None else order
    ratio, near = {}, {}
    for role in ("query", "key", "value"):
        ratio[role], near[role] = _distances(getattr(base, role), getattr(other, role), order)
    # (k, v) and (-k, -v) are the same: the sign that leaves both cosines, 1 - 2 sin^2(angle / 2), largest in sum
    flip = near["key"] + near["value"] > 2.0
    apart = {"query": near["query"]} | {role: np.where(flip, 2.0 - near[role], near[role]) for role in ("key", "value")}
    with np.errstate(invalid="ignore"):
        angles = {role: np.degrees(2 * np.arcsin(np.sqrt(np.clip(apart[role] / 2, 0.0, 1.0)))) for role in apart}
        joint = apart["query"]
        for role in ("key", "value"):  # 1 - product of cosines, without losing small ones
            joint = joint + apart[role] - joint * apart[role]
        gain = ratio["key"] * ratio["value"]
        whole = ratio["query"] * gain
        moved = np.sqrt(np.maximum((whole - 1) ** 2 + 2 * whole * joint, 0.0))
    return {
        "angle_q": angles["query"],
        "angle_k": angles["key"],
        "angle_v": angles["value"],
        "query_norm_relative": ratio["query"] - 1,
        "value_gain_relative": gain - 1,
        "movement": moved,
    }


def _distances(base: Tensor, other: Tensor, order: np.ndarray) -> tuple[PerNeuron, PerNeuron]:
    """|other| / |base| and 1 - cosine of each pair of rows, in float64; exact for small angles."""
    ratio, apart = np.full(len(order), np.nan), np.full(len(order), np.nan)
    for start in range(0, len(order), _ROWS):
        rows = np.arange(start, min(start + _ROWS, len(order)))
        rows = rows[order[rows] >= 0]
        if not rows.size:
            continue
        one, two = base[rows].double(), other[order[rows]].double()
        norms = one.norm(dim=1), two.norm(dim=1)
        difference = one / norms[0][:, None] - two / norms[1][:, None]
        ratio[rows] = (norms[1] / norms[0]).numpy()
        apart[rows] = (difference.square().sum(1) / 2).numpy()
    return np.where(np.isfinite(ratio) & (ratio > 0), ratio, np.nan), apart
