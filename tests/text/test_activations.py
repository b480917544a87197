"""A run on text, end to end, on tiny models: numbers against plain forward passes, what may change them and what may not."""

from __future__ import annotations

import html
import json

import numpy as np
import pandas as pd
import pytest
import torch

import glu_probe as gp
from glu_probe.errors import BadOption, NoTokenizer, NotRunnable, TextTooShort, TextUnreadable, Unreadable
from glu_probe.measures.registry import (
    MEASURES,
    TEXT_MEASURES,
    TEXT_MEDIANS,
    TEXT_OUTPUT,
    TEXT_SHARED,
    TEXT_STATISTICS,
    TEXT_SUFFIXES,
)
from glu_probe.text import activations
from glu_probe.text.moments import GaugeMoments, NeuronMoments

from .test_moments import by_definition
from .tiny_models import LAYERS, build, save, tokens, words

TEXT = [words(500)]
RUN = {"text": TEXT, "length": 32, "tokens": None}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama") / "llama", "llama")


@pytest.fixture(scope="module")
def report(directory):
    return gp.probe_text(directory, **RUN)


def text_columns(frame: pd.DataFrame) -> list[str]:
    return [name for name in frame if "_text" in name]


def assert_same(
    one: pd.DataFrame, other: pd.DataFrame, *, rtol: float = 1e-5, atol: float = 1e-6, but: tuple = ()
) -> None:
    """The numbers of two frames."""
    assert list(one) == list(other)
    for name in one.select_dtypes("number"):
        if name not in but:
            values = (frame[name].to_numpy(dtype=float) for frame in (one, other))
            np.testing.assert_allclose(*values, rtol=rtol, atol=atol, err_msg=name)


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_position", [False, True])
def test_numbers_are_those_of_plain_forward_passes(directory, first_position):
    """transformers alone, one sequence at a time, and the definitions; the gauge from everything in both."""
    # three sequences, the last one shorter: too few for a part of them to find the gauge
    length, text = 32, [words(60)]
    report = gp.probe_text(directory, text, length=length, tokens=75, first_position=first_position)
    model, ids = build("llama"), tokens()(text[0])["input_ids"][:75]
    branches = {}
    for layer, block in enumerate(model.model.layers):
        for part in ("gate_proj", "up_proj"):
            getattr(block.mlp, part).register_forward_hook(
                lambda module, args, out, key=(layer, part): branches.setdefault(key, []).append(
                    out[0, 0 if first_position else 1 :]
                )
            )
    pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
    assert [len(piece) for piece in pieces] == [32, 32, 11]
    with torch.inference_mode():
        for piece in pieces:
            model(torch.tensor([piece]))
    act = gp.activation("silu")
    for layer in range(LAYERS):
        a, b = (torch.cat(branches[layer, part]).double().numpy() for part in ("gate_proj", "up_proj"))
        expected = by_definition(act, a, b)
        rows = report.neurons[report.neurons["layer"] == layer]
        for name, values in expected.items():
            if name == "energy":
                name, values = "output_energy", values * rows["value_norm"].to_numpy(dtype=float) ** 2
            np.testing.assert_allclose(rows[f"{name}_text"], values, rtol=1e-4, atol=2e-6, err_msg=name)
        for name in TEXT_SHARED:
            difference = rows[f"{name}_text"] - rows[name]
            np.testing.assert_allclose(rows[f"{name}_text_minus_gaussian"], difference, atol=1e-6)
        row = report.layers.iloc[layer]
        for name in TEXT_SHARED:
            mean, weights = rows[f"{name}_text"].astype(float), rows["output_energy_text"].astype(float)
            assert row[f"{name}_text_mean"] == pytest.approx(mean.mean(), rel=1e-5)
            assert row[f"{name}_text_weighted"] == pytest.approx((mean * weights).sum() / weights.sum(), rel=1e-5)
        c = np.sqrt((a * a).mean(0) / (b * b).mean(0)) * np.where((a * b).mean(0) < 0, -1, 1)
        value = model.model.layers[layer].mlp.down_proj.weight.detach().double().numpy().T

        def S(z):
            return act(torch.from_numpy(z)).numpy()

        plain, swapped = (S(a) * b) @ value, (S(b * c) * a / c) @ value
        asymmetry = ((plain - swapped) ** 2).sum() / 2 / ((plain**2).sum() + (swapped**2).sum())
        assert row["exchange_asymmetry_output_text"] == pytest.approx(asymmetry, rel=1e-4)
        assert row["exchange_asymmetry_output_text_minus_gaussian"] == pytest.approx(
            asymmetry - row["exchange_asymmetry_output"], abs=1e-5
        )


