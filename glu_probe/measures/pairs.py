"""Pairs of neurons of one layer: which act alike, and which have their branches exchanged.

Every pair is looked at, a block of rows at a time, in float32; what comes near a threshold is computed again in float64,
so that the answer is exact. Signs: that of q is fixed by the activation, those of k and v flip together, so the sign of
cos(k_i, k_j) alone says nothing, nor that of cos(v_i, v_j); what is left once k has been flipped does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import BadOption
from ..layer_rows import ROLES
from ..neurons import GatedLayer
from .tensor import UnitFactors

MOST_PAIRS = 1_000_000
_ROWS = 1024
_SLACK = 1e-5  # of a cosine of unit rows in float32
_EQUAL = 1e-5  # difference of rows that count as the same, over their norm

Factors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Pairs:
    """Pairs i < j of a layer's neurons.

    Attributes:
        first, second: [pair] indices of the neurons.
        values: what was computed of each pair: name to [pair] float64.
        candidates: how many neurons took part: those whose three rows are finite and not zero.
    """

    first: np.ndarray
    second: np.ndarray
    values: dict[str, np.ndarray]
    candidates: int


def alike_pairs(layer: GatedLayer, *, query: float, key: float, value: float) -> Pairs:
    """Pairs that are close in all three factors.

    Args:
        layer: its factors.
        query, key, value: cosines that must be reached, -1 to 1; those of key and value after the gauge, see below.

    Returns:
        Pairs with cos_query, cos_key and cos_value: of q as they are; k_j flipped together with v_j so that cos_key >= 0,
        unless the neurons are not linear in the up branch. Cost: 2 d_mlp^2 d_model flops for each factor that is not ruled out by the one before it.

    Raises:
        BadOption: more than a million pairs are.
    """
    units, free = UnitFactors.of(layer), sign_is_free(layer)
    limits = [limit - _SLACK for limit in (query, key, value)]

    def near(rows: Factors, others: Factors) -> Tensor:
        found = rows[0] @ others[0].T > limits[0]
        if not found.any():
            return found
        keys = rows[1] @ others[1].T
        flip = torch.where(keys < 0, -1.0, 1.0) if free else torch.ones(())
        found &= keys * flip > limits[1]
        # a key at a right angle leaves the sign of the value open: either may be meant
        values = rows[2] @ others[2].T
        return found & (torch.where(keys.abs() < _SLACK, values.abs(), values * flip) > limits[2])

    first, second = _search(units, near)
    (q, k, v), (other_q, other_k, other_v) = _rows_of(units, first), _rows_of(units, second)
    cos_q, cos_k, cos_v = _cosines(q, other_q), _cosines(k, other_k), _cosines(v, other_v)
    flip = np.where(cos_k < 0, -1.0, 1.0) if free else 1.0
    values = {"cos_query": cos_q, "cos_key": cos_k * flip, "cos_value": cos_v * flip}
    kept = (cos_q >= query) & (values["cos_key"] >= key) & (values["cos_value"] >= value)
    return _pairs(units, first, second, values, kept)


def equal_pairs(layer: GatedLayer) -> Pairs:
    """Pairs with the same gate, and the same up branch up to a factor: both act as one neuron with another value.

    Rows (and biases) count as the same if they differ by less than 1e-5 of their norm.

    Returns:
        Pairs with cos_value (after k_j and v_j were flipped together if need be) and difference (of the rows, over their
        norm: 0 to 1e-5).

    Raises:
        BadOption: there are more than a million.
    """
    units, free = UnitFactors.of(layer), sign_is_free(layer)

    def near(rows: Factors, others: Factors) -> Tensor:
        found = rows[0] @ others[0].T > 1 - _SLACK
        if not found.any():
            return found
        keys = rows[1] @ others[1].T
        return found & ((keys.abs() if free else keys) > 1 - _SLACK)

    first, second = _search(units, near)
    i, j = units.neurons[first], units.neurons[second]
    query, other = (_with_bias(layer.query, layer.query_bias, rows) for rows in (i, j))
    away = [((query - other).norm(dim=1) / query.norm(dim=1))]
    key, other = (_with_bias(layer.key, layer.key_bias, rows) for rows in (i, j))
    # in units of their norms, so that no format's extremes overflow the product
    key, scale = key / key.norm(dim=1, keepdim=True), other.norm(dim=1, keepdim=True)
    factor = (key * (other / scale)).sum(1, keepdim=True) if free else key.norm(dim=1, keepdim=True) / scale
    away.append((other / scale - factor * key).norm(dim=1))
    difference = torch.stack(away).amax(0).numpy() if len(first) else np.zeros(0)
    cos_v = _cosines(_rows_of(units, first)[2], _rows_of(units, second)[2])
    flip = torch.where(factor < 0, -1.0, 1.0).flatten().numpy()
    return _pairs(units, first, second, {"cos_value": cos_v * flip, "difference": difference}, difference <= _EQUAL)


def exchanged_pairs(layer: GatedLayer, *, threshold: float) -> Pairs:
    """Pairs of which each one's gate reads what the other's up branch reads: |cos(q_i, k_j)| and |cos(k_i, q_j)| reach the threshold.

    Such two compute S(a) b v_i + S(b) a v_j.

    Returns:
        Pairs with abs_cos_query_key = |cos(q_i, k_j)|, abs_cos_key_query = |cos(k_i, q_j)|; cos_value = cos(v_i, v_j)
        after each k was flipped, together with its v, to have a positive cosine with the other's q (with the sign as it is
        where the neurons are not linear in the up branch); and cos_query = cos(q_i, q_j). Cost: 4 d_mlp^2 d_model flops.

    Raises:
        BadOption: there are more than a million.
    """
    units, free = UnitFactors.of(layer), sign_is_free(layer)

    def near(rows: Factors, others: Factors) -> Tensor:
        found = (rows[0] @ others[1].T).abs() > threshold - _SLACK
        return found & ((rows[1] @ others[0].T).abs() > threshold - _SLACK) if found.any() else found

    first, second = _search(units, near)
    (q, k, v), (other_q, other_k, other_v) = _rows_of(units, first), _rows_of(units, second)
    forth, back = _cosines(q, other_k), _cosines(k, other_q)
    sign = np.where(forth * back < 0, -1.0, 1.0) if free else 1.0
    values = {
        "abs_cos_query_key": np.abs(forth),
        "abs_cos_key_query": np.abs(back),
        "cos_value": _cosines(v, other_v) * sign,
        "cos_query": _cosines(q, other_q),
    }
    return _pairs(units, first, second, values, np.minimum(np.abs(forth), np.abs(back)) >= threshold)


def sign_is_free(layer: GatedLayer) -> bool:
    """Whether (k, v) -> (-k, -v) leaves the layer as it is: not if a function of the up branch is multiplied."""
    return layer.activation is None or layer.activation.up is None


def _search(units: UnitFactors, near: Callable[[Factors, Factors], Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Indices i < j into the live neurons of all pairs that are near."""
    first, second, count = [], [], 0
    for rows, these in units.rows(torch.float32, _ROWS):
        for others, those in _blocks_from(units, rows.start):
            found = near(these, those)
            if others.start == rows.start:
                found = found.triu(diagonal=1)
            count += int(found.sum())
            if count > MOST_PAIRS:
                raise BadOption(
                    f"more than {MOST_PAIRS:,} pairs of neurons are found", where=f"layer {units.layer.layer}",
                    hint="Raise the threshold",
                )  # fmt: skip
            i, j = found.nonzero(as_tuple=True)
            first.append(i.numpy() + rows.start)
            second.append(j.numpy() + others.start)
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *first]), np.concatenate([empty, *second])


