"""Tiny models of many families through TransformerLens: where to listen, the check against the factors, what is refused."""

from __future__ import annotations

import copy

import pytest
import torch

import glu_probe as gp
from glu_probe.checkpoint.in_memory import checkpoint_in_memory
from glu_probe.errors import BadOption, FactorsDisagree, ModelTooLarge, NoTokenizer, NotRunnable
from glu_probe.text import loading
from glu_probe.text.language_model import LanguageModel

from .tiny_models import LAYERS, MODELS, VOCABULARY, build, save, tokens

IDS = torch.randint(3, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
RUNNABLE = [name for name in MODELS if name not in ("mixtral", "helium", "modernbert-decoder")]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Directory of a family's tiny model, written when first asked for."""
    written = {}

    def directory(name: str):
        if name not in written:
            written[name] = save(tmp_path_factory.mktemp(name), name)
        return written[name]

    return directory


def loaded(directory, **options) -> LanguageModel:
    return LanguageModel.load(gp.open_checkpoint(directory, **options), tokenizer=tokens())


def heard(runner: LanguageModel, ids=IDS) -> dict:
    """Every a and b, by MLP."""
    found = {}
    runner.listen(ids, runner.heard(), lambda site, a, b: found.__setitem__(site, (a.clone(), b.clone())))
    return found


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_factors_agree_with_the_model(directories, name):
    runner = loaded(directories(name))
    sites = runner.heard()
    assert {site.layer for site in sites} == set(range(LAYERS))
    agreement = runner.check(IDS, sites)
    assert set(agreement) == set(sites)
    assert max(agreement.values()) < 1e-5
    for site, (a, b) in heard(runner).items():
        assert a.shape == b.shape == (2, 40, site.d_mlp)
        assert a.std() > 0.05
        # otherwise a check with any gate would pass
        act = runner.checkpoint.activation_of(site)
        assert (act(a) - a / 2).abs().max() > 0.05


@pytest.mark.parametrize("name", ["llama", "biases", "gemma2", "stablelm", "phi3"])
@pytest.mark.parametrize("options", [{"fold_norm": False}, {"fold_post_norm": True}])
def test_the_check_follows_the_options(directories, name, options):
    runner = loaded(directories(name), **options)
    assert max(runner.check(IDS, runner.heard()).values()) < 1e-5


def test_what_is_heard_is_what_the_modules_compute(directories):
    """a and b against forward hooks on transformers' own modules, S(a) b and its product against theirs."""
    model, directory = build("gemma2"), directories("gemma2")
    own = {}
    for layer, block in enumerate(model.model.layers):
        for part in ("gate_proj", "up_proj", "down_proj"):
            getattr(block.mlp, part).register_forward_hook(
                lambda module, args, out, key=(layer, part): own.__setitem__(key, (args[0], out))
            )
    with torch.inference_mode():
        model(IDS)
    runner = loaded(directory)
    for site, (a, b) in heard(runner).items():
        act = runner.checkpoint.activation_of(site)
        torch.testing.assert_close(a, own[site.layer, "gate_proj"][1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(b, own[site.layer, "up_proj"][1], rtol=1e-5, atol=1e-5)
        product, out = own[site.layer, "down_proj"]
        torch.testing.assert_close(act(a) * b, product, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close((act(a) * b) @ runner.value(site), out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_a_weight_that_was_changed_after_loading_is_noticed(directories, part):
    checkpoint, model = gp.open_checkpoint(directories("llama")), build("llama")
    with torch.no_grad():
        getattr(model.model.layers[1].mlp, part).weight[3, 5] += 0.5
    runner = LanguageModel.wrap(model, checkpoint, tokenizer=tokens())
    with pytest.raises(FactorsDisagree, match=r"layer 1, mlp: .* differs from the model's own"):
        runner.check(IDS, runner.heard())
    assert max(runner.check(IDS, runner.heard([0, 2])).values()) < 1e-5


@pytest.mark.parametrize(("name", "family", "words"), [
    ("llama", "gemma2", "reads the output of|differs from the model's own"),  # gain 1 + w, another norm
    ("llama", "olmo2", "it reads no norm's output"),
    ("olmo2", "llama", "reads the output of RMSNorm"),
])  # fmt: skip
def test_the_wrong_family_is_noticed(directories, tmp_path, name, family, words):
    model = build(name)
    try:
        checkpoint = gp.open_checkpoint(directories(name), family=family)
        checkpoint.load(checkpoint.sites[0])
    except gp.GluProbeError as error:  # the tensors already do not fit: nothing is measured either
        assert "norm" in str(error)  # noqa: PT017
        return
    runner = LanguageModel.wrap(model, checkpoint, tokenizer=tokens())
    with pytest.raises(FactorsDisagree, match=words):
        runner.check(IDS, runner.heard())


def test_the_wrong_gain_and_the_wrong_activation_are_noticed(directories):
    """Gemma's 1 + w read as w, and a gate that is not the model's."""
    runner = loaded(directories("llama"), activation="gelu")
    with pytest.raises(FactorsDisagree, match=r"S\(a\) b|output"):
        runner.check(IDS, runner.heard())
    runner = loaded(directories("llama"), family="gemma")
    with pytest.raises(FactorsDisagree, match=r"layer 0, mlp: \w.* from the factors differs"):
        runner.check(IDS, runner.heard())


@pytest.mark.parametrize(("name", "words"), [
    ("helium", "TransformerLens has no bridge for HeliumForCausalLM"),
    ("modernbert-decoder", "TransformerLens has no hooks for its branches"),
    ("mixtral", "routed experts run batched, without hooks for neurons"),
])  # fmt: skip
def test_what_cannot_be_heard_is_refused_with_the_reason(directories, name, words):
    with pytest.raises(NotRunnable, match=words) as caught:
        loaded(directories(name)).heard()
    assert "glu-probe report" in str(caught.value)


@pytest.mark.parametrize(("name", "groups"), [
    ("qwen2_moe", ["shared"] * 3),
    ("deepseek_v3", ["dense", "shared", "shared"]),
])  # fmt: skip
def test_dense_and_shared_experts_are_heard_and_routed_ones_named(directories, name, groups):
    runner = loaded(directories(name))
    assert [site.group for site in runner.heard()] == groups
    [(reason, places)] = runner.left_out.items()
    assert reason == "routed experts run batched, without hooks for neurons"
    assert len(places) == 4 * groups.count("shared")


def test_neurons_that_the_theory_does_not_cover_are_left_out(directories):
    from dataclasses import replace

    checkpoint = gp.open_checkpoint(directories("llama"))
    act = replace(gp.activation("silu"), up=torch.tanh, up_formula="tanh(b)")
    rules = checkpoint.rules_of
    checkpoint.rules_of = lambda site: replace(rules(site), activation=act if site.layer else None)
    runner = LanguageModel.load(checkpoint, tokenizer=tokens())
    assert [*runner.left_out] == [
        "the activation is not known (name it with `activation=`, `--activation`)",
        "the up branch acts as tanh(b), and the theory is that of neurons linear in it",
    ]
    with pytest.raises(NotRunnable, match=r"tanh\(b\)"):
        runner.heard([1, 2])


def test_a_bridge_that_is_wrong_is_noticed(directories, monkeypatch):
    from transformer_lens.model_bridge import TransformerBridge

    boot = TransformerBridge.boot_transformers

    def wrong(*args, **kwargs):
        bridge = boot(*args, **kwargs)
        with torch.no_grad():
            next(iter(bridge.original_model.parameters())).mul_(1.5)
        return bridge

    monkeypatch.setattr(TransformerBridge, "boot_transformers", wrong)
    with pytest.raises(FactorsDisagree, match="logits differ from transformers'"):
        loaded(directories("llama"))


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2", "qwen2_moe", "falcon_h1"])
def test_a_model_is_given_back_as_it_was(name):
    model = build(name).train()
    modules = {path: type(module) for path, module in model.named_modules()}
    attention = model.config._attn_implementation
    logits = copy.deepcopy(model).eval()(IDS).logits
    runner = LanguageModel.wrap(model, checkpoint_in_memory(model), tokenizer=tokens())
    assert {path: type(module) for path, module in model.named_modules()} != modules
    runner.release()
    assert {path: type(module) for path, module in model.named_modules()} == modules
    assert model.training
    assert model.config._attn_implementation == attention
    assert model.config.architectures is None
    torch.testing.assert_close(model.eval()(IDS).logits, logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["helium"])
def test_a_model_that_cannot_be_wrapped_is_given_back_too(name):
    model = build(name)
    modules = {path: type(module) for path, module in model.named_modules()}
    with pytest.raises(NotRunnable):
        LanguageModel.wrap(model, checkpoint_in_memory(model), tokenizer=tokens())
    assert {path: type(module) for path, module in model.named_modules()} == modules


def test_the_tokenizer_of_the_caller_stays_as_it_is():
    from .made_tokenizers import byte_tokenizer

    tokenizer, model = byte_tokenizer(), build("llama")
    before = (len(tokenizer), tokenizer.pad_token, tokenizer.padding_side, tokenizer.bos_token)
    LanguageModel.wrap(model, checkpoint_in_memory(model), tokenizer=tokenizer)
    assert (len(tokenizer), tokenizer.pad_token, tokenizer.padding_side, tokenizer.bos_token) == before
    with pytest.raises(NoTokenizer):
        LanguageModel.wrap(build("llama"), checkpoint_in_memory(model))


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2", "qwen2_moe", "deepseek_v3", "mixtral"])
def test_the_tensors_in_memory_are_those_of_the_files(directories, name):
    files, model = gp.open_checkpoint(directories(name)), build(name)
    versions = [checkpoint_in_memory(model)]
    if name != "mixtral":
        runner = LanguageModel.wrap(model, versions[0], tokenizer=tokens())
        versions += [checkpoint_in_memory(runner.bridge), checkpoint_in_memory(model)]
    for memory in versions:
        assert not memory.in_files
        assert memory.provenance()["towers"] == files.provenance()["towers"]
        for site, twin in zip(files.sites, memory.sites, strict=True):
            assert (site.layer, site.expert) == (twin.layer, twin.expert)
            ours, theirs = memory.load(twin), files.load(site)
            for factor in ("query", "key", "value"):
                torch.testing.assert_close(getattr(ours, factor), getattr(theirs, factor), rtol=0, atol=0)


def test_an_edit_in_memory_is_seen_and_reading_changes_nothing():
    model = build("llama")
    checkpoint, before = checkpoint_in_memory(model), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[7] *= -3
    expected = (
        before["model.layers.2.mlp.up_proj.weight"][7] * -3 * before["model.layers.2.post_attention_layernorm.weight"]
    )
    torch.testing.assert_close(checkpoint.layer(2).key[7], expected)
    gp.probe(checkpoint)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[7] /= -3
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name])


def test_what_is_no_model_of_transformers_is_refused():
    with pytest.raises(NotRunnable, match="a Linear has no config of transformers"):
        checkpoint_in_memory(torch.nn.Linear(2, 2))
    with torch.device("meta"):
        remote = build("llama")
    with pytest.raises(NotRunnable, match="is not in memory"):
        checkpoint_in_memory(remote)


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(directories, monkeypatch):
    checkpoint = gp.open_checkpoint(directories("llama"))
    monkeypatch.setattr(loading, "available_memory", lambda: 50_000)
    needed = checkpoint.parameter_count * 4 * 1.2 / 1e9
    with pytest.raises(ModelTooLarge, match=rf"float32 takes about {needed:.1f} GB, and 0\.0 GB of main memory"):
        LanguageModel.load(checkpoint, tokenizer=tokens())
    monkeypatch.setattr(loading, "available_memory", lambda: int(checkpoint.parameter_count * 3))
    assert LanguageModel.load(checkpoint, dtype="bfloat16", tokenizer=tokens()).dtype is torch.bfloat16


def test_memory_is_known_on_this_machine():
    assert loading.available_memory() > 10**8


def test_bfloat16_agrees_within_its_precision(directories):
    runner = LanguageModel.load(gp.open_checkpoint(directories("llama")), dtype="bfloat16", tokenizer=tokens())
    agreement = runner.check(IDS, runner.heard())
    assert 1e-5 < max(agreement.values()) < 5e-2
    assert all(a.dtype is torch.bfloat16 for a, _ in heard(runner).values())


def test_bad_options(directories):
    checkpoint = gp.open_checkpoint(directories("llama"))
    with pytest.raises(BadOption, match="Use float32 or bfloat16"):
        LanguageModel.load(checkpoint, dtype="float16", tokenizer=tokens())
    with pytest.raises(BadOption, match="device is 'nowhere'"):
        LanguageModel.load(checkpoint, device="nowhere", tokenizer=tokens())
    (directories("llama") / "config.json").rename(directories("llama") / "config.away")
    try:
        with pytest.raises(NotRunnable, match="transformers cannot load it"):
            LanguageModel.load(checkpoint, tokenizer=tokens())
    finally:
        (directories("llama") / "config.away").rename(directories("llama") / "config.json")


def test_logits_are_those_of_transformers(directories):
    model, runner = build("llama"), loaded(directories("llama"))
    with torch.inference_mode():
        torch.testing.assert_close(runner.logits(IDS), model(IDS).logits, rtol=1e-5, atol=1e-5)
    listener = runner.listeners[runner.heard()[0]]
    changed = runner.logits(IDS, [(listener.product, lambda tensor, hook: 0 * tensor)])
    assert (changed - runner.logits(IDS)).abs().max() > 1e-3


def test_listening_stops_behind_the_last_mlp_and_leaves_no_hooks(directories):
    runner, reached = loaded(directories("llama")), []
    for name in ("blocks.1.hook_in", "blocks.2.hook_in", "unembed.hook_in"):
        point = runner.bridge.hook_dict[name]
        point.register_forward_hook(lambda module, args, out, name=name: reached.append(name))
    runner.listen(IDS, runner.heard([0, 1]), lambda *_: None)
    assert reached == ["blocks.1.hook_in"]
    reached.clear()
    runner.check(IDS, runner.heard())
    assert reached == ["blocks.1.hook_in", "blocks.2.hook_in"]
    assert not any(point.fwd_hooks for point in runner.bridge.hook_dict.values())
