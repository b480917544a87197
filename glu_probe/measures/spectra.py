"""Sizes and ranks of the three weight matrices, and how much of their input gate and up share.

Raw figures of the up and down matrices depend on the gauge; those of unit-row matrices (`_unit`) do not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..arguments import whole_number
from ..errors import BadOption
from ..lanes import every_core
from ..layer_rows import ROLES, LayerRows, Role, Sizes
from ..neurons import GatedLayer
from .gram import GramOperator, Krylov, Spectrum, exact_spectrum, iterated_spectra, sizes_alone
from .products import RowProducts, row_products

EXACT_FLOPS = 4e9  # of half a Gram matrix, d_mlp d_model^2: up to widths of about 1000
_ITERATED = 300_000_000  # weights of a matrix beyond which it is not gone over a dozen times
_ROWS = 1024  # of a block, as many as Gram matrices of float64 are added up from
_TINY = 1e-290  # squared norms below have no inverse in float64

Matrix = Float[Tensor, "d_mlp d_model"]


def branch_spectra(
    layer: LayerRows, products: RowProducts, usable: np.ndarray, rng: np.random.Generator, *, exact: bool | None = None
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
        exact: all singular values (4 d_mlp d_model^2 flops and two eigenvalue problems a matrix), or Lanczos
            iteration and random probes (about 60 products of 4 d_mlp d_model flops a matrix), which leave effective
            ranks missing; None for exact up to `EXACT_FLOPS`, and nothing but Frobenius norms beyond 3e8 weights.

    Returns:
        The columns, with `spectral_residual` (worst of the six; see `gram.Spectrum`), `spectral_sampling_error` (worst
        relative standard error of a participation ratio) and `branch_overlap_se`, 0 where exact; and how they were
        found, in words. Missing where no row is usable. Sampled participation ratios and overlaps are cut to their ranges.
    """
    exact = is_cheap(layer) if exact is None else exact
    squares = {
        name: torch.from_numpy(np.where(usable & (square > _TINY), square, 0.0))
        for name, square in (("gate", products.qq), ("up", products.kk), ("down", products.vv))
    }
    if exact:
        with every_core():
            found, shared, error = _exact(layer, squares)
    elif layer.d_mlp * layer.d_model <= _ITERATED:
        found, shared, error = _iterated(layer, squares, rng)
    else:
        found, shared, error = (
            {name: (sizes_alone(square),) * 2 for name, square in squares.items()},
            math.nan,
            math.nan,
        )
    out: dict[str, float] = {}
    for name, (raw, unit) in found.items():
        out |= _columns(name, raw, unit)
    gate, up = found["gate"][1], found["up"][1]
    whole, width = gate.gram_norm * up.gram_norm, layer.d_model
    out["branch_overlap"] = min(max(shared / whole, 0.0), 1.0) if whole > 0 else math.nan
    out["branch_overlap_se"] = error / whole if whole > 0 else math.nan
    out["branch_overlap_null"] = min(math.sqrt(gate.participation * up.participation) / width, 1.0)
    every = [spectrum for pair in found.values() for spectrum in pair]
    out["spectral_residual"] = max(spectrum.residual for spectrum in every)
    out["spectral_sampling_error"] = max(spectrum.participation_error for spectrum in every)
    if not usable.any():
        out = dict.fromkeys(out, math.nan)
    return out, way(layer, exact=exact)


def way(layer: LayerRows, *, exact: bool) -> str:
    """How the spectra of a layer are found, in words."""
    if exact:
        return "exact"
    if layer.d_mlp * layer.d_model <= _ITERATED:
        return "Lanczos and random probes"
    return f"left out: matrices of more than {_ITERATED:.0e} weights are read once; ask for exact ones"


def _columns(name: str, raw: Spectrum, unit: Spectrum) -> dict[str, float]:
    out = {f"{name}_frobenius": math.sqrt(raw.total) * math.sqrt(raw.scale)}
    for suffix, spectrum in (("", raw), ("_unit", unit)):
        known = spectrum.top > 0
        norm = math.sqrt(spectrum.top) * math.sqrt(spectrum.scale)
        out[f"{name}_spectral_norm{suffix}"] = norm if known else math.nan
        out[f"{name}_stable_rank{suffix}"] = spectrum.stable_rank
        out[f"{name}_participation_ratio{suffix}"] = spectrum.participation
        out[f"{name}_effective_rank{suffix}"] = (
            effective_rank(np.sqrt(spectrum.values)) if known and spectrum.values is not None else math.nan
        )
    return out


def effective_rank(sizes: Any) -> float:
    """exp of the entropy of p / sum p for singular values (or sizes of eigenvalues) p >= 0; missing if all are 0.

    Roy & Vetterli, The effective rank (2007). Between 1 and the number of values.

    Raises:
        BadOption: a value is negative, not finite, or no number.
    """
    try:
        sizes = np.asarray(sizes)
        real = sizes.astype(float) if sizes.dtype.kind in "iuf" else None
    except (TypeError, ValueError, RuntimeError):
        real = None
    if real is None or not (np.isfinite(real) & (real >= 0)).all():
        raise BadOption("effective_rank takes finite numbers of at least 0", hint="Give singular values")
    largest = real.max(initial=0.0)
    if not largest > 0:
        return math.nan
    share = real / largest
    share = share[share > 0] / share.sum()
    return min(float(np.exp(-(share * np.log(share)).sum())), float(share.size))