@pytest.mark.parametrize("batch", [1, 64, 10**6])
def test_batches_change_nothing(directory, report, monkeypatch, batch):
    """One sequence at a time, a few, and all of one length at once."""
    monkeypatch.setattr(activations, "BATCH_TOKENS", batch)
    other = gp.probe_text(directory, **RUN)
    for frame in ("neurons", "layers"):
        assert_same(getattr(other, frame), getattr(report, frame))


def test_packed_documents_are_the_text_in_one_piece(directory):
    parts = [words(150, seed) for seed in range(3)]
    apart, joined = (gp.probe_text(directory, text, length=32, tokens=None) for text in (parts, ["\n\n".join(parts)]))
    assert apart.provenance["text"]["documents"] == 3
    assert_same(apart.neurons, joined.neurons)


def test_the_same_run_gives_the_same_frames(directory, report):
    again = gp.probe_text(directory, **RUN)
    pd.testing.assert_frame_equal(again.neurons, report.neurons, check_exact=True)
    pd.testing.assert_frame_equal(again.layers, report.layers, check_exact=True)


def test_a_choice_of_layers_changes_no_number(directory, report):
    some = gp.probe_text(directory, layers="1:", **RUN)
    assert some.layers["layer"].tolist() == [1, 2]
    whole = report.neurons[report.neurons["layer"] > 0].reset_index(drop=True)
    assert_same(some.neurons, whole)


def test_errors_shrink_with_the_text(directory, report):
    more = gp.probe_text(directory, [words(4000)], length=32, tokens=None)
    for name in TEXT_SHARED:
        ratio = (more.neurons[f"{name}_text_se"] / report.neurons[f"{name}_text_se"]).median()
        assert 0.2 < ratio < 0.6, name  # eight times the text: 0.35
    assert (more.layers["exchange_asymmetry_text_mean_se"] < report.layers["exchange_asymmetry_text_mean_se"]).all()


def test_tokens_limits_the_text(directory):
    report = gp.probe_text(directory, TEXT, length=32, tokens=100)
    assert report.provenance["text"]["tokens"] == 100
    assert report.provenance["text"]["sequences"] == 4
    assert "the text is 4 sequences long: standard errors on text are rough" in report.provenance["notes"]


@pytest.mark.parametrize(("options", "said"), [
    ({"tokens": 32}, "only 31 positions of 1 sequence can be used, the first of every sequence left out, .* needs 32"),
    ({"tokens": 31, "first_position": True}, "only 31 positions of 1 sequence can be used, and what"),
    ({"tokens": 32, "length": 2}, "only 16 positions of 16 sequences can be used, .* longer sequences lose fewer"),
])  # fmt: skip
def test_what_is_fitted_needs_positions(directory, monkeypatch, options, said):
    """Of a single position every gauge makes the two branches equal, so that no neuron would be asymmetric."""
    monkeypatch.setattr(activations.LanguageModel, "load", None)  # it is said before the model is
    with pytest.raises(TextTooShort, match=said):
        gp.probe_text(directory, [words(60)], **{"length": 64, **options})


