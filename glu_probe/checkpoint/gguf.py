"""Reading GGUF: an own walk over the header, the `gguf` library for what the quantised bytes mean.

The library's reader builds an object per vocabulary entry (seconds for a large vocabulary) and maps the file;
the header alone is needed here, in a fraction of that.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import CorruptHeader, MissingShard, NotGGUF, QuantizedWeights, Truncated
from .sniff import file_facts, looks_like, opened, refuse_lfs_pointer, what_to_do
from .source import Shards, TensorInfo, TensorSource

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_KEPT = 64  # longer arrays are vocabularies: skipped
_DEEPEST = 4  # arrays within arrays
_TOO_MANY = 2**60
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class GGUFHeader:
    """What stands before the data.

    Attributes:
        metadata: key-value pairs; None in the place of long arrays.
        infos: every tensor by name; shapes outermost first (the file lists them the other way round).
        starts: where in the file each one's data begins.
        types: quantisation of each one, as the library's enumeration.
    """

    metadata: dict[str, Any]
    infos: dict[str, TensorInfo]
    starts: dict[str, int]
    types: dict[str, Any]


class GGUFSource(TensorSource, Protocol):
    """A tensor source with GGUF metadata."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Key-value pairs; None in the place of long arrays."""
        ...

    def strings(self, key: str) -> list[str] | None:
        """A list of texts of any length in the metadata, None if there is none under that key."""
        ...


class GGUFTensors:
    """The tensors of one GGUF file whose header is known; where its bytes come from, subclasses say."""

    where: object
    _header: GGUFHeader

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Key-value pairs; None in the place of long arrays."""
        return self._header.metadata

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._header.infos

    def strings(self, key: str) -> list[str] | None:
        """A list of texts of any length in the metadata, None if there is none under that key."""
        if key not in self.metadata:
            return None
        found = self._header_with(key).metadata[key]
        return found if isinstance(found, list) and all(isinstance(text, str) for text in found) else None

    def _header_with(self, key: str) -> GGUFHeader:
        """The header with the array under that key, however long it is."""
        raise NotImplementedError

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor, or a range of its rows, dequantised; float16 and bfloat16 widened to float32."""
        info = self._header.infos[name]
        if len(info.shape) < 2:
            values = self._values(name, 0, info.nbytes, (1, info.shape[0] if info.shape else 1)).reshape(info.shape)
            return values if rows is None else values[rows]
        first, last, _ = (rows or slice(None)).indices(info.shape[0])
        last = max(first, last)
        row_bytes = info.nbytes // max(info.shape[0], 1)
        return self._values(name, first * row_bytes, (last - first) * row_bytes, (last - first, *info.shape[1:]))

    def _values(self, name: str, skipped: int, nbytes: int, shape: tuple[int, ...]) -> Tensor:
        from gguf.quants import dequantize

        kind = self._header.types[name]
        raw = np.empty(nbytes, dtype=np.uint8)
        if nbytes:
            self._fill(raw.data, name, skipped)
        if kind.name in ("F32", "F64"):
            return torch.from_numpy(raw.view({"F32": np.float32, "F64": np.float64}[kind.name])).view(shape)
        if not nbytes:
            return torch.empty(shape)
        try:
            values = dequantize(raw.reshape(shape[0], -1), kind)
        except NotImplementedError:
            raise QuantizedWeights(
                f"tensor {name!r} is quantised as {kind.name}, which the gguf library does not decode",
                where=self.where,
                hint="Use a file of another type, such as Q8_0 or F16",
            ) from None
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(shape)

    def _fill(self, out: memoryview, name: str, skipped: int) -> None:
        """Fill memory with bytes of a tensor, from that many bytes behind its beginning on."""
        raise NotImplementedError


