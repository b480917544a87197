"""Neuron measures: extremes of every storage format, odd neurons, classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import glu_probe as gp
from glu_probe.measures.io_classes import IO_CLASSES, io_class
from glu_probe.measures.neuron import flags, neuron_measures
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
