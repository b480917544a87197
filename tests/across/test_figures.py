"""Figures of comparisons: what is asserted is on the Axes, not in pixels."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import glu_probe as gp
from glu_probe import figures
from glu_probe.errors import BadOption

from ..support import write_llama


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three revisions of one depth."""
    root = tmp_path_factory.mktemp("figures")
    paths = [write_llama(root / f"rev{seed}", seed=seed, layers=4) for seed in (0, 1, 2)]
    return gp.compare(*paths, samples=8, neurons=True)


@pytest.fixture(scope="module")
def deep(run):
    """Frames of 80 layers beside 30, one of whose bins has no value."""
    rng = np.random.default_rng(0)
    layers = []
    for model, count in (("big", 80), ("small", 30)):
        frame = pd.concat([run.layers.head(4)] * 20, ignore_index=True).head(count)
        frame["layer"], frame["model"], frame["relative_depth"] = range(count), model, np.arange(count) / (count - 1)
        layers.append(frame)
    differences = pd.concat(
        [run.differences[(run.differences["layer"] == 0) & (run.differences["model"] == "rev1")]] * 30
    )
    differences = differences.drop(columns="layer").sort_values("measure", kind="stable")
    differences["depth_bin"] = np.tile(np.arange(30), len(differences) // 30)
    differences["relative_depth"] = (differences["depth_bin"] + 0.5) / 30
    differences["effect"] = np.where(
        differences["effect_kind"].eq("d").fillna(False), rng.normal(size=len(differences)), np.nan
    )
    differences.loc[(differences["depth_bin"] == 7) & (differences["measure"] == "cos_kv"), "effect"] = np.nan
    return pd.concat(layers, ignore_index=True), differences.reset_index(drop=True)


@pytest.fixture
def ax():
    return gp.figures.figure_axes((8, 4))


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    assert not plt.get_fignums()


def ticks(ax) -> list[str]:
    return [label.get_text() for label in ax.get_xticklabels()]


def test_profiles_of_models_of_one_depth_stand_on_their_layers(run, ax):
    figures.model_profiles(run.layers, "cos_kv", ax=ax)
    assert ax.get_legend_handles_labels()[1] == ["rev0", "rev1", "rev2"]
    for line, model in zip(ax.lines, run.models, strict=True):
        rows = run.layers[run.layers["model"] == model]
        np.testing.assert_array_equal(line.get_xdata(), rows["layer"])
        np.testing.assert_array_equal(line.get_ydata(), rows["cos_kv_mean"])
    assert len(ax.collections) == 3  # bands
    assert ax.get_xlabel() == "layer"


def test_profiles_of_other_depths_stand_on_the_relative_one(deep, ax):
    figures.model_profiles(deep[0], "cos_kv", ax=ax)
    assert [len(line.get_xdata()) for line in ax.lines] == [80, 30]
    assert ax.lines[0].get_xdata()[[0, -1]].tolist() == [0, 1]
    assert "relative depth" in ax.get_xlabel()
    figures.model_profiles(deep[0], "gate_stable_rank", by="layer", ax=gp.figures.figure_axes((8, 4)))


def test_values_far_apart_are_drawn_on_a_logarithmic_axis(run, ax):
    layers = run.layers.copy()
    layers["query_norm_mean"] = np.where(layers["model"] == "rev1", 30.0, 0.5)
    figures.model_profiles(layers, "query_norm", ax=ax)
    assert ax.get_yscale() == "log"


def test_the_heatmap_is_centred_and_marks_what_rounding_explains(run, ax):
    rows = run.differences[run.differences["model"] == "rev2"]
    figures.difference_heatmap(run.differences, model="rev2", ax=ax)
    mesh = ax.collections[0]
    assert mesh.norm.vmin == -mesh.norm.vmax
    shown = rows[rows["measure"].isin(figures.EFFECT_MEASURES)]
    assert mesh.norm.vmax == pytest.approx(min(4.0, max(0.1, shown["effect"].abs().max())))
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == list(figures.EFFECT_MEASURES)
    values = np.ma.filled(mesh.get_array(), np.nan).reshape(len(labels), 4)
    expected = shown[shown["measure"] == "cos_kv"].sort_values("layer")["effect"]
    np.testing.assert_allclose(values[labels.index("cos_kv")], expected)
    dots = {(int(x), int(y)) for x, y in zip(*ax.lines[0].get_data(), strict=True)}
    explained = shown[~shown["beyond_rounding"].astype(bool)]
    assert dots == {(int(row.layer), labels.index(row.measure)) for row in explained.itertuples()}


def test_the_heatmap_of_30_bins_labels_with_a_constant_step_and_greys_what_is_missing(deep, ax):
    figures.difference_heatmap(deep[1], limit=1.0, ax=ax)
    assert ticks(ax)[0] == "0.02"
    assert ticks(ax)[-1] == "0.98"
    assert len(ticks(ax)) <= 20
    assert "grey: missing" in ax.get_title(loc="right")
    assert ax.collections[0].norm.vmax == 1.0


def test_a_trajectory_has_the_models_in_their_order(run, ax):
    figures.model_trajectory(run.layers, "cos_kv", ax=ax)
    assert ticks(ax) == ["rev0", "rev1", "rev2"]
    assert len(ax.lines) == 4 + 1
    mean = run.layers.groupby("model", sort=False)["cos_kv_mean"].mean()
    np.testing.assert_allclose(ax.lines[-1].get_ydata(), mean)


def test_angles_over_models_are_medians_over_mlps(run, ax):
    figures.angle_trajectory(run.mlps, ax=ax)
    assert ticks(ax) == ["rev1", "rev2"]
    for line, letter in zip(ax.lines, "qkv", strict=True):
        np.testing.assert_allclose(line.get_ydata(), run.mlps.groupby("model", sort=False)[f"angle_{letter}"].median())
    with pytest.raises(BadOption, match="no neuron was followed"):
        figures.angle_trajectory(run.mlps.assign(angle_q=np.nan), ax=ax)


def test_angles_stand_beside_what_rounding_of_each_file_explains(run, ax):
    sides = {f"rounding_angle_{letter}_{side}": 0.0 for letter in "qkv" for side in ("base", "model")}
    mlps = run.mlps.assign(**sides | {"rounding_angle_q_model": 0.5, "rounding_angle_k_base": 0.7})
    figures.angle_profile(mlps, model="rev1", ax=ax)
    rows = mlps[mlps["model"] == "rev1"]
    drawn = [(line.get_linestyle(), np.asarray(line.get_ydata())) for line in ax.lines]
    assert [style for style, _ in drawn] == ["-", "--", "-", ":", "-", "--", ":"]  # the last two are for the legend
    for place, column in zip(
        (0, 1, 2, 3, 4),
        ("angle_q", "rounding_angle_q_model", "angle_k", "rounding_angle_k_base", "angle_v"),
        strict=True,
    ):
        np.testing.assert_allclose(drawn[place][1], rows[column], err_msg=column)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["gate rows q", "up rows k", "down columns v", "rounding of rev1", "rounding of rev0"]


def test_a_histogram_counts_every_neuron(run, ax):
    neurons = run.neurons.assign(rounding_angle_q_model=3.0)
    figures.angle_histogram(neurons, model="rev1", ax=ax)
    assert ax.lines[0].get_xdata()[0] == 3.0
    assert ax.lines[0].get_linestyle() == "--"
    edges = ax.patches[1].get_path().vertices
    assert edges[:, 1].max() > 0
    counts, _ = np.histogram(neurons.loc[neurons["model"] == "rev1", "angle_q"], bins=np.unique(edges[:, 0]))
    assert counts.sum() == 4 * 24
    assert edges[:, 1].max() == counts.max()


def test_movement_against_rounding(run, ax):
    neurons = run.neurons.assign(rounding=0.1)
    figures.movement_scatter(neurons, model="rev2", ax=ax)
    assert len(ax.collections[0].get_offsets()) == 4 * 24
    line, dashed = ax.lines
    np.testing.assert_allclose(dashed.get_ydata(), 1.5 * np.array(line.get_ydata()))


def test_nothing_to_draw_is_said(run, ax):
    with pytest.raises(BadOption, match="no column 'nonsense'"):
        figures.model_profiles(run.layers, "nonsense", ax=ax)
    with pytest.raises(BadOption, match="2 models beside the base"):
        figures.difference_heatmap(run.differences, ax=ax)
    with pytest.raises(BadOption, match="Use one of rev1, rev2"):
        figures.angle_profile(run.mlps, model="rev0", ax=ax)
    with pytest.raises(BadOption, match="no neuron of rev1 was followed"):
        figures.angle_histogram(run.neurons.assign(angle_q=np.nan, angle_k=np.nan, angle_v=np.nan), model="rev1", ax=ax)
    with pytest.raises(BadOption, match="no rows"):
        figures.model_trajectory(run.layers.head(0), ax=ax)


def test_what_a_frame_lacks_is_told_before_it_is_drawn(run, ax):
    with pytest.raises(BadOption, match=r"Did you mean movement.*Pass comparison\.neurons as it is") as told:
        figures.movement_scatter(run.neurons.rename(columns={"movement": "movements"}), model="rev1", ax=ax)
    assert "no column 'movement'" in told.value.what
    with pytest.raises(BadOption, match="column 'angle_q' holds no numbers"):
        figures.angle_profile(run.mlps.assign(angle_q="much"), model="rev1", ax=ax)


def test_the_heatmap_parts_stacks(run, ax):
    """Layers of one stack stand beside each other, and a line between the stacks."""
    rows = run.differences[run.differences["model"] == "rev1"]
    both = pd.concat([rows.assign(tower="vision"), rows], ignore_index=True)
    figures.difference_heatmap(both, measures=["cos_kv"], ax=ax)
    assert ticks(ax) == ["text 0 dense", "1", "2", "3", "vision 0 dense", "1", "2", "3"]
    assert [line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 2 and line.get_lw() == 1] == [4.0]
