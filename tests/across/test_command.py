"""`glu-probe compare`."""

from __future__ import annotations

import json

import pytest

import glu_probe as gp
from glu_probe.across.comparison import Comparison

from ..support import write_llama


@pytest.fixture
def models(tmp_path):
    return [write_llama(tmp_path / name, layers=2, seed=seed) for seed, name in enumerate(("base", "tuned"))]


def test_two_models(run, models, tmp_path):
    out = tmp_path / "out"
    code, text, err = run("compare", *models, "-o", out, "--samples", 8, "--seed", 3, "--layers", "0:1")
    assert code == 0
    assert text.startswith("base (1 layer, silu, stored as F32) is the base, beside it tuned")
    assert f"wrote {out / 'compare.html'}" in text
    assert err == ""
    assert {"layers.csv", "differences.csv", "mlps.csv", "compare.html", "figures", "provenance.json"} <= {
        path.name for path in out.iterdir()
    }
    facts = json.loads((out / "provenance.json").read_text())
    assert facts["command"][:2] == ["glu-probe", *facts["command"][1:2]]
    assert facts["seed"] == 3
    assert {path.suffix for path in (out / "figures").iterdir()} == {".png", ".svg"}


def test_plot_draws_a_comparison_again(run, models, tmp_path):
    out = tmp_path / "out"
    run("compare", *models, "-o", out, "--samples", 8, "--layers", "0:1", "--no-neurons")
    drawn = {path.relative_to(out): path.read_bytes() for path in (out / "compare.html", *(out / "figures").iterdir())}
    for name in drawn:
        (out / name).unlink()
    code, text, err = run("plot", out)
    assert (code, text.strip(), err) == (0, f"wrote {out / 'compare.html'}", "")
    assert {name: (out / name).read_bytes() for name in drawn} == drawn
    assert not (out / "report.html").exists()
    (out / "mlps.parquet").unlink()
    code, text, err = run("plot", out)
    assert (code, text) == (2, "")
    assert "no complete comparison here (no mlps.parquet)" in err


def test_json_and_saved_reports(run, models, tmp_path):
    for path in models:
        gp.probe(path, samples=8).save(tmp_path / f"{path.name}-report", figures=False)
    places = [tmp_path / f"{path.name}-report" for path in models]
    code, text, err = run("compare", *places, "-o", tmp_path / "out", "--json", "--no-figures")
    assert code == 0
    result = json.loads(text)
    assert result["directory"] == str(tmp_path / "out")
    assert [model["name"] for model in result["provenance"]["models"]] == ["base", "tuned"]
    assert "saved report only" in err
    assert not (tmp_path / "out" / "compare.html").exists()


def test_layers_are_chosen_of_saved_reports_too(run, models, tmp_path):
    places = [tmp_path / f"{path.name}-report" for path in models]
    for path, place in zip(models, places, strict=True):
        gp.probe(path, samples=8).save(place, figures=False)
    common = ("-o", tmp_path / "out", "--json", "--no-figures")
    code, text, _ = run("compare", *places, *common, "--layers", "1:")
    assert code == 0
    assert [model["layers"] for model in json.loads(text)["provenance"]["models"]] == [[1], [1]]
    whole, part = gp.compare(*places), Comparison.load(tmp_path / "out")
    assert part.layers["layer"].tolist() == [1, 1]
    assert part.layers["relative_depth"].tolist() == [1.0, 1.0]
    assert {*whole.differences["layer"]} == {0, 1}
    wanted = whole.differences[whole.differences["layer"] == 1].reset_index(drop=True)
    assert part.differences["difference"].tolist() == pytest.approx(wanted["difference"].tolist(), nan_ok=True)
    for sources in (places, [models[0], places[1]], [places[0], models[1]]):
        code, _, err = run("compare", *sources, "-o", tmp_path / "other", "--layers", "50")
        assert (code, "error: BadOption: base: there is no layer 50" in err) == (2, True), err


@pytest.mark.parametrize("option", [["--seed", 3], ["--samples", 8], ["--exact"], ["--no-fold-norm"]])
def test_options_of_measuring_are_refused_where_nothing_is_measured(run, models, tmp_path, option):
    place = tmp_path / "report"
    gp.probe(models[0], samples=8).save(place, figures=False)
    code, _, err = run("compare", place, place, "-o", tmp_path / "out", *option)
    assert code == 2
    assert "given, but there is no model to" in err
    assert not (tmp_path / "out").exists()
    assert run("compare", place, models[1], "-o", tmp_path / "out", "--no-figures", "--no-rounding", *option)[0] == 0


def test_options_reach_the_models(run, models, tmp_path):
    done = run("compare", *models, "-o", tmp_path / "out", "--samples", 8, "--no-fold-norm", "--no-rounding", "--no-neurons",
               "--align", "depth", "--no-figures")  # fmt: skip
    assert done[0] == 0
    facts = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert [model["options"]["fold_norm"] for model in facts["models"]] == [False, False]
    assert (facts["align"], facts["rounding"], facts["neurons"]) == ("depth", False, False)


@pytest.mark.parametrize(("arguments", "words"), [
    (["{base}", "-o", "{out}"], "BadOption: 1 given"),
    (["{base}", "{base}/nothing", "-o", "{out}"], "PathNotFound"),
    (["{base}", "{tuned}", "-o", "{out}", "--align", "sideways"], "align is 'sideways'"),
    (["{base}", "{tuned}", "-o", "{out}", "--layers", "9"], "no layer"),
])  # fmt: skip
def test_wrong_input_is_one_line_and_leaves_nothing(run, models, tmp_path, arguments, words):
    places = {"base": models[0], "tuned": models[1], "out": tmp_path / "out"}
    code, text, err = run("compare", *(argument.format(**places) for argument in arguments))
    assert code == 2
    assert text == ""
    assert words in err
    assert len(err.strip().splitlines()) <= 2
    assert not (tmp_path / "out").exists()
