"""What a reader could take for a smaller or another model, and must not: parts that are missing, kept apart or unknown."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

import glu_probe as gp
from glu_probe.checkpoint.families import gguf_norm
from glu_probe.checkpoint.known_families import all_families, find_family
from glu_probe.errors import (
    BadOption,
    IncompleteTriple,
    LayoutAmbiguous,
    LayoutUnknown,
    NoExpertsMapped,
    QuantizedWeights,
    ShapeMismatch,
    UnknownActivation,
    UnmergedAdapter,
)

from ..support import D_MLP, D_MODEL, llama_config, llama_tensors, write_checkpoint

MLP = ("gate_proj", "up_proj", "down_proj")
GGUF = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm"}


def opened(path, tensors: dict[str, Tensor], config: dict | None = None, **options) -> gp.Checkpoint:
    config = llama_config(num_hidden_layers=2) if config is None else config
    return gp.open_checkpoint(write_checkpoint(path / "m", tensors, config), **options)


def mlp(stem: str, names: tuple[str, str, str] = MLP, d_mlp: int = D_MLP, fill: float = 1.0) -> dict[str, Tensor]:
    gate, up, down = names
    return {
        f"{stem}.{gate}.weight": torch.full((d_mlp, D_MODEL), fill),
        f"{stem}.{up}.weight": torch.full((d_mlp, D_MODEL), 2 * fill),
        f"{stem}.{down}.weight": torch.full((D_MODEL, d_mlp), 3 * fill),
    }


def gguf_named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The MLPs and their norms under the names of GGUF files, which stand directly in the layer."""
    out = {}
    for name, tensor in tensors.items():
        for theirs, ours in GGUF.items():
            name = name.replace(f"mlp.{theirs}", ours).replace(theirs, ours)
        out[name.replace("model.layers", "blk")] = tensor
    return out


def write_gguf(path, tensors: dict[str, Tensor], architecture: str = "llama", **values: int):
    from gguf import GGUFWriter

    writer = GGUFWriter(path / "m.gguf", architecture)
    for key, value in ({"embedding_length": D_MODEL, "block_count": 2} | values).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "m.gguf"


# -- experts -------------------------------------------------------------------------------------


def moe(present=range(4), *, layers: int = 2, shared: str | None = None, router: str = "mlp.gate") -> dict[str, Tensor]:
    """Layers whose routers choose among four experts, of which some are there."""
    tensors = {}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        for expert in present:
            tensors |= mlp(f"{stem}.mlp.experts.{expert}", fill=expert + 1.0)
        if shared:
            tensors |= mlp(f"{stem}.mlp.{shared}")
        tensors[f"{stem}.{router}.weight"] = torch.ones(4, D_MODEL)
        tensors[f"{stem}.post_attention_layernorm.weight"] = torch.ones(D_MODEL)
    return tensors


def moe_config(model_type: str = "qwen3_moe", **changes) -> dict:
    return llama_config(model_type=model_type, num_hidden_layers=2, intermediate_size=None, **changes)


@pytest.mark.parametrize("count", [{"n_routed_experts": 4}, {}])
@pytest.mark.parametrize(
    ("model_type", "shared", "router"),
    [
        ("deepseek_v3", "shared_experts", "mlp.gate"),
        ("glm4_moe", "shared_experts", "mlp.gate"),
        ("qwen2_moe", "shared_expert", "mlp.gate"),
        ("hunyuan_v1_moe", "shared_mlp", "mlp.gate.wg"),
        ("aria_text", "shared_experts", "mlp.router"),
    ],
)
def test_shared_experts_alone_are_no_dense_model(model_type, shared, router, count, tmp_path):
    tensors = moe(present=(), shared=shared, router=router)
    with pytest.raises(NoExpertsMapped, match=r"layer 0: .*chooses among experts"):
        opened(tmp_path, tensors, moe_config(model_type, **count))


