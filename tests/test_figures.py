"""Figures: frame in, Axes out. What is asserted is on the Axes, not in pixels."""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import glu_probe as gp
from glu_probe.errors import BadOption
from glu_probe.figures import HEATMAP_MEASURES, label_positions

from .support import llama_config, llama_tensors, write_checkpoint, write_llama


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return gp.probe(write_llama(tmp_path_factory.mktemp("figures") / "llama"))


@pytest.fixture(scope="module")
def tall(report):
    """An 80-layer frame whose layers 10 and 11 have no MLP."""
    layers = pd.concat([report.layers] * 7, ignore_index=True).head(80)
    layers["layer"] = range(80)
    measured = layers.select_dtypes("floating").columns
    layers.loc[[10, 11], measured] = np.nan
    layers.loc[[10, 11], "no_mlp"] = True
    return layers


@pytest.fixture
def ax():
    return gp.figures.figure_axes((6, 4))


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    plt.close("all")


def tick_labels(ax) -> list[str]:
    return [label.get_text() for label in ax.get_xticklabels()]


@pytest.mark.parametrize("count", [1, 2, 18, 30, 61, 80, 126, 500])
def test_label_positions_have_a_constant_step_and_both_ends(count):
    positions = label_positions(count)
    assert positions[0] == 0
    assert positions[-1] == count - 1
    assert len(positions) <= 21
    steps = np.diff(positions)
    assert len(set(steps[:-1])) <= 1
    if len(steps) > 1:
        assert steps[0] <= steps[-1] < 2 * steps[0]


def test_heatmap_rows_columns_and_missing_cells(tall, ax):
    assert gp.figures.layer_heatmap(tall, ax=ax) is ax
    mesh = ax.collections[0].get_array()
    assert mesh.shape == (len([name for name in HEATMAP_MEASURES if "_text" not in name]), 80)
    assert np.ma.getmaskarray(mesh)[:, 10:12].all()
    assert not np.ma.getmaskarray(mesh)[:, 12:].any()
    assert tick_labels(ax)[0] == "0"
    assert tick_labels(ax)[-1] == "79"
    labels = [label.get_text() for label in ax.get_yticklabels()]
    low, high = tall["cos_kv_mean"].min(), tall["cos_kv_mean"].max()
    assert f"cos_kv_mean  {low:.3g} … {high:.3g}" in labels


def test_heatmap_ignores_infinite_values_for_its_range(report, ax):
    layers = report.layers.copy()
    layers.loc[3, "cos_kv_mean"] = np.inf
    gp.figures.layer_heatmap(layers, measures=["cos_kv_mean"], ax=ax)
    mesh = ax.collections[0].get_array()
    assert np.ma.getmaskarray(mesh)[0, 3]
    assert mesh.max() == 1


def experts(layers: int, count: int, *, dense: int = 0) -> pd.DataFrame:
    """A neuron frame of two neurons an expert, whose values are 100 * layer + expert, plus and minus 1.

    The first layers have no experts, and expert 1 of the last layer no values.
    """
    rows = [
        (layer, pd.NA if layer < dense else str(expert), 100.0 * layer + expert + sign)
        for layer in range(layers)
        for expert in range(count)
        for sign in (1, -1)
    ]
    frame = pd.DataFrame(rows, columns=["layer", "expert", "cos_kv"]).astype({"expert": "string"}).assign(tower="text")
    frame.loc[(frame["layer"] == layers - 1) & (frame["expert"] == "1"), "cos_kv"] = np.nan
    return frame


