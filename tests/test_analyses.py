"""The analyses of pretrained models: their statistics on planted data, and every one from end to end on tiny checkpoints."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr

import glu_probe as gp
from glu_probe.errors import BadOption, NoReport

from .support import llama_config, llama_tensors, write_checkpoint
from .text.tiny_models import save, words

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "analyses"))

import atlas  # noqa: E402
import gaussian_or_text  # noqa: E402
import io_classes  # noqa: E402
import predict_cause  # noqa: E402
import spectra  # noqa: E402
import study  # noqa: E402


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A LLaMA that runs, of three layers."""
    return save(tmp_path_factory.mktemp("analyses") / "tiny", "llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(words(400))
    return str(path)


@pytest.fixture(scope="module")
def on_text(model, text) -> gp.Report:
    return gp.probe_text(model, text, length=32)


def planted(directory: Path, edit, *, layers: int = 6, d_mlp: int = 40, d_model: int = 16) -> gp.Checkpoint:
    """A LLaMA whose (gate, up, down) of every layer, each [d_mlp, d_model], are what `edit` makes of random ones."""
    tensors = llama_tensors(layers=layers, d_mlp=d_mlp, d_model=d_model)
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        names = [f"{stem}mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        gate, up, down = (tensors[name] for name in names)
        edited = edit(gate, up, down.T, layer)
        for name, value in zip(names, (edited[0], edited[1], edited[2].T), strict=True):
            tensors[name] = value
        tensors[f"{stem}post_attention_layernorm.weight"] = torch.ones(d_model)
    config = llama_config(num_hidden_layers=layers, intermediate_size=d_mlp, hidden_size=d_model)
    return gp.open_checkpoint(write_checkpoint(directory, tensors, config))


# -- statistics -------------------------------------------------------------------------------------


def test_rank_correlations_are_scipys_and_partial_ones_those_of_residuals(rng):
    x, y, z = rng.integers(0, 6, (3, 40)).astype(float)
    assert study.rank_correlation(x, y) == pytest.approx(spearmanr(x, y).statistic)
    ranks = [pd.Series(part).rank().to_numpy() for part in (x, y, z)]
    design = np.column_stack([ranks[2], np.ones(40)])
    left = [part - design @ np.linalg.lstsq(design, part, rcond=None)[0] for part in ranks[:2]]
    assert study.partial_rank_correlation(x, y, z) == pytest.approx(np.corrcoef(*left)[0, 1])
    assert np.isnan(study.rank_correlation(x, np.ones(40)))


def test_what_follows_depth_alone_is_gone_when_depth_is_taken_out(rng):
    depth = np.arange(200.0)
    x, y = depth + rng.normal(0, 30, (2, 200))
    assert study.rank_correlation(x, y) > 0.6
    assert abs(study.partial_rank_correlation(x, y, depth)) < 0.2


def test_an_interval_holds_the_truth_about_as_often_as_it_says(rng):
    held = 0
    for _ in range(100):
        low, high = study.bootstrap(np.mean, rng.normal(1.0, 2.0, 30), draws=300)[1:]
        held += low < 1.0 < high
    assert 85 <= held <= 99


def test_layers_where_something_is_missing_are_left_out_of_an_interval(rng):
    x, y = rng.normal(size=(2, 12))
    holed = x.copy(), y.copy()
    holed[0][3], holed[1][7] = np.nan, np.inf
    kept = np.delete(np.arange(12), [3, 7])
    assert study.bootstrap(study.rank_correlation, *holed) == study.bootstrap(study.rank_correlation, x[kept], y[kept])
    few = study.bootstrap(np.mean, [1.0, 3.0])
    assert few.value == 2.0
    assert np.isnan(few.low)


def test_signs_and_their_adjustment():
    assert study.sign_test([1.0] * 10 + [0.0, np.nan]) == (10, 10, pytest.approx(2 / 1024))
    assert study.sign_test([1.0, -1.0])[2] == 1.0
    np.testing.assert_allclose(study.holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])
    np.testing.assert_allclose(study.holm([0.9, 0.8]), 1.0)


# -- models and files -------------------------------------------------------------------------------


def test_a_model_that_is_not_there_is_one_line_and_nothing_is_measured(tmp_path, model, monkeypatch, capsys):
    monkeypatch.setattr(study.gp, "probe", lambda *_: pytest.fail("something was measured"))
    with pytest.raises(SystemExit) as stopped:
        atlas.main([str(model), str(tmp_path / "absent"), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "absent" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_models_with_several_mlps_a_layer_or_of_one_name_are_refused(tmp_path, model):
    gp.testing.write_tiny_checkpoint("qwen2_moe", tmp_path)
    with pytest.raises(BadOption, match="several gated MLPs"):
        study.gated(gp.probe(tmp_path).layers)
    with pytest.raises(BadOption, match="not one gated MLP"):
        spectra.layer_frame(gp.open_checkpoint(tmp_path))
    with pytest.raises(BadOption, match="two models"):
        list(study.reports([str(model)] * 2))


def test_a_saved_report_stands_for_its_model(tmp_path, on_text):
    on_text.save(tmp_path / "saved", figures=False)
    [(name, report)] = study.reports([str(tmp_path / "saved")], lambda _: pytest.fail("it was made anew"))
    assert name == "tiny"
    pd.testing.assert_frame_equal(report.layers, on_text.layers)


# -- atlas ------------------------------------------------------------------------------------------


def test_layers_are_placed_by_the_scale_that_was_planted(tmp_path):
    """Gates from almost linear to almost ReLU, with depth; up rows that half follow the gate."""
    scales = [0.05, 0.3, 1.0, 3.0, 10.0, 100.0]

    def edit(gate, up, down, layer):
        unit = gate / gate.norm(dim=1, keepdim=True)
        return scales[layer] * unit, unit + up / up.norm(dim=1, keepdim=True), down

    frame = atlas.layer_frame(gp.probe(planted(tmp_path, edit)))
    place = frame["exchange_asymmetry_relu_ratio"]
    assert place.iloc[0] < 0.02
    assert place.iloc[-1] == pytest.approx(1, abs=0.01)
    np.testing.assert_allclose(frame["query_norm_median"], scales, rtol=1e-5)
    assert frame["bilinear_neurons"].iloc[0] == frame["relu_neurons"].iloc[-1] == 1
    found = atlas.summary(frame).set_index("figure")["value"]
    assert found["rank correlation of place with depth"] == pytest.approx(1)
    assert found["layers with |cos(q, k)| above mismatched rows"] == 6


def test_the_place_of_neurons_has_its_two_ends():
    rho = np.array([0.0, 0.5, 1.0, np.nan])
    relu = gp.gaussian_measures("relu", 1.0, rho[:3])["exchange_asymmetry"].to_numpy()
    for asymmetry, expected in ((relu, 1.0), (0 * relu, 0.0)):
        neurons = pd.DataFrame({"abs_cos_qk": rho, "exchange_asymmetry": [*asymmetry, np.nan]})
        np.testing.assert_allclose(atlas.relu_ratios(neurons), [expected, expected, np.nan, np.nan], atol=1e-5)


# -- Gaussian or text -------------------------------------------------------------------------------


def test_both_predictions_are_those_of_the_theory(on_text):
    neurons = gaussian_or_text.with_predictions(on_text)
    assert len(neurons) == len(on_text.neurons)
    for name, scale, rho in (
        ("isotropic", "query_norm", "abs_cos_qk"),
        ("matched", "gate_std_text", "branch_correlation_text"),
    ):
        expected = gp.gaussian_measures("silu", neurons[scale], neurons[rho].abs())["exchange_asymmetry"]
        np.testing.assert_allclose(neurons[name], expected, atol=2e-5)


def test_a_prediction_that_is_borne_out_and_neurons_that_break_it(on_text):
    neurons = gaussian_or_text.with_predictions(on_text)
    exact = neurons.assign(**{gaussian_or_text.TEXT: neurons["isotropic"]})
    report = gp.Report(on_text.layers, exact, on_text.classes, on_text.provenance)
    again = gaussian_or_text.with_predictions(report)
    found = gaussian_or_text.agreement(again)
    assert (found["broken"] == 0).all()
    np.testing.assert_allclose(found["isotropic_rank_correlation"], 1)
    np.testing.assert_allclose(found["isotropic_bias"], 0, atol=1e-7)
    assert len(gaussian_or_text.breakers(again)) == 0

    off = exact.copy()
    chosen = (off["neuron"] == 5) & (off["layer"] == 1)
    off.loc[chosen, gaussian_or_text.TEXT] = np.float32(0.9)
    off.loc[chosen, gaussian_or_text.ERROR] = np.float32(0.01)
    again = gaussian_or_text.with_predictions(gp.Report(on_text.layers, off, on_text.classes, on_text.provenance))
    [worst] = gaussian_or_text.breakers(again).itertuples()
    assert (worst.layer, worst.neuron) == (1, 5)


def test_the_bound_of_the_errors_is_met_by_a_perfect_prediction(rng):
    """Noise of known size on true values: the truth correlates with what is measured as much as `reliability` says."""
    true, error = rng.uniform(0.1, 0.3, 4000), 0.05
    columns = (
        "query_norm",
        "gate_std_text",
        "output_energy_text",
        "abs_cos_qk",
        "branch_correlation_text",
        "gate_mean_text",
        "gate_active_text",
    )
    neurons = pd.DataFrame(dict.fromkeys(columns, 1.0), index=range(4000)).assign(
        layer=0, breaks=False, isotropic=true, matched=true
    )
    neurons[gaussian_or_text.TEXT] = true + rng.normal(0, error, 4000)
    neurons[gaussian_or_text.ERROR] = error
    [row] = gaussian_or_text.agreement(neurons).itertuples()
    assert np.sqrt(row.reliability) == pytest.approx(np.corrcoef(true, neurons[gaussian_or_text.TEXT])[0, 1], abs=0.02)


def test_a_report_without_text_is_refused(model):
    with pytest.raises(BadOption, match="no column exchange_asymmetry_text"):
        gaussian_or_text.with_predictions(gp.probe(model))


# -- spectra ----------------------------------------------------------------------------------------


def test_ranks_are_those_of_the_report(model):
    frame = spectra.layer_frame(gp.open_checkpoint(model)).set_index(["layer", "matrix"])
    layers = gp.probe(model, exact=True).layers.set_index("layer")
    for rank in spectra.RANKS[:3]:
        for matrix in spectra.MATRICES:
            found = frame.xs(matrix, level="matrix")[rank]
            np.testing.assert_allclose(found, layers[f"{matrix}_{rank}_unit"], rtol=1e-5)


def test_the_rank_without_the_largest_direction_is_that_of_the_rest():
    rest = torch.diag(torch.tensor([3.0, 3.0, 3.0, 1.0], dtype=torch.float64))
    values = np.array([50.0, *torch.linalg.svdvals(rest).numpy()])
    found = spectra.ranks(values)
    assert found["stable_rank_without_first"] == pytest.approx(28 / 9)
    assert found["stable_rank"] == pytest.approx(1 + 28 / 2500)


def test_a_gate_of_lower_rank_is_found_and_one_common_direction_is_told_apart(tmp_path):
    def low(gate, up, down, layer):
        return gate @ torch.diag((torch.arange(16) < 5).float()), up, down

    def shifted(gate, up, down, layer):
        return gate + 0.6 * torch.eye(16)[0], up, down

    for edit, without_first in ((low, True), (shifted, False)):
        frame = spectra.layer_frame(planted(tmp_path / edit.__name__, edit, d_mlp=400))
        found = spectra.comparisons(frame).set_index(["rank", "first", "second"])
        pair = found.xs(("gate", "up"), level=("first", "second"))
        assert pair.loc["stable_rank", "first_lower"] == 6
        assert pair.loc["stable_rank", "ratio_high"] < 1
        assert pair.loc["stable_rank", "sign_test_p"] == pytest.approx(2 / 64)
        assert (pair.loc["stable_rank_without_first", "ratio"] < 0.8) == without_first
        same = found.loc[("stable_rank", "up", "down")]
        assert same["ratio"] == pytest.approx(1, abs=0.1)


# -- input-output classes ---------------------------------------------------------------------------


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, threshold: float = 0.5) -> str:
    """The class of one neuron from three signs: typical is one whose approximate cosines fit together."""
    if q @ k < 0:
        k, v = -k, -v
    qk, qv, kv = ((a @ b / (a.norm() * b.norm())).item() for a, b in ((q, k), (q, v), (k, v)))
    qk, qv, kv = (int(cosine > threshold) - int(cosine < -threshold) for cosine in (qk, qv, kv))
    if not qv and not kv:
        return "orthogonal output"
    kind = {1: "strengthening", 0: "proportional change", -1: "weakening"}[kv]
    return ("" if qk == kv * qv or (kv == 0 and qk == 0) else "atypical ") + ("" if qv else "conditional ") + kind


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma2", "olmo"])
def test_the_table_of_every_family_of_the_twelve_models(family, tmp_path):
    """From files, against the definition applied neuron by neuron to what was written into them."""
    truth = gp.testing.write_tiny_checkpoint(family, tmp_path / family, layers=3, d_model=8, d_mlp=150)
    [(_, report)] = io_classes.measured([str(tmp_path / family)])
    table = io_classes.class_table(report.neurons)
    assert list(table.index) == [0, 1, 2, "Total"]
    assert list(table.columns) == list(gp.measures.IO_CLASSES)
    expected = pd.DataFrame(0, index=range(3), columns=table.columns)
    for mlp in truth:
        gain = 1.0 if mlp.gain is None else mlp.gain.double()
        factors = [mlp.query.double() * gain, mlp.key.double() * gain]
        if mlp.centred:
            factors = [rows - rows.mean(dim=1, keepdim=True) for rows in factors]
        for neuron in zip(*factors, mlp.value.double(), strict=True):
            expected.loc[mlp.layer, by_definition(*neuron)] += 1
    assert (expected.sum() > 0).sum() >= 8
    np.testing.assert_array_equal(table.loc[[0, 1, 2]], expected)
    np.testing.assert_array_equal(table.loc["Total"], expected.sum())


FAMILY_OF = {"allenai": "olmo", "google": "gemma2", "mistralai": "mistral", "Qwen": "qwen2"}  # the others are llama


def serve_the_twelve(hub, directory: Path) -> dict[str, Path]:
    """Every model of the paper as a tiny one of its family, on a hub; gives where each was made."""
    made = {}
    for number, name in enumerate(io_classes.TWELVE):
        made[name] = directory / str(number)
        family = FAMILY_OF.get(name.partition("/")[0], "llama")
        gp.testing.write_tiny_checkpoint(family, made[name], layers=3, d_model=8, d_mlp=60 + number)
        hub.add(name, made[name])
    return made


def test_the_twelve_models_come_from_the_hub_by_name(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "DRAWS", 20)
    monkeypatch.setattr(io_classes, "TWELVE", io_classes.TWELVE[::4])  # of three families
    made = serve_the_twelve(hub, tmp_path / "made")
    assert len(made) == 3
    io_classes.main(["--twelve", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {
        "io-classes.png", "summary.csv", "sweep.csv", *(f"{name.replace('/', '--')}-table.csv" for name in made),
    }  # fmt: skip
    for name, directory in made.items():
        assert name in said
        table = pd.read_csv(tmp_path / "out" / f"{name.replace('/', '--')}-table.csv")
        expected = io_classes.class_table(gp.probe(directory).neurons).reset_index()
        pd.testing.assert_frame_equal(table, expected.astype({"Layer": str}), check_dtype=False)
    assert pd.read_csv(tmp_path / "out/summary.csv")["model"].unique().tolist() == list(made)


def test_of_the_twelve_only_headers_and_what_is_measured_are_fetched(hub, tmp_path):
    made = serve_the_twelve(hub, tmp_path / "made")
    assert len(made) == 12
    opened = {name: gp.open_checkpoint(name) for name in made}
    assert {one.model_type for one in opened.values()} == {"llama", "mistral", "qwen2", "gemma2", "olmo"}
    assert hub.asked_for() == {"config.json", "model.safetensors"}
    for name, one in opened.items():
        assert one.layer(2).d_mlp == gp.open_checkpoint(made[name]).layer(2).d_mlp


def test_one_of_the_twelve_that_is_not_open_to_the_user_is_one_line_and_nothing_is_measured(
    hub, tmp_path, monkeypatch, capsys
):
    serve_the_twelve(hub, tmp_path / "made")
    hub.errors["meta-llama/Llama-2-7b-hf"] = (403, "GatedRepo")
    monkeypatch.setattr(study.gp, "probe", lambda *_: pytest.fail("something was measured"))
    with pytest.raises(SystemExit) as stopped:
        io_classes.main(["--twelve", "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "meta-llama/Llama-2-7b-hf" in line
    assert not (tmp_path / "out").exists()


def test_an_address_stays_as_it_was_typed(hub, tmp_path):
    hub.add("org/name", write_checkpoint(tmp_path / "m", llama_tensors(layers=2), llama_config(num_hidden_layers=2)))
    [(name, report)] = study.reports(["hf://org/name@main"])
    assert name == "org/name@main"
    assert len(report.layers) == 2


def test_the_sweep_of_neurons_that_write_what_they_read(tmp_path):
    def edit(gate, up, down, layer):
        return gate, up, up if layer < 3 else -up

    report = gp.probe(planted(tmp_path, edit))
    table = io_classes.sweep(report)
    assert list(table["threshold"]) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert (table["write_what_they_read"] == 1).all()
    assert (table["mismatched"].diff().dropna() < 0).all()
    np.testing.assert_allclose(table[list(gp.measures.IO_CLASSES)].sum(axis=1), 1)
    found = io_classes.summary(study.gated(report.layers), report.neurons).set_index("figure")["value"]
    assert found["share of strengthening, first half"] == found["share of weakening, second half"] == 1
    assert found["share of orthogonal output"] == 0


def test_mismatched_rows_write_what_they_read_as_often_as_expected(tmp_path):
    """Random neurons are mismatched rows: the two columns agree."""
    report = gp.probe(planted(tmp_path, lambda *parts: parts[:3], d_mlp=600, d_model=16))
    table = io_classes.sweep(report).set_index("threshold")
    for threshold in (0.2, 0.4):
        assert table["write_what_they_read"][threshold] == pytest.approx(table["mismatched"][threshold], abs=0.03)


# -- cause ------------------------------------------------------------------------------------------


def cause_frames(rng, follows: str | None, layers: int = 30) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Random measures and costs of layers; the costs of exchange follow one measure."""
    measures = pd.DataFrame({name: rng.normal(size=layers) for name in predict_cause.MEASURES})
    measures.insert(0, "layer", np.arange(layers))
    costs = pd.DataFrame(
        [
            {"layers": str(layer), "intervention": intervention, "kl": rng.normal(), "kl_spared": rng.normal()}
            for layer in range(layers)
            for intervention in predict_cause.COSTS
        ]
    )
    if follows:
        costs.loc[costs["intervention"] == "exchange", "kl"] = np.exp(measures[follows]).to_numpy()
    return measures, costs


def test_a_measure_that_predicts_stands_after_forty_looks_and_chance_does_not(rng, monkeypatch):
    monkeypatch.setattr(predict_cause, "PERMUTATIONS", 300)
    monkeypatch.setattr(study, "DRAWS", 20)
    found = predict_cause.correlations(*cause_frames(rng, "tensor_asymmetry")).set_index(["cost", "measure"])
    hit = found.loc[("kl of exchange", "tensor_asymmetry")]
    assert hit["rank_correlation"] == hit["rank_correlation_high"] == pytest.approx(1)
    assert hit["p_of_the_largest"] < 0.01
    assert len(found) == 40
    smallest = [predict_cause.correlations(*cause_frames(rng, None))["p_of_the_largest"].min() for _ in range(8)]
    assert sum(p < 0.05 for p in smallest) <= 2  # while of forty single tests some are below 0.05 nearly every time
    assert max(smallest) > 0.3


def test_tops_are_compared_with_controls_of_the_same_energy():
    rows = [
        {
            "measure": "exchange_asymmetry", "layers": str(layer), "neurons": words, "kl": kl * (layer + 1),
            "output_gap": kl, "energy_share": share, "other_energy_share": other,
        }
        for layer in range(8)
        for words, kl, share, other in (
            ("top 10 % by exchange_asymmetry", 3.0, 0.2, 0.2 if layer else 0.1),
            ("random of equal energy", 1.0, 0.2 if layer else 0.1, 0.2),
        )
    ]  # fmt: skip
    [row] = predict_cause.subsets(pd.DataFrame(rows)).itertuples()
    assert (row.layers, row.layers_left_out, row.layers_where_top_costs_more) == (7, 1, 7)
    assert row.ratio_median == row.ratio_median_low == pytest.approx(3)
    assert row.output_gap_ratio_median == pytest.approx(3)


def test_frames_that_were_not_saved_are_named(tmp_path):
    with pytest.raises(NoReport, match=r"tiny-layers\.csv"):
        predict_cause.read(tmp_path, "tiny")
    with pytest.raises(NoReport, match=r"org--tiny@main-layers\.csv"):
        predict_cause.read(tmp_path, "org/tiny@main")


# -- from end to end --------------------------------------------------------------------------------


def test_every_analysis_of_a_tiny_model(model, text, tmp_path, monkeypatch, capsys):
    """Frames and figure of each are written, and what was saved gives the same again."""
    monkeypatch.setattr(predict_cause, "PERMUTATIONS", 100)
    monkeypatch.setattr(study, "DRAWS", 50)
    on_text = ["--text", text, "--length", "32"]
    short = [*on_text, "--tokens", "128"]
    runs = {
        "atlas": (atlas, [], ["layers", "summary"]),
        "gaussian-or-text": (gaussian_or_text, on_text, ["layers", "summary", "breakers"]),
        "io-classes": (io_classes, [], ["tiny-table", "sweep", "summary"]),
        "spectra": (spectra, [], ["layers", "comparisons"]),
        "predict-cause": (
            predict_cause, short, ["tiny-layers", "tiny-costs", "tiny-subset_costs", "correlations", "subsets"],
        ),
    }  # fmt: skip
    for name, (analysis, options, frames) in runs.items():
        out = tmp_path / name
        analysis.main([str(model), *options, "--out", str(out), "--figures", str(tmp_path / "figures")])
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 5000
        assert {path.name for path in out.iterdir()} == {f"{frame}.csv" for frame in frames}
        assert "tiny" in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in (tmp_path / "predict-cause").iterdir()}
    predict_cause.main(["tiny", "--saved", "--out", str(tmp_path / "predict-cause"), "--figures", str(tmp_path)])
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "predict-cause").iterdir()}


# -- findings ---------------------------------------------------------------------------------------

NUMBER = r"(-?\d+(?:\.\d+)?)"
QUOTED = re.compile(rf"{NUMBER} \({NUMBER} to {NUMBER}\)")


def intervals(directory: Path) -> np.ndarray:
    """Every (value, low, high) in the tables of an analysis, [interval, 3]."""
    found = []
    for path in directory.glob("*.csv"):
        table = pd.read_csv(path)
        for name in table.columns:
            if f"{name}_low" in table:
                found.append(table[[name, f"{name}_low", f"{name}_high"]].dropna().to_numpy())
    return np.concatenate(found)


def unmatched(text: str, found: np.ndarray) -> list[str]:
    """Intervals quoted in a text that are in no table, to the digits that they are quoted with."""
    text, out = " ".join(text.replace("\N{MINUS SIGN}", "-").split()), []
    for quote in QUOTED.finditer(text):
        values = np.array([float(part) for part in quote.groups()])
        digits = [len(part.partition(".")[2]) for part in quote.groups()]
        room = 0.5 * 10.0 ** -np.array(digits) + 1e-4
        if not (np.abs(found - values) <= room).all(1).any():
            out.append(quote[0])
    return out


NAMES = ("atlas", "gaussian_or_text", "io_classes", "predict_cause", "spectra")


@pytest.mark.parametrize("name", NAMES)
def test_every_interval_of_a_finding_is_in_its_tables(name):
    doc = sys.modules[name].__doc__
    tables = [intervals(place) for place in (ROOT / "analyses" / "results").glob(f"{name}*")]
    assert len(QUOTED.findall(" ".join(doc.split()))) >= 5
    assert unmatched(doc, np.concatenate(tables)) == []


def test_every_interval_of_the_readme_is_in_a_table():
    text = (ROOT / "analyses" / "README.md").read_text(encoding="utf-8")
    tables = [intervals(place) for name in NAMES for place in (ROOT / "analyses" / "results").glob(f"{name}*")]
    assert len(QUOTED.findall(text.replace("\N{MINUS SIGN}", "-"))) >= 8
    assert unmatched(text, np.concatenate(tables)) == []
    assert unmatched("0.58 (0.55 to 0.62)", np.concatenate(tables)) == ["0.58 (0.55 to 0.62)"]
    for name in (*NAMES, "train_forms"):
        assert f"`{name}.py`" in text
