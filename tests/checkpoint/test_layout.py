"""Which tensor is gate, up and down: read where it is certain, refused by name where it is not."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel

import glu_probe as gp
from glu_probe.checkpoint.places import Parameter, locate
from glu_probe.checkpoint.towers import name_towers
from glu_probe.cli import main
from glu_probe.errors import (
    GluProbeError,
    IncompleteTriple,
    LayoutUnknown,
    NoExpertsMapped,
    NoGatedMLP,
    QuantizedWeights,
    ShapeMismatch,
    UnmergedAdapter,
    UnscaledFP8,
)

from ..support import D_MLP, D_MODEL, LAYERS, llama_config, llama_tensors, write_checkpoint, write_llama

MLP = "model.layers.{}.mlp.{}_proj.weight"


def opened(path, tensors: dict[str, Tensor], config: dict | None = None, **options) -> gp.Checkpoint:
    """A checkpoint of these tensors, with LLaMA's config unless another is given."""
    return gp.open_checkpoint(
        write_checkpoint(path / "m", tensors, llama_config() if config is None else config), **options
    )


def replaced(leaf: str, *, layers: int = 2, **suffixes: Tensor) -> dict[str, Tensor]:
    """LLaMA tensors, with every `leaf` weight replaced by tensors of other suffixes (dots written as two underscores)."""
    tensors = llama_tensors(layers=layers)
    for layer in range(layers):
        del tensors[MLP.format(layer, leaf)]
        for suffix, value in suffixes.items():
            tensors[f"model.layers.{layer}.mlp.{leaf}_proj.{suffix.replace('__', '.')}"] = value.clone()
    return tensors


# -- gate and up in one tensor -------------------------------------------------------------------


@pytest.fixture
def halves() -> dict[str, Tensor]:
    """`gate_up_proj` whose first half is 1 and second half 2."""
    return {
        "model.layers.0.mlp.gate_up_proj.weight": torch.cat(
            [torch.ones(D_MLP, D_MODEL), 2 * torch.ones(D_MLP, D_MODEL)]
        ),
        "model.layers.0.mlp.down_proj.weight": torch.ones(D_MODEL, D_MLP),
        "model.layers.0.post_attention_layernorm.weight": torch.ones(D_MODEL),
    }


def fused_config(model_type: str) -> dict:
    return llama_config(model_type=model_type, num_hidden_layers=1)


def norms(layer: gp.GatedLayer) -> tuple[set[float], set[float]]:
    return set(layer.query.norm(dim=1).tolist()), set(layer.key.norm(dim=1).tolist())


def test_gate_first(halves, tmp_path):
    checkpoint = opened(tmp_path, halves, fused_config("phi3"))
    assert norms(checkpoint.layer(0)) == ({4.0}, {8.0})
    assert checkpoint.layer(0).d_mlp == D_MLP
    assert gp.probe(checkpoint, samples=2).neurons["abs_cos_qk"].tolist() == [1.0] * D_MLP


@pytest.mark.parametrize(
    ("order", "gate", "up"),
    [("gate-first", {4.0}, {8.0}), ("up-first", {8.0}, {4.0}), ("interleaved", {4.0, 8.0}, {4.0, 8.0})],
)
@pytest.mark.parametrize("model_type", ["phi3", "newcomer"])
def test_the_option_decides(halves, model_type, order, gate, up, tmp_path):
    layer = opened(tmp_path, halves, fused_config(model_type), fused_layout=order).layer(0)
    assert norms(layer) == (gate, up)


def test_interleaved_rows(halves, tmp_path):
    halves["model.layers.0.mlp.gate_up_proj.weight"] = torch.arange(1.0, 2 * D_MLP + 1)[:, None].repeat(1, D_MODEL)
    layer = opened(tmp_path, halves, fused_config("newcomer"), fused_layout="interleaved").layer(0)
    assert layer.query[:, 0].tolist() == list(range(1, 2 * D_MLP, 2))
    assert layer.key[:, 0].tolist() == list(range(2, 2 * D_MLP + 1, 2))


