"""The card of a neuron: its parts, what is missing from them, and how it looks."""

from __future__ import annotations

import json
import unicodedata

import numpy as np
import pandas as pd
import pytest

import glu_probe as gp
from glu_probe.card import NeuronCard
from glu_probe.errors import BadOption, NoReport
from glu_probe.measures.registry import NEURON_MEASURES
from glu_probe.text.contexts import QUADRANTS

from .support import llama_config, llama_tensors, write_checkpoint
from .text import tiny_models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.save(tmp_path_factory.mktemp("card") / "tiny", "llama")


def report_with(*neurons: int, model: str = "tiny", layer: int = 1) -> gp.Report:
    """A report with contexts of these neurons and nothing else."""
    rows = [
        {"model": model, "tower": "text", "layer": layer, "expert": None, "neuron": neuron, "quadrant": quadrant,
         "rank": rank, "value": 3.0 / rank, "sequence": 0, "position": 5, "token": " it's", "window": "so\nit's 漢字 " * 20}
        for neuron in neurons for quadrant in QUADRANTS for rank in (1, 2)
    ]  # fmt: skip
    empty = pd.DataFrame()
    return gp.Report(empty, empty, empty, {"model": model, "notes": []}, pd.DataFrame(rows))


def test_measures_are_those_of_a_report(tiny):
    card = gp.neuron_card(tiny, 1, 7, top=0)
    neurons = gp.probe(tiny, layers=[1]).neurons
    assert card.measures["measure"].tolist() == list(NEURON_MEASURES)
    for row in card.measures.itertuples():
        values = neurons[row.measure].to_numpy(dtype=float)
        assert row.value == pytest.approx(values[7], rel=1e-6)
        assert row.layer_median == pytest.approx(np.median(values), rel=1e-6)
        assert row.percentile == pytest.approx((values < values[7]).mean() * 100)
    assert card.io_class == neurons["io_class"][7]
    assert card.measures.set_index("measure")["gauge"].loc[["query_norm", "key_norm"]].tolist() == [True, False]
    assert (card.model, card.tower, card.layer, card.expert, card.neuron) == ("tiny", "text", 1, None, 7)


def test_every_part_is_there(tiny):
    card = gp.neuron_card(tiny, 1, 7, report=report_with(7, 8), top=4, neighbours=3)
    assert card.missing == {}
    assert len(card.neighbours) == 3 * 3
    assert len(card.tokens) == 3 * 2 * 4
    assert card.contexts["neuron"].tolist() == [7] * 8
    assert len(gp.neuron_card(tiny, 1, 7, top=0, neighbours=0).neighbours) == 0


def test_text_is_100_columns_wide_and_says_everything(tiny):
    card = gp.neuron_card(tiny, 1, 7, report=report_with(7))
    lines = str(card).splitlines()
    assert lines[0] == f"tiny, layer 1, neuron 7: {card.io_class}"
    wide = [sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line) for line in lines]
    assert max(wide) <= 100
    for row in (*card.neighbours.itertuples(),):
        assert f"{row.cosine:+.3f}  neuron {row.neighbour}" in str(card)
    for row in card.tokens.itertuples():
        assert f"{row.cosine:+.3f}  {row.token}" in str(card)
    assert "a < 0, b < 0" in str(card)
    assert r"[ it's]  so\nit's 漢字" in str(card)
    assert f"{card.tokens['null'].iloc[0]:+.3f}  by chance" in str(card)
    assert "key_norm *" in str(card)
    assert "not available" not in str(card)


def test_columns_stand_below_each_other_where_letters_are_wide(tiny):
    card = gp.neuron_card(tiny, 1, 7, top=1)
    card.tokens.loc[card.tokens["factor"] == "query", "token"] = "'ティストティストティストティスト'"
    row = next(line for line in str(card).splitlines() if "ティスト" in line)
    assert "..." in row
    key = f"{card.tokens[card.tokens['factor'] == 'key']['cosine'].iloc[0]:+.3f}"
    before = row[: row.index(key)]
    assert sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in before) == 2 + 31 + 2


def test_html_is_escaped_and_has_the_tables(tiny):
    card = gp.neuron_card(tiny, 1, 7, report=report_with(7))
    card.tokens.loc[0, "token"] = "'<script>'"
    page = card._repr_html_()
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert page.count("<table") == 4
    for name in ("exchange_asymmetry", "Nearest neighbours", "Contexts", "minus_minus"):
        assert name in page


def test_json_holds_everything(tiny):
    card = gp.neuron_card(tiny, 1, 7, report=report_with(7))
    facts = json.loads(json.dumps(card.to_dict(), allow_nan=False))
    assert facts["measures"][0]["value"] == pytest.approx(card.measures["value"][0])
    for name in ("measures", "neighbours", "tokens", "contexts"):
        frame = getattr(card, name)
        assert len(facts[name]) == len(frame)
        assert list(facts[name][0]) == list(frame.columns)
    assert facts["notes"] == card.notes


