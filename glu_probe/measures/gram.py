"""The spectrum of a tall matrix through its Gram operator A^T A, exact or from products with a few vectors.

Every matrix is looked at twice, as it is ("raw") and with its rows scaled to norm 1 ("unit"); both versions share one
read of the rows. Squared singular values are what is computed; everything is scaled by the largest squared row norm, so
that no storage format's extremes leave the range of the arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

# A block of rows stays in its core's cache between the product with it and the one with its transpose; lanes of a
# batch go to different cores, and each is summed by one, so that the number of cores changes nothing.
_LANES, _ROWS = 8, 64
_STEPS, _TOLERANCE = 16, 1e-5
_PROBES = 16
_IN_RANGE = (1e-70, 1e70)  # squared row norms whose square roots, and their inverses, float32 holds

Matrix = Float[Tensor, "rows width"]
Vectors = Float[Tensor, "width count"]


@dataclass(frozen=True)
class Spectrum:
    """What is known of one version of a matrix.

    Attributes:
        top: largest squared singular value; from below where it is iterated.
        total: sum of the squared singular values.
        participation: total^2 over the sum of their squares, missing if all are 0.
        values: all squared singular values, falling, or None where only sums are known.
        residual: |A^T A u - top u| / top, 0 where exact: how far `top` may be from the nearest squared singular value.
        participation_error: relative standard error of `participation`, 0 where exact.
    """

    top: float
    total: float
    participation: float
    values: np.ndarray | None = None
    residual: float = 0.0
    participation_error: float = 0.0

    @property
    def gram_norm(self) -> float:
        """Frobenius norm of A^T A."""
        return self.total / math.sqrt(self.participation)


def exact_spectrum(matrix: Matrix, square: Tensor) -> Spectrum:
    """All squared singular values, float64. Cost: rows width min(rows, width) flops and an eigenvalue problem.

    Args:
        square: [rows], squared norms of the rows.
    """
    scale = square.max().item() or 1.0
    scaled = matrix.double() * scale**-0.5
    gram = scaled.T @ scaled if matrix.shape[0] >= matrix.shape[1] else scaled @ scaled.T
    values = torch.linalg.eigvalsh(gram).clamp_(min=0.0).flip(0).numpy()
    total, squares = square.sum().item(), float(np.square(values).sum())
    return Spectrum(
        top=float(values[0]) * scale,
        total=total,
        participation=(total / scale) ** 2 / squares if squares > 0 else math.nan,
        values=values * scale,
    )


class GramOperator:
    """v -> A^T A v of a matrix in both versions at once, without forming it."""

    def __init__(self, matrix: Matrix, square: Tensor, inverse: Tensor) -> None:
        """Of the rows as they are and scaled to norm 1.

        Args:
            square: [rows], squared norms of the rows.
            inverse: [rows], their inverses, 0 for rows that are 0.
        """
        rows, self.width = matrix.shape
        self.scale = square.max().item() or 1.0
        known = square[square > 0]
        if known.numel() and (known.min() < _IN_RANGE[0] or self.scale > _IN_RANGE[1]):
            matrix = matrix.double()
        self._dtype = matrix.dtype
        # Rows are scaled before they are multiplied, so that float32 products stay in range whatever the storage held.
        self._weights = torch.stack((torch.full_like(inverse, 1 / self.scale), inverse)).sqrt().to(matrix.dtype)
        whole = rows - rows % (_LANES * _ROWS)
        self._batches = matrix[:whole].view(-1, _LANES, _ROWS, self.width)
        self._batch_weights = self._weights[:, :whole].view(2, -1, _LANES, _ROWS).permute(1, 2, 0, 3)
        self._rest, self._rest_weights = matrix[whole:], self._weights[:, whole:]

    def __call__(self, raw: Vectors, unit: Vectors) -> tuple[Vectors, Vectors]:
        """A^T A times the vectors: of the raw matrix divided by `scale`, and of the unit one; float64."""
        counts = (raw.shape[1], unit.shape[1])
        rows = torch.cat((raw, unit), dim=1).T.to(self._dtype)
        lanes = rows.expand(_LANES, *rows.shape)
        total = torch.zeros(_LANES, *rows.shape, dtype=self._dtype)
        which = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
        for batch, weight in zip(self._batches, self._batch_weights, strict=True):
            weight = weight[:, which]  # applied twice: its square may leave the range of float32
            total.baddbmm_(torch.bmm(lanes, batch.transpose(1, 2)) * weight * weight, batch)
        rest_weights = self._rest_weights[which]
        rest = (rows @ self._rest.T) * rest_weights * rest_weights
        image = (total.double().sum(0) + (rest @ self._rest).double()).T
        return image[:, : counts[0]], image[:, counts[0] :]


@dataclass(frozen=True)
class Krylov:
    """Orthonormal vectors that hold a matrix's leading directions, random ones without them, and their images."""

    basis: Vectors
    basis_image: Vectors
    probes: Vectors
    probes_image: Vectors

    def trace_with(self, basis_image: Vectors, probes_image: Vectors) -> tuple[float, float]:
        """Trace of the product of this Gram matrix with another one, from the other's images; with its error.

        The part within the basis is exact, the rest is Hutchinson's estimator on probes that have no part in it.
        """
        inside = (self.basis_image * basis_image).sum().item()
        rest = (self.probes_image * probes_image).sum(0)
        return inside + rest.mean().item(), rest.std().item() / rest.numel() ** 0.5


