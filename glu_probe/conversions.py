"""The exact equivalences between the forms of an MLP.

Every function returns a new form with copied factors that computes the same function, or refuses. Where an equivalence
needs a condition (rank 1, a linear s, no biases), the condition is checked, not assumed.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from .activations import Activation
from .errors import BadOption, ShapeMismatch
from .forms import BilinearAttentionMLP, GatedMLP, GlobalQueryMLP, MLPForm, RankOneBilinearMLP, StandardMLP
from .neurons import GatedLayer

_BRANCH_BIASES = ("query_bias", "key_bias")


def _expect(form: object, kind: type[MLPForm]) -> None:
    if not isinstance(form, kind):
        raise BadOption(
            f"this conversion takes a {kind.__name__}, found {type(form).__name__}", hint=f"Give a {kind.__name__}"
        )


def global_query_to_standard(form: GlobalQueryMLP) -> StandardMLP:
    """Absorb the global query into the keys: k_j <- Q k_j, since (x Q).k_j = x.(Q k_j).

    A dynamic query that all neurons share adds parameters and no function.
    """
    _expect(form, GlobalQueryMLP)
    key = einsum(form.key, form.query, "d_mlp d_query, d_model d_query -> d_mlp d_model")
    return StandardMLP.from_factors(
        form.activation, key=key, value=form.value, key_bias=form.key_bias, output_bias=form.output_bias
    )


def standard_to_bilinear(form: StandardMLP) -> BilinearAttentionMLP:
    """The standard MLP as a rank-1 bilinear form whose query does not depend on x: s(1 * (k_j.x)) v_j.

    The query is the constant 1 (query 0, query_bias 1); in a model whose x has a constant coordinate that would be
    the query's row.
    """
    _expect(form, StandardMLP)
    ones = torch.ones_like(form.key[:, :1])
    return BilinearAttentionMLP.from_factors(
        form.activation,
        query=torch.zeros_like(form.key)[:, :, None],
        key=form.key[:, :, None],
        value=form.value,
        query_bias=ones,
        key_bias=(torch.zeros_like(ones) if form.key_bias is None else form.key_bias[:, None]),
        output_bias=form.output_bias,
    )


def bilinear_to_rank_one(form: BilinearAttentionMLP) -> RankOneBilinearMLP:
    """Rank r at r = 1 is the rank-1 form.

    Raises:
        BadOption: the rank is not 1.
    """
    _expect(form, BilinearAttentionMLP)
    if form.rank != 1:
        raise BadOption(
            f"the form has rank {form.rank}",
            hint="Only rank 1 is a RankOneBilinearMLP of as many neurons; see symmetric_pairs for linear s",
        )
    biases = {name: None if (bias := getattr(form, name)) is None else bias[:, 0] for name in _BRANCH_BIASES}
    return RankOneBilinearMLP.from_factors(
        form.activation,
        query=form.query[:, :, 0],
        key=form.key[:, :, 0],
        value=form.value,
        output_bias=form.output_bias,
        **biases,
    )


def rank_one_to_bilinear(form: RankOneBilinearMLP) -> BilinearAttentionMLP:
    """The rank-1 form as a bilinear one of rank 1."""
    _expect(form, RankOneBilinearMLP)
    lifted = {name: tensor[..., None] for name, tensor in form.factors.items() if name not in ("value", "output_bias")}
    return BilinearAttentionMLP.from_factors(form.activation, value=form.value, output_bias=form.output_bias, **lifted)


def gated_to_rank_one(form: GatedMLP) -> RankOneBilinearMLP:
    """With s linear, s(a) b = s(a b): the gated form is the symmetric one.

    Raises:
        BadOption: s is not linear.
    """
    _expect(form, GatedMLP)
    return RankOneBilinearMLP.from_factors(_linear(form), **form.factors)


def rank_one_to_gated(form: RankOneBilinearMLP) -> GatedMLP:
    """The way back: with s linear the symmetric form is a gated one, in either order of its branches.

    Raises:
        BadOption: s is not linear.
    """
    _expect(form, RankOneBilinearMLP)
    return GatedMLP.from_factors(_linear(form), **form.factors)


def _linear(form: MLPForm) -> Activation:
    if not form.activation.linear:
        raise BadOption(
            f"s is {form.activation.name}, and s(a) b = s(a b) holds for linear s only",
            hint="glu_probe.symmetries.symmetry_gap measures how far apart the two are",
        )
    return form.activation


def layer_to_gated(layer: GatedLayer) -> GatedMLP:
    """The gated MLP of a checkpoint as a module that can be trained; x is what `GatedLayer.forward` takes.

    Raises:
        UnknownActivation: the layer's activation is not known.
    """
    return GatedMLP.from_factors(
        layer.known_activation(),
        query=layer.query,
        key=layer.key,
        value=layer.value,
        query_bias=layer.query_bias,
        key_bias=layer.key_bias,
        output_bias=layer.output_bias,
    )


def gated_to_layer(form: GatedMLP, norm_gain: Float[Tensor, " d_model"] | None = None, *, layer: int = 0) -> GatedLayer:
    """A gated module as the `GatedLayer` that the measures take.

    Args:
        form: its factors in float32 or float64; they are copied and detached.
        norm_gain: gain g of the RMSNorm in front, folded into query and key; None for none.
        layer: index to give it.

    Raises:
        ShapeMismatch: norm_gain is not d_model wide. BadOption: the factors are in half precision.
    """
    _expect(form, GatedMLP)
    factors: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in form.factors.items()}
    if norm_gain is not None:
        if norm_gain.shape != (form.d_model,):
            raise ShapeMismatch(
                f"norm_gain must be [{form.d_model}], found {list(norm_gain.shape)}",
                hint="Give one gain for each direction of the input",
            )
        gain = norm_gain.detach().to(form.query)
        factors |= {name: factors[name] * gain for name in ("query", "key")}
    norm = "none" if norm_gain is None else "RMSNorm gain folded in"
    return GatedLayer(activation=form.activation, layer=layer, norm=norm, **factors)


def symmetric_pairs(form: BilinearAttentionMLP) -> BilinearAttentionMLP:
    """Every neuron's form in its eigenbasis: x Q K^T x^T = sum_i lambda_i (u_i.x)^2.

    Only the symmetric part of Q K^T acts on x. It has at most 2 r eigenvalues that are not 0; they are found in the
    span of Q and K. The result has rank min(2 r, d_model), query columns lambda_i u_i and key columns u_i, orthonormal
    and by falling |lambda|: query and key are parallel, the exchange symmetry is manifest. With s linear every pair is
    a neuron of a `RankOneBilinearMLP` of its own: see `split_pairs`. Cost: O(d_mlp d_model r^2).

    Raises:
        BadOption: the form has biases, which make it affine, not bilinear.
    """
    _expect(form, BilinearAttentionMLP)
    if form.query_bias is not None or form.key_bias is not None:
        raise BadOption(
            "a form with biases on its branches has linear terms, no eigenvectors alone",
            hint="Leave out the biases of the branches, or fold them into a constant input",
        )
    span = torch.cat((form.query, form.key), dim=2).detach()  # [d_mlp, d_model, 2 r]
    basis, _ = torch.linalg.qr(span)
    query, key = (
        einsum(basis, part.detach(), "d_mlp d_model span, d_mlp d_model rank -> d_mlp span rank")
        for part in (form.query, form.key)
    )
    inner = einsum(query, key, "d_mlp i rank, d_mlp j rank -> d_mlp i j")
    values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
    order = values.abs().argsort(dim=1, descending=True)
    values, vectors = values.gather(1, order), vectors.gather(2, order[:, None, :].expand_as(vectors))
    directions = einsum(basis, vectors, "d_mlp d_model span, d_mlp span pair -> d_mlp d_model pair")
    return BilinearAttentionMLP.from_factors(
        form.activation,
        query=directions * values[:, None, :],
        key=directions,
        value=form.value,
        output_bias=form.output_bias,
    )


def split_pairs(form: BilinearAttentionMLP) -> RankOneBilinearMLP:
    """With s linear, a rank-r neuron is r rank-1 neurons that share its value: [d_mlp * rank] of them.

    Raises:
        BadOption: s is not linear.
    """
    _expect(form, BilinearAttentionMLP)
    act = _linear(form)
    parts = {
        name: rearrange(tensor, "d_mlp d_model rank -> (d_mlp rank) d_model")
        for name, tensor in (("query", form.query), ("key", form.key))
    }
    biases = {
        name: None if (bias := getattr(form, name)) is None else rearrange(bias, "d_mlp rank -> (d_mlp rank)")
        for name in _BRANCH_BIASES
    }
    return RankOneBilinearMLP.from_factors(
        act,
        value=form.value.repeat_interleave(form.rank, dim=0),
        output_bias=form.output_bias,
        **parts,
        **biases,
    )
