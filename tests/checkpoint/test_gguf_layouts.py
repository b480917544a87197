"""Experts, encoders and further stacks in GGUF files, under the names that llama.cpp's library lists for them."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

import glu_probe as gp
from glu_probe.checkpoint.families import FAMILIES
from glu_probe.checkpoint.known_families import find_family
from glu_probe.errors import IncompleteTriple, LayoutUnknown, NoExpertsMapped, NoGatedMLP
from glu_probe.testing import TrueMLP, write_tiny_checkpoint

from ..support import D_MLP, D_MODEL

# `general.architecture` to the family whose weights it is written from.
WITH_EXPERTS = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "qwen3vlmoe": "qwen3_vl_moe",
    "qwen3next": "qwen3_next",
    "qwen35moe": "qwen3_5_moe",
    "deepseek": "deepseek_v2",
    "deepseek2": "deepseek_v3",
    "glm4moe": "glm4_moe",
    "dots1": "dots1",
    "ernie4_5-moe": "ernie4_5_moe",
    "olmoe": "olmoe",
    "hunyuan-moe": "hunyuan_v1_moe",
    "mimo2": "mimo_v2_flash",
    "minimax-m2": "minimax_m2",
    "phimoe": "phimoe",
    "kimi-linear": "kimi_linear",
    "jamba": "jamba",
    "lfm2moe": "lfm2_moe",
    "granitemoe": "granitemoeshared",
    "granitehybrid": "granitemoehybrid",
    "llama4": "llama4_text",
    "gpt-oss": "gpt_oss",
    "dbrx": "dbrx",
    "gemma4": "gemma4_text",
    "bailingmoe": "qwen2_moe",
    "bailingmoe2": "deepseek_v2",
    "llama": "mixtral",
}
NORMS = {"glm4moe": "post_attention_norm", "qwen3next": "post_attention_norm", "qwen35moe": "post_attention_norm",
         "gpt-oss": "post_attention_norm", "dbrx": "attn_output_norm"}  # fmt: skip
STEMS = {"dense": "", "routed": "_exps", "shared": "_shexp"}


def tensors_of(truth: list[TrueMLP], norm: str, *, together: bool = False, stack: str = "blk") -> dict[str, Tensor]:
    """The weights of one stack as converters write them: experts stacked, gains as they act."""
    out: dict[str, Tensor] = {}
    for layer in {mlp.layer for mlp in truth}:
        here = [mlp for mlp in truth if mlp.layer == layer]
        for group, end in STEMS.items():
            mine = [mlp for mlp in here if group_of(mlp) == group]
            if not mine:
                continue
            joined = torch.stack if group == "routed" else lambda parts: parts[0]
            gate, up = joined([mlp.query for mlp in mine]), joined([mlp.key for mlp in mine])
            if together and group == "routed":
                out[f"{stack}.{layer}.ffn_gate_up{end}.weight"] = torch.cat([gate, up], dim=1)
            else:
                out |= {f"{stack}.{layer}.ffn_gate{end}.weight": gate, f"{stack}.{layer}.ffn_up{end}.weight": up}
            out[f"{stack}.{layer}.ffn_down{end}.weight"] = joined([mlp.value.T for mlp in mine])
            for name, role in (("gate", "query_bias"), ("up", "key_bias"), ("down", "output_bias")):
                if getattr(mine[0], role) is not None:
                    out[f"{stack}.{layer}.ffn_{name}{end}.bias"] = joined([getattr(mlp, role) for mlp in mine])
            name = f"{stack}.{layer}.{'pre_ffw_norm_2' if norm == 'gemma4' and group == 'routed' else norm}"
            name = name.replace(".gemma4", ".ffn_norm")
            out[f"{name}.weight"] = mine[0].gain
            if mine[0].shift is not None:
                out[f"{name}.bias"] = mine[0].shift
    return out


def group_of(mlp: TrueMLP) -> str:
    return "dense" if mlp.expert is None else "shared" if mlp.expert == "shared" else "routed"


def write(path: Path, architecture: str, tensors: dict[str, Tensor], *, experts: int = 3, layers: int = 2) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(D_MODEL)
    writer.add_feed_forward_length(D_MLP)
    writer.add_block_count(layers)
    if experts:
        writer.add_expert_count(experts)
    for name, value in tensors.items():
        writer.add_tensor(name, value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_factors(path: Path, truth: list[TrueMLP], *, tower: str = "text") -> None:
    layers = [layer for layer in gp.open_checkpoint(path).layers() if layer.tower == tower]
    assert [(layer.layer, layer.expert) for layer in layers] == [(mlp.layer, mlp.expert) for mlp in truth]
    for layer, mlp in zip(layers, truth, strict=True):
        for found, drawn in ((layer.query, mlp.query), (layer.key, mlp.key)):
            expected = drawn * mlp.gain
            expected = expected - expected.mean(1, keepdim=True) if mlp.centred else expected
            assert torch.allclose(found, expected, atol=1e-6)
        assert torch.equal(layer.value, mlp.value)


def test_every_architecture_whose_layers_may_have_experts_is_here():
    with_experts = {
        name
        for arch, name in gguf.MODEL_ARCH_NAMES.items()
        if gguf.MODEL_TENSOR.FFN_DOWN_EXP in gguf.MODEL_TENSORS[arch] and find_family(name, gguf=True)
    }
    dense_here = {"mistral3", "llama-embed", "deci"}
    assert with_experts - dense_here == set(WITH_EXPERTS)
    assert all(find_family(name, gguf=True) in FAMILIES for name in dense_here)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_experts_of_gguf_files(architecture, together, tmp_path):
    truth = write_tiny_checkpoint(WITH_EXPERTS[architecture], tmp_path)
    norm = "gemma4" if architecture == "gemma4" else NORMS.get(architecture, "ffn_norm")
    if together and any(mlp.query_bias is not None for mlp in truth):
        pytest.skip("no converter writes biases of both together")
    listed = {gguf.TENSOR_NAMES[tensor].rpartition(".")[2] for tensor in gguf.MODEL_TENSORS[arch_of(architecture)]}
    tensors = tensors_of(truth, norm, together=together)
    assert {name.split(".")[2] for name in tensors} <= listed | {"ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps"}
    path = write(tmp_path / "m.gguf", architecture, tensors)
    assert_factors(path, truth)
    directory = gp.open_checkpoint(tmp_path).layers()
    for layer, other in zip(gp.open_checkpoint(path).layers(), directory, strict=True):
        assert layer.activation == other.activation
        assert (layer.functional_note() is None) == (other.functional_note() is None)


def arch_of(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def test_gpt_oss_s_gate_in_gguf(tmp_path):
    truth = write_tiny_checkpoint("gpt_oss", tmp_path)
    path = write(tmp_path / "m.gguf", "gpt-oss", tensors_of(truth, "post_attention_norm"))
    layer = gp.open_checkpoint(path, fold_norm=False).layer(0, 2)
    mine = next(mlp for mlp in truth if mlp.expert == 2)
    assert torch.equal(layer.query_bias, mine.query_bias)
    assert torch.equal(layer.output_bias, mine.output_bias)
    assert layer.activation.up(torch.tensor([9.0])).item() == 8.0


def test_encoder_and_decoder(tmp_path):
    truth = write_tiny_checkpoint("t5", tmp_path)
    parts = {tower: [mlp for mlp in truth if mlp.tower == tower] for tower in ("text", "encoder")}
    tensors = tensors_of(parts["text"], "ffn_norm", stack="dec.blk") | tensors_of(
        parts["encoder"], "ffn_norm", stack="enc.blk"
    )
    path = write(tmp_path / "m.gguf", "t5", tensors, experts=0)
    for tower, mine in parts.items():
        assert_factors(path, mine, tower=tower)
    assert all(layer.functional_note() is None for layer in gp.open_checkpoint(path).layers())


def test_a_plain_t5(tmp_path):
    tensors = tensors_of(write_tiny_checkpoint("llama", tmp_path), "ffn_norm", stack="dec.blk")
    path = write(tmp_path / "m.gguf", "t5", {k: v for k, v in tensors.items() if "gate" not in k}, experts=0)
    with pytest.raises(NoGatedMLP):
        gp.open_checkpoint(path)


@pytest.mark.parametrize(("architecture", "centred"), [("phi3", False), ("chatglm", False), ("modern-bert", True)])
def test_gate_and_up_in_ffn_up(architecture, centred, tmp_path):
    truth = write_tiny_checkpoint("modernbert" if centred else "llama", tmp_path)
    tensors = {}
    for mlp in truth:
        stem = f"blk.{mlp.layer}"
        tensors |= {f"{stem}.ffn_up.weight": torch.cat([mlp.query, mlp.key]), f"{stem}.ffn_down.weight": mlp.value.T,
                    f"{stem}.ffn_norm.weight": mlp.gain}  # fmt: skip
    assert_factors(write(tmp_path / "m.gguf", architecture, tensors, experts=0), truth)
    with pytest.raises(LayoutUnknown, match="--fused-layout"):
        gp.open_checkpoint(write(tmp_path / "n.gguf", "newarch", tensors, experts=0))


def test_a_layer_for_further_tokens(tmp_path):
    truth = write_tiny_checkpoint("deepseek_v3", tmp_path, layers=3)
    extra = {"blk.2.nextn.eh_proj.weight": torch.ones(D_MODEL, 2 * D_MODEL)}
    path = write(tmp_path / "m.gguf", "deepseek2", tensors_of(truth, "ffn_norm") | extra, layers=3)
    assert gp.open_checkpoint(path).layers_present == {"text": [0, 1], "mtp": [2]}


@pytest.mark.parametrize("part", ["gate", "up", "down"])
@pytest.mark.parametrize("end", ["_exps", "_shexp"])
def test_a_part_of_the_experts_is_missing(part, end, tmp_path):
    tensors = tensors_of(write_tiny_checkpoint("qwen2_moe", tmp_path), "ffn_norm")
    del tensors[f"blk.1.ffn_{part}{end}.weight"]
    with pytest.raises(IncompleteTriple, match=f"layer 1: ffn_{part}{end} is missing"):
        gp.open_checkpoint(write(tmp_path / "m.gguf", "qwen2moe", tensors))


def test_a_router_is_no_gate_and_other_experts_are_named(tmp_path):
    tensors = tensors_of(write_tiny_checkpoint("qwen3_moe", tmp_path), "ffn_norm")
    routed = tensors | {"blk.0.ffn_gate_inp.weight": torch.ones(3, D_MODEL)}
    assert len(gp.open_checkpoint(write(tmp_path / "m.gguf", "qwen3moe", routed)).sites) == 6
    chunked = tensors | {f"blk.0.ffn_{p}_chexps.weight": torch.ones(2, 4, D_MODEL) for p in ("gate", "up")}
    with pytest.raises(NoExpertsMapped, match="chexps"):
        gp.open_checkpoint(write(tmp_path / "n.gguf", "grovemoe", chunked))