def iterated_spectra(operator: GramOperator, square: Tensor, rng: np.random.Generator) -> tuple[list[Spectrum], Krylov]:
    """Spectrum of the raw and of the unit version from products alone, and what was learnt of the unit one.

    Cost: 4 rows width flops a vector and version; at most 16 Lanczos steps and 16 probes.
    """
    start = torch.from_numpy(rng.standard_normal(operator.width))
    bases, images, tops, residuals = _lanczos(operator, start)
    noise = torch.from_numpy(rng.standard_normal((operator.width, _PROBES)))
    probes = [noise - basis @ (basis.T @ noise) for basis in bases]
    probe_images = operator(*probes)
    totals = (square.sum().item(), float((square > 0).sum()))
    spectra = []
    for version, scale in enumerate((operator.scale, 1.0)):
        krylov = Krylov(bases[version], images[version], probes[version], probe_images[version])
        squares, error = krylov.trace_with(krylov.basis_image, krylov.probes_image)
        spectra.append(
            Spectrum(
                top=tops[version] * scale,
                total=totals[version],
                participation=(totals[version] / scale) ** 2 / squares if squares > 0 else math.nan,
                residual=residuals[version],
                participation_error=error / squares if squares > 0 else 0.0,
            )
        )
    return spectra, krylov


def _lanczos(operator: GramOperator, start: Tensor) -> tuple[list[Vectors], list[Vectors], list[float], list[float]]:
    """Bases of both versions' Krylov spaces, images of them, top eigenvalues and relative residuals.

    Full reorthogonalisation; a version stops changing the answer once its space is exhausted.
    """
    first = start / start.norm()
    bases, images = [[first], [first]], [[], []]
    diagonal, off = [[], []], [[], []]
    top, bound = [0.0, 0.0], [0.0, 0.0]
    for _ in range(_STEPS):
        products = operator(*(basis[-1][:, None] for basis in bases))
        previous = list(top)
        following = []
        for c, product in enumerate(products):
            image = product[:, 0]
            images[c].append(image)
            diagonal[c].append(image @ bases[c][-1])
            for _twice in range(2):
                for vector in bases[c]:
                    image = image - vector * (image @ vector)
            norm = image.norm()
            tridiagonal = torch.diag(torch.stack(diagonal[c]))
            for i, value in enumerate(off[c]):
                tridiagonal[i, i + 1] = tridiagonal[i + 1, i] = value
            values, vectors = torch.linalg.eigh(tridiagonal)
            top[c] = values[-1].item()
            bound[c] = abs(norm.item() * vectors[-1, -1].item()) / top[c] if top[c] > 0 else 0.0
            off[c].append(norm)
            following.append(image / torch.where(norm > 0, norm, 1.0))
        if all(abs(now - before) <= _TOLERANCE * now for now, before in zip(top, previous, strict=True)):
            break
        for basis, vector in zip(bases, following, strict=True):
            basis.append(vector)
    kept = [torch.stack(basis[: len(image)], dim=1) for basis, image in zip(bases, images, strict=True)]
    return kept, [torch.stack(image, dim=1) for image in images], top, bound
