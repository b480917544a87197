"""In which precision large products are taken: bfloat16 where the processor multiplies it natively, else float32.

Only for what is sampled. Factors, vectors and products are rounded to 8 bits of fraction, sums over blocks of neurons are
in float32. What that changes is little beside the sampling error: of an output or tensor asymmetry of unrelated
neurons some 1e-5, of a trace less. It would show where neurons cancel each other, or gate and up, so that what is left
is no larger than what is rounded away; `sampling.sampled` looks out for that and does without.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import os
import warnings
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

Matrix = Float[Tensor, "rows width"]
WORTH_COMPILING = 4_000_000  # weights of a matrix


@functools.cache
def native_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16; without them these would be slower, not faster."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return torch.backends.mkldnn.is_available() and any(getattr(torch.cpu, check, bool)() for check in checks)


def coarse(matrix: Matrix) -> Matrix:
    """The matrix as `times` takes it fastest: in bfloat16 where that is native and it is float32 or narrower."""
    return matrix.bfloat16() if matrix.dtype.itemsize <= 4 and native_bfloat16() else matrix


def compiled_loops(weights: int) -> Any:
    """The module of compiled loops, for a matrix of so many weights; None where torch is as good, or must do.

    Loading them takes half a second, and compiling them, the first time on a machine, two.
    """
    return _kernels() if weights >= WORTH_COMPILING else None


def compiler() -> str | None:
    """Version of what compiles them; None where they are not used, for want of it or by NUMBA_DISABLE_JIT=1."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):  # Python itself would run them
        return None
    try:
        return importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:  # there is none for this Python or processor
        return None


@functools.cache
def _kernels() -> Any:
    if compiler() is None:
        return None
    try:
        from . import kernels
    except ImportError as error:  # each numba works with some versions of numpy only
        warnings.warn(
            f"numba cannot be imported, torch does what it would do, some three times slower: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return kernels


def times(left: Matrix, right: Matrix) -> Matrix:
    """left @ right in the precision of `right`; float32 or wider comes out."""
    found = left.to(right.dtype) @ right
    return found if found.dtype == torch.float64 else found.float()


def rounding(width: int) -> float:
    """Relative standard error of v^T A^T A w from images of vectors of that width in bfloat16, where v is near w."""
    return 1.5 * 2**-9 / math.sqrt(width)
