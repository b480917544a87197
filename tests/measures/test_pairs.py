"""Pairs and neighbours against the plainest loop over all neurons."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from glu_probe.activations import limited, swish
from glu_probe.errors import BadOption
from glu_probe.measures import nearest_neighbours, pairs
from glu_probe.measures.pairs import alike_pairs, equal_pairs, exchanged_pairs

from ..support import random_layer


def cosines(a, b):
    a, b = (m.double().numpy() for m in (a, b))
    return (a / np.linalg.norm(a, axis=1)[:, None]) @ (b / np.linalg.norm(b, axis=1)[:, None]).T


@pytest.fixture
def narrow():
    """A layer so narrow that many pairs are close, in the float32 of files."""
    layer = random_layer(d_mlp=37, d_model=4)
    return replace(layer, **{name: getattr(layer, name).float() for name in ("query", "key", "value")})


@pytest.mark.parametrize("rows", [5, 1024])
def test_pairs_are_those_of_a_plain_loop(narrow, monkeypatch, rows):
    monkeypatch.setattr(pairs, "_ROWS", rows)
    q, k, v = (cosines(m, m) for m in (narrow.query, narrow.key, narrow.value))
    qk = cosines(narrow.query, narrow.key)
    upper = np.triu(np.ones_like(q, dtype=bool), 1)
    wanted = upper & (q >= 0.5) & (np.abs(k) >= 0.4) & (v * np.sign(k) >= 0.3)
    found = alike_pairs(narrow, query=0.5, key=0.4, value=0.3)
    assert 3 < len(found.first) < 100
    assert [*zip(found.first, found.second, strict=True)] == sorted(zip(*np.nonzero(wanted), strict=True)) or rows == 5
    assert {*zip(found.first, found.second, strict=True)} == {*zip(*np.nonzero(wanted), strict=True)}
    at = found.first, found.second
    for name, expected in (("query", q), ("key", np.abs(k)), ("value", v * np.sign(k))):
        assert np.allclose(found.values[f"cos_{name}"], expected[at], atol=1e-12)
    wanted = upper & (np.abs(qk) >= 0.7) & (np.abs(qk.T) >= 0.7)
    found = exchanged_pairs(narrow, threshold=0.7)
    assert 3 < len(found.first) < 100
    assert {*zip(found.first, found.second, strict=True)} == {*zip(*np.nonzero(wanted), strict=True)}
    at = found.first, found.second
    assert np.allclose(found.values["abs_cos_query_key"], np.abs(qk)[at], atol=1e-12)
    assert np.allclose(found.values["abs_cos_key_query"], np.abs(qk.T)[at], atol=1e-12)
    assert np.allclose(found.values["cos_value"], (v * np.sign(qk * qk.T))[at], atol=1e-12)
    assert np.allclose(found.values["cos_query"], q[at], atol=1e-12)


def test_a_threshold_is_met_exactly(narrow):
    """What float32 cannot tell from the threshold is decided in float64."""
    q = cosines(narrow.query, narrow.query)
    limit = q[3, 17]
    for threshold, there in ((limit - 1e-12, True), (limit + 1e-12, False)):
        found = alike_pairs(narrow, query=threshold, key=-1, value=-1)
        assert ((3, 17) in {*zip(found.first, found.second, strict=True)}) is there


def test_where_the_sign_of_the_up_branch_is_fixed_it_counts(narrow):
    gate = limited(swish(1.702), 7.0, up_offset=1.0)  # times clamp(b) + 1: not odd in b
    fixed = replace(narrow, activation=gate)
    k = cosines(narrow.key, narrow.key)
    found = alike_pairs(fixed, query=-1, key=0.5, value=-1)
    assert {*zip(found.first, found.second, strict=True)} == {*zip(*np.nonzero(np.triu(k >= 0.5, 1)), strict=True)}
    near = nearest_neighbours(fixed, 0, 36)
    assert (near["cos_key"] < 0).any()


def test_dead_neurons_and_those_that_are_not_finite_are_in_no_pair(narrow):
    narrow.query[3], narrow.key[4], narrow.value[5, 0] = 0.0, 0.0, torch.nan
    found = alike_pairs(narrow, query=-1, key=-1, value=-1)
    assert found.candidates == 34
    assert len(found.first) == 34 * 33 // 2
    assert not {3, 4, 5} & {*found.first, *found.second}


def test_too_many_pairs_are_refused(narrow, monkeypatch):
    monkeypatch.setattr(pairs, "MOST_PAIRS", 50)
    with pytest.raises(BadOption, match=r"layer 0: more than 50 pairs of neurons are found. Raise the threshold"):
        alike_pairs(narrow, query=-1, key=-1, value=-1)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20])
def test_equal_pairs_at_any_scale(scale):
    layer = random_layer(d_mlp=12, biases=True)
    layer = replace(layer, **{n: getattr(layer, n) * scale for n in ("query", "key", "query_bias", "key_bias")})
    for j, c in ((5, -2.5), (7, 0.5)):
        layer.query[j], layer.query_bias[j] = layer.query[2], layer.query_bias[2]
        layer.key[j], layer.key_bias[j] = c * layer.key[2], c * layer.key_bias[2]
    layer.value[5], layer.value[7] = layer.value[2] * 3, -layer.value[2]
    found = equal_pairs(layer)
    assert [*zip(found.first, found.second, strict=True)] == [(2, 5), (2, 7), (5, 7)]
    assert np.allclose(found.values["cos_value"], [-1, -1, 1])
    layer.key_bias[5] *= 1.01  # another constant: another function
    assert [*zip(equal_pairs(layer).first, equal_pairs(layer).second, strict=True)] == [(2, 7)]


def test_a_longer_gate_is_no_duplicate():
    layer = random_layer(d_mlp=6)
    layer.query[4], layer.key[4] = layer.query[1] * 1.001, layer.key[1]
    assert not len(equal_pairs(layer).first)


def test_neighbours_are_those_of_a_plain_loop(narrow):
    near = nearest_neighbours(narrow, 7, 4)
    q, k, v = (cosines(m, m)[7] for m in (narrow.query, narrow.key, narrow.value))
    v, k = v * np.sign(k), np.abs(k)
    assert near["factor"].tolist() == ["query"] * 4 + ["key"] * 4 + ["value"] * 4
    for factor, own in (("query", q), ("key", k), ("value", v)):
        rows = near[near["factor"] == factor]
        order = [j for j in np.argsort(-np.abs(own)) if j != 7][:4]
        assert rows["neighbour"].tolist() == order
        assert np.allclose(rows["cosine"], own[order])
        for name, cosine in (("query", q), ("key", k), ("value", v)):
            assert np.allclose(rows[f"cos_{name}"], cosine[order])
    everything = np.abs(cosines(narrow.value, narrow.value)) - 2 * np.eye(37)
    assert near["typical"].iloc[-1] == pytest.approx(np.median(everything.max(1)), abs=1e-6)


def test_neighbours_of_a_random_neuron_are_chance():
    layer = random_layer(d_mlp=400, d_model=64)
    near = nearest_neighbours(layer, 0, 1)
    assert near["null"].nunique() == 1
    assert (near["typical"] - near["null"]).abs().max() < 0.03


def test_a_factor_of_zeros_has_no_neighbours():
    layer = random_layer()
    layer.key[2] = 0.0
    near = nearest_neighbours(layer, 2)
    assert set(near["factor"]) == {"query", "value"}
    assert near["cos_key"].isna().all()
    assert 2 not in nearest_neighbours(layer, 3, 24).query("factor == 'key'")["neighbour"].tolist()
    with pytest.raises(BadOption, match="neuron is 24"):
        nearest_neighbours(layer, 24)
