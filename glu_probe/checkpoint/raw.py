"""A matrix as bytes in a file: rows, or stripes of columns, without reading the rest.

For MLPs that do not fit the memory: their rows are read again each time they are needed, and what cannot be read in
place (a remote file, packed weights) goes to a temporary file once.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CannotWrite, Truncated
from .memory import Read, chunks
from .sniff import opened

STRIPE = 64 * 2**20  # bytes of columns that are held at once, since every row costs a read of its own
_PIECE = 2**20  # bytes of them that are turned at a time


def stripe_bytes(limit: int, columns: int) -> int:
    """Bytes of a stripe of an MLP of which so many matrices lie in columns; all together take less than half the limit."""
    return min(STRIPE, limit // (2 * columns + 1))


@dataclass(frozen=True)
class RawMatrix:
    """Where a matrix lies in a file, row after row.

    Attributes:
        path: the file, for messages and for opening it.
        offset: of its first byte.
        shape, dtype: of the matrix.
        file: an open file, for one that has no name any more.
    """

    path: Path
    offset: int
    shape: tuple[int, int]
    dtype: torch.dtype
    file: io.FileIO | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def pitch(self) -> int:
        """Bytes of a row."""
        return self.shape[1] * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> Tensor:
        """Those rows: [rows, width]."""
        out = torch.empty(stop - start, self.shape[1], dtype=self.dtype)
        self.fill(out, start)
        return out

    def fill(self, out: Tensor, start: int) -> None:
        """Fill a contiguous tensor [rows, width] with rows, from the given one on."""
        with self._opened() as file:
            self._fill(out, file, self.offset + start * self.pitch)

    def columns(self, start: int, stop: int) -> Iterator[tuple[slice, Tensor]]:
        """Those columns of a few rows at a time, with which rows they are: [rows, columns], in memory that the next use."""
        height, size = self.shape[0], self.dtype.itemsize
        held = torch.empty(max(1, min(_PIECE // (size * (stop - start)), height)), stop - start, dtype=self.dtype)
        first = self.offset + start * size
        with self._opened() as file:
            for begin in range(0, height, len(held)):
                piece = held[: height - begin]
                for index, row in enumerate(piece, begin):
                    self._fill(row, file, first + index * self.pitch)
                yield slice(begin, begin + len(piece)), piece

    @contextlib.contextmanager
    def _opened(self) -> Iterator[io.BufferedReader | io.FileIO]:
        if self.file is None:
            with opened(self.path, buffered=False) as file:
                yield file
        else:
            with self.lock:  # its position is one for all who read it
                yield self.file

    def _fill(self, out: Tensor, file: io.BufferedReader | io.FileIO, offset: int) -> None:
        """Fill a contiguous tensor with the bytes from there."""
        view, done = out.view(-1).view(torch.uint8).numpy().data, 0
        file.seek(offset)
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise Truncated(
                    "the file ended inside a tensor: it changed while it was read", where=self.path,
                    hint="Run again when nothing writes to it",
                )  # fmt: skip
            done += count


def spooled(read: Read, shape: tuple[int, int], name: str) -> RawMatrix:
    """The matrix in a temporary file that vanishes with the last use of it; read once, in order.

    Args:
        read: gives a range of its rows.
        name: of the tensor, for messages.

    Raises:
        CannotWrite: there is no room for temporary files.
    """
    dtype = torch.float32
    with contextlib.ExitStack() as unless_kept:
        with _writing(name):
            file = unless_kept.enter_context(tempfile.TemporaryFile(prefix="glu-probe-", buffering=0))
        for start, stop in chunks(*shape):
            piece = read(slice(start, stop)).contiguous()
            dtype = piece.dtype
            left = piece.view(-1).view(torch.uint8).numpy().data
            while left:
                with _writing(name):
                    left = left[file.write(left) :]
        matrix = RawMatrix(Path(tempfile.gettempdir()), 0, shape, dtype, file)
        weakref.finalize(matrix, unless_kept.pop_all().close)
    return matrix


@contextlib.contextmanager
def _writing(name: str) -> Iterator[None]:
    """Raise what the system says to a temporary file for this tensor as an error of ours."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(
            f"tensor {name!r} does not fit the memory bound and cannot be kept in a temporary file: "
            f"{error.strerror or error}",
            where=tempfile.tempdir or "temporary files",
            hint="Allow more memory (--memory), or set TMPDIR to where there is room",
        ) from None


