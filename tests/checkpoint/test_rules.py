"""What is decided from a config: activation, family and norms, and where each was found."""

from __future__ import annotations

import pytest
import torch

import glu_probe as gp
from glu_probe.checkpoint.rules import Config, Options, decide, gguf_config
from glu_probe.errors import BadOption, UnknownActivation

from ..support import llama_config, llama_tensors, write_checkpoint, write_llama


def rules(config: dict, tower: str = "text", *, gguf: bool = False, **options):
    """The decisions about one tower."""
    return decide(Config(config, gguf), tower, Options(**options))


# -- activation ----------------------------------------------------------------------------------


def test_the_config_names_the_activation():
    found = rules(llama_config(hidden_act="gelu"))
    assert (found.activation.name, found.activation_source) == ("gelu", "config hidden_act")


def test_the_option_wins():
    found = rules(llama_config(), activation="relu")
    assert (found.activation.name, found.activation_source) == ("relu", "option")


@pytest.mark.parametrize("written", ["gelu", "gelu_tanh"])
def test_gemma_s_family_rule(written):
    found = rules({"model_type": "gemma", "hidden_act": written})
    assert found.activation.name == "gelu_tanh"
    assert found.activation_source == ("family rule" if written == "gelu" else "config hidden_act")


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "vaultgemma", "gemma4_text", "recurrent_gemma"])
def test_gemma_2_and_later_compute_hidden_activation_alone(model_type):
    assert rules({"model_type": model_type, "hidden_act": "silu"}).activation.name == "gelu_tanh"
    assert rules({"model_type": model_type, "hidden_activation": "gelu"}).activation.name == "gelu"


@pytest.mark.parametrize("value", ["foo", "", 3, ["silu"], {"name": "silu"}])
def test_an_unknown_activation_is_never_replaced(value, tmp_path):
    with pytest.raises(UnknownActivation, match="not known here"):
        gp.open_checkpoint(write_llama(tmp_path / "m", layers=1, hidden_act=value))


def test_no_activation_key(tmp_path):
    config = {key: value for key, value in llama_config(num_hidden_layers=1).items() if key != "hidden_act"}
    checkpoint = gp.open_checkpoint(write_checkpoint(tmp_path / "m", llama_tensors(layers=1), config))
    assert checkpoint.layer(0).functional_note() == "the activation is not known"
    assert any("config has none of hidden_act" in note for note in checkpoint.notes)
    report = gp.probe(checkpoint, samples=2)
    assert report.neurons["abs_cos_qk"].notna().all()
    assert report.neurons["exchange_asymmetry"].isna().all()
    assert report.layers["note"].tolist() == ["the activation is not known"]


def test_an_unknown_family_s_activation_is_not_taken_for_known():
    """What it does to the gate, and on which input, only the family says."""
    found = rules(llama_config(model_type="newcomer"))
    assert (found.family, found.activation, found.norm) == (None, None, None)
    assert found.scale_note


# -- which part of the config speaks of which tower ----------------------------------------------


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_the_language_model_may_be_nested(key):
    config = {"model_type": "wrapper", key: llama_config(hidden_act="gelu"), "hidden_act": "relu"}
    assert Config(config, gguf=False).model_type == "llama"
    assert rules(config).activation.name == "gelu"


def test_a_thinker_holds_the_towers():
    config = {
        "model_type": "wrapper",
        "thinker_config": {"text_config": llama_config(), "vision_config": {"model_type": "v"}},
    }
    assert rules(config).name == "llama"
    assert Config(config, gguf=False).model_type_of("vision") == "v"


def test_a_wrapper_s_type_serves_where_the_part_has_none():
    assert rules({"model_type": "gemma3", "text_config": {"hidden_size": 16}}).name == "gemma3"


def test_a_wrapper_s_type_does_not_overrule_an_unknown_part():
    assert rules({"model_type": "llama", "text_config": {"model_type": "newcomer"}}).family is None


@pytest.mark.parametrize("tower", ["vision", "audio", "model.connector.layers"])
def test_other_towers_never_get_the_language_model_s_rules(tower):
    assert rules(llama_config(), tower).family is None
    assert (
        rules({"text_config": llama_config(), "vision_config": {"model_type": "v"}}, tower, family="llama").family
        is None
    )


def test_a_tower_s_own_family_is_used():
    assert rules({"text_config": {"model_type": "newcomer"}, "vision_config": llama_config()}, "vision").name == "llama"


@pytest.mark.parametrize(
    "config", [{}, {"model_type": None}, {"model_type": 3}, {"text_config": "no"}, {"model_type": ["llama"]}]
)
def test_a_config_that_says_nothing(config):
    assert rules(config).family is None


# -- families and norms --------------------------------------------------------------------------


def test_a_misspelt_family(llama):
    with pytest.raises(BadOption, match="Did you mean gemma"):
        gp.open_checkpoint(llama, family="gema2")


def test_the_named_family_s_norm_is_folded(tmp_path):
    tensors = llama_tensors(layers=1)
    layer = gp.open_checkpoint(write_checkpoint(tmp_path / "m", tensors, llama_config()), family="gemma").layer(0)
    gain = 1 + tensors["model.layers.0.post_attention_layernorm.weight"]
    assert torch.allclose(layer.query, tensors["model.layers.0.mlp.gate_proj.weight"] * gain)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_parallel_residual_changes_the_norm(parallel):
    norm = rules({"model_type": "stablelm", "hidden_act": "silu", "use_parallel_residual": parallel}).norm
    assert norm.tensor == ("input_layernorm" if parallel else "post_attention_layernorm")


@pytest.mark.parametrize("bias", [False, True])
def test_a_config_decides_on_a_norm_s_bias(bias):
    found = rules({"model_type": "modernbert", "norm_bias": bias})
    assert found.norm.bias is bias
    assert found.norm_words(folded=True) == f"LayerNorm, gain w{', bias' if bias else ''}, folded"


def test_gguf_has_the_1_baked_in():
    assert rules({"model_type": "gemma2"}, gguf=True).norm.weight == "plain"
    assert rules({"model_type": "gemma2"}).norm.weight == "offset"


def test_gguf_metadata_under_the_names_of_configs():
    metadata = {
        "general.architecture": "granite",
        "granite.embedding_length": 16,
        "granite.residual_scale": 0.25,
        "llama.block_count": 3,
    }
    assert gguf_config(metadata, ["blk.0.ffn_norm.weight"]) == {
        "model_type": "granite",
        "hidden_size": 16,
        "residual_multiplier": 0.25,
        "use_parallel_residual": False,
    }
