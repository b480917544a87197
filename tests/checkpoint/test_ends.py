"""Where vocabularies enter and leave: names of families, and what is refused by name."""

from __future__ import annotations

import pytest
import torch

import glu_probe as gp
from glu_probe.checkpoint.ends import find_ends
from glu_probe.checkpoint.family import Norm
from glu_probe.checkpoint.source import TensorInfo

RMS, LAYER = Norm("n"), Norm("n", kind="layer")


def ends(
    names: str,
    prefix: str = "model.layers",
    *,
    width: int = 16,
    family: str | None = "llama",
    norm=RMS,
    tower="text",
    gguf=False,
    parts=None,
    **config,
):
    """Of a file with these tensors; names that end in "norm" or in "ln_f" are vectors."""
    infos = {}
    for name in names.split():
        vector = name.endswith("bias") or "norm" in name.split(".")[-2].lower() or ".ln_f." in f".{name}"
        infos[name] = TensorInfo(name, "F32", (width,) if vector else (32, width), 0, "file")
    return find_ends(
        infos, prefix, 16, tower=tower, norm=norm, family=family, config=config, parts=parts or {}, gguf=gguf
    )


@pytest.mark.parametrize(("prefix", "names"), [
    ("model.layers", "model.embed_tokens.weight lm_head.weight model.norm.weight"),
    ("layers", "embed_tokens.weight lm_head.weight norm.weight"),
    ("language_model.model.layers", "language_model.model.embed_tokens.weight language_model.lm_head.weight language_model.model.norm.weight"),
    ("model.language_model.layers", "model.language_model.embed_tokens.weight lm_head.weight model.language_model.norm.weight"),
    ("transformer.h", "transformer.wte.weight lm_head.weight transformer.ln_f.weight"),
    ("transformer.encoder.layers", "transformer.embedding.word_embeddings.weight transformer.output_layer.weight transformer.encoder.final_layernorm.weight"),
    ("model.layers", "model.tok_embeddings.weight output.weight model.norm.weight"),
    ("model.transformer.blocks", "model.transformer.wte.weight model.transformer.ff_out.weight model.transformer.ln_f.weight"),
    ("decoder.block", "shared.weight lm_head.weight decoder.final_layer_norm.weight"),
    ("blk", "token_embd.weight output.weight output_norm.weight"),
])  # fmt: skip
def test_names(prefix, names):
    found = ends(names, prefix)
    assert [found.embedding, found.unembedding, found.norm_tensor] == names.split()
    assert (found.no_embedding, found.no_unembedding, found.tied) == (None, None, False)


BODY = "model.embed_tokens.weight model.norm.weight"


@pytest.mark.parametrize(("said", "tied"), [
    ({"config": {"tie_word_embeddings": True}}, True),
    ({"config": {"architectures": ["GemmaForCausalLM"]}}, True),
    ({"config": {"architectures": ["Gemma3ForConditionalGeneration"]}, "parts": {"tie_word_embeddings": True}}, True),
    ({"gguf": True, "prefix": "blk", "names": "token_embd.weight output_norm.weight"}, True),
    ({"config": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}}, "by its config it is not the embedding"),
    ({"config": {"architectures": ["LlamaModel"]}}, "does not say that it is the embedding"),
    ({}, "does not say that it is the embedding"),
])  # fmt: skip
def test_without_an_unembedding_of_its_own(said, tied):
    config = said.pop("config", {})
    names = said.pop("names", BODY)
    found = ends(names, **said, **config)
    if tied is True:
        assert (found.unembedding, found.tied, found.no_unembedding) == (found.embedding, True, None)
    else:
        assert (found.unembedding, found.tied) == (None, False)
        assert tied in found.no_unembedding


@pytest.mark.parametrize(("found", "reads", "writes"), [
    (ends(""), "the embedding is not there under a known name", "neither unembedding nor embedding"),
    (ends(f"{BODY} lm_head.weight", family=None), None, "the family is not in the table"),
    (ends(f"{BODY} lm_head.weight", norm=None), None, "what kind of norm the family has is not known"),
    (ends("model.embed_tokens.weight lm_head.weight"), None, "the final norm is not in the file"),
    (ends(f"{BODY} lm_head.weight", width=8), "'model.embed_tokens.weight' is [32, 8], not [vocabulary, 16]", "'lm_head.weight' is [32, 8]"),
    (ends(f"{BODY} model.norm.bias lm_head.weight"), None, "has a bias, which an RMSNorm has not"),
    (ends(f"{BODY} model.wte.weight lm_head.weight"), "could both be the embedding", None),
    (ends(f"{BODY} model.final_layernorm.weight lm_head.weight"), None, "could both be the final norm"),
    (ends(f"{BODY} model.embeddings.norm.weight lm_head.weight"), "the norm 'model.embeddings.norm.weight' stands behind the embedding", None),
    (ends(f"{BODY} lm_head.weight", parts={"altup_num_inputs": 4}), "AltUp", "AltUp"),
    (ends("encoder.embed_tokens.weight encoder.norm.weight lm_head.weight", "encoder.layers", tower="encoder"), None, "an encoder writes no logits"),
    (ends(f"{BODY} lm_head.weight", "model.visual.blocks", tower="vision"), "the stack 'vision' has no vocabulary", "has no vocabulary"),
])  # fmt: skip
def test_refused_by_name(found, reads, writes):
    assert (found.embedding is None) == (reads is not None)
    assert (found.unembedding is None) == (writes is not None)
    for said, wanted in ((found.no_embedding, reads), (found.no_unembedding, writes)):
        assert said is None if wanted is None else wanted in said


def test_a_norm_with_bias_where_norms_have_one():
    found = ends(f"{BODY} model.norm.bias lm_head.weight", norm=LAYER)
    assert (found.unembedding, found.centred) == ("lm_head.weight", True)


def test_a_final_norm_that_is_called_the_embedding_s():
    found = ends("model.embed_tokens.weight model.embedding_norm.weight", family="lfm2_moe", tie_word_embeddings=True)
    assert (found.norm_tensor, found.no_embedding, found.no_unembedding) == ("model.embedding_norm.weight", None, None)


def test_a_norm_without_gain_needs_no_tensor():
    found = ends("model.embed_tokens.weight lm_head.weight", norm=Norm("n", kind="layer", weight="none"))
    assert (found.unembedding, found.norm_tensor) == ("lm_head.weight", None)


def test_through_a_checkpoint(llama):
    checkpoint = gp.open_checkpoint(llama)
    found = checkpoint.ends(checkpoint.site(3))
    assert found.embedding == "model.embed_tokens.weight"
    assert "does not say that it is the embedding" in found.no_unembedding


def test_the_gain_of_a_norm_on_the_output(tmp_path):
    from ..text import tiny_models

    model = tiny_models.build("gemma2")
    model.save_pretrained(tmp_path)
    wanted = 1 + model.model.layers[1].post_feedforward_layernorm.weight.detach().double()
    for fold in (False, True):
        checkpoint = gp.open_checkpoint(tmp_path, fold_post_norm=fold)
        assert torch.equal(checkpoint.output_gain(checkpoint.site(1)), wanted)