@pytest.mark.parametrize(("layers", "count", "dense"), [(1, 3, 0), (12, 3, 0), (32, 8, 1), (60, 384, 1)])
def test_expert_heatmap_means_by_layer_and_expert(ax, layers, count, dense):
    assert gp.figures.expert_heatmap(experts(layers, count, dense=dense), "cos_kv", ax=ax) is ax
    mesh = ax.collections[0].get_array()
    assert mesh.shape == (count, layers)
    wanted = 100.0 * np.arange(layers)[None] + np.arange(count)[:, None]
    missing = np.ma.getmaskarray(mesh)
    np.testing.assert_array_equal(mesh.data[~missing], wanted[~missing])
    assert missing[1, -1]
    assert missing[:, :dense].all()
    assert missing.sum() == 1 + dense * count
    assert (mesh.min(), mesh.max()) == (wanted[~missing].min(), wanted[~missing].max())
    assert ax.get_title(loc="right") == "grey: missing"
    for labels, size in ((tick_labels(ax), layers), ([t.get_text() for t in ax.get_yticklabels()], count)):
        assert labels == [str(position) for position in label_positions(size)]


def test_expert_heatmap_sorts_experts_by_number_and_leaves_shared_ones_out(ax):
    frame = experts(2, 12)
    shared = frame[frame["expert"] == "0"].assign(expert="shared", cos_kv=1e6)
    shuffled = pd.concat([frame, shared], ignore_index=True).sample(frac=1, random_state=0)
    gp.figures.expert_heatmap(shuffled, "cos_kv", ax=ax)
    mesh = ax.collections[0].get_array()
    assert mesh.shape == (12, 2)
    assert mesh[10, 0] == 10
    assert mesh.max() == 111


def test_expert_heatmap_of_a_stack(ax):
    frame = pd.concat([experts(2, 3), experts(4, 5).assign(tower="talker")], ignore_index=True)
    with pytest.raises(BadOption, match="talker, text have routed experts"):
        gp.figures.expert_heatmap(frame, "cos_kv", ax=ax)
    gp.figures.expert_heatmap(frame, "cos_kv", tower="talker", ax=ax)
    assert ax.collections[0].get_array().shape == (5, 4)
    with pytest.raises(BadOption, match="no routed experts in 'vision'"):
        gp.figures.expert_heatmap(frame, "cos_kv", tower="vision", ax=ax)


def test_expert_heatmap_of_a_dense_model_or_of_nothing(report, ax):
    with pytest.raises(BadOption, match="no routed experts"):
        gp.figures.expert_heatmap(report.neurons, ax=ax)
    with pytest.raises(BadOption, match="nothing to draw"):
        gp.figures.expert_heatmap(experts(2, 3).assign(cos_kv=np.nan), "cos_kv", ax=ax)
    with pytest.raises(BadOption, match="no column 'cos_kvv'"):
        gp.figures.expert_heatmap(experts(2, 3), "cos_kvv", ax=ax)


def test_the_page_of_a_mixture_shows_its_experts(tmp_path):
    tensors, config = llama_tensors(layers=3), llama_config(num_hidden_layers=3, model_type="qwen3_moe", num_experts=3)
    moved = {
        name.replace(".mlp.", f".mlp.experts.{expert}."): tensor * (1 + expert)
        for name, tensor in tensors.items()
        for expert in range(3)
        if "mlp" in name and ".0." not in name
    }
    kept = {name: tensor for name, tensor in tensors.items() if "mlp" not in name or ".0." in name}
    report = gp.probe(write_checkpoint(tmp_path / "moe", kept | moved, config))
    assert report.save(tmp_path / "out") == []
    names = {path.stem for path in (tmp_path / "out/figures").glob("experts_*.png")}
    assert names == {"experts_exchange_asymmetry", "experts_abs_cos_qk"}
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "Exchange asymmetry, expert by expert" in page
    assert page.index("expert by expert") < page.index("<h2>Tables</h2>")


def test_profile_draws_gaps_where_layers_are_missing(tall, ax):
    gp.figures.layer_profile(tall, "cos_kv", ax=ax)
    median = next(line for line in ax.lines if line.get_label() == "median").get_ydata()
    assert np.isnan(median[10:12]).all()
    np.testing.assert_array_equal(median[:10], tall["cos_kv_median"][:10])
    assert ax.get_ylabel() == "cos_kv"


