"""Two loops that a report spends much of its time in, compiled: Gram matrices of neurons' rows, and A^T A times vectors.

Each goes over the weights once and widens them in registers; torch has to write the widened ones to memory first, and
read a block once for each product. What torch computes without these is what they are tested against.
Rows go to the cores in lanes, each of which one core sums up in the order of its rows: the same bits for any number of
cores, and for any size of the blocks that the rows come in.
They are compiled, or loaded, when this module is imported: what that takes is that of an import, for large and small alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from jaxtyping import Float
from numba.extending import overload
from torch import Tensor

from ..lanes import LANES, in_lanes

_PIECE = 32  # rows of a lane of A^T A before it is the next one's turn: eight lanes divide a block of neurons
VECTORS = 2  # of one call of `gram_images`
# How numpy sees what it has no dtype for; `_wide` tells them apart by that.
_SEEN_AS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.float32}


def _compiled(*signatures: str) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles a function for those types of arguments, and no others."""
    # Sums may be taken in another order, which lets them be taken sixteen at a time; nothing is assumed of NaN.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "nsz", "contract"}}

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit([*signatures], cache=True, **options)(function)
        except RuntimeError:  # nowhere to keep what was compiled
            return numba.njit([*signatures], **options)(function)

    return compiled


def _wide(value):  # type: ignore[no-untyped-def]
    """A stored number as float32: bfloat16 behind uint16, float16 behind int16. Infinity and NaN of float16 are not kept."""


@overload(_wide)
def _wide_of(value):  # type: ignore[no-untyped-def]
    if value == numba.types.uint16:
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    if value == numba.types.int16:

        def half(value):  # type: ignore[no-untyped-def]
            bits = np.uint32(np.uint16(value))
            sign, size = (bits & np.uint32(0x8000)) << np.uint32(16), bits & np.uint32(0x7FFF)
            # Exponents start 112 below float32's; where that is all zeros, the number is a multiple of 2^-24. A product
            # with 2^112 would do for both, if the compiler did not multiply something else with it first.
            if size < np.uint32(0x400):
                size = np.float32(np.float32(np.int32(size)) * np.float32(2.0**-24)).view(np.uint32)
            else:
                size = np.uint32((size << np.uint32(13)) + np.uint32(112 << 23))
            return np.uint32(size | sign).view(np.float32)

        return half
    return lambda value: value


@_compiled(*(f"({seen}[:, ::1], f4[:, ::1], f8[:, :], f4[:, ::1], i8)" for seen in ("u2", "i2", "f4")))
def _gram_lane(matrix, vectors, squares, images, lane):  # type: ignore[no-untyped-def]
    """Add to images[i] the sum over the lane's rows r of squares[i, r] (r . vectors[i]) r, for i of 0 and 1."""
    rows, width = matrix.shape
    live = np.empty(_PIECE, np.int64)
    one, other = vectors[0], vectors[1]
    first, second = images[0], images[1]
    for start in range(lane * _PIECE, rows, LANES * _PIECE):
        count = 0
        for row in range(start, min(start + _PIECE, rows)):
            # what takes no part may hold what is no number
            if squares[0, row] != 0.0 or squares[1, row] != 0.0:
                live[count] = row
                count += 1
        whole = count - count % 4
        for at in range(0, whole, 4):
            i, j, k, m = live[at], live[at + 1], live[at + 2], live[at + 3]
            row_i, row_j, row_k, row_m = matrix[i], matrix[j], matrix[k], matrix[m]
            p_i = p_j = p_k = p_m = s_i = s_j = s_k = s_m = np.float32(0.0)
            for c in range(width):
                p, s = one[c], other[c]
                x_i, x_j, x_k, x_m = _wide(row_i[c]), _wide(row_j[c]), _wide(row_k[c]), _wide(row_m[c])
                p_i += x_i * p
                p_j += x_j * p
                p_k += x_k * p
                p_m += x_m * p
                s_i += x_i * s
                s_j += x_j * s
                s_k += x_k * s
                s_m += x_m * s
            p_i, p_j = np.float32(p_i * squares[0, i]), np.float32(p_j * squares[0, j])
            p_k, p_m = np.float32(p_k * squares[0, k]), np.float32(p_m * squares[0, m])
            s_i, s_j = np.float32(s_i * squares[1, i]), np.float32(s_j * squares[1, j])
            s_k, s_m = np.float32(s_k * squares[1, k]), np.float32(s_m * squares[1, m])
            for c in range(width):
                x_i, x_j, x_k, x_m = _wide(row_i[c]), _wide(row_j[c]), _wide(row_k[c]), _wide(row_m[c])
                first[c] += (x_i * p_i + x_j * p_j) + (x_k * p_k + x_m * p_m)
                second[c] += (x_i * s_i + x_j * s_j) + (x_k * s_k + x_m * s_m)
        for at in range(whole, count):
            i = live[at]
            row_i = matrix[i]
            p_i = s_i = np.float32(0.0)
            for c in range(width):
                x_i = _wide(row_i[c])
                p_i += x_i * one[c]
                s_i += x_i * other[c]
            p_i, s_i = np.float32(p_i * squares[0, i]), np.float32(s_i * squares[1, i])
            for c in range(width):
                x_i = _wide(row_i[c])
                first[c] += x_i * p_i
                second[c] += x_i * s_i


