"""The sentences a report begins with, on frames whose numbers are known."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import glu_probe as gp
from glu_probe.headlines import (
    alignment,
    along_the_depth,
    headlines,
    oddities,
    of_experts,
    of_which_input,
    regime,
    standing_apart,
)
from glu_probe.phrases import counted, percent
from glu_probe.testing import write_tiny_checkpoint
from glu_probe.text_headlines import departures, on_text_alone

from .support import write_llama

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return gp.probe(write_llama(tmp_path_factory.mktemp("headlines") / "llama"))


def layer_frame(ratio, **columns) -> pd.DataFrame:
    """Rows of layers 0, 1, ... of 10 neurons each, unremarkable but for what is given."""
    count = len(ratio)
    base = {
        "model": "m", "tower": "text", "layer": range(count), "group": "dense", "no_mlp": False, "n_neurons": 10,
        "query_norm_median": 1.0, "exchange_asymmetry_mean": 0.1, "abs_cos_qk_mean": 0.1, "cos_kv_mean": 0.0,
        "abs_cos_qk_null_mean": 0.05, "abs_cos_qk_effect": 0.0, "abs_cos_qk_null_isotropic_mean": 0.04,
        "branch_overlap": 0.5, "output_energy_top_share": 0.1, "note": "", "n_dead": 0, "n_padded": 0,
        "n_non_finite": 0, "n_duplicated": 0,
    }  # fmt: skip
    return pd.DataFrame({"exchange_asymmetry_relu_ratio": ratio} | base | columns, index=range(count))


NEURONS = pd.DataFrame({
    "tower": "text", "layer": np.repeat(np.arange(9), 2), "expert": pd.array([None] * 18, dtype="string"),
    "neuron": [0, 1] * 9, "exchange_asymmetry": 0.1, "output_energy": [1.0, 3.0] * 9, "flag": "",
})  # fmt: skip


@pytest.mark.parametrize(("ratio", "words"), [
    (0.1, "near the bilinear end: on a scale from bilinear (0 %) to ReGLU (100 %) it stands at 10 %"),
    (0.5, "between the two ends: on a scale from bilinear (0 %) to ReGLU (100 %) it stands at 50 %"),
    (0.9, "near the ReLU end: on a scale from bilinear (0 %) to ReGLU (100 %) it stands at 90 %"),
])  # fmt: skip
def test_regime(ratio, words):
    frame = layer_frame([ratio] * 6, query_norm_median=[0.5, 1, 1, 1, 1, 2])
    text = regime(frame, NEURONS)
    assert words in text
    assert "changes the sign of 10 % of a neuron's energy" in text
    assert "a scale |q| of 0.5 to 2 (medians of layers)" in text


def test_regime_weighs_rows_by_their_neurons():
    assert "stands at 27 %" in regime(layer_frame([0.2, 0.9], n_neurons=[90, 10]), NEURONS)


def test_regime_without_a_function_says_why():
    missing = {"exchange_asymmetry_mean": np.nan, "note": "the activation is not known"}
    text = regime(layer_frame([np.nan] * 3, **missing), NEURONS)
    assert text == (
        "Whether the layers are closer to bilinear or to ReLU cannot be told from these weights: the activation is not "
        "known; their gate rows have norms of 1 (medians of layers)."
    )


def test_a_place_is_that_on_gaussian_input_and_text_can_be_measured():
    text = of_which_input(layer_frame([0.9] * 3))
    assert text == (
        "The scale of that input is what the model's own norm gives; on text another place is to be expected, as the gates' "
        "pre-activations can be much smaller there, in Gemma 3 270M a twentieth of that (analyses/gaussian_or_text.py): "
        "glu-probe activations MODEL --text FILE measures it."
    )
    assert text.count(".") == 2  # one sentence, and the name of a file


def test_a_twentieth_is_what_the_analysis_found():
    found = pd.read_csv(ROOT / "analyses/results/gaussian_or_text/summary.csv")
    gemma = found[(found["model"] == "gemma-3-270m") & found["figure"].str.startswith("scale of the gate on text over")]
    assert gemma["value"].item() == pytest.approx(1 / 20, rel=0.15)


def test_routed_experts_are_not_sent_to_a_command_that_refuses_them():
    routed = of_which_input(layer_frame([0.9] * 3, group="routed"))
    assert routed.endswith("(analyses/gaussian_or_text.py): for routed experts this cannot be measured here.")
    some = of_which_input(layer_frame([0.9] * 2, group=["routed", "dense"]))
    assert some.endswith("glu-probe activations MODEL --text FILE measures it.")


def text_frame(text, **columns) -> pd.DataFrame:
    """Rows as of `layer_frame`, measured on a text too, where Gaussian input predicts 0.1 and |q| is 4."""
    base = {
        "exchange_asymmetry_text_mean": text, "exchange_asymmetry_text_mean_se": 0.01, "gate_std_text_median": 0.2,
        "query_norm_median": 4.0,
    }  # fmt: skip
    return layer_frame([0.9] * len(text), **(base | columns))


ON_TEXT = NEURONS.assign(exchange_asymmetry=np.arange(18.0), exchange_asymmetry_text=-np.arange(18.0))


def test_a_place_on_text_stands_in_the_first_sentence():
    frame = text_frame([0.1, 0.1, 0.4], gate_std_text_median=[0.1, 0.2, 0.4], n_neurons=[20, 10, 10])
    assert regime(frame, NEURONS) == (
        "On isotropic Gaussian input the model is near the ReLU end: on a scale from bilinear (0 %) to ReGLU (100 %) it stands "
        "at 90 %; on the text that was run, the gates' pre-activations have 0.05 times that input's standard deviation, 0.1 to "
        "0.4 where |q| is 4 (medians of layers; far below 1 a gate is linear, far above 1 a ReLU). Exchanging gate and up "
        "changes the sign of 10 % of a neuron's energy on Gaussian input and of 18 % on text (means of layers: 10 %, and 10 % "
        "to 40 %)."
    )
    assert of_which_input(frame) == ""  # nothing is left to be measured


def test_layers_that_were_not_listened_to_have_no_place_on_text():
    some = regime(text_frame([np.nan, 0.2, np.nan], gate_std_text_median=[np.nan, 0.8, np.nan]), NEURONS)
    assert "have 0.2 times that input's standard deviation, 0.8 where" in some
    assert "of 20 % on text (means of layers: 10 %, and 20 %)" in some
    for none in (text_frame([np.nan] * 3), layer_frame([0.9])):
        assert regime(none, NEURONS).startswith(
            "On isotropic Gaussian input the model is near the ReLU end: on a scale from bilinear (0 %) to ReGLU (100 %) it stands at 90 %. Exch"
        )
        assert of_which_input(none)
        assert on_text_alone(none) == departures(none, ON_TEXT) == ""


def test_a_function_that_is_known_on_text_alone():
    frame = text_frame(
        [0.2, 0.3],
        exchange_asymmetry_mean=np.nan,
        exchange_asymmetry_relu_ratio=np.nan,
        note="no norm",
        n_neurons=[30, 10],
    )
    assert regime(frame, NEURONS) == (
        "Whether the layers are closer to bilinear or to ReLU cannot be told from these weights: no norm; their gate rows have "
        "norms of 4 (medians of layers). On the text that was run, exchanging gate and up changes the sign of 22 % of a "
        "neuron's energy (means of layers: 20 % to 30 %), and the gates' pre-activations have a standard deviation of 0.2 "
        "(medians of layers)."
    )
    assert departures(frame, ON_TEXT) == ""


def test_layers_that_part_from_the_prediction_are_named_in_both_directions():
    text = departures(text_frame([0.3, 0.13, 0.2, 0.11, 0.09, 0.15, 0.06, 0.02]), ON_TEXT)
    assert text == (
        "Text parts from what Gaussian input predicts (by more than 2 standard errors): 4 of 8 layers are more asymmetric "
        "than that, most of all layer 0 (0.300 on text, 0.100 predicted; gates at 0.2 where |q| is 4), layer 2 (0.200 on text, "
        "0.100 predicted; gates at 0.2 where |q| is 4) and layer 5 (0.150 on text, 0.100 predicted; gates at 0.2 where |q| is "
        "4); 2 of 8 layers are less asymmetric than that, most of all layer 7 (0.020 on text, 0.100 predicted; gates at 0.2 "
        "where |q| is 4) and layer 6 (0.060 on text, 0.100 predicted; gates at 0.2 where |q| is 4). Over neurons, the two have a "
        "rank correlation of -1.00. Standard errors of layers on text: at most 0.01."
    )


def test_reports_of_before_have_no_scale_on_text():
    frame = text_frame([0.3, 0.1]).drop(columns="gate_std_text_median")
    assert "stands at 90 %. Exchanging gate and up" in regime(frame, NEURONS)
    assert on_text_alone(frame).endswith("of a neuron's energy (means of layers: 10 % to 30 %).")
    assert "most of all layer 0 (0.300 on text, 0.100 predicted); 0 of 2" in departures(frame, ON_TEXT)


def test_departures_in_one_direction_or_none():
    assert (
        "0 of 2 layers are more asymmetric than that; 1 of 2 layers is less asymmetric than that, most of all layer 1 "
        in (departures(text_frame([0.1, 0.01]), ON_TEXT))
    )
    none = departures(text_frame([0.11, 0.09]), ON_TEXT)
    assert none.startswith(
        "None of 2 layers parts on text from what Gaussian input predicts by more than 2 standard errors."
    )


def test_departures_on_one_sequence_have_no_errors():
    text = departures(text_frame([0.11, 0.09], exchange_asymmetry_text_mean_se=np.nan), ON_TEXT)
    assert "(by errors that a text this short does not tell): 1 of 2 layers is more" in text
    assert "Standard errors" not in text


def test_the_depth_on_text_stands_beside_that_of_the_weights():
    text = along_the_depth(text_frame(np.linspace(0.3, 0.02, 9)))
    assert text.startswith("Along the depth, on Gaussian input, the place between bilinear and ReLU (90 %), the gate")
    assert (
        "On text, the mean exchange asymmetry falls (rank correlation with depth -1.00): 0.265 in layers 0 to 2" in text
    )


def test_a_place_that_cannot_be_told_is_on_no_input():
    assert of_which_input(layer_frame([np.nan] * 3, exchange_asymmetry_mean=np.nan)) == ""


def test_depth_of_a_step():
    text = along_the_depth(layer_frame([0.2, 0.21, 0.22, 0.23, 0.63, 0.64, 0.65, 0.66, 0.67]))
    assert "rises (rank correlation with depth +1.00)" in text
    assert "21 % in layers 0 to 2, 50 % in the middle, 66 % in layers 6 to 8" in text
    assert "changes most from layer 3 (23 %) to layer 4 (63 %)" in text
    assert "lowest in layer 0 (20 %), highest in layer 8 (67 %)" in text


@pytest.mark.parametrize(("ratio", "words"), [
    (np.linspace(0.9, 0.1, 9), "falls (rank correlation with depth -1.00)"),
    ([0.1, 0.5, 0.1, 0.5, 0.1, 0.5, 0.1, 0.5, 0.1], "no steady direction (rank correlation with depth"),
    ([0.3] * 8 + [0.32], "Along the depth, the place between bilinear and ReLU (30 % to 32 %), the gate scale |q| (1) and the"),
    ([0.3, 0.5], "goes from 30 % in layer 0 to 50 % in layer 1"),
])  # fmt: skip
def test_directions_of_the_depth(ratio, words):
    assert words in along_the_depth(layer_frame(ratio))


def test_depth_speaks_of_what_is_there():
    assert along_the_depth(layer_frame([0.3])) == ""
    frame = layer_frame([np.nan] * 9, exchange_asymmetry_mean=np.nan, abs_cos_qk_mean=np.linspace(0.1, 0.2, 9))
    told = along_the_depth(frame)
    assert "Along the depth, the gate scale |q| (1) hardly changes. The alignment |cos(q, k)| rises" in told
    gap = layer_frame([0.1, np.nan, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    assert "changes most from layer 0 (10 %) to layer 2 (30 %)" in along_the_depth(gap)


def test_depth_of_a_mixture_weighs_its_groups():
    dense, shared = layer_frame([0.2] * 6, n_neurons=90), layer_frame([1.0] * 6, n_neurons=10, group="shared")
    assert (
        "the place between bilinear and ReLU (28 %), the gate scale |q| (1) and the alignment |cos(q, k)| (0.100) hardly change."
        in along_the_depth(pd.concat([dense, shared], ignore_index=True))
    )


def test_a_layer_that_stands_apart_is_named():
    ratio = [0.50, 0.51, 0.49, 0.50, 0.52, 0.48, 0.50, 0.51, 0.95]
    text = standing_apart(layer_frame(ratio), NEURONS)
    assert "1 of 9 layers stands apart, by more than 3.5 robust standard deviations: layer 8 " in text
    assert "(asymmetry relative to ReLU 95 %, median 50 %)" in text
    ratio[-1] = 0.53
    text = standing_apart(layer_frame(ratio), NEURONS)
    assert (
        "No layer stands far apart: the farthest is layer 8 (asymmetry relative to ReLU 53 %, median 50 %), 2.0" in text
    )


def test_every_layer_that_stands_apart_is_named():
    ratio = [0.50, 0.51, 0.49, 0.50, 0.52, 0.48, 0.50, 0.51, 0.50, 0.49, 0.51, 0.95, 0.15, 0.9, 0.04, 0.8]
    text = standing_apart(layer_frame(ratio, output_energy_top_share=np.nan), NEURONS)
    assert text.startswith("5 of 16 layers stand apart")
    assert re.search(r": layer 14 \(.*?\), layer 11 \(.*?\), layer 13 \(.*?\); also layers 12 and 15\.$", text)


def test_few_layers_have_none_that_stands_apart():
    assert "apart" not in standing_apart(layer_frame([0.1, 0.9, 0.5]), NEURONS)


def test_a_neuron_that_carries_a_layer_is_named():
    frame = layer_frame([0.5] * 9, output_energy_top_share=[0.1] * 4 + [0.75] + [0.1] * 4)
    assert "more than half of the output energy in layer 4 (neuron 1, 75 %)" in standing_apart(frame, NEURONS)
    every = standing_apart(layer_frame([0.5] * 9, output_energy_top_share=0.75), NEURONS)
    assert every.count("(neuron 1, 75 %)") == 9
    frame["output_energy_top_share"] = 0.2
    assert "No single neuron carries more than 20 % of a layer's output energy" in standing_apart(frame, NEURONS)
    frame["output_energy_top_share"] = np.nan
    assert "neuron" not in standing_apart(frame, NEURONS)


def test_a_carrier_is_looked_for_in_its_own_group():
    frame = pd.concat(
        [layer_frame([0.5], group="routed", output_energy_top_share=0.9), layer_frame([0.5], group="shared")]
    )
    neurons = pd.DataFrame({
        "tower": "text", "layer": 0, "expert": pd.array(["0", "1", "shared"], dtype="string"), "neuron": [0, 5, 7],
        "output_energy": [1.0, 9.0, 100.0],
    })  # fmt: skip
    text = standing_apart(frame.reset_index(drop=True), neurons)
    assert "in layer 0 (routed) (expert 1, neuron 5, 90 %)" in text


def test_experts():
    means = {"0": 0.1, "1": 0.11, "2": 0.3, "shared": 0.9}
    neurons = pd.DataFrame([
        {"tower": "text", "layer": layer, "expert": expert, "exchange_asymmetry": value + layer * 0.01 + sign}
        for layer in (0, 1) for expert, value in means.items() for sign in (-0.01, 0.01) if (layer, expert) != (1, "2")
    ]).astype({"expert": "string"})  # fmt: skip
    text = of_experts(neurons)
    assert "The 5 routed experts differ within a layer by 0.105" in text
    assert "at most 0.200" in text
    assert "expert 2 of layer 0 (0.300, median 0.110)" in text
    assert of_experts(NEURONS) == ""


def test_alignment():
    text = alignment(layer_frame([0.5] * 4, abs_cos_qk_effect=[0.1, 0.3, 0.5, np.nan]))
    assert "|cos| of 0.100 on average, mismatched rows of the same layers 0.050, isotropic ones 0.040" in text
    assert "in 2 of 3 layers" in text


def test_flags_are_counted_once_a_neuron():
    frame = layer_frame([0.5] * 2, n_neurons=9, n_dead=[2, 0], n_padded=[1, 0], n_duplicated=[2, 0])
    neurons = NEURONS.assign(
        flag=["zero_gate", "zero_gate,zero_up,zero_down,padded", "duplicated", "duplicated"] + [""] * 14
    )
    assert oddities(frame, neurons) == (
        "Of 18 neurons, 4 are flagged (22.22 %): 2 dead (a row of zeros), 1 of these padding, 2 that repeat another."
    )
    assert oddities(layer_frame([0.5]), NEURONS) == "Of 10 neurons, none is dead, padded, duplicated or not finite."


def test_headlines_of_a_model_are_about_five_sentences_with_numbers(report):
    found = headlines(report.layers, report.neurons)
    assert 5 <= len(found) <= 7
    assert found[0].startswith("On isotropic Gaussian input the model is ")
    assert found[1].startswith("The scale of that input is what the model's own norm gives; on text")
    for sentence in found:
        assert re.search(r"\d", sentence)
        assert "nan" not in sentence
        assert sentence.endswith(".")


@pytest.mark.parametrize("family", ["olmo2", "gpt_oss", "deepseek_v3", "gemma3", "qwen3_moe"])
def test_headlines_of_models_of_every_kind(family, tmp_path):
    write_tiny_checkpoint(family, tmp_path, layers=7)
    report = gp.probe(tmp_path, samples=4)
    found = report.findings
    assert len(found) >= 4
    assert all(re.search(r"\d", sentence) and "nan" not in sentence for sentence in found), found
    assert any("routed experts" in sentence for sentence in found) == (report.layers["group"] == "routed").any()


def test_no_gated_layer(report):
    layers = report.layers.assign(no_mlp=True)
    assert headlines(layers, report.neurons) == ["None of the 12 layers of this selection has a gated MLP."]


@pytest.mark.parametrize(("value", "form", "words"), [
    (-1e-9, ".0%", "0 %"), (-0.004, ".0%", "0 %"), (-0.004, ".1%", "-0.4 %"), (0.25, ".0%", "25 %"), (-1e-9, ".2f", "0.00"),
])  # fmt: skip
def test_what_rounds_to_nothing_has_no_sign(value, form, words):
    assert percent(value, form) == words


def test_one_is_no_plural():
    assert [counted(number, "layer") for number in (0, 1, 2, 1000)] == [
        "0 layers",
        "1 layer",
        "2 layers",
        "1,000 layers",
    ]
