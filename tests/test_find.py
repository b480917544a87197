"""Finders: what was planted is found, and nothing else."""

from __future__ import annotations

import inspect
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings

import glu_probe as gp
from glu_probe.errors import BadOption, GluProbeError
from glu_probe.find import (
    aligned_branches,
    dead,
    duplicates,
    exchange_partners,
    near_bilinear,
    near_duplicates,
    padded,
    strengthening,
    weakening,
)
from glu_probe.finder_table import FINDERS
from glu_probe.measures import largest_cosine

from .support import llama_config, llama_tensors, random_layer, write_checkpoint

WIDTH, NEURONS = 96, 40  # isotropic directions of this width stay well below every threshold


@pytest.fixture
def layer() -> gp.GatedLayer:
    return random_layer(d_mlp=NEURONS, d_model=WIDTH)


def found(frame: pd.DataFrame) -> list:
    if "partner" in frame:
        return [*zip(frame["neuron"], frame["partner"], strict=True)]
    return frame["neuron"].tolist()


def near(row: torch.Tensor, angle: float, seed: int = 0) -> torch.Tensor:
    """A row of the same norm at that angle to another."""
    other = torch.randn(len(row), generator=torch.Generator().manual_seed(seed), dtype=row.dtype)
    other -= (other @ row) / (row @ row) * row
    return row * np.cos(angle) + other * (row.norm() / other.norm()) * np.sin(angle)


def test_an_ordinary_layer_holds_none(layer):
    for name in FINDERS:
        assert not len(getattr(gp.find, name)(layer)), name


def test_near_bilinear(layer):
    layer.query[[4, 9]] *= torch.tensor([[1e-3], [1e-2]], dtype=torch.float64)
    frame = near_bilinear(layer)
    assert found(frame) == [4, 9]
    assert frame["score"].between(0.999, 1).all()
    assert frame["null"].isna().all()
    assert (frame["exchange_asymmetry"] < 1e-3).all()


def test_aligned_branches(layer):
    layer.key[4] = near(layer.query[4], 0.3)
    layer.key[9] = -2 * near(layer.query[9], 0.1)
    layer.value[4], layer.value[9] = 3 * layer.query[4], 3 * layer.query[9]
    layer.key[11] = layer.query[11]
    layer.value[11] -= layer.query[11] * (layer.value[11] @ layer.query[11]) / layer.query[11].square().sum()
    frame = aligned_branches(layer)
    assert found(frame) == [11, 9, 4]
    assert frame["amplifies"].tolist() == ["elsewhere", "against", "along"]
    assert np.allclose(frame["score"], [1, np.cos(0.1), np.cos(0.3)])
    assert frame["null"].tolist() == pytest.approx([largest_cosine(NEURONS, WIDTH)] * 3)


def test_strengthening_and_weakening(layer):
    layer.value[4] = near(layer.key[4], 0.5)
    layer.value[9] = -near(layer.key[9], 0.2)
    layer.value[12] = -near(layer.key[12], 1.2)
    frame = strengthening(layer)
    assert found(frame) == [4]
    assert frame["io_class"].tolist() == ["conditional strengthening"]
    assert frame["score"].tolist() == pytest.approx([np.cos(0.5)])
    assert found(strengthening(layer, threshold=0.9)) == []
    frame = weakening(layer)
    assert found(frame) == [9]
    assert frame["score"].tolist() == pytest.approx([-np.cos(0.2)])
    assert frame["null"].iloc[0] == pytest.approx(-largest_cosine(NEURONS, WIDTH, signed=True))
    assert found(weakening(layer, threshold=0.3)) == [9, 12]


def test_dead_and_padded(layer):
    layer.query[3], layer.key[5], layer.value[8] = 0.0, 0.0, 0.0
    for part in (layer.query, layer.key, layer.value):
        part[20] = 0.0
    layer.value[30] *= 1e-6
    frame = dead(layer)
    assert found(frame) == [3, 5, 8]
    assert frame["flag"].tolist() == ["zero_gate", "zero_up", "zero_down"]
    assert frame["score"].tolist() == [0, 0, 0]
    assert found(dead(layer, threshold=1e-3)) == [3, 5, 8, 30]
    assert found(padded(layer)) == [20]


def test_a_constant_branch_is_not_dead():
    layer = random_layer(biases=True)
    layer.query[3] = 0.0
    assert found(dead(layer)) == []
    layer.query_bias[3] = 0.0
    assert found(dead(layer)) == [3]


def test_a_layer_of_zeros_is_padding():
    zero = torch.zeros(5, 8)
    layer = gp.GatedLayer(zero, zero.clone(), zero.clone(), "silu")
    assert found(padded(layer)) == [0, 1, 2, 3, 4]
    with pytest.raises(BadOption, match="'query_norm' is missing for all these neurons"):
        dead(layer)


