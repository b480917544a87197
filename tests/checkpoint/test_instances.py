"""Every gated MLP of every type in the table against the module of transformers that holds its weights.

Types whose models have experts, several stacks, or names of files that differ from those in memory: a small random
model is saved and read back, and which module an MLP is follows from the values of its weights alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import glu_probe as gp
from glu_probe.neurons import GatedLayer

from .shrunk import EXPERTS, LAYERS, WIDTH, build, configuration
from .witness import Witness, error

transformers.logging.set_verbosity_error()


@dataclass(frozen=True)
class Case:
    """A type, what its configuration needs, and how many MLPs of each (tower, group) it has."""

    model_type: str
    expected: dict[tuple[str, str], int]
    changes: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def __str__(self) -> str:
        return f"{self.model_type}-{self.label}" if self.label else self.model_type


def _text(dense: int = 0, routed: int = 0, shared: int = 0) -> dict[tuple[str, str], int]:
    counts = {"dense": dense, "routed": routed, "shared": shared}
    return {("text", group): count for group, count in counts.items() if count}


ALL = LAYERS * EXPERTS
T5_GATED = {"is_gated_act": True, "dense_act_fn": "gelu_new"}
CASES = [
    Case("qwen2_moe", _text(routed=ALL, shared=2)),
    Case("qwen2_moe", _text(dense=1, routed=EXPERTS, shared=1), {"mlp_only_layers": [0]}, "mixed"),
    Case("qwen3_moe", _text(routed=ALL)),
    Case("qwen3_moe", _text(dense=1, routed=EXPERTS), {"mlp_only_layers": [0]}, "mixed"),
    Case("qwen3_vl_moe", _text(routed=ALL)),
    Case("qwen3_vl_moe_text", _text(routed=ALL)),
    Case("qwen3_vl_moe_text", _text(dense=1, routed=EXPERTS), {"mlp_only_layers": [0]}, "mixed"),
    Case("qwen3_5", _text(dense=2)),
    Case("qwen3_5_moe", _text(routed=ALL, shared=2)),
    Case("qwen3_5_moe_text", _text(routed=ALL, shared=2)),
    Case("qwen3_next", _text(routed=ALL, shared=2)),
    Case("deepseek_v2", _text(routed=ALL, shared=2)),
    Case("deepseek_v3", _text(dense=1, routed=EXPERTS, shared=1)),
    Case("deepseek_v4", _text(routed=ALL, shared=2)),
    Case("kimi_k25", _text(dense=1, routed=EXPERTS, shared=1)),
    Case("kimi_linear", _text(dense=1, routed=EXPERTS, shared=1)),
    Case("glm4_moe", _text(dense=1, routed=EXPERTS, shared=1)),
    Case("dots1", _text(routed=ALL, shared=2)),
    Case("ernie4_5_moe", _text(dense=1, routed=EXPERTS, shared=1)),
    Case("hunyuan_v1_moe", _text(routed=ALL, shared=2), {"num_experts": EXPERTS, "moe_topk": 2}),
    Case("mimo_v2_flash", _text(dense=1, routed=EXPERTS)),
    Case("olmoe", _text(routed=ALL)),
    Case("flex_olmo", _text(routed=ALL)),
    Case("mixtral", _text(routed=ALL)),
    Case("minimax", _text(routed=ALL)),
    Case("minimax_m2", _text(routed=ALL)),
    Case("phimoe", _text(routed=ALL)),
    Case("jamba", _text(dense=1, routed=EXPERTS)),
    Case("bamba", _text(dense=2)),
    Case("falcon_h1", _text(dense=2)),
    Case("lfm2_moe", _text(dense=1, routed=EXPERTS), {"num_dense_layers": 1}),
    Case("granitemoe", _text(routed=ALL)),
    Case("granitemoe_swa", _text(routed=ALL)),
    Case("granitemoeshared", _text(routed=ALL, shared=2), {"shared_intermediate_size": 56}),
    Case("granitemoehybrid", _text(routed=ALL, shared=2)),
    Case("granitemoehybrid", _text(dense=2), {"num_local_experts": 0}, "dense"),
    Case("jetmoe", _text(routed=ALL)),
    Case("dbrx", _text(routed=ALL)),
    Case("gpt_oss", _text(routed=ALL)),
    Case("llama4_text", _text(routed=ALL, shared=2)),
    Case("llama4_text", _text(dense=1, routed=EXPERTS, shared=1), {"moe_layers": [1]}, "mixed"),
    Case("llama4", _text(routed=ALL, shared=2)),
    Case("aria_text", _text(routed=ALL, shared=2)),
    Case("aria", _text(routed=ALL, shared=2)),
    Case("longcat_flash", _text(dense=2 * LAYERS, routed=ALL)),
    Case("step3p7", _text(dense=1, routed=EXPERTS, shared=1)),
    Case("step3p7", _text(dense=1, routed=EXPERTS, shared=1), {
        "text_config.swiglu_limits": [0.0, 0.5], "text_config.swiglu_limits_shared": [0.6, 0.7],
    }, "limited"),
    Case("gemma4_text", _text(dense=2, routed=ALL), {
        "enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": 24,
    }, "experts"),
    Case("gemma3n_text", _text(dense=2)),
    Case("bitnet", _text(dense=2)),
    Case("doge", _text(routed=0, dense=2)),
    Case("esmc", _text(dense=2)),
    Case("xlstm", _text(dense=2)),
    Case("zamba2", _text(dense=1)),
    Case("nomic_bert", _text(dense=2)),
    Case("gte", _text(dense=2)),
    Case("moonshine", _text(dense=2)),
    Case("t5", _text(dense=2) | {("encoder", "dense"): 2}, T5_GATED | {"feed_forward_proj": "gated-gelu"}),
    Case("t5", _text(dense=2) | {("encoder", "dense"): 2}, T5_GATED | {"feed_forward_proj": "gated-silu", "dense_act_fn": "silu"}, "silu"),
    Case("mt5", _text(dense=2) | {("encoder", "dense"): 2}),
    Case("umt5", _text(dense=2) | {("encoder", "dense"): 2}),
    Case("mllama", _text(dense=2)),
    Case("granite_docling_text", _text(dense=2)),
    Case("granite4_vision_text", _text(dense=2)),
    Case("exaone_moe", _text(dense=1, routed=EXPERTS, shared=1)),
    Case("hy_v3", _text(dense=1, routed=EXPERTS, shared=1)),
    Case("laguna", _text(dense=1, routed=EXPERTS, shared=1)),
    Case("lara_mini", _text(routed=ALL, shared=2)),
    Case("mellum", _text(routed=ALL)),
    Case("qwen3_omni_moe_text", _text(routed=ALL)),
    Case("solar_open", _text(routed=ALL, shared=2)),
    Case("glm4v_moe_text", _text(dense=1, routed=EXPERTS, shared=1)),
    Case("glm4v_text", _text(dense=2)),
    Case("glm_ocr_text", _text(dense=2)),
    Case("glm_image_text", _text(dense=2)),
    Case("afmoe", _text(dense=1, routed=EXPERTS, shared=1)),
    Case("pop2piano", _text(dense=2) | {("encoder", "dense"): 2}),
    Case("lfm3", _text(dense=2)),
    Case("cohere2_moe", _text(routed=ALL)),
    Case("moshi", _text(dense=2)),
    Case("kyutai_speech_to_text", _text(dense=2)),
    Case("molmo2_text", _text(dense=2)),
    Case("openai_privacy_filter", _text(routed=ALL)),
    Case("minimax_m3_vl_text", _text(routed=ALL, shared=2)),
    Case("pixtral", _text(dense=2)),
    Case("mistral3", _text(dense=2) | {("vision", "dense"): 2}),
    Case("qwen2_5_vl", _text(dense=2) | {("vision", "dense"): 2}),
    Case("qwen2_vl", _text(dense=2)),
    Case("dinov2", _text(dense=2), {"use_swiglu_ffn": True}),
    Case("dinov2_with_registers", _text(dense=2), {"use_swiglu_ffn": True}),
    Case("phi4_multimodal", _text(dense=2) | {("audio", "dense"): 4}),
]  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """A model in memory and on disk."""

    case: Case
    model: PreTrainedModel
    witness: Witness
    directory: Path


@pytest.fixture(scope="module", params=CASES, ids=str)
def saved(request, tmp_path_factory) -> Saved:
    """Every case in turn."""
    directory = tmp_path_factory.mktemp("model")
    model = build(configuration(request.param.model_type, **request.param.changes))
    model.save_pretrained(directory)
    return Saved(request.param, model, Witness(model), directory)


def inputs(width: int = WIDTH, size: float = 1.0) -> Tensor:
    """A few rows of noise."""
    return size * torch.randn(5, width, generator=torch.Generator().manual_seed(1))


def is_coupled(layer: GatedLayer) -> bool:
    """Whether the report says that its neurons do more than their three weights say."""
    return any(word in (layer.functional_note() or "") for word in ("coupled", "low-rank"))


def test_every_mlp_is_found_once(saved):
    sites = gp.open_checkpoint(saved.directory).sites
    assert Counter((site.tower, site.group) for site in sites) == saved.case.expected
    assert len({(site.tower, site.layer, site.expert) for site in sites}) == len(sites)


@torch.no_grad()
def test_factors_are_those_of_one_module_each(saved):
    """Also where the module computes more than its neurons: the weights are the right ones."""
    raw = gp.open_checkpoint(saved.directory, fold_norm=False)
    numbered = all(site.storage != "row-stacked" for site in raw.sites)
    places = [saved.witness.place(layer) for layer in raw.layers()]
    assert len(set(places)) == len(places) or not numbered


@torch.no_grad()
def test_unfolded_factors_are_the_module(saved):
    for layer in gp.open_checkpoint(saved.directory, fold_norm=False).layers():
        if is_coupled(layer) or holds_its_norm(layer):
            continue
        x = inputs(layer.d_model, 3.0)  # far enough out for limits to be met
        expected = saved.witness.function(layer)(x)
        assert error(layer.forward(x), expected) < 1e-5
        assert error(layer.exchange(gauge="raw").forward(x), expected) > 1e-2


def holds_its_norm(layer: GatedLayer) -> bool:
    """Phi-4's audio modules begin with their norm."""
    return "feed_forward_" in layer.sources["gate"]


