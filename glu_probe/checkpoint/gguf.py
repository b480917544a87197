"""Reading GGUF: an own walk over the header, the `gguf` library for what the quantised bytes mean.

The library's reader builds an object per vocabulary entry (seconds for a large vocabulary) and maps the file;
the header alone is needed here, in a fraction of that.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CorruptHeader, MissingShard, NotGGUF, QuantizedWeights, Truncated
from .sniff import file_facts, looks_like, refuse_lfs_pointer
from .source import Shards, TensorInfo, TensorSource

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_KEPT = 64  # longer arrays are vocabularies: skipped
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GGUFFile:
    """One `.gguf` file: `metadata` (its key-value pairs without long arrays) and its tensors.

    Raises:
        NotGGUF, LFSPointer, CorruptHeader, Truncated: when opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_lfs_pointer(path)
        if path.is_dir() or looks_like(path) != "a GGUF file":
            raise NotGGUF(f"this is {looks_like(path)}, not a GGUF file", where=path, hint="Download the file again")
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self.metadata, self._infos, self._starts, self._types = _Header(data, path).parse()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise CorruptHeader(f"the header is corrupt: {error}", where=path, hint="Download the file again") from None

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name; shapes outermost first (the file lists them the other way round)."""
        return self._infos

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor, or a range of its rows, dequantised; float16 and bfloat16 widened to float32."""
        from gguf.quants import dequantize

        info, kind = self._infos[name], self._types[name]
        total = info.shape[0] if len(info.shape) > 1 else 1
        row_bytes = info.nbytes // total
        first, last, _ = (rows or slice(None)).indices(total) if len(info.shape) > 1 else (0, 1, 1)
        with self.path.open("rb") as file:
            file.seek(self._starts[name] + first * row_bytes)
            raw = np.fromfile(file, dtype=np.uint8, count=(last - first) * row_bytes)
        if raw.size < (last - first) * row_bytes:
            raise Truncated(f"the file ended inside tensor {name!r}: it changed while it was read", where=self.path)
        try:
            values = dequantize(_as_stored(raw.reshape(last - first, row_bytes), kind), kind)
        except NotImplementedError:
            raise QuantizedWeights(
                f"tensor {name!r} is quantised as {info.dtype}, which the gguf library does not decode",
                where=self.path,
                hint="Use a file of another type, such as Q8_0 or F16",
            ) from None
        shape = info.shape if len(info.shape) == 1 else (last - first, *info.shape[1:])
        values = np.ascontiguousarray(values, dtype=np.float32).reshape(shape)
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def provenance(self) -> dict[str, Any]:
        """The file's name, size and modification time."""
        return {"files": [file_facts(self.path)]}


def _as_stored(raw: np.ndarray, kind: Any) -> np.ndarray:
    """Bytes in the dtype the library expects: plain floats as such, quantised blocks as bytes."""
    return raw.view({"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(kind.name, np.uint8))


def open_gguf(path: Path) -> tuple[TensorSource, dict[str, Any]]:
    """A GGUF file with all files it was split into, and its metadata.

    Raises:
        MissingShard: a part of a split file is absent.
    """
    file = GGUFFile(path)
    count = int(file.metadata.get("split.count", 1) or 1)
    if count <= 1:
        return file, file.metadata
    match = _SPLIT.search(path.name)
    if match is None:
        raise MissingShard(
            f"this is one of {count} parts, but its name does not say which", where=path,
            hint="Give the parts their names back: NAME-00001-of-00005.gguf",
        )  # fmt: skip
    stem, parts = path.name[: match.start()], {}
    for number in range(1, count + 1):
        sibling = path.with_name(f"{stem}-{number:05d}-of-{match[2]}.gguf")
        if not sibling.exists():
            raise MissingShard(f"part {number} of {count} is absent", where=sibling, hint="Download all parts")
        parts[sibling.name] = GGUFFile(sibling)
    metadata = next(iter(parts.values())).metadata
    return Shards(parts), metadata


class _Header:
    """A cursor over the header."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 4

    def fail(self, fault: str) -> CorruptHeader:
        return CorruptHeader(f"the header is corrupt: {fault}", where=self.path, hint="Download the file again")

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def skip_text(self) -> slice:
        length = self.take("<Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise self.fail(f"a text of {length:,} bytes runs beyond the end of the file")
        return slice(start, self.at)

    def text(self) -> str:
        return self.data[self.skip_text()].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.fail(f"value type {kind} does not exist")
        inner, count = self.take("<I"), self.take("<Q")
        if count > len(self.data):
            raise self.fail(f"an array of {count:,} values is longer than the file")
        if count <= _KEPT:
            return [self.value(inner) for _ in range(count)]
        if inner in _SCALARS:
            self.at += count * struct.calcsize(_SCALARS[inner])
        elif inner == _STRING:
            for _ in range(count):
                self.skip_text()
        else:
            raise self.fail(f"an array of {count:,} arrays")
        return None

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo], dict[str, int], dict[str, Any]]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        version = self.take("<I")
        if version not in (2, 3):
            raise self.fail(f"format version {version} is not 2 or 3 (big-endian files are not read)")
        tensors, pairs = self.take("<Q"), self.take("<Q")
        if max(tensors, pairs) > len(self.data):
            raise self.fail(f"{tensors:,} tensors and {pairs:,} entries are more than the file has bytes")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.text()
            metadata[key] = self.value(self.take("<I"))
        rows = []
        for _ in range(tensors):
            name = self.text()
            dims = self.take("<I")
            if dims > 8:
                raise self.fail(f"tensor {name!r} has {dims} dimensions")
            shape = tuple(self.take("<Q") for _ in range(dims))[::-1]
            rows.append((name, shape, self.take("<I"), self.take("<Q")))
        align = int(metadata.get("general.alignment") or 32)
        if align <= 0:
            raise self.fail(f"alignment {align}")
        start = -(-self.at // align) * align
        infos: dict[str, TensorInfo] = {}
        starts, types = {}, {}
        for name, shape, code, offset in rows:
            if name in infos:
                raise self.fail(f"tensor {name!r} stands in it twice")
            try:
                kind = GGMLQuantizationType(code)
            except ValueError:
                raise self.fail(f"tensor {name!r} has the unknown type {code}") from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            width = shape[-1] if shape else 1
            if width % block:
                raise self.fail(f"tensor {name!r} of {kind.name} has rows of {width}, not a multiple of {block}")
            nbytes = math.prod(shape) // block * block_bytes
            if start + offset + nbytes > len(self.data):
                raise Truncated(
                    f"tensor {name!r} needs the file to hold {start + offset + nbytes:,} bytes, it holds "
                    f"{len(self.data):,}",
                    where=self.path,
                    hint="The download stopped early: fetch the file again",
                )
            infos[name] = TensorInfo(name, kind.name, shape, nbytes, str(self.path))
            starts[name], types[name] = start + offset, kind
        return metadata, infos, starts, types
