"""Causal costs on tiny models against plain transformers, what must not change them, and runs that stop half way."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

import glu_probe as gp
from glu_probe.errors import BadOption, FactorsDisagree, NoTokenizer, NotRunnable, TextTooShort
from glu_probe.text import causal as causal_module
from glu_probe.text import replay, runs
from glu_probe.text.documents import Document
from glu_probe.text.interventions import INTERVENTIONS
from glu_probe.text.targets import _span, _top_and_control
from glu_probe.text.tokenizing import tokenize

from .plain import Plain
from .tiny_models import build, save, tokens, words

TEXT = [words(500)]
LENGTH, SEQUENCES = 32, 16  # all of them full
RUN = {"length": LENGTH, "tokens": 8 * LENGTH, "calibration": 8 * LENGTH, "tokenizer": tokens()}
NAMES = ["llama", "biases", "phi3", "gemma2", "olmo2", "falcon_h1", "qwen2_moe", "deepseek_v3"]
COSTS = ["delta_loss", "delta_loss_se", "kl", "kl_se"]


def cost(model, **changes) -> pd.DataFrame:
    return gp.causal(model, TEXT, **{**RUN, **changes})


def parts_of_the_text() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sequences to calibrate and to evaluate on."""
    corpus = tokenize([Document("text 1", TEXT[0])], tokens(), length=LENGTH, tokens=SEQUENCES * LENGTH)
    fitting, evaluation = corpus.split(0.5)
    assert {len(ids) for ids in corpus.sequences} == {LENGTH}
    return fitting.sequences, evaluation.sequences


def assert_same(one: pd.DataFrame, other: pd.DataFrame, columns=COSTS, atol: float = 1e-5) -> None:
    for name in columns:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=atol, err_msg=name)


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_costs_are_those_of_plain_transformers(name):
    """Every intervention in one layer: gauges, fits, loss, KL and errors from hooks on transformers' own modules."""
    plain, (fitting, evaluation) = Plain(name), parts_of_the_text()
    frame = cost(build(name), layers=[1], spare=0, interventions=list(INTERVENTIONS)).set_index("intervention")
    assert len(frame) == len(INTERVENTIONS)
    assert set(frame["n_tokens"]) == {8 * (LENGTH - 1)}
    assert set(frame["n_sequences"]) == {8}
    fit = plain.fit(1, fitting, 1)
    for intervention in INTERVENTIONS:
        expected = plain.costs(evaluation, {1: (intervention, fit)}, 1)
        for column in COSTS:
            found = frame.loc[intervention, column]
            assert found == pytest.approx(expected[column], rel=2e-3, abs=1e-5), (intervention, column)
    assert (frame.loc["identity", COSTS] == 0).all()
    assert (frame.drop(index="identity")["kl"] > 1e-5).all()


def test_every_layer_and_the_first_position():
    plain, (fitting, evaluation) = Plain("llama"), parts_of_the_text()
    frame = cost(build("llama"), first_position=True, interventions=["exchange"], spare=0)
    assert list(frame["layers"]) == ["0", "1", "2"]
    for layer, row in frame.iterrows():
        expected = plain.costs(evaluation, {layer: ("exchange", plain.fit(layer, fitting, 0))}, 0)
        assert row["kl"] == pytest.approx(expected["kl"], rel=1e-3, abs=1e-5)
        assert row["delta_loss"] == pytest.approx(expected["delta_loss"], rel=1e-3, abs=1e-5)