def test_shared_experts_alone_where_only_the_config_counts_others(tmp_path):
    tensors = {name: t for name, t in moe(present=(), shared="shared_experts").items() if ".gate.weight" not in name}
    with pytest.raises(NoExpertsMapped, match="n_routed_experts = 4"):
        opened(tmp_path, tensors, moe_config("deepseek_v3", n_routed_experts=4))
    config = moe_config("granitemoehybrid", num_local_experts=0)
    assert [site.expert for site in opened(tmp_path, tensors, config).sites] == [None, None]


def test_one_layer_without_experts(tmp_path):
    tensors = {name: t for name, t in moe().items() if "layers.1.mlp.experts" not in name}
    with pytest.raises(NoExpertsMapped, match=r"layer 1: .*not all"):
        opened(tmp_path, tensors, moe_config(num_experts=4))


def test_a_dense_layer_before_one_without_experts(tmp_path):
    tensors = {name: t for name, t in moe(present=()).items() if "layers.0.mlp" not in name} | mlp("model.layers.0.mlp")
    with pytest.raises(NoExpertsMapped, match="layer 1"):
        opened(tmp_path, tensors, moe_config("deepseek_v3", n_routed_experts=4))


@pytest.mark.parametrize("name", ["model.layers.0.mixer.gate", "model.visual.blocks.0.gate"])
def test_another_gate_is_no_router(name, tmp_path):
    tensors = llama_tensors(layers=2) | {f"{name}.weight": torch.ones(4, D_MODEL)}
    assert len(opened(tmp_path, tensors).sites) == 2


@pytest.mark.parametrize("name", ["mlp.gate", "router.proj"])
def test_a_router_beside_a_dense_mlp(name, tmp_path):
    tensors = llama_tensors(layers=2) | {f"model.layers.0.{name}.weight": torch.ones(4, D_MODEL)}
    with pytest.raises(NoExpertsMapped, match="layer 0"):
        opened(tmp_path, tensors)


