"""Rows that two factors are taken from, fetched once: for matrices whose halves cannot be read one without the other."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from .sites import Site
from .source import TensorInfo, TensorSource

_MOST = 1 << 29  # bytes that are held at a time; what is larger is fetched twice


def read_twice(sites: Iterable[Site]) -> dict[str, int]:
    """Tensors all of whose rows are read for gate and again for up: every row holds both, or one of so many rows does."""
    gates = ((site.slabs["gate"], site.slabs["up"]) for site in sites)
    return {
        gate.name: 1 if gate.columns else gate.step
        for gate, up in gates
        if gate.name == up.name and gate.expert is None and (gate.columns or gate.step != 1)
    }


class ReadOnce:
    """A source where reading is dear. Of some tensors, rows are held from one reading of them to the next.

    Args:
        source: what is read.
        groups: those tensors, and how many rows of each belong together: ranges of rows are widened to whole groups, so
            that ranges that begin at different rows of a group are the same.
    """

    def __init__(self, source: TensorSource, groups: Mapping[str, int]) -> None:
        self._source, self._groups = source, groups
        self._name, self._held, self._bytes = "", {}, 0
        self._lock = threading.Lock()

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._source.infos()

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor, or a range of its rows; they may be read again without being fetched again, once."""
        if name not in self._groups:
            return self._source.read(name, rows)
        height, group = self.infos()[name].shape[0], self._groups[name]
        start, stop, _ = (slice(None) if rows is None else rows).indices(height)
        first = start - start % group
        whole = self._whole(name, (first, min(stop + -stop % group, height)))
        return whole[start - first : max(stop, start) - first]

    def _whole(self, name: str, key: tuple[int, int]) -> Tensor:
        with self._lock:
            if name != self._name:
                self._name, self._held, self._bytes = name, {}, 0
            if key in self._held:
                values = self._held.pop(key)
                self._bytes -= values.nbytes
                return values
        values = self._source.read(name, slice(*key))
        with self._lock:
            if name == self._name and key not in self._held and self._bytes + values.nbytes <= _MOST:
                self._held[key] = values
                self._bytes += values.nbytes
        return values

    def provenance(self) -> dict[str, Any]:
        """The files."""
        return self._source.provenance()