@pytest.mark.parametrize(("positions", "asymmetry", "residual"), [
    (1, 0.0, 0.0), (32, 0.67, 0.84), (256, 0.87, 0.98), (1024, 0.93, 0.99),
])  # fmt: skip
def test_few_positions_are_fitted_too_well(positions, asymmetry, residual):
    """Means over SiLU neurons with unrelated branches, as parts of what they are of the distribution."""
    neurons, generator = 2000, torch.Generator().manual_seed(positions)
    a, b = torch.randn(2, positions, neurons, generator=generator)
    gauge = GaugeMoments(neurons)
    gauge.update(a, b)
    moments = NeuronMoments(gp.activation("silu"), gauge.gauge())
    moments.update(a, b, 0)
    found, known = moments.estimates().values, gp.gaussian_measures("silu", [1.0], [0.0]).iloc[0]
    for name, part in (("exchange_asymmetry", asymmetry), ("residual_share", residual)):
        assert float(np.mean(np.asarray(found[name]))) / known[name] == pytest.approx(part, abs=0.03), name


def test_one_sequence_has_no_errors(directory):
    report = gp.probe_text(directory, [words(60)], length=64, tokens=33)
    assert report.neurons["exchange_asymmetry_text"].notna().all()
    assert report.neurons["exchange_asymmetry_text_se"].isna().all()
    assert report.layers["exchange_asymmetry_text_mean_se"].isna().all()
    assert report.provenance["notes"][-2:] == [
        "the text is 1 sequence long: standard errors on text are missing",
        "32 positions of the text take part: the gauge is fitted to so few, and asymmetries on text come out too low",
    ]
    assert "nan" not in " ".join(report.findings)


# -- models in memory -----------------------------------------------------------------------------


def test_a_model_in_memory_gives_what_its_files_give(directory, report):
    from transformer_lens.model_bridge import TransformerBridge

    model = build("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bare = gp.probe_text(model, tokenizer=tokens(), **RUN)
    assert [type(module).__name__ for module in model.modules()].count("LinearBridge") == 0
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    twice = gp.probe_text(model=model, tokenizer=tokens(), **RUN)
    split = gp.probe_text(directory, module=model, tokenizer=tokens(), **RUN)
    bridge = TransformerBridge.boot_transformers(str(directory), device="cpu")
    wrapped = gp.probe_text(bridge, **RUN)
    for other in (bare, twice, split, wrapped):
        for frame in ("neurons", "layers"):
            assert_same(getattr(other, frame), getattr(report, frame))
    assert bare.provenance["format"] == "in memory"
    assert bare.provenance["model"] == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["llama", "biases", "phi3"])
