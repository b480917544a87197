"""4-bit floats (E2M1) that share a power of two by 32: the MXFP4 of the OCP microscaling formats."""

from __future__ import annotations

import torch
from torch import Tensor

from .parts import Packed, Parts, Scheme

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32


def unpack(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Two values a byte, the first of them in the low half: [..., n] to [..., 2 n]."""
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), dtype=dtype)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)  # by byte: (low half, high half)
    return pairs[packed.contiguous().view(torch.uint8).int()].flatten(-2)


def powers_of_two(exponents: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What bytes mean as E8M0 numbers: 2^(b - 127), and NaN for 255."""
    table = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")], dtype=dtype)
    return table[exponents.contiguous().view(torch.uint8).int()]


def mxfp4(name: str, parts: Parts, _scheme: Scheme) -> Packed | None:
    """Experts of gpt-oss: X_blocks [E, out, groups, 16] and X_scales [E, out, groups] for X [E, out, in].

    Unpacked they are the transposes of what files of the same model hold in bfloat16: hence `rows_first`.
    """
    weight, scales = name.removesuffix("_blocks"), f"{name.removesuffix('_blocks')}_scales"
    info = parts.infos[name]
    if weight == name or info.dtype != "U8":
        return None
    if len(info.shape) < 3 or info.shape[-1] != GROUP // 2:
        raise parts.misfit(name, name, "[..., groups, 16]")
    beside = parts.info(scales, name)
    if beside.shape != info.shape[:-1] or beside.dtype not in ("U8", "F8_E8M0"):
        raise parts.misfit(scales, name, f"{list(info.shape[:-1])} of 8-bit exponents")

    def rows(start: int, stop: int) -> Tensor:
        # Exact in bfloat16: two bits of significand and a power of two.
        values = unpack(parts.rows(name, start, stop), torch.bfloat16)
        factors = powers_of_two(parts.rows(scales, start, stop), torch.bfloat16)
        values *= parts.sound(name, scales, factors)[..., None]
        return values.flatten(-2)

    shape = (*info.shape[:-2], info.shape[-2] * GROUP)
    return Packed(weight, "MXFP4", shape, (name, scales), rows, rows_first=True)
