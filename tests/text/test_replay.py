"""Running a model in pieces: bit for bit what it gives as a whole, and nothing of it is left behind."""

from __future__ import annotations

import math

import pytest
import torch

from glu_probe.checkpoint.in_memory import checkpoint_in_memory
from glu_probe.text.language_model import LanguageModel
from glu_probe.text.replay import Replayer, cross_entropies, probabilities

from .tiny_models import LAYERS, VOCABULARY, build, tokens

NAMES = [
    "llama",
    "biases",
    "phi3",
    "gemma2",
    "olmo2",
    "cohere",
    "stablelm",
    "falcon_h1",
    "qwen2_moe",
    "deepseek_v3",
    "mixtral",
]
IDS = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(0))


def wrapped(name: str) -> LanguageModel:
    model = build(name)
    return LanguageModel.wrap(model, checkpoint_in_memory(model), tokenizer=tokens())


def state(runner: LanguageModel) -> list[tuple]:
    """Every module, by identity, and how many hooks it has."""
    modules = runner.bridge.original_model.named_modules()
    return [(name, id(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in modules]


@pytest.mark.parametrize("name", NAMES)
def test_from_every_layer_on_the_logits_are_those_of_the_whole(name):
    runner = wrapped(name)
    replayer, before = Replayer(runner.bridge), state(runner)
    assert replayer.depth == LAYERS
    whole = runner.logits(IDS)
    with replayer.recording(set(range(LAYERS))) as entries:
        assert torch.equal(runner.logits(IDS), whole)
    assert sorted(entries) == list(range(LAYERS))
    for layer, entry in entries.items():
        assert entry.attention is not None
        for given in (entry, entry[:1]):
            with replayer.starting_at(layer, *given):
                assert torch.equal(runner.logits(IDS), whole), layer
    assert state(runner) == before
    assert torch.equal(runner.logits(IDS), whole)


@pytest.mark.parametrize("name", NAMES)
def test_the_head_of_single_positions(name):
    runner = wrapped(name)
    replayer, before = Replayer(runner.bridge), state(runner)
    whole = runner.logits(IDS)
    with replayer.without_head() as final:
        assert runner.logits(IDS).shape == (2, 1, VOCABULARY)
    assert final[0].shape == (2, 20, 32)
    with replayer.starting_at(LAYERS, final[0].flatten(0, 1)[5:9, None]):
        some = runner.logits(IDS.flatten()[5:9, None])
    torch.testing.assert_close(some[:, 0], whole.flatten(0, 1)[5:9], rtol=1e-5, atol=1e-5)
    assert state(runner) == before


def test_a_replay_computes_neither_lower_layers_nor_the_first_attention():
    runner, calls = wrapped("llama"), []
    replayer = Replayer(runner.bridge)
    with replayer.recording({1}) as entries:
        runner.logits(IDS)
    for layer, block in enumerate(runner.bridge.blocks):
        block.register_forward_pre_hook(lambda module, args, layer=layer: calls.append(layer))
        block.attn.register_forward_pre_hook(lambda module, args, layer=layer: calls.append(f"attention {layer}"))
    with replayer.starting_at(1, *entries[1]):
        runner.logits(IDS)
    assert calls == [1, 2, "attention 2"]


@pytest.mark.parametrize("what", ["recording", "starting_at", "without_head"])
def test_the_model_is_whole_again_after_an_exception(what):
    runner = wrapped("llama")
    replayer, before = Replayer(runner.bridge), state(runner)
    with replayer.recording({1}) as entries:
        whole = runner.logits(IDS)
    context = {"recording": ({1},), "starting_at": (1, *entries[1]), "without_head": ()}[what]
    with pytest.raises(KeyboardInterrupt):
        with getattr(replayer, what)(*context):
            raise KeyboardInterrupt
    assert state(runner) == before
    assert torch.equal(runner.logits(IDS), whole)


def test_layers_that_stand_in_no_list_are_refused():
    class Bridge:
        blocks = torch.nn.ModuleList([torch.nn.Identity()])
        original_model = torch.nn.Sequential(torch.nn.Identity())

    with pytest.raises(LookupError, match="one list"):
        Replayer(Bridge())


def test_cross_entropies_by_definition():
    generator = torch.Generator().manual_seed(1)
    clean, changed = 8 * torch.randn(2, 37, 50, generator=generator)
    following = torch.randint(50, (37,), generator=generator)
    p = probabilities(clean)
    own, own_loss = cross_entropies(p, clean, following)
    under, loss = cross_entropies(p, changed, following)
    log_p, log_q = clean.double().log_softmax(-1), changed.double().log_softmax(-1)
    torch.testing.assert_close(p.double(), log_p.exp(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(under - own, (log_p.exp() * (log_p - log_q)).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss - own_loss, (log_p - log_q)[torch.arange(37), following], rtol=1e-5, atol=1e-5)
    assert torch.equal(cross_entropies(p, clean.clone(), following)[0], own)


def test_cross_entropies_where_a_probability_vanishes():
    """exp of the difference would be 0 times infinity there."""
    clean, changed = torch.zeros(1, 3), torch.zeros(1, 3)
    clean[0, 0], changed[0, 1] = 400.0, 400.0
    p = probabilities(clean)
    under, loss = cross_entropies(p, changed, torch.tensor([2]))
    assert (under - cross_entropies(p, clean, torch.tensor([2]))[0]).item() == pytest.approx(400.0)
    assert loss.item() == pytest.approx(400.0)
    assert math.isfinite(under.item())
