"""Weights of bitsandbytes: 4 bits in blocks of the flattened matrix (NF4, FP4), and 8 bits with a scale for every row."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from .libraries import bitsandbytes
from .parts import Packed, Parts, Scheme

_STATES = ("nf4", "fp4")
_PER_127 = 1 / 127


def bnb_4bit(name: str, parts: Parts, _scheme: Scheme) -> Packed | None:
    """X.weight holds bytes, X.weight.quant_state.* as JSON what shape they have, and X.weight.absmax the blocks' scales.

    The scales may themselves be packed in blocks; X.weight.nested_* then hold how.
    """
    state = next((s for kind in _STATES if (s := f"{name}.quant_state.bitsandbytes__{kind}") in parts.infos), None)
    if state is None:
        return None
    facts = _facts(name, state, parts)
    nested = [f"{name}.nested_absmax", f"{name}.nested_quant_map"] if "nested_blocksize" in facts else []
    beside = [f"{name}.absmax", f"{name}.quant_map", *nested]
    info, shape, block = parts.infos[name], tuple(facts["shape"]), facts["blocksize"]
    count = math.prod(shape)
    blocks = -(-count // block)
    if info.nbytes != (count + 1) // 2 or parts.info(beside[0], name).shape != (blocks,):
        raise parts.misfit(beside[0], name, f"bytes for {list(shape)} and {blocks} blocks, as {state!r} says")
    for part in beside[1:]:
        parts.info(part, name)

    def rows(start: int, stop: int) -> Tensor:
        library = bitsandbytes(name)
        keys = {part.removeprefix(f"{name}."): parts.whole(part) for part in (*beside, state)}
        whole = library.QuantState.from_dict(keys, device=torch.device("cpu"))
        scales = whole.absmax
        if whole.nested:
            scales = library.dequantize_blockwise(scales, whole.state2) + whole.offset
        parts.sound(name, beside[0], scales, signed=whole.nested)  # what rounding may leave of almost nothing
        # Whole blocks, and so whole bytes: blocks do not end where rows do.
        width = shape[1]
        first, last = start * width // block, -(-stop * width // block)
        begin, end = first * block, min(last * block, count)
        size = info.nbytes // max(info.shape[0], 1)  # bytes are kept under any dtype
        low, high = begin // 2 // size, -(-((end + 1) // 2) // size)
        stored = parts.rows(name, low, high).contiguous().view(torch.uint8).reshape(-1)[begin // 2 - low * size :]
        stored = stored[: (end - begin + 1) // 2].reshape(-1, 1)
        even = 2 * len(stored)
        piece = library.QuantState(
            absmax=scales[first:last].float(), shape=torch.Size((even,)), code=whole.code, blocksize=block,
            quant_type=whole.quant_type, dtype=whole.dtype,
        )  # fmt: skip
        values = library.dequantize_4bit(stored, piece).reshape(-1)
        return values[start * width - begin : stop * width - begin].reshape(stop - start, width)

    return Packed(name, f"bitsandbytes {facts['quant_type'].upper()}", shape, (name, *beside, state), rows)


def _facts(name: str, state: str, parts: Parts) -> dict[str, Any]:
    try:
        facts = json.loads(bytes(parts.whole(state).tolist()))
        sound = (
            facts["quant_type"] in _STATES
            and facts["blocksize"] in (32, 64, 128, 256, 512, 1024, 2048, 4096)
            and facts["dtype"] in ("float16", "bfloat16", "float32")
            and len(facts["shape"]) == 2
            and all(isinstance(size, int) and size > 0 for size in facts["shape"])
        )
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise parts.refused(name, f"is packed by bitsandbytes, and {state!r} does not say how in a way known here")
    return facts


def bnb_int8(name: str, parts: Parts, _scheme: Scheme) -> Packed | None:
    """X.weight holds integers of which 127 stand for the largest value of their row, which X.SCB holds."""
    stem, info = name.removesuffix("weight"), parts.infos[name]
    scales, layout = f"{stem}SCB", f"{stem}weight_format"
    if info.dtype != "I8" or scales not in parts.infos or not name.endswith(".weight"):
        return None
    if len(info.shape) != 2 or parts.infos[scales].shape != info.shape[:1]:
        raise parts.misfit(scales, name, "one scale for every row")
    names = (name, scales, *((layout,) if layout in parts.infos else ()))

    def rows(start: int, stop: int) -> Tensor:
        if layout in names and parts.whole(layout).any():
            raise parts.refused(name, "is laid out for a GPU's kernels, not row by row")
        values = parts.rows(name, start, stop).float()
        values *= parts.sound(name, scales, parts.rows(scales, start, stop).float()[:, None], values)
        return values.mul_(_PER_127)

    return Packed(name, "bitsandbytes INT8", info.shape, names, rows)