@pytest.mark.parametrize("order", ["gate-first", "up-first", "interleaved"])
def test_fused_biases_follow_their_rows(halves, order, tmp_path):
    halves["model.layers.0.mlp.gate_up_proj.bias"] = halves["model.layers.0.mlp.gate_up_proj.weight"][:, 0].clone()
    layer = opened(tmp_path, halves, fused_config("phi3"), fused_layout=order).layer(0)
    assert torch.equal(layer.query_bias, layer.query[:, 0])
    assert torch.equal(layer.key_bias, layer.key[:, 0])


@pytest.mark.parametrize("model_type", ["newcomer", "llama"])
def test_an_unknown_order_is_refused(halves, model_type, tmp_path):
    with pytest.raises(LayoutUnknown) as caught:
        opened(tmp_path, halves, fused_config(model_type))
    message = str(caught.value)
    assert "model.layers.0.mlp.gate_up_proj.weight" in message
    assert "first half" in message
    assert "second" in message
    assert "--fused-layout gate-first|up-first|interleaved" in message


def test_a_fused_tensor_of_the_wrong_height(halves, tmp_path):
    halves["model.layers.0.mlp.gate_up_proj.weight"] = torch.ones(2 * D_MLP - 1, D_MODEL)
    with pytest.raises(ShapeMismatch, match=r"gate_up_proj\.weight' \[47, 16\].*\[16, 24\]"):
        opened(tmp_path, halves, fused_config("phi3"))


def test_a_layer_without_its_down_projection(halves, tmp_path):
    halves |= {name.replace("layers.0", "layers.1"): value.clone() for name, value in halves.items()}
    del halves["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(IncompleteTriple, match=r"layer 1: down_proj is missing beside .*gate_up_proj"):
        opened(tmp_path, halves, fused_config("phi3"))


# -- names that differ from family to family -----------------------------------------------------


def renamed(names: dict[str, str]) -> dict[str, Tensor]:
    tensors = llama_tensors(layers=1)
    for old, new in names.items():
        tensors[f"model.layers.0.mlp.{new}.weight"] = tensors.pop(MLP.format(0, old))
    return tensors


@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("fc12", "fc11", "fc2"), ("one", "two", "three")])
def test_names_without_a_meaning_of_their_own_are_refused(names, tmp_path):
    with pytest.raises(LayoutUnknown, match="gate"):
        opened(tmp_path, renamed(dict(zip(("gate", "up", "down"), names, strict=True))), fused_config("newcomer"))


def test_a_fused_pair_behind_other_modules_is_not_called_plain(tmp_path):
    tensors = {
        "layers.0.mlp.fc1.proj.weight": torch.ones(2 * D_MLP, D_MODEL),
        "layers.0.mlp.fc2.weight": torch.ones(D_MODEL, D_MLP),
    }
    with pytest.raises(LayoutUnknown, match="shapes of a gated MLP"):
        opened(tmp_path, tensors, fused_config("newcomer"))


def test_a_family_by_name_gives_them_one(tmp_path):
    tensors = renamed({"gate": "w1", "up": "w3", "down": "w2"})
    layer = opened(tmp_path, tensors, fused_config("newcomer"), family="mixtral").layer(0)
    assert layer.sources["up"] == "model.layers.0.mlp.w3.weight"


def test_an_unknown_family_with_plain_names_gives_directions_only(tmp_path):
    checkpoint = opened(tmp_path, llama_tensors(layers=1), fused_config("newcomer"))
    layer = checkpoint.layer(0)
    assert torch.equal(layer.query, llama_tensors(layers=1)[MLP.format(0, "gate")])
    assert layer.activation is None
    assert "not known" in layer.functional_note()
    assert any("'newcomer' is not in the table" in note for note in checkpoint.notes)


def test_naming_the_activation_does_not_name_the_norm(tmp_path):
    layer = opened(tmp_path, llama_tensors(layers=1), fused_config("newcomer"), activation="silu").layer(0)
    assert layer.activation.name == "silu"
    assert "norm in front" in layer.functional_note()


def test_a_module_that_the_family_does_not_have_takes_the_claims_back(tmp_path):
    tensors = llama_tensors(layers=1) | {"model.layers.0.mlp.ffn_sub_norm.weight": torch.ones(D_MLP)}
    assert "ffn_sub_norm" in opened(tmp_path, tensors, fused_config("llama")).layer(0).functional_note()


