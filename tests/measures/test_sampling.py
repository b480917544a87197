"""Outputs at normal inputs, block by block and in the precision that large layers get: against the whole in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import glu_probe as gp
from glu_probe.measures import arithmetic, sampling
from glu_probe.measures.products import row_products
from glu_probe.measures.sampling import SampledLayer, sampled

from ..support import random_layer

SAMPLES, PAIRS = 40, 20
PRECISIONS = {"float64": 1e-12, "float32": 3e-6, "bfloat16": 3e-3}  # and how much of an asymmetry they may change


@pytest.fixture(params=PRECISIONS)
def precision(request, monkeypatch) -> str:
    """Each of the precisions, whatever the size of the layer and the processor."""
    use(request.param, monkeypatch)
    return request.param


def use(precision: str, monkeypatch) -> None:
    monkeypatch.setattr(sampling, "_SINGLE", 10**12 if precision == "float64" else 0)
    monkeypatch.setattr(arithmetic, "native_bfloat16", lambda: precision == "bfloat16")


def layer_of(kind: str, *, d_mlp: int = 600, d_model: int = 64, activation: str = "silu", biases: bool = False):
    """A layer in float32, as those of files are."""
    layer = random_layer(d_mlp=d_mlp, d_model=d_model, activation=activation, biases=biases)
    query, key, value = layer.query, layer.key, layer.value
    half, other = d_mlp // 2, random_layer(d_mlp=d_mlp, d_model=d_model, seed=1).query
    if kind == "bilinear":
        query = query * 1e-2
    elif kind == "dominated":
        value[3] *= 300
    elif kind == "coinciding":
        key = query.clone()
    elif kind == "coinciding up to size":
        key = query * -3.1
    elif kind == "nearly coinciding":
        key = query + 0.02 * other
    elif kind == "cancelling":
        query[half:] = query[:half] + 0.03 * other[half:]
        key[half:], value[half:] = key[:half], -value[:half]
    biases_of = [None if bias is None else bias.float() for bias in (layer.query_bias, layer.key_bias)]
    return gp.GatedLayer(
        query.float(), key.float(), value.float(), activation, query_bias=biases_of[0], key_bias=biases_of[1]
    )


def found_of(layer: gp.GatedLayer, usable: np.ndarray | None = None) -> SampledLayer:
    usable = np.ones(layer.d_mlp, dtype=bool) if usable is None else usable
    return sampled(layer, inputs(layer), row_products(layer), usable, outputs=SAMPLES, pairs=PAIRS)


def inputs(layer: gp.GatedLayer) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal((SAMPLES, layer.d_model)))


def asymmetry(plain: torch.Tensor, other: torch.Tensor) -> float:
    both = plain.square().sum() + other.square().sum()
    return ((plain - other).square().sum() / both / 2).item()


def expected_of(layer: gp.GatedLayer) -> dict[str, float]:
    """By the definitions, through `GatedLayer.forward`, in float64."""
    parts = ("query", "key", "value", "query_bias", "key_bias")
    q, k, v, *biases = (None if getattr(layer, n) is None else getattr(layer, n).double() for n in parts)
    wide = gp.GatedLayer(q, k, v, layer.activation, query_bias=biases[0], key_bias=biases[1])
    x = inputs(layer)
    plain, y, z = wide.forward(x), x[:PAIRS], x[PAIRS : 2 * PAIRS]
    forth, back = ((y @ q.T) * (z @ k.T)) @ v, ((z @ q.T) * (y @ k.T)) @ v
    return {
        "exchange": asymmetry(plain, wide.exchange().forward(x)),
        "scaling": asymmetry(plain, wide.rescale(2.0).forward(x)),
        "tensor": asymmetry(forth, back),
    }


def values_of(found: SampledLayer) -> dict[str, float]:
    output = found.output_asymmetries()
    return {
        "exchange": output["exchange_asymmetry_output"],
        "scaling": output["scaling_asymmetry_output"],
        "tensor": found.tensor_asymmetry()[0],
    }


@pytest.mark.parametrize("activation", ["silu", "relu", "gelu_tanh"])
@pytest.mark.parametrize("biases", [False, True])
def test_sampled_values_are_their_definitions(precision, activation, biases):
    layer = layer_of("plain", activation=activation, biases=biases)
    found, expected = found_of(layer), expected_of(layer)
    stated = {name: found.output_asymmetries()[f"{name}_asymmetry_output_se"] for name in ("exchange", "scaling")}
    stated["tensor"] = found.tensor_asymmetry()[1]
    for name, value in values_of(found).items():
        assert value == pytest.approx(expected[name], rel=PRECISIONS[precision], abs=1e-25), name
        assert abs(value - expected[name]) <= 0.1 * stated[name], name


@pytest.mark.parametrize("kind", ["coinciding", "coinciding up to size", "nearly coinciding", "bilinear", "cancelling"])
def test_small_asymmetries_and_small_outputs_keep_their_values(precision, kind):
    """Where little is left of large terms, to a few percent; what is exactly nothing is nothing."""
    layer = layer_of(kind)
    expected = expected_of(layer)
    for name, value in values_of(found_of(layer)).items():
        assert value == pytest.approx(expected[name], rel=0.02, abs=1e-12), name
        if kind == "coinciding" and name != "scaling":
            assert value == 0
    if kind == "bilinear":
        assert 1e-5 < expected["exchange"] < 1e-3


@pytest.mark.parametrize("kind", ["cancelling", "nearly coinciding"])
def test_bfloat16_alone_would_show_there(kind, monkeypatch):
    use("bfloat16", monkeypatch)
    layer = layer_of(kind)
    coarse = SampledLayer(layer, inputs(layer), outputs=SAMPLES, pairs=PAIRS)
    products = row_products(layer)
    for block, factors in layer.blocks():
        coarse.add(0, block, factors, products.at(block), np.ones(block.stop - block.start, dtype=bool))
    assert coarse.too_coarse
    assert values_of(coarse)["tensor"] != pytest.approx(expected_of(layer)["tensor"], rel=1e-3)
    assert not found_of(layer).too_coarse
    assert gp.measure_layer(layer).scalars["exchange_asymmetry_output"] == pytest.approx(
        gp.measure_layer(wide(layer)).scalars["exchange_asymmetry_output"], rel=1e-4
    )


def wide(layer: gp.GatedLayer) -> gp.GatedLayer:
    return gp.GatedLayer(layer.query.double(), layer.key.double(), layer.value.double(), layer.activation)


def test_one_neuron_that_is_most_of_the_layer(precision):
    layer = layer_of("dominated")
    found, expected = found_of(layer), expected_of(layer)
    error = found.output_asymmetries()["exchange_asymmetry_output_se"]
    assert abs(values_of(found)["exchange"] - expected["exchange"]) < 0.05 * error


def test_rows_that_are_left_out(precision):
    """Of a block, and all of one; what they hold is no number."""
    layer, usable = layer_of("plain", biases=True), np.ones(600, dtype=bool)
    usable[3:7] = usable[256:512] = False
    rest = torch.from_numpy(usable)
    smaller = gp.GatedLayer(
        layer.query[rest], layer.key[rest], layer.value[rest], "silu",
        query_bias=layer.query_bias[rest], key_bias=layer.key_bias[rest],
    )  # fmt: skip
    expected = expected_of(smaller)
    layer.query[3:7], layer.key_bias[256:512] = torch.nan, torch.inf
    found = found_of(layer, usable)
    assert found.neurons == 340
    for name, value in values_of(found).items():
        assert value == pytest.approx(expected[name], rel=PRECISIONS[precision]), name


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e15, 1e30])
def test_rows_whose_products_float32_does_not_hold(precision, size):
    layer = layer_of("plain", d_mlp=300)
    layer.value[7] *= size
    layer.key[260] *= size
    expected = expected_of(layer)
    for name, value in values_of(found_of(layer)).items():
        assert value == pytest.approx(expected[name], rel=3 * PRECISIONS[precision]), name


@pytest.mark.parametrize("size", [1e15, 1e25])
def test_biases_whose_products_float32_does_not_hold(precision, size):
    layer = layer_of("plain", d_mlp=300, biases=True)
    layer.key_bias[7] = layer.query_bias[7] = size
    found = found_of(layer)
    assert values_of(found)["exchange"] == pytest.approx(expected_of(layer)["exchange"], abs=1e-9)


def test_a_layer_of_zeros_and_one_without_a_function(precision):
    layer = layer_of("plain")
    nothing = gp.GatedLayer(layer.query, layer.key, layer.value * 0, "silu")
    assert all(np.isnan(value) for value in values_of(found_of(nothing)).values())
    unknown = found_of(gp.GatedLayer(layer.query, layer.key, layer.value, None))
    assert np.isnan(values_of(unknown)["exchange"])
    assert values_of(unknown)["tensor"] == pytest.approx(expected_of(layer)["tensor"], rel=PRECISIONS[precision])


@pytest.mark.parametrize("exact", [False, True])
def test_layers_without_a_function_are_measured(exact):
    """Where the tensor is taken exactly too, nothing is left to sample."""
    layer = random_layer()
    result = gp.measure_layer(gp.GatedLayer(layer.query, layer.key, layer.value, None), exact=exact)
    assert result.note == "the activation is not known"
    assert np.isnan(result.scalars["exchange_asymmetry_output"])
    assert result.scalars["tensor_asymmetry"] == gp.measure_layer(layer).scalars["tensor_asymmetry"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 8, 20, 64])
def test_products_are_products(dtype, columns):
    """Lanes, filled up where they do not come out even, of a matrix either way round."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(5, 12, generator=generator), torch.randn(columns, 12, generator=generator).to(dtype)
    for turned in (right.T, right.T.contiguous()):
        found = arithmetic.times(left, turned)
        assert found.shape == (5, columns)
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        expected = left.to(dtype).double() @ right.T.double()
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