class FileRows:
    """Neurons that are rows of such a matrix, every `step`-th from `first`."""

    nbytes = 0  # in memory

    def __init__(self, matrix: RawMatrix, count: int, first: int, step: int) -> None:
        self._matrix, self._first, self._step = matrix, first, step
        self.count, self.width, self.dtype = count, matrix.shape[1], matrix.dtype

    def __call__(self, which: slice | Tensor) -> Tensor:
        """Their rows: a range of neurons, or a few by their numbers."""
        if isinstance(which, Tensor):
            out = torch.empty(len(which), self.width, dtype=self.dtype)
            for row, index in zip(out, which.tolist(), strict=True):
                place = self._first + index * self._step
                row[:] = self._matrix.rows(place, place + 1)[0]
            return out
        start, stop, _ = which.indices(self.count)
        if start >= stop:
            return torch.empty(0, self.width, dtype=self.dtype)
        first = self._first + start * self._step
        return self._matrix.rows(first, first + (stop - start - 1) * self._step + 1)[:: self._step]


class FileColumns:
    """Neurons that are columns of such a matrix: a stripe of them is held, turned into rows."""

    def __init__(self, matrix: RawMatrix, count: int, first: int, step: int, stripe: int | None = None) -> None:
        """Those neurons.

        Args:
            stripe: bytes of a stripe; None for `STRIPE`.
        """
        self._matrix, self._first, self._step = matrix, first, step
        self.count, self.width, self.dtype = count, matrix.shape[0], matrix.dtype
        per_neuron = self.width * self.dtype.itemsize * step
        self._wide = max(1, (STRIPE if stripe is None else stripe) // per_neuron)
        self._begin: int | None = None
        self._held: Tensor | None = None

    def __call__(self, which: slice | Tensor) -> Tensor:
        """Their rows: a range of neurons, or a few by their numbers."""
        if isinstance(which, Tensor):
            return self._few(which)
        start, stop, _ = which.indices(self.count)
        if start < stop and self._wide >= self.count:  # it stays
            return self._turned(0)[start:stop]
        out = torch.empty(max(stop - start, 0), self.width, dtype=self.dtype)
        done = start
        while done < stop:
            begin = done - done % self._wide
            stripe = self._turned(begin)
            last = min(stop, begin + len(stripe))
            out[done - start : last - start] = stripe[done - begin : last - begin]
            done = last
        return out

    @property
    def nbytes(self) -> int:
        """Bytes in memory, once something was asked for."""
        return min(self._wide, self.count) * self.width * self.dtype.itemsize

    def _turned(self, begin: int) -> Tensor:
        """The stripe that begins there, in the memory of the one before."""
        if self._held is None:
            self._held = torch.empty(min(self._wide, self.count), self.width, dtype=self.dtype)
        stripe = self._held[: self.count - begin]
        if self._begin != begin:
            self._begin = None  # of half a stripe, if reading fails
            first = self._first + begin * self._step
            for rows, piece in self._matrix.columns(first, first + (len(stripe) - 1) * self._step + 1):
                stripe[:, rows] = piece[:, :: self._step].T
            self._begin = begin
        return stripe

    def _few(self, which: Tensor) -> Tensor:
        """Neighbours in one stripe are read with one pass over the rows; the pass is what costs."""
        out = torch.empty(len(which), self.width, dtype=self.dtype)
        for begin in sorted({int(index) - int(index) % self._wide for index in which}):
            inside = (which >= begin) & (which < begin + self._wide)
            out[inside] = self._turned(begin)[which[inside] - begin]
        return out


def in_place_or_spooled(
    raw: Callable[[str], RawMatrix | None] | None, read: Read, name: str, shape: tuple[int, int]
) -> RawMatrix:
    """The matrix where it is, if that can be read at any place for nothing; else a copy of it in a temporary file."""
    found = raw(name) if raw is not None and 0 not in shape else None
    return found if found is not None else spooled(read, shape, name)