def test_scales_on_a_logarithmic_axis(report, ax):
    places = report.layers[["layer", "tower", "group"]]
    frame = places.assign(a=[0.0, *np.geomspace(0.2, 20, 11)], b=3.0)
    assert gp.figures.layer_lines(frame, ["a", "b"], logarithmic=True, ax=ax) is ax
    assert ax.get_yscale() == "log"
    np.testing.assert_allclose(ax.lines[0].get_ydata(), frame["a"])
    assert 0 < ax.get_ylim()[0] < 0.2
    assert {"1", "10"} <= {label.get_text() for label in ax.get_yticklabels()}
    assert gp.figures.layer_lines(frame, ["a", "b"]).get_ylim()[0] == 0


def test_a_measure_on_text_is_dashed_in_the_colour_of_its_pair(report, ax):
    columns = ["cos_kv_mean", "cos_kv_text_mean", "branch_overlap", "gate_std_text_median"]
    frame = report.layers[["layer", "tower", "group", "cos_kv_mean", "branch_overlap"]]
    gp.figures.layer_lines(frame.assign(cos_kv_text_mean=0.1, gate_std_text_median=0.2), columns, ax=ax)
    plain, text, other, alone = ax.lines
    assert plain.get_color() == text.get_color() != other.get_color() != alone.get_color()
    assert [line.get_linestyle() for line in ax.lines] == ["-", "--", "-", "-"]


def test_phase_diagram_places_layers_at_their_medians(report, ax):
    gp.figures.phase_diagram(report.layers, ax=ax)
    points = next(c for c in ax.collections if c.get_offsets().shape == (len(report.layers), 2))
    np.testing.assert_allclose(points.get_offsets()[:, 0], report.layers["query_norm_median"])
    np.testing.assert_allclose(points.get_offsets()[:, 1], report.layers["abs_cos_qk_median"])
    assert ax.get_xscale() == "log"
    assert "silu" in ax.get_title()


def test_phase_diagram_of_neurons_needs_to_know_the_gate(report, ax):
    with pytest.raises(BadOption, match="activation"):
        gp.figures.phase_diagram(report.neurons, ax=ax)
    gp.figures.phase_diagram(report.neurons, activation="silu", ax=ax)


@pytest.mark.parametrize("activation", ["linear", "relu", "tanh"])
def test_phase_diagram_alone(activation, ax):
    gp.figures.phase_diagram(activation=activation, ax=ax)
    assert ax.get_xlim() == (0.1, 10.0)


def test_class_bars_stack_to_one(tall, ax):
    gp.figures.class_bars(tall, ax=ax)
    tops = np.zeros(80)
    for bar in ax.patches:
        index = round(bar.get_x() + bar.get_width() / 2)
        tops[index] = max(tops[index], bar.get_y() + bar.get_height())
    np.testing.assert_allclose(tops, 1, rtol=1e-5)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "missing" in labels
    assert "orthogonal output" in labels


def test_scatter_has_a_point_per_neuron(report, ax):
    gp.figures.neuron_scatter(report.neurons, x="query_norm", y="cos_kv", ax=ax)
    assert len(ax.collections[0].get_offsets()) == len(report.neurons)
    assert ax.get_xscale() == "log"


def test_scatter_becomes_a_density_for_many_neurons(report, ax):
    many = pd.concat([report.neurons] * 80, ignore_index=True)
    gp.figures.neuron_scatter(many, ax=ax)
    assert np.nansum(ax.collections[0].get_array()) == len(many)


@pytest.mark.parametrize("draw", [
    lambda frame: gp.figures.layer_heatmap(frame),
    lambda frame: gp.figures.layer_profile(frame),
    lambda frame: gp.figures.phase_diagram(frame, activation="silu"),
    lambda frame: gp.figures.class_bars(frame),
])  # fmt: skip
def test_nothing_to_draw_is_said(report, draw):
    blank = report.layers.copy()
    blank[blank.select_dtypes("floating").columns] = np.nan
    with pytest.raises(BadOption, match="nothing to draw"):
        draw(blank)
    with pytest.raises(BadOption, match=r"no rows|no column"):
        draw(report.layers.head(0))
    with pytest.raises(BadOption, match="no column"):
        draw(report.layers[["model"]])


