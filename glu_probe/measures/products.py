"""Norms and inner products of every neuron's three factors: one pass that all neuron measures share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from ..neurons import GatedLayer

_ROWS = 64  # three float64 rows of 4096 for 64 neurons stay within a core's cache

PerNeuron = Float[np.ndarray, " d_mlp"]


@dataclass(frozen=True)
class RowProducts:
    """Inner products q.q, k.k, v.v, q.k, q.v, k.v of each neuron, float64, not finite where a row is not."""

    qq: PerNeuron
    kk: PerNeuron
    vv: PerNeuron
    qk: PerNeuron
    qv: PerNeuron
    kv: PerNeuron


def row_products(layer: GatedLayer) -> RowProducts:
    """The inner products of a layer, accumulated in float64 so that no storage format over- or underflows.

    Cost: 18 d_mlp d_model flops, one read of the factors.
    """
    # one buffer for all blocks: fresh memory for each would cost more than the arithmetic
    buffer = torch.empty(min(_ROWS, layer.d_mlp), 3, layer.d_model, dtype=torch.float64)
    products = torch.empty(layer.d_mlp, 3, 3, dtype=torch.float64)
    for start in range(0, layer.d_mlp, _ROWS):
        rows = slice(start, min(start + _ROWS, layer.d_mlp))
        block = buffer[: rows.stop - rows.start]
        for index, factor in enumerate((layer.query, layer.key, layer.value)):
            block[:, index] = factor[rows]
        torch.bmm(block, block.transpose(1, 2), out=products[rows])
    gram = products.numpy()
    (q, k, v) = range(3)
    pairs = ((q, q), (k, k), (v, v), (q, k), (q, v), (k, v))
    return RowProducts(*(np.ascontiguousarray(gram[:, i, j]) for i, j in pairs))


def cosine(product: PerNeuron, square: PerNeuron, other_square: PerNeuron) -> PerNeuron:
    """Cosine from inner products; missing where a row is zero or not finite, never beyond [-1, 1]."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # one square root of the product: exactly +-1 for rows that are exactly parallel
        value = product / np.sqrt(square * other_square)
    return np.where(np.isfinite(value), np.clip(value, -1.0, 1.0), np.nan)