def _blocks_from(units: UnitFactors, start: int) -> Iterator[tuple[slice, Factors]]:
    for at in range(start, len(units), _ROWS):
        block = slice(at, min(at + _ROWS, len(units)))
        yield block, units.unit(block, torch.float32)


@dataclass(frozen=True)
class _Rows:
    """Unit rows of one factor, of which few are in memory at a time."""

    units: UnitFactors
    factor: int
    live: np.ndarray

    def block(self, rows: slice) -> Tensor:
        neurons = self.units.neurons[self.live[rows]]
        factor = self.units.layer.rows(ROLES[self.factor], neurons)
        return factor.double() / self.units.norms[self.factor, self.live[rows]][:, None]


def _rows_of(units: UnitFactors, live: np.ndarray) -> tuple[_Rows, _Rows, _Rows]:
    return _Rows(units, 0, live), _Rows(units, 1, live), _Rows(units, 2, live)


def _cosines(first: _Rows, second: _Rows) -> np.ndarray:
    """Cosine of each pair of rows, in float64."""
    out = np.empty(len(first.live))
    for start in range(0, len(out), _ROWS):
        rows = slice(start, start + _ROWS)
        out[rows] = (first.block(rows) * second.block(rows)).sum(1).clamp(-1, 1).numpy()
    return out


def _with_bias(matrix: Tensor, bias: Tensor | None, neurons: Tensor) -> Tensor:
    rows = matrix[neurons].double()
    return rows if bias is None else torch.cat((rows, bias[neurons, None].double()), dim=1)


def _pairs(
    units: UnitFactors, first: np.ndarray, second: np.ndarray, values: dict[str, np.ndarray], kept: np.ndarray
) -> Pairs:
    neurons = units.neurons.numpy()
    return Pairs(
        neurons[first[kept]], neurons[second[kept]], {name: array[kept] for name, array in values.items()}, len(units)
    )
