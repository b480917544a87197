"""Small numbers with a scale beside them that multiplies: FP8, FP4 and integers, a scale for the whole, a row or a block.

The grid of scales is laid over the weight from its first row and column on; the last blocks may be cut short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import QuantizedWeights, ShapeMismatch
from ..safetensors import FLOATS
from .fp4 import GROUP, powers_of_two, unpack
from .parts import UNQUANTISED, Packed, Parts, Scheme

# All of them multiply, the one called an inverse too: it is the inverse of what the weight was multiplied with.
_BESIDE_A_LINEAR = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
_BESIDE_EXPERTS = ("_scale_inv", "_scale")
_EXPONENTS = ("U8", "F8_E8M0")
_USUAL_BLOCK = 128


def fp8(name: str, parts: Parts, scheme: Scheme) -> Packed | None:
    """An 8-bit float weight; None without a scale, which is then refused as meaningless."""
    if parts.infos[name].dtype not in ("F8_E4M3", "F8_E5M2"):
        return None
    scale = scale_of(name, parts)
    return None if scale is None else _scaled(name, scale, None, parts, scheme)


def fp4_in_int8(name: str, parts: Parts, scheme: Scheme) -> Packed | None:
    """FP4 experts among FP8 weights: two values a byte, declared as int8."""
    if parts.infos[name].dtype != "I8":
        return None
    scale = scale_of(name, parts)
    if scale is None:
        return None
    if parts.infos[scale].dtype not in _EXPONENTS:
        raise parts.refused(name, f"is int8 with a scale of {parts.infos[scale].dtype}: neither FP8 nor FP4")
    return _scaled(name, scale, None, parts, scheme, fp4=True)


def int8(name: str, parts: Parts, scheme: Scheme) -> Packed | None:
    """An int8 weight of compressed-tensors, with a zero point beside it or without."""
    if parts.infos[name].dtype != "I8" or not name.endswith(".weight"):
        return None
    scale = scale_of(name, parts)
    if scale is None:
        return None
    zero = f"{name}_zero_point"
    if zero in parts.infos and parts.infos[zero].shape != parts.infos[scale].shape:
        raise parts.misfit(zero, scale, "one for every scale")
    return _scaled(name, scale, zero if zero in parts.infos else None, parts, scheme)


def scale_of(name: str, parts: Parts) -> str | None:
    """The scale beside a weight, None if there is none.

    Raises:
        QuantizedWeights: there are several.
    """
    linear = name.endswith(".weight")
    stem = name.removesuffix("weight") if linear else name
    scales = [stem + end for end in (_BESIDE_A_LINEAR if linear else _BESIDE_EXPERTS) if stem + end in parts.infos]
    if len(scales) > 1:
        raise QuantizedWeights(
            f"{name!r} has {len(scales)} scales beside it, {' and '.join(map(repr, scales))}, and which of them counts is "
            "not known",
            where=parts.infos[name].file,
            hint=UNQUANTISED,
        )
    return scales[0] if scales else None


def _scaled(name: str, scale: str, zero: str | None, parts: Parts, scheme: Scheme, *, fp4: bool = False) -> Packed:
    info, beside = parts.infos[name], parts.infos[scale]
    shape = (*info.shape[:-1], 2 * info.shape[-1]) if fp4 else info.shape
    exponents = beside.dtype in _EXPONENTS
    if len(shape) < 2 or not (exponents or beside.dtype in FLOATS):
        raise parts.refused(name, f"{list(shape)} with a scale of {beside.dtype} is not foreseen")
    grid = _aligned(beside.shape, shape)
    if grid is None:
        raise parts.misfit(scale, name, "one scale, one for every row, or a grid of blocks")
    declared = _declared(scheme)
    blocks = _blocks(shape, grid, declared, exponents)
    if blocks is None:
        raise ShapeMismatch(
            f"{scale!r} is {list(beside.shape)}, which is no grid of blocks over {name!r} {list(shape)}"
            + (f" with the config's block sizes {declared}" if declared else " of a usual size"),
            where=beside.file,
            hint="The config's quantization_config.weight_block_size decides; the file is damaged, or the config is of "
            "another model",
        )

    def spread(part: str, start: int, stop: int) -> Tensor:
        """The grid, laid over rows start to stop."""
        if grid[0] == 1:
            values = parts.whole(part).reshape(grid)
        else:
            first, last = start // blocks[0], -(-stop // blocks[0])
            values = parts.rows(part, first, last).reshape(last - first, *grid[1:])
        values = powers_of_two(values) if exponents and part == scale else values.float()
        if grid[0] > 1:
            values = values[torch.arange(start, stop) // blocks[0] - first]
        for axis in range(1, len(shape)):
            if grid[axis] not in (1, shape[axis]):
                values = values.repeat_interleave(blocks[axis], axis).narrow(axis, 0, shape[axis])
        return values

    def rows(start: int, stop: int) -> Tensor:
        stored = parts.rows(name, start, stop)
        values = unpack(stored) if fp4 else stored.float()
        if zero is not None:
            values -= spread(zero, start, stop)
        values *= parts.sound(name, scale, spread(scale, start, stop), values, signed=info.dtype == "I8" and not fp4)
        # The libraries give their results in the scale's dtype, and the model runs on those.
        return values if exponents else values.to(FLOATS[beside.dtype])

    names = (name, scale) if zero is None else (name, scale, zero)
    words = f"{'FP4' if fp4 else info.dtype} x {_words(shape, blocks)} scale{'' if zero is None else ' and zero point'}"
    # Scales for every column of stacked experts are those of the outputs: the experts lie transposed.
    transposed = len(shape) > 2 and blocks[-2:] == (shape[-2], 1) and shape[-2] > 1
    return Packed(name, words, shape, names, rows, False if transposed else None)


def _aligned(grid: Sequence[int], shape: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of the scales with an axis for every one of the weight."""
    if math.prod(grid) == 1:
        return (1,) * len(shape)
    if len(grid) == len(shape):
        return tuple(grid)
    # One for every row, or for every matrix of a stack.
    return (*grid, *(1,) * (len(shape) - len(grid))) if tuple(grid) == tuple(shape[: len(grid)]) else None


