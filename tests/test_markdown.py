"""A report as Markdown: sentences, a table that stays small, a line that says where it comes from."""

from __future__ import annotations

import numpy as np
import pytest

import glu_probe as gp
from glu_probe.markdown import bin_width, binned

from .page.reports import mixture
from .support import write_llama


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return gp.probe(write_llama(tmp_path_factory.mktemp("markdown") / "a|b_c*d"))


def table(text: str) -> list[list[str]]:
    """Cells of the table, heads first, without the rule."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.replace("\\|", "¦").strip("|").split("|")] for line in lines]
    assert {len(row) for row in cells} == {len(cells[0])}
    assert set("".join(cells[1])) <= {"-", ":"}
    return [cells[0], *cells[2:]]


def deepened(report, count: int):
    """The same model with so many layers."""
    layers = report.layers.iloc[np.arange(count) % len(report.layers)].reset_index(drop=True).assign(layer=range(count))
    return gp.Report(layers, report.neurons, report.classes, report.provenance)


def test_sentences_table_and_provenance(report):
    text = report.to_markdown()
    bullets = [line for line in text.splitlines() if line.startswith("- ")]
    assert 4 <= len(bullets) <= 7
    assert bullets[0].startswith("- On isotropic Gaussian input the model is ")
    assert "glu-probe activations MODEL --text FILE" in bullets[1]
    head, *rows = table(text)
    assert head[:3] == ["layers", "neurons", "relative to ReLU"]
    assert [row[0] for row in rows] == [str(layer) for layer in range(12)]
    for row, value in zip(rows, report.layers["cos_kv_mean"], strict=True):
        assert float(row[head.index("cos(k, v)")]) == pytest.approx(value, abs=5e-4)
        assert row[head.index("cos(k, v)")] != "-0.000"
    last = text.splitlines()[-1]
    for words in (
        "by glu-probe",
        "model.safetensors",
        "activation: silu (config hidden\\_act)",
        "spectra: exact",
        "folded",
    ):
        assert words in last
    assert "a\\|b\\_c\\*d" in last


@pytest.mark.parametrize("count", [1, 2, 12, 18, 20, 21, 30, 61, 80, 126])
def test_the_table_has_about_twenty_rows_and_every_layer_once(report, count):
    layers = deepened(report, count).layers
    rows = binned(layers, bin_width(layers))
    assert len(rows) <= 20
    assert len(rows) > min(count - 1, 10)
    spans = [list(map(int, text.split("–"))) for text in rows["layers"]]
    covered = [layer for span in spans for layer in range(span[0], span[-1] + 1)]
    assert covered == list(range(count))
    assert spans[0] == [0]
    assert spans[-1] == [count - 1]
    assert sum(int(text.replace(",", "")) for text in rows["neurons"]) == layers["n_neurons"].sum()


def test_rows_of_several_layers_are_means_weighted_by_neurons(report):
    layers = deepened(report, 30).layers
    layers["n_neurons"] = np.arange(1, 31)
    layers.loc[4, "cos_kv_mean"] = np.nan
    row = binned(layers, 4).iloc[1]
    assert row["layers"] == "1–4"
    mean = np.average(layers["cos_kv_mean"][1:4], weights=[2, 3, 4])
    assert float(row["cos(k, v)"]) == pytest.approx(mean, abs=5e-4)


def test_missing_values_and_columns(report):
    layers = report.layers.copy()
    layers.loc[3, layers.select_dtypes("floating").columns] = np.nan
    layers.loc[3, ["group", "no_mlp", "n_neurons"]] = ["none", True, 0]
    layers["exchange_asymmetry_relu_ratio"] = np.nan
    head, *rows = table(gp.Report(layers, report.neurons, report.classes, report.provenance).to_markdown())
    assert "relative to ReLU" not in head
    assert "on text" not in head
    assert "group" not in head
    assert [row[0] for row in rows] == [str(layer) for layer in range(12)]
    assert rows[3][2:] == ["–"] * (len(head) - 2)


def test_experts_have_rows_of_their_own(tmp_path):
    head, *rows = table(mixture(tmp_path).to_markdown())
    assert head[1] == "group"
    assert [row[1] for row in rows] == ["dense", *["routed"] * 4, *["shared"] * 4]


def test_notes_are_told(report):
    noted = report.provenance | {"notes": ["the norm is a guess"]}
    text = gp.Report(report.layers, report.neurons, report.classes, noted).to_markdown()
    assert "Note: the norm is a guess." in text
