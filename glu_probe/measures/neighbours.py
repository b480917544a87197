"""Nearest neighbours of one neuron in its layer, factor by factor, with what chance and the layer alone would give."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..arguments import whole_number
from ..neurons import GatedLayer
from .extremes import largest_cosine
from .pairs import sign_is_free
from .products import RowProducts, row_products

if TYPE_CHECKING:
    import pandas as pd

FACTORS = ("query", "key", "value")
_ROWS = 1024
_SAMPLE = 64
_COLUMNS = {
    "factor": "string", "rank": "int32", "neighbour": "int32", "cosine": float,
    "cos_query": float, "cos_key": float, "cos_value": float, "null": float, "typical": float,
}  # fmt: skip


def nearest_neighbours(
    layer: GatedLayer, neuron: int, count: int = 5, *, products: RowProducts | None = None
) -> pd.DataFrame:
    """The neurons whose query, key or value is most nearly parallel to this one's.

    The sign of q is fixed by the activation: a cosine of q near -1 is a neuron that reads the opposite. Those of k and v
    flip together: the neighbour's are flipped so that cos_key >= 0 (as they are where the neuron is not linear in the
    up branch), which leaves a meaning to the sign of cos_value.

    Args:
        layer: its factors.
        neuron: 0 <= neuron < d_mlp.
        count: neighbours of each factor.
        products: the layer's `row_products`, if they are at hand.

    Returns:
        Frame with a row per factor ("query", "key", "value") and rank, by |cosine|: factor, rank, neighbour (index), cosine
        (of that factor), cos_query, cos_key, cos_value (all three of the pair), null (expected largest |cosine| of as many
        isotropic directions), typical (median over neurons of the layer of |cosine| to the nearest: what the layer's own
        anisotropy gives, from 64 of them). A factor whose row is zero or not finite has no rows. Cost: 400 d_mlp d_model flops.
    """
    import pandas as pd

    neuron = whole_number("neuron", neuron, 0, layer.d_mlp - 1)
    layer = layer.detach()
    products = row_products(layer) if products is None else products
    norms = [np.sqrt(square) for square in (products.qq, products.kk, products.vv)]
    live = [np.isfinite(norm) & (norm > 0) for norm in norms]
    matrices = (layer.query, layer.key, layer.value)
    cosines = [_against(*parts, neuron) for parts in zip(matrices, norms, live, strict=True)]
    if sign_is_free(layer):
        flip = np.where(cosines[1] < 0, -1.0, 1.0)
        cosines[1], cosines[2] = cosines[1] * flip, cosines[2] * flip
    rows = []
    for factor, own, norm, usable, matrix in zip(FACTORS, cosines, norms, live, matrices, strict=True):
        if not usable[neuron]:
            continue
        size = np.where(usable & (np.arange(layer.d_mlp) != neuron), np.abs(own), -1.0)
        nearest = [j for j in np.argsort(-size, kind="stable")[:count] if size[j] >= 0]
        null, typical = largest_cosine(int(usable.sum()) - 1, layer.d_model), _typical(matrix, norm, usable)
        rows += [
            (factor, rank, j, own[j], *(cosine[j] for cosine in cosines), null, typical)
            for rank, j in enumerate(nearest, 1)
        ]
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_COLUMNS)


def _against(matrix: Tensor, norm: np.ndarray, usable: np.ndarray, neuron: int) -> Float[np.ndarray, " d_mlp"]:
    """Cosine of one row with every row, missing where either is zero or not finite."""
    out = np.full(len(matrix), np.nan)
    if not usable[neuron]:
        return out
    row = matrix[neuron].double() / norm[neuron]
    for start in range(0, len(matrix), _ROWS):
        block = slice(start, start + _ROWS)
        out[block] = _unit(matrix, norm, np.arange(len(matrix))[block]) @ row
    return np.where(usable, out.clip(-1, 1), np.nan)


def _typical(matrix: Tensor, norm: np.ndarray, usable: np.ndarray) -> float:
    """Median of the largest |cosine| with another row, over evenly spaced rows."""
    live = np.flatnonzero(usable)
    if len(live) < 2:
        return np.nan
    at = np.unique(np.linspace(0, len(live) - 1, min(_SAMPLE, len(live))).round().astype(int))
    sample, best = _unit(matrix, norm, live[at]).float(), torch.zeros(len(at))
    for start in range(0, len(live), _ROWS):
        cosines = (sample @ _unit(matrix, norm, live[start : start + _ROWS]).float().T).abs()
        inside = (at >= start) & (at < start + _ROWS)
        cosines[np.flatnonzero(inside), at[inside] - start] = 0.0  # with itself
        best = torch.maximum(best, cosines.amax(1))
    return float(np.median(best.clamp(max=1.0).numpy()))


def _unit(matrix: Tensor, norm: np.ndarray, rows: np.ndarray) -> Float[Tensor, "row d_model"]:
    """Rows over their norms; not finite where a norm is zero or not finite."""
    return matrix[torch.from_numpy(rows)].double() / torch.from_numpy(norm[rows])[:, None]
