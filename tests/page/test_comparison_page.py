"""The page of a comparison: sentences, pictures, tables that sort; one file, whatever the number of models."""

from __future__ import annotations

import html

import numpy as np
import pandas as pd
import pytest

import glu_probe as gp
from glu_probe import figures
from glu_probe.across.comparison import Comparison
from glu_probe.errors import NoReport
from glu_probe.saved_results import kind_of_results

from ..support import write_llama
from .test_browser import BROWSER, in_order, looked_at
from .test_structure import outline


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three revisions of one depth."""
    root = tmp_path_factory.mktemp("models")
    paths = [write_llama(root / f"rev{seed}", seed=seed, layers=4) for seed in (0, 1, 2)]
    return gp.compare(*paths, samples=8, neurons=True)


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    """Where it was saved."""
    directory = tmp_path_factory.mktemp("saved")
    assert run.save(directory) == []
    return directory


@pytest.fixture(scope="module")
def page(saved) -> str:
    return (saved / "compare.html").read_text(encoding="utf-8")


def test_sentences_come_first_then_pictures_then_tables(run, page):
    summary, _, rest = page.partition("<h2>Pictures</h2>")
    pictures, _, rest = rest.partition("<h2>Tables</h2>")
    words = html.unescape(summary).replace("\N{NO-BREAK SPACE}", " ")
    for sentence in run.findings:
        assert f"<li>{sentence}</li>" in words
    assert pictures.count("<figcaption>") == pictures.count("<img") > 15
    assert "<table" not in summary + pictures
    assert [f'<table id="{name}" class="sortable' in rest for name in ("changes", "moved", "mlps", "measures")] == [
        True
    ] * 4


def test_it_is_whole_and_small(saved, page):
    found = outline(page)
    assert len({*found.ids}) == len(found.ids)
    names = {path.stem for path in (saved / "figures").glob("*.svg")}
    assert {f"{name}.png" for name in names} == {path.name for path in (saved / "figures").glob("*.png")}
    assert {"profile_exchange_asymmetry", "effects_1", "effects_2", "trajectory_query_norm", "angles_1"} <= names
    assert {"angle_trajectory", "angle_histogram_2"} <= names
    assert len(found.images) == len(names)
    assert len(page) < 3e6
    for reference in ("http://", "https://", 'src="/', "<link", "@import", "url("):
        assert reference not in page


def test_a_row_of_deep_models_stays_small(run):
    """Five of 48 layers, and 96,000 neurons that moved."""
    rng = np.random.default_rng(0)
    names = [f"a-model-with-a-long-name-{index}" for index in range(5)]

    def deepened(frame, models):
        parts = []
        for model in models:
            some = pd.concat([frame[frame["model"] == frame["model"].iloc[-1]]] * 12, ignore_index=True)
            some["layer"] = some["layer"] + 4 * (some.groupby(["layer", *({"measure", "neuron"} & {*some})]).cumcount())
            parts.append(some.assign(model=model))
        return pd.concat(parts, ignore_index=True)

    layers, differences = deepened(run.layers, names), deepened(run.differences, names[1:])
    neurons = pd.concat([deepened(run.neurons, names[1:])] * 21, ignore_index=True)
    neurons["movement"], neurons["rounding"] = rng.lognormal(size=(2, len(neurons)))
    mlps = deepened(run.mlps, names[1:]).assign(rounding=0.1)
    models = [{**run.provenance["models"][0], "name": name} for name in names]
    provenance = {**run.provenance, "models": models, "base": names[0]}
    page = Comparison(
        layers, differences, neurons.assign(base=names[0]), mlps.assign(base=names[0]), provenance
    ).to_html()
    found = outline(page)
    assert {"effects_4", "movement_4", "angle_trajectory"} <= {*found.ids}
    assert "not drawn" not in page
    assert len(page) < 3e6


def test_the_same_comparison_gives_the_same_files_also_when_read_again(saved, tmp_path):
    Comparison.load(saved).draw(tmp_path)
    for path in [saved / "compare.html", *(saved / "figures").iterdir()]:
        assert path.read_bytes() == (tmp_path / path.relative_to(saved)).read_bytes(), path.name


def test_a_figure_that_fails_does_not_cost_the_data(run, tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise RuntimeError("no room")

    monkeypatch.setattr(figures, "difference_heatmap", fail)
    troubles = run.save(tmp_path)
    assert len(troubles) == 2
    assert "no room" in troubles[0]
    assert (tmp_path / "differences.csv").exists()
    assert (tmp_path / "figures" / "profile_cos_kv.svg").exists()
    assert "could not be drawn" in (tmp_path / "compare.html").read_text()


def test_what_is_absent_is_named(saved, tmp_path):
    assert kind_of_results(saved) == "comparison"
    assert kind_of_results(tmp_path) is None
    with pytest.raises(NoReport, match=r"no complete comparison here \(no layers\.parquet\)"):
        Comparison.load(tmp_path)
    (tmp_path / "provenance.json").write_text('{"model": "a report"}')
    assert kind_of_results(tmp_path) == "report"
    with pytest.raises(NoReport, match="this directory holds a report, not a comparison"):
        Comparison.load(tmp_path)
    with pytest.raises(NoReport, match="this directory holds a comparison, not a report"):
        gp.load_report(saved)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_its_tables_sort_in_a_browser(run, page, tmp_path):
    found = looked_at(page, tmp_path)
    assert found["wide"] == 0
    assert all(natural > 0 for _, natural, _ in found["images"])
    assert {*found["tables"]} == {"changes", "moved", "mlps", "measures"}
    for columns in found["tables"].values():
        for column in columns:
            assert in_order(column["up"], descending=False)
            assert in_order(column["down"], descending=True)
    assert found["tables"]["moved"][0]["rows"] == 20
    assert found["tables"]["mlps"][0]["rows"] == len(run.mlps)
