"""Neuron measures: extremes of every storage format, odd neurons, classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import glu_probe as gp
from glu_probe.measures.io_classes import IO_CLASSES, io_class
from glu_probe.measures.neuron import duplicated, flags, neuron_measures
from glu_probe.measures.products import row_products

from ..support import random_layer


def layer_of(query, key, value=None, activation="silu") -> gp.GatedLayer:
    value = torch.ones_like(query) if value is None else value
    return gp.GatedLayer(query, key, value, gp.activation(activation))


def measured(layer: gp.GatedLayer) -> dict[str, np.ndarray]:
    return neuron_measures(layer, row_products(layer))


@pytest.mark.parametrize(("dtype", "entry", "width", "norm"), [
    (torch.float16, 8.0, 4096, 512.0),
    (torch.float16, 300.0, 4096, 19200.0),
    (torch.float16, 2e-4, 4096, 0.012802),
    (torch.bfloat16, 1e20, 4096, 6.3826e21),
    (torch.float32, 2e19, 4, 4.0e19),
    (torch.float32, 1e-30, 4, 2.0e-30),
])  # fmt: skip
def test_extreme_rows_of_every_format(dtype, entry, width, norm):
    """Naive float16 and float32 arithmetic gives NaN, 0.67, infinity or 0 here."""
    row = torch.full((3, width), entry, dtype=dtype).float()
    for sign in (1.0, -1.0):
        values = measured(layer_of(row, sign * row, row))
        assert (np.abs(values["abs_cos_qk"] - 1) <= 1e-12).all()
        assert (values["abs_cos_qk"] <= 1).all()
        np.testing.assert_allclose(values["query_norm"], norm, rtol=1e-3)
        np.testing.assert_allclose(values["cos_kv"], sign, atol=1e-12)
        assert np.isfinite(values["value_gain"]).all()
        assert (values["value_gain"] > 0).all()


def test_opposite_rows_have_cosine_exactly_minus_one():
    row = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    products = row_products(layer_of(row, row, -row))
    values = neuron_measures(layer_of(row, row, -row), products)
    assert (values["cos_kv"] == -1).all()
    assert (values["cos_qv"] == -1).all()


def test_against_plain_formulas():
    layer = random_layer(d_mlp=200)
    values = measured(layer)
    q, k, v = (part.numpy() for part in (layer.query, layer.key, layer.value))

    def norm(m):
        return np.sqrt((m**2).sum(1))

    def cos(m, n):
        return (m * n).sum(1) / norm(m) / norm(n)

    expected = {
        "query_norm": norm(q),
        "key_norm": norm(k),
        "value_norm": norm(v),
        "norm_ratio": norm(q) / norm(k),
        "value_gain": norm(k) * norm(v),
        "abs_cos_qk": np.abs(cos(q, k)),
        "cos_kv": cos(k, v),
        "abs_cos_qv": np.abs(cos(q, v)),
        "cos_qv": np.sign(cos(q, k)) * cos(q, v),
        "outlier_risk": np.abs(cos(q, k)) * norm(q) * norm(k) * norm(v),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-12, err_msg=name)
    gaussian = gp.gaussian_measures("silu", expected["query_norm"], expected["abs_cos_qk"])
    np.testing.assert_allclose(values["exchange_asymmetry"], gaussian["exchange_asymmetry"], atol=1e-12)


def test_output_energy_is_the_mean_squared_output():
    layer = random_layer(d_mlp=6)
    x = torch.randn(400_000, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sampled = (layer.coefficients(x) ** 2).mean(0) * layer.value.square().sum(1)
    np.testing.assert_allclose(measured(layer)["output_energy"], sampled.numpy(), rtol=0.03)


def test_odd_neurons_are_flagged_and_missing():
    layer = random_layer(d_mlp=12)
    layer.query[1] = 0
    layer.key[2] = 0
    layer.value[3] = 0
    for factor in (layer.query, layer.key, layer.value):
        factor[4] = 0
    layer.query[5, 2] = torch.nan
    layer.value[6, 0] = torch.inf
    layer.query[8], layer.key[8] = layer.query[7], layer.key[7]
    products = row_products(layer)
    found = {name: np.flatnonzero(where).tolist() for name, where in flags(layer, products).items()}
    assert found == {
        "zero_gate": [1], "zero_up": [2], "zero_down": [3], "padded": [4], "non_finite": [5, 6], "duplicated": [7, 8],
    }  # fmt: skip
    values = neuron_measures(layer, products)
    for name, column in values.items():
        if name != "io_class":
            assert np.isnan(column[[4, 5, 6]]).all(), name
    assert np.isnan(values["abs_cos_qk"][[1, 2]]).all()
    assert np.isnan(values["exchange_asymmetry"][[1, 2]]).all()
    assert np.isnan(values["cos_kv"][3])
    assert np.isfinite(values["exchange_asymmetry"][3])  # what it writes has no part in it
    assert (values["io_class"][[1, 2, 3, 4, 5, 6]] == -1).all()
    assert (values["io_class"][[0, 7, 8, 9]] >= 0).all()


def test_function_is_missing_with_its_reason_where_not_known():
    layer = random_layer()
    unknown = gp.GatedLayer(layer.query, layer.key, layer.value, None)
    assert "activation" in unknown.functional_note()
    values = measured(unknown)
    assert np.isnan(values["exchange_asymmetry"]).all()
    assert np.isfinite(values["abs_cos_qk"]).all()


@pytest.mark.parametrize(("qk", "kv", "qv", "expected"), [
    (0.6, 0.6, 0.6, "strengthening"),
    (0.6, 0.6, -0.6, "atypical strengthening"),
    (0.4, 0.6, 0.6, "atypical strengthening"),
    (0.4, 0.6, 0.4, "conditional strengthening"),
    (0.6, 0.6, 0.4, "atypical conditional strengthening"),
    (0.4, 0.0, 0.6, "proportional change"),
    (0.4, 0.0, -0.6, "proportional change"),
    (0.6, 0.0, 0.6, "atypical proportional change"),
    (0.6, 0.0, 0.0, "orthogonal output"),
    (0.6, -0.6, -0.6, "weakening"),
    (0.6, -0.6, 0.6, "atypical weakening"),
    (0.4, -0.6, -0.6, "atypical weakening"),
    (0.4, -0.6, 0.0, "conditional weakening"),
    (0.6, -0.6, 0.0, "atypical conditional weakening"),
    (0.5, 0.5, 0.5, "orthogonal output"),  # the threshold itself is not above it
    (np.nan, 0.6, 0.6, None),
])  # fmt: skip
def test_io_classes(qk, kv, qv, expected):
    index = io_class(np.array([qk]), np.array([kv]), np.array([qv]))[0]
    assert (IO_CLASSES[index] if index >= 0 else None) == expected


def test_biases_make_neurons_different_and_can_be_not_finite():
    layer = random_layer(d_mlp=8, biases=True)
    layer.query[1], layer.key[1] = layer.query[0], layer.key[0]
    layer.query_bias[0], layer.query_bias[1] = 0.0, 5.0
    layer.key_bias[0] = layer.key_bias[1] = 0.0
    layer.key_bias[4] = torch.inf
    products = row_products(layer)
    found = flags(layer, products)
    assert not found["duplicated"].any()
    assert np.flatnonzero(found["non_finite"]).tolist() == [4]
    values = neuron_measures(layer, products)
    assert np.isnan(values["abs_cos_qk"][4])
    assert np.isfinite(values["exchange_asymmetry"][[0, 1, 2, 3]]).all()
    layer.query_bias[1] = 0.0
    assert np.flatnonzero(flags(layer, products)["duplicated"]).tolist() == [0, 1]


def test_a_zero_gate_row_with_a_bias_is_a_linear_neuron():
    layer = random_layer(d_mlp=3, biases=True)
    layer.query[0] = 0
    layer.query_bias[0] = 1.3
    layer.key_bias[0] = 0.0
    values = measured(layer)
    assert np.isnan(values["abs_cos_qk"][0])
    assert values["linear_share"][0] == pytest.approx(1.0, abs=1e-6)
    expected = (1.3 / (1 + np.exp(-1.3))) ** 2 * float((layer.key[0] ** 2).sum() * (layer.value[0] ** 2).sum())
    assert values["output_energy"][0] == pytest.approx(expected, rel=1e-5)


def test_gradients_do_not_get_in_the_way():
    layer = random_layer()
    learning = gp.GatedLayer(*(part.clone().requires_grad_() for part in (layer.query, layer.key, layer.value)), "silu")
    expected = gp.measure_layer(layer, samples=4).scalars
    assert gp.measure_layer(learning, samples=4).scalars == expected
    learning.exchange().forward(torch.ones(16, dtype=torch.float64)).sum().backward()
    assert learning.query.grad is not None


@pytest.mark.parametrize("biases", [False, True])
def test_planted_duplicates_are_found_among_neurons_of_equal_norms(biases):
    """In every block and at the ends of blocks; rows that only have the same numbers in another order are others."""
    layer = random_layer(d_mlp=521, biases=biases)
    query, key = layer.query.float(), layer.key.float()
    pairs = ((0, 520), (255, 256), (3, 300), (511, 512))
    for first, second in pairs:
        query[second], key[second] = query[first], key[first]
        for bias in (layer.query_bias, layer.key_bias) if biases else ():
            bias[second] = bias[first]
    query[70], key[70] = query[60].flip(0), key[60].flip(0)  # the same q.q, k.k and q.k up to the order of their sums
    query[80], key[80] = -query[61], -key[61]  # exactly the same
    query[90], key[90] = 0.0 * query[90], key[62]
    query[91], key[91] = -0.0 * query[90], key[62]
    changed = {
        name: None if getattr(layer, name) is None else getattr(layer, name).float()
        for name in ("query_bias", "key_bias")
    }
    for bias in filter(lambda part: part is not None, changed.values()):
        bias[91] = bias[90]
    layer = gp.GatedLayer(query, key, layer.value.float(), "silu", **changed)
    found = duplicated(layer, row_products(layer))
    assert np.flatnonzero(found).tolist() == sorted({90, 91, *(neuron for pair in pairs for neuron in pair)})


def test_a_layer_of_equal_neurons_takes_little_memory_to_see():
    import tracemalloc

    row = torch.randn(1, 400, generator=torch.Generator().manual_seed(0))
    same = row.repeat(3000, 1)
    layer = gp.GatedLayer(same, same, same, "silu")
    products = row_products(layer)
    asked, rows = [], layer.rows
    object.__setattr__(layer, "rows", lambda role, which: (asked.append(len(which)), rows(role, which))[1])
    tracemalloc.start()
    found = duplicated(layer, products)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.all()
    assert max(asked) <= 256
    assert peak < same.nbytes / 2


def test_cosines_alone_are_those_of_the_frame():
    layer = random_layer(d_mlp=300, d_model=12)
    whole = gp.measure_layer(layer).neurons
    found = gp.measures.cosines(layer)
    assert {"abs_cos_qk", "cos_kv", "cos_qv", "query_norm"} <= {*found}
    for name, values in found.items():
        np.testing.assert_array_equal(values, whole[name], err_msg=name)
    by_hand = torch.nn.functional.cosine_similarity(layer.query, layer.key).abs()
    np.testing.assert_allclose(found["abs_cos_qk"], by_hand.numpy(), rtol=1e-12)
