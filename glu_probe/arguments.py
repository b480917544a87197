"""Checks of arguments that many functions take."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .errors import BadOption, ShapeMismatch


def whole_number(name: str, value: Any, low: int, high: int | None = None, *, why: str = "") -> int:
    """The value as an int.

    Raises:
        BadOption: it is no whole number, or out of range.
    """
    fits = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not fits or value < low or (high is not None and value > high):
        span = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise BadOption(f"{name} is {value!r}", hint=f"Give a whole number {span}{why and f': {why}'}")
    return int(value)


def share(name: str, value: Any, *, why: str = "") -> float:
    """The value as a float from 0 to 1.

    Raises:
        BadOption: it is no such number.
    """
    fits = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not 0 <= value <= 1:
        raise BadOption(f"{name} is {value!r}", hint=f"Give a number from 0 to 1{why and f': {why}'}")
    return float(value)


def vector(name: str, value: Any, size: int) -> Float[Tensor, " size"]:
    """The values as a float64 tensor without gradients.

    Raises:
        ShapeMismatch, BadOption: it has another shape, or holds no real numbers.
    """
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise BadOption(
            f"{name} is {type(value).__name__}, not numbers", hint="Give numbers: a list, an array or a tensor"
        ) from None
    if tensor.is_complex():
        raise BadOption(f"{name} is complex", hint="Give real numbers")
    if tensor.shape != (size,):
        raise ShapeMismatch(f"{name} is {list(tensor.shape)}, expected [{size}]", hint="Give one number for each")
    return tensor.double()
