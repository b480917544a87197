"""The exact equivalences between the forms: the same function to rounding, or a refusal."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import glu_probe as gp
from glu_probe.conversions import (
    bilinear_to_rank_one,
    gated_to_layer,
    gated_to_rank_one,
    global_query_to_standard,
    layer_to_gated,
    rank_one_to_bilinear,
    rank_one_to_gated,
    split_pairs,
    standard_to_bilinear,
    symmetric_pairs,
)
from glu_probe.errors import BadOption, ShapeMismatch, UnknownActivation
from glu_probe.forms import (
    FORMS,
    BilinearAttentionMLP,
    GatedMLP,
    GlobalQueryMLP,
    RankOneBilinearMLP,
    StandardMLP,
)

from .random_forms import D_MLP, D_MODEL, close, inputs, numbers, random_form
from .support import random_layer

NONLINEAR = ("relu", "relu2", "silu", "gelu", "gelu_tanh", "quick_gelu", "mish", "sigmoid", "tanh")
EVERY = ("linear", *NONLINEAR)
each_activation = pytest.mark.parametrize("activation", EVERY)
with_and_without_bias = pytest.mark.parametrize("bias", [False, True])

# every conversion with a form it takes
CONVERSIONS = {
    global_query_to_standard: GlobalQueryMLP,
    standard_to_bilinear: StandardMLP,
    bilinear_to_rank_one: BilinearAttentionMLP,
    rank_one_to_bilinear: RankOneBilinearMLP,
    gated_to_rank_one: GatedMLP,
    rank_one_to_gated: RankOneBilinearMLP,
    gated_to_layer: GatedMLP,
    symmetric_pairs: BilinearAttentionMLP,
    split_pairs: BilinearAttentionMLP,
}


# -- a global query ---------------------------------------------------------------------------------


def test_the_global_query_goes_into_the_keys_by_hand():
    form = GlobalQueryMLP.from_factors(
        "linear", query=numbers([[0, 1], [5, 0]]), key=numbers([[1, 10]]), value=numbers([[1, -2]])
    )
    # Q k = (0 + 10, 5 + 0)
    close(global_query_to_standard(form).key, numbers([[10, 5]]))


@each_activation
@with_and_without_bias
def test_a_global_query_gains_nothing(activation, bias):
    form, x = random_form(GlobalQueryMLP, activation, bias=bias), inputs(50, D_MODEL)
    plain = global_query_to_standard(form)
    assert type(plain) is StandardMLP
    close(plain(x), form(x))
    close(plain.coefficients(x), form.coefficients(x))
    assert form.parameter_count - plain.parameter_count == D_MODEL**2
    assert form.flops_per_token - plain.flops_per_token == 2 * D_MODEL**2


# -- a static query -----------------------------------------------------------------------------------


@each_activation
@with_and_without_bias
def test_standard_is_bilinear_with_a_static_query(activation, bias):
    form, x = random_form(StandardMLP, activation, bias=bias), inputs(50, D_MODEL)
    lifted = standard_to_bilinear(form)
    assert (type(lifted), lifted.rank) == (BilinearAttentionMLP, 1)
    close(lifted(x), form(x))
    # the query is the same for every x
    assert lifted.query.count_nonzero() == 0
    assert (lifted.query_bias == 1).all()


@each_activation
@with_and_without_bias
def test_a_constant_coordinate_of_the_input_does_the_same_as_the_query_bias(activation, bias):
    """Without any bias: x gets a last coordinate 1, the query reads only that, the key reads x (and its own bias there)."""
    form, x = random_form(StandardMLP, activation, bias=bias), inputs(50, D_MODEL)
    bias_column = form.key_bias if bias else torch.zeros(D_MLP, dtype=torch.float64)
    last = torch.zeros(D_MLP, D_MODEL + 1, dtype=torch.float64)
    last[:, -1] = 1
    lifted = BilinearAttentionMLP.from_factors(
        activation,
        query=last[:, :, None],
        key=torch.cat((form.key, bias_column[:, None]), dim=1)[:, :, None],
        value=torch.nn.functional.pad(form.value, (0, 1)),
    )
    out = lifted(torch.nn.functional.pad(x, (0, 1), value=1.0))
    close(out[:, :-1], form(x) - (form.output_bias if bias else 0.0))
    assert out[:, -1].count_nonzero() == 0
    close(out[:, :-1], standard_to_bilinear(form.with_factors(output_bias=None))(x))


# -- rank 1 -------------------------------------------------------------------------------------------


@each_activation
@with_and_without_bias
def test_rank_r_at_r_1_is_the_rank_one_form(activation, bias):
    form, x = random_form(BilinearAttentionMLP, activation, rank=1, bias=bias), inputs(50, D_MODEL)
    narrow = bilinear_to_rank_one(form)
    assert type(narrow) is RankOneBilinearMLP
    close(narrow(x), form(x))
    back = rank_one_to_bilinear(narrow)
    assert type(back) is BilinearAttentionMLP
    close(back(x), form(x))
    for name, tensor in form.factors.items():
        assert torch.equal(back.factors[name], tensor), name


def test_one_bias_alone_survives():
    form = random_form(BilinearAttentionMLP, rank=1, bias=True).with_factors(query_bias=None)
    narrow, x = bilinear_to_rank_one(form), inputs(5, D_MODEL)
    assert narrow.query_bias is None
    close(narrow(x), form(x))
    close(rank_one_to_bilinear(narrow)(x), form(x))


@pytest.mark.parametrize("rank", [2, 6])
def test_higher_ranks_are_no_rank_one_form(rank):
    with pytest.raises(BadOption, match=f"rank {rank}.*symmetric_pairs"):
        bilinear_to_rank_one(random_form(BilinearAttentionMLP, rank=rank))


# -- the gated form -----------------------------------------------------------------------------------


@with_and_without_bias
def test_gated_and_symmetric_are_one_for_linear_s(bias):
    form, x = random_form(GatedMLP, "linear", bias=bias), inputs(50, D_MODEL)
    symmetric = gated_to_rank_one(form)
    assert type(symmetric) is RankOneBilinearMLP
    close(symmetric(x), form(x))
    back = rank_one_to_gated(symmetric)
    assert type(back) is GatedMLP
    close(back(x), form(x))
    # "in either order of its branches"
    exchanged = rank_one_to_gated(gp.symmetries.exchange(symmetric))
    assert torch.equal(exchanged.query, form.key)
    close(exchanged(x), form(x))


@pytest.mark.parametrize("activation", NONLINEAR)
def test_gated_and_symmetric_are_two_for_every_other_s(activation):
    """The refusal is right: the same factors in the two forms give two functions."""
    gated = random_form(GatedMLP, activation)
    symmetric = RankOneBilinearMLP.from_factors(activation, **gated.factors)
    for convert, form in ((gated_to_rank_one, gated), (rank_one_to_gated, symmetric)):
        with pytest.raises(BadOption, match=f"s is {activation}, .* linear s only"):
            convert(form)
    x = inputs(50, D_MODEL)
    assert (gated(x) - symmetric(x)).square().mean() > 1e-3 * gated(x).square().mean()


def test_a_linear_s_may_have_a_slope():
    tripled = gp.Activation("tripled", "3 z", lambda z: 3 * z, degree=1.0, linear=True, odd=True)
    form, x = random_form(GatedMLP, tripled, bias=True), inputs(5, D_MODEL)
    close(gated_to_rank_one(form)(x), form(x))


# -- layers of checkpoints ----------------------------------------------------------------------------


@each_activation
@with_and_without_bias
def test_layer_to_gated(activation, bias):
    layer = random_layer(activation=activation, biases=bias)
    if bias:
        layer = gp.GatedLayer(
            layer.query, layer.key, layer.value, layer.activation,
            query_bias=layer.query_bias, key_bias=layer.key_bias, output_bias=inputs(16, seed=8),
        )  # fmt: skip
    form, x = layer_to_gated(layer), inputs(2, 25, 16)
    assert type(form) is GatedMLP
    assert torch.equal(form(x), layer.forward(x))
    assert list(form.factors) == (list(GatedMLP.axes) if bias else ["query", "key", "value"])
    assert all(parameter.requires_grad for parameter in form.parameters())


def test_layer_of_unknown_activation_is_refused():
    layer = random_layer()
    with pytest.raises(UnknownActivation, match="layer 0"):
        layer_to_gated(gp.GatedLayer(layer.query, layer.key, layer.value, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@with_and_without_bias
def test_gated_to_layer_with_the_gain_of_the_norm(bias, dtype):
    form = random_form(GatedMLP, "gelu", bias=bias, dtype=dtype)
    gain = 1 + 0.3 * inputs(D_MODEL, seed=5)
    layer = gated_to_layer(form, gain, layer=7)
    assert (layer.layer, layer.activation, layer.norm) == (7, form.activation, "RMSNorm gain folded in")
    h = 5 * inputs(20, D_MODEL).to(dtype)
    x = h / h.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(layer.forward(x), form(x * gain.to(dtype)))
    assert not torch.allclose(layer.forward(x), form(x), rtol=1e-2)
    assert layer.forward(x).dtype == dtype


@with_and_without_bias
def test_gated_to_layer_and_back(bias):
    form = random_form(GatedMLP, "gelu", bias=bias)
    layer = gated_to_layer(form)
    assert layer.norm == "none"
    back = layer_to_gated(layer)
    assert back.factors.keys() == form.factors.keys()
    assert all(torch.equal(back.factors[name], tensor) for name, tensor in form.factors.items())
    assert not any(getattr(layer, name).requires_grad for name in ("query", "key", "value"))


def test_a_form_that_was_trained_can_be_measured():
    """The measures take what gated_to_layer gives."""
    result = gp.measure_layer(gated_to_layer(random_form(GatedMLP, "silu", d_model=16, d_mlp=24)), samples=64)
    assert np.isfinite(result.neurons["exchange_asymmetry"]).all()


@pytest.mark.parametrize("width", [1, D_MODEL - 1, D_MODEL + 1])
def test_a_gain_of_another_width_is_refused(width):
    with pytest.raises(ShapeMismatch, match=rf"norm_gain must be \[{D_MODEL}\], found \[{width}\]"):
        gated_to_layer(random_form(GatedMLP), torch.ones(width))


def test_half_precision_is_no_layer():
    with pytest.raises(BadOption, match="float32"):
        gated_to_layer(random_form(GatedMLP, dtype=torch.bfloat16))


# -- eigen-pairs --------------------------------------------------------------------------------------


def test_eigen_pairs_by_hand():
    """q = e0, k = e1: x0 x1 = ((x0 + x1)^2 - (x0 - x1)^2) / 4, so eigenvalues 1/2 and -1/2."""
    form = BilinearAttentionMLP.from_factors(
        "linear", query=numbers([[[1], [0], [0]]]), key=numbers([[[0], [1], [0]]]), value=numbers([[1, 0, 0]])
    )
    pairs = symmetric_pairs(form)
    assert pairs.rank == 2
    u = pairs.key[0].T
    assert sorted((pairs.query[0].T * u).sum(1).tolist()) == pytest.approx([-0.5, 0.5])
    close(u.abs(), numbers([[math.sqrt(0.5), math.sqrt(0.5), 0]] * 2))
    close((u[:, 0] * u[:, 1]).sort().values, numbers([-0.5, 0.5]))


def check_pairs(form: BilinearAttentionMLP) -> None:
    """Everything that symmetric_pairs promises."""
    d_model, pairs = form.d_model, symmetric_pairs(form)
    assert pairs.rank == min(2 * form.rank, d_model)
    x = inputs(20, d_model, seed=9)
    close(pairs.logits(x), form.logits(x))
    close(pairs(x), form(x))
    for j in range(form.d_mlp):
        query, u = pairs.query[j].detach().numpy(), pairs.key[j].detach().numpy()
        values = np.einsum("dp,dp->p", query, u)
        np.testing.assert_allclose(query, u * values, atol=1e-12)  # parallel
        np.testing.assert_allclose(u.T @ u, np.eye(pairs.rank), atol=1e-12)
        assert (np.diff(np.abs(values)) <= 1e-12).all()
        dense = form.query[j].detach().numpy() @ form.key[j].detach().numpy().T
        dense = (dense + dense.T) / 2
        expected = np.linalg.eigvalsh(dense)
        largest = expected[np.argsort(-np.abs(expected))][: pairs.rank]
        np.testing.assert_allclose(np.sort(values), np.sort(largest), atol=1e-12)
        np.testing.assert_allclose((u * values) @ u.T, dense, atol=1e-12)
        # the exchange symmetry is manifest: exchanged, the dense form is the very same
        np.testing.assert_allclose(query @ u.T, u @ query.T, atol=1e-12)


@each_activation
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 6])
def test_eigen_pairs(rank, activation):
    """d_model is 6: up to rank 3 there are 2 r pairs, beyond there are 6."""
    check_pairs(random_form(BilinearAttentionMLP, activation, rank=rank))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(d_model=st.integers(1, 7), d_mlp=st.integers(1, 3), rank=st.integers(1, 8), seed=st.integers(0, 999))
def test_eigen_pairs_of_every_size(d_model, d_mlp, rank, seed):
    check_pairs(random_form(BilinearAttentionMLP, d_model=d_model, d_mlp=d_mlp, rank=rank, seed=seed))


@pytest.mark.parametrize("what", ["equal", "opposite", "zero query", "parallel columns", "repeated eigenvalues"])
def test_eigen_pairs_where_the_span_is_smaller(what):
    """Fewer than 2 r directions in Q and K: the basis must be orthonormal all the same."""
    form = random_form(BilinearAttentionMLP, rank=2)
    query, key = form.query.detach().clone(), form.key.detach().clone()
    if what == "equal":
        key = query
    elif what == "opposite":
        key = -query
    elif what == "zero query":
        query[3] = 0
    elif what == "parallel columns":
        query[:, :, 1] = 2 * query[:, :, 0]
    else:
        query = key = torch.eye(D_MODEL, 2, dtype=torch.float64).expand(D_MLP, -1, -1)
    check_pairs(form.with_factors(query=query, key=key))


def test_rank_one_pairs_have_the_known_eigenvalues():
    """|q||k| (cos + 1) / 2 and |q||k| (cos - 1) / 2."""
    form = random_form(BilinearAttentionMLP, rank=1)
    pairs = symmetric_pairs(form)
    q, k = form.query[:, :, 0], form.key[:, :, 0]
    size, cosine = q.norm(dim=1) * k.norm(dim=1), torch.cosine_similarity(q, k)
    values = (pairs.query * pairs.key).sum(1)
    close(values.max(1).values, size * (cosine + 1) / 2)
    close(values.min(1).values, size * (cosine - 1) / 2)


@pytest.mark.parametrize("name", ["query_bias", "key_bias"])
def test_eigen_pairs_are_for_bilinear_forms_without_biases(name):
    form = random_form(BilinearAttentionMLP, bias=True)
    kept = {n: None for n in ("query_bias", "key_bias") if n != name}
    with pytest.raises(BadOption, match="biases"):
        symmetric_pairs(form.with_factors(**kept))
    # an output bias is not in the way
    form = form.with_factors(query_bias=None, key_bias=None)
    assert torch.equal(symmetric_pairs(form).output_bias, form.output_bias)


@with_and_without_bias
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_split_pairs(rank, bias):
    form, x = random_form(BilinearAttentionMLP, "linear", rank=rank, bias=bias), inputs(50, D_MODEL)
    neurons = split_pairs(form)
    assert (type(neurons), neurons.d_mlp) == (RankOneBilinearMLP, rank * D_MLP)
    close(neurons(x), form(x))
    # neuron j r + i is pair i of neuron j, with its value
    close(neurons.query[rank * 4 + rank - 1], form.query[4, :, rank - 1])
    close(neurons.value[rank * 4 + rank - 1], form.value[4])


def test_eigen_pairs_split_into_squares():
    """With s linear a rank-r neuron is a weighted sum of squares (u.x)^2: neurons whose query is parallel to their key."""
    form, x = random_form(BilinearAttentionMLP, "linear", rank=2), inputs(50, D_MODEL)
    neurons = split_pairs(symmetric_pairs(form))
    assert neurons.d_mlp == 4 * D_MLP
    close(torch.cosine_similarity(neurons.query, neurons.key).abs(), torch.ones(4 * D_MLP, dtype=torch.float64))
    close(neurons(x), form(x))


@pytest.mark.parametrize("activation", NONLINEAR)
def test_split_pairs_needs_linear_s(activation):
    form = random_form(BilinearAttentionMLP, activation)
    with pytest.raises(BadOption, match=f"s is {activation}, .* linear s only"):
        split_pairs(form)


# -- all of them --------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", CONVERSIONS, ids=lambda function: function.__name__)
def test_what_comes_out_is_a_copy(convert):
    """Changing the source afterwards does not change what was made of it."""
    form = random_form(CONVERSIONS[convert], "linear", rank=1, bias=convert is not symmetric_pairs)
    converted = convert(form)
    names = ("query", "key", "value", "query_bias", "key_bias", "output_bias")

    def snapshot() -> dict[str, torch.Tensor]:
        return {n: t.detach().clone() for n in names if (t := getattr(converted, n, None)) is not None}

    before = snapshot()
    with torch.no_grad():
        for tensor in form.factors.values():
            tensor.fill_(7.0)
    after = snapshot()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_layer_to_gated_copies():
    layer = random_layer()
    form = layer_to_gated(layer)
    before = form.query.detach().clone()
    layer.query.fill_(7.0)
    assert torch.equal(form.query, before)


@pytest.mark.parametrize("convert", CONVERSIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)
def test_every_conversion_says_which_form_it_takes(convert, kind):
    if kind is CONVERSIONS[convert]:
        convert(random_form(kind, "linear", rank=1))
    else:
        with pytest.raises(BadOption, match=f"takes a {CONVERSIONS[convert].__name__}, found {kind.__name__}"):
            convert(random_form(kind, "linear", rank=1))


@pytest.mark.parametrize("convert", CONVERSIONS, ids=lambda function: function.__name__)
def test_dtype_is_kept(convert):
    form = random_form(CONVERSIONS[convert], "linear", rank=1, dtype=torch.float32)
    assert convert(form).value.dtype == torch.float32
    assert convert(form).key.dtype == torch.float32


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    activation=st.sampled_from(EVERY), sizes=st.tuples(*[st.integers(1, 6)] * 2), bias=st.booleans(),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_the_chain_of_the_theory(activation, sizes, bias, seed):
    """Global query, standard, bilinear of rank 1, rank-1: one function all along."""
    d_model, d_mlp = sizes
    form = random_form(GlobalQueryMLP, activation, d_model=d_model, d_mlp=d_mlp, bias=bias, seed=seed)
    x = inputs(5, d_model, seed=seed)
    chain = [form]
    for convert in (global_query_to_standard, standard_to_bilinear, bilinear_to_rank_one, rank_one_to_bilinear):
        chain.append(convert(chain[-1]))
        close(chain[-1](x), form(x))
