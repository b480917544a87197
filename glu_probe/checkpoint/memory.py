"""Room for large matrices, and a bound on how much of it there may be.

A matrix is read, and turned if need be, over small chunks, so that next to the result only one chunk is ever in memory.
Who looks at one MLP after the other can have the results laid into the same memory: touching fresh memory costs more
than filling it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadOption
from ..lanes import in_lanes

DEFAULT = 10**9
_LEAST = 10**8  # below, what a block of neurons and the libraries take is more than the factors
_HELD, _BESIDE = 0.6, 75_000_000  # share of it for what is read, and what is to be left at least for all else, in bytes
_CHUNK = 4_000_000  # values: small enough for the allocator to hand the same memory out again
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

Read = Callable[[slice], Tensor]


# Fills a tensor with rows of a file, from the given one on.
Fill = Callable[[Tensor, int], None]
# Gives an uninitialised tensor for a role ("query", "key", ...) of that shape and dtype.
Room = Callable[[str, tuple[int, ...], torch.dtype], Tensor]


def in_bytes(memory: int | str) -> int:
    """A size such as "1GB", "512MiB" or 10**9 as a number of bytes.

    >>> in_bytes("1.5GB"), in_bytes("512 MiB")
    (1500000000, 536870912)

    Raises:
        BadOption: it is no size, or less than 100 MB.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", str(memory), re.ASCII | re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match and not isinstance(memory, bool) else 0
    if size < _LEAST:
        raise BadOption(
            f"memory is {memory!r}", hint="Give a number of bytes of at least 100 MB, as 1GB, 512MiB or 2000000000"
        )
    return size


def held_limit(memory: int) -> int:
    """How much of a bound factors may take; the rest is for a block of neurons and what comes of it, and for libraries."""
    # below what the options allow, a bound is one for factors alone
    return int(_HELD * memory if memory < 10**8 else min(_HELD * memory, memory - _BESIDE))


def bound_to_hold(size: int) -> int:
    """The least bound of which factors may take so many bytes."""
    return math.ceil(max(size / _HELD, size + _BESIDE))


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
            self._held.pop((role, dtype), None)  # before the larger one is there
            held = self._held[role, dtype] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)


def give_back() -> None:
    """Let the system have what the allocator keeps of freed memory, where it can be told to (glibc).

    Large blocks that come and go between small ones that stay would take more and more of it from one MLP to the next.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Part:
    """Rows or columns of a matrix that become a matrix of their own, in the memory of a role.

    Attributes:
        picked: which; every n-th of a range.
        role: whose.
    """

    picked: slice
    role: str


def gather_direct(fill: Fill, dtype: torch.dtype, part: Part, shape: tuple[int, int], room: Room) -> Tensor:
    """The same of rows that follow each other in a file, read to where they are to be, by as many cores as there are.

    Args:
        fill: reads rows from the given one on into a tensor.
        dtype: of the file.
    """
    out = room(part.role, shape, dtype)

    def take(_lane: int, span: tuple[int, int]) -> None:
        fill(out[slice(*span)], part.picked.start + span[0])

    in_lanes(take, chunks(*shape))
    return out


def gather(read: Read, part: Part, shape: tuple[int, int], room: Room) -> Tensor:
    """Those rows of a matrix, in the dtype that they are read in: [rows, width]."""
    out, rows, step = None, part.picked, part.picked.step or 1
    for start, stop in chunks(shape[0], shape[1] * step):
        piece = read(slice(rows.start + start * step, rows.start + (stop - 1) * step + 1))[::step]
        out = room(part.role, shape, piece.dtype) if out is None else out
        out[start:stop] = piece
    assert out is not None  # a matrix has rows
    return out


def gather_interleaved(read: Read, parts: Sequence[Part], shape: tuple[int, int], room: Room) -> list[Tensor]:
    """Parts of a matrix whose rows take turns, with one read of them all; `shape` is that of a part."""
    out: list[Tensor] = []
    for start, stop in chunks(shape[0], shape[1] * len(parts)):
        piece = read(slice(start * len(parts), stop * len(parts)))
        out = out or [room(part.role, shape, piece.dtype) for part in parts]
        for each, part in zip(out, parts, strict=True):
            each[start:stop] = piece[part.picked.start :: len(parts)]
    return out


def gather_transposed(
    read: Read, height: int, parts: Sequence[Part], shape: tuple[int, int], room: Room, lanes: int = 1
) -> list[Tensor]:
    """Columns of a matrix of that height as rows, with one read of the matrix: [columns, height] for each part.

    Args:
        lanes: how many chunks may be read at the same time.
    """
    spans = chunks(height, shape[0] * len(parts))
    first = read(slice(*spans[0]))
    out = [room(part.role, shape, first.dtype) for part in parts]

    def take(_lane: int, span: tuple[int, int]) -> None:
        piece = first if span == spans[0] else read(slice(*span))
        for each, part in zip(out, parts, strict=True):
            each[:, slice(*span)] = piece[:, part.picked].T.contiguous()  # turned while the chunk is in the cache

    in_lanes(take, spans, lanes)
    return out


def chunks(rows: int, width: int) -> list[tuple[int, int]]:
    """Spans of rows that are a few million values each."""
    step = max(1, _CHUNK // max(width, 1))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