def is_cheap(layer: Sizes) -> bool:
    """Whether exact spectra cost little enough to be the default."""
    return layer.d_mlp * layer.d_model * min(layer.d_mlp, layer.d_model) <= EXACT_FLOPS


# Raw and unit spectrum of each matrix, the inner product of gate's and up's unit Gram matrices, and its error.
_Found = tuple[dict[str, tuple[Spectrum, Spectrum]], float, float]


def _exact(layer: LayerRows, squares: dict[str, Tensor]) -> _Found:
    shape, found, units = (layer.d_mlp, layer.d_model), {}, {}
    for (name, square), role in zip(squares.items(), ROLES, strict=True):
        raw, unit, units[name] = _grams(layer, role, square)
        found[name] = exact_spectrum(raw, square, shape), exact_spectrum(unit, (square > 0).double(), shape)
    if shape[0] < shape[1]:
        return found, (units["gate"] @ units["up"].T).square().sum().item(), 0.0
    return found, (units["gate"] * units["up"]).sum().item(), 0.0


def _grams(layer: LayerRows, role: Role, square: Tensor) -> tuple[Matrix, Matrix, Matrix]:
    """The smaller Gram matrix of a factor, of it as it is over its largest squared row norm and with unit rows, float64.

    Also what overlaps are made of: the second, or the unit rows where there are fewer rows than columns.
    """
    scale = square.max().item() or 1.0
    weights = torch.stack(((square > 0).double() / scale, torch.where(square > 0, 1 / square, 0.0))).sqrt()
    wide, step = layer.d_mlp < layer.d_model, layer.d_mlp if layer.d_mlp < layer.d_model else _ROWS
    grams = torch.zeros(2, *(min(layer.d_mlp, layer.d_model),) * 2, dtype=torch.float64)
    for start in range(0, layer.d_mlp, step):
        rows = slice(start, min(start + step, layer.d_mlp))
        taken = (square[rows] > 0)[:, None]
        block = torch.where(taken, layer.rows(role, rows).double(), 0.0)
        for gram, weight in zip(grams, weights[:, rows], strict=True):
            scaled = block * weight[:, None]
            gram.addmm_(*((scaled, scaled.T) if wide else (scaled.T, scaled)))
    return grams[0], grams[1], scaled if wide else grams[1]


def _iterated(layer: LayerRows, squares: dict[str, Tensor], rng: np.random.Generator) -> _Found:
    found: dict[str, tuple[Spectrum, Spectrum]] = {}
    shared = math.nan, math.nan
    gate: Krylov | None = None
    for (name, square), role in zip(squares.items(), ROLES, strict=True):
        read, fold = layer.unfolded(role)
        operator = GramOperator(read, layer.d_model, square, fold)
        wanted = torch.zeros(layer.d_model, 0, dtype=torch.float64)
        if name == "up":  # what gate reads, as up sees it
            assert gate is not None  # it comes first
            wanted = torch.cat((gate.basis, gate.probes), dim=1)
        one = iterated_spectra(operator, square, rng, wanted)
        found[name] = one.raw, one.unit
        if name == "gate":
            gate = one.krylov
        if name == "up" and gate is not None:
            basis, probes = one.images.split((gate.basis.shape[1], gate.probes.shape[1]), dim=1)
            shared = gate.trace_with(basis, probes, one.rounding)
    return found, *shared


def principal_angles(layer: GatedLayer, rank: int) -> Float[np.ndarray, " rank"]:
    """Angles between the subspaces that gate and up read most, in radians, rising, 0 to pi/2.

    The subspaces are spanned by the top `rank` right singular vectors of the unit-row matrices, so that the gauge plays
    no part. Random subspaces of dimension r in d_model have cosines up to about 2 sqrt(r / d_model). Float64; cost:
    2 d_mlp d_model^2 flops a matrix and an eigenvalue problem of d_model.

    Args:
        rank: 1 to min(d_mlp, d_model).

    Raises:
        BadOption: rank is out of that range, or larger than the rank of one of the matrices.
    """
    layer = layer.detach()
    rank = whole_number("rank", rank, 1, min(layer.query.shape))
    products = row_products(layer)
    bases = []
    for name, matrix, square in (("gate", layer.query, products.qq), ("up", layer.key, products.kk)):
        known = torch.from_numpy((square > _TINY) & np.isfinite(square))
        inverse = torch.where(known, torch.from_numpy(square), 1.0).rsqrt() * known
        unit = torch.where(known[:, None], matrix.double(), 0.0) * inverse[:, None]
        values, vectors = torch.linalg.eigh(unit.T @ unit)
        present = int((values > np.finfo(float).eps * max(unit.shape) * values[-1]).sum()) if known.any() else 0
        if rank > present:
            raise BadOption(
                f"rank is {rank}, but the {name} matrix has {present} directions",
                where=f"layer {layer.layer}",
                hint="Beyond them any direction is as good as another",
            )
        bases.append(vectors[:, -rank:])
    # asin of the part outside, for small angles; acos of the part inside, for large ones
    inside = bases[0].T @ bases[1]
    cosines = torch.linalg.svdvals(inside).clamp_(max=1.0)
    sines = torch.linalg.svdvals(bases[1] - bases[0] @ inside).clamp_(max=1.0).flip(0)
    return torch.where(cosines > 0.7, sines.asin(), cosines.acos()).numpy()
