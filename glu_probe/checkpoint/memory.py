"""Room for large matrices."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_AS_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16, torch.bfloat16: np.int16}
_COLUMNS = 256


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor whose memory comes from numpy, which asks the system for large pages.

    Touching fresh memory page by page would otherwise cost more than filling it.
    """
    return torch.from_numpy(np.empty(shape, dtype=_AS_NUMPY[dtype])).view(dtype)


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float32, or float64 if it is that."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return empty(tuple(tensor.shape), torch.float32).copy_(tensor)


def transposed(matrix: Tensor) -> Tensor:
    """The transpose in float32 or float64, contiguous."""
    rows, columns = matrix.shape
    dtype = matrix.dtype if matrix.dtype == torch.float64 else torch.float32
    out = empty((columns, rows), dtype)
    for start in range(0, columns, _COLUMNS):  # in strips that stay in cache
        out[start : start + _COLUMNS] = matrix[:, start : start + _COLUMNS].to(dtype).T
    return out