def test_backend_and_style_stay_as_they_are(report, tmp_path):
    backend, style = mpl.get_backend(), dict(mpl.rcParams)
    report.save(tmp_path)
    assert mpl.get_backend() == backend
    assert dict(mpl.rcParams) == style
    assert plt.get_fignums() == []


def test_without_axes_a_figure_is_made_for_notebooks(report):
    ax = gp.figures.layer_profile(report.layers)
    assert ax.figure.number in plt.get_fignums()


@pytest.mark.parametrize("count", [1, 3, 24])
def test_density_of_few_or_equal_neurons(report, count):
    few = report.neurons.head(count)
    gp.figures.phase_diagram(few, activation="silu")
    gp.figures.phase_diagram(pd.concat([report.neurons.head(1)] * 50), activation="silu")


def test_phase_diagram_counts_every_neuron(report, ax):
    gp.figures.phase_diagram(report.neurons, activation="silu", ax=ax)
    counts = next(c.get_array() for c in ax.collections if type(c).__name__ == "QuadMesh")
    assert np.nansum(counts) == len(report.neurons)


def test_lines_of_layer_columns(tall, ax):
    gp.figures.layer_lines(tall, ["gate_stable_rank_unit", "up_stable_rank_unit"], ax=ax)
    np.testing.assert_array_equal(ax.lines[1].get_ydata(), tall["up_stable_rank_unit"])
    assert np.isnan(ax.lines[0].get_ydata()[10:12]).all()


def test_wrong_columns_are_refused_with_a_suggestion(report):
    with pytest.raises(BadOption, match="bilinear_share_mean"):
        gp.figures.layer_profile(report.layers, "bilinear_shar")
    with pytest.raises(BadOption, match="no numbers"):
        gp.figures.neuron_scatter(report.neurons, "io_class", "cos_kv")
    with pytest.raises(BadOption, match="no column"):
        gp.figures.layer_heatmap(report.neurons, measures=["query_norm"])


def test_text_scatter_has_the_line_where_both_agree(ax):
    frame = pd.DataFrame(
        {"layer": [0, 0, 1], "bilinear_share": [0.1, 0.5, 0.9], "bilinear_share_text": [0.2, 0.4, np.nan]}
    )
    ax = gp.figures.text_scatter(frame, "bilinear_share", ax=ax)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("bilinear_share", "bilinear_share_text")
    np.testing.assert_allclose(ax.collections[0].get_offsets(), [[0.1, 0.2], [0.5, 0.4]])
    line = ax.lines[-1].get_xydata()
    np.testing.assert_array_equal(line[:, 0], line[:, 1])
    assert line[0, 0] < line[1, 0]
    with pytest.raises(BadOption, match="exchange_asymmetry"):
        gp.figures.text_scatter(frame)


def costs(layers: int, *, subsets: bool = False, negative: bool = False) -> pd.DataFrame:
    """A frame of `causal` whose KL is (layer + 1) * (intervention + 1) / 1000; one value is missing."""
    names = ["identity", "exchange", "zero_ablation", "mean_ablation"]
    rows = [
        {"model": "m", "layers": str(layer), "expert": None, "neurons": which, "intervention": name,
         "kl": 0.0 if name == "identity" else (layer + 1) * (number + 1) / 1000, "kl_se": 1e-4,
         "delta_loss": (-1 if negative and layer == 1 else 1) * number / 100, "delta_loss_se": 1e-3}
        for layer in range(layers)
        for which in (["top 10 % by x", "random of equal energy"] if subsets else ["all"])
        for number, name in enumerate(names)
    ]  # fmt: skip
    frame = pd.DataFrame(rows).astype({"expert": "string"})
    frame.loc[(frame["layers"] == "1") & (frame["intervention"] == "exchange"), "kl"] = np.nan
    return frame


