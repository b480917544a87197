"""Every declared invariance, and every declared lack of one, on random layers and random transformations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import glu_probe as gp
from glu_probe.measures.registry import MEASURES, NEURON_MEASURES
from glu_probe.measuring import measure_layer

from ..support import random_layer

ACTIVATION_NAMES = st.sampled_from(["silu", "gelu_tanh", "relu", "linear", "sigmoid"])
SAMPLES = 256


def results(layer: gp.GatedLayer) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    result = measure_layer(layer, samples=SAMPLES)
    return result.neurons, result.scalars


def permuted(layer: gp.GatedLayer, rng: np.random.Generator) -> tuple[gp.GatedLayer, np.ndarray]:
    order = torch.from_numpy(rng.permutation(layer.d_mlp))
    parts = {n: getattr(layer, n)[order] for n in ("query", "key", "value")}
    biases = {n: None if getattr(layer, n) is None else getattr(layer, n)[order] for n in ("query_bias", "key_bias")}
    return replace(layer, **parts, **biases), order.numpy()


def regauged(layer: gp.GatedLayer, rng: np.random.Generator) -> tuple[gp.GatedLayer, np.ndarray]:
    c = np.exp(rng.uniform(-2, 2, layer.d_mlp)) * rng.choice([-1.0, 1.0], layer.d_mlp)
    return layer.regauge(torch.from_numpy(c)), np.arange(layer.d_mlp)


def rotated(layer: gp.GatedLayer, rng: np.random.Generator) -> tuple[gp.GatedLayer, np.ndarray]:
    basis = torch.linalg.qr(torch.from_numpy(rng.standard_normal((layer.d_model, layer.d_model))))[0]
    parts = {name: getattr(layer, name) @ basis for name in ("query", "key", "value")}
    return replace(layer, **parts), np.arange(layer.d_mlp)


TRANSFORMATIONS = {"permutation": permuted, "gauge": regauged, "rotation": rotated}


@pytest.mark.parametrize("name", sorted(TRANSFORMATIONS))
@pytest.mark.parametrize("biases", [False, True])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), activation=ACTIVATION_NAMES)
def test_declared_invariances(name, biases, seed, activation):
    layer = random_layer(seed=seed % 1000, activation=activation, biases=biases)
    changed, order = TRANSFORMATIONS[name](layer, np.random.default_rng(seed))
    before, layer_before = results(layer)
    after, layer_after = results(changed)
    for measure in (*NEURON_MEASURES, "io_class"):
        if name in MEASURES[measure].invariant:
            np.testing.assert_allclose(after[measure], before[measure][order], rtol=1e-6, atol=1e-8, err_msg=measure)
    for measure, value in layer_before.items():
        if measure not in MEASURES or name not in MEASURES[measure].invariant:
            continue
        if measure.endswith("_output") and name == "rotation":
            # another sample in effect: equal within its standard errors
            error = np.hypot(layer_before[f"{measure}_se"], layer_after[f"{measure}_se"])
            assert abs(layer_after[measure] - value) <= 5 * error + 1e-9, measure
        else:
            np.testing.assert_allclose(layer_after[measure], value, rtol=1e-6, atol=1e-9, err_msg=measure)


def test_what_is_declared_gauge_dependent_is():
    """A measure wrongly marked as dependent would keep users from a number they could use."""
    layer = random_layer()
    changed, _ = regauged(layer, np.random.default_rng(0))
    before, layer_before = results(layer)
    after, layer_after = results(changed)
    for measure, entry in MEASURES.items():
        if "gauge" not in entry.invariant:
            pair = (before, after) if entry.level == "neuron" else (layer_before, layer_after)
            assert not np.allclose(pair[0][measure], pair[1][measure], rtol=1e-3), measure


def test_every_measure_is_registered_and_measured():
    neurons, scalars = results(random_layer())
    assert set(neurons) == {*NEURON_MEASURES, "io_class"}
    of_the_frame = {"output_energy_top_share", "exchange_asymmetry_relu_ratio"}  # made from neuron measures
    registered = {name for name, entry in MEASURES.items() if entry.level == "layer"} - of_the_frame
    assert {name for name in scalars if not name.endswith(("_se", "_residual", "_error"))} == registered
