"""BitNet: weights of -1, 0 and 1, four to a byte, with one scale."""

from __future__ import annotations

import torch
from torch import Tensor

from ..safetensors import FLOATS
from .parts import Packed, Parts, Scheme

_IN_A_BYTE = 4


def bitnet(name: str, parts: Parts, scheme: Scheme) -> Packed | None:
    """X.weight [out / 4, in] bytes, or [out, in] floats, and X.weight_scale [1].

    A byte holds, from its low bits on, rows of the first, second, third and fourth quarter of the weight. Whether the
    scale multiplies or divides depends on the class that the config names, and is not the same for both.
    """
    if not name.endswith(".weight"):
        return None
    info, settings, scale = parts.infos[name], scheme.settings, f"{name}_scale"
    multiplies = settings.get("linear_class", "bitlinear") == "autobitlinear"
    if multiplies and settings.get("quantization_mode", "offline") == "online":
        _refuse_online(name, parts, scheme)
        return None
    if scale not in parts.infos or (info.dtype != "U8" and info.dtype not in FLOATS):
        return None
    if len(info.shape) != 2 or parts.infos[scale].shape not in ((), (1,)) or parts.infos[scale].dtype not in FLOATS:
        raise parts.misfit(scale, name, "one scale for the whole")
    _refuse_norm(name, parts, scheme)
    height, width = info.shape
    packed = info.dtype == "U8"

    def rows(start: int, stop: int) -> Tensor:
        factor = parts.sound(name, scale, parts.whole(scale).float(), torch.ones(1))
        values = quarters(start, stop) if packed else parts.rows(name, start, stop).float()
        values = values * factor if multiplies else values / factor
        return values.to(FLOATS[parts.infos[scale].dtype])

    def quarters(start: int, stop: int) -> Tensor:
        values = torch.empty(stop - start, width)
        for quarter in range(_IN_A_BYTE):
            first, last = (min(max(edge - quarter * height, 0), height) for edge in (start, stop))
            if first < last:
                at = quarter * height + first - start
                values[at : at + last - first] = (parts.rows(name, first, last) >> 2 * quarter & 3).float() - 1
        return values

    words = f"{'ternary' if packed else info.dtype} x tensor scale"
    return Packed(name, words, (height * _IN_A_BYTE if packed else height, width), (name, scale), rows)


def _refuse_online(name: str, parts: Parts, scheme: Scheme) -> None:
    """Floats that the model itself makes ternary when it runs."""
    kept = scheme.settings.get("modules_to_not_convert") or ()
    if len(parts.infos[name].shape) == 2 and not any(str(module) in name for module in kept):
        raise parts.refused(name, "holds the floats from which BitNet's ternary weights are made when the model runs")


def _refuse_norm(name: str, parts: Parts, scheme: Scheme) -> None:
    if scheme.settings.get("use_rms_norm"):
        raise parts.refused(name, "is multiplied with an input that a norm of its own comes before (use_rms_norm)")