def test_duplicates(layer):
    layer.query[9], layer.key[9] = layer.query[4], -0.5 * layer.key[4]
    layer.value[9] = 2 * layer.value[4]
    layer.query[12] = layer.query[5]  # the gate alone
    layer.key[13] = layer.key[6]  # the up branch alone
    frame = duplicates(layer)
    assert found(frame) == [(4, 9)]
    assert frame["cos_value"].tolist() == pytest.approx([-1])
    assert frame["score"].iloc[0] == pytest.approx(1, abs=1e-12)


def test_near_duplicates(layer):
    for j, angle in ((9, 0.3), (12, 0.9)):
        layer.query[j], layer.key[j] = near(layer.query[4], angle, j), -near(layer.key[4], angle, j + 50)
        layer.value[j] = -near(layer.value[4], angle, j + 90)
    layer.query[20], layer.key[20] = layer.query[5], layer.key[5]  # reads alike, writes something else
    layer.query[21], layer.key[21], layer.value[21] = -layer.query[6], layer.key[6], layer.value[6]
    frame = near_duplicates(layer)
    assert found(frame) == [(4, 9)]
    assert frame[["cos_query", "cos_key", "cos_value"]].to_numpy() == pytest.approx(np.cos(0.3))
    assert frame["score"].iloc[0] == pytest.approx(np.cos(0.3))
    assert found(near_duplicates(layer, threshold=0.6)) == [(4, 9), (4, 12)]
    assert found(near_duplicates(layer, value=-1)) == [(5, 20), (4, 9)]
    assert found(near_duplicates(layer, query=-1)) == [(6, 21), (4, 9)]


