"""Neurons that write along the same direction: together they are one unit of higher rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..arguments import share
from ..neurons import GatedLayer
from .interaction import coefficients_of
from .spectra import effective_rank
from .tensor import UnitFactors

if TYPE_CHECKING:
    import pandas as pd

_ROWS = 256
_RANK_TOLERANCE = 1e-6  # of the largest singular value; factors are stored in 32 bits or fewer
_COLUMNS = {
    "layer": int, "group": int, "size": int, "neurons": object,
    "value_share": float, "rank": "Int64", "effective_rank": float, "symmetric_effective_rank": float,
}  # fmt: skip


def neuron_groups(
    layer: GatedLayer, *, threshold: float = 0.5, coefficients: Float[Tensor, " d_mlp"] | None = None
) -> pd.DataFrame:
    """Groups of neurons by |cos(v_i, v_j)| > threshold, with the rank of the bilinear form each group computes.

    Groups are connected components: neurons in one need not all be close to each other, and `value_share` says how far
    they share one direction. Along that direction u (the leading one of the group's |q||k| beta weighted values) a group computes
    x C x^T with C = sum_j (u.v_j) beta_j q_j k_j^T, the Q K^T of the higher-rank unit in N. Breslow, arXiv 2606.22172.
    For isotropic values |cos| is about d_model^(-1/2). Cost: d_mlp^2 d_model flops, and about 10 size d_model^2 for a
    group, or 30 size^2 d_model for one smaller than d_model.

    Args:
        threshold: 0 to 1.
        coefficients: [d_mlp] beta; None for `bilinear_coefficients`, or ones where the layer's function is not known.

    Returns:
        A row per group of two neurons or more, largest first: layer, group, size, neurons (tuple of indices),
        value_share (share of the weighted values' energy along u, 0 to 1), rank (of C, numerically; at most size),
        effective_rank (of C, Roy & Vetterli), symmetric_effective_rank (of what acts on x, (C + C^T)/2; at most 2 size);
        the last four are missing where all coefficients of the group are 0.

    Raises:
        BadOption, ShapeMismatch: a threshold out of range; coefficients of another shape.
    """
    import pandas as pd

    threshold = share("threshold", threshold, why="it is a cosine")
    if coefficients is None and layer.functional_note() is not None:
        coefficients = torch.ones(layer.d_mlp)
    beta = coefficients_of(layer, coefficients)
    units = UnitFactors.of(layer, beta.isfinite().numpy())
    factors = units.unit(slice(0, len(units)))
    label = _components(factors[2], threshold)
    order = np.argsort(label, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(label[order])) + 1) if len(order) else []
    groups = sorted((group for group in members if len(group) > 1), key=lambda group: (-len(group), group[0]))
    weight = units.weight * beta[units.neurons]
    rows = [
        (
            layer.layer, index, len(group), tuple(units.neurons[group].tolist()),
            *_ranks(factors[0][group], factors[1][group], factors[2][group], weight[group]),
        )
        for index, group in enumerate(groups)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_COLUMNS)


def _components(value: Float[Tensor, "neuron d_model"], threshold: float) -> np.ndarray:
    """Component of every neuron in the graph of |cos| above the threshold; a block of rows is in memory at a time."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    count = len(value)
    label = np.arange(count)
    for start in range(0, count, _ROWS):
        # parallel rows may exceed 1 by rounding
        cosines = (value[start : start + _ROWS] @ value[start:].T).abs().clamp_(max=1.0)
        first, second = (cosines > threshold).triu(diagonal=1).nonzero().numpy().T + start
        edges = np.concatenate((label[first], label)), np.concatenate((label[second], label))
        graph = coo_matrix((np.ones(len(edges[0]), dtype=bool), edges), shape=(count, count))
        label = connected_components(graph, directed=False)[1][label]
    return label


def _ranks(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> tuple[float, int | None, float, float]:
    """value_share, rank, effective_rank, symmetric_effective_rank of one group, from unit rows and weights."""
    largest = weight.abs().max()
    if not largest > 0:
        return math.nan, None, math.nan, math.nan
    weight = weight / largest
    _, energies, directions = torch.linalg.svd(value * weight.abs()[:, None], full_matrices=False)
    energies = energies.square()
    query = query * ((value @ directions[0]) * weight)[:, None]
    # within the span of the group's queries and keys nothing of C is lost
    basis, _ = torch.linalg.qr(torch.cat((query, key)).T)
    form = (query @ basis).T @ (key @ basis)
    singular = torch.linalg.svdvals(form).numpy()
    symmetric = torch.linalg.eigvalsh((form + form.T) / 2).abs().numpy()
    return (
        (energies[0] / energies.sum()).item(),
        int((singular > _RANK_TOLERANCE * singular[0]).sum()),
        effective_rank(singular),
        effective_rank(symmetric),
    )