def _declared(scheme: Scheme) -> list[tuple[int, int]]:
    """Block sizes that the config names."""
    found = [scheme.settings.get("weight_block_size")]
    groups = scheme.settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            size = weights.get("group_size")
            found += [weights.get("block_structure"), [1, size] if size and size > 0 else None]
    return [(block[0], block[1]) for block in found if isinstance(block, (list, tuple)) and len(block) == 2]


def _blocks(
    shape: Sequence[int], grid: Sequence[int], declared: Sequence[tuple[int, int]], exponents: bool
) -> tuple[int, ...] | None:
    """Sizes of the blocks along every axis; None if they do not cover the weight.

    The number of blocks alone does not tell their size where the last is cut short, and fits a grid that lies the wrong
    way too: the size is the declared one. If nothing is declared it is the usual one, and else only blocks that divide
    the weight evenly are taken, and only squares and parts of rows. A scale for every column is one of every input,
    but in stacked experts: without a word of the config it is a scale of the outputs that was turned round.
    """
    if any(count not in (1, size) for size, count in zip(shape[:-2], grid[:-2], strict=True)):
        return None
    stack = tuple(size if count == 1 else 1 for size, count in zip(shape[:-2], grid[:-2], strict=True))
    (height, width), (down, across) = shape[-2:], grid[-2:]
    if across == 1 and down in (1, height):
        return (*stack, height if down == 1 else 1, width)
    if stack and (down, across) == (1, width):
        return (*stack, height, 1)
    sizes = [*declared] or [(_USUAL_BLOCK, _USUAL_BLOCK), (1, _USUAL_BLOCK)]
    if exponents:
        sizes.append((1, GROUP))
    if not declared:
        even = [size // count for size, count in ((width, across), (height, down)) if count and size % count == 0]
        sizes += [(1, size) for size in even if size > 1] + [(size, size) for size in even]
    for rows, columns in sizes:
        if min(rows, columns) > 0 and (-(-height // rows), -(-width // columns)) == (down, across):
            return (*stack, min(rows, height), min(columns, width))
    return None


def _words(shape: Sequence[int], blocks: Sequence[int]) -> str:
    rows, columns = (block == size for block, size in zip(blocks[-2:], shape[-2:], strict=True))
    if rows and columns:
        return "tensor"
    if columns and blocks[-2] == 1:
        return "row"
    if rows and blocks[-1] == 1:
        return "column"
    return f"{blocks[-2]}x{blocks[-1]}"