def test_gguf_without_its_experts(tmp_path):
    tensors = mlp("blk.0", ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"))
    tensors |= {"blk.0.ffn_gate_inp.weight": torch.ones(4, D_MODEL), "blk.0.ffn_norm.weight": torch.ones(D_MODEL)}
    path = write_gguf(tmp_path, tensors, "qwen2moe", block_count=1, expert_count=4)
    with pytest.raises(NoExpertsMapped, match="ffn_gate_inp"):
        gp.open_checkpoint(path)


@pytest.mark.parametrize(
    "count",
    [{}, {"num_experts": 4}, {"num_experts": [4, 4]}, {"n_experts": 4}, {"num_moe_experts": 4},
     {"num_routed_experts": 4}, {"moe_num_routed_experts": 4}],
)  # fmt: skip
@pytest.mark.parametrize("router", ["mlp.gate", "mlp.unnamed"])
def test_the_last_expert_is_missing(count, router, tmp_path):
    """Which the router's rows say, or the config."""
    tensors = moe(present=range(3), router=router)
    if router == "mlp.unnamed" and not count:
        assert len(opened(tmp_path, tensors, moe_config()).sites) == 6  # nothing says that there is a fourth
        return
    with pytest.raises(IncompleteTriple, match=r"layer 0: experts 3 are missing beside 3 others \(.* 4\)"):
        opened(tmp_path, tensors, moe_config(**count))


def dbrx(experts: int, *, router: bool = True, width: int | None = D_MLP) -> tuple[dict[str, Tensor], dict]:
    """Four experts below each other, and a config that says `experts`."""
    stem = "transformer.blocks.0."
    tensors = {f"{stem}ffn.experts.mlp.{name}": torch.ones(4 * D_MLP, D_MODEL) for name in ("w1", "v1", "w2")}
    tensors[f"{stem}norm_attn_norm.norm_2.weight"] = torch.ones(D_MODEL)
    if router:
        tensors[f"{stem}ffn.router.layer.weight"] = torch.ones(4, D_MODEL)
    ffn = {"moe_num_experts": experts} | ({"ffn_hidden_size": width} if width else {})
    return tensors, {"model_type": "dbrx", "d_model": D_MODEL, "n_layers": 1, "ffn_config": ffn}


@pytest.mark.parametrize("experts", [2, 8])
@pytest.mark.parametrize(("router", "width", "says"), [(True, None, "chooses among 4"), (False, D_MLP, "says 24")])
def test_experts_below_each_other_with_a_wrong_count(experts, router, width, says, tmp_path):
    with pytest.raises(ShapeMismatch, match=says):
        opened(tmp_path, *dbrx(experts, router=router, width=width))


def test_experts_below_each_other_with_the_right_count(tmp_path):
    assert {(site.expert, site.d_mlp) for site in opened(tmp_path, *dbrx(4)).sites} == {(e, D_MLP) for e in range(4)}


def longcat(experts: int, zero: int) -> dict:
    return moe_config("longcat_flash", n_routed_experts=experts, zero_expert_num=zero)


def test_experts_with_weights_are_no_identities(tmp_path):
    with pytest.raises(LayoutUnknown, match=r"experts\.3' has gate, up and down"):
        opened(tmp_path, moe(), longcat(3, 1))


@pytest.mark.parametrize(("zero", "fine"), [(2, True), (1, False)])
def test_more_identities_than_the_config_says(zero, fine, tmp_path):
    """transformers saves unused gates of them."""
    tensors = {n: t for n, t in moe().items() if not any(f"experts.{e}.down_proj" in n for e in (2, 3))}
    tensors |= {f"model.layers.{i}.post_attention_layernorm.0.weight": torch.ones(D_MODEL) for i in range(2)}
    if fine:
        assert [site.expert for site in opened(tmp_path, tensors, longcat(2, zero)).sites] == [0, 1, 0, 1]
        return
    with pytest.raises(LayoutUnknown, match="2 such have"):
        opened(tmp_path, tensors, longcat(2, zero))


# -- parameters beside a weight ------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["model.attn_layers.", "model.cross_attention.", "model."])
@pytest.mark.parametrize(
    ("suffix", "error"),
    [
        ("lora_A.weight", UnmergedAdapter),
        ("lora_A.default.weight", UnmergedAdapter),
        ("weight_scale", QuantizedWeights),
    ],
)
def test_updates_and_scales_count_whatever_the_stack_is_called(prefix, suffix, error, tmp_path):
    tensors = llama_tensors(layers=2, prefix=prefix)
    assert len(opened(tmp_path, tensors).sites) == 2
    with pytest.raises(error):
        opened(tmp_path, tensors | {f"{prefix}layers.1.mlp.gate_proj.{suffix}": torch.ones(1, D_MODEL)})


def test_what_is_attention_s_own_harms_nothing(tmp_path):
    extra = {"model.layers.1.self_attn.gate_proj.lora_A.weight": torch.ones(1, D_MODEL)}
    assert len(opened(tmp_path, llama_tensors(layers=2) | extra).sites) == 2


@pytest.mark.parametrize(
    "name",
    ["gate_proj.gain", "gate_proj.weight_mask", "gate_proj.delta.weight", "down_proj.output_multiplier",
     "down_proj.input_smooth", "down_proj.pre_quant"],
)  # fmt: skip
@pytest.mark.parametrize("gguf", [False, True])
def test_what_stands_beside_a_projection_s_weight(name, gguf, tmp_path):
    """Only in one layer, and in GGUF files directly in it."""
    tensors = llama_tensors(layers=2) | {f"model.layers.1.mlp.{name}": torch.ones(D_MLP)}
    if gguf:
        path = write_gguf(tmp_path, gguf_named(tensors))
    else:
        path = write_checkpoint(tmp_path / "m", tensors, llama_config(num_hidden_layers=2))
    with pytest.raises(LayoutUnknown, match=r"layer 1: .*besides its weight"):
        gp.open_checkpoint(path)


@pytest.mark.parametrize("name", ["ffn_act.scales", "ffn_sub_norm.weight", "neuron_scale"])
def test_what_stands_beside_projections_without_a_block(name, tmp_path):
    tensors = gguf_named(llama_tensors(layers=2)) | {f"blk.1.{name}": torch.ones(D_MLP)}
    notes = [layer.functional_note() for layer in gp.open_checkpoint(write_gguf(tmp_path, tensors)).layers()]
    assert notes[0] is None
    assert name.split(".")[0] in notes[1]


@pytest.mark.parametrize("name", ["input_scale", "input_global_scale", "output_scale", "input_quantizer._amax"])
def test_scales_of_inputs_and_outputs_harm_nothing(name, tmp_path):
    tensors = llama_tensors(layers=2) | {f"model.layers.1.mlp.up_proj.{name}": torch.ones(1)}
    assert all(layer.functional_note() is None for layer in opened(tmp_path, tensors).layers())


# -- what is about one tower only ----------------------------------------------------------------


def with_vision(vision: dict, hidden_act: str = "silu") -> tuple[dict[str, Tensor], dict]:
    """Two stacks of gated MLPs, of different sizes."""
    tensors = llama_tensors(layers=2, prefix="model.language_model.")
    for name, tensor in llama_tensors(layers=2, d_mlp=20, d_model=8).items():
        if "embed" not in name and "input" not in name:
            name = name.replace("model.layers", "model.visual.blocks").replace("post_attention_layernorm", "norm2")
            tensors[name] = tensor
    text = llama_config(model_type="qwen2_5_vl_text", num_hidden_layers=2, hidden_act=hidden_act)
    vision = {"model_type": "qwen2_5_vl", "hidden_size": 8} | vision
    return tensors, {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision}


def test_the_user_s_activation_is_the_language_model_s(tmp_path):
    checkpoint = opened(tmp_path, *with_vision({"hidden_act": "gelu"}), activation="relu")
    assert {(layer.tower, layer.activation.name) for layer in checkpoint.layers()} == {
        ("text", "relu"), ("vision", "gelu"),
    }  # fmt: skip


def test_an_unknown_activation_beside_the_language_model_is_a_note(tmp_path):
    checkpoint = opened(tmp_path, *with_vision({"hidden_act": "foo"}))
    assert [note for note in checkpoint.notes if note.startswith("vision: ") and "'foo'" in note]
    for layer in checkpoint.layers():
        assert (layer.functional_note() is None) == (layer.tower == "text")
    with pytest.raises(UnknownActivation):
        opened(tmp_path, *with_vision({"hidden_act": "silu"}, hidden_act="foo"))


def test_the_user_s_order_is_the_language_model_s(tmp_path):
    """Of a fused tensor, where the family of another tower has another order."""
    tensors = {}
    for layer in range(2):
        for stem, width in ((f"model.layers.{layer}.mlp", D_MODEL),
                            (f"model.embed_tokens_extend.audio_embed.encoder.encoders.{layer}.feed_forward_in", 8)):  # fmt: skip
            halves = [torch.full((D_MLP, width), fill) for fill in (1.0, 2.0)]
            tensors |= {f"{stem}.gate_up_proj.weight": torch.cat(halves)}
            tensors |= {f"{stem}.down_proj.weight": torch.ones(width, D_MLP)}
    audio = {"model_type": "phi4_multimodal_audio", "hidden_size": 8, "activation": "swish"}
    config = llama_config(model_type="phi4_multimodal", num_hidden_layers=2, audio_config=audio)
    checkpoint = opened(tmp_path, tensors, config, fused_layout="gate-first", fold_norm=False)
    gates = {(layer.tower, *layer.query.unique().tolist()) for layer in checkpoint.layers()}
    assert gates == {("text", 1.0), ("audio", 2.0)}


# -- norms, biases and names that the config denies ----------------------------------------------


def test_a_gain_that_the_family_does_not_have(tmp_path):
    tensors, config = llama_tensors(layers=2), llama_config(model_type="olmo", num_hidden_layers=2)
    with pytest.raises(LayoutUnknown, match=r"post_attention_layernorm\.weight' is a weight that .* 'olmo'"):
        opened(tmp_path, tensors, config).layer(0)
    assert opened(tmp_path, tensors, config, fold_norm=False).layer(0).d_mlp == D_MLP


@pytest.mark.parametrize("norm", ["pre_feedforward_layernorm", "post_feedforward_layernorm", "post_ffw_norm"])
def test_norms_of_the_mlp_that_the_family_does_not_have(norm, tmp_path):
    """A LLaMA has the norm behind the attention alone; a file with more is another family's."""
    tensors = llama_tensors(layers=2) | {f"model.layers.{i}.{norm}.weight": torch.ones(D_MODEL) for i in range(2)}
    if norm == "post_ffw_norm":
        path = write_gguf(tmp_path, gguf_named(tensors))
    else:
        path = write_checkpoint(tmp_path / "m", tensors, llama_config(num_hidden_layers=2))
    with pytest.raises(LayoutUnknown, match=f"{norm}, norms beside the MLP that the rules of family 'llama'"):
        gp.open_checkpoint(path).describe()
    assert norm in gp.open_checkpoint(path, fold_norm=False).layer(0).functional_note()


def test_a_norm_in_front_where_the_family_has_none(tmp_path):
    path = write_gguf(tmp_path, gguf_named(llama_tensors(layers=2)), "olmo2")
    with pytest.raises(LayoutUnknown, match="ffn_norm, norms beside the MLP"):
        gp.open_checkpoint(path).describe()


def test_biases_that_the_config_has_and_the_file_has_not(tmp_path):
    config = llama_config(num_hidden_layers=2, mlp_bias=True)
    assert any("mlp_bias" in note for note in opened(tmp_path, llama_tensors(layers=2), config).notes)


def test_a_layer_under_other_names_is_noted(tmp_path):
    tensors = llama_tensors(layers=3)
    for part in ("gate", "up", "down"):
        tensors[f"model.layers.1.mlp.dense_{part}.weight"] = tensors.pop(f"model.layers.1.mlp.{part}_proj.weight")
    checkpoint = opened(tmp_path, tensors, llama_config(num_hidden_layers=3))
    assert [site.layer for site in checkpoint.sites] == [0, 2]
    assert any(note.startswith("layer 1 was left out") and "dense_gate" in note for note in checkpoint.notes)


# -- families that do not fit --------------------------------------------------------------------


def test_a_family_whose_norm_is_numbered_by_the_block(tmp_path):
    with pytest.raises(LayoutUnknown, match=r"layer\.\{0\}\.layer_norm"):
        opened(tmp_path, llama_tensors(layers=2), family="t5").describe()


@pytest.mark.parametrize("name", sorted({name for family in all_families() for name in (*family.names, *family.gguf)}))
def test_every_family_on_a_gguf_file(name, gguf_file):
    """It is read by its rules, or refused; never fails otherwise."""
    with contextlib.suppress(BadOption, LayoutUnknown, IncompleteTriple):
        assert len(gp.open_checkpoint(gguf_file, family=name).describe()) == 2


@pytest.mark.parametrize("name", ["afmoe", "dia_decoder", "gte", "longcat_flash", "molmo2_text"])
def test_a_family_without_gguf_files(name, gguf_file):
    with pytest.raises(BadOption, match="what GGUF files call the norm"):
        gp.open_checkpoint(gguf_file, family=name)


@pytest.mark.parametrize("name", sorted({name for family in all_families() for name in family.gguf}))
def test_families_of_gguf_files_have_their_norms_named(name):
    assert all(gguf_norm(norm) for norm in find_family(name, gguf=True).norms)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("families"), gguf_named(llama_tensors(layers=2)))


