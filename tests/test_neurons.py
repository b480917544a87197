"""Factors: the function they compute, its gauge, and the two operations on it."""

from __future__ import annotations

import math

import pytest
import torch

import glu_probe as gp
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
