"""The spectrum of a tall matrix through its Gram operator A^T A, exact or from products with a few vectors.

Every matrix is looked at twice, as it is ("raw") and with its rows scaled to norm 1 ("unit"); both versions share one
read of the rows. Squared singular values are what is computed; everything is scaled by the largest squared row norm, so
that no storage format's extremes leave the range of the arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..lanes import LANES, in_lanes
from ..layer_rows import BLOCK, Fold, HeldRows, Read
from .arithmetic import coarse, compiled_loops, native_bfloat16, rounding, times

_STEPS, _TOLERANCE = 12, 1e-4
_PROBES = 16
_MANY = 8  # vectors from which on an operator is applied to them coarsely, for they are there to be averaged over
# Squared row norms whose square roots, their inverses and products with vectors float32 holds: beyond float64.
_IN_RANGE = (1e-50, 1e50)

Matrix = Float[Tensor, "rows width"]
Vectors = Float[Tensor, "width count"]


@dataclass(frozen=True)
class Spectrum:
    """What is known of one version of a matrix; squared singular values in units of `scale`.

    Attributes:
        scale: the unit, the largest squared norm of a row; 1 where all rows are zero.
        top: largest squared singular value; from below where it is iterated.
        total: sum of the squared singular values.
        participation: total^2 over the sum of their squares; missing if all are 0.
        most: largest rank the matrix can have, and so the end of every count of directions.
        values: all squared singular values, falling, or None where only sums are known.
        residual: |A^T A u - top u| / top, 0 where exact: how far the nearest squared singular value, not always the
            largest, may be from `top`.
        participation_error: relative standard error of `participation`, 0 where exact.
    """

    scale: float
    top: float
    total: float
    participation: float
    most: int
    values: np.ndarray | None = None
    residual: float = 0.0
    participation_error: float = 0.0

    @property
    def stable_rank(self) -> float:
        """total over top, 1 to `most`; missing if all values are 0."""
        return min(max(self.total / self.top, 1.0), float(self.most)) if self.top > 0 else math.nan

    @property
    def gram_norm(self) -> float:
        """Frobenius norm of A^T A, in units of `scale`."""
        return self.total / math.sqrt(self.participation)


def _participation(total: float, squares: float, most: int) -> float:
    """Within its range, which an estimate may leave."""
    return min(max(total * total / squares, 1.0), float(most)) if squares > 0 else math.nan


def sizes_alone(square: Tensor) -> Spectrum:
    """What the squared norms of the rows tell by themselves: the total, and nothing else."""
    scale = square.max().item() or 1.0
    total, missing = (square / scale).sum().item(), math.nan
    return Spectrum(scale, missing, total, missing, most=0, residual=missing, participation_error=missing)


def exact_spectrum(gram: Float[Tensor, "size size"], square: Tensor, shape: tuple[int, int]) -> Spectrum:
    """All squared singular values of a matrix A, float64. Cost: an eigenvalue problem.

    Args:
        gram: A^T A or A A^T, the smaller, over the largest squared norm of a row.
        square: [rows], squared norms of the rows.
        shape: of A.
    """
    scale = square.max().item() or 1.0
    values = torch.linalg.eigvalsh(gram).flip(0).numpy()
    # what rounding leaves in the place of a zero is none
    values = np.where(values > np.finfo(float).eps * max(shape) * values[0], values, 0.0)
    total = (square / scale).sum().item()
    return Spectrum(
        scale=scale,
        top=min(float(values[0]), total),
        total=total,
        participation=_participation(total, float(np.square(values).sum()), min(shape)),
        most=min(shape),
        values=values,
    )


class GramOperator:
    """v -> A^T A v of a matrix in both versions at once, without forming it."""

    def __init__(self, read: Read, width: int, square: Tensor, fold: Fold | None = None) -> None:
        """Of the rows as they are and scaled to norm 1.

        Args:
            read: gives a range of rows before the fold, in any dtype: [rows, width].
            width: number of columns.
            square: [rows], squared norms of the rows with the fold, 0 for those that take no part.
            fold: what makes them the matrix's rows; it is done to the vectors instead. None if nothing does.
        """
        self._read, self.rows, self.width, self._fold = read, len(square), width, fold or Fold()
        self.scale = square.max().item() or 1.0
        known = square[square > 0]
        extreme = known.numel() and (known.min() < _IN_RANGE[0] or self.scale > _IN_RANGE[1])
        self._least = torch.float64 if extreme else torch.float32
        # Rows are scaled before they are multiplied, so that float32 products stay in range whatever the storage held.
        inverse = torch.where(square > 0, 1 / square, 0.0)
        self._weights = torch.stack((torch.full_like(inverse, 1 / self.scale) * (square > 0), inverse)).sqrt()
        self._left_out = square == 0
        self._loops = None if extreme else compiled_loops(self.rows * width)
        # a vector without a share along the ones direction has one again when it is rounded
        self._rounds = native_bfloat16() and not extreme and not self._fold.centred
        self.rounding = 0.0  # relative standard error of forms v^T A^T A w that images so far may have

    def __call__(self, raw: Vectors, unit: Vectors) -> tuple[Vectors, Vectors]:
        """A^T A times the vectors: of the raw matrix divided by `scale`, and of the unit one; float64."""
        vectors, count = torch.cat((raw, unit), dim=1), raw.shape[1]
        if self._loops is None or not 0 < vectors.shape[1] <= self._loops.VECTORS:
            return self.of_shared(vectors, count, count)
        rows = self._fold.inward(vectors).T.float()
        squares = self._weights[[0] * count + [1] * unit.shape[1]].square()
        loops = self._loops
        image = self._fold.outward(loops.gram_images(self._as_stored(loops.takes), rows, squares).T)
        return image[:, :count], image[:, count:]

    def _as_stored(self, takes: Callable[[torch.dtype], bool]) -> Iterator[tuple[slice, Matrix]]:
        """All rows at once where they are in memory, else block by block; in float32 where their dtype is not taken."""
        whole = slice(0, self.rows)
        spans = [whole] if isinstance(self._read, HeldRows) else self._spans()
        for rows in spans:
            block = self._read(rows)
            yield rows, block if takes(block.dtype) else block.float()

    def _spans(self) -> list[slice]:
        return [slice(start, min(start + BLOCK, self.rows)) for start in range(0, self.rows, BLOCK)]

    def of_shared(self, vectors: Vectors, raw: int, unit: int) -> tuple[Vectors, Vectors]:
        """The same of vectors of which the first `raw` are for the raw matrix and those from `unit` on for the unit one."""
        rows = self._fold.inward(vectors).T.contiguous()
        count, shared, coarsely = raw + len(rows) - unit, unit < raw, len(rows) >= _MANY
        weights = self._weights[[0] * raw + [1] * (count - raw)]  # of every image
        totals: list[Tensor | None] = [None] * LANES

        narrowed = functools.cache(rows.to)

        def add(lane: int, item: tuple[slice, Matrix]) -> None:
            span, block = item
            block = self._prepared(span, block, coarsely)
            weight = weights[:, span].to(torch.promote_types(block.dtype, torch.float32))
            found = times(narrowed(block.dtype), block.T)
            if shared:
                found = torch.cat((found[:raw], found[unit:]))
            # applied twice: its square may leave the range of float32
            found.mul_(weight).mul_(weight)
            image = times(found, block)
            total = totals[lane]
            totals[lane] = image if total is None else total.add_(image)
            if block.dtype == torch.bfloat16:
                self.rounding = rounding(self.width)

        in_lanes(add, ((span, self._read(span)) for span in self._spans()))
        image = torch.zeros(count, self.width, dtype=torch.float64)
        for total in totals:
            if total is not None:
                image += total
        image = self._fold.outward(image.T)
        return image[:, :raw], image[:, raw:]

    def _prepared(self, rows: slice, block: Matrix, coarsely: bool) -> Matrix:
        """The rows in the precision that is asked for; zeros for those that take no part."""
        left_out = self._left_out[rows]
        if coarsely and self._rounds:
            block = coarse(block)
        elif block.dtype.itemsize < self._least.itemsize:
            block = block.to(self._least)
        if left_out.any():  # which may hold what is no number
            block = block.clone()
            block[left_out] = 0.0
        return block


@dataclass(frozen=True)
class Krylov:
    """Orthonormal vectors that hold a matrix's leading directions, random ones without them, and their images."""

    basis: Vectors
    basis_image: Vectors
    probes: Vectors
    probes_image: Vectors

    def trace_with(self, basis_image: Vectors, probes_image: Vectors, rounding: float = 0.0) -> tuple[float, float]:
        """Trace of the product of this Gram matrix with another one, from the other's images; with its error.

        The part within the basis is exact up to the rounding of the other's images, the rest is Hutchinson's estimator on
        probes that have no part in it.

        Args:
            rounding: `GramOperator.rounding` of the other.
        """
        inside = (self.basis_image * basis_image).sum().item()
        rest = (self.probes_image * probes_image).sum(0)
        error = rest.std().item() / rest.numel() ** 0.5
        return inside + rest.mean().item(), math.hypot(error, rounding * inside)


