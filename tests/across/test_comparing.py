"""compare() from end to end on models small enough to know what must come out."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

import glu_probe as gp
from glu_probe.across.comparison import Comparison
from glu_probe.errors import BadOption, NoReport

from ..support import llama_config, llama_tensors, write_checkpoint, write_llama

SHAPE = {"layers": 3, "d_mlp": 96, "d_model": 64}
SIZES = {"num_hidden_layers": 3, "intermediate_size": 96, "hidden_size": 64}


def write(directory, tensors, **config):
    return write_checkpoint(directory, tensors, llama_config(**SIZES | config))


@pytest.fixture(scope="module")
def tensors():
    return llama_tensors(**SHAPE)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tensors):
    return write(tmp_path_factory.mktemp("models") / "base", tensors)


def changed(tensors, change):
    """A copy in which `change(name, tensor)` has replaced the tensors of MLPs."""
    return {name: change(name, tensor.clone()) if ".mlp." in name else tensor for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, tensors):
    """Neuron 7 of layer 1 turned far, everything else left as it was; gate scale of layer 2 twice as large."""

    def change(name, tensor):
        if name == "model.layers.1.mlp.gate_proj.weight":
            tensor[7] = torch.randn(64, generator=torch.Generator().manual_seed(9)) * tensor[7].norm() / 8
        return tensor * 2 if name == "model.layers.2.mlp.gate_proj.weight" else tensor

    return write(tmp_path_factory.mktemp("models") / "tuned", changed(tensors, change))


@pytest.fixture(scope="module")
def pair(base, tuned):
    return gp.compare(base, tuned, samples=16)


def permuted(tensors):
    """Neurons of every layer in another order, k and v with other signs and sizes: the same model."""
    generator = torch.Generator().manual_seed(2)
    out, orders = dict(tensors), []
    for layer in range(SHAPE["layers"]):
        order, stem = torch.randperm(96, generator=generator), f"model.layers.{layer}.mlp."
        gauge = torch.randn(96, generator=generator)
        out[f"{stem}gate_proj.weight"] = tensors[f"{stem}gate_proj.weight"][order]
        out[f"{stem}up_proj.weight"] = (gauge[:, None] * tensors[f"{stem}up_proj.weight"])[order]
        out[f"{stem}down_proj.weight"] = (tensors[f"{stem}down_proj.weight"] / gauge)[:, order]
        orders.append(order.numpy())
    return out, orders


def test_a_model_beside_itself_differs_in_nothing(base):
    result = gp.compare(base, gp.open_checkpoint(base), samples=16)
    assert result.models == ["base", "base (2)"]
    assert (result.differences["difference"].dropna() == 0).all()
    assert not result.differences["beyond_rounding"].any()
    assert (result.neurons[["angle_q", "angle_k", "angle_v", "movement", "moved"]] == 0).all(axis=None)
    assert set(result.mlps["identity"]) == {"index"}
    assert (result.neurons["counterpart"] == result.neurons["neuron"]).all()
    assert len(result.layers) == 6
    assert result.layers["relative_depth"].tolist() == [0, 0.5, 1] * 2


def test_what_was_changed_is_what_is_found(base, tuned, pair):
    result = pair
    top = result.moved(1).iloc[0]
    assert (top["layer"], top["neuron"]) == (1, 7)
    assert top["angle_q"] > 45
    assert (top["angle_k"], top["angle_v"]) == (0, 0)
    assert top["beyond_rounding"]
    rows = result.neurons
    assert (rows.loc[(rows["layer"] == 0) | ((rows["layer"] == 1) & (rows["neuron"] != 7)), "movement"] == 0).all()
    assert (rows.loc[rows["layer"] == 2, "angle_q"] < 1e-5).all()
    np.testing.assert_allclose(rows.loc[rows["layer"] == 2, "query_norm_relative"], 1, rtol=1e-6)
    differences = result.differences.set_index(["measure", "layer"])
    assert differences.loc[("query_norm", 0), "difference"] == 0
    assert not differences.loc[("query_norm", 0), "beyond_rounding"]
    one, two = (gp.probe(path, samples=16).neurons for path in (base, tuned))
    values = [frame.loc[frame["layer"] == 2, "query_norm"].astype(float) for frame in (one, two)]
    row = differences.loc[("query_norm", 2)]
    assert row["base_value"] == pytest.approx(values[0].mean(), rel=1e-6)
    assert row["value"] == pytest.approx(2 * values[0].mean(), rel=1e-6)
    pooled = np.sqrt((values[0].var(ddof=1) + values[1].var(ddof=1)) / 2)
    assert row["effect"] == pytest.approx((values[1].mean() - values[0].mean()) / pooled, rel=1e-5)
    assert row["effect_kind"] == "d"
    assert row["beyond_rounding"]
    # the change of every measure is that of the two frames
    both = two["exchange_asymmetry"].to_numpy(dtype=float) - one["exchange_asymmetry"].to_numpy(dtype=float)
    np.testing.assert_allclose(rows["exchange_asymmetry_change"], both, atol=1e-7)
    assert rows["io_class_changed"].sum() == (one["io_class"].astype(str) != two["io_class"].astype(str)).sum()


def test_sampled_measures_are_judged_by_their_errors(base, tuned):
    result = gp.compare(base, tuned, samples=16, neurons=False, rounding=False)
    one, two = (gp.probe(path, samples=16).layers for path in (base, tuned))
    row = result.differences.query("measure == 'exchange_asymmetry_output' and layer == 2").iloc[0]
    name = "exchange_asymmetry_output"
    error = np.hypot(one[f"{name}_se"][2], two[f"{name}_se"][2])
    assert row["effect"] == pytest.approx((two[name][2] - one[name][2]) / error, rel=1e-4)
    assert row["effect_kind"] == "z"
    exact = result.differences[result.differences["measure"] == "gate_stable_rank_unit"]
    assert exact["effect"].isna().all()
    assert result.differences["beyond_rounding"].isna().all()
    assert result.neurons.empty
    assert "not measured" in " ".join(result.findings)


def test_a_permuted_twin_is_no_movement(base, tensors, tmp_path):
    twin, orders = permuted(tensors)
    result = gp.compare(base, write(tmp_path / "twin", twin), samples=16)
    assert set(result.mlps["identity"]) == {"permuted"}
    assert (result.mlps["n_elsewhere"] > 80).all()
    for layer, order in enumerate(orders):
        rows = result.neurons[result.neurons["layer"] == layer]
        assert (rows["counterpart"] == np.argsort(order)).all()
    assert (result.neurons[["angle_q", "angle_k", "angle_v"]] < 1e-3).all(axis=None)
    assert result.neurons["exchange_asymmetry_change"].abs().max() < 1e-5
    sentence = next(line for line in result.findings if "another index" in line)
    assert "In 3 of 3 MLPs" in sentence
    assert "no movement" in sentence
    # the same from saved reports
    for name, path in (("a", base), ("b", tmp_path / "twin")):
        gp.probe(path, samples=16).save(tmp_path / name, figures=False)
    reports = gp.compare(tmp_path / "a", tmp_path / "b")
    assert set(reports.mlps["identity"]) == {"permuted"}
    assert reports.neurons["counterpart"].tolist() == result.neurons["counterpart"].tolist()
    assert reports.neurons["angle_q"].isna().all()


def test_other_neurons_of_the_same_shape_are_not_followed(base, tmp_path):
    other = write(tmp_path / "other", llama_tensors(**SHAPE, seed=5))
    result = gp.compare(base, other, samples=16)
    assert set(result.mlps["identity"]) == {"unrelated"}
    assert result.neurons.empty
    assert "other neurons" in " ".join(result.findings)
    with pytest.raises(BadOption, match="no neuron has a value of moved"):
        result.moved(3)
    forced = gp.compare(base, other, samples=16, neurons=True)
    assert len(forced.neurons) == 3 * 96
    assert forced.neurons["angle_q"].median() > 70


def test_a_rounded_twin_shows_rounding_and_nothing_else(base, tensors, tmp_path):
    def narrow(_name, tensor):
        return tensor.bfloat16()

    result = gp.compare(base, write(tmp_path / "narrow", changed(tensors, narrow)), samples=16)
    for letter in "qkv":
        np.testing.assert_allclose(result.mlps[f"angle_{letter}"], result.mlps[f"rounding_angle_{letter}"], rtol=0.1)
        assert (result.mlps[f"rounding_angle_{letter}_base"] < 1e-4).all()
    assert result.mlps["angle_q"].between(0.05, 0.15).all()  # 2^-8 of a weight and less
    assert not result.neurons["beyond_rounding"].any()
    judged = result.differences["beyond_rounding"].dropna()
    assert len(judged) > 50
    assert judged.mean() < 0.1
    assert "the rounding of narrow alone explains" in " ".join(result.findings) or "the two files alone" in " ".join(
        result.findings
    )


def test_tuning_beyond_the_rounding_is_told_from_it(base, tensors, tmp_path):
    def narrow(_name, tensor):
        return tensor.bfloat16()

    def tune(name, tensor):
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
        return (tensor + 0.02 * tensor.std() * noise).bfloat16()

    result = gp.compare(
        write(tmp_path / "narrow", changed(tensors, narrow)),
        write(tmp_path / "tuned", changed(tensors, tune)),
        samples=16,
    )
    assert result.neurons["beyond_rounding"].all()
    assert result.mlps["angle_q"].between(1.0, 1.3).all()  # arctan 0.02
    assert result.differences["beyond_rounding"].dropna().mean() > 0.2
    assert result.neurons["moved"].median() == pytest.approx(0.02 * np.sqrt(3), rel=0.1)


def test_depths_that_differ_are_aligned_by_bins(base, tmp_path):
    deep = write_llama(tmp_path / "deep", layers=7, d_mlp=40, d_model=32)
    result = gp.compare(base, deep, samples=16, rounding=False)
    assert result.provenance["align"] == "depth"
    assert sorted(result.differences["depth_bin"].unique()) == [0, 1, 2]
    neurons = gp.probe(deep, samples=16).neurons
    expected = [
        neurons.loc[neurons["layer"].isin(which), "cos_kv"].astype(float).mean()
        for which in ((0, 1), (2, 3), (4, 5, 6))
    ]
    rows = result.differences[result.differences["measure"] == "cos_kv"]
    # of depths 0, 1/6, ..., 1 two lie below 1/3, two below 2/3
    bins = np.array([0, 0, 1, 1, 2, 2, 2])
    expected = [
        neurons.loc[neurons["layer"].isin(np.flatnonzero(bins == b)), "cos_kv"].astype(float).mean() for b in range(3)
    ]
    np.testing.assert_allclose(rows["value"], expected, rtol=1e-5)
    assert set(result.mlps["identity"]) == {"other shape"}
    assert "different shapes" in " ".join(result.findings)
    with pytest.raises(BadOption, match="no MLP of the base"):
        gp.compare(base, deep, samples=16, neurons=True, rounding=False)
    by_layer = gp.compare(base, deep, samples=16, align="layer", rounding=False)
    assert sorted(by_layer.differences["layer"].unique()) == [0, 1, 2]


def test_a_part_of_the_layers_keeps_its_depth(base, tmp_path):
    result = gp.compare(base, base, layers="1:3", samples=16, rounding=False, names=["a", "b"])
    assert result.layers["relative_depth"].tolist() == [0.5, 1.0] * 2
    gp.probe(base, layers=[1], samples=16).save(tmp_path / "part", figures=False)
    saved = gp.compare(tmp_path / "part", base, layers=[1], samples=16)
    assert saved.layers["relative_depth"].tolist() == [0.5, 0.5]
    assert saved.mlps["identity"].tolist() == ["index"]
    assert any("saved report" in note for note in saved.provenance["notes"])


def test_a_report_of_an_older_version_has_no_depth_unless_it_is_whole(base, tmp_path):
    from dataclasses import replace

    whole, part = gp.probe(base, samples=16), gp.probe(base, layers=[0, 1], samples=16)
    for report in (whole, part):
        del report.provenance["towers"]["text"]["last_layer"]
    other = gp.probe(write_llama(tmp_path / "deep", layers=7, d_mlp=40, d_model=32), samples=16)
    assert gp.compare(whole, other).provenance["align"] == "depth"
    with pytest.raises(BadOption, match="how many layers"):
        gp.compare(replace(part), other)
    assert gp.compare(part, other, align="layer").provenance["align"] == "layer"


def test_what_stands_between_two_readings_is_said(base, tensors, tmp_path):
    gelu = write(tmp_path / "gelu", tensors, hidden_act="gelu")
    result = gp.compare(base, gelu, samples=16, rounding=False)
    assert any("different activations (silu and gelu)" in note for note in result.provenance["notes"])
    noted = result.differences.set_index("measure")["note"]
    assert noted["exchange_asymmetry"].iloc[0] == "other activation (silu and gelu)"
    assert noted["cos_kv"].iloc[0] == ""
    bare = gp.compare(base, gp.open_checkpoint(base, fold_norm=False), samples=16, rounding=False)
    rows = bare.differences.set_index("measure")
    assert not rows.loc["query_norm", "comparable"].any()
    assert rows.loc["query_norm", "effect"].isna().all()
    assert rows.loc["down_stable_rank_unit", "comparable"].all()
    assert any("cannot be compared" in note for note in bare.provenance["notes"])
    report = gp.probe(base, samples=16)
    report.provenance["software"]["glu-probe"] = "0.0.1"
    report.provenance["samples"] = [17]
    report.provenance["methods"]["spectra"] = ["iterated"]
    mixed = gp.compare(base, report, samples=16, rounding=False)
    said = " ".join(mixed.provenance["notes"])
    for words in ("different versions of glu-probe", "different Gaussian samples", "different ways (exact; iterated)"):
        assert words in said


def test_gauge_dependent_measures_have_no_effect(pair):
    rows = pair.differences
    marked = set(rows.loc[rows["gauge_dependent"], "measure"])
    assert {"key_norm", "value_norm", "norm_ratio", "up_stable_rank", "down_frobenius"} <= marked
    assert not {"query_norm", "gate_stable_rank", "up_stable_rank_unit"} & marked
    assert rows.loc[rows["gauge_dependent"], "effect"].isna().all()
    assert not any(f"{name}_change" in pair.neurons for name in marked)


def test_a_mixture_of_experts(tmp_path):
    from glu_probe.testing import write_tiny_checkpoint

    for seed, name in ((0, "a"), (0, "b")):
        write_tiny_checkpoint("qwen2_moe", tmp_path / name, seed=seed, d_mlp=24, d_model=32)
    result = gp.compare(tmp_path / "a", tmp_path / "b", samples=16)
    assert {"routed", "shared"} <= set(result.differences["group"])
    assert {"0", "1", "2", "shared"} <= set(result.mlps["expert"].dropna())
    assert (result.differences["difference"].dropna() == 0).all()
    dense = write_llama(tmp_path / "dense", layers=2, d_mlp=24, d_model=32)
    with pytest.raises(BadOption, match="share none"):
        gp.compare(dense, tmp_path / "a", samples=8)


def test_names(base, tuned, tmp_path):
    result = gp.compare(base, tuned, tuned, samples=8, rounding=False, neurons=False, names=["x", "y", "z"])
    assert list(dict.fromkeys(result.layers["model"])) == ["x", "y", "z"]
    assert list(dict.fromkeys(result.differences["model"])) == ["y", "z"]
    with pytest.raises(BadOption, match="all different"):
        gp.compare(base, tuned, names=["x", "x"])
    nested = [write_llama(tmp_path / place / "model", layers=1) for place in ("one", "two")]
    assert gp.compare(*nested, samples=8, rounding=False, neurons=False).models == ["one/model", "two/model"]


@pytest.mark.parametrize(("arguments", "options", "words"), [
    (1, {}, "nothing to compare"),
    (2, {"align": "width"}, "align is 'width'"),
    (2, {"neurons": "yes"}, "neurons is 'yes'"),
])  # fmt: skip
def test_refusals(base, arguments, options, words):
    with pytest.raises(BadOption, match=words):
        gp.compare(*[base] * arguments, **options, samples=8, rounding=False)


def test_options_that_open_nothing_are_refused(base):
    report = gp.probe(base, samples=8)
    with pytest.raises(BadOption, match="no model to open"):
        gp.compare(report, report, fold_norm=False)


def test_saved_and_loaded(pair, tmp_path):
    result = pair
    assert result.save(tmp_path / "out") == []
    names = {entry.name for entry in (tmp_path / "out").iterdir()}
    frames = ("layers", "differences", "neurons", "mlps")
    assert names == {f"{name}.{ending}" for name in frames for ending in ("parquet", "csv")} | {
        "provenance.json", "figures", "compare.html",
    }  # fmt: skip
    loaded = Comparison.load(tmp_path / "out")
    for name in frames:
        pd.testing.assert_frame_equal(getattr(loaded, name), getattr(result, name), check_exact=True)
    assert loaded.findings == result.findings
    facts = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert [model["name"] for model in facts["models"]] == ["base", "tuned"]
    assert facts["models"][1]["files"][0]["name"] == "model.safetensors"
    (tmp_path / "out" / "mlps.parquet").unlink()
    with pytest.raises(NoReport, match=r"no mlps\.parquet"):
        Comparison.load(tmp_path / "out")


def test_the_same_comparison_is_the_same_bytes(base, tuned, pair):
    one, two = pair, gp.compare(base, tuned, samples=16)
    for name in ("layers", "differences", "neurons", "mlps"):
        pd.testing.assert_frame_equal(getattr(one, name), getattr(two, name), check_exact=True)
    assert one.to_html() == two.to_html()
