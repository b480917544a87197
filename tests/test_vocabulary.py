"""Tokens that a neuron reads and writes, against the modules of whole models of transformers.

What a token's embedding does to a gate is asked of the model's own norm and gate, what a direction does to the logits of
its own final norm and unembedding; neither looks at a tensor's name or knows how a gain is stored.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import glu_probe as gp
from glu_probe.checkpoint.in_memory import checkpoint_in_memory
from glu_probe.errors import NoTokenizer
from glu_probe.text.token_strings import token_strings
from glu_probe.vocabulary import read_tokens, vocabulary_cosines

from .support import write_llama
from .text import tiny_models

COUNT = 8
# family: MLP, norm in front, norm behind, final norm
PARTS = {
    "llama": ("mlp", "post_attention_layernorm", None, "norm"),
    "biases": ("mlp", "post_attention_layernorm", None, "norm"),
    "gemma2": ("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm", "norm"),  # 1 + w, scaled, tied
    "olmo2": ("mlp", None, "post_feedforward_layernorm", "norm"),  # reads the stream as it is
    "cohere": ("mlp", "input_layernorm", None, "norm"),  # LayerNorm without bias, tied
    "stablelm": ("mlp", "post_attention_layernorm", None, "norm"),  # LayerNorm with bias
    "falcon_h1": ("feed_forward", "pre_ff_layernorm", None, "final_layernorm"),  # constants on gate and down
    "helium": ("mlp", "post_attention_layernorm", None, "norm"),
}


def gates(model, name, neuron, matrix):
    """[vocabulary]: what gate or up of layer 1 makes of each token's embedding, without constants."""
    mlp, norm, _, _ = PARTS[name]
    block = model.model.layers[1]
    x = model.model.embed_tokens.weight.detach() * (model.config.hidden_size**0.5 if name == "gemma2" else 1)
    x = x if norm is None else getattr(block, norm)(x)
    zero = (
        getattr(block, norm).bias if norm is not None and getattr(getattr(block, norm), "bias", None) is not None else 0
    )
    return ((x - zero) @ getattr(getattr(block, mlp), matrix).weight[neuron]).detach().double().numpy()


def tied(model) -> bool:
    return model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def logits(model, name, neuron):
    """[vocabulary] cosines of each logit, as a linear function of the normalised stream, with what the neuron writes."""
    mlp, _, behind, final = PARTS[name]
    block, width = model.model.layers[1], model.config.hidden_size
    value = getattr(block, mlp).down_proj.weight[:, neuron].detach()
    value = value if behind is None else getattr(block, behind)(value)
    norm = getattr(model.model, final)
    head = model.lm_head.weight.detach().double()
    at = norm(torch.eye(width)).detach().double() - norm(torch.zeros(width)).detach().double()
    if "RMS" not in type(norm).__name__:
        value = value - value.mean()  # of which the norm makes nothing
    rows = head @ at.T  # the logit of every unit vector, all of one norm after the norm
    value = value.detach().double()
    return (rows @ value / rows.norm(dim=1).clamp(min=1e-9) / value.norm()).numpy()


@pytest.mark.parametrize("name", PARTS)
def test_tokens_are_those_of_the_modules(name):
    with torch.no_grad():
        model = tiny_models.build(name)
        checkpoint = checkpoint_in_memory(model)
        site = checkpoint.site(1)
        layer = checkpoint.load(site)
        for neuron in (0, 17):
            reading = read_tokens(checkpoint, site, layer, neuron, count=COUNT, tokenizer=tiny_models.tokens())
            assert reading.missing == {}
            sign = -1.0 if layer.canonical_gauge()[neuron] < 0 else 1.0
            reads = {
                "query": gates(model, name, neuron, "gate_proj"),
                "key": sign * gates(model, name, neuron, "up_proj"),
            }
            known = np.zeros(tiny_models.VOCABULARY, dtype=bool)
            known[list(tiny_models.tokens().get_vocab().values())] = True
            known[model.config.pad_token_id] &= not tied(model)  # a row of zeros
            for factor, expected in {**reads, "value": sign * logits(model, name, neuron)}.items():
                rows = reading.tokens[reading.tokens["factor"] == factor]
                if (
                    factor != "value" and name == "olmo2"
                ):  # no norm: a long embedding does more, and has the same cosine
                    expected = expected / model.model.embed_tokens.weight.norm(dim=1).clamp(min=1e-9).double().numpy()
                usable = (
                    known & (model.model.embed_tokens.weight.norm(dim=1) > 0).numpy() if factor != "value" else known
                )
                order = [token for token in np.argsort(-expected, kind="stable") if usable[token]]
                assert rows.query("side == 'top'")["token_id"].tolist() == order[:COUNT]
                assert rows.query("side == 'bottom'")["token_id"].tolist() == order[::-1][:COUNT]
                top = rows.query("side == 'top'")["cosine"].to_numpy()
                scale = (
                    expected[order[:COUNT]] / top
                )  # the same for all: |q| times the norm of every normalised embedding
                assert scale == pytest.approx(scale[0], rel=2e-3)
                if factor == "value":
                    assert scale[0] == pytest.approx(1, abs=2e-3)


