"""The forms of an MLP: numbers by hand, the formulas in plain loops, the modules of other libraries, cost, and errors."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import glu_probe as gp
from glu_probe.activations import ACTIVATIONS
from glu_probe.errors import BadOption, ShapeMismatch, UnknownActivation
from glu_probe.forms import (
    FORMS,
    BilinearAttentionMLP,
    GatedMLP,
    GlobalQueryMLP,
    MLPForm,
    RankOneBilinearMLP,
    StandardMLP,
)

from .random_forms import D_MLP, D_MODEL, RANK, close, inputs, numbers, random_form

each_form = pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)


# -- numbers by hand ------------------------------------------------------------------------------


def test_standard_by_hand():
    form = StandardMLP.from_factors(
        "relu2", key=numbers([[1, 2], [-1, 0]]), value=numbers([[3, -1], [100, 100]]), key_bias=numbers([-1, 0.5]),
        output_bias=numbers([10, 20]),
    )  # fmt: skip
    # neuron 0: 1 + 2 - 1 = 2, squared 4; neuron 1: -1 + 0.5 < 0
    close(form(numbers([1, 1])), numbers([22, 16]))
    close(form.coefficients(numbers([1, 1])), numbers([4, 0]))


def test_global_query_by_hand():
    form = GlobalQueryMLP.from_factors(
        "linear", query=numbers([[0, 1], [5, 0]]), key=numbers([[1, 10]]), value=numbers([[1, -2]])
    )
    # the row (2, 3) times the matrix is (15, 2); a transposed query would give (3, 10)
    close(form(numbers([2, 3])), numbers([35, -70]))


def test_bilinear_by_hand():
    form = BilinearAttentionMLP.from_factors(
        "relu", query=numbers([[[1, 2], [0, 1]]]), key=numbers([[[1, 0], [1, -1]]]), value=numbers([[1, 3]])
    )
    # x = (1, 2): x Q = (1, 4), x K = (3, -2), so 3 - 8 = -5; x = (1, -1): (1, 1) and (0, 1), so 1
    close(form.logits(numbers([[1, 2], [1, -1]])), numbers([[-5], [1]]))
    close(form(numbers([[1, 2], [1, -1]])), numbers([[0, 0], [1, 3]]))


def test_nonlinearity_outside_or_inside_the_product():
    """Two negative branches: their product passes a ReLU, a negative gate does not."""
    factors = {"query": numbers([[-2, 0]]), "key": numbers([[0, -3]]), "value": numbers([[1, 0]])}
    one = numbers([1, 1])
    close(RankOneBilinearMLP.from_factors("relu", **factors)(one), numbers([6, 0]))
    close(GatedMLP.from_factors("relu", **factors)(one), numbers([0, 0]))
    # a positive gate and a negative up branch: the other way round
    close(RankOneBilinearMLP.from_factors("relu", **factors)(numbers([-1, 1])), numbers([0, 0]))
    close(GatedMLP.from_factors("relu", **factors)(numbers([-1, 1])), numbers([-6, 0]))


# -- the formulas in plain Python -----------------------------------------------------------------

SCALARS = {
    "linear": lambda z: z,
    "relu": lambda z: max(z, 0.0),
    "relu2": lambda z: max(z, 0.0) ** 2,
    "silu": lambda z: z / (1 + math.exp(-z)),
    "gelu": lambda z: z * (1 + math.erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    "quick_gelu": lambda z: z / (1 + math.exp(-1.702 * z)),
    "mish": lambda z: z * math.tanh(math.log(1 + math.exp(z))),
    "sigmoid": lambda z: 1 / (1 + math.exp(-z)),
    "tanh": math.tanh,
}


def coefficient_by_loops(form: MLPForm, j: int, x: list[float]) -> float:
    """What neuron j multiplies its value with, from nested lists and numbers."""
    s = SCALARS[form.activation.name]
    factors = {name: tensor.tolist() for name, tensor in form.factors.items()}
    width = range(len(x))

    def dot(name: str, row: list[float]) -> float:
        total = factors[f"{name}_bias"][j] if f"{name}_bias" in factors else 0.0
        for i in width:
            total += row[i] * factors[name][j][i]
        return total

    if isinstance(form, StandardMLP):
        return s(dot("key", x))
    if isinstance(form, GlobalQueryMLP):
        return s(dot("key", [sum(x[i] * factors["query"][i][c] for i in width) for c in width]))
    if isinstance(form, BilinearAttentionMLP):
        total = 0.0
        for r in range(form.rank):
            a, b = (
                sum(x[i] * factors[name][j][i][r] for i in width)
                + (factors[f"{name}_bias"][j][r] if f"{name}_bias" in factors else 0.0)
                for name in ("query", "key")
            )
            total += a * b
        return s(total)
    a, b = dot("query", x), dot("key", x)
    return s(a * b) if isinstance(form, RankOneBilinearMLP) else s(a) * b


def by_loops(form: MLPForm, x: torch.Tensor) -> torch.Tensor:
    rows = []
    for row in x.tolist():
        out = [0.0] * len(row) if form.output_bias is None else form.output_bias.tolist()
        for j, value in enumerate(form.value.tolist()):
            g = coefficient_by_loops(form, j, row)
            out = [total + g * part for total, part in zip(out, value, strict=True)]
        rows.append(out)
    return numbers(rows)


def test_every_activation_has_its_scalar_here():
    assert set(SCALARS) == set(ACTIVATIONS)


@each_form
@pytest.mark.parametrize("activation", SCALARS)
def test_every_form_is_its_formula(kind, activation):
    form, x = random_form(kind, activation, bias=True), inputs(3, D_MODEL)
    close(form(x), by_loops(form, x))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(FORMS),
    activation=st.sampled_from(sorted(SCALARS)),
    sizes=st.tuples(*[st.integers(1, 5)] * 3),
    bias=st.booleans(),
    seed=st.integers(0, 999),
)
def test_every_form_of_every_size_is_its_formula(kind, activation, sizes, bias, seed):
    d_model, d_mlp, rank = sizes
    form = random_form(kind, activation, d_model=d_model, d_mlp=d_mlp, rank=rank, bias=bias, seed=seed)
    x = inputs(2, d_model, seed=seed)
    close(form(x), by_loops(form, x))
    assert form.sizes == {"d_model": d_model, "d_mlp": d_mlp} | ({"rank": rank} if "rank" in form.sizes else {})


def test_full_rank_is_the_textbook_bilinear_form():
    """x W_j x^T with a dense W_j per neuron, summed over all pairs of coordinates."""
    form, x = random_form(BilinearAttentionMLP, "silu", rank=D_MODEL), inputs(2, D_MODEL)
    dense = [(q @ k.T).tolist() for q, k in zip(form.query.detach(), form.key.detach(), strict=True)]
    for row in x:
        point, out = row.tolist(), [0.0] * D_MODEL
        for j, value in enumerate(form.value.tolist()):
            logit = sum(point[i] * dense[j][i][m] * point[m] for i, m in product(range(D_MODEL), repeat=2))
            out = [total + SCALARS["silu"](logit) * part for total, part in zip(out, value, strict=True)]
        close(form(row), numbers(out))


def test_full_rank_reaches_every_bilinear_form():
    """With key = identity the query is any matrix; a smaller rank cannot do it."""
    dense = inputs(D_MLP, D_MODEL, D_MODEL)
    identity = torch.eye(D_MODEL, dtype=torch.float64).expand(D_MLP, -1, -1)
    form = BilinearAttentionMLP.from_factors("linear", query=dense, key=identity, value=inputs(D_MLP, D_MODEL))
    x = inputs(4, D_MODEL, seed=2)
    close(form.logits(x), torch.stack([torch.stack([row @ w @ row for w in dense]) for row in x]))
    assert form.rank == form.d_model
    assert torch.linalg.matrix_rank(torch.einsum("jir,jmr->jim", form.query, form.key)).tolist() == [D_MODEL] * D_MLP


# -- other libraries' modules ---------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_gated_is_the_mlp_of_llama(activation, bias):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=D_MODEL, intermediate_size=D_MLP, hidden_act=activation, mlp_bias=bias, num_attention_heads=2
    )
    module = LlamaMLP(config).double()
    form = GatedMLP.from_factors(
        activation,
        query=module.gate_proj.weight,
        key=module.up_proj.weight,
        value=module.down_proj.weight.T,
        query_bias=module.gate_proj.bias,
        key_bias=module.up_proj.bias,
        output_bias=module.down_proj.bias,
    )
    x = inputs(2, 5, D_MODEL)
    close(form(x), module(x))
    assert form.parameter_count == sum(parameter.numel() for parameter in module.parameters())
    swapped = form.with_factors(query=form.key, key=form.query)
    assert not torch.allclose(swapped(x), module(x), atol=1e-3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("activation", "function"), [("gelu", nn.GELU()), ("relu", nn.ReLU()), ("silu", nn.SiLU())])
def test_standard_is_two_linear_layers(activation, function, bias):
    torch.manual_seed(0)
    up, down = nn.Linear(D_MODEL, D_MLP, bias=bias).double(), nn.Linear(D_MLP, D_MODEL, bias=bias).double()
    form = StandardMLP.from_factors(
        activation, key=up.weight, value=down.weight.T, key_bias=up.bias, output_bias=down.bias
    )
    x = inputs(2, 5, D_MODEL)
    close(form(x), nn.Sequential(up, function, down)(x))
    assert form.parameter_count == sum(parameter.numel() for parameter in (*up.parameters(), *down.parameters()))


# -- what they cost -------------------------------------------------------------------------------

# d_model 6, d_mlp 10, rank 3: parameters, those of the biases; multiplications and additions, additions of biases
COSTS = {
    # keys 60, values 60 | 10 + 6 | x K^T 120, s 10, times V 120
    StandardMLP: (120, 16, 250, 16),
    # + query 36 | + x Q 72
    GlobalQueryMLP: (156, 16, 322, 16),
    # queries 180, keys 180, values 60 | 30 + 30 + 6 | branches 360 + 360, a product of rows 3 + 2 each: 50, s 10, 120
    BilinearAttentionMLP: (420, 66, 900, 66),
    # 3 * 60 | 10 + 10 + 6 | branches 120 + 120, product 10, s 10, times V 120
    RankOneBilinearMLP: (180, 26, 380, 26),
    GatedMLP: (180, 26, 380, 26),
}


@each_form
def test_cost_by_hand_count(kind):
    parameters, bias_parameters, flops, bias_flops = COSTS[kind]
    plain, biased = random_form(kind), random_form(kind, bias=True)
    assert plain.parameter_count == parameters
    assert biased.parameter_count == parameters + bias_parameters
    assert plain.flops_per_token == flops
    assert biased.flops_per_token == flops + bias_flops
    assert plain.parameter_count == sum(parameter.numel() for parameter in plain.parameters())


@each_form
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_matrix_products_are_those_that_torch_counts(kind, rank):
    form, tokens = random_form(kind, rank=rank, bias=True), 7
    with FlopCounterMode(display=False) as counter:
        form(inputs(tokens, D_MODEL))
    square, wide = 2 * D_MODEL * D_MODEL, 2 * D_MODEL * D_MLP
    products = {
        StandardMLP: 2 * wide,
        GlobalQueryMLP: square + 2 * wide,
        BilinearAttentionMLP: (2 * rank + 1) * wide,
        RankOneBilinearMLP: 3 * wide,
        GatedMLP: 3 * wide,
    }[kind]
    # torch may take the product of a query row with its key row for a matrix product or for an element-wise one
    rows = 2 * rank * D_MLP if kind is BilinearAttentionMLP else 0
    assert counter.get_total_flops() / tokens in (products, products + rows)
    biases = sum(tensor.numel() for name, tensor in form.factors.items() if name.endswith("_bias"))
    branches = {BilinearAttentionMLP: 2 * rank - 1, RankOneBilinearMLP: 1, GatedMLP: 1}.get(kind, 0)
    assert form.flops_per_token == products + biases + (branches + 1) * D_MLP


def test_full_rank_is_prohibitive():
    """At the sizes of an 8B LLaMA, on meta: 481 billion parameters in one layer, where the gated form has 176 million."""
    sizes = {"d_model": 4096, "d_mlp": 14336, "device": "meta"}
    gated = GatedMLP(**sizes, activation="silu")
    assert gated.parameter_count == 3 * 4096 * 14336 == 176_160_768
    for rank in (1, 4, 64, 4096):
        form = BilinearAttentionMLP(**sizes, activation="silu", rank=rank)
        assert all(parameter.is_meta for parameter in form.parameters())
        assert 3 * form.parameter_count == (2 * rank + 1) * gated.parameter_count
        # r products and r - 1 sums per neuron in place of one product are all that keeps the ratio from being the same
        assert form.flops_per_token / gated.flops_per_token == pytest.approx((2 * rank + 1) / 3, rel=2e-4)
    assert form.parameter_count == 481_095_057_408


def test_rank_one_costs_what_the_gated_form_costs():
    forms = [random_form(BilinearAttentionMLP, rank=1), random_form(RankOneBilinearMLP), random_form(GatedMLP)]
    assert len({(form.parameter_count, form.flops_per_token) for form in forms}) == 1


# -- as torch modules -----------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_dtype_is_kept(kind, dtype, bias):
    extra = {"rank": RANK} if kind is BilinearAttentionMLP else {}
    form = kind(D_MODEL, D_MLP, "silu", **extra, bias=bias, dtype=dtype)
    x = inputs(4, D_MODEL).to(dtype)
    out = form(x)
    assert out.dtype == dtype
    assert all(tensor.dtype == dtype for tensor in form.with_factors(value=form.value).factors.values())
    moved = form.to(torch.float64)(x.double())
    assert moved.dtype == torch.float64
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), moved, rtol=20 * epsilon, atol=20 * epsilon)


@each_form
def test_device_is_followed(kind):
    form = random_form(kind, bias=True).to("meta")
    out = form(torch.empty(2, D_MODEL, device="meta", dtype=torch.float64))
    assert out.is_meta
    assert out.shape == (2, D_MODEL)
    assert all(tensor.is_meta for tensor in form.with_factors(value=form.value).factors.values())


@each_form
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 1, 3), (0,), (2, 0, 3)])
def test_any_batch_axes(kind, shape):
    form, x = random_form(kind, bias=True), inputs(*shape, D_MODEL)
    out = form(x)
    assert out.shape == x.shape
    assert form.coefficients(x).shape == (*shape, D_MLP)
    for row, expected in zip(x.reshape(-1, D_MODEL), out.reshape(-1, D_MODEL), strict=True):
        close(form(row), expected)


@each_form
def test_gradients_reach_every_factor(kind):
    form = random_form(kind, bias=True)
    form(inputs(4, D_MODEL)).square().sum().backward()
    for name in kind.axes:
        assert getattr(form, name).grad.abs().max() > 1e-6, name
    assert dict(form.named_parameters()).keys() == kind.axes.keys()


@each_form
def test_gradients_are_right(kind):
    form = random_form(kind, "tanh", d_model=2, d_mlp=3, rank=2, bias=True)
    names = list(form.factors)

    def output(x, *tensors):
        return torch.func.functional_call(form, dict(zip(names, tensors, strict=True)), (x,))

    tensors = [tensor.detach().clone().requires_grad_() for tensor in form.factors.values()]
    assert torch.autograd.gradcheck(output, (inputs(2, 2).requires_grad_(), *tensors))


def fresh(kind: type[MLPForm], seed: int, **sizes) -> MLPForm:
    form = kind(**sizes, activation="linear", bias=True, dtype=torch.float64)
    form.reset_parameters(torch.Generator().manual_seed(seed))
    return form


@pytest.mark.parametrize("rank", [1, 2, 8, 32])
def test_logits_start_at_unit_variance_for_every_rank(rank):
    """E[(x Q K^T x^T)^2] = E|x|^4 / d^2 = 1 + 2/d."""
    form = fresh(BilinearAttentionMLP, 0, d_model=32, d_mlp=600, rank=rank)
    logits = form.logits(inputs(600, 32))
    assert logits.square().mean().item() == pytest.approx(1 + 2 / 32, rel=0.05)
    assert logits.mean().abs() < 0.05


def test_branches_start_at_unit_variance():
    x, sizes = inputs(2000, 64), {"d_model": 64, "d_mlp": 600}
    for kind in (StandardMLP, GlobalQueryMLP):
        assert fresh(kind, 0, **sizes).coefficients(x).square().mean().item() == pytest.approx(1, rel=0.05)
    for kind in (RankOneBilinearMLP, GatedMLP):
        form = fresh(kind, 0, **sizes)
        for rows in (form.query, form.key):
            assert (x @ rows.T).square().mean().item() == pytest.approx(1, rel=0.05)


@each_form
def test_the_output_starts_with_the_variance_of_the_coefficients(kind):
    extra = {"rank": 4} if kind is BilinearAttentionMLP else {}
    form, x = fresh(kind, 1, d_model=64, d_mlp=600, **extra), inputs(500, 64)
    expected = form.coefficients(x).square().mean().item()
    assert form(x).square().mean().item() == pytest.approx(expected, rel=0.1)


@each_form
def test_initialisation_follows_its_generator(kind):
    extra = {"rank": RANK} if kind is BilinearAttentionMLP else {}
    sizes = {"d_model": D_MODEL, "d_mlp": D_MLP, **extra}
    first, again, other = (fresh(kind, seed, **sizes) for seed in (3, 3, 4))
    for name, tensor in first.factors.items():
        assert torch.equal(tensor, again.factors[name])
        if name.endswith("_bias"):
            assert tensor.count_nonzero() == 0
        else:
            assert not torch.equal(tensor, other.factors[name])


def test_biases_are_there_when_asked_for():
    assert list(GatedMLP(2, 3, "silu").state_dict()) == ["query", "key", "value"]
    assert list(GatedMLP(2, 3, "silu", bias=True).state_dict()) == list(GatedMLP.axes)
    one = GatedMLP.from_factors("silu", **GatedMLP(2, 3, "silu").factors, key_bias=torch.ones(3))
    assert one.query_bias is None
    assert one.with_factors(key_bias=None).key_bias is None


@each_form
@pytest.mark.parametrize("bias", [False, True])
def test_state_dict_round_trip(kind, bias, tmp_path):
    form, other = random_form(kind, bias=bias), random_form(kind, bias=bias, seed=1)
    x = inputs(3, D_MODEL)
    assert not torch.allclose(form(x), other(x))
    torch.save(form.state_dict(), tmp_path / "form.pt")
    other.load_state_dict(torch.load(tmp_path / "form.pt", weights_only=True))
    assert torch.equal(form(x), other(x))


@each_form
def test_factors_are_copied(kind):
    source = {name: tensor.detach().clone() for name, tensor in random_form(kind, bias=True).factors.items()}
    form = kind.from_factors("silu", **source)
    changed = form.with_factors(value=source["value"] * 2)
    x = inputs(3, D_MODEL)
    before, changed_before = form(x), changed(x)
    for tensor in source.values():
        tensor.fill_(7.0)
    assert torch.equal(form(x), before)
    with torch.no_grad():
        for tensor in form.factors.values():
            tensor.zero_()
    assert torch.equal(changed(x), changed_before)
    assert all(tensor.requires_grad and tensor.is_leaf for tensor in form.factors.values())


def test_with_factors_changes_what_it_is_told_to():
    form = random_form(GatedMLP, "gelu", bias=True)
    changed = form.with_factors(value=2 * form.value, output_bias=2 * form.output_bias)
    x = inputs(3, D_MODEL)
    close(changed(x), 2 * form(x))
    assert changed.activation is form.activation


@pytest.mark.parametrize("activation", ["swish", gp.activation("silu")])
def test_activation_by_name_or_itself(activation):
    assert StandardMLP(2, 3, activation).activation is gp.activation("silu")


def test_an_activation_of_ones_own():
    cube = gp.Activation("cube", "z^3", lambda z: z**3, degree=3.0, odd=True)
    form = StandardMLP.from_factors(cube, key=numbers([[1, 1]]), value=numbers([[1, 2]]))
    close(form(numbers([1, 1])), numbers([8, 16]))


def test_print_shows_sizes_and_activation(capsys):
    print(BilinearAttentionMLP(4, 5, "gelu_new", rank=2), GatedMLP(4, 5, "swish"))
    assert capsys.readouterr().out == (
        "BilinearAttentionMLP(d_model=4, d_mlp=5, rank=2, activation=gelu_tanh) "
        "GatedMLP(d_model=4, d_mlp=5, activation=silu)\n"
    )


# -- what is refused ------------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize("size", [0, -1, True, 1.5, 4.0, "4", None])
def test_sizes_must_be_whole_numbers(kind, size):
    sizes = {"d_model": 4, "d_mlp": 5} | ({"rank": 2} if kind is BilinearAttentionMLP else {})
    for name in sizes:
        with pytest.raises(BadOption, match=rf"^{name} is {size!r}\. Give a whole number of at least 1"):
            kind(**(sizes | {name: size}), activation="silu")


@each_form
@pytest.mark.parametrize("shape", [(D_MODEL + 1,), (2, D_MODEL - 1), (D_MODEL, 1), ()])
def test_input_must_be_d_model_wide(kind, shape):
    with pytest.raises(ShapeMismatch, match=rf"^{kind.__name__}: x is \[.*\], expected \[\.\.\., {D_MODEL}\]"):
        random_form(kind)(torch.zeros(shape, dtype=torch.float64))


@each_form
def test_factors_must_be_those_of_the_form(kind):
    factors = random_form(kind).factors
    every = ", ".join(kind.axes)
    for name in factors:
        with pytest.raises(ShapeMismatch, match=rf"^{kind.__name__} has {every}, found (?!.*\b{name}\b)"):
            kind.from_factors("silu", **{n: tensor for n, tensor in factors.items() if n != name})
    with pytest.raises(ShapeMismatch, match=rf"^{kind.__name__} has {every}, found .*gate"):
        kind.from_factors("silu", **factors, gate=factors["key"])
    with pytest.raises(ShapeMismatch, match="found nothing"):
        kind.from_factors("silu")


@each_form
def test_factors_must_go_together(kind):
    """Every axis of every factor and bias, cut by one, with the message that names the form and the axes."""
    factors = random_form(kind, bias=True).factors
    for name, axes in kind.axes.items():
        for axis in range(len(axes)):
            cut = factors[name].narrow(axis, 0, factors[name].shape[axis] - 1)
            with pytest.raises(ShapeMismatch, match=rf"^{kind.__name__}: \w+ must be \[[a-z_, ]+\], found \[[\d, ]+\]"):
                kind.from_factors("silu", **(factors | {name: cut}))
        with pytest.raises(ShapeMismatch, match=rf"^{kind.__name__}: {name} must be \[{', '.join(axes)}\]"):
            kind.from_factors("silu", **(factors | {name: factors[name][None]}))


def test_messages_say_what_the_axes_are():
    factors = random_form(GatedMLP).factors
    with pytest.raises(ShapeMismatch) as error:
        GatedMLP.from_factors("silu", **(factors | {"key": factors["key"].T}))
    key = "GatedMLP: key must be [d_mlp, d_model], found [6, 10]; d_mlp is 10; d_model is 6"
    assert str(error.value) == f"{key}. Transpose or cut it so that all factors have the same sizes"
    with pytest.raises(ShapeMismatch) as error:
        GlobalQueryMLP.from_factors("silu", **(random_form(GlobalQueryMLP).factors | {"query": torch.zeros(6, 7)}))
    assert str(error.value).startswith(
        "GlobalQueryMLP: query must be [d_model, d_model], found [6, 7]; d_model is 6. Transpose"
    )


def test_factors_must_be_of_one_floating_dtype():
    """Otherwise it is torch that fails, later, in the forward pass."""
    factors = random_form(GatedMLP).factors
    with pytest.raises(BadOption, match=r"GatedMLP needs .* one floating dtype .* key torch\.float32 on cpu"):
        GatedMLP.from_factors("silu", **(factors | {"key": factors["key"].float()}))
    with pytest.raises(BadOption, match=r"value torch\.float64 on meta"):
        GatedMLP.from_factors("silu", **(factors | {"value": factors["value"].to("meta")}))
    with pytest.raises(BadOption, match=r"torch\.int64"):
        GatedMLP.from_factors("silu", **{name: tensor.long() for name, tensor in factors.items()})


def test_unknown_activations_are_refused():
    with pytest.raises(UnknownActivation, match="'foo'"):
        GatedMLP(2, 3, "foo")
    with pytest.raises(UnknownActivation, match="'foo'"):
        GatedMLP.from_factors("foo", **random_form(GatedMLP).factors)


def test_gates_that_act_on_the_up_branch_too_are_refused():
    """A form would drop that part, and a layer of gpt-oss would become another function without a word."""
    from glu_probe.activations import limited

    act = limited(gp.activation("silu"), 7.0, up_offset=1.0)
    with pytest.raises(BadOption, match="of the up branch"):
        GatedMLP(2, 3, act)
    layer = gp.GatedLayer(*torch.randn(3, 4, 5), act)
    with pytest.raises(BadOption, match="of the up branch"):
        gp.conversions.layer_to_gated(layer)
