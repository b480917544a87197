"""Reading safetensors: the header first, checked for every way it can lie, then ranges of rows.

The header is parsed here because the format's own library answers most broken files with one and the same
message, maps whole files into memory, and a user needs to know which tensor and which fault it was.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CorruptHeader, NotSafetensors, QuantizedWeights, TrailingBytes, Truncated
from .raw import RawMatrix
from .sniff import file_facts, looks_like, opened, refuse_lfs_pointer, what_to_do
from .source import TensorInfo

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What quantised weights and their scales are made of.
STORED = FLOATS | {
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7
    STORED["F8_E8M0"] = torch.float8_e8m0fnu
_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # the limit that the format itself sets
_PIECE = 1 << 20
_TOO_MANY = 2**60


class SafetensorsTensors:
    """The tensors of one safetensors file whose header is known; where its bytes come from, subclasses say."""

    where: object
    _infos: Mapping[str, TensorInfo]
    _starts: Mapping[str, int]

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._infos

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor, or a contiguous range of its rows, in its stored dtype."""
        self._refuse_other_than(FLOATS, name)
        return self.stored(name, rows)

    def stored(self, name: str, rows: slice | None = None) -> Tensor:
        """The same for integers and 8-bit floats too, which mean nothing without what stands beside them."""
        info = self._infos[name]
        self._refuse_other_than(STORED, name)
        shape, skipped = list(info.shape), 0
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            skipped = first * math.prod(shape[1:]) * _BYTES[info.dtype]
            shape[0] = max(last - first, 0)
        out = torch.empty(shape, dtype=STORED[info.dtype])
        if out.numel():
            self._fill(out.view(-1).view(torch.uint8).numpy().data, name, skipped)
        return out

    def _fill(self, out: memoryview, name: str, skipped: int) -> None:
        """Fill memory with bytes of a tensor, from that many bytes behind its beginning on."""
        raise NotImplementedError

    def _refuse_other_than(self, dtypes: Mapping[str, torch.dtype], name: str) -> None:
        if self._infos[name].dtype not in dtypes:
            raise QuantizedWeights(
                f"tensor {name!r} is stored as {self._infos[name].dtype}",
                where=self.where,
                hint="Use a checkpoint in float or bfloat16",
            )


class SafetensorsFile(SafetensorsTensors):
    """One `.safetensors` file.

    Raises:
        NotSafetensors, LFSPointer, CorruptHeader, Truncated, TrailingBytes: when opened, before data is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = self.where = path
        refuse_lfs_pointer(path)
        self._infos, self._starts = read_header(path)

    def _fill(self, out: memoryview, name: str, skipped: int) -> None:
        with opened(self.path, buffered=False) as file:
            file.seek(self._starts[name] + skipped)
            _read_fully(file, out, name, self.path)

    def raw(self, name: str) -> RawMatrix | None:
        """Where in the file a matrix of floats lies; None for other tensors."""
        info = self._infos[name]
        if info.dtype not in FLOATS or len(info.shape) != 2:
            return None
        return RawMatrix(self.path, self._starts[name], info.shape, FLOATS[info.dtype])

    def provenance(self) -> dict[str, Any]:
        """The file's name, size and modification time."""
        return {"files": [file_facts(self.path)]}


def _read_fully(file: io.BufferedReader | io.FileIO, view: memoryview, name: str, path: Path) -> None:
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise Truncated(
                f"the file ended inside tensor {name!r}: it changed while it was read",
                where=path,
                hint="Run again when nothing writes to it",
            )
        done += count


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Facts and file offset of every tensor, after the header has been checked against itself and the file."""
    kind = looks_like(path)
    if kind in ("a directory", "a device or pipe"):
        refuse_other_kinds(kind, 0, path)
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        refuse_other_kinds(kind, size, path)
        left, pieces = header_length(file.read(8), size, path), []
        while left:  # in pieces, so that a hole in the file is refused before all of it is in memory
            pieces.append(file.read(min(left, _PIECE)))
            _refuse_nul(pieces[-1], path)
            if not pieces[-1]:
                raise _corrupt("it ended while it was read", path)
            left -= len(pieces[-1])
    return parse_header(b"".join(pieces), size, path)


def refuse_other_kinds(kind: str, size: int, where: object) -> None:
    """Raise NotSafetensors for what can be told to be something else."""
    if size < 8 or kind not in ("a safetensors file", "a file of an unknown kind"):
        raise NotSafetensors(f"this is {kind}, not a safetensors file", where=where, hint=what_to_do(kind))


def header_length(start: bytes, size: int, where: object) -> int:
    """Length of the header, from the first 8 bytes of a file of that size."""
    length = int.from_bytes(start[:8], "little")
    if length > _MAX_HEADER:
        raise _corrupt(f"its length of {length:,} bytes is beyond the format's limit of {_MAX_HEADER:,}", where)
    if 8 + length > size:
        raise _corrupt(f"its length of {length:,} bytes is beyond the file's end at {size:,}", where)
    return length


def parse_header(raw: bytes, size: int, where: object) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Facts and file offset of every tensor, from the header's text and the size of the whole file."""
    header = _parse(raw, where)
    infos: dict[str, TensorInfo] = {}
    spans: dict[str, tuple[int, int]] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            infos[name], spans[name] = _tensor(name, entry, where)
    _check_spans(spans, size - 8 - len(raw), where)
    return infos, {name: 8 + len(raw) + begin for name, (begin, _) in spans.items()}


