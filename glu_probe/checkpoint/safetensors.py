"""Reading safetensors: the header first, checked for every way it can lie, then ranges of rows.

The header is parsed here because the format's own library answers most broken files with one and the same
message, maps whole files into memory, and a user needs to know which tensor and which fault it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CorruptHeader, NotSafetensors, QuantizedWeights, TrailingBytes, Truncated
from .memory import empty
from .sniff import file_facts, looks_like, refuse_lfs_pointer
from .source import TensorInfo

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # the limit that the format itself sets


class SafetensorsFile:
    """One `.safetensors` file.

    Raises:
        NotSafetensors, LFSPointer, CorruptHeader, Truncated, TrailingBytes: when opened, before data is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_lfs_pointer(path)
        self._infos, self._starts = read_header(path)

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._infos

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor, or a contiguous range of its rows, in its stored dtype."""
        info = self._infos[name]
        if info.dtype not in FLOATS:
            raise QuantizedWeights(
                f"tensor {name!r} is stored as {info.dtype}",
                where=self.path,
                hint="Use a checkpoint in float or bfloat16",
            )
        shape, offset = list(info.shape), self._starts[name]
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            offset += first * math.prod(shape[1:]) * _BYTES[info.dtype]
            shape[0] = max(last - first, 0)
        out = empty(tuple(shape), FLOATS[info.dtype])
        target = out.view(-1).view(torch.uint8).numpy()
        with self.path.open("rb", buffering=0) as file:
            file.seek(offset)
            _read_fully(file, target, name, self.path)
        return out

    def provenance(self) -> dict[str, Any]:
        """The file's name, size and modification time."""
        return {"files": [file_facts(self.path)]}


def _read_fully(file, target: np.ndarray, name: str, path: Path) -> None:
    view, done = memoryview(target), 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise Truncated(f"the file ended inside tensor {name!r}: it changed while it was read", where=path)
        done += count


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Facts and file offset of every tensor, after the header has been checked against itself and the file."""
    if path.is_dir() or path.stat().st_size < 8 or looks_like(path) not in (
        "a safetensors file", "a file of an unknown kind"
    ):  # fmt: skip
        raise NotSafetensors(
            f"this is {looks_like(path)}, not a safetensors file", where=path, hint="Download the file again"
        )
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        _check(length <= _MAX_HEADER, path, f"its length of {length:,} bytes is beyond the format's {_MAX_HEADER:,}")
        _check(8 + length <= size, path, f"its length of {length:,} bytes is beyond the file's end at {size:,}")
        raw = file.read(length)
    header = _parse(raw, path)
    infos: dict[str, TensorInfo] = {}
    spans: dict[str, tuple[int, int]] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            infos[name], spans[name] = _tensor(name, entry, path)
    _check_spans(spans, size - 8 - length, path)
    return infos, {name: 8 + length + begin for name, (begin, _) in spans.items()}


def _check(true: bool, path: Path, fault: str) -> None:
    if not true:
        raise CorruptHeader(f"the header is corrupt: {fault}", where=path, hint="Download the file again")


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            _check(key not in seen, path, f"the key {key!r} stands in it twice")
            seen[key] = value
        return seen

    _check(b"\0" not in raw, path, "it is padded with NUL bytes")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CorruptHeader(
            f"the header is corrupt: it is not JSON ({error})", where=path, hint="Download the file again"
        ) from None
    _check(isinstance(header, dict), path, "it is not a JSON object")
    return header


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(name: str, entry: Any, path: Path) -> tuple[TensorInfo, tuple[int, int]]:
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets, dtype = fields.get("shape"), fields.get("data_offsets"), fields.get("dtype")
    complete = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 and isinstance(dtype, str)
    _check(complete, path, f"tensor {name!r} lacks dtype, shape or data_offsets")
    negative = any(isinstance(size, int) and size < 0 for size in shape)
    _check(not negative, path, f"tensor {name!r} has a negative dimension in shape {shape}")
    _check(all(map(_natural, shape)), path, f"tensor {name!r} has a shape that is not of whole numbers: {shape}")
    _check(all(map(_natural, offsets)), path, f"tensor {name!r} has data offsets that are not sizes: {offsets}")
    begin, end = offsets
    _check(begin <= end, path, f"tensor {name!r} ends before it begins: {offsets}")
    count = math.prod(shape)
    _check(count < 2**60, path, f"tensor {name!r} has a shape that overflows: {shape}")
    if dtype in _BYTES:
        needs = count * _BYTES[dtype]
        _check(
            needs == end - begin,
            path,
            f"tensor {name!r} of {dtype} {shape} needs {needs:,} bytes, its offsets give it {end - begin:,}",
        )
    return TensorInfo(name, dtype, tuple(shape), end - begin, str(path)), (begin, end)


def _check_spans(spans: Mapping[str, tuple[int, int]], available: int, path: Path) -> None:
    position, before = 0, None
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin < position:
            _check(False, path, f"tensors {before!r} and {name!r} overlap")
        _check(begin == position, path, f"there is a hole of {begin - position:,} bytes before tensor {name!r}")
        position, before = end, name
    if position > available:
        first = min((span, name) for name, span in spans.items() if span[1] > available)[1]
        raise Truncated(
            f"the header promises {position:,} bytes of data, the file holds {available:,}; "
            f"the first tensor affected is {first!r}",
            where=path,
            hint="The download stopped early: fetch the file again",
        )
    if position < available:
        raise TrailingBytes(
            f"{available - position:,} bytes follow the last tensor: expected {position:,} bytes of data, "
            f"found {available:,}",
            where=path,
            hint="The file was appended to or its header rewritten: fetch it again",
        )