@pytest.mark.parametrize("layers", [3, 18, 80])
def test_causal_heatmap(layers, ax):
    assert gp.figures.causal_heatmap(costs(layers), ax=ax) is ax
    mesh = ax.collections[0]
    values = mesh.get_array()
    assert values.shape == (4, layers)
    assert np.argwhere(np.ma.getmaskarray(values)).tolist() == [[1, 1]]
    assert values[2, 2] == pytest.approx(0.009)
    most = 0.004 * layers  # a decade of colours at least
    assert (mesh.norm.vmin, mesh.norm.vmax) == pytest.approx((min(0.002, most / 10), most))
    assert isinstance(mesh.norm, mpl.colors.LogNorm)
    assert (values[0] == mesh.norm.vmin).all()  # what costs nothing is at the end of the scale, not missing
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "identity",
        "exchange",
        "zero_ablation",
        "mean_ablation",
    ]
    assert tick_labels(ax) == [str(position) for position in label_positions(layers)]
    assert ax.get_title(loc="right") == "grey: missing"


def test_causal_heatmap_of_losses_that_fall(ax):
    gp.figures.causal_heatmap(costs(3, negative=True), value="delta_loss", ax=ax)
    mesh = ax.collections[0]
    assert (mesh.norm.vmin, mesh.norm.vmax) == pytest.approx((-0.03, 0.03))
    assert mesh.get_array()[3, 1] == pytest.approx(-0.03)
    assert not np.ma.getmaskarray(mesh.get_array()).any()


def test_causal_profile_lines_and_bands(ax):
    assert gp.figures.causal_profile(costs(18), ax=ax) is ax
    lines = {line.get_label(): line for line in ax.lines}
    assert set(lines) == {"exchange", "zero_ablation", "mean_ablation"}
    assert lines["zero_ablation"].get_linestyle() == "--"
    assert lines["mean_ablation"].get_linestyle() == ":"
    np.testing.assert_allclose(lines["zero_ablation"].get_ydata(), 0.003 * np.arange(1, 19))
    assert np.isnan(lines["exchange"].get_ydata()[1])
    assert ax.get_yscale() == "log"
    assert len(ax.collections) == 3
    band = ax.collections[1].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((0.003 - 1e-4, 0.054 + 1e-4))


def test_causal_profile_without_errors_and_with_losses_that_fall(ax):
    gp.figures.causal_profile(costs(3, negative=True).drop(columns="delta_loss_se"), value="delta_loss", ax=ax)
    assert ax.get_yscale() == "symlog"
    assert len(ax.collections) == 0


def test_costs_of_subsets_have_lines_of_their_own(ax):
    gp.figures.causal_profile(costs(3, subsets=True), ax=ax)
    assert len(ax.lines) == 6
    zero = [line.get_color() for line in ax.lines if line.get_label().startswith("zero_ablation")]
    assert zero == ["black", "0.55"]


def test_experts_of_one_layer_have_columns_of_their_own(ax):
    frame = pd.concat([costs(2), costs(2).assign(expert="shared")])
    gp.figures.causal_heatmap(frame, ax=ax)
    assert tick_labels(ax) == ["0", "1", "0 shared", "1 shared"]