def test_layers_together():
    plain, (fitting, evaluation) = Plain("llama"), parts_of_the_text()
    fits = {layer: plain.fit(layer, fitting, 1) for layer in (0, 2)}
    frame = cost(build("llama"), layers="0,2", together=True, interventions=["exchange", "zero_ablation"], spare=0)
    assert list(frame["layers"]) == ["0,2"] * 2
    for row in frame.itertuples():
        expected = plain.costs(evaluation, {layer: (row.intervention, fit) for layer, fit in fits.items()}, 1)
        assert row.kl == pytest.approx(expected["kl"], rel=1e-3, abs=1e-5)
        assert row.delta_loss == pytest.approx(expected["delta_loss"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_sparing_leaves_alone_the_neurons_that_change_most(name):
    plain, (fitting, evaluation) = Plain(name), parts_of_the_text()
    a, b = plain.branches(1, fitting, 1)
    value = plain.mlp(1).down_proj.weight.double()
    energy = (plain.act(1)(a) * b).square().mean(0) * value.square().sum(0)
    order = energy.argsort(descending=True).tolist()
    (row,) = cost(build(name), layers=[1], spare=3, interventions=["zero_ablation"]).itertuples()
    assert [int(neuron) for neuron in row.top_neurons.split(", ")] == order[:8]
    mask = torch.ones(len(energy), dtype=torch.bool)
    mask[order[:3]] = False
    expected = plain.costs(evaluation, {1: ("zero_ablation", plain.fit(1, fitting, 1))}, 1, {1: mask})
    assert row.spared == 3
    assert row.kl_spared == pytest.approx(expected["kl"], rel=1e-3, abs=1e-5)
    assert row.delta_loss_spared == pytest.approx(expected["delta_loss"], rel=1e-3, abs=1e-5)
    assert row.kl_spared_se == pytest.approx(expected["kl_se"], rel=1e-2, abs=1e-5)
    assert row.kl_spared != row.kl


@pytest.mark.parametrize("name", NAMES)
def test_the_symmetrised_gap_is_a_quarter_of_the_exchange_gap(name):
    frame = cost(build(name), interventions=["exchange", "symmetrised", "zero_ablation"], spare=0)
    gap = frame.pivot_table(index=["layers"], columns="intervention", values="output_gap")
    assert (gap["symmetrised"] == gap["exchange"] / 4).all()
    assert (gap["exchange"] > 0.01).all()
    np.testing.assert_allclose(gap["zero_ablation"], 1, rtol=1e-5)


# -- what may not change them ---------------------------------------------------------------------


def test_gauges_of_the_weights_change_the_raw_exchange_only():
    model, moved = build("llama"), build("llama")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in moved.model.layers:
            size = layer.mlp.up_proj.weight.shape[0]
            c = torch.exp(torch.randn(size, generator=generator)) * torch.randint(
                0, 2, (size,), generator=generator
            ).mul(2).sub(1)
            layer.mlp.up_proj.weight.mul_(c[:, None])
            layer.mlp.down_proj.weight.div_(c)
    before, after = (cost(one, interventions=list(INTERVENTIONS)) for one in (model, moved))
    raw = before["intervention"] == "exchange_raw"
    assert_same(before[~raw], after[~raw], [*COSTS, "kl_spared", "output_gap"])
    assert (before.loc[~raw, "top_neurons"] == after.loc[~raw, "top_neurons"]).all()
    assert ((before[raw]["kl"] / after[raw]["kl"] - 1).abs() > 0.05).all()


def test_one_sequence_at_a_time(monkeypatch):
    uneven = {"tokens": 230, "calibration": 230, "spare": 1}  # the last sequence is shorter
    whole = cost(build("llama"), **uneven)
    monkeypatch.setattr(runs, "BATCH_TOKENS", 1)
    monkeypatch.setattr(causal_module, "BATCH_TOKENS", 1)
    monkeypatch.setattr(runs, "_room", lambda runner: 0)
    monkeypatch.setattr(runs, "_LOGITS", 1)
    monkeypatch.setattr(replay, "_BLOCK", 3)
    assert_same(whole, cost(build("llama"), **uneven), [*COSTS, "kl_spared", "delta_loss_spared"])


def test_the_same_call_gives_the_same_frame():
    frames = [cost(build("llama"), subset=("exchange_asymmetry", 0.2), interventions=["exchange"]) for _ in range(2)]
    pd.testing.assert_frame_equal(*frames, check_exact=True)
    assert frames[0].attrs == frames[1].attrs


def test_files_modules_and_models_in_memory_give_the_same(tmp_path):
    directory = save(tmp_path / "llama", "llama")
    some = {"interventions": ["exchange"], "layers": [1]}
    files = cost(directory, **some, tokenizer=None)
    assert files["model"][0] == "llama"
    for other in (
        cost(build("llama"), **some),
        cost(directory, module=build("llama"), **some),
        cost(gp.open_checkpoint(directory), **some),
    ):
        assert_same(files, other, atol=1e-6)


def test_no_sequence_is_in_both_parts():
    frame = cost(build("llama"), layers=[0], interventions=["exchange"])
    fitting, evaluation = parts_of_the_text()
    assert not {tuple(ids.tolist()) for ids in fitting} & {tuple(ids.tolist()) for ids in evaluation}
    assert frame.attrs["calibration"]["sequences"] + frame.attrs["text"]["sequences"] == SEQUENCES
    assert frame.attrs["calibration"]["ids_sha256"] != frame.attrs["text"]["ids_sha256"]


def test_clean_loss_is_the_models_own():
    _, evaluation = parts_of_the_text()
    model = build("llama")
    with torch.no_grad():
        expected = torch.stack([model(ids[None], labels=ids[None]).loss for ids in evaluation]).mean().item()
    found = cost(model, layers=[0], interventions=["exchange"]).attrs["clean_loss"]
    assert found == pytest.approx(expected, rel=1e-5)


# -- what is edited -------------------------------------------------------------------------------


def down_inputs(model, layer: int, **changes) -> list[torch.Tensor]:
    """What a layer's down projection got in every pass over the whole evaluation text, the clean one first."""
    found = []
    handle = model.model.layers[layer].mlp.down_proj.register_forward_pre_hook(
        lambda module, args: found.append(args[0].clone()) if args[0].shape[:2] == (8, LENGTH) else None
    )
    cost(model, layers=[layer], **changes)
    handle.remove()
    return found


def edited(coefficients: torch.Tensor) -> set[int]:
    """Neurons that are zero everywhere, up to rounding."""
    return {*(coefficients.abs().amax((0, 1)) < 1e-5).nonzero().flatten().tolist()}


@pytest.mark.parametrize("first_position", [False, True])
def test_the_first_position_is_left_alone_unless_asked_for(first_position):
    found = down_inputs(build("llama"), 1, interventions=["exchange"], spare=0, first_position=first_position)
    clean, changed = found[-2], found[-1]  # identity, exchange
    assert (clean != changed)[:, 1:].any(-1).all()
    assert (clean != changed)[:, 0].any() == first_position


def test_the_spared_run_leaves_exactly_those_neurons():
    model = build("llama")
    rows = cost(model, layers=[1], interventions=["zero_ablation"], spare=2)
    expected = {int(neuron) for neuron in rows["top_neurons"][0].split(", ")[:2]}
    found = down_inputs(model, 1, interventions=["zero_ablation"], spare=2)[-1][:, 1:]
    assert edited(found) == {*range(48)} - expected


def test_a_subset_and_its_control():
    model = build("llama")
    frame = gp.probe_text(model, TEXT, tokenizer=tokens(), length=LENGTH).neurons
    rows = cost(
        model, layers=[1], subset=("exchange_asymmetry_text", 0.25, frame), interventions=["zero_ablation"], spare=0
    )
    assert list(rows["neurons"]) == ["top 25 % by exchange_asymmetry_text", "random of equal energy"]
    np.testing.assert_allclose(rows["energy_share"], rows["other_energy_share"][::-1], rtol=1e-12)
    assert rows["energy_share"][0] == pytest.approx(rows["energy_share"][1], rel=0.03)
    found = down_inputs(
        model, 1, subset=("exchange_asymmetry_text", 0.25, frame), interventions=["zero_ablation"], spare=0
    )[-2:]
    here = frame[frame["layer"] == 1]["exchange_asymmetry_text"].to_numpy()
    top, control = (edited(one[:, 1:]) for one in found)
    assert top == {*np.argsort(-here)[:12].tolist()}
    assert len(control) == 12
    assert not top & control
    assert_same(
        rows[:1],
        cost(
            model,
            layers=[1],
            subset=("exchange_asymmetry_text", 0.25, frame),
            interventions=["zero_ablation"],
            spare=0,
            seed=5,
        )[:1],
        atol=0,
    )


def test_energies_of_subsets_are_shares_of_the_output():
    plain, (fitting, _) = Plain("llama"), parts_of_the_text()
    a, b = plain.branches(1, fitting, 1)
    energy = (plain.act(1)(a) * b).square().mean(0) * plain.mlp(1).down_proj.weight.detach().double().square().sum(0)
    frame = pd.DataFrame({"tower": "text", "layer": 1, "expert": None, "rank": energy.numpy()})
    rows = cost(build("llama"), layers=[1], subset=("rank", 0.25, frame), interventions=["exchange"], spare=0)
    top = energy.sort(descending=True).values / energy.sum()
    assert rows["energy_share"][0] == pytest.approx(top[:12].sum().item(), rel=1e-4)
    # no other neurons have so much: the best that can be had are the next ones, and the frame says so
    assert rows["energy_share"][1] == pytest.approx(top[12:24].sum().item(), rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_controls_match_in_energy_where_that_is_possible(seed):
    rng = np.random.default_rng(seed)
    energy, values = rng.lognormal(0, 2, 1500), rng.normal(size=1500)
    top, control = (mask.numpy().astype(bool) for mask in _top_and_control(values, 0.1, energy, rng))
    assert top.sum() == control.sum() == 150
    assert not (top & control).any()
    assert values[top].min() > values[~top].max()
    assert energy[control].sum() == pytest.approx(energy[top].sum(), rel=0.011)
    again = _top_and_control(values, 0.1, energy, np.random.default_rng(seed + 100))[1].numpy().astype(bool)
    assert (again != control).any()


@pytest.mark.parametrize(("layers", "words"), [({3}, "3"), ({0, 1, 2}, "0-2"), ({7, 0, 5, 4}, "0,4-5,7")])
def test_layers_in_words(layers, words):
    assert _span(layers) == words


def test_bfloat16():
    frame = cost(build("llama").to(torch.bfloat16), interventions=["identity", "exchange", "zero_ablation"])
    exact = cost(build("llama"), interventions=["identity", "exchange", "zero_ablation"])
    assert frame.attrs["options"]["dtype"] == "bfloat16"
    identity = frame["intervention"] == "identity"
    assert (frame.loc[identity, COSTS] == 0).all(axis=None)
    np.testing.assert_allclose(frame["kl"], exact["kl"], rtol=0.3, atol=1e-3)


def test_shared_experts_and_dense_layers_of_one_model():
    frame = cost(build("deepseek_v3"), interventions=["exchange"])
    assert frame["expert"].isna().tolist() == [True, False, False]
    assert frame["expert"][1] == "shared"


# -- refusals -------------------------------------------------------------------------------------


def test_a_replay_that_does_not_give_the_same_is_refused(monkeypatch):
    real = replay.Replayer.starting_at

    def shifted(self, layer, residual, *attention):
        moved = residual if layer == self.depth else residual + 1e-3 * torch.sign(residual)
        return real(self, layer, moved, *attention)

    monkeypatch.setattr(replay.Replayer, "starting_at", shifted)
    with pytest.raises(FactorsDisagree, match="must change nothing"):
        cost(build("llama"), layers=[1], interventions=["zero_ablation"])


def test_a_head_that_knows_its_neighbours_is_refused(monkeypatch):
    real = replay.Replayer.starting_at

    def shifted(self, layer, residual, *attention):
        return real(self, layer, residual.flip(-1) if layer == self.depth else residual, *attention)

    monkeypatch.setattr(replay.Replayer, "starting_at", shifted)
    with pytest.raises(FactorsDisagree, match="logits of single positions"):
        cost(build("llama"), layers=[1], interventions=["zero_ablation"])


def test_a_model_that_needs_its_lower_layers_is_refused(monkeypatch):
    real = replay.Replayer.starting_at

    def needy(self, layer, *given):
        if 0 < layer < self.depth:
            raise KeyError("shared keys and values")
        return real(self, layer, *given)

    monkeypatch.setattr(replay.Replayer, "starting_at", needy)
    with pytest.raises(NotRunnable, match="do not run without those below"):
        cost(build("llama"), layers=[1], interventions=["zero_ablation"])


@pytest.mark.parametrize(("changes", "error", "said"), [
    ({"interventions": ["exchnge"]}, BadOption, "no intervention 'exchnge'"),
    ({"interventions": []}, BadOption, "no intervention is asked for"),
    ({"tokens": 40, "calibration": 40}, TextTooShort, "makes 3 sequences, and calibration and evaluation need two each"),
    ({"tokens": 40, "calibration": 24, "length": 8}, TextTooShort, "calibration text is too short: .* needs 32"),
    ({"tokens": 0}, BadOption, "tokens is 0"),
    ({"spare": -1}, BadOption, "spare is -1"),
    ({"spare": 1.5}, BadOption, "spare is 1.5"),
    ({"layers": [7]}, BadOption, "no layer 7"),
    ({"subset": ("exchange_asymmetry", 0.7)}, BadOption, "cannot be chosen"),
    ({"subset": ("nothing", 0.1)}, BadOption, "no measure of neurons called 'nothing'. There are query_norm, value_gain, "),
    ({"subset": ("io_class", 0.1)}, BadOption, "no measure of neurons called 'io_class'"),
    ({"subset": ("exchange_asymetry", 0.1)}, BadOption, "Did you mean exchange_asymmetry"),
    ({"subset": ("exchange_asymmetry_text", 0.1)}, BadOption, "a measure on text"),
    ({"subset": ("nothing_text", 0.1)}, BadOption, "no measure of neurons called 'nothing_text'"),
    ({"tokenizer": None}, NoTokenizer, "without its tokenizer"),
])  # fmt: skip
def test_wrong_arguments(changes, error, said):
    with pytest.raises(error, match=said):
        cost(build("llama"), **changes)


def test_a_frame_without_these_layers_is_refused(tmp_path):
    directory = save(tmp_path / "llama", "llama")
    frame = gp.probe(directory, layers=[0]).neurons
    with pytest.raises(BadOption, match="has 0 neurons of layer 1"):
        cost(directory, layers=[1], subset=("exchange_asymmetry", 0.1, frame))


def test_routed_experts_are_refused():
    with pytest.raises(NotRunnable, match="routed experts"):
        cost(build("mixtral"))


# -- runs that stop -------------------------------------------------------------------------------


def stopping_after(count: int):
    def progress(steps):
        for number, step in enumerate(steps):
            if number == count:
                raise KeyboardInterrupt
            yield step

    return progress


def test_a_model_in_memory_is_as_it_was_after_an_interruption():
    def state():
        modules = [(name, m) for name, m in model.named_modules() if not isinstance(m, torch.nn.ModuleList)]
        return [(name, id(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in modules]

    model, ids = build("llama"), torch.arange(3, 23)[None]
    before = state()
    with torch.no_grad():
        logits = model(ids).logits
        with pytest.raises(KeyboardInterrupt):
            cost(model, progress=stopping_after(1))
        assert state() == before
        assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("more", [{}, {"subset": ("exchange_asymmetry", 0.2)}, {"together": True}])
def test_an_interrupted_run_goes_on(tmp_path, more):
    some = {"interventions": ["exchange", "identity", "zero_ablation"], **more}
    whole = cost(build("llama"), **some)
    count = 1 if "together" not in more else 0
    with pytest.raises(KeyboardInterrupt):
        cost(build("llama"), **some, parts=tmp_path / "parts", progress=stopping_after(count))
    assert len(list((tmp_path / "parts").glob("*.result"))) == count
    steps = []
    again = cost(build("llama"), **some, parts=tmp_path / "parts", progress=lambda s: steps.extend(s) or steps)
    assert len(steps) == len(whole) // 3 - count
    pd.testing.assert_frame_equal(again, whole, check_exact=True)
    assert again.attrs == whole.attrs
    done = cost(build("llama"), **some, parts=tmp_path / "parts", progress=lambda s: steps.clear() or s)
    pd.testing.assert_frame_equal(done, whole, check_exact=True)
    assert steps == []


def test_parts_serve_other_layers_of_the_same_run(tmp_path):
    some = {"interventions": ["exchange"], "parts": tmp_path / "parts"}
    cost(build("llama"), layers=[0], **some)
    pd.testing.assert_frame_equal(
        cost(build("llama"), layers=[0, 2], **some), cost(build("llama"), layers=[0, 2], interventions=["exchange"]),
        check_exact=True,
    )  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), [
    ({"interventions": ["zero_ablation"]}, "interventions differs"),
    ({"spare": 2}, "spare was 1 and is 2"),
    ({"seed": 3}, "seed was 0 and is 3"),
    ({"length": 16}, "text sequence_length was 32 and is 16|text sequences was"),
    ({"first_position": True}, "first_position was False and is True"),
    ({"tokens": 100}, "text sequences was 8 and is"),
    ({"subset": ("exchange_asymmetry", 0.2)}, "subset differs"),
    ({"together": True}, "together was False and is True"),
])  # fmt: skip
def test_parts_of_another_run_are_refused(tmp_path, changes, said):
    some = {"interventions": ["exchange"], "layers": [0], "parts": tmp_path / "parts"}
    cost(build("llama"), **some)
    with pytest.raises(BadOption, match=f"parts of another run: .*({said})"):
        cost(build("llama"), **{**some, **changes})


def test_parts_of_other_weights_are_refused(tmp_path):
    some = {"interventions": ["exchange"], "layers": [0], "parts": tmp_path / "parts"}
    model = build("llama")
    cost(model, **some)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[5, 3] += 1e-3
    with pytest.raises(BadOption, match="weights differs"):
        cost(model, **some)


def test_parts_of_another_file_are_refused(tmp_path):
    some = {"interventions": ["exchange"], "layers": [0], "parts": tmp_path / "parts", "tokenizer": None}
    cost(save(tmp_path / "llama", "llama"), **some)
    with pytest.raises(BadOption, match="parts of another run"):
        cost(save(tmp_path / "llama", "llama", intermediate_size=40), **some)


def test_a_directory_with_other_files_is_no_place_for_parts(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(BadOption, match=r"other files here, such as letter\.txt"):
        cost(build("llama"), layers=[0], parts=tmp_path)
    (tmp_path / "letter.txt").unlink()
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(BadOption, match="no file of a run"):
        cost(build("llama"), layers=[0], parts=tmp_path)


def test_the_estimate_comes_before_the_first_run():
    seen = []
    cost(
        build("llama"), interventions=["exchange"],
        estimate=lambda seconds: seen.append(seconds), progress=lambda steps: seen.append("start") or steps,
    )  # fmt: skip
    assert seen[1:] == ["start"]
    assert seen[0] > 0


def test_what_is_said_of_a_run_is_json():
    attrs = cost(build("llama"), layers=[0], interventions=["exchange"], subset=("exchange_asymmetry", 0.2)).attrs
    assert json.loads(json.dumps(attrs, allow_nan=False)) == attrs
    assert {"torch", "transformers", "transformer-lens"} <= set(attrs["versions"])
