"""Packed weights of compressed-tensors, through that library: 2, 4 and 8 bit integers, NVFP4, and MXFP4.

And what that library stores in other ways, to be refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..safetensors import FLOATS
from .fp4 import powers_of_two
from .libraries import compressed_tensors
from .parts import Packed, Parts, Scheme
from .scaled import int8, scale_of

_NVFP4_GROUP, _MXFP4_GROUP = 16, 32


def compressed(name: str, parts: Parts, scheme: Scheme) -> Packed | None:
    """A weight under X.weight_packed, with X.weight_scale and what else its format has beside it."""
    if not name.endswith(".weight_packed"):
        return None
    info, stem = parts.infos[name], name.removesuffix("_packed")
    if len(info.shape) != 2:
        raise parts.refused(name, f"is {list(info.shape)}; only packed matrices are read")
    if info.dtype == "I32":
        return _integers(name, stem, parts, scheme)
    if info.dtype == "U8":
        return _floats(name, stem, parts)
    raise parts.refused(name, f"is of {info.dtype}, which no known format of compressed-tensors is")


def transformed(name: str, parts: Parts, scheme: Scheme) -> None:
    """Refuse weights whose input or output a transform turns round: alone they are not the model's."""
    transforms = scheme.settings.get("transform_config")
    if not transforms or not name.endswith((".weight", ".weight_packed")) or len(parts.infos[name].shape) < 2:
        return
    groups = transforms.get("config_groups", transforms) if isinstance(transforms, Mapping) else {}
    kinds = sorted({str(group.get("type")) for group in groups.values() if isinstance(group, Mapping)})
    raise parts.refused(
        name, f"is stored for inputs or outputs that go through a transform ({', '.join(kinds)}), by transform_config"
    )


def signed_bytes(name: str, parts: Parts, scheme: Scheme) -> Packed | None:
    """An int8 weight, with a zero point beside it or without, as the config says."""
    if parts.infos[name].dtype != "I8" or not name.endswith(".weight"):
        return None
    if scale_of(name, parts) is None:
        parts.info(f"{name}_scale", name)
    if f"{name}_zero_point" not in parts.infos and _is_asymmetric(name, scheme):
        parts.info(f"{name}_zero_point", name)
    return int8(name, parts, scheme)


def _is_asymmetric(name: str, scheme: Scheme) -> bool:
    """Whether a group of the config that may mean this weight says that it has zero points."""
    groups = [
        (weights.get("symmetric", True), targets)
        for weights, targets in _groups(scheme.settings)
        if weights.get("num_bits") == 8 and weights.get("type", "int") == "int"
    ]
    named = [said for said, targets in groups if _is_targeted(name.removesuffix(".weight"), targets)]
    return not all(named or [said for said, _ in groups])


def unreadable(name: str, parts: Parts, scheme: Scheme) -> None:
    """Refuse what is left of the library's forms."""
    if name.endswith((".compressed", ".bitmask")):
        sparsity = scheme.settings.get("sparsity_config")
        form = sparsity.get("format") if isinstance(sparsity, Mapping) else None
        raise parts.refused(name, f"is a sparse weight without its zeros ({form or 'a form that is not named'})")
    if not name.endswith(".weight"):
        return
    dtype, scale = parts.infos[name].dtype, scale_of(name, parts)
    if dtype in FLOATS and scale is not None:
        raise parts.refused(name, f"is {dtype} with {scale!r} beside it, and whether that is applied is not known")
    if dtype not in FLOATS and not dtype.startswith("F8_"):
        raise parts.refused(name, f"is of {dtype}, which no known format of compressed-tensors is")


# -- 4-bit floats --------------------------------------------------------------------------------