@torch.no_grad()
def test_folded_factors_are_the_module_behind_its_norm(saved):
    for layer in gp.open_checkpoint(saved.directory).layers():
        if is_coupled(layer):
            continue
        h = inputs(layer.d_model, 300.0)
        raw = gp.open_checkpoint(saved.directory, fold_norm=False).layer(layer.layer, layer.expert, layer.tower)
        function = saved.witness.function(raw)
        if "norm" not in layer.sources:
            assert "no norm stands in front" in layer.functional_note()
            continue
        if holds_its_norm(layer):
            expected = function(h)
        else:
            expected = function(saved.model.get_submodule(norm_name(saved, layer))(h))
        centred = h - h.mean(1, keepdim=True) if "LayerNorm" in layer.norm else h
        x = centred / centred.square().mean(1, keepdim=True).sqrt()
        assert error(layer.forward(x), expected) < 1e-4
        assert error(layer.exchange(gauge="raw").forward(x), expected) > 1e-2


def norm_name(saved: Saved, layer: GatedLayer) -> str:
    """Name of the module whose weight was folded in, found by its values."""
    return saved.witness.norm(load_file(saved.directory / "model.safetensors")[layer.sources["norm"]])


# Types that are run as a whole, to see which norm's output an MLP reads; others need pictures or sound.
READ_TEXT = [case for case in CASES if case.model_type not in (
    "pixtral", "mistral3", "dinov2", "dinov2_with_registers", "moonshine", "phi4_multimodal", "zamba2", "xlstm",
    "qwen2_5_vl", "qwen2_vl", "qwen3_vl_moe", "llama4", "aria", "mllama", "qwen3_5", "qwen3_5_moe", "kimi_k25", "step3p7",
    "deepseek_v2", "kimi_linear", "glm4v_text", "glm4v_moe_text", "glm_ocr_text", "glm_image_text", "kyutai_speech_to_text",
)]  # fmt: skip
TWO_STACKS, ENCODERS = ("t5", "mt5", "umt5", "pop2piano"), ("nomic_bert", "gte", "esmc", "openai_privacy_filter")


