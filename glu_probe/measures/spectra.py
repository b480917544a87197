"""Sizes and ranks of the three weight matrices, and how much of their input gate and up share.

Raw figures of the up and down matrices depend on the gauge; those of unit-row matrices (`_unit`) do not.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import BadOption
from ..neurons import GatedLayer
from .gram import GramOperator, Krylov, Spectrum, exact_spectrum, iterated_spectra
from .products import RowProducts, row_products

EXACT_FLOPS = 4e9  # of one Gram matrix, d_mlp d_model^2: up to widths of about 1000

Matrix = Float[Tensor, "d_mlp d_model"]


def branch_spectra(
    layer: GatedLayer, products: RowProducts, usable: np.ndarray, rng: np.random.Generator, *, exact: bool | None = None
) -> tuple[dict[str, float], str]:
    """Columns `{gate,up,down}_{frobenius,spectral_norm,...}`, those of unit-row matrices, and `branch_overlap`.

    With p_i the singular values:

    * stable_rank = sum p^2 / max p^2, participation_ratio = (sum p^2)^2 / sum p^4, and effective_rank = exp of the
      entropy of p / sum p (Roy & Vetterli 2007): three counts of directions between 1 and d_model, from the one that
      only the largest matter for to the one that all do;
    * branch_overlap = <Q^T Q, K^T K> / (|Q^T Q| |K^T K|) with unit rows (linear CKA without centring, which the sign
      of k would spoil): 1 where gate and up read the same subspace with the same weights. `branch_overlap_null` is its
      mean over random rotations of one against the other: sqrt(product of participation ratios) / d_model.

    Rows that are not usable are left out; zero rows have no direction and are left out of the unit-row matrices.

    Args:
        exact: all singular values (2 d_mlp d_model^2 flops and two eigenvalue problems a matrix), or Lanczos
            iteration and random probes (about 80 products of 4 d_mlp d_model flops a matrix), which leave effective
            ranks missing; None for exact up to `EXACT_FLOPS`.

    Returns:
        The columns, with `spectral_residual` and `spectral_sampling_error`: the worst bounds of the relative errors of
        squared spectral norms and of participation ratios (one standard error; of the overlap too), 0 where exact; and
        how they were found, in words.
    """
    rows, width = layer.query.shape
    exact = rows * width * min(rows, width) <= EXACT_FLOPS if exact is None else exact
    keep = torch.from_numpy(usable)
    out: dict[str, float] = {}
    found: list[Spectrum] = []
    sides = []
    for name, matrix, square in (
        ("gate", layer.query, products.qq),
        ("up", layer.key, products.kk),
        ("down", layer.value, products.vv),
    ):
        square = torch.from_numpy(np.where(usable, square, 0.0))
        matrix = matrix if bool(keep.all()) else torch.where(keep[:, None], matrix, 0.0)
        inverse = torch.where(square > 0, 1 / square, 0.0)
        if exact:
            unit = matrix.double() * inverse.sqrt()[:, None]
            spectra = exact_spectrum(matrix, square), exact_spectrum(unit, (square > 0).double())
            sides.append(unit)
        else:
            operator = GramOperator(matrix, square, inverse)
            spectra, krylov = iterated_spectra(operator, square, rng)
            sides.append((operator, krylov))
        found += spectra
        out |= _columns(name, *spectra)
    overlap = _exact_overlap(*sides[:2]) if exact else _sampled_overlap(*sides[0], sides[1][0])
    gate, up = found[1], found[3]  # with unit rows
    known = gate.total > 0 and up.total > 0
    out["branch_overlap"] = min(overlap[0] / (gate.gram_norm * up.gram_norm), 1.0) if known else math.nan
    out["branch_overlap_null"] = math.sqrt(gate.participation * up.participation) / width
    out["spectral_residual"] = max(spectrum.residual for spectrum in found)
    errors = [spectrum.participation_error for spectrum in found]
    out["spectral_sampling_error"] = max(*errors, overlap[1] / overlap[0] if overlap[0] > 0 else 0.0)
    return out, "exact" if exact else "Lanczos and random probes"


def _columns(name: str, raw: Spectrum, unit: Spectrum) -> dict[str, float]:
    out = {f"{name}_frobenius": math.sqrt(raw.total)}
    for suffix, spectrum in (("", raw), ("_unit", unit)):
        top = min(spectrum.top, spectrum.total)  # which rounding could pass
        known = top > 0
        out[f"{name}_spectral_norm{suffix}"] = math.sqrt(top) if known else math.nan
        out[f"{name}_stable_rank{suffix}"] = spectrum.total / top if known else math.nan
        out[f"{name}_participation_ratio{suffix}"] = spectrum.participation
        out[f"{name}_effective_rank{suffix}"] = (
            effective_rank(np.sqrt(spectrum.values)) if known and spectrum.values is not None else math.nan
        )
    return out


def effective_rank(singular: Float[np.ndarray, " rank"]) -> float:
    """exp of the entropy of p / sum p for singular values (or sizes of eigenvalues) p >= 0; missing if all are 0.

    Roy & Vetterli, The effective rank (2007). Between 1 and the number of values.
    """
    largest = singular.max(initial=0.0)
    if not largest > 0:
        return math.nan
    share = singular / largest
    share = share[share > 0] / share.sum()
    return float(np.exp(-(share * np.log(share)).sum()))


def _exact_overlap(query: Matrix, key: Matrix) -> tuple[float, float]:
    if query.shape[0] < query.shape[1]:
        return (query @ key.T).square().sum().item(), 0.0
    return ((query.T @ query) * (key.T @ key)).sum().item(), 0.0


def _sampled_overlap(_: GramOperator, query: Krylov, key: GramOperator) -> tuple[float, float]:
    """<Q^T Q, K^T K> from the images of what is known of Q under K."""
    none = query.basis[:, :0]
    _, image = key(none, torch.cat((query.basis, query.probes), dim=1))
    return query.trace_with(*image.split((query.basis.shape[1], query.probes.shape[1]), dim=1))


def principal_angles(layer: GatedLayer, rank: int) -> Float[np.ndarray, " rank"]:
    """Angles between the subspaces that gate and up read most, in radians, rising, 0 to pi/2.

    The subspaces are spanned by the top `rank` right singular vectors of the unit-row matrices, so that the gauge plays
    no part. Random subspaces of dimension r in d_model have cosines up to about 2 sqrt(r / d_model). Float64; cost:
    2 d_mlp d_model^2 flops a matrix and an eigenvalue problem of d_model.

    Args:
        rank: 1 to min(d_mlp, d_model).

    Raises:
        BadOption: rank is out of that range.
    """
    most = min(layer.query.shape)
    if not isinstance(rank, int) or not 1 <= rank <= most:
        raise BadOption(f"rank is {rank!r}", where=f"layer {layer.layer}", hint=f"Give a whole number from 1 to {most}")
    products = row_products(layer)
    bases = []
    for matrix, square in ((layer.query, products.qq), (layer.key, products.kk)):
        known = torch.from_numpy((square > 0) & np.isfinite(square))
        inverse = torch.where(known, torch.from_numpy(square), 1.0).rsqrt() * known
        unit = torch.where(known[:, None], matrix.double(), 0.0) * inverse[:, None]
        bases.append(torch.linalg.eigh(unit.T @ unit).eigenvectors[:, -rank:])
    # asin of the part outside, for small angles; acos of the part inside, for large ones
    inside = bases[0].T @ bases[1]
    cosines = torch.linalg.svdvals(inside).clamp_(max=1.0)
    sines = torch.linalg.svdvals(bases[1] - bases[0] @ inside).clamp_(max=1.0).flip(0)
    return torch.where(cosines > 0.7, sines.asin(), cosines.acos()).numpy()
