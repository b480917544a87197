"""Measures of whole layers: nulls and output asymmetry."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import glu_probe as gp
from glu_probe.measures import arithmetic, sampling
from glu_probe.measures.nulls import isotropic_null, mismatched, null_measures
from glu_probe.measures.output import default_samples, output_asymmetry
from glu_probe.measures.products import row_products

from ..support import random_layer


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def everything(layer: gp.GatedLayer) -> np.ndarray:
    return np.ones(layer.d_mlp, dtype=bool)


@pytest.mark.parametrize("d_model", [16, 576])
def test_isotropic_null_against_sampling(d_model):
    x, y = torch.randn(2, 40_000, d_model, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity(x, y).numpy()
    for name, values in (("cos_kv", cosine), ("abs_cos_qk", np.abs(cosine))):
        mean, std = isotropic_null(name, d_model)
        assert mean == pytest.approx(values.mean(), abs=4 * values.std() / 200)
        assert std == pytest.approx(values.std(), rel=0.02)
    assert isotropic_null("abs_cos_qk", 576)[0] == pytest.approx(0.0333, abs=1e-4)


def test_mismatched_neurons_never_match():
    layer = random_layer(d_mlp=60)
    usable = everything(layer)
    usable[:5] = False
    q, k, v = (part.tolist() for part in mismatched(usable, rng()))
    assert all(len({i, j, m}) == 3 and min(i, j, m) >= 5 for i, j, m in zip(q, k, v, strict=True))
    assert len(set(q)) == 55


def test_null_of_an_anisotropic_layer_is_wider_than_the_isotropic_one():
    layer = random_layer(d_mlp=2000)
    tilted = gp.GatedLayer(layer.query + 0.3, layer.key + 0.3, layer.value, layer.activation)
    found = null_measures(tilted, everything(tilted), rng())["abs_cos_qk"].mean()
    assert found > 2 * isotropic_null("abs_cos_qk", 16)[0]
    flat = null_measures(layer, everything(layer), rng())["abs_cos_qk"].mean()
    assert flat == pytest.approx(isotropic_null("abs_cos_qk", 16)[0], rel=0.1)


def test_too_few_neurons_have_no_null():
    layer = random_layer(d_mlp=2)
    assert null_measures(layer, everything(layer), rng())["cos_kv"].size == 0


def direct_output_asymmetry(layer: gp.GatedLayer, changed: gp.GatedLayer, x: torch.Tensor) -> float:
    plain, other = layer.forward(x), changed.forward(x)
    return float((plain - other).square().sum(1).mean() / 2 / (plain.square().sum(1) + other.square().sum(1)).mean())


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_output_asymmetry_is_its_definition(biases, single, monkeypatch):
    """On the same inputs, against GatedLayer.forward; in float64 and in the float32 of large layers."""
    monkeypatch.setattr(arithmetic, "native_bfloat16", lambda: False)  # for which there is test_sampling
    if single:
        monkeypatch.setattr(sampling, "_SINGLE", 0)
    layer = random_layer(d_mlp=700, biases=biases)
    found = output_asymmetry(layer, row_products(layer), everything(layer), rng(), samples=50)
    x = torch.from_numpy(rng().standard_normal((50, 16)))
    tolerance = 1e-5 if single else 1e-12
    assert found["exchange_asymmetry_output"] == pytest.approx(
        direct_output_asymmetry(layer, layer.exchange(), x), rel=tolerance
    )
    assert found["scaling_asymmetry_output"] == pytest.approx(
        direct_output_asymmetry(layer, layer.rescale(2.0), x), rel=tolerance
    )


def test_output_asymmetry_of_one_neuron_is_the_neurons_within_its_error():
    layer = random_layer(d_mlp=1, seed=5)
    result = gp.measure_layer(layer, samples=100_000)
    for measure in ("exchange_asymmetry", "scaling_asymmetry"):
        error = result.scalars[f"{measure}_output_se"]
        assert 0 < error < 0.01
        assert abs(result.scalars[f"{measure}_output"] - result.neurons[measure][0]) < 4 * error


def test_standard_error_is_the_spread_over_seeds():
    layer = random_layer(d_mlp=40)
    runs = [
        output_asymmetry(layer, row_products(layer), everything(layer), np.random.default_rng(seed), samples=64)
        for seed in range(200)
    ]
    spread = np.std([run["exchange_asymmetry_output"] for run in runs])
    claimed = np.mean([run["exchange_asymmetry_output_se"] for run in runs])
    assert claimed == pytest.approx(spread, rel=0.2)


def test_linear_layer_is_symmetric_as_a_whole():
    layer = random_layer(activation="linear")
    found = output_asymmetry(layer, row_products(layer), everything(layer), rng(), samples=16)
    assert found["exchange_asymmetry_output"] < 1e-25
    assert found["scaling_asymmetry_output"] < 1e-25


def test_unusable_neurons_take_no_part():
    layer = random_layer(d_mlp=30)
    smaller = gp.GatedLayer(layer.query[5:], layer.key[5:], layer.value[5:], layer.activation)
    layer.query[:5] = torch.nan
    usable = everything(layer)
    usable[:5] = False
    found = output_asymmetry(layer, row_products(layer), usable, rng(), samples=20)
    expected = output_asymmetry(smaller, row_products(smaller), everything(smaller), rng(), samples=20)
    assert found == pytest.approx(expected)


def test_output_of_nothing_is_missing():
    layer = random_layer()
    found = output_asymmetry(layer, row_products(layer), ~everything(layer), rng())
    assert all(math.isnan(value) for value in found.values())


def test_sample_count_follows_cost():
    assert default_samples(random_layer()) == 1024

    class Large:
        d_mlp, d_model, group = 14336, 4096, "dense"

    assert default_samples(Large()) == 34

    class Expert:
        d_mlp, d_model, group = 1024, 2048, "routed"

    assert default_samples(Expert()) == 59  # a dense one would get 953


@pytest.mark.parametrize("change", [
    lambda layer: layer.key[3].mul_(1e-38),
    lambda layer: [factor.mul_(1e-16) for factor in (layer.query, layer.key, layer.value)],
    lambda layer: layer.query.mul_(1e15),
])  # fmt: skip
def test_output_asymmetry_of_large_layers_with_extreme_rows(change, monkeypatch):
    """What would leave the range of float32 is done in float64, and agrees with it."""
    layer = random_layer(activation="relu")
    layer = gp.GatedLayer(layer.query.float(), layer.key.float(), layer.value.float(), "relu")
    change(layer)
    expected = output_asymmetry(layer, row_products(layer), everything(layer), rng(), samples=40)
    monkeypatch.setattr(sampling, "_SINGLE", 0)
    found = output_asymmetry(layer, row_products(layer), everything(layer), rng(), samples=40)
    assert found == pytest.approx(expected)
    assert math.isfinite(found["exchange_asymmetry_output"])
