"""Saving, loading, drawing: nothing lost, nothing half written."""

from __future__ import annotations

import html
import json
import os

import numpy as np
import pandas as pd
import pytest

import glu_probe as gp
from glu_probe import report as report_module
from glu_probe.errors import BadOption, CannotWrite, NoReport, NoWeights

from .support import write_llama

FILES = {"layers.parquet", "layers.csv", "neurons.parquet", "classes.csv", "provenance.json", "report.html", "figures"}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return gp.probe(write_llama(tmp_path_factory.mktemp("report") / "llama"))


def test_save_and_load_return_the_same(report, tmp_path):
    assert report.save(tmp_path / "out") == []
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == FILES
    loaded = gp.load_report(tmp_path / "out")
    pd.testing.assert_frame_equal(loaded.layers, report.layers, check_exact=True)
    pd.testing.assert_frame_equal(loaded.neurons, report.neurons, check_exact=True)
    pd.testing.assert_frame_equal(loaded.classes, report.classes, check_dtype=False, check_categorical=False)
    assert loaded.provenance == report.provenance
    assert loaded.findings == report.findings


def test_float32_survives_csv(report, tmp_path):
    report.save(tmp_path, figures=False)
    again = pd.read_csv(tmp_path / "layers.csv")
    for name in report.layers.select_dtypes(np.float32):
        np.testing.assert_array_equal(again[name].astype(np.float32), report.layers[name], err_msg=name)


def test_provenance_is_strict_json_and_says_what_was_assumed(report, tmp_path):
    report.save(tmp_path, figures=False)

    def refuse(constant):
        raise AssertionError(constant)

    provenance = json.loads((tmp_path / "provenance.json").read_text(), parse_constant=refuse)
    text = provenance["towers"]["text"]
    assert text["family"] == "llama"
    assert (text["activation"], text["activation_source"]) == ("silu", "config hidden_act")
    assert text["norm"] == "RMSNorm, gain w, folded"
    assert provenance["files"][0]["name"] == "model.safetensors"
    assert provenance["seed"] == 0
    assert "torch" in provenance["software"]


def test_page_is_self_contained(report):
    page = report.to_html()
    assert page.count("data:image/png;base64,") == 13
    for reference in ("http://", "https://", 'src="/', "<link", "@import"):
        assert reference not in page
    shown = html.unescape(page).replace("\N{NO-BREAK SPACE}", " ")
    for sentence in report.findings:
        assert sentence in shown


def test_findings_carry_the_numbers(report):
    text = " ".join(report.findings)
    ratio = report.layers["exchange_asymmetry_relu_ratio"]
    assert f"lowest in layer {ratio.idxmin()} ({ratio.min():.0%})".replace("%", " %") in text
    assert f"highest in layer {ratio.idxmax()} ({ratio.max():.0%})".replace("%", " %") in text
    assert "288 neurons" in text
    assert f"{report.layers['query_norm_median'].max():.3g}" in text


def test_a_figure_that_fails_costs_no_data(report, tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(gp.figures, "class_bars", fail)
    troubles = report.save(tmp_path / "out")
    assert troubles == ["class_bars: the figure could not be drawn: RuntimeError: no fonts"]
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == FILES
    assert not list((tmp_path / "out/figures").glob("class_bars.*"))
    assert "no fonts" in (tmp_path / "out/report.html").read_text()


def test_nothing_to_plot_is_a_message(report, tmp_path):
    layers = report.layers.copy()
    layers[[name for name in layers if name.startswith("exchange_asymmetry")]] = np.nan
    blank = gp.Report(layers, report.neurons, report.classes, report.provenance)
    assert blank.save(tmp_path) == []
    page = (tmp_path / "report.html").read_text()
    assert "every value of exchange_asymmetry is missing" in page
    assert not (tmp_path / "figures/profile_exchange_asymmetry.png").exists()


def test_a_failed_write_leaves_what_was_there(report, tmp_path, monkeypatch):
    report.save(tmp_path, figures=False)
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}

    def full(self, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.raises(CannotWrite, match="No space left"):
        report.save(tmp_path, figures=False)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before


def test_an_interrupted_write_leaves_no_half_file(tmp_path):
    def interrupted(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report_module.write_atomically(tmp_path / "whole.txt", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_refused(report, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CannotWrite, match="this is a file"):
        report.save(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_what_is_no_report_is_called_what_it_is(report, tmp_path):
    with pytest.raises(NoReport, match=r"smol: there is no such directory\. Check the spelling"):
        gp.load_report(tmp_path / "smol")
    (tmp_path / "file").write_text("text")
    with pytest.raises(NoReport, match="file: this is a file, not the directory of a report"):
        gp.load_report(tmp_path / "file")


def test_a_report_is_no_model(report, tmp_path):
    """Its directory, given where a model is wanted, says which model it is of."""
    report.save(tmp_path / "out", figures=False)
    with pytest.raises(NoWeights, match="these are results of glu-probe, not a model") as caught:
        gp.open_checkpoint(tmp_path / "out")
    assert caught.value.hint == f"Give the model: {report.provenance['ref']}"
    gp.compare(report, report, names=["a", "b"]).save(tmp_path / "compared", figures=False)
    with pytest.raises(NoWeights) as caught:
        gp.open_checkpoint(tmp_path / "compared")
    assert caught.value.hint == f"Give the model: {report.provenance['ref']}"
    (tmp_path / "out" / "provenance.json").write_text("{}")
    with pytest.raises(NoWeights, match="Give the model that they are of"):
        gp.open_checkpoint(tmp_path / "out")


def test_an_incomplete_report_is_refused(report, tmp_path):
    with pytest.raises(NoReport, match="glu-probe report"):
        gp.load_report(tmp_path)
    report.save(tmp_path, figures=False)
    os.remove(tmp_path / "neurons.parquet")
    with pytest.raises(NoReport, match=r"neurons\.parquet"):
        gp.load_report(tmp_path)


def test_names_from_files_are_escaped(report):
    hostile = gp.Report(
        report.layers, report.neurons, report.classes,
        report.provenance | {"model": "<script>alert(1)</script>", "notes": ["<img src=x>"]},
    )  # fmt: skip
    page = hostile.to_html()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<img src=x>" not in page


def test_unknown_gauge_of_figures_is_an_error_of_ours(report):
    with pytest.raises(BadOption):
        gp.figures.layer_profile(report.layers, "no_such_measure")


@pytest.mark.parametrize("name", ["007", "2024", "1e5", "NA", "True"])
def test_names_that_look_like_numbers_stay_names(name, tmp_path):
    report = gp.probe(write_llama(tmp_path / name, layers=2), samples=2)
    report.save(tmp_path / "out", figures=False)
    loaded = gp.load_report(tmp_path / "out")
    assert loaded.classes["model"].unique().tolist() == [name]
    assert loaded.layers["model"].unique().tolist() == [name]


def test_findings_of_one_layer_and_of_one_sign(report):
    single = gp.Report(report.layers.head(1), report.neurons[report.neurons["layer"] == 0], report.classes, {})
    text = " ".join(single.findings)
    assert "most in" not in text
    assert "nan" not in text
    upward = report.layers.assign(cos_kv_mean=np.linspace(0.1, 0.2, len(report.layers)))
    text = " ".join(gp.Report(upward, report.neurons, report.classes, {}).findings)
    assert "In every layer neurons write along what their up branch reads" in text
    assert "against" not in text
