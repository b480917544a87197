"""Factors: the function they compute, its gauge, and the two operations on it."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch

import glu_probe as gp
from glu_probe.activations import limited
from glu_probe.errors import BadOption, ShapeMismatch, UnknownActivation

from .support import random_layer


def inputs(count: int = 4000, d_model: int = 16) -> torch.Tensor:
    return torch.randn(count, d_model, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("biases", [False, True])
def test_forward_is_the_formula(biases):
    layer, x = random_layer(biases=biases), inputs(5)
    expected = torch.zeros(5, 16, dtype=torch.float64)
    for j in range(layer.d_mlp):
        a, b = x @ layer.query[j], x @ layer.key[j]
        if biases:
            a, b = a + layer.query_bias[j], b + layer.key_bias[j]
        expected += (a * torch.sigmoid(a) * b)[:, None] * layer.value[j]
    torch.testing.assert_close(layer.forward(x), expected)
    torch.testing.assert_close(layer.forward(x[0]), expected[0])


@pytest.mark.parametrize("biases", [False, True])
def test_gauge_does_not_change_the_function(biases):
    layer, x = random_layer(biases=biases), inputs(7)
    c = torch.linspace(-2, 3, layer.d_mlp, dtype=torch.float64)
    torch.testing.assert_close(layer.regauge(c).forward(x), layer.forward(x))
    torch.testing.assert_close(layer.canonical().forward(x), layer.forward(x))


@pytest.mark.parametrize("biases", [False, True])
def test_canonical_gauge_of_isotropic_input(biases):
    """Its promise, checked on a large sample: equal root mean squares and E[ab] >= 0."""
    layer, x = random_layer(biases=biases), inputs(200_000)
    a, b = layer.canonical().preactivations(x)
    torch.testing.assert_close(b.square().mean(0), a.square().mean(0), rtol=0.03, atol=0)
    assert ((a * b).mean(0) > -0.01 * a.square().mean(0)).all()


def test_canonical_gauge_of_a_sample_is_exact_on_it():
    layer = random_layer(biases=True)
    x = inputs(50) @ torch.diag(torch.linspace(0.1, 3, 16, dtype=torch.float64)) + 0.3
    a, b = layer.canonical(x).preactivations(x)
    torch.testing.assert_close(b.square().mean(0), a.square().mean(0))
    assert ((a * b).mean(0) >= 0).all()


def test_exchange_does_not_depend_on_the_gauge_unless_raw():
    layer, x = random_layer(), inputs(7)
    c = torch.linspace(-2, 3, layer.d_mlp, dtype=torch.float64)
    torch.testing.assert_close(layer.regauge(c).exchange().forward(x), layer.exchange().forward(x))
    assert not torch.allclose(layer.regauge(c).exchange("raw").forward(x), layer.exchange("raw").forward(x))


@pytest.mark.parametrize("gauge", ["canonical", "raw"])
def test_exchange_twice_is_the_identity(gauge):
    layer, x = random_layer(biases=True), inputs(7)
    torch.testing.assert_close(layer.exchange(gauge).exchange(gauge).forward(x), layer.forward(x))


@pytest.mark.parametrize(("activation", "exchange", "positive", "negative"), [
    ("linear", True, True, True),
    ("relu", False, True, False),
    ("silu", False, False, False),
    ("gelu", False, False, False),
])  # fmt: skip
def test_which_symmetries_the_gated_form_keeps(activation, exchange, positive, negative):
    """Exchange iff S is linear; inverse scaling by c > 0 iff S is positively homogeneous; by c < 0 only if linear."""
    layer, x = random_layer(activation=activation), inputs(20)

    def kept(changed: gp.GatedLayer) -> bool:
        return torch.allclose(changed.forward(x), layer.forward(x))

    assert kept(layer.exchange()) == exchange
    assert kept(layer.rescale(2.0)) == positive
    assert kept(layer.rescale(-1.0)) == negative


def test_zero_branches_have_gauge_one():
    layer = random_layer()
    layer.key[3] = 0
    layer.query[5] = 0
    c = layer.canonical_gauge()
    assert c[3] == 1
    assert c[5] == 1
    assert torch.isfinite(layer.exchange().forward(inputs(3))).all()


def test_bad_input_is_refused():
    layer = random_layer()
    for c in (0, math.inf, math.nan, "2"):
        with pytest.raises(BadOption, match="not 0"):
            layer.rescale(c)
    with pytest.raises(BadOption, match="'sample'"):
        layer.exchange("sample")
    with pytest.raises(ShapeMismatch, match=r"\[24, 16\], \[23, 16\]"):
        gp.GatedLayer(layer.query, layer.key[1:], layer.value, None)
    with pytest.raises(ShapeMismatch, match=r"query_bias must be \[24\]"):
        gp.GatedLayer(layer.query, layer.key, layer.value, None, query_bias=torch.zeros(3))
    with pytest.raises(ShapeMismatch, match=r"x is \[2, 15\]"):
        layer.forward(torch.zeros(2, 15))
    with pytest.raises(BadOption, match="float32"):
        gp.GatedLayer(layer.query.half(), layer.key.half(), layer.value.half(), None)
    with pytest.raises(UnknownActivation, match="layer 0"):
        gp.GatedLayer(layer.query, layer.key, layer.value, None).forward(inputs(1))
    for option in ({"seed": -1}, {"seed": None}, {"samples": 1}, {"samples": 2.5}):
        with pytest.raises(BadOption, match="whole number"):
            gp.measure_layer(layer, **option)


def test_layers_have_a_short_name_and_compare_by_identity():
    layer = random_layer()
    assert repr(layer) == "GatedLayer(text layer 0: silu, d_model 16, d_mlp 24)"
    assert layer == layer
    assert layer != random_layer()
    assert gp.GatedLayer(layer.query, layer.key, layer.value, "swish").activation is layer.activation


# -- neurons that are not linear in the up branch ---------------------------------------------------


@pytest.fixture
def limited_layer():
    act = limited(gp.activation("silu"), 1.0, up_offset=0.5)
    return replace(random_layer(biases=True), activation=act)


def test_forward_with_a_function_of_the_up_branch(limited_layer):
    x = inputs(7)
    a, b = limited_layer.preactivations(x)
    g = torch.nn.functional.silu(a.clamp(max=1.0)) * (b.clamp(-1, 1) + 0.5)
    torch.testing.assert_close(limited_layer.coefficients(x), g)
    torch.testing.assert_close(limited_layer.forward(x), g @ limited_layer.value)


def test_exchange_with_a_function_of_the_up_branch(limited_layer):
    """S(b) up(a), in the coordinates of the file: no others are equivalent."""
    x = inputs(7)
    a, b = limited_layer.preactivations(x)
    expected = torch.nn.functional.silu(b.clamp(max=1.0)) * (a.clamp(-1, 1) + 0.5)
    for gauge in ("canonical", "raw"):
        torch.testing.assert_close(limited_layer.exchange(gauge).coefficients(x), expected)
    assert (limited_layer.canonical_gauge() == 1).all()
    with pytest.raises(BadOption, match="cannot be rescaled"):
        limited_layer.regauge(torch.full((limited_layer.d_mlp,), 2.0, dtype=torch.float64))


def test_a_function_of_the_up_branch_takes_the_theory_s_claims_back(limited_layer):
    assert "clamp(b, -1, 1) + 0.5" in limited_layer.functional_note()
    plain = limited(gp.activation("silu"), 1.0, limit_up=False)
    assert replace(limited_layer, activation=plain).functional_note() is None


@pytest.mark.parametrize("after", [False, True])
def test_what_a_limited_gate_tends_to(after):
    act = limited(gp.activation("silu"), 2.0, after=after, limit_up=False)
    z = torch.tensor([-1e3, -1e-4, 1e-4, 1e3], dtype=torch.float64)
    torch.testing.assert_close(act(z)[1:3], z[1:3] / 2, rtol=1e-3, atol=0.0)
    assert act(z)[3] == act.large.coefficient == (2.0 if after else act(torch.tensor(2.0, dtype=torch.float64)))
    assert (act.small.activation, act.large.activation) == ("linear", "step")


def test_limited_gates_reach_other_processes(limited_layer):
    again = pickle.loads(pickle.dumps(limited_layer.activation))
    assert again == limited_layer.activation
    x = torch.linspace(-3, 3, 9)
    assert torch.equal(again(x), limited_layer.activation(x))
    assert torch.equal(again.up(x), limited_layer.activation.up(x))


@pytest.mark.parametrize("limit", [0, -1.0, None, True, float("nan")])
def test_a_limit_is_positive(limit):
    with pytest.raises(BadOption, match="limit of a gate"):
        limited(gp.activation("silu"), limit)