def _corrupt(fault: str, where: object) -> CorruptHeader:
    return CorruptHeader(f"the header is corrupt: {fault}", where=where, hint="Download the file again")


def _refuse_nul(raw: bytes, where: object) -> None:
    if b"\0" in raw:
        raise _corrupt("it is padded with NUL bytes", where)


def _parse(raw: bytes, where: object) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in seen if keys.count(key) > 1)
            raise _corrupt(f"the key {_short(twice)} stands in it twice", where)
        return seen

    _refuse_nul(raw, where)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _corrupt(f"it is not JSON ({error})", where) from None
    if not isinstance(header, dict):
        raise _corrupt("it is not a JSON object", where)
    return header


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]} ..."


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(name: str, entry: Any, where: object) -> tuple[TensorInfo, tuple[int, int]]:
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets, dtype = fields.get("shape"), fields.get("data_offsets"), fields.get("dtype")
    tensor = f"tensor {_short(name)}"
    if not (isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 and isinstance(dtype, str)):
        raise _corrupt(f"{tensor} lacks dtype, shape or data_offsets", where)
    if any(isinstance(size, int) and size < 0 for size in shape):
        raise _corrupt(f"{tensor} has a negative dimension in shape {_short(shape)}", where)
    if not all(map(_natural, shape)):
        raise _corrupt(f"{tensor} has a shape that is not of whole numbers: {_short(shape)}", where)
    if not all(map(_natural, offsets)):
        raise _corrupt(f"{tensor} has data offsets that are not sizes: {_short(offsets)}", where)
    begin, end = offsets
    if begin > end:
        raise _corrupt(f"{tensor} ends before it begins: {_short(offsets)}", where)
    count = 1
    for size in shape:  # not math.prod: the product of what a hostile header lists can take minutes
        count *= size
        if count >= _TOO_MANY:
            raise _corrupt(f"{tensor} has a shape that overflows: {_short(shape)}", where)
    if dtype in _BYTES and count * _BYTES[dtype] != end - begin:
        raise _corrupt(
            f"{tensor} of {dtype} {_short(shape)} needs {count * _BYTES[dtype]:,} bytes, its offsets "
            f"{_short(offsets)} give it another number",
            where,
        )
    return TensorInfo(name, dtype, tuple(shape), end - begin, str(where)), (begin, end)


def _check_spans(spans: Mapping[str, tuple[int, int]], available: int, where: object) -> None:
    position, before = 0, None
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin < position:
            raise _corrupt(f"tensors {_short(before)} and {_short(name)} overlap", where)
        if begin > position:
            raise _corrupt(f"there is a hole between bytes {position:,} and {begin:,}, before {_short(name)}", where)
        position, before = end, name
    if position > available:
        first = min((span, name) for name, span in spans.items() if span[1] > available)[1]
        raise Truncated(
            f"expected {position:,} bytes of data by the header, found {available:,}; "
            f"the first tensor affected is {first!r}",
            where=where,
            hint="The download stopped early: fetch the file again",
        )
    if position < available:
        raise TrailingBytes(
            f"{available - position:,} bytes follow the last tensor: expected {position:,} bytes of data by the "
            f"header, found {available:,}",
            where=where,
            hint="The file was appended to or its header rewritten: fetch it again",
        )