# -- what is said --------------------------------------------------------------------------------


def test_stages_are_no_layers(tmp_path):
    checkpoint = opened(tmp_path, llama_tensors(layers=2, prefix="model.stages.0."))
    assert [(layer.tower, layer.layer) for layer in checkpoint.layers()] == [("text", 0), ("text", 1)]


@pytest.mark.parametrize(("said", "name"), [("swiglu", "silu"), ("geglu", "gelu")])
def test_activations_of_nomic_bert_s_own_configs(said, name, tmp_path):
    names = {"gate_proj": "fc12", "up_proj": "fc11", "down_proj": "fc2", "post_attention_layernorm": "norm1"}
    tensors = {}
    for old, tensor in llama_tensors(layers=2).items():
        for theirs, ours in names.items():
            old = old.replace(theirs, ours)
        tensors[old] = tensor
    tensors |= {f"model.layers.{i}.norm1.bias": torch.ones(D_MODEL) for i in range(2)}
    config = llama_config(model_type="nomic_bert", num_hidden_layers=2, hidden_act=None, activation_function=said)
    assert opened(tmp_path, tensors, config).layer(0).activation.name == name


@pytest.mark.parametrize(("option", "value"), [("fused_layout", "up-first"), ("expert_layout", "rows")])
def test_an_option_without_effect_is_noted(option, value, tmp_path):
    notes = opened(tmp_path, llama_tensors(layers=2), **{option: value}).notes
    assert any(f"--{option.replace('_', '-')} had no effect" in note for note in notes)