# -- experts -------------------------------------------------------------------------------------


def expert_tensors(experts: int = 3, *, shared: bool = True) -> dict[str, Tensor]:
    """Two layers of experts, each filled with its own number, behind routers with traps for names."""
    tensors = {}
    for layer in range(2):
        stem = f"model.layers.{layer}."
        names = [f"mlp.experts.{number}" for number in range(experts)] + ["mlp.shared_expert"] * shared
        for number, name in enumerate(names):
            width = 10 if "experts" in name else 20
            fill = 10.0 * layer + number + 1
            tensors |= {
                f"{stem}{name}.gate_proj.weight": torch.full((width, D_MODEL), fill),
                f"{stem}{name}.up_proj.weight": torch.full((width, D_MODEL), -fill),
                f"{stem}{name}.down_proj.weight": torch.full((D_MODEL, width), fill + 0.5),
            }
        tensors |= {
            f"{stem}mlp.gate.weight": torch.ones(experts, D_MODEL),
            f"{stem}mlp.shared_expert_gate.weight": torch.ones(1, D_MODEL),
            f"{stem}post_attention_layernorm.weight": torch.ones(D_MODEL),
        }
    return tensors


def expert_config(**changes) -> dict:
    return llama_config(model_type="qwen2_moe", num_hidden_layers=2, num_experts=3, intermediate_size=None, **changes)


def test_experts_one_by_one(tmp_path):
    checkpoint = opened(tmp_path, expert_tensors(), expert_config())
    assert [(s.layer, s.expert, s.d_mlp) for s in checkpoint.sites] == [
        (layer, expert, 20 if expert == "shared" else 10) for layer in range(2) for expert in (0, 1, 2, "shared")
    ]
    for layer in range(2):
        for number, expert in enumerate((0, 1, 2, "shared")):
            factors = checkpoint.layer(layer, expert)
            assert set(factors.query.flatten().tolist()) == {10.0 * layer + number + 1}
            assert set(factors.key.flatten().tolist()) == {-(10.0 * layer + number + 1)}
            assert set(factors.value.flatten().tolist()) == {10.0 * layer + number + 1.5}
            assert factors.group == ("shared" if expert == "shared" else "routed")


def test_experts_of_an_unknown_family_are_directions(tmp_path):
    checkpoint = opened(tmp_path, expert_tensors(), expert_config() | {"model_type": "newcomer_moe"})
    assert len(checkpoint.sites) == 8
    assert all(layer.functional_note() for layer in checkpoint.layers())


@pytest.mark.parametrize(
    "router", ["mlp.gate", "block_sparse_moe.gate", "mlp.shared_expert_gate", "feed_forward.router"]
)
def test_a_router_is_never_a_gate(router, tmp_path):
    tensors = {f"model.layers.0.{router}.weight": torch.ones(D_MLP, D_MODEL)}
    tensors |= {MLP.format(0, "up"): torch.ones(D_MLP, D_MODEL), MLP.format(0, "down"): torch.ones(D_MODEL, D_MLP)}
    with pytest.raises(GluProbeError) as caught:
        opened(tmp_path, tensors, fused_config("newcomer"))
    assert isinstance(caught.value, NoGatedMLP | NoExpertsMapped | LayoutUnknown)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp.experts.w13", (3, 20, D_MODEL)),
        ("mlp.experts.w13_weight", (3, 20, D_MODEL)),
        ("mlp.experts.one.weight", (3, 10, D_MODEL)),
        ("block_sparse_moe.input_linear.weight", (3, 20, D_MODEL)),
    ],
)
@pytest.mark.parametrize("dense", [False, True])
def test_stacked_experts_are_not_passed_over(name, shape, dense, tmp_path):
    """Neither alone nor beside layers that can be read."""
    stem = name.removesuffix(".weight").rsplit(".", 1)[0]
    tensors = {
        f"model.layers.1.{name}": torch.ones(shape),
        f"model.layers.1.{stem}.up_proj.weight": torch.ones(3, 10, D_MODEL),
        f"model.layers.1.{stem}.down_proj.weight": torch.ones(3, D_MODEL, 10),
    } | (llama_tensors(layers=1) if dense else {})
    with pytest.raises(NoExpertsMapped) as caught:
        opened(tmp_path, tensors, expert_config())
    assert name.replace("layers.1", "layers.{}") in str(caught.value)
    assert "num_experts = 3" in str(caught.value)


