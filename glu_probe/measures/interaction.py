"""What a layer computes along one output direction: a quadratic form of the input, and its eigen-features.

Along u the layer's bilinear part is x B_u x^T with B_u = sum_j (u.v_j) beta_j sym(q_j k_j^T). Neurons that share an output
direction thus act as one unit of rank greater than 1: the higher-rank object of N. Breslow, arXiv 2606.22172, in a
trained model. Eigenvectors of such forms as features: Pearce et al., arXiv 2410.08417.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import BadOption, ShapeMismatch, UnknownActivation
from ..neurons import GatedLayer
from .gaussian import bilinear_coefficient
from .spectra import effective_rank

_EXACT_FLOPS = 5e10
_SAMPLES = 4096

PerNeuron = Float[Tensor, " d_mlp"]


@dataclass(frozen=True)
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

    direction: Float[Tensor, " d_model"]
    eigenvalues: Float[Tensor, " d_model"]
    features: Float[Tensor, "d_model d_model"]
    effective_rank: float
    participation_ratio: float
    top_share: float


def bilinear_coefficients(layer: GatedLayer) -> PerNeuron:
    """beta_j: how much of the product a_j b_j is in each neuron's coefficient S(a_j) b_j on isotropic input.

    The coefficient of ab in the least-squares fit of S(a) b by 1-parameter terms b and then ab (less what b has of it):
    1 for a linear gate, 1/2 for a ReLU or a SiLU near 0. It scales neither with k nor with v. By quadrature, with biases.

    Returns:
        [d_mlp] float64, 0 where a branch is zero, NaN where it is not finite.

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
    norms, product = (query.norm(dim=1), key.norm(dim=1)), (query * key).sum(1)
    rho = (product / (norms[0] * norms[1])).nan_to_num(0.0).clamp(-1, 1)
    means = (
        torch.zeros_like(rho) if bias is None else bias.detach().double() for bias in (layer.query_bias, layer.key_bias)
    )
    values = bilinear_coefficient(act, *(part.numpy() for part in (*norms, rho, *means)))
    return torch.from_numpy(values)


def _coefficients(layer: GatedLayer, given: PerNeuron | None) -> PerNeuron:
    if given is None:
        given = bilinear_coefficients(layer)
    given = given.detach().double()
    if given.shape != (layer.d_mlp,):
        raise ShapeMismatch(f"coefficients are {list(given.shape)}, expected [{layer.d_mlp}]")
    return given


def _live(layer: GatedLayer, coefficients: PerNeuron) -> Tensor:
    finite = [factor.isfinite().all(dim=1) for factor in (layer.query, layer.key, layer.value)]
    return (finite[0] & finite[1] & finite[2] & coefficients.isfinite()).nonzero().flatten()


def interaction_matrix(
    layer: GatedLayer, direction: Float[Tensor, " d_model"], coefficients: PerNeuron | None = None
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
    beta = _coefficients(layer, coefficients)
    live = _live(layer, beta)
    query, key, value = (factor[live].detach().double() for factor in (layer.query, layer.key, layer.value))
    product = query.T @ (key * ((value @ unit) * beta[live])[:, None])
    return (product + product.T) / 2


def _unit(direction: Tensor, width: int) -> Tensor:
    direction = direction.detach().double()
    if direction.shape != (width,):
        raise ShapeMismatch(f"the direction is {list(direction.shape)}, expected [{width}]")
    norm = direction.norm()
    if not (norm > 0 and norm.isfinite()):
        raise BadOption("the direction is zero or not finite", hint="Give a vector of the residual stream")
    return direction / norm


def interaction_features(
    layer: GatedLayer, direction: Float[Tensor, " d_model"], coefficients: PerNeuron | None = None
) -> Interaction:
    """Eigen-features of what the layer writes along a direction; see `interaction_matrix` for arguments and errors.

    Cost: 2 d_mlp d_model^2 flops and an eigenvalue problem of d_model (about 9 d_model^3).
    """
    matrix = interaction_matrix(layer, direction, coefficients)
    values, vectors = torch.linalg.eigh(matrix)
    order = values.abs().argsort(descending=True)
    values = values[order]
    squares = values.square()
    total = squares.sum()
    known = bool(total > 0)
    return Interaction(
        direction=_unit(direction, layer.d_model),
        eigenvalues=values,
        features=vectors[:, order].T,
        effective_rank=effective_rank(values.abs().numpy()),
        participation_ratio=(total.square() / squares.square().sum()).item() if known else float("nan"),
        top_share=(squares[0] / total).item() if known else float("nan"),
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
            each (relative error of M about 2 / sqrt(4096)); None for exact up to 5e10 flops.
        seed: of the random pairs.

    Returns:
        The directions, and |B_u|_F^2 of each (estimated where sampled); float64.
    """
    if not isinstance(count, int) or not 1 <= count <= layer.d_model:
        raise BadOption(f"count is {count!r}", hint=f"Give a whole number from 1 to {layer.d_model}")
    beta = _coefficients(layer, coefficients)
    live = _live(layer, beta)
    query, key, value = (factor[live].detach().double() for factor in (layer.query, layer.key, layer.value))
    key = key * beta[live][:, None]
    exact = 8 * layer.d_mlp**2 * layer.d_model <= _EXACT_FLOPS if exact is None else exact
    if exact:
        products = (query @ query.T) * (key @ key.T)
        cross = query @ key.T
        products += cross * cross.T
        moment = value.T @ (products / 2) @ value
    else:
        rng = np.random.default_rng(seed)
        x, y = torch.from_numpy(rng.standard_normal((2, _SAMPLES, layer.d_model)))
        outputs = (((x @ query.T) * (y @ key.T) + (y @ query.T) * (x @ key.T)) / 2) @ value
        moment = outputs.T @ outputs / _SAMPLES
    values, vectors = torch.linalg.eigh(moment)
    return vectors[:, -count:].flip(1).T.contiguous(), values[-count:].flip(0).clamp(min=0.0)