@pytest.mark.parametrize("name", ["layer_scale2.lambda1", "ls2.gamma"])
def test_a_scale_on_the_output_is_noted(name, tmp_path):
    tensors = llama_tensors(layers=2) | {f"model.layers.{i}.{name}": torch.ones(D_MODEL) for i in range(2)}
    notes = opened(tmp_path, tensors).notes
    assert [note for note in notes if note == f"the model multiplies MLP outputs by {name}; value does not include it"]


def test_layers_that_predict_further_tokens_count_in_gguf_files(tmp_path):
    tensors = gguf_named(llama_tensors(layers=3)) | {"blk.2.nextn.eh_proj.weight": torch.ones(D_MODEL, 2 * D_MODEL)}
    checkpoint = gp.open_checkpoint(write_gguf(tmp_path, tensors, block_count=3))
    assert {site.tower for site in checkpoint.sites} == {"text", "mtp"}
    assert not any("3 layers" in note for note in checkpoint.notes)


def test_a_dense_layer_has_no_experts_to_name(tmp_path):
    with pytest.raises(BadOption, match="one dense MLP"):
        opened(tmp_path, llama_tensors(layers=2)).layer(0, expert=1)


def test_a_known_family_s_odd_names_are_not_blamed_on_the_table(tmp_path):
    tensors = {name.replace("_proj", "_part"): tensor for name, tensor in llama_tensors(layers=2).items()}
    with pytest.raises(LayoutUnknown, match="'llama', whose own files have other names"):
        opened(tmp_path, tensors)


def test_messages_name_a_tensor_once(tmp_path):
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.ones(3, D_MODEL, 2 * D_MODEL),
        "model.layers.0.mlp.experts.down_proj": torch.ones(3, D_MODEL, D_MODEL),
    }
    with pytest.raises(LayoutAmbiguous) as caught:
        opened(tmp_path, tensors, moe_config("qwen3_vl_moe_text"))
    assert str(caught.value).count("gate_up_proj") == 1
    tensors = {f"blk.0.ffn_{part}.{e}.weight": torch.ones(2, 2) for part in ("gate", "up", "down") for e in range(4)}
    path = write_gguf(tmp_path, tensors, expert_count=4)
    with pytest.raises(NoExpertsMapped) as caught:
        gp.open_checkpoint(path)
    assert str(caught.value).count("blk.{}.ffn_down.{}.weight") == 1