def test_some_experts_that_cannot_be_mapped(tmp_path):
    tensors = expert_tensors() | {"model.layers.1.mlp.experts.w13": torch.ones(3, 20, D_MODEL)}
    with pytest.raises(NoExpertsMapped, match=r"not all .*layers\.\{\}\.mlp\.experts\.w13"):
        opened(tmp_path, tensors, expert_config())


def test_half_of_the_stacked_experts(tmp_path):
    tensors = expert_tensors() | {"model.layers.1.mlp.experts.gate_up_proj": torch.ones(3, 20, D_MODEL)}
    with pytest.raises(IncompleteTriple, match=r"down_proj is missing beside .*experts\.gate_up_proj"):
        opened(tmp_path, tensors, expert_config())


def test_experts_twice(tmp_path):
    tensors = expert_tensors() | {
        "model.layers.1.mlp.experts.gate_up_proj": torch.ones(3, 20, D_MODEL),
        "model.layers.1.mlp.experts.down_proj": torch.ones(3, D_MODEL, 10),
    }
    with pytest.raises(LayoutUnknown, match="two gated MLPs for expert 0"):
        opened(tmp_path, tensors, expert_config())


@pytest.mark.parametrize("lost", [1, 2])
def test_an_expert_is_missing(lost, tmp_path):
    tensors = {name: t for name, t in expert_tensors().items() if f"layers.1.mlp.experts.{lost}." not in name}
    with pytest.raises(IncompleteTriple, match=f"layer 1: experts {lost} are missing"):
        opened(tmp_path, tensors, expert_config())


def test_an_expert_lacks_its_gate(tmp_path):
    tensors = expert_tensors()
    del tensors["model.layers.1.mlp.experts.2.gate_proj.weight"]
    with pytest.raises(IncompleteTriple, match=r"gate_proj is missing beside .*experts\.2\.up_proj"):
        opened(tmp_path, tensors, expert_config())


# -- prefixes ------------------------------------------------------------------------------------

PREFIXES = [
    "",
    "module.",
    "_orig_mod.",
    "module._orig_mod.",
    "module.model.",
    "_orig_mod.module.model.",
    "language_model.model.",
    "model.language_model.",
    "base_model.model.",
    "base_model.model.model.",
    "thinker.model.",
]


def table(path) -> list[pd.DataFrame]:
    report = gp.probe(path, layers=range(2), samples=2)
    return [report.layers.assign(model="m"), report.neurons.assign(model="m")]


@pytest.fixture(scope="module")
def plain_table(tmp_path_factory):
    return table(write_llama(tmp_path_factory.mktemp("plain") / "llama", layers=2))


def assert_same(path, expected) -> None:
    for found, wanted in zip(table(path), expected, strict=True):
        pd.testing.assert_frame_equal(found, wanted, check_exact=True)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_any_prefix_gives_the_same_table(prefix, plain_table, tmp_path):
    assert_same(write_llama(tmp_path / "m", layers=2, prefix=prefix), plain_table)


@pytest.mark.parametrize(
    "wrapper", ["_orig_mod.mlp", "mlp._orig_mod", "_fsdp_wrapped_module._checkpoint_wrapped_module.mlp"]
)
def test_wrappers_within_a_layer(wrapper, plain_table, tmp_path):
    tensors = {
        name.replace("mlp", wrapper) if ".1." in name else name: value
        for name, value in llama_tensors(layers=2).items()
    }
    assert_same(write_checkpoint(tmp_path / "m", tensors, llama_config(num_hidden_layers=2)), plain_table)