def iterated_spectra(operator: GramOperator, square: Tensor, rng: np.random.Generator, others: Vectors) -> Iterated:
    """Spectrum of the raw and of the unit version from products alone, and what was learnt of the unit one.

    Cost: 2 rows width flops a vector, and as many again for each version; at most 12 Lanczos steps and 16 probes.

    Args:
        others: [width, count], vectors whose images under the unit version are wanted too.
    """
    start = rng.standard_normal(operator.width)
    versions = _lanczos(operator, start / np.linalg.norm(start))
    noise = torch.from_numpy(rng.standard_normal((operator.width, _PROBES)))
    # both versions share the probes; what lies in a version's own basis is taken out of probes and images alike
    images = operator.of_shared(torch.cat((noise, others), dim=1), _PROBES, 0)
    totals = ((square / operator.scale).sum().item(), float((square > 0).sum()))
    spectra, most = [], min(operator.rows, operator.width)
    for one, image, scale, total in zip(versions, images, (operator.scale, 1.0), totals, strict=True):
        krylov = Krylov(one.basis, one.image, *one.without(noise, image[:, :_PROBES]))
        squares, error = krylov.trace_with(krylov.basis_image, krylov.probes_image)
        spectra.append(
            Spectrum(
                scale=scale,
                top=min(one.top, total),
                total=total,
                participation=_participation(total, squares, most),
                most=most,
                residual=one.residual,
                participation_error=error / squares if squares > 0 else 0.0,
            )
        )
    raw, unit = spectra
    return Iterated(raw, unit, krylov, images[1][:, _PROBES:], operator.rounding)


