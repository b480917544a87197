"""In which precision large products are taken: bfloat16 where the processor multiplies it natively, else float32.

Only for what is sampled: with both factors rounded to 8 bits of fraction, and sums in float32, a sampled asymmetry or
trace changes by less than 1e-5 of its range, a hundredth of its sampling error.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor

Matrix = Float[Tensor, "rows width"]


@functools.cache
def native_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16; without them these would be slower, not faster."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return torch.backends.mkldnn.is_available() and any(getattr(torch.cpu, check, bool)() for check in checks)


def coarse(matrix: Matrix) -> Matrix:
    """The matrix as `times` takes it fastest: in bfloat16 where that is native and it is float32."""
    return matrix.bfloat16() if matrix.dtype == torch.float32 and native_bfloat16() else matrix


def times(left: Matrix, right: Matrix) -> Matrix:
    """left @ right in the precision of `right`; float32 or wider comes out."""
    found = left.to(right.dtype) @ right
    return found.float() if found.dtype == torch.bfloat16 else found