class GGUFFile(GGUFTensors):
    """One `.gguf` file: `metadata` and its tensors.

    Raises:
        NotGGUF, LFSPointer, CorruptHeader, Truncated: when opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = self.where = path
        kind = looks_like(path)
        refuse_lfs_pointer(path)
        refuse_other_kinds(kind, path)
        with opened(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            self._header = parse_header(data, len(data), path)

    def _header_with(self, key: str) -> GGUFHeader:
        with opened(self.path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return parse_header(data, len(data), self.path, whole=key)

    def _fill(self, out: memoryview, name: str, skipped: int) -> None:
        with opened(self.path) as file:
            file.seek(self._header.starts[name] + skipped)
            found = file.readinto(out) or 0
        if found < len(out):
            raise Truncated(
                f"the file ended inside tensor {name!r}: it changed while it was read",
                where=self.path,
                hint="Run again when nothing writes to it",
            )

    def provenance(self) -> dict[str, Any]:
        """The file's name, size and modification time."""
        return {"files": [file_facts(self.path)]}


def refuse_other_kinds(kind: str, where: object) -> None:
    """Raise NotGGUF for anything else."""
    if kind != "a GGUF file":
        raise NotGGUF(f"this is {kind}, not a GGUF file", where=where, hint=what_to_do(kind))


def open_gguf(
    name: str, open_part: Callable[[str], GGUFSource], exists: Callable[[str], bool], where: object
) -> tuple[TensorSource, Mapping[str, Any]]:
    """A GGUF file with all files it was split into, and its metadata.

    Args:
        name: of the file, or of any part of a split one.
        open_part, exists: open a file beside it, and say whether it is there.
        where: the place of them all, for messages.

    Raises:
        MissingShard: a part of a split file is absent.
    """
    file, match = open_part(name), _SPLIT.search(name)
    count = file.metadata.get("split.count")
    if not isinstance(count, int) or count <= 1:
        return file, file.metadata
    if match is None or int(match[2]) != count:
        raise MissingShard(
            f"{name} is one of {count} parts, but its name does not say which",
            where=where,
            hint=f"Give the parts their names back: NAME-00001-of-{count:05d}.gguf",
        )
    names = [f"{name[: match.start()]}-{number:05d}-of-{match[2]}.gguf" for number in range(1, count + 1)]
    absent = [part for part in names if not exists(part)]
    if absent:
        more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
        raise MissingShard(
            f"{', '.join(absent[:8])}{more} of {count} parts {'is' if len(absent) == 1 else 'are'} absent",
            where=where,
            hint="Download all parts",
        )
    parts = {part: file if part == name else open_part(part) for part in names}
    return Shards(parts), parts[names[0]].metadata


class NeedsMore(Exception):
    """The header goes on behind what was given of the file."""


def first_part(name: str, metadata: Mapping[str, Any]) -> str:
    """Name of the file whose metadata count: the first of a split one."""
    count = metadata.get("split.count")
    split = isinstance(count, int) and count > 1
    return _SPLIT.sub(lambda match: f"-00001-of-{match[2]}.gguf", name) if split else name


def parse_header(data: bytes | mmap.mmap, size: int, where: object, *, whole: str | None = None) -> GGUFHeader:
    """The header of a file of that size, of which `data` is the beginning; the array under the key `whole` is kept however
    long it is.

    Raises:
        CorruptHeader, Truncated.
        NeedsMore: `data` ends inside the header and the file does not.
    """
    try:
        return _Cursor(data, size, where, whole).header()
    except UnicodeDecodeError as error:
        raise _corrupt(f"a text in it is not UTF-8 ({error.reason})", where) from None


def _corrupt(fault: str, where: object) -> CorruptHeader:
    return CorruptHeader(f"the header is corrupt: {fault}", where=where, hint="Download the file again")