@torch.no_grad()
def test_the_norm_is_the_one_whose_output_the_running_model_feeds_the_mlp(saved):
    if saved.case not in READ_TEXT:
        pytest.skip("this type does not run on tokens alone")
    read: dict[str, list[Tensor]] = {}
    written: dict[str, list[Tensor]] = {}

    def watch(name: str):
        def hook(module, args, kwargs, out):
            x = args[0] if args else next(iter(kwargs.values()), None)
            for where, value in ((read, x), (written, out)):
                if isinstance(value, Tensor):
                    where.setdefault(name, []).append(value.flatten())

        return hook

    handles = [
        module.register_forward_hook(watch(name), with_kwargs=True)
        for name, module in saved.model.named_modules()
        if name
    ]
    tokens = torch.arange(3, 12)[None]
    more = {"decoder_input_ids": tokens} if saved.case.model_type in TWO_STACKS else {}
    saved.model(input_ids=tokens, **more, **({} if saved.case.model_type in ENCODERS else {"use_cache": False}))
    for handle in handles:
        handle.remove()
    checked = 0
    for layer in gp.open_checkpoint(saved.directory).layers():
        if "norm" not in layer.sources or "input of an expert" in (layer.functional_note() or ""):
            continue
        raw = gp.open_checkpoint(saved.directory, fold_norm=False).layer(layer.layer, layer.expert, layer.tower)
        owner, _ = saved.witness.home(raw)
        norm = norm_name(saved, layer)
        pairs = [(x, y) for x in read[owner] for y in written[norm]]
        assert any(x.shape == y.shape and torch.equal(x, y) for x, y in pairs)
        checked += 1
    assert checked or all("norm" not in layer.sources for layer in gp.open_checkpoint(saved.directory).layers())
