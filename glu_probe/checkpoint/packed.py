"""Tensors that must not be read as they stand: packed integers, weights whose scale stands beside them, adapters.

A row computed from packed bytes, or from a weight whose scale or low-rank update was dropped, is finite and wrong.
So everything below a projection is looked at, and what is no plain float weight and was not decoded (`quantized/`) is
refused by name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ..errors import QuantizedWeights, UnmergedAdapter, UnscaledFP8
from .places import in_attention
from .source import TensorInfo

_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
_ADAPTERS = ("lora_", "hada_", "lokr_", "ia3_", "oft_", "vera_", "boft_", "adalora_", "dora_")
# Scales and zero points of a layer's input or output, which leave its weight alone.
_OF_ACTIVATIONS = re.compile(
    r"(input|output|activation|act)_(global_|activation_)?(scales?|scale_ub|scale_inv|zero_point|amax|quantizer)|qscale_act"
)
# What stands beside the experts of a layer that are one tensor, as part of its name.
_BESIDE_EXPERTS = ("_blocks", "_scales", "_scale_inv", "_scale")
# What a scheme is known by: something that stands beside, or in the place of, the weight.
_SCHEMES: tuple[tuple[str, str], ...] = (
    ("dqweight", "FP-Quant"),
    ("qzeros", "GPTQ or AWQ"),
    ("weight_global_scale", "NVFP4"),
    ("weight_scale_2", "NVFP4"),
    ("weight_packed", "compressed-tensors"),
    ("bitmask", "compressed-tensors"),
    ("absmax", "bitsandbytes"),
    ("quant_state", "bitsandbytes"),
    ("SCB", "bitsandbytes int8"),
    ("_blocks", "MXFP4"),
    ("W_q", "HQQ"),
    ("codebooks", "AQLM"),
    ("centroids", "VPTQ"),
    ("dense_weights", "SpQR"),
    ("tables2", "HIGGS"),
    ("weight_scales", "EETQ"),
    ("qdata", "torchao"),
    ("_data", "quanto"),
    ("qweight", "GPTQ or AWQ"),
)
# Those that are decoded once the config says how.
_READABLE = ("GPTQ or AWQ", "compressed-tensors")


def refuse_packed(
    infos: Mapping[str, TensorInfo], projections: Iterable[str], *, gguf: bool, scheme: object = None
) -> None:
    """Refuse the first projection whose values the file does not plainly hold.

    Args:
        infos: the tensors with a layer index.
        projections: names that MLP projections have.
        gguf: whether the format itself knows how its tensors are quantised.
        scheme: `quant_method` of the config, for messages.

    Raises:
        UnmergedAdapter, UnscaledFP8, QuantizedWeights, or what a decoder found wanting.
    """
    for owner, below in _below(infos, frozenset(projections)).items():
        first = next(iter(below.values()))
        if any(part.startswith(_ADAPTERS) for suffix in below for part in suffix.split(".")):
            raise UnmergedAdapter(
                f"{first!r} and others are an update that is kept apart from the weight",
                where=owner,
                hint="Merge the adapter into the model (PEFT: merge_and_unload) and save that",
            )
        for name in below.values():
            if (fault := infos[name].fault) is not None:
                raise fault
        _refuse_unplain(owner, below, infos, gguf=gguf, scheme=scheme)


def _below(infos: Mapping[str, TensorInfo], projections: frozenset[str]) -> dict[str, dict[str, str]]:
    """Every projection's path, to what stands below it: suffix to tensor name."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in infos:
        if in_attention(name):
            continue
        parts = name.split(".")
        for at, part in enumerate(parts):
            stem = next((p for p in (part, *map(part.removesuffix, _BESIDE_EXPERTS)) if p in projections), "")
            if stem:
                suffix = [f"weight{part[len(stem) :]}"] if stem != part else []
                found[".".join((*parts[:at], stem))][".".join((*suffix, *parts[at + 1 :])) or "weight"] = name
                break
    return found


def _refuse_unplain(
    owner: str, below: Mapping[str, str], infos: Mapping[str, TensorInfo], *, gguf: bool, scheme: object
) -> None:
    below = {suffix: name for suffix, name in below.items() if not is_of_activations(suffix)}
    weight = below.get("weight") or below.get("base_layer.weight")
    scales = [s for s in below if any("scale" in part for part in s.split("."))]
    plain = infos[weight] if weight else None
    dtype = plain.dtype if plain else None
    if plain and plain.dtype.startswith(("F8_", "FLOAT8")) and not scales and not plain.decoded:
        raise UnscaledFP8(
            f"{weight!r} is {dtype} and no weight_scale_inv or weight_scale stands beside it",
            where=plain.file,
            hint="Without its scale the weight means nothing: the file is incomplete",
        )
    others = [s for s in below if s not in ("weight", "bias", "base_layer.weight", "base_layer.bias")]
    floats = all(gguf or infos[name].dtype in _FLOATS or infos[name].decoded for name in below.values())
    # A float weight below another name (a wrapper) is no packed one: whether it can be read is the layout's question.
    if floats and not scales and (weight or not any(sign in s for s in others for sign, _ in _SCHEMES)):
        return
    found = f"{dtype}" if dtype else "no plain weight"
    beside = f", with {', '.join(sorted(others)[:6])}" if others else ""
    named = _scheme(others, dtype, scheme)
    raise QuantizedWeights(
        f"weights are packed by {named}: {owner!r} holds {found}{beside}",
        where=infos[next(iter(below.values()))].file,
        hint="The config.json whose quantization_config says how is not beside it: put it there, or use the unquantised "
        "checkpoint"
        if named in _READABLE else "Use the unquantised checkpoint",
    )  # fmt: skip


def is_of_activations(suffix: str) -> bool:
    """Whether what stands below a projection is about its input or output as a scheme stores them, not its weight."""
    return any(_OF_ACTIVATIONS.fullmatch(part) for part in suffix.split("."))


def _scheme(suffixes: list[str], dtype: str | None, named: object) -> str:
    if isinstance(named, str):
        return named
    known = next((scheme for sign, scheme in _SCHEMES if any(sign in suffix for suffix in suffixes)), None)
    return known or ("FP8" if dtype and "F8" in dtype.replace("FLOAT", "F") else "a scheme that is not decoded here")