class _Cursor:
    def __init__(self, data: bytes | mmap.mmap, size: int, where: object, whole: str | None = None) -> None:
        self.data, self.size, self.where, self.whole, self.at = data, size, where, whole, 4

    def fail(self, fault: str) -> CorruptHeader:
        return _corrupt(fault, self.where)

    def advance(self, count: int) -> int:
        """Step over bytes that must be there, and return where they begin."""
        start = self.at
        if count > self.size:
            raise self.fail(f"it asks for {count:,} bytes at {start:,}, more than the whole file has")
        if start + count > self.size:
            raise Truncated(
                f"expected {start + count:,} bytes or more, found {self.size:,}: the file ends inside its header",
                where=self.where,
                hint="The download stopped early: fetch the file again",
            )
        if start + count > len(self.data):
            raise NeedsMore
        self.at = start + count
        return start

    def take(self, code: str) -> Any:
        return struct.unpack_from(code, self.data, self.advance(struct.calcsize(code)))[0]

    def text(self) -> str:
        start = self.advance(self.take("<Q"))
        return self.data[start : self.at].decode("utf-8")

    def skip_texts(self, count: int) -> None:
        """Step over so many texts: vocabularies have a quarter of a million, and this is most of opening a file."""
        data, at, size, length = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        while count and at + 8 <= size and (after := at + 8 + length(data, at)[0]) <= size:
            at, count = after, count - 1
        self.at = at
        for _ in range(count):  # says what is wrong there
            self.advance(self.take("<Q"))

    def value(self, kind: int, depth: int = 0, *, whole: bool = False) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.fail(f"value type {kind} does not exist")
        if depth == _DEEPEST:
            raise self.fail(f"arrays stand {_DEEPEST + 1} deep in one another")
        inner, count = self.take("<I"), self.take("<Q")
        if count > self.size:
            raise self.fail(f"an array of {count:,} values is longer than the file")
        if count <= _KEPT or whole:
            return [self.value(inner, depth + 1) for _ in range(count)]
        if inner in _SCALARS:
            self.advance(count * struct.calcsize(_SCALARS[inner]))
        elif inner == _STRING:
            self.skip_texts(count)
        else:
            raise self.fail(f"an array of {count:,} values of type {inner}")
        return None

    def pairs(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self.text()
            if key in metadata:
                raise self.fail(f"the key {key[:80]!r} stands in it twice")
            metadata[key] = self.value(self.take("<I"), whole=key == self.whole)
        for key, kind in (("general.architecture", str), ("general.alignment", int), ("split.count", int)):
            if key in metadata and type(metadata[key]) is not kind:
                raise self.fail(f"{key} is {metadata[key]!r:.80}")
        return metadata

    def header(self) -> GGUFHeader:
        version = self.take("<I")
        if version not in (2, 3):
            raise self.fail(f"format version {version} is not 2 or 3 (big-endian files are not read)")
        tensors, pairs = self.take("<Q"), self.take("<Q")
        if max(tensors, pairs) > self.size:
            raise self.fail(f"{tensors:,} tensors and {pairs:,} entries are more than the file has bytes")
        metadata = self.pairs(pairs)
        rows = []
        for _ in range(tensors):
            name, dims = self.text(), self.take("<I")
            if dims > 8:
                raise self.fail(f"tensor {name[:80]!r} has {dims} dimensions")
            shape = tuple(self.take("<Q") for _ in range(dims))[::-1]
            rows.append((name, shape, self.take("<I"), self.take("<Q")))
        align = metadata.get("general.alignment", 32)
        if not 0 < align <= 1 << 20:
            raise self.fail(f"general.alignment is {align}")
        start = -(-self.at // align) * align
        header = GGUFHeader(metadata, {}, {}, {})
        for name, shape, code, offset in rows:
            if name in header.infos:
                raise self.fail(f"tensor {name[:80]!r} stands in it twice")
            kind, nbytes = self.sizes(name, shape, code)
            end = start + offset + nbytes
            if offset > _TOO_MANY:
                raise self.fail(f"tensor {name[:80]!r} begins at byte {offset:,}")
            if end > self.size:
                raise Truncated(
                    f"expected {end:,} bytes or more, found {self.size:,}: tensor {name[:80]!r} is affected",
                    where=self.where,
                    hint="The download stopped early: fetch the file again",
                )
            header.infos[name] = TensorInfo(name, kind.name, shape, nbytes, str(self.where))
            header.starts[name], header.types[name] = start + offset, kind
        return header

    def sizes(self, name: str, shape: tuple[int, ...], code: int) -> tuple[Any, int]:
        """Type and bytes of a tensor."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(code)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self.fail(f"tensor {name[:80]!r} has type {code}, which the gguf library does not know") from None
        count = 1
        for size in shape:
            count *= size
            if count >= _TOO_MANY:
                raise self.fail(f"tensor {name[:80]!r} has a shape that overflows: {list(shape)}")
        width = shape[-1] if shape else 1
        if width % block:
            raise self.fail(f"tensor {name[:80]!r} of {kind.name} has rows of {width}, not a multiple of {block}")
        return kind, count // block * block_bytes