@_compiled(*(f"({rows}, {rows}, {rows}, f8[:, :, ::1])" for rows in ("f4[:, ::1]", "f8[:, ::1]")))
def _row_grams(query, key, value, out):  # type: ignore[no-untyped-def]
    """Gram matrices of the three rows of each neuron, in float64."""
    for neuron in range(query.shape[0]):
        q, k, v = query[neuron], key[neuron], value[neuron]
        qq = kk = vv = qk = qv = kv = 0.0
        for c in range(q.shape[0]):
            x, y, z = np.float64(q[c]), np.float64(k[c]), np.float64(v[c])
            qq += x * x
            kk += y * y
            vv += z * z
            qk += x * y
            qv += x * z
            kv += y * z
        out[neuron, 0, 0], out[neuron, 1, 1], out[neuron, 2, 2] = qq, kk, vv
        out[neuron, 0, 1] = out[neuron, 1, 0] = qk
        out[neuron, 0, 2] = out[neuron, 2, 0] = qv
        out[neuron, 1, 2] = out[neuron, 2, 1] = kv


def takes(dtype: torch.dtype) -> bool:
    """Whether `gram_images` takes matrices of that dtype as they are."""
    return dtype in _SEEN_AS


def gram_images(
    blocks: Iterable[tuple[slice, Float[Tensor, "rows width"]]],
    vectors: Float[Tensor, "image width"],
    squares: Float[Tensor, "image rows"],
) -> Float[Tensor, "image width"]:
    """sum_r squares[i, r] (r . vectors[i]) r over all rows r, for each i; float32 sums, float64 comes out.

    Args:
        blocks: ranges of rows and the rows, in order; all but the last a multiple of LANES x 32, in a dtype of `takes`.
        vectors: float32 and finite; `VECTORS` at most.
        squares: float64, 0 for rows that take no part: what those hold does not matter.
    """
    count, width = vectors.shape
    both, weights = (np.zeros((2, part.shape[1]), part.numpy().dtype) for part in (vectors, squares))
    both[:count], weights[:count] = vectors.numpy(), squares.numpy()
    images = np.zeros((LANES, 2, width), np.float32)
    for rows, block in blocks:
        seen, share = block.contiguous().view(_SEEN_AS[block.dtype]).numpy(), weights[:, rows]
        in_lanes(partial(_share, seen, both, share, images), range(LANES))
    return torch.from_numpy(images.sum(0, dtype=np.float64)[:count])


def _share(
    matrix: np.ndarray, vectors: np.ndarray, squares: np.ndarray, images: np.ndarray, lane: int, _number: int
) -> None:
    _gram_lane(matrix, vectors, squares, images[lane], lane)


def row_grams(
    query: Float[Tensor, "rows width"], key: Float[Tensor, "rows width"], value: Float[Tensor, "rows width"]
) -> Float[Tensor, "rows 3 3"]:
    """Gram matrices of neurons' three rows, float64, from float32 or float64 rows."""
    out, rows = np.empty((len(query), 3, 3)), (query, key, value)
    dtype = torch.float32 if all(part.dtype == torch.float32 for part in rows) else torch.float64
    _row_grams(*(part.to(dtype).contiguous().numpy() for part in rows), out)
    return torch.from_numpy(out)