def test_what_is_missing_is_said(tiny, llama):
    card = gp.neuron_card(llama, 3, 5)
    assert set(card.missing) == {"contexts", *(f"tokens of {factor}" for factor in ("query", "key", "value"))}
    assert "tokens of query, tokens of key: not available because there are no tokenizer files" in str(card)
    assert not len(card.tokens)
    wanted = {
        "the report has those of other neurons": report_with(8),
        "the report has none": gp.Report(pd.DataFrame(), pd.DataFrame(), pd.DataFrame(), {"model": "tiny"}),
        "no report is given": None,
    }
    for words, report in wanted.items():
        card = gp.neuron_card(tiny, 1, 7, report=report, top=0)
        assert words in card.missing["contexts"]
        assert not len(card.contexts)
        assert words in str(card)
    assert report_with(7, layer=2).contexts is not None
    assert "contexts" in gp.neuron_card(tiny, 1, 7, report=report_with(7, layer=2), top=0).missing


def test_odd_neurons(tmp_path):
    tensors = llama_tensors(layers=1)
    stem = "model.layers.0.mlp."
    tensors[f"{stem}gate_proj.weight"][3] = 0.0
    for name in ("gate_proj", "up_proj"):
        tensors[f"{stem}{name}.weight"][6] = tensors[f"{stem}{name}.weight"][5]
    directory = write_checkpoint(tmp_path / "odd", tensors, llama_config(num_hidden_layers=1))
    card = gp.neuron_card(directory, 0, 3)
    assert (card.flags, card.io_class) == (["zero_gate"], None)
    assert "neighbours of query" in card.missing
    assert "no class [zero_gate]" in str(card)
    assert "neighbours of query: not available because its row is zero" in str(card)
    json.dumps(card.to_dict(), allow_nan=False)
    card = gp.neuron_card(directory, 0, 5)
    assert card.flags == ["duplicated"]
    assert card.neighbours[card.neighbours["rank"] == 1].query("factor != 'value'")["neighbour"].tolist() == [6, 6]


def test_experts_and_towers(tmp_path):
    gp.testing.write_tiny_checkpoint("qwen2_moe", tmp_path)
    card = gp.neuron_card(tmp_path, 1, 4, 2, top=0)
    assert "layer 1, expert 2, neuron 4" in str(card)
    assert gp.neuron_card(tmp_path, 1, 4, "shared", top=0).expert == "shared"
    other = gp.neuron_card(tmp_path, 1, 4, 0, top=0)
    assert other.measures["value"][0] != card.measures["value"][0]
    with pytest.raises(BadOption, match="has no expert None"):
        gp.neuron_card(tmp_path, 1, 4)


def test_where_the_function_is_not_known_it_says_why(tmp_path):
    tensors = llama_tensors(layers=1)
    directory = write_checkpoint(tmp_path / "odd", tensors, llama_config(num_hidden_layers=1, model_type="nobody"))
    card = gp.neuron_card(directory, 0, 3)
    assert card.measures.set_index("measure")["value"].isna()["exchange_asymmetry"]
    assert "measures of its function are missing: the activation is not known" in " ".join(str(card).split())


@pytest.mark.parametrize(("arguments", "options", "words"), [
    ((1, 48), {}, "layer 1: there is no neuron 48. It has neurons 0 to 47"),
    ((1, -1), {}, "there is no neuron -1"),
    ((1, True), {}, "there is no neuron True"),
    ((1, 1.5), {}, "there is no neuron 1.5"),
    ((9, 0), {}, "there is no gated MLP in layer 9"),
    ((1, 0, 3), {}, "layer 1 has no expert 3"),
    ((1, 0), {"top": -1}, "top is -1"),
    ((1, 0), {"neighbours": 1.5}, "neighbours is 1.5"),
    ((1, 0), {"report": report_with(0, model="other")}, "the report is of 'other', not of 'tiny'"),
])  # fmt: skip
def test_wrong_input_is_one_clear_error(tiny, arguments, options, words):
    with pytest.raises(BadOption) as caught:
        gp.neuron_card(tiny, *arguments, **options)
    assert words in str(caught.value)


def test_models_and_reports_that_are_none(tiny, tmp_path):
    with pytest.raises(NoReport):
        gp.neuron_card(tiny, 1, 0, report=tmp_path)
    checkpoint = gp.open_checkpoint(tiny)
    with pytest.raises(BadOption, match="a card cannot be made from GatedLayer"):
        gp.neuron_card(checkpoint.layer(0), 1, 0)
    with pytest.raises(BadOption, match="family given for a checkpoint that is already open"):
        gp.neuron_card(checkpoint, 1, 0, family="llama")
    assert isinstance(gp.neuron_card(checkpoint, np.int64(1), np.int64(0), top=0), NeuronCard)
