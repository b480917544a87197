"""The layer as one third-order tensor T = sum_j q_j (x) k_j (x) v_j: what is left of it when gate and up are exchanged.

T does not change with the gauge or the order of neurons. It is the layer's function where the gate is linear; with
another gate the coefficients of `interaction.bilinear_coefficients` weight its terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import BadOption
from ..neurons import GatedLayer

_EXACT_FLOPS = 2e10
_COST = 2_000_000_000  # samples x weights of one matrix spent by default
_ROWS = 256


@dataclass(frozen=True)
class UnitFactors:
    """Directions of the three factors and the size of each neuron's term, so that no product leaves its range.

    Attributes:
        query, key, value: [neuron, d_model] float64 rows of norm 1.
        weight: [neuron] |q||k||v|, scaled to a largest of 1.
    """

    query: Float[Tensor, "neuron d_model"]
    key: Float[Tensor, "neuron d_model"]
    value: Float[Tensor, "neuron d_model"]
    weight: Float[Tensor, " neuron"]


def unit_factors(layer: GatedLayer, usable: np.ndarray | None = None) -> tuple[UnitFactors, np.ndarray]:
    """Of the neurons whose three rows are finite and not zero, and `usable` where that is given; and their indices."""
    parts, logs = [], torch.zeros(layer.d_mlp, dtype=torch.float64)
    live = torch.ones(layer.d_mlp, dtype=torch.bool) if usable is None else torch.from_numpy(usable)
    for factor in (layer.query, layer.key, layer.value):
        rows = factor.detach().double()
        norm = rows.norm(dim=1)
        live = live & (norm > 0) & norm.isfinite()
        parts.append(rows / norm[:, None])
        logs += norm.log()
    logs = logs[live]
    weight = (logs - logs.max()).exp() if len(logs) else logs
    return UnitFactors(*(part[live] for part in parts), weight), live.nonzero().flatten().numpy()


def tensor_asymmetry(
    layer: GatedLayer,
    *,
    exact: bool | None = None,
    samples: int | None = None,
    seed: int = 0,
    usable: np.ndarray | None = None,
) -> tuple[float, float, str]:
    """Share of the tensor's energy that changes sign under exchange: (1 - <T, T^t> / |T|^2) / 2, T^t = T with q and k swapped.

    0 for a symmetric layer, 1 for an antisymmetric one, 1/2 if T and T^t are orthogonal, as random ones nearly are.

    Args:
        layer: its factors; biases play no part.
        exact: by the Gram matrices of the factors, 5 d_mlp^2 d_model flops, or from samples of
            F(x, y) = sum_j (q_j.x)(k_j.y) v_j at independent normal x, y, 12 d_mlp d_model flops each; None for exact up
            to 2e10 flops, about 2500 neurons of width 600.
        samples: number of pairs (x, y), at least 2; None for as many as a fixed cost buys, 32 to 1024.
        seed: of the samples.
        usable: [d_mlp] bool, the neurons that take part; None for all whose rows are finite and not zero.

    Returns:
        The share, its standard error (0 where exact) and how it was found, in words. NaN where no neuron is left.

    Raises:
        BadOption: fewer than 2 samples.
    """
    if samples is not None and (not isinstance(samples, int) or samples < 2):
        raise BadOption(f"samples is {samples!r}", hint="A standard error needs at least 2")
    exact = 5 * layer.d_mlp**2 * layer.d_model <= _EXACT_FLOPS if exact is None else exact
    units, _ = unit_factors(layer, usable)
    how = "exact"
    if not exact:
        samples = samples or int(np.clip(_COST // (layer.d_mlp * layer.d_model), 32, 1024))
        how = f"{samples} random pairs"
    if not len(units.weight):
        return math.nan, math.nan, how
    if not exact:
        return *_sampled(units, samples, np.random.default_rng(seed)), how
    kept, swapped = _inner_products(units)
    return float(np.clip((1 - swapped / kept) / 2, 0.0, 1.0)), 0.0, how


def _inner_products(units: UnitFactors) -> tuple[float, float]:
    """<T, T> and <T, T^t>, block by block of the upper triangle."""
    kept = swapped = 0.0
    count = len(units.weight)
    for start in range(0, count, _ROWS):
        rows, rest = slice(start, min(start + _ROWS, count)), slice(start, None)
        outputs = (units.value[rows] * units.weight[rows, None]) @ (units.value[rest] * units.weight[rest, None]).T
        # the block on the diagonal is whole, the part right of it stands for its mirror image too
        outputs[:, rows.stop - start :] *= 2
        query, key = units.query[rows], units.key[rows]
        kept += ((query @ units.query[rest].T) * (key @ units.key[rest].T) * outputs).sum().item()
        swapped += ((query @ units.key[rest].T) * (key @ units.query[rest].T) * outputs).sum().item()
    return kept, swapped


def _sampled(units: UnitFactors, samples: int, rng: np.random.Generator) -> tuple[float, float]:
    """|F(x, y) - F(y, x)|^2 over 2 (|F(x, y)|^2 + |F(y, x)|^2) in the mean, with its standard error (delta method)."""
    x, y = torch.from_numpy(rng.standard_normal((2, samples, units.query.shape[1])))
    forth, back = bilinear_map(units, x, y), bilinear_map(units, y, x)
    difference = (forth - back).square().sum(1)
    energy = 2 * (forth.square().sum(1) + back.square().sum(1))
    share = (difference.mean() / energy.mean()).item()
    spread = ((difference - share * energy) / energy.mean()).std().item()
    return share, spread / math.sqrt(samples)


def bilinear_map(
    units: UnitFactors, x: Float[Tensor, "sample d_model"], y: Float[Tensor, "sample d_model"]
) -> Float[Tensor, "sample d_model"]:
    """F(x, y) = sum_j weight_j (q_j.x)(k_j.y) v_j."""
    return ((x @ units.query.T) * (y @ units.key.T) * units.weight) @ units.value