@pytest.mark.parametrize(("change", "said"), [
    (lambda f: f.assign(model=[*"ab"] * (len(f) // 2)), "2 models"),
    (lambda f: f.drop(columns="kl"), "no column 'kl'"),
    (lambda f: f.assign(kl=np.nan), "every value of kl is missing"),
    (lambda f: pd.concat([f, f]), "several rows"),
    (lambda f: f[:0], "no rows"),
])  # fmt: skip
@pytest.mark.parametrize("draw", [gp.figures.causal_heatmap, gp.figures.causal_profile])
def test_costs_that_cannot_be_drawn(draw, change, said, ax):
    with pytest.raises(BadOption, match=said):
        draw(change(costs(3)), ax=ax)


def grouped(report) -> pd.DataFrame:
    """Layers 0 to 11: dense in 0, then routed and shared experts in each, none in layer 5."""
    rows = [(0, "dense"), *((layer, group) for layer in range(1, 12) for group in ("routed", "shared"))]
    frame = report.layers.iloc[[layer for layer, _ in rows]].reset_index(drop=True)
    frame["group"] = pd.array([group for _, group in rows], dtype="string")
    frame["cos_kv_mean"] = [layer + 100.0 * (group == "shared") for layer, group in rows]
    gone = frame["layer"] == 5
    frame.loc[gone, frame.select_dtypes("floating").columns] = np.nan
    frame = frame.drop(index=frame.index[gone][1:])
    frame.loc[frame["layer"] == 5, ["group", "no_mlp"]] = ["none", True]
    return frame


def test_lines_stay_within_an_expert_group(report, ax):
    gp.figures.layer_profile(grouped(report), "cos_kv", ax=ax)
    means = [line for line in ax.lines if line.get_marker() == "."]
    assert [line.get_ydata()[0] for line in means] == [0, 1, 101]
    routed = means[1].get_ydata()
    np.testing.assert_array_equal(routed[~np.isnan(routed)], [1, 2, 3, 4, 6, 7, 8, 9, 10, 11])
    assert np.isnan(routed[4])
    assert len(means[2].get_ydata()) == 10
    assert [line.get_label() for line in means].count("mean") == 1
    labels = tick_labels(ax)
    assert labels[:2] == ["0 dense", "1 routed"]
    assert "1 shared" in labels
    assert labels[-1] == "11"


def test_heatmap_and_bars_keep_groups_together(report, ax):
    frame = grouped(report)
    gp.figures.layer_heatmap(frame, measures=["cos_kv_mean"], ax=ax)
    row = ax.collections[0].get_array()[0]
    known = row[~np.ma.getmaskarray(row)]
    assert (np.diff(known) > 0).all()  # dense, routed, shared: each in the order of its layers
    other = gp.figures.figure_axes((6, 4))
    gp.figures.class_bars(frame, ax=other)
    assert len(tick_labels(other)) <= 22


def test_a_layer_alone_is_a_mark(report, ax):
    gp.figures.layer_profile(report.layers.head(1), ax=ax)
    marks = [line for line in ax.lines if line.get_marker() == "_"]
    assert marks
    assert {line.get_xdata().tolist()[0] for line in marks} == {0}


def test_labels_of_layers_that_would_overlap_are_left_out(report):
    same = report.layers.assign(query_norm_median=1.0, abs_cos_qk_median=0.1)
    crowded, apart = gp.figures.figure_axes((5, 4)), gp.figures.figure_axes((5, 4))
    gp.figures.phase_diagram(same, ax=crowded)
    gp.figures.phase_diagram(same.assign(query_norm_median=np.geomspace(0.3, 4, 12)), ax=apart)
    written = [{text.get_text() for text in ax.texts} & {str(layer) for layer in range(12)} for ax in (crowded, apart)]
    assert written == [{"0"}, {"0", "11"}]


def test_many_cells_are_an_image_in_drawings(tall, ax):
    gp.figures.expert_heatmap(experts(60, 64), "cos_kv", ax=ax)
    assert ax.collections[0].get_rasterized()
    few = gp.figures.figure_axes((6, 4))
    gp.figures.layer_heatmap(tall, ax=few)
    assert not few.collections[0].get_rasterized()


def test_layers_without_a_known_scale_have_no_place(report, ax):
    some = report.layers.copy()
    some.loc[[3, 4], "exchange_asymmetry_mean"] = np.nan
    gp.figures.phase_diagram(some, ax=ax)
    assert any(points.get_offsets().shape == (10, 2) for points in ax.collections)
    with pytest.raises(BadOption, match="every value of exchange_asymmetry is missing"):
        gp.figures.phase_diagram(some.assign(exchange_asymmetry_mean=np.nan), ax=ax)
    gp.figures.phase_diagram(some.assign(exchange_asymmetry_mean=np.nan), activation="silu")