def test_layers_are_in_natural_order(llama):
    assert [site.layer for site in gp.open_checkpoint(llama).sites] == list(range(LAYERS))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.mlp.gate_proj.weight", Parameter("model.layers", 3, ("mlp",), "gate_proj", "weight")),
        ("h.0.mlp.experts.2.w1.bias", Parameter("h", 0, ("mlp", "experts", "2"), "w1", "bias")),
        (
            "model.layers.0.mlp.experts.gate_up_proj",
            Parameter("model.layers", 0, ("mlp", "experts"), "gate_up_proj", "weight"),
        ),
        ("model.embed_tokens.weight", None),
        ("model.experts.0.weight", None),
        ("model.stages.0.layers.3.mlp.w.weight", Parameter("model.stages.0.layers", 3, ("mlp",), "w", "weight")),
        ("decoder.block.2.layer.1.wi.weight", Parameter("decoder.block", 2, ("layer", "1"), "wi", "weight")),
        ("encoders.4.feed_forward.w.weight", Parameter("encoders", 4, ("feed_forward",), "w", "weight")),
        (
            "model.layers.0.mlp.experts.down_proj_bias",
            Parameter("model.layers", 0, ("mlp", "experts"), "down_proj", "bias"),
        ),
    ],
)
def test_locate(name, place):
    assert locate(name) == place


# -- several stacks in one file ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefixes", "text"),
    [
        (["model.layers", "mtp.layers"], "model.layers"),
        (["model.language_model.layers", "model.visual.blocks"], "model.language_model.layers"),
        (["model.text_model.layers", "model.connector.layers"], "model.text_model.layers"),
        (["decoder.layers", "encoder.layers"], "decoder.layers"),
        (["image_tower.layers", "video_tower.layers", "language_model.model.layers"], "language_model.model.layers"),
    ],
)
def test_the_language_model_is_found_among_stacks(prefixes, text):
    names = name_towers(prefixes)
    assert names[text] == "text"
    assert len(set(names.values())) == len(prefixes)


@pytest.mark.parametrize("beside", ["model.connector.resampler.", "model.visual.", "audio_tower.", "draft."])
def test_a_second_stack_gets_none_of_the_language_model_s_rules(beside, tmp_path):
    """It has a norm of the same name; what that norm computes is not known."""
    tensors = llama_tensors(layers=2, prefix="language_model.model.") | llama_tensors(layers=1, prefix=beside)
    checkpoint = opened(tmp_path, tensors, llama_config(num_hidden_layers=2))
    text, other = (
        [layer for layer in checkpoint.layers() if (layer.tower == "text") == wanted] for wanted in (True, False)
    )
    assert (len(text), len(other)) == (2, 1)
    assert all(layer.functional_note() is None for layer in text)
    assert other[0].functional_note()
    assert "norm" not in other[0].sources


def test_a_tower_beside_the_text_that_cannot_be_read_is_noted(tmp_path):
    tensors = llama_tensors(layers=1) | {
        "visual.blocks.0.mlp.gate_up_proj.weight": torch.ones(40, 12),
        "visual.blocks.0.mlp.down_proj.weight": torch.ones(12, 20),
    }
    checkpoint = opened(tmp_path, tensors, fused_config("llama"))
    assert len(checkpoint.sites) == 1
    assert any("vision was left out" in note for note in checkpoint.notes)


def test_the_model_stored_twice(tmp_path):
    tensors = llama_tensors(layers=1) | llama_tensors(layers=1, prefix="module.model.")
    with pytest.raises(LayoutUnknown, match="twice"):
        opened(tmp_path, tensors)


def test_two_dense_mlps_in_a_layer(tmp_path):
    tensors = llama_tensors(layers=1)
    tensors |= {
        name.replace(".mlp.", ".audio_mlp."): value.clone() for name, value in tensors.items() if ".mlp." in name
    }
    mlp, audio = (opened(tmp_path, tensors).layer(0, expert) for expert in ("mlp", "audio_mlp"))
    assert (mlp.group, audio.group) == ("dense", "dense")
    assert torch.equal(mlp.query, audio.query)
    assert "do not know of audio_mlp" in audio.functional_note()


def test_two_dense_mlps_of_one_name(tmp_path):
    tensors = llama_tensors(layers=1)
    tensors |= {name.replace(".mlp.", ".block.mlp."): t.clone() for name, t in tensors.items() if ".mlp." in name}
    assert [s.expert for s in opened(tmp_path, tensors).sites] == ["block.mlp", "mlp"]