def test_exchange_partners(layer):
    layer.query[9], layer.key[9] = near(layer.key[4], 0.4, 1), -near(layer.query[4], 0.6, 2)
    layer.value[9] = layer.value[4]
    layer.query[20] = layer.key[5]  # one way only
    frame = exchange_partners(layer)
    assert found(frame) == [(4, 9)]
    row = frame.iloc[0]
    assert row["score"] == pytest.approx(np.cos(0.6))
    assert (row["abs_cos_query_key"], row["abs_cos_key_query"]) == pytest.approx((np.cos(0.6), np.cos(0.4)))
    assert row["cos_value"] == pytest.approx(-1)
    assert row["null"] == pytest.approx(largest_cosine(NEURONS * (NEURONS - 1) // 2, WIDTH, together=2))


def test_exchange_partners_compute_what_is_said_of_them(layer):
    """S(a) b v_i + S(b) a v_j: with v_j = v_i, exchanging gate and up of both leaves the sum as it is."""
    two = replace(layer, **{name: getattr(layer, name)[:2].clone() for name in ("query", "key", "value")})
    two.query[1], two.key[1], two.value[1] = -two.key[0], -3 * two.query[0], two.value[0] / 3
    frame = exchange_partners(two)
    assert frame["cos_value"].tolist() == pytest.approx([1])
    x = torch.randn(50, WIDTH, dtype=torch.float64)
    a, b = x @ two.query[0], -x @ two.key[0]
    silu = torch.nn.functional.silu
    expected = -(silu(a) * b + silu(b) * a)[:, None] * two.value[0]
    assert torch.allclose(two.forward(x), expected)


@settings(max_examples=25, deadline=None)
@given(
    scales=st.lists(st.floats(0.1, 10) | st.floats(-10, -0.1), min_size=NEURONS, max_size=NEURONS),
    seed=st.integers(6, 20),  # of 5 no neuron weakens what it reads
)
def test_nothing_depends_on_the_gauge(scales, seed):
    layer = random_layer(d_mlp=NEURONS, d_model=6, seed=seed)
    layer.query[1], layer.key[1], layer.value[1] = layer.query[0], layer.key[0], layer.value[0]
    layer.query[2] = 0.0
    layer.query[3] *= 0.01
    other = layer.regauge(torch.tensor(scales, dtype=torch.float64))
    for name, finder in FINDERS.items():
        options = {"threshold": 0.6} if finder.threshold else {}
        first, second = (getattr(gp.find, name)(one, **options) for one in (layer, other))
        columns = ["neuron", "partner"] if "partner" in first else ["neuron"]
        key = first.sort_values(columns).reset_index(drop=True), second.sort_values(columns).reset_index(drop=True)
        pd.testing.assert_frame_equal(*key, rtol=1e-5, atol=1e-6)
        assert len(first) or name == "padded", name


# -- what can be searched -------------------------------------------------------------------------


@pytest.fixture
def planted(tmp_path):
    """Two layers; in the second, neuron 7 is aligned and 3 and 9 are duplicates."""
    tensors = llama_tensors(layers=2, d_model=WIDTH, d_mlp=NEURONS)
    stem = "model.layers.1.mlp."
    gate, up = tensors[f"{stem}gate_proj.weight"], tensors[f"{stem}up_proj.weight"]
    up[7] = gate[7]
    gate[9], up[9] = gate[3], up[3] * 2
    config = llama_config(num_hidden_layers=2, hidden_size=WIDTH, intermediate_size=NEURONS)
    return write_checkpoint(tmp_path / "planted", tensors, config)


def test_every_kind_of_source_gives_the_same(planted, tmp_path):
    report = gp.probe(planted)
    report.save(tmp_path / "report", figures=False)
    checkpoint = gp.open_checkpoint(planted)
    frames = [aligned_branches(source) for source in (report, tmp_path / "report", checkpoint, str(planted))]
    for frame in frames:
        assert frame[["model", "tower", "layer", "neuron"]].to_numpy().tolist() == [["planted", "text", 1, 7]]
        pd.testing.assert_frame_equal(frame, frames[0], check_dtype=False, check_categorical=False)
    bare = aligned_branches(report.neurons)
    assert found(bare) == [7]
    assert bare["null"].isna().all()
    assert found(duplicates(checkpoint)) == found(duplicates(planted)) == [(3, 9)]
    assert found(aligned_branches(checkpoint.layer(1))) == [7]


def test_layers_are_heeded(planted):
    assert found(duplicates(planted, layers="1")) == [(3, 9)]
    assert found(duplicates(planted, layers=[0])) == []
    assert found(aligned_branches(planted, layers="0")) == []
    assert found(aligned_branches(gp.probe(planted), layers=[0])) == []
    for finder in (duplicates, aligned_branches):
        with pytest.raises(BadOption, match="there is no layer 5"):
            finder(planted, layers=[5])


def test_pairs_stay_within_an_expert(tmp_path):
    gp.testing.write_tiny_checkpoint("mixtral", tmp_path, d_model=64)
    checkpoint = gp.open_checkpoint(tmp_path)
    frame = near_duplicates(checkpoint, threshold=0.0, query=0.0, key=0.0, value=-1)
    assert set(frame["expert"]) == {"0", "1", "2"}
    site = frame[(frame["layer"] == 1) & (frame["expert"] == "2")]
    alone = near_duplicates(checkpoint.layer(1, expert=2), threshold=0.0, query=0.0, key=0.0, value=-1)
    assert found(site) == found(alone)
    assert found(aligned_branches(checkpoint, threshold=0.0)) != []


def test_a_layer_whose_function_is_not_known(planted):
    gate = gp.open_checkpoint(planted).layer(0)
    with pytest.raises(BadOption, match="'bilinear_share' is missing for all these neurons"):
        near_bilinear(replace(gate, activation=None))
    assert len(weakening(replace(gate, activation=None), threshold=0.0))


@pytest.mark.parametrize(("call", "words"), [
    (lambda report: duplicates(report), "a report holds numbers, and this needs the factors themselves. Give the model: "),
    (lambda report: exchange_partners(report.neurons), "a report holds numbers"),
    (lambda report: near_bilinear(3), "neurons cannot be searched for in int"),
    (lambda report: near_bilinear(report.layers), "has no column 'expert'. Give the frame of neurons"),
    (lambda report: near_bilinear(report.neurons.drop(columns="bilinear_share")), "no column 'bilinear_share'"),
    (lambda report: near_bilinear(report.neurons.iloc[:0]), "this frame has no rows"),
    (lambda report: near_bilinear(report, threshold=1.5), "threshold is 1.5"),
    (lambda report: dead(report, threshold=-1), "threshold is -1"),
    (lambda report: dead(report, threshold=float("nan")), "threshold is nan"),
    (lambda report: near_duplicates(random_layer(), key=-2), "key is -2"),
    (lambda report: exchange_partners(random_layer(), threshold="a"), "threshold is 'a'"),
    (lambda report: duplicates("/no/such/dir"), "there is no such file or directory"),
    (lambda report: duplicates(random_layer(), layers=[3]), "there is no layer 3"),
])  # fmt: skip
def test_wrong_input_is_one_clear_error(planted, call, words):
    with pytest.raises(GluProbeError) as caught:
        call(gp.probe(planted))
    assert words in str(caught.value)


def test_the_table_says_what_the_functions_do():
    for name, finder in FINDERS.items():
        keywords = inspect.signature(getattr(gp.find, name)).parameters
        default = keywords["threshold"].default if "threshold" in keywords else None
        assert default == finder.threshold
        assert all(each.kind is each.KEYWORD_ONLY for each in [*keywords.values()][1:])
