"""Neurons that write along the same direction: together they are one unit of higher rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import BadOption
from ..neurons import GatedLayer
from .interaction import bilinear_coefficients
from .spectra import effective_rank
from .tensor import unit_factors

if TYPE_CHECKING:
    import pandas as pd

_ROWS = 1024
_RANK_TOLERANCE = 1e-6  # of the largest singular value; factors are stored in 32 bits or fewer


def neuron_groups(
    layer: GatedLayer, *, threshold: float = 0.5, coefficients: Float[Tensor, " d_mlp"] | None = None
) -> pd.DataFrame:
    """Groups of neurons by |cos(v_i, v_j)| > threshold, with the rank of the bilinear form each group computes.

    Groups are connected components: neurons in one need not all be close to each other, and `value_share` says how far
    they share one direction. Along that direction u (the leading one of the group's |q||k| beta weighted values) a group computes
    x C x^T with C = sum_j (u.v_j) beta_j q_j k_j^T, the Q K^T of the higher-rank unit in N. Breslow, arXiv 2606.22172.
    For isotropic values |cos| is about d_model^(-1/2). Cost: 2 d_mlp^2 d_model flops, and size^2 d_model a group.

    Args:
        threshold: 0 to 1.
        coefficients: [d_mlp] beta; None for `bilinear_coefficients`, or ones where the layer's function is not known.

    Returns:
        A row per group of two neurons or more, largest first: layer, group, size, neurons (tuple of indices),
        value_share (share of the weighted values' energy along u, 0 to 1), rank (of C, numerically; at most size),
        effective_rank (of C, Roy & Vetterli), symmetric_effective_rank (of what acts on x, (C + C^T)/2; at most 2 size).

    Raises:
        BadOption: a threshold out of range.
    """
    import pandas as pd
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    if not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise BadOption(f"threshold is {threshold!r}", hint="It is a cosine: give a number from 0 to 1")
    if coefficients is None and layer.functional_note() is not None:
        coefficients = torch.ones(layer.d_mlp, dtype=torch.float64)
    beta = bilinear_coefficients(layer) if coefficients is None else coefficients.detach().double()
    units, live = unit_factors(layer, beta.isfinite().numpy())
    pairs = _aligned_pairs(units.value, threshold)
    count = len(live)
    graph = coo_matrix((np.ones(len(pairs)), pairs.T), shape=(count, count))
    _, label = connected_components(graph, directed=False)
    order = np.argsort(label, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(label[order])) + 1) if count else []
    groups = sorted((group for group in members if len(group) > 1), key=lambda group: (-len(group), group[0]))
    columns = ["layer", "group", "size", "neurons", *_RANKS]
    weight = units.weight * beta[live]
    rows = [
        (layer.layer, index, len(group), tuple(live[group].tolist()), *_ranks(units, weight, group))
        for index, group in enumerate(groups)
    ]
    return pd.DataFrame(rows, columns=columns)


_RANKS = ("value_share", "rank", "effective_rank", "symmetric_effective_rank")


def _aligned_pairs(value: Tensor, threshold: float) -> np.ndarray:
    """Index pairs i < j with |cos| above the threshold: [pair, 2]."""
    found = [np.empty((0, 2), dtype=np.int64)]
    for start in range(0, len(value), _ROWS):
        cosines = value[start : start + _ROWS] @ value[start:].T
        close = (cosines.abs() > threshold).triu(diagonal=1)
        found.append(close.nonzero().numpy() + start)
    return np.concatenate(found)


def _ranks(units, weight: Tensor, group: np.ndarray) -> tuple[float, int, float, float]:
    group = torch.from_numpy(group)
    weighted = units.value[group] * weight[group].abs()[:, None]
    # of as many rows as the group has: the small Gram matrix, not the wide one
    energies, mixtures = torch.linalg.eigh(weighted @ weighted.T)
    direction = mixtures[:, -1] @ weighted
    direction = direction / direction.norm()
    coefficient = (units.value[group] @ direction) * weight[group]
    query, key = units.query[group] * coefficient[:, None], units.key[group]
    # within the span of the group's queries and keys nothing of C is lost
    basis, _ = torch.linalg.qr(torch.cat((query, key)).T)
    form = (query @ basis).T @ (key @ basis)
    singular = torch.linalg.svdvals(form).numpy()
    symmetric = torch.linalg.eigvalsh((form + form.T) / 2).abs().numpy()
    return (
        (energies[-1] / energies.clamp(min=0.0).sum()).item(),
        int((singular > _RANK_TOLERANCE * singular[0]).sum()),
        effective_rank(singular),
        effective_rank(symmetric),
    )
