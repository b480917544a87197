"""Norms and inner products of every neuron's three factors: one pass that all neuron measures share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..lanes import in_lanes
from ..layer_rows import BLOCK, ROLES, Factors, LayerRows
from .arithmetic import compiled_loops

_ROWS = 64  # three float64 rows of 4096 for 64 neurons stay within a core's cache

PerNeuron = Float[np.ndarray, " d_mlp"]
Rows = Float[Tensor, "rows d_model"]


@dataclass(frozen=True)
class RowProducts:
    """Inner products q.q, k.k, v.v, q.k, q.v, k.v of each neuron, float64, not finite where a row is not."""

    qq: PerNeuron
    kk: PerNeuron
    vv: PerNeuron
    qk: PerNeuron
    qv: PerNeuron
    kv: PerNeuron

    @classmethod
    def of(cls, grams: Float[Tensor, "rows 3 3"]) -> RowProducts:
        """From the Gram matrices of the neurons' three rows."""
        gram = grams.numpy()
        (q, k, v) = range(3)
        pairs = ((q, q), (k, k), (v, v), (q, k), (q, v), (k, v))
        return cls(*(np.ascontiguousarray(gram[:, i, j]) for i, j in pairs))

    def at(self, which: slice) -> RowProducts:
        """Those of some neurons."""
        return RowProducts(*(getattr(self, part.name)[which] for part in fields(self)))


class GramMatrices:
    """Takes the Gram matrices of neurons' three rows, block after block, in float64 so that nothing over- or underflows.

    Cost: 18 d_model flops a neuron. Several threads may use one.
    """

    def __init__(self, d_mlp: int, d_model: int) -> None:
        self._loops, self._d_model = compiled_loops(d_mlp * d_model), d_model
        self._own = threading.local()

    def __call__(self, *factors: Rows) -> Float[Tensor, "rows 3 3"]:
        """Of query, key and value rows."""
        if self._loops:
            return self._loops.row_grams(*factors)
        count = len(factors[0])
        out = torch.empty(count, 3, 3, dtype=torch.float64)
        for start in range(0, count, _ROWS):
            rows = slice(start, min(start + _ROWS, count))
            block = self._buffer[: rows.stop - rows.start]
            for index, factor in enumerate(factors):
                block[:, index] = factor[rows]
            torch.bmm(block, block.transpose(1, 2), out=out[rows])
        return out

    @property
    def _buffer(self) -> Float[Tensor, "rows 3 d_model"]:
        """One for all blocks of a thread: fresh memory for each would cost more than the arithmetic."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = torch.empty(_ROWS, 3, self._d_model, dtype=torch.float64)
        return self._own.buffer


def row_products(layer: LayerRows, which: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None) -> RowProducts:
    """The inner products of a layer's neurons, with one read of the factors.

    Args:
        which: numbers of query, key and value rows to pair instead: those of neurons that do not exist.
    """
    matrices = GramMatrices(layer.d_mlp, layer.d_model)
    blocks = layer.read_blocks() if which is None else _picked(layer, which)
    # at once: a small piece kept from each block keeps the allocator from handing out the block's memory again
    grams = torch.empty(layer.d_mlp if which is None else len(which[0]), 3, 3, dtype=torch.float64)

    def take(_lane: int, item: tuple[slice, Callable[[], Factors]]) -> None:
        block, make = item
        grams[block] = matrices(*make())

    in_lanes(take, blocks)
    return RowProducts.of(grams)


def _picked(
    layer: LayerRows, which: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> Iterator[tuple[slice, Callable[[], Factors]]]:
    """Those rows, a block at a time."""
    numbers = [torch.from_numpy(part) for part in which]
    for start in range(0, len(numbers[0]), BLOCK):
        block = slice(start, min(start + BLOCK, len(numbers[0])))
        query, key, value = (layer.rows(role, part[block]) for role, part in zip(ROLES, numbers, strict=True))
        yield block, partial(lambda *factors: factors, query, key, value)


def cosine(product: PerNeuron, square: PerNeuron, other_square: PerNeuron) -> PerNeuron:
    """Cosine from inner products; missing where a row is zero or not finite, never beyond [-1, 1]."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # one square root of the product: exactly +-1 for rows that are exactly parallel
        value = product / np.sqrt(square * other_square)
    return np.where(np.isfinite(value), np.clip(value, -1.0, 1.0), np.nan)
