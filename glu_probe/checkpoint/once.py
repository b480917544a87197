"""Rows that two factors are taken from, fetched once: for matrices whose halves cannot be read one without the other."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from .sites import Site
from .source import TensorInfo, TensorSource

_MOST = 1 << 29  # bytes that are held at a time; what is larger is fetched twice


def read_twice(sites: Iterable[Site]) -> set[str]:
    """Tensors all of whose rows are read for gate and again for up: their rows or columns hold both."""
    gates = ((site.slabs["gate"], site.slabs["up"]) for site in sites)
    return {
        gate.name
        for gate, up in gates
        if gate.name == up.name and gate.expert is None and (gate.columns or gate.step != 1)
    }


class ReadOnce:
    """A source where reading is dear. Of the tensors named, rows are held from one reading of them to the next."""

    def __init__(self, source: TensorSource, names: set[str]) -> None:
        self._source, self._names = source, names
        self._name, self._held, self._bytes = "", {}, 0
        self._lock = threading.Lock()

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._source.infos()

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor, or a range of its rows; they may be read again without being fetched again, once."""
        if name not in self._names:
            return self._source.read(name, rows)
        key = (slice(None) if rows is None else rows).indices(self.infos()[name].shape[0])
        with self._lock:
            if name != self._name:
                self._name, self._held, self._bytes = name, {}, 0
            if key in self._held:
                values = self._held.pop(key)
                self._bytes -= values.nbytes
                return values
        values = self._source.read(name, rows)
        with self._lock:
            if name == self._name and key not in self._held and self._bytes + values.nbytes <= _MOST:
                self._held[key] = values
                self._bytes += values.nbytes
        return values

    def provenance(self) -> dict[str, Any]:
        """The files."""
        return self._source.provenance()