def _floats(name: str, stem: str, parts: Parts) -> Packed:
    info, scale, factor = parts.infos[name], f"{stem}_scale", f"{stem}_global_scale"
    beside, nvidia = parts.info(scale, name), factor in parts.infos
    group, scales = (_NVFP4_GROUP, ("F8_E4M3",)) if nvidia else (_MXFP4_GROUP, ("U8", "F8_E8M0"))
    shape = (info.shape[0], 2 * info.shape[1])
    if beside.shape != (shape[0], shape[1] // group) or shape[1] % group or beside.dtype not in scales:
        raise parts.misfit(scale, name, f"{scales[0]} [{shape[0]}, {shape[1]} / {group}]")

    def rows(start: int, stop: int) -> Tensor:
        library = compressed_tensors(name, "compressors")
        quantization = compressed_tensors(name, "quantization")
        scales = parts.rows(scale, start, stop).view(torch.float8_e4m3fn if nvidia else torch.uint8)
        parts.sound(name, scale, scales.float() if nvidia else powers_of_two(scales))
        local = {"weight_packed": parts.rows(name, start, stop), "weight_scale": scales}
        if nvidia:
            local["weight_global_scale"] = parts.sound(name, factor, parts.whole(factor), torch.ones(1))
        arguments = quantization.QuantizationArgs(
            num_bits=4, type="float", strategy="tensor_group" if nvidia else "group", group_size=group, symmetric=True
        )
        unpacker = library.NVFP4PackedCompressor if nvidia else library.MXFP4PackedCompressor
        how = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
        return unpacker.decompress(local, how)["weight"].detach()

    names = (name, scale, factor) if nvidia else (name, scale)
    return Packed(stem, "NVFP4" if nvidia else "MXFP4", shape, names, rows)


# -- integers ------------------------------------------------------------------------------------


def _integers(name: str, stem: str, parts: Parts, scheme: Scheme) -> Packed:
    """Any number of bits that divides 32: older versions of the library packed the others in another way."""
    info, scale = parts.infos[name], parts.info(f"{stem}_scale", name)
    whole, zero, order = f"{stem}_shape", f"{stem}_zero_point", f"{stem}_g_idx"
    parts.info(whole, name)
    bits, group, width = _sizes(name, parts, scheme, zero in parts.infos)
    height, count = info.shape[0], -(-width // group)
    if scale.shape not in ((height, count), (1,)) or (scale.shape == (1,) and zero in parts.infos):
        raise parts.misfit(scale.name, name, f"[{height}, {count}]")
    if zero in parts.infos and parts.infos[zero].shape != (-(-height * bits // 32), count):
        raise parts.misfit(zero, name, f"[{-(-height * bits // 32)}, {count}]")
    if order in parts.infos and parts.infos[order].shape != (width,):
        raise parts.misfit(order, name, f"[{width}]")

    def rows(start: int, stop: int) -> Tensor:
        quantization = compressed_tensors(name, "quantization")
        unpack = compressed_tensors(name, "compressors.pack_quantized.helpers").unpack_from_int32
        dequantize = compressed_tensors(name, "quantization.lifecycle.forward").dequantize
        said = tuple(parts.whole(whole).flatten().tolist())
        if said != (height, width):
            raise parts.refused(name, f"is {[height, width]} by its packed size, and {whole!r} says {list(said)}")
        scales = parts.rows(scale.name, start, stop) if scale.shape[0] == height else parts.whole(scale.name)
        values = unpack(parts.rows(name, start, stop), bits, torch.Size((stop - start, width)))
        zeros = None
        if zero in parts.infos:  # packed along the rows: a small tensor, read whole
            (packed,) = parts.held(zero)
            zeros = unpack(packed, bits, torch.Size((height, count)), packed_dim=0)[start:stop]
        columns, strategy = _columns(name, order, count, parts) if order in parts.infos else None, "group"
        if columns is not None:  # columns of one group do not lie together: every column with its own scale
            scales, zeros = scales[:, columns], None if zeros is None else zeros[:, columns]
        elif scale.shape == (1,):
            strategy = "tensor"
        elif count == 1:
            strategy = "channel"
        lie = torch.arange(width) // group if columns is None else torch.arange(width)
        offsets = values if zeros is None else values - zeros[:, lie]
        parts.sound(name, scale.name, scales, offsets, lambda s: s[:, lie] if s.ndim == 2 else s, signed=True)
        size = {"size": 1 if columns is not None else group} if strategy == "group" else {}
        arguments = quantization.QuantizationArgs(
            num_bits=bits, type="int", symmetric=zeros is None, strategy=strategy, group_size=size.get("size")
        )
        return dequantize(x_q=values, scale=scales, zero_point=zeros, args=arguments)

    names = [name, scale.name, whole, *(part for part in (zero, order) if part in parts.infos)]
    by = "row" if count == 1 else f"1x{group}"
    words = f"INT{bits} x {by} scale{' and zero point' if zero in parts.infos else ''}"
    return Packed(stem, words, (height, width), tuple(names), rows)


def _columns(name: str, part: str, groups: int, parts: Parts) -> Tensor | None:
    """The group of every column, None where the file does not use it (it is then filled with -1)."""
    order = parts.whole(part).long()
    if groups == 1 or bool((order == -1).all()):
        return None
    if not torch.equal(order.unique(), torch.arange(groups)):
        raise parts.refused(name, f"has {groups} groups of columns, and {part!r} does not name just these")
    return order


def _sizes(name: str, parts: Parts, scheme: Scheme, asymmetric: bool) -> tuple[int, int, int]:
    """(bits, columns of a group, columns): those of the config's groups that the stored shapes allow.

    Headers do not say how many bits a value has; X.weight_shape does not either, until data is read.
    """
    words, scale = parts.infos[name].shape[1], parts.infos[f"{name.removesuffix('_packed')}_scale"].shape
    fitting: dict[tuple[int, int, int], list[str]] = {}
    for weights, targets in _groups(scheme.settings):
        bits, size = weights.get("num_bits"), weights.get("group_size")
        if bits not in (1, 2, 4, 8) or weights.get("type", "int") != "int":
            continue
        width = words * 32 // bits
        group = size if isinstance(size, int) and size > 0 and len(scale) == 2 and scale[1] > 1 else width
        count = scale[1] if len(scale) == 2 else 1
        if -(-width // group) == count and asymmetric != weights.get("symmetric", True):
            fitting.setdefault((bits, group, width), []).extend(targets)
    if len(fitting) > 1:
        module = name.removesuffix(".weight_packed")
        fitting = {sizes: targets for sizes, targets in fitting.items() if _is_targeted(module, targets)}
    if len(fitting) != 1:
        raise parts.refused(
            name,
            f"{list(parts.infos[name].shape)} with a scale {list(scale)} fits "
            f"{len(fitting) or 'none'} of the config's groups of compressed-tensors, so its number of bits is not known",
        )
    return next(iter(fitting))


def _groups(settings: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], list[str]]]:
    groups = settings.get("config_groups")
    found = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            found.append((weights, [str(target) for target in group.get("targets") or ()]))
    return found


def _is_targeted(module: str, targets: list[str]) -> bool:
    """Whether a module is named; what is only meant by its class ("Linear") is not."""
    return any(
        re.match(target.removeprefix("re:"), module) if target.startswith("re:") else target == module
        for target in targets
    )
