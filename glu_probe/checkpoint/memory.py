"""Room for large matrices, filled chunk by chunk.

A matrix is read, widened and laid out in one pass over small chunks, so that next to the result only one chunk is ever
in memory. Who looks at one MLP after the other can have the results laid into the same memory: touching fresh memory
costs more than filling it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_CHUNK = 4_000_000  # values: small enough for the allocator to hand the same memory out again

Read = Callable[[slice], Tensor]


# Gives an uninitialised tensor for a role ("gate", "up", ...) of that shape and dtype.
Room = Callable[[str, tuple[int, ...], torch.dtype], Tensor]


def fresh(_role: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of its own for every matrix."""
    return torch.empty(shape, dtype=dtype)


class Workspace:
    """Memory that the next MLP's matrix of the same role overwrites.

    For loops that let go of a layer before they load the next one.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, role: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, in the memory that this role had before if it is large enough."""
        size = math.prod(shape)
        held = self._held.get((role, dtype))
        if held is None or held.numel() < size:
            held = self._held[role, dtype] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)


def gather(read: Read, rows: slice, out: Tensor) -> Tensor:
    """Fill `out` [rows, width] with those rows of a matrix, of which `rows` may pick every n-th."""
    step = rows.step or 1
    for start, stop in _chunks(len(out), out.shape[1] * step):
        out[start:stop] = read(slice(rows.start + start * step, rows.start + (stop - 1) * step + 1))[::step]
    return out


def gather_transposed(read: Read, height: int, columns: slice, out: Tensor) -> Tensor:
    """Fill `out` [columns, height] with those columns of a matrix of that height as rows."""
    for start, stop in _chunks(height, len(out) * (columns.step or 1)):
        out[:, start:stop] = read(slice(start, stop))[:, columns].T.contiguous()
    return out


def _chunks(rows: int, width: int) -> list[tuple[int, int]]:
    step = max(1, _CHUNK // max(width, 1))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
