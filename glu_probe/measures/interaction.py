"""What a layer computes along one output direction: a quadratic form of the input, and its eigen-features.

Along u the layer's bilinear part is x B_u x^T with B_u = sum_j (u.v_j) beta_j sym(q_j k_j^T). Neurons that share an output
direction thus act as one unit of rank greater than 1: the higher-rank object of N. Breslow, arXiv 2606.22172, in a
trained model. Eigenvectors of such forms as features: Pearce et al., arXiv 2410.08417.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..arguments import vector, whole_number
from ..errors import BadOption, UnknownActivation
from ..neurons import GatedLayer
from .gaussian import bilinear_coefficient
from .spectra import effective_rank

_EXACT_FLOPS = 5e10
_SAMPLES = 4096
_ROWS = 256

PerNeuron = Float[Tensor, " d_mlp"]
Direction = Float[Tensor, " d_model"]


@dataclass(frozen=True, eq=False)
class Interaction:
    """The quadratic form of one output direction, by its eigenvectors.

    Attributes:
        direction: [d_model] u, of norm 1.
        eigenvalues: [d_model] by falling size: what x = the feature, of norm 1, writes along u.
        features: [d_model, d_model] float64, row i the unit eigenvector of eigenvalues[i].
        effective_rank: exp of the entropy of |eigenvalues|, 1 to d_model.
        participation_ratio: (sum l^2)^2 / sum l^4 of the eigenvalues l.
        top_share: share of the largest eigenvalue in sum l^2.
    """

    direction: Direction
    eigenvalues: Float[Tensor, " d_model"]
    features: Float[Tensor, "d_model d_model"]
    effective_rank: float
    participation_ratio: float
    top_share: float


def bilinear_coefficients(layer: GatedLayer) -> PerNeuron:
    """beta_j: how much of the product a_j b_j is in each neuron's coefficient S(a_j) b_j on isotropic input.

    The coefficient of ab in the least-squares fit of S(a) b by terms in b and ab: 1 for a linear gate, 1/2 for a ReLU or a
    SiLU near 0. It scales neither with k nor with v. By quadrature, with biases; 30 microseconds a neuron.

    Returns:
        [d_mlp] float64, 0 where a branch is zero, NaN where it is not finite or beyond 1e60.

    Raises:
        UnknownActivation: the activation, or the scale of the layer's input, is not known.
    """
    act = layer.known_activation()
    if (note := layer.functional_note()) is not None:
        raise UnknownActivation(
            f"the coefficients of layer {layer.layer} are not defined: {note}",
            hint="Give coefficients of your own; all ones treat the layer as bilinear",
        )
    query, key = layer.query.detach().double(), layer.key.detach().double()
    norms = torch.stack((query.norm(dim=1), key.norm(dim=1)))
    units = [rows / norm.clamp(min=1e-300)[:, None] for rows, norm in zip((query, key), norms, strict=True)]
    rho = (units[0] * units[1]).sum(1).clamp(-1, 1)
    means = [
        torch.zeros_like(rho) if bias is None else bias.detach().double() for bias in (layer.query_bias, layer.key_bias)
    ]
    return torch.from_numpy(bilinear_coefficient(act, *(part.numpy() for part in (*norms, rho, *means))))


def coefficients_of(layer: GatedLayer, given: Any = None) -> PerNeuron:
    """The coefficients that were given, checked, or else `bilinear_coefficients`."""
    return bilinear_coefficients(layer) if given is None else vector("coefficients", given, layer.d_mlp)


def _terms(layer: GatedLayer, given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """query, beta * key and value of the neurons in which all is finite: [live, d_model] float64 each."""
    beta = coefficients_of(layer, given)
    factors = [factor.detach() for factor in (layer.query, layer.key, layer.value)]
    live = beta.isfinite()
    for factor in factors:
        live = live & factor.isfinite().all(dim=1)
    query, key, value = (factor[live].double() for factor in factors)
    return query, key * beta[live][:, None], value


def interaction_matrix(
    layer: GatedLayer, direction: Direction, coefficients: PerNeuron | None = None
) -> Float[Tensor, "d_model d_model"]:
    """B_u = sum_j (u.v_j) beta_j sym(q_j k_j^T) for u = direction / |direction|: symmetric, float64, gauge-free.

    x B_u x^T is what the layer's bilinear part writes along u. Neurons that hold NaN or infinity are left out. Cost: 2 d_mlp
    d_model^2 flops.

    Args:
        coefficients: [d_mlp] beta; None for `bilinear_coefficients`, ones for a bilinear layer.

    Raises:
        ShapeMismatch, BadOption: a direction of another width, or zero. UnknownActivation: see `bilinear_coefficients`.
    """
    unit = _unit(direction, layer.d_model)
    query, key, value = _terms(layer, coefficients)
    product = query.T @ (key * (value @ unit)[:, None])
    return (product + product.T) / 2


def _unit(direction: Any, width: int) -> Direction:
    direction = vector("the direction", direction, width)
    largest = direction.abs().max()
    if not (largest > 0 and largest.isfinite()):
        raise BadOption("the direction is zero or not finite", hint="Give a vector of the residual stream")
    direction = direction / largest
    return direction / direction.norm()


def interaction_features(layer: GatedLayer, direction: Direction, coefficients: PerNeuron | None = None) -> Interaction:
    """Eigen-features of what the layer writes along a direction; see `interaction_matrix` for arguments and errors.

    Cost: 2 d_mlp d_model^2 flops and an eigenvalue problem of d_model (about 9 d_model^3).
    """
    matrix = interaction_matrix(layer, direction, coefficients)
    largest = matrix.abs().max()
    known = bool(largest > 0)
    values, vectors = torch.linalg.eigh(matrix / largest if known else matrix)
    order = values.abs().argsort(descending=True)
    values = values[order]
    share = (values / values[0]).square() if known else values
    return Interaction(
        direction=_unit(direction, layer.d_model),
        eigenvalues=values * largest,
        features=vectors[:, order].T,
        effective_rank=effective_rank(values.abs().numpy()),
        participation_ratio=(share.sum().square() / share.square().sum()).item() if known else math.nan,
        top_share=(1 / share.sum()).item() if known else math.nan,
    )


def output_directions(
    layer: GatedLayer,
    count: int,
    coefficients: PerNeuron | None = None,
    *,
    exact: bool | None = None,
    seed: int = 0,
) -> tuple[Float[Tensor, "count d_model"], Float[Tensor, " count"]]:
    """The output directions u with the largest interaction matrices: orthonormal, by falling |B_u|_F^2.

    They are eigenvectors of M = sum_ij beta_i beta_j <sym q_i k_i^T, sym q_j k_j^T> v_i v_j^T, for which u M u^T = |B_u|_F^2,
    so they do not depend on the gauge.

    Args:
        count: 1 to d_model.
        coefficients: as in `interaction_matrix`.
        exact: M from Gram matrices, 8 d_mlp^2 d_model flops, or from 4096 random pairs of inputs, 12 d_mlp d_model flops
            each; None for exact up to 5e10 flops. Sampled directions are right where M has a few that stand out; among
            others of nearly the same energy they are a mixture.
        seed: of the random pairs.

    Returns:
        The directions, and |B_u|_F^2 of each, which is exact for the directions returned either way (2 d_mlp d_model^2 flops
        each); float64.

    Raises:
        BadOption: count or seed out of range. UnknownActivation: see `bilinear_coefficients`.
    """
    count, seed = whole_number("count", count, 1, layer.d_model), whole_number("seed", seed, 0)
    beta = coefficients_of(layer, coefficients)
    query, key, value = (_scaled(factor) for factor in _terms(layer, beta))
    exact = 8 * layer.d_mlp**2 * layer.d_model <= _EXACT_FLOPS if exact is None else exact
    moment = torch.zeros(layer.d_model, layer.d_model, dtype=torch.float64)
    if exact:
        for start in range(0, len(query), _ROWS):
            rows = slice(start, start + _ROWS)
            products = (query[rows] @ query.T) * (key[rows] @ key.T) + (query[rows] @ key.T) * (key[rows] @ query.T)
            moment += value[rows].T @ (products @ value)
    else:
        x, y = torch.from_numpy(np.random.default_rng(seed).standard_normal((2, _SAMPLES, layer.d_model)))
        outputs = ((x @ query.T) * (y @ key.T) + (y @ query.T) * (x @ key.T)) @ value
        moment = outputs.T @ outputs
    directions = torch.linalg.eigh(_scaled(moment)).eigenvectors[:, -count:].flip(1).T.contiguous()
    energies = torch.stack([interaction_matrix(layer, one, beta).square().sum() for one in directions])
    order = energies.argsort(descending=True, stable=True)
    return directions[order], energies[order]


def _scaled(matrix: Tensor) -> Tensor:
    """With a largest entry of 1, so that products of several keep their range."""
    largest = matrix.abs().max() if matrix.numel() else 0.0
    return matrix / largest if largest > 0 else matrix