def test_strings_and_null(tmp_path):
    directory = tiny_models.save(tmp_path / "tiny", "llama")
    checkpoint = gp.open_checkpoint(directory)
    site = checkpoint.site(1)
    reading = read_tokens(checkpoint, site, checkpoint.load(site), 0, count=3)
    known = {token: piece for piece, token in tiny_models.tokens().get_vocab().items()}
    for row in reading.tokens.itertuples():
        text = eval(row.token)
        raw = text if isinstance(text, bytes) else text.encode()
        assert len(raw) == len(known[row.token_id])
    for factor, count in (("query", len(known) - 1), ("value", len(known))):  # the embedding of padding is zero
        rows = reading.tokens[reading.tokens["factor"] == factor]
        null = gp.measures.largest_cosine(count, 32, signed=True)
        assert rows["null"].tolist() == pytest.approx([null] * 3 + [-null] * 3)
    assert any("20 rows of the vocabulary are no token" in note for note in reading.notes)
    assert any("lm_head.weight, the gain of model.norm.weight folded in" in note for note in reading.notes)


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_blocks_do_not_change_a_cosine(monkeypatch, rows):
    from glu_probe import vocabulary

    table = torch.randn(50, 16)
    table[9] = 0.0
    monkeypatch.setattr(vocabulary, "_VALUES", rows * 16)
    source = _Table(table)
    direction = torch.randn(2, 16, dtype=torch.float64)
    cosines = vocabulary_cosines(source, "t", direction)
    expected = torch.nn.functional.cosine_similarity(direction[:, None], table.double()[None], dim=2).numpy()
    assert np.isnan(cosines[:, 9]).all()
    expected[:, 9] = np.nan
    assert np.allclose(cosines, expected, equal_nan=True, atol=1e-12)
    assert source.largest <= max(rows, 1)


class _Table:
    def __init__(self, table):
        from glu_probe.checkpoint.source import TensorInfo

        self.table, self.largest = table, 0
        self.infos = lambda: {"t": TensorInfo("t", "F32", tuple(table.shape), 0, "")}

    def read(self, name, rows):
        self.largest = max(self.largest, rows.stop - rows.start)
        return self.table[rows]


def reasons(checkpoint, **options) -> dict[str, str]:
    site = checkpoint.site(1)
    return read_tokens(checkpoint, site, checkpoint.load(site), 0, **options).missing


def test_what_is_not_there_is_said_by_factor(tmp_path, llama):
    tokens = tiny_models.tokens()
    found = reasons(gp.open_checkpoint(llama), tokenizer=tokens)
    assert set(found) == {"value"}
    assert "does not say that it is the embedding" in found["value"]
    assert set(reasons(gp.open_checkpoint(llama)).values()) == {
        found["value"], "there are no tokenizer files in this directory",
    }  # fmt: skip
    raw = reasons(gp.open_checkpoint(llama, fold_norm=False), tokenizer=tokens)
    assert "is not folded in, and its gain belongs to q and k" in raw["query"] == raw["key"]
    unknown = gp.open_checkpoint(write_llama(tmp_path / "other", model_type="nobody_knows"))
    assert "family is not in the table" in reasons(unknown, tokenizer=tokens)["query"]
    memory = checkpoint_in_memory(tiny_models.build("llama"))
    assert set(reasons(memory).values()) == {"a model in memory comes without its tokenizer"}
    with pytest.raises(NoTokenizer, match="a model in memory comes without its tokenizer"):
        token_strings(memory)


def test_a_row_of_zeros_reads_nothing(tmp_path):
    model = tiny_models.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0] = 0.0
    found = reasons(checkpoint_in_memory(model), tokenizer=tiny_models.tokens())
    assert found == {"key": "its row is zero"}
