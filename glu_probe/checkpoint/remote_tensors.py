"""Tensors of files on a server: headers when they are opened, then the bytes of what is read, and no others."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from ..errors import NeedsDownload
from . import gguf, safetensors
from .gguf import GGUFFile, GGUFSource, GGUFTensors
from .remote import FIRST, RemoteFile
from .safetensors import SafetensorsFile, SafetensorsTensors
from .sniff import kind_of, refuse_lfs_text
from .source import StoredSource, TensorInfo, TensorSource

_SMALL = 1 << 17  # bytes of a tensor that is read whole and kept: norms and scales, which are asked for again and again
_KEPT = 1 << 23  # bytes of such tensors that are kept of one file


class _Data:
    """The bytes of one file's tensors."""

    def __init__(self, file: RemoteFile, infos: Mapping[str, TensorInfo], starts: Mapping[str, int]) -> None:
        self._file, self._infos, self._starts = file, infos, starts
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def fill(self, out: memoryview, name: str, skipped: int) -> None:
        if self._infos[name].nbytes > _SMALL:
            return self._file.read_into(out, self._starts[name] + skipped, _named(name))
        out[:] = self._whole(name)[skipped : skipped + len(out)]
        return None

    def _whole(self, name: str) -> bytes:
        with self._lock:
            kept = self._kept.get(name)
        if kept is not None:
            return kept
        read = bytearray(self._infos[name].nbytes)
        self._file.read_into(memoryview(read), self._starts[name], _named(name))
        kept = bytes(read)
        with self._lock:
            self._kept[name] = kept
            while sum(map(len, self._kept.values())) > _KEPT:
                self._kept.popitem(last=False)
        return kept


def _named(name: str) -> str:
    return f"tensor {name!r}"


class RemoteSafetensors(SafetensorsTensors):
    """One safetensors file on a server.

    Raises:
        NotSafetensors, LFSPointer, CorruptHeader, Truncated, TrailingBytes: when opened, before data is fetched.
    """

    def __init__(self, file: RemoteFile, facts: Mapping[str, Any]) -> None:
        self.where, self._facts = file.where, {**facts, **file.facts()}
        safetensors.refuse_other_kinds(_kind(file), file.size, file.where)
        length = safetensors.header_length(file.beginning, file.size, file.where)
        self._infos, self._starts = safetensors.parse_header(file.need(8 + length)[8:], file.size, file.where)
        file.forget_beginning()
        self._data = _Data(file, self._infos, self._starts)

    def _fill(self, out: memoryview, name: str, skipped: int) -> None:
        self._data.fill(out, name, skipped)

    def provenance(self) -> dict[str, Any]:
        """The file's name, address, size, and what the server calls this version of it."""
        return {"files": [dict(self._facts)]}


class RemoteGGUF(GGUFTensors):
    """One GGUF file on a server.

    Raises:
        NotGGUF, LFSPointer, CorruptHeader, Truncated: when opened, before data is fetched.
    """

    def __init__(self, file: RemoteFile, facts: Mapping[str, Any]) -> None:
        self.where, self._facts, self._file = file.where, {**facts, **file.facts()}, file
        gguf.refuse_other_kinds(_kind(file), file.where)
        self._header = self._header_with(None)
        self._data = _Data(file, self._header.infos, self._header.starts)

    def _header_with(self, key: str | None) -> gguf.GGUFHeader:
        stop = FIRST
        try:
            while True:  # how long the header is, only walking it tells
                try:
                    return gguf.parse_header(self._file.need(stop), self._file.size, self.where, whole=key)
                except gguf.NeedsMore:
                    stop *= 2
        finally:
            self._file.forget_beginning()

    def _fill(self, out: memoryview, name: str, skipped: int) -> None:
        self._data.fill(out, name, skipped)

    def provenance(self) -> dict[str, Any]:
        """The file's name, address, size, and what the server calls this version of it."""
        return {"files": [dict(self._facts)]}


def _kind(file: RemoteFile) -> str:
    refuse_lfs_text(file.beginning, file.where, "The server itself lacks the file: tell who put it there")
    return kind_of(file.beginning[:512])


Source = TypeVar("Source", bound=TensorSource)


class HeaderFirst(Generic[Source]):
    """A remote file whose header was read in place. Its tensors are too, until there is a copy of it on disk."""

    def __init__(self, remote: Source, copy: Callable[[], Source | None]) -> None:
        self._remote, self._copy = remote, copy
        self._local: Source | None = None
        self._lock = threading.Lock()

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._remote.infos()

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read from the copy if there is one."""
        return self._source().read(name, rows)

    def _source(self) -> Source:
        with self._lock:
            if self._local is None:
                self._local = self._copy()
            return self._local or self._remote

    def provenance(self) -> dict[str, Any]:
        """The file's name, address, size, and what the server calls this version of it."""
        return self._remote.provenance()


class SafetensorsHeaderFirst(HeaderFirst[StoredSource]):
    """The same of a safetensors file."""

    def stored(self, name: str, rows: slice | None = None) -> Tensor:
        """Read from the copy if there is one; none is made for the sake of what describes a packed weight."""
        small = self._local is None and rows is None and self._remote.infos()[name].nbytes <= _SMALL
        return (self._remote if small else self._source()).stored(name, rows)


class GGUFHeaderFirst(HeaderFirst[GGUFSource]):
    """The same of a GGUF file."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Key-value pairs; None in the place of long arrays."""
        return self._remote.metadata

    def strings(self, key: str) -> list[str] | None:
        """A list of texts in the metadata."""
        return self._remote.strings(key)


@dataclass(frozen=True)
class Place:
    """Where a remote file is, and where a copy of it would be.

    Attributes:
        open: begins to read it in place.
        facts: its name and address, for provenance.
        copy: the path of a copy on disk; None if there is none and none should be made.
        must_copy: whether `copy` makes one.
    """

    open: Callable[[], RemoteFile]
    facts: Mapping[str, Any]
    copy: Callable[[], Path | None]
    must_copy: bool


Opened = TypeVar("Opened")


def remote_safetensors(place: Place) -> StoredSource:
    """A safetensors file on a server.

    Raises:
        NeedsDownload: it cannot be read in place, and no copy should be made.
    """

    def copy() -> StoredSource | None:
        return _copy(place, SafetensorsFile)

    try:
        return SafetensorsHeaderFirst(RemoteSafetensors(place.open(), place.facts), copy)
    except NeedsDownload as refused:
        return _copy_instead(place, copy, refused)


def remote_gguf(place: Place) -> GGUFSource:
    """The same for a GGUF file."""

    def copy() -> GGUFSource | None:
        return _copy(place, GGUFFile)

    try:
        return GGUFHeaderFirst(RemoteGGUF(place.open(), place.facts), copy)
    except NeedsDownload as refused:
        return _copy_instead(place, copy, refused)


def _copy(place: Place, read: Callable[[Path], Opened]) -> Opened | None:
    path = place.copy()
    return None if path is None else read(path)


def _copy_instead(place: Place, copy: Callable[[], Opened | None], refused: NeedsDownload) -> Opened:
    copied = copy() if place.must_copy else None
    if copied is None:
        raise refused
    return copied


def refuse_torch(where: str) -> NeedsDownload:
    """For a pickle, whose tensors no header tells."""
    return NeedsDownload(
        "a PyTorch file cannot be read in parts, and would have to be fetched whole",
        where=where,
        hint="Fetch it into the cache with --download (download=True), or use the model's safetensors files if it has any",
    )