@dataclass(frozen=True)
class Iterated:
    """Spectra of the two versions, what was learnt of the unit one, and its images of vectors that were asked for."""

    raw: Spectrum
    unit: Spectrum
    krylov: Krylov
    images: Vectors
    rounding: float


class _Lanczos:
    """The iteration for one version: its basis, the images of that, and the top eigenvalue so far.

    It stops for itself, so that what is found of one version does not depend on the other. Full reorthogonalisation.
    """

    def __init__(self, start: Float[np.ndarray, " width"]) -> None:
        self._basis = np.empty((_STEPS + 1, len(start)))
        self._basis[0] = start
        self._images: list[Float[np.ndarray, " width"]] = []
        self._diagonal: list[float] = []
        self._off: list[float] = []
        self.top, self.residual, self.done = 0.0, 0.0, False

    @property
    def basis(self) -> Vectors:
        return torch.from_numpy(self._basis[: len(self._images)]).T

    @property
    def image(self) -> Vectors:
        return torch.from_numpy(np.stack(self._images)).T

    def without(self, vectors: Vectors, images: Vectors) -> tuple[Vectors, Vectors]:
        """The same vectors and their images without what lies in the basis."""
        shares = self.basis.T @ vectors
        return vectors - self.basis @ shares, images - self.image @ shares

    @property
    def next(self) -> Vectors:
        """What the operator is to be applied to, nothing once it is done."""
        return torch.from_numpy(self._basis[len(self._images)][:, None][:, : 0 if self.done else 1])

    def step(self, product: Vectors) -> None:
        if self.done:
            return
        image, basis = product[:, 0].numpy(), self._basis[: len(self._images) + 1]
        self._images.append(image)
        self._diagonal.append(float(image @ basis[-1]))
        for _twice in range(2):
            image = image - (basis @ image) @ basis
        norm = float(np.linalg.norm(image))
        tridiagonal = np.diag(self._diagonal) + np.diag(self._off, 1) + np.diag(self._off, -1)
        values, vectors = np.linalg.eigh(tridiagonal)
        before, self.top = self.top, max(float(values[-1]), 0.0)
        self.residual = abs(norm * vectors[-1, -1]) / self.top if self.top > 0 else 0.0
        settled = abs(self.top - before) <= _TOLERANCE * self.top
        exhausted = norm <= np.finfo(float).eps * self.top or len(basis) == len(image)
        if settled or exhausted or len(self._images) == _STEPS:
            self.done = True
            return
        self._off.append(norm)
        self._basis[len(self._images)] = image / norm


def _lanczos(operator: GramOperator, start: Float[np.ndarray, " width"]) -> list[_Lanczos]:
    """Of the raw and of the unit version."""
    versions = [_Lanczos(start), _Lanczos(start)]
    while not all(one.done for one in versions):
        for one, product in zip(versions, operator(*(one.next for one in versions)), strict=True):
            one.step(product)
    return versions
