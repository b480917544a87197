"""Families that a user adds."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import glu_probe as gp
from glu_probe.activations import Activation, limited
from glu_probe.checkpoint import known_families
from glu_probe.errors import BadOption, LayoutUnknown, NoExpertsMapped, UnknownActivation
from glu_probe.testing import write_tiny_checkpoint

from ..support import llama_config, llama_tensors, write_checkpoint


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """What a test registers is gone after it."""
    for table in ("_REGISTERED", "_BY_NAME", "_BY_ARCHITECTURE"):
        monkeypatch.setattr(known_families, table, dict(getattr(known_families, table)))


def of_a_newcomer(path, family: str, **options):
    """Files of a family under a name that the table does not have."""
    truth = write_tiny_checkpoint(family, path, **options)
    config = json.loads((path / "config.json").read_text()) | {"model_type": "newcomer"}
    (path / "config.json").write_text(json.dumps(config))
    return truth


def test_what_is_registered_is_read(tmp_path):
    truth = of_a_newcomer(tmp_path, "gte")
    with pytest.raises(LayoutUnknown):
        gp.open_checkpoint(tmp_path)
    gp.register_family(
        "newcomer", projections=("up_gate_proj", "down_proj"), order="up-first", act_key="hidden_act", norm="attn_ln",
        norm_kind="layer", norm_bias=True,
    )  # fmt: skip
    checkpoint = gp.open_checkpoint(tmp_path)
    layer = checkpoint.layer(0)
    expected = truth[0].query * truth[0].gain
    assert torch.allclose(layer.query, expected - expected.mean(1, keepdim=True), atol=1e-6)
    assert layer.activation.name == "gelu"
    assert layer.functional_note() is None
    assert checkpoint.provenance()["towers"]["text"]["family"] == "newcomer"


def of_names(path, names: tuple[str, str, str], model_type: str = "newcomer"):
    """A layer whose gate, up and down have these names."""
    parts = dict(zip(("gate_proj", "up_proj", "down_proj"), names, strict=True))
    tensors = {
        name.replace(old, new): tensor
        for name, tensor in llama_tensors(layers=1).items() for old, new in parts.items() if old in name
    }  # fmt: skip
    return write_checkpoint(path, tensors, llama_config(num_hidden_layers=1, model_type=model_type)), tensors


@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("one", "two", "three")])
@pytest.mark.parametrize("model_type", ["newcomer", "llama"])
def test_the_refusal_of_names_leads_to_a_family_that_reads_them(names, model_type, tmp_path):
    path, tensors = of_names(tmp_path / "m", names, model_type)
    with pytest.raises(LayoutUnknown, match=r"`gp\.register_family`"):
        gp.open_checkpoint(path)
    gp.register_family("mine", projections=names, act="silu")
    layer = gp.open_checkpoint(path, family="mine").layer(0)
    assert torch.equal(layer.query, tensors[f"model.layers.0.mlp.{names[0]}.weight"])


def test_the_refusal_of_a_fused_tensor_leads_to_a_family_with_an_order(tmp_path):
    truth = of_a_newcomer(tmp_path, "phi3")
    with pytest.raises(LayoutUnknown, match=r"--fused-layout .* `--family NAME` .* `gp\.register_family`"):
        gp.open_checkpoint(tmp_path)
    gp.register_family("newcomer", projections=("gate_up_proj", "down_proj"), order="gate-first", act="silu")
    assert torch.equal(gp.open_checkpoint(tmp_path).layer(0).query, truth[0].query)


def test_names_behind_other_modules_are_not_sent_to_a_registration_that_cannot_hold_them(tmp_path):
    path, _ = of_names(tmp_path / "m", ("gate_proj.linear", "up_proj.linear", "down_proj.linear"))
    with pytest.raises(LayoutUnknown, match="save the model with plain linear layers") as caught:
        gp.open_checkpoint(path)
    assert "register_family" not in str(caught.value)


def test_experts_under_unknown_names_lead_to_it(tmp_path):
    of_a_newcomer(tmp_path, "mixtral")
    path = tmp_path / "model.safetensors"
    tensors = {name.replace(".w1.", ".a.").replace(".w3.", ".b.").replace(".w2.", ".c."): tensor
               for name, tensor in load_file(path).items()}  # fmt: skip
    save_file(tensors, path)
    with pytest.raises(NoExpertsMapped, match=r"`gp\.register_family` adds one"):
        gp.open_checkpoint(tmp_path)
    gp.register_family("newcomer", projections=("a", "b", "c"), act="silu")
    stem = next(name.removesuffix(".a.weight") for name in tensors if name.endswith("experts.0.a.weight"))
    assert torch.equal(gp.open_checkpoint(tmp_path).layer(0, 0).key, tensors[f"{stem}.b.weight"])


def test_experts_in_columns(tmp_path):
    truth = of_a_newcomer(tmp_path, "gpt_oss", d_model=24, d_mlp=24)
    gp.register_family(
        "newcomer", projections=("gate_up_proj", "down_proj"), order="interleaved", stored="columns", act="silu"
    )
    for layer, mlp in zip(gp.open_checkpoint(tmp_path).layers(), truth, strict=True):
        assert torch.equal(layer.query, mlp.query)
        assert torch.equal(layer.value, mlp.value)
        assert "no norm stands in front" in layer.functional_note()


def test_the_option_knows_it(tmp_path):
    of_a_newcomer(tmp_path, "mixtral")
    gp.register_family("mine", projections=("w1", "w3", "w2"), act="relu", norm="post_attention_layernorm")
    assert gp.open_checkpoint(tmp_path, family="mine").layer(0, 0).activation.name == "relu"


@pytest.mark.parametrize("missing", ["coupled", lambda config, layer, group: "coupled" if layer == 0 else None])
def test_a_reason_why_functions_are_missing(missing, tmp_path):
    of_a_newcomer(tmp_path, "llama")
    gp.register_family("newcomer", projections=("gate_proj", "up_proj", "down_proj"), act="silu",
                       norm="post_attention_layernorm", missing=missing)  # fmt: skip
    notes = [layer.functional_note() for layer in gp.open_checkpoint(tmp_path).layers()]
    assert notes == ["coupled", "coupled" if isinstance(missing, str) else None]


@pytest.mark.parametrize("own", [limited(gp.activation("gelu"), 2.0), Activation("sine", "sin(z)", torch.sin)])
def test_an_activation_of_one_s_own(own, tmp_path):
    of_a_newcomer(tmp_path, "llama")
    gp.register_family(
        "newcomer", projections=("gate_proj", "up_proj", "down_proj"), act=own, norm="post_attention_layernorm"
    )
    layer = gp.open_checkpoint(tmp_path).layer(0)
    assert layer.activation is own
    x = torch.ones(1, layer.d_model)
    a, b = layer.preactivations(x)
    assert torch.equal(layer.coefficients(x), own(a) * (b if own.up is None else own.up(b)))


def test_a_family_of_the_table_is_not_replaced_in_silence(tmp_path):
    write_tiny_checkpoint("llama", tmp_path)
    swapped = {"projections": ("up_proj", "gate_proj", "down_proj"), "act": "silu"}
    with pytest.raises(BadOption, match="'llama' is a family of the table"):
        gp.register_family("llama", **swapped)
    with pytest.raises(BadOption, match="'gpt2' is a family of the table"):
        gp.register_family("newcomer", "gpt2", **swapped)
    assert gp.open_checkpoint(tmp_path).layer(0).sources["gate"].endswith("gate_proj.weight")
    gp.register_family("llama", **swapped, replace=True)
    assert gp.open_checkpoint(tmp_path).layer(0).sources["gate"].endswith("up_proj.weight")


def test_registering_again_takes_the_place(tmp_path):
    of_a_newcomer(tmp_path, "llama")
    for act in ("silu", "gelu"):
        gp.register_family("newcomer", projections=("gate_proj", "up_proj", "down_proj"), act=act)
    assert gp.open_checkpoint(tmp_path).layer(0).activation.name == "gelu"


GOOD = {"projections": ("w1", "w3", "w2"), "act": "silu"}


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"projections": ("w1",)}, "projections has"),
        ({"projections": ("w1", "w1", "w2")}, "different names"),
        ({"projections": ("mlp.w1", "w3", "w2")}, "last one before"),
        ({"projections": ()}, "projections is"),
        ({"projections": 3}, "projections is"),
        ({"projections": (("w1", 3, "w2"),)}, "projections is"),
        ({"projections": ("w13", "w2")}, "order does not say"),
        ({"order": "first"}, "order is 'first'"),
        ({"stored": "diagonal"}, "stored is"),
        ({"act": None}, "neither act nor act_key"),
        ({"norm": ""}, "the norm's name"),
        ({"norm": "n", "norm_kind": "batch"}, "norm_kind"),
        ({"norm": "n", "norm_weight": "w"}, "norm_weight"),
        ({"norm": "n", "gguf": "newarch"}, "GGUF files call the norm"),
        ({"missing": 3}, "missing is 3"),
        ({"gguf": [3]}, "gguf is"),
        ({"norm": "ffn_{x}"}, "the norm's name"),
        ({"norm": "ffn_{0}"}, "the norm's name"),
        ({"norm": "ffn_norm.weight"}, "the norm's name"),
        ({"norm": "n", "post_norm": "post.bias"}, "the norm's name"),
        ({"order": "up-first"}, "no tensor of projections holds gate and up together"),
        ({"norm_kind": "layer"}, "norm is None"),
        ({"norm_bias": True}, "norm is None"),
        ({"norm": "n", "norm_weight": "none", "norm_bias": True}, "norm_bias is true"),
        ({"projections": ("w13", "w2"), "order": "gate-first", "stored": "row-stacked"}, "'row-stacked'"),
        ({"projections": [("w1", "w3", "w2"), ("w3", "w1", "w2")]}, "'w1' is the gate in one"),
    ],
)
def test_what_is_refused(wrong, match):
    with pytest.raises(BadOption, match=match):
        gp.register_family("newcomer", **GOOD | wrong)
    assert known_families.find_family("newcomer") is None


def test_an_unknown_activation_is_refused():
    with pytest.raises(UnknownActivation):
        gp.register_family("newcomer", **GOOD | {"act": "foo"})


@pytest.mark.parametrize("names", [(), ("",), (3,)])
def test_names_are_needed(names):
    with pytest.raises(BadOption, match="name"):
        gp.register_family(*names, **GOOD)
