"""Sizes and ranks of the three weight matrices.

Frobenius norms are exact. The spectral norm is exact for small matrices (eigenvalues of the Gram matrix) and by
Lanczos iteration for large ones, where it approaches the true value from below; `spectral_residual` says how well.
Raw figures of the up and down matrices depend on the gauge; those of unit-row matrices (`_unit`) do not.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..neurons import GatedLayer
from .products import RowProducts

_EXACT_FLOPS = 4e9  # of the Gram matrix, d_mlp d_model^2: up to widths of about 1000
# A block of rows stays in its core's cache between the product with it and the one with its transpose; lanes of a
# batch go to different cores, and each is summed by one, so that the number of cores changes nothing.
_LANES, _ROWS = 8, 64
_STEPS, _TOLERANCE = 16, 1e-5
_IN_RANGE = (1e-70, 1e70)  # squared row norms whose square roots, and their inverses, float32 holds

Matrix = Float[Tensor, "d_mlp d_model"]


def branch_spectra(
    layer: GatedLayer, products: RowProducts, usable: np.ndarray, rng: np.random.Generator
) -> dict[str, float]:
    """Columns `{gate,up,down}_{frobenius,spectral_norm,stable_rank}`, the last two also with suffix `_unit`.

    stable_rank = (Frobenius / spectral norm)^2, between 1 and d_model. Rows that are not usable are left out, zero
    rows have no direction and are left out of the unit-row matrices. Cost: d_mlp d_model^2 flops a matrix, or
    4 d_mlp d_model a Lanczos step.

    Returns:
        The columns, and `spectral_residual`, the largest |A^T A u - s^2 u| / s^2 of the six: 0 where exact, else
        an upper bound of the relative distance from s^2 to the nearest squared singular value.
    """
    out: dict[str, float] = {}
    residual = 0.0
    keep = torch.from_numpy(usable)
    squares = {"gate": products.qq, "up": products.kk, "down": products.vv}
    for name, matrix in (("gate", layer.query), ("up", layer.key), ("down", layer.value)):
        square = torch.from_numpy(np.where(usable, squares[name], 0.0))
        matrix = matrix if bool(keep.all()) else torch.where(keep[:, None], matrix, 0.0)
        inverse = torch.where(square > 0, 1 / square, 0.0)
        raw, unit, left = _top_squares(matrix, square, inverse, rng)
        residual = max(residual, left)
        frobenius, directions = square.sum().item(), int((square > 0).sum())
        raw, unit = min(raw, frobenius), min(unit, directions)  # which rounding could pass
        out[f"{name}_frobenius"] = math.sqrt(frobenius)
        out[f"{name}_spectral_norm"] = math.sqrt(raw) if raw > 0 else math.nan
        out[f"{name}_stable_rank"] = frobenius / raw if raw > 0 else math.nan
        out[f"{name}_spectral_norm_unit"] = math.sqrt(unit) if unit > 0 else math.nan
        out[f"{name}_stable_rank_unit"] = directions / unit if unit > 0 else math.nan
    out["spectral_residual"] = residual
    return out


def _top_squares(matrix: Matrix, square: Tensor, inverse: Tensor, rng) -> tuple[float, float, float]:
    """Largest squared singular value of the matrix and of its unit-row version, and the relative residual."""
    rows, width = matrix.shape
    if rows * width * width <= _EXACT_FLOPS:
        exact = matrix.double()
        return _gram_top(exact), _gram_top(exact * inverse.sqrt()[:, None]), 0.0
    # Rows are scaled before they are multiplied, so that float32 products stay in range whatever the storage held.
    scale = square.max().item() or 1.0
    known = square[square > 0]
    if known.numel() and (known.min() < _IN_RANGE[0] or scale > _IN_RANGE[1]):
        matrix = matrix.double()
    weights = torch.stack((torch.full_like(inverse, 1 / scale), inverse)).sqrt().to(matrix.dtype)
    whole = rows - rows % (_LANES * _ROWS)
    batches = matrix[:whole].view(-1, _LANES, _ROWS, width)
    batch_weights = weights[:, :whole].view(2, -1, _LANES, _ROWS).permute(1, 2, 0, 3)

    def gram_times(vectors: Tensor) -> Tensor:
        pair = vectors.T.to(matrix.dtype)
        lanes, total = pair.expand(_LANES, 2, width), torch.zeros(_LANES, 2, width, dtype=matrix.dtype)
        for batch, weight in zip(batches, batch_weights, strict=True):
            total.baddbmm_(torch.bmm(lanes, batch.transpose(1, 2)) * weight * weight, batch)
        rest = (pair @ matrix[whole:].T) * weights[:, whole:] * weights[:, whole:]
        return (total.double().sum(0) + (rest @ matrix[whole:]).double()).T

    start = torch.from_numpy(rng.standard_normal(width))
    values, residuals = _lanczos(gram_times, torch.stack((start, start), dim=1))
    return values[0] * scale, values[1], max(residuals)


def _gram_top(matrix: Tensor) -> float:
    gram = matrix.T @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.T
    return max(torch.linalg.eigvalsh(gram)[-1].item(), 0.0)


def _lanczos(apply, start: Tensor) -> tuple[list[float], list[float]]:
    """Top eigenvalue of several symmetric operators at once, one column each, with relative residuals.

    Full reorthogonalisation; a column stops changing the answer once its Krylov space is exhausted.
    """
    columns = start.shape[1]
    basis = [start / start.norm(dim=0)]
    diagonal, off = [], []
    top, bound = [0.0] * columns, [0.0] * columns
    for _ in range(_STEPS):
        image = apply(basis[-1])
        diagonal.append((image * basis[-1]).sum(0))
        for _twice in range(2):
            for vector in basis:
                image = image - vector * (image * vector).sum(0)
        norm = image.norm(dim=0)
        previous = list(top)
        for c in range(columns):
            tridiagonal = torch.diag(torch.stack([d[c] for d in diagonal]))
            for i, value in enumerate(off):
                tridiagonal[i, i + 1] = tridiagonal[i + 1, i] = value[c]
            values, vectors = torch.linalg.eigh(tridiagonal)
            top[c] = values[-1].item()
            bound[c] = abs(norm[c].item() * vectors[-1, -1].item()) / top[c] if top[c] > 0 else 0.0
        if all(abs(now - before) <= _TOLERANCE * now for now, before in zip(top, previous, strict=True)):
            break
        off.append(norm)
        basis.append(image / torch.where(norm > 0, norm, 1.0))
    return top, bound