# -- shapes --------------------------------------------------------------------------------------


def test_gate_and_up_of_different_heights(tmp_path):
    tensors = llama_tensors() | {MLP.format(3, "up"): torch.ones(D_MLP - 1, D_MODEL)}
    with pytest.raises(ShapeMismatch) as caught:
        opened(tmp_path, tensors)
    assert f"{MLP.format(3, 'gate')!r} [24, 16]" in str(caught.value)
    assert f"{MLP.format(3, 'up')!r} [23, 16]" in str(caught.value)


@pytest.mark.parametrize("leaf", ["gate", "up", "down"])
def test_one_part_of_a_layer_is_missing(leaf, tmp_path):
    tensors = llama_tensors()
    del tensors[MLP.format(5, leaf)]
    with pytest.raises(IncompleteTriple, match=f"layer 5: {leaf}_proj is missing"):
        opened(tmp_path, tensors)


def test_up_is_missing_everywhere(tmp_path):
    tensors = {name: value for name, value in llama_tensors().items() if "up_proj" not in name}
    with pytest.raises(IncompleteTriple, match="up_proj is missing"):
        opened(tmp_path, tensors)


def test_gate_and_up_in_different_shards(plain_table, tmp_path):
    tensors, path = llama_tensors(layers=2), tmp_path / "m"
    first = {name: value for name, value in tensors.items() if "gate_proj" in name}
    write_checkpoint(path, first, llama_config(num_hidden_layers=2), name="model-00001-of-00002.safetensors")
    rest = {name: value for name, value in tensors.items() if name not in first}
    write_checkpoint(path, rest, llama_config(num_hidden_layers=2), name="model-00002-of-00002.safetensors")
    assert_same(path, plain_table)


def test_another_model_s_config(tmp_path):
    with pytest.raises(ShapeMismatch, match="config says 32"):
        opened(tmp_path, llama_tensors(), llama_config(hidden_size=32))


@pytest.mark.parametrize(
    "config", [llama_config(), {"model_type": "llama", "hidden_act": "silu"}, {"model_type": "newcomer"}]
)
def test_transposed_tensors_are_refused(config, tmp_path):
    tensors = {name: value.T if ".mlp." in name else value for name, value in llama_tensors().items()}
    with pytest.raises(ShapeMismatch, match="transposed"):
        opened(tmp_path, tensors, config)


def test_one_transposed_tensor_is_refused(tmp_path):
    tensors = llama_tensors()
    tensors[MLP.format(0, "down")] = tensors[MLP.format(0, "down")].T
    with pytest.raises(ShapeMismatch, match=r"down_proj\.weight' \[24, 16\]"):
        opened(tmp_path, tensors)


def test_a_bias_of_the_wrong_size(tmp_path):
    tensors = llama_tensors() | {"model.layers.0.mlp.gate_proj.bias": torch.ones(D_MODEL)}
    with pytest.raises(ShapeMismatch, match=r"gate_proj\.bias' is \[16\], expected \[24\]"):
        opened(tmp_path, tensors)


def test_widths_that_differ_by_layer(tmp_path, capsys):
    tensors = {
        name.replace("layers.0", f"layers.{layer}"): value
        for layer, width in enumerate((24, None, 40, 8, 24))
        for name, value in llama_tensors(layers=1, d_mlp=width or 24, seed=layer).items()
        if width or ".mlp." not in name
    }
    path = write_checkpoint(tmp_path / "m", tensors, llama_config(num_hidden_layers=4))
    checkpoint = gp.open_checkpoint(path)
    assert len(checkpoint.notes) == 2
    assert any("d_mlp is 24" in note and "8, 40" in note for note in checkpoint.notes)
    assert any("4 layers" in note and "has 5" in note for note in checkpoint.notes)
    layers = gp.probe(checkpoint, samples=2).layers
    assert layers["layer"].tolist() == [0, 1, 2, 3, 4]
    assert layers["n_neurons"].tolist() == [24, 0, 40, 8, 24]
    assert layers["no_mlp"].tolist() == [False, True, False, False, False]
    with pytest.raises(SystemExit) as stop:
        main(["report", str(path), "-o", str(tmp_path / "out"), "--no-figures", "--samples", "2"])
    assert stop.value.code == 0
    assert capsys.readouterr().err.count("note: ") == 2