def test_regauging_the_neurons_of_a_model_changes_no_measure(name):
    """(k, v) -> (c k, v / c), c of either sign, neuron by neuron: the same function, and the same numbers but for raw ones."""
    model = build(name)
    options = {"tokenizer": tokens(), "contexts": 2, "neurons": [(0, 3), (2, 40)], **RUN}
    before = gp.probe_text(model, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for block in model.model.layers:
            c = torch.exp(torch.randn(48, generator=generator)) * torch.randint(0, 2, (48,), generator=generator).mul(
                2
            ).sub(1)
            mlp = block.mlp
            up = mlp.gate_up_proj.weight[48:] if name == "phi3" else mlp.up_proj.weight
            up.mul_(c[:, None])
            mlp.down_proj.weight.div_(c)
            if name == "biases":
                mlp.up_proj.bias.mul_(c)
    after = gp.probe_text(model, **options)
    raw = tuple(name for name, measure in MEASURES.items() if "gauge" not in measure.invariant)
    assert not np.allclose(after.neurons["key_norm"], before.neurons["key_norm"], rtol=0.01)
    assert_same(after.neurons, before.neurons, rtol=2e-3, atol=2e-4, but=raw)
    compared = [column for column in text_columns(before.layers)]
    assert_same(after.layers[compared], before.layers[compared], rtol=2e-3, atol=2e-4)
    assert after.neurons["io_class"].tolist() == before.neurons["io_class"].tolist()
    assert_same(after.contexts, before.contexts, rtol=1e-3, atol=1e-4)


def test_an_edit_shows_in_both_halves_of_the_report():
    model = build("llama")
    before = gp.probe_text(model, tokenizer=tokens(), **RUN)
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight[5] *= 4
    after = gp.probe_text(model, tokenizer=tokens(), **RUN)
    row = 48 + 5
    for column in ("query_norm", "gate_std_text"):
        assert after.neurons[column][row] == pytest.approx(4 * before.neurons[column][row], rel=1e-4)
    assert after.neurons["gate_std_text"][row + 1] == pytest.approx(before.neurons["gate_std_text"][row + 1], rel=1e-4)


# -- families and precision -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["biases", "phi3", "gemma2", "cohere", "stablelm", "falcon_h1", "olmo2"])
def test_families(name):
    report = gp.probe_text(build(name), tokenizer=tokens(), **RUN)
    for column in text_columns(report.neurons):
        gaussian_known = report.neurons["exchange_asymmetry"].notna().all()
        missing = column.endswith("_minus_gaussian") and not gaussian_known
        assert report.neurons[column].isna().all() if missing else report.neurons[column].notna().all(), column
    quadrants = [column for column in report.neurons if column.startswith("quadrant_")]
    np.testing.assert_allclose(report.neurons[quadrants].sum(axis=1), 1, rtol=1e-5)
    assert report.provenance["text"]["largest_disagreement"] < 1e-5


def test_text_gives_what_the_weights_of_olmo2_cannot():
    report = gp.probe_text(build("olmo2"), tokenizer=tokens(), **RUN)
    assert report.neurons["exchange_asymmetry"].isna().all()
    assert report.neurons["exchange_asymmetry_text"].between(0, 0.6).all()
    assert report.layers["exchange_asymmetry_output_text"].between(0.001, 0.6).all()
    assert report.layers["exchange_asymmetry_output"].isna().all()
    assert "On the text that was run, exchanging gate and up changes the sign of" in report.findings[0]
    assert "nan" not in " ".join(report.findings)


@pytest.mark.parametrize(("name", "measured"), [("qwen2_moe", {"shared"}), ("deepseek_v3", {"dense", "shared"})])
def test_mixtures_of_experts(name, measured):
    report = gp.probe_text(build(name), tokenizer=tokens(), **RUN)
    routed = report.neurons["expert"].fillna("").str.isdigit()
    assert report.neurons.loc[routed, "exchange_asymmetry_text"].isna().all()
    assert report.neurons.loc[~routed, "exchange_asymmetry_text"].notna().all()
    assert set(report.layers.loc[report.layers["exchange_asymmetry_text_mean"].notna(), "group"]) == measured
    count = report.neurons.loc[routed].groupby(["layer", "expert"], observed=True).ngroups
    assert f"{count} MLPs were not measured on text: routed experts run batched" in report.provenance["notes"][-1]
    with pytest.raises(NotRunnable, match="routed experts"):
        gp.probe_text(build("mixtral"), tokenizer=tokens(), **RUN)


def test_bfloat16_is_near_float32(directory, report):
    narrow = gp.probe_text(directory, dtype="bfloat16", **RUN)
    assert narrow.provenance["text"]["dtype"] == "bfloat16"
    for name in TEXT_SHARED:
        difference = (narrow.neurons[f"{name}_text"] - report.neurons[f"{name}_text"]).abs()
        assert 0 < difference.median() < 0.02, name
    pd.testing.assert_series_equal(narrow.neurons["query_norm"], report.neurons["query_norm"])


# -- the report -----------------------------------------------------------------------------------


def test_every_column_is_documented(directory, report):
    weights = gp.probe(directory)
    for level, frame, plain in (("neuron", report.neurons, weights.neurons), ("layer", report.layers, weights.layers)):
        added = [name for name in frame if name not in plain]
        assert len(added) > 20
        documented = set(TEXT_MEASURES)
        documented |= {f"{name}{suffix}" for name in (*TEXT_SHARED, *TEXT_OUTPUT) for suffix in TEXT_SUFFIXES}
        if level == "layer":
            of_neurons = {name for name in documented if name.removesuffix("_minus_gaussian") in TEXT_MEASURES}
            documented |= {f"{name}_{part}" for name in of_neurons for part in TEXT_STATISTICS}
            documented |= {f"{name}_mean_se" for name in of_neurons} | {f"{name}_text_median" for name in TEXT_MEDIANS}
        assert set(added) <= documented
        assert {name for name, measure in TEXT_MEASURES.items() if measure.level == level} <= {*added}
        # what was there is as it was
        pd.testing.assert_frame_equal(frame[list(plain)], plain, check_exact=True)


def test_ranges_are_those_that_are_documented(report):
    for name, measure in TEXT_MEASURES.items():
        values = (report.neurons if measure.level == "neuron" else report.layers)[name]
        low = {"[0, 1]": 0, "[-1, 1]": -1, ">= 0": 0, "any": -np.inf}[measure.range]
        high = 1 if measure.range.endswith("1]") else np.inf
        assert values.between(low - 1e-6, high + 1e-6).all(), name


def test_save_load_and_page(directory, tmp_path):
    report = gp.probe_text(directory, contexts=2, **RUN)
    assert report.save(tmp_path / "out") == []
    loaded = gp.load_report(tmp_path / "out")
    pd.testing.assert_frame_equal(loaded.neurons, report.neurons, check_exact=True)
    pd.testing.assert_frame_equal(loaded.contexts, report.contexts, check_exact=True)
    assert json.loads((tmp_path / "out/provenance.json").read_text())["text"] == report.provenance["text"]
    for figure in ("text_profile", "text_gate_scale", "text_scatter"):
        assert (tmp_path / f"out/figures/{figure}.png").stat().st_size > 5000
    page = (tmp_path / "out/report.html").read_text()
    tokens_run = report.provenance["text"]["tokens"]
    for words_of_page in (
        "Exchange asymmetry on text",
        f"and on {tokens_run} tokens of text",
        "gate_active_text",
        "_text_se",
    ):
        assert words_of_page in page
    scales = report.neurons.groupby("layer")[["gate_std_text", "query_norm"]].median()
    np.testing.assert_allclose(report.layers["gate_std_text_median"], scales["gate_std_text"], rtol=1e-6)
    part = (scales["gate_std_text"] / scales["query_norm"]).median()
    mean = f"{report.neurons['exchange_asymmetry_text'].mean():.0%}".replace("%", " %")
    for found in (report, loaded):
        first, second = found.findings[:2]
        assert f"Gaussian input and of {mean} on text (means of layers" in first
        assert f"on the text that was run, the gates' pre-activations have {part:.2g} times that input's" in first
        assert second.startswith("Text parts from what Gaussian input predicts")
        markdown = found.to_markdown()
        assert "glu-probe activations" not in markdown
        assert "| gate scale | gate scale on text |" in markdown
        assert "on the text that was run" in markdown.splitlines()[0]
    head = html.unescape(page[: page.index("<h2>Pictures</h2>")]).replace("\N{NO-BREAK SPACE}", " ")
    assert all(sentence in head for sentence in report.findings[:2])
    table = page.split('<table id="layers"')[1].split("</table>")[0]
    assert all(f"{scale:.4g}" in table for scale in report.layers["gate_std_text_median"].astype(float))
    assert len(pd.read_csv(tmp_path / "out/contexts.csv")) == len(report.contexts)
    # a run without contexts leaves none of another's behind
    gp.probe(directory).save(tmp_path / "out", figures=False)
    assert gp.load_report(tmp_path / "out").contexts is None
    assert not (tmp_path / "out/contexts.csv").exists()


def test_a_report_of_the_weights_alone_says_nothing_of_text(directory):
    page = gp.probe(directory).to_html()
    assert "from the weights alone" in page
    assert "_text" not in page.replace("gaussian_or_text.py", "")  # no column


def test_a_weight_report_can_be_given_and_is_not_made_again(directory, report, monkeypatch):
    weights = gp.probe(directory)
    monkeypatch.setattr(activations, "probe", lambda *_, **__: pytest.fail("made again"))
    for given in (weights, lambda: weights):
        other = gp.probe_text(directory, report=given, **RUN)
        pd.testing.assert_frame_equal(other.neurons, report.neurons, check_exact=True)
    # text columns of another run are replaced, not doubled
    again = gp.probe_text(directory, TEXT, length=16, tokens=None, report=report)
    assert list(again.neurons) == list(report.neurons)
    assert not np.allclose(again.neurons["gate_mean_text"], report.neurons["gate_mean_text"])


def test_progress_and_estimate(directory):
    seen, estimates = [], []

    def progress(steps):
        seen.append(len(steps))
        return iter(steps)

    gp.probe_text(directory, progress=progress, estimate=estimates.append, **RUN)
    assert len(seen) == 1
    assert seen[0] >= 2
    assert len(estimates) == 1
    assert 0 < estimates[0] < 60


# -- refusals -------------------------------------------------------------------------------------


def test_texts_that_cannot_be_used(directory, tmp_path):
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    for text, error, said in (
        (tmp_path / "latin.txt", TextUnreadable, r"not UTF-8: byte 0xfc at offset 2"),
        (tmp_path / "empty.txt", TextTooShort, "there is no text in it"),
        ([], TextTooShort, "empty"),
        (["a"], TextTooShort, "shorter than 2 tokens"),
    ):
        with pytest.raises(error, match=said):
            gp.probe_text(directory, text, length=64)
    with pytest.raises(BadOption, match="only 128 positions"):
        gp.probe_text(directory, TEXT, length=129)


def test_a_bad_text_is_said_before_the_model_is_loaded(directory, monkeypatch):
    monkeypatch.setattr(activations.LanguageModel, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(TextTooShort):
        gp.probe_text(directory, [" "], length=64)


def test_a_model_without_tokenizer(tmp_path):
    bare = save(tmp_path / "bare", "llama", tokenizer=False)
    with pytest.raises(NoTokenizer, match="there are no tokenizer files"):
        gp.probe_text(bare, **RUN)
    with pytest.raises(NoTokenizer, match="tokenizer="):
        gp.probe_text(build("llama"), **RUN)
    assert gp.probe_text(bare, tokenizer=tokens(), **RUN).neurons["gate_mean_text"].notna().all()


def test_another_models_tokenizer(directory):
    small = build("llama", vocab_size=40)
    with pytest.raises(BadOption, match=r"the tokenizer gives id \d+, and the model knows 40 tokens"):
        gp.probe_text(small, tokenizer=tokens(), **RUN)
    # and the model is given back
    assert "Bridge" not in " ".join(type(module).__name__ for module in small.modules())


def test_options_that_contradict(directory, report):
    model = build("llama")
    for options, said in (
        ({"device": "cuda"}, "device is 'cuda', and the model in memory is on cpu"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', and the model in memory is in float32"),
        ({"module": model}, "two models in memory"),
        ({"neurons": [(0, 1)]}, "at least 1"),
        ({"contexts": -1}, "contexts is -1"),
        ({"layers": "7"}, "there is no layer 7"),
    ):
        with pytest.raises(BadOption, match=said):
            gp.probe_text(model, tokenizer=tokens(), **RUN, **options)
    with pytest.raises(BadOption, match="already open"):
        gp.probe_text(gp.open_checkpoint(directory), fold_norm=False, **RUN)
    with pytest.raises(BadOption, match="the report has 0 neurons for layer 0"):
        gp.probe_text(directory, report=gp.probe(directory, layers=[1]), **RUN)
    assert (
        gp.probe_text(model, tokenizer=tokens(), device="cpu", dtype="float32", **RUN).layers.shape
        == report.layers.shape
    )


def test_an_unreadable_model(tmp_path):
    with pytest.raises((Unreadable, gp.GluProbeError)):
        gp.probe_text(tmp_path, TEXT)
