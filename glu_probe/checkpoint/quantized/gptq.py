"""GPTQ and AWQ: integers packed into 32-bit words, with a scale and a zero point for every group of inputs.

Both keep the transpose of the weight, so that every row of it lies scattered over all that is stored: reading a range of
rows takes the packed tensor whole. It is an eighth of the weight in float32 (at 4 bits) and kept from one range to the
next, until another weight is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..safetensors import FLOATS
from .parts import Packed, Parts, Scheme

_WORD = 32
# AWQ: where in its word the value of each of eight neighbouring columns lies.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def gptq(name: str, parts: Parts, scheme: Scheme) -> Packed | None:
    """X.qweight [in / n, out], X.qzeros [groups, out / n], X.scales [groups, out], and perhaps X.g_idx [in].

    In the first form of the format the stored zero points are one too small.
    """
    if not name.endswith(".qweight"):
        return None
    form = scheme.settings.get("checkpoint_format") or scheme.settings.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise parts.refused(name, f"is packed for GPTQ in the format {form!r}, which is not decoded here")
    stem = name.removesuffix("qweight")
    zeros, scales, order = f"{stem}qzeros", f"{stem}scales", f"{stem}g_idx"
    groups, height = _grid(name, scales, parts)
    bits = _bits(name, zeros, (groups, height), parts)
    packed = parts.infos[name].shape
    width = packed[0] * _WORD // bits
    if packed[1] != height or packed[0] * _WORD % bits:
        raise parts.misfit(scales, name, f"[groups, {packed[1]}]")
    if order in parts.infos and parts.infos[order].shape != (width,):
        raise parts.misfit(order, name, f"[{width}]")
    if scheme.settings.get("desc_act") and groups > 1:  # groups of inputs that do not lie together
        parts.info(order, name)
    size = None if order in parts.infos else _group_size(name, scales, width, parts, scheme)

    def rows(start: int, stop: int) -> Tensor:
        words, points, factors = parts.held(name, zeros, scales)
        group = parts.whole(order).long() if size is None else torch.arange(width) // size
        if group.min() < 0 or group.max() >= groups:
            raise parts.refused(name, f"has inputs in groups that are not there, by {order!r}")
        if len(group.unique()) != groups:
            raise parts.refused(name, f"has {groups} groups of inputs, of which {order!r} leaves some without any")
        values = _unpack(words[:, start:stop].T, bits)
        all_points = _unpack(points, bits)[:, :height]
        if form == "gptq":
            if bool((all_points == 2**bits - 1).any()):
                raise parts.refused(
                    name, f"has zero points in {zeros!r} that overflowed, which programs read differently"
                )
            all_points = all_points + 1
        if scheme.settings.get("sym") is True and not bool((all_points == 2 ** (bits - 1)).all()):
            raise parts.refused(
                name,
                f"is symmetric by the config, but {zeros!r} in the format {form!r} does not hold {2 ** (bits - 1)}",
            )
        return _scale(name, scales, parts, values, all_points[:, start:stop].T, factors[:, start:stop].T, group)

    names = (name, zeros, scales, *((order,) if order in parts.infos else ()))
    return Packed(f"{stem}weight", f"GPTQ INT{bits} x 1x{size or -(-width // groups)}", (height, width), names, rows)


def awq(name: str, parts: Parts, scheme: Scheme) -> Packed | None:
    """X.qweight [in, out / 8], X.qzeros [groups, out / 8] and X.scales [groups, out], as the form "gemm" has them."""
    if not name.endswith(".qweight"):
        return None
    settings = scheme.settings
    for key in ("version", "format", "checkpoint_format"):
        if str(settings.get(key, "gemm")).lower() != "gemm":
            raise parts.refused(name, f"is packed for AWQ in the {key} {settings[key]!r}, which is not decoded here")
    if settings.get("zero_point", True) is not True:
        raise parts.refused(name, "is packed for AWQ without zero points, which is not decoded here")
    stem = name.removesuffix("qweight")
    zeros, scales = f"{stem}qzeros", f"{stem}scales"
    groups, height = _grid(name, scales, parts)
    bits, packed = _bits(name, zeros, (groups, height), parts), parts.infos[name].shape
    if bits != 4 or packed[1] * len(_AWQ_PLACES) != height:
        raise parts.misfit(scales, name, f"[groups, {packed[1] * len(_AWQ_PLACES)}] and 4 bits")
    width = packed[0]
    size = _group_size(name, scales, width, parts, scheme)

    def rows(start: int, stop: int) -> Tensor:
        words, points, factors = parts.held(name, zeros, scales)
        first, last = start // len(_AWQ_PLACES), -(-stop // len(_AWQ_PLACES))
        inside = slice(start - first * len(_AWQ_PLACES), stop - first * len(_AWQ_PLACES))
        values, all_points = (_in_columns(_unpack(packed[:, first:last], 4))[:, inside].T for packed in (words, points))
        group = torch.arange(width) // size
        return _scale(name, scales, parts, values, all_points, factors[:, start:stop].T, group)

    return Packed(f"{stem}weight", f"AWQ INT4 x 1x{size}", (height, width), (name, zeros, scales), rows)


def _grid(name: str, scales: str, parts: Parts) -> tuple[int, int]:
    """(groups, outputs)."""
    info = parts.info(scales, name)
    if parts.infos[name].dtype != "I32" or len(parts.infos[name].shape) != 2:
        raise parts.refused(name, f"is {parts.infos[name].dtype} {list(parts.infos[name].shape)}, not words of 32 bits")
    if len(info.shape) != 2 or 0 in info.shape or info.dtype not in FLOATS:
        raise parts.misfit(scales, name, "[groups, out]")
    return info.shape[0], info.shape[1]


def _bits(name: str, zeros: str, grid: tuple[int, int], parts: Parts) -> int:
    """Bits of a value, from how many words the zero points of a group take."""
    info = parts.info(zeros, name)
    bits = next((bits for bits in (2, 4, 8) if info.shape == (grid[0], -(-grid[1] * bits // _WORD))), None)
    if bits is None or info.dtype != "I32":
        raise parts.misfit(zeros, name, f"[{grid[0]}, {grid[1]} * bits / 32] with 2, 4 or 8 bits")
    return bits


def _group_size(name: str, scales: str, width: int, parts: Parts, scheme: Scheme) -> int:
    """How many inputs a group has, by the config; their number alone does not tell where the last is cut short."""
    declared, groups = scheme.settings.get("group_size"), parts.infos[scales].shape[0]
    size = declared if isinstance(declared, int) and declared > 0 else width
    if -(-width // size) != groups:
        raise parts.misfit(scales, name, f"[{width} / {size}, out], by the config's group_size, which is {declared}")
    return size


def _unpack(words: Tensor, bits: int) -> Tensor:
    """[..., n] words to [..., n * 32 / bits] values, those in the low bits first."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def _in_columns(values: Tensor) -> Tensor:
    """Values of AWQ's words in the order of their columns."""
    return values.unflatten(-1, (-1, len(_AWQ_PLACES)))[..., _AWQ_PLACES].flatten(-2)


def _scale(name: str, part: str, parts: Parts, values: Tensor, zeros: Tensor, scales: Tensor, group: Tensor) -> Tensor:
    """[out, in] from values [out, in], zeros and scales [out, groups], and the group of every input."""
    whole = (values - zeros[:, group]).float()
    parts.sound(name, part, scales, whole, lambda s: s[:, group], signed=True)
    whole *= scales.float()[:, group]
    return whole.to(scales.dtype)