# -- plain MLPs ----------------------------------------------------------------------------------

TINY = {
    "hidden_size": D_MODEL,
    "intermediate_size": D_MLP,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN_MODELS = {
    "gpt2": {"n_embd": D_MODEL, "n_layer": 2, "n_head": 2},
    "gpt_neo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "gptj": {"n_embd": D_MODEL, "n_layer": 2, "n_head": 2, "rotary_dim": 4},
    "gpt_bigcode": {"n_embd": D_MODEL, "n_layer": 2, "n_head": 2},
    "falcon": {},
    "starcoder2": {},
    "nemotron": {"head_dim": 8},
    "arcee": {},
    "persimmon": {},
    "phi": {},
    "opt": {"ffn_dim": D_MLP, "word_embed_proj_dim": D_MODEL},
    "bloom": {"n_layer": 2, "n_head": 2},
    "siglip_vision_model": {"image_size": 28, "patch_size": 14},
    "bert": {},
    "apertus": {},
    "t5": {"d_model": D_MODEL, "d_kv": 8, "d_ff": D_MLP, "num_layers": 2, "num_heads": 2, "feed_forward_proj": "relu"},
}


@pytest.mark.parametrize("model_type", PLAIN_MODELS)
def test_plain_mlps_are_no_gated_ones(model_type, tmp_path):
    config = CONFIG_MAPPING[model_type](**TINY | PLAIN_MODELS[model_type])
    AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(NoGatedMLP, match="Found instead: "):
        gp.open_checkpoint(tmp_path)


def test_plain_mlps_on_the_command_line(tmp_path, capsys):
    config = CONFIG_MAPPING["gpt2"](**TINY | PLAIN_MODELS["gpt2"])
    AutoModel.from_config(config).save_pretrained(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(tmp_path)])
    message = capsys.readouterr().err
    assert stop.value.code == 3
    assert "NoGatedMLP" in message
    assert "mlp.c_fc" in message


# -- weights that must not be read as they stand -------------------------------------------------

INTS, BYTES = torch.ones(3, D_MODEL, dtype=torch.int32), torch.ones(96, 1, dtype=torch.uint8)
SCALE, FP8 = torch.ones(D_MLP, 1), torch.ones(D_MLP, D_MODEL).to(torch.float8_e4m3fn)
PACKED = {
    "gptq": {"qweight": INTS, "qzeros": INTS, "scales": SCALE, "g_idx": INTS},
    "awq": {"qweight": INTS, "qzeros": INTS, "scales": SCALE},
    "compressed-tensors": {"weight_packed": INTS, "weight_scale": SCALE, "weight_shape": INTS},
    "nvfp4": {"weight_packed": BYTES, "weight_scale": SCALE, "weight_global_scale": SCALE},
    "bitsandbytes 4 bit": {
        "weight": BYTES, "weight__absmax": SCALE, "weight__quant_map": SCALE,
        "weight__quant_state__bitsandbytes__nf4": BYTES,
    },
    "int8 of the right shape alone": {"weight": torch.ones(D_MLP, D_MODEL, dtype=torch.int8)},
    "1.58 bit": {"weight": torch.ones(D_MLP // 4, D_MODEL, dtype=torch.uint8), "weight_scale": SCALE},
    "hqq": {"W_q": BYTES, "meta": INTS},
    "aqlm": {"codes": INTS, "codebooks": SCALE, "scales": SCALE},
    "quanto": {"weight___data": torch.ones(D_MLP, D_MODEL, dtype=torch.int8), "weight___scale": SCALE},
    "a scale beside floats": {"weight": torch.ones(D_MLP, D_MODEL), "weight_scale": SCALE},
}  # fmt: skip


@pytest.mark.parametrize("scheme", PACKED)
@pytest.mark.parametrize("leaf", ["gate", "up"])
def test_packed_weights_are_refused_by_name(scheme, leaf, tmp_path):
    with pytest.raises(QuantizedWeights, match=rf"{leaf}_proj'.*unquantised"):
        opened(tmp_path, replaced(leaf, **PACKED[scheme]))


def test_packed_names_of_a_family_are_refused(tmp_path):
    tensors = {f"layers.0.mlp.{leaf}.{part}": INTS.clone() for leaf in ("Wi", "Wo") for part in ("qweight", "qzeros")}
    with pytest.raises(QuantizedWeights, match="GPTQ or AWQ"):
        opened(tmp_path, tensors, llama_config(model_type="modernbert"))


def test_the_config_s_name_of_the_scheme_is_said(tmp_path):
    config = llama_config() | {"quantization_config": {"quant_method": "newquant"}}
    with pytest.raises(QuantizedWeights, match="packed by newquant"):
        opened(tmp_path, replaced("gate", **PACKED["gptq"]), config)


def test_a_scheme_in_the_config_alone_harms_nothing(plain_table, tmp_path):
    config = llama_config(num_hidden_layers=2) | {"quantization_config": {"quant_method": "newquant"}}
    assert_same(write_checkpoint(tmp_path / "m", llama_tensors(layers=2), config), plain_table)


def test_scales_of_the_input_harm_nothing(plain_table, tmp_path):
    tensors = llama_tensors(layers=2) | {"model.layers.0.mlp.gate_proj.input_scale": torch.ones(1)}
    assert_same(write_checkpoint(tmp_path / "m", tensors, llama_config(num_hidden_layers=2)), plain_table)


def test_fp8_without_a_scale(tmp_path):
    with pytest.raises(UnscaledFP8, match=r"gate_proj\.weight' is F8_E4M3"):
        opened(tmp_path, replaced("gate", weight=FP8))


@pytest.mark.parametrize("base", ["gate_proj.weight", "gate_proj.base_layer.weight"])
@pytest.mark.parametrize("update", ["lora_A.weight", "lora_B.default.weight", "lora_magnitude_vector.default.weight"])
def test_adapters_that_are_not_merged(base, update, tmp_path):
    tensors = {name.replace("gate_proj.weight", base): value for name, value in llama_tensors(layers=2).items()}
    tensors[f"model.layers.1.mlp.gate_proj.{update}"] = torch.ones(4, D_MODEL)
    with pytest.raises(UnmergedAdapter, match="merge_and_unload"):
        opened(tmp_path, tensors)


def test_an_adapter_alone(tmp_path):
    stem = "base_model.model.model.layers.0.mlp.gate_proj."
    with pytest.raises(UnmergedAdapter):
        opened(tmp_path, {f"{stem}lora_A.weight": torch.ones(4, 16), f"{stem}lora_B.weight": torch.ones(24, 4)})


def test_a_merged_adapter_s_wrapper_harms_nothing(plain_table, tmp_path):
    tensors = {name.replace("proj.weight", "proj.base_layer.weight"): t for name, t in llama_tensors(layers=2).items()}
    assert_same(write_checkpoint(tmp_path / "m", tensors, llama_config(num_hidden_layers=2)), plain_table)


def test_a_gate_behind_another_module_is_not_called_plain(tmp_path):
    tensors = {name.replace("proj.weight", "proj.linear.weight"): t for name, t in llama_tensors(layers=1).items()}
    with pytest.raises(LayoutUnknown, match="does not say which part is the gate"):
        opened(tmp_path, tensors)


def test_a_torch_file_of_packed_weights(tmp_path):
    path = tmp_path / "m"
    path.mkdir()
    torch.save(replaced("gate", **PACKED["gptq"]), path / "pytorch_model.bin")
    with pytest.raises(QuantizedWeights, match="GPTQ or AWQ"):
        gp.open_checkpoint(path)


def test_the_file_is_only_looked_at(tmp_path):
    """Everything above is decided from headers: the data may be absent."""
    save_file(replaced("gate", **PACKED["gptq"]), tmp_path / "model.safetensors")
    with pytest.raises(QuantizedWeights):
        gp.open_checkpoint(tmp_path / "model.safetensors")
