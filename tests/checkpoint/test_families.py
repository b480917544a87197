"""Every family of the table against the modules of transformers: tiny, random, saved, read back, compared.

All sizes differ. Norm weights are drawn away from 1 and biases away from 0, so that a fold that is left out, done twice
or done with the wrong gain shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

import glu_probe as gp
from glu_probe.checkpoint.families import FAMILIES, GGUF_NORMS
from glu_probe.checkpoint.family import Norm
from glu_probe.checkpoint.known_families import find_family
from glu_probe.checkpoint.rules import Config, Options, TowerRules, decide
from glu_probe.errors import LayoutUnknown
from glu_probe.neurons import GatedLayer

from .test_instances import CASES as INSTANCES

HIDDEN, INNER, LAYERS, EXPERTS = 16, 24, 2, 3
COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SMALL_EMBEDDINGS = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 4}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}}


@dataclass(frozen=True)
class Case:
    """A tiny model: its `model_type`, what its configuration needs besides `COMMON`, and how it is built.

    `norm` is the module that feeds the MLP where memory has another name for it than files.
    """

    name: str
    config: dict = field(default_factory=dict)
    label: str = ""
    norm: str | None = None
    build: str | None = None

    def __str__(self) -> str:
        return f"{self.name}-{self.label}" if self.label else self.name


def _plain(*names: str) -> list[Case]:
    return [Case(name) for name in names]


def _experts(name: str, config: dict) -> Case:
    return Case(name, config | {"experts_implementation": "eager"})  # the fast kernels know no float64


CASES = [
    *_plain("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "smollm3", "helium", "ernie4_5"),
    *_plain("internlm3", "eurobert", "hunyuan_v1_dense", "iquestcoder", "cwm", "diffllama", "doge", "seed_oss", "lfm2"),
    *_plain("granite", "granite_swa", "gemma", "gemma2", "gemma3_text", "vaultgemma"),
    *_plain("gemma4_unified_text", "recurrent_gemma", "olmo", "olmo2", "olmo3", "exaone4"),
    *_plain("cohere", "cohere2", "stablelm", "phi3", "glm", "glm4", "modernbert", "modernbert-decoder"),
    *(Case(name, SECTIONS) for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")),
    Case("gemma4_text", SMALL_EMBEDDINGS),
    Case("embedding_gemma2_text", SMALL_EMBEDDINGS),
    Case("qwen3_5_text", {"layer_types": ["full_attention"] * LAYERS} | SECTIONS),
    Case("emu3_text_model", build="Emu3TextModel"),
    Case("exaone", norm="post_attention_layernorm"),
    Case("llama", {"mlp_bias": True, "hidden_act": "gelu"}, "biases"),
    Case("stablelm", {"use_parallel_residual": True}, "parallel"),
    Case("modernbert", {"norm_bias": True, "mlp_bias": True, "hidden_activation": "silu"}, "biases"),
    Case("gemma2", {"hidden_activation": "silu"}, "silu"),
    _experts("qwen2_moe", ROUTED | {"shared_expert_intermediate_size": 20}),
    _experts("qwen3_moe", ROUTED),
    _experts("deepseek_v2", DEEPSEEK | LATENT),
    _experts("deepseek_v3", DEEPSEEK | LATENT),
    _experts("glm4_moe", DEEPSEEK),
    _experts("ernie4_5_moe", {
        "moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": 10, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    }),
    _experts("olmoe", {"num_experts": EXPERTS, "num_experts_per_tok": 2}),
    _experts("mixtral", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
]  # fmt: skip

# Parts of models that have cases as a whole, here or in `test_layouts`.
PARTS = {
    "csm",
    "csm_depth_decoder_model",
    "mllama_text_model",
    "gemma3n",
    "step3p5",
    "phi4_multimodal_audio",
    "qwen2_5_vl_vision",
    "inkling_text",
    "dia_decoder",
    "hy_v4_vl_text",
}
# Types that transformers has no modules for; their files are written by hand in `test_layouts`.
REMOTE = {"baichuan", "internlm", "internlm2", "kimi_k2", "deepseek", "qwen", "llada", "jais", "chatglm", "dots3_note_vision_encoder"}  # fmt: skip
BY_NAME = {case.name: case for case in reversed(CASES) if not case.label}


@dataclass(frozen=True)
class Saved:
    """A model in memory and on disk."""

    case: Case
    model: nn.Module
    directory: Path

    @property
    def rules(self) -> TowerRules:
        """What the package decides about its language model."""
        config = json.loads((self.directory / "config.json").read_text())
        return decide(Config(config, gguf=False), "text", Options())

    def layers(self, **options) -> list[tuple[GatedLayer, nn.Module]]:
        """Every gated MLP that is read, beside the model's layer."""
        stack = stack_of(self.model)
        pairs = [(layer, stack[layer.layer]) for layer in gp.open_checkpoint(self.directory, **options).layers()]
        assert {layer.layer for layer, _ in pairs} == set(range(LAYERS))
        return pairs


@pytest.fixture(scope="module", params=CASES, ids=str)
def each(request, tmp_path_factory) -> Saved:
    """Every case in turn."""
    return saved(request.param, tmp_path_factory.mktemp("model"))


def build(case: Case) -> nn.Module:
    """The model of a case, with every parameter drawn anew."""
    config = CONFIG_MAPPING[case.name](**COMMON | case.config)
    if case.build:
        model = getattr(transformers, case.build)(config)
    else:
        causal = type(config) in AutoModelForCausalLM._model_mapping
        model = (AutoModelForCausalLM if causal else AutoModel).from_config(config)
    return randomised(model.double().eval())


def randomised(model: nn.Module) -> nn.Module:
    """The model with vectors (norms, biases) around 0.7 and matrices around 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + (0.7 if parameter.ndim == 1 else 0.0))
    return model


def stack_of(model: nn.Module) -> nn.ModuleList:
    """The language model's layers."""
    stacks = [m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and name.endswith("layers")]
    return next(stack for stack in stacks if mlp_of(stack[0]) is not None)


def mlp_of(layer: nn.Module) -> nn.Module | None:
    """The module of a layer that is its MLP, or its experts."""
    return next((m for name in ("mlp", "feed_forward", "mlp_block") if (m := getattr(layer, name, None))), None)


def function_of(mlp: nn.Module, expert: int | str | None) -> Callable[[Tensor], Tensor]:
    """What the module itself computes, of one expert if it has several."""
    if expert is None:
        return lambda x: mlp(x[None])[0]
    if expert == "shared":
        return mlp.shared_expert if hasattr(mlp, "shared_expert") else mlp.shared_experts
    return lambda x: mlp.experts(x, torch.full((len(x), 1), expert), torch.ones(len(x), 1, dtype=x.dtype))


def error(found: Tensor, expected: Tensor) -> float:
    """Distance relative to the size of what was expected."""
    return float((found - expected).norm() / expected.norm())


def saved(case: Case, directory: Path) -> Saved:
    """The model of a case, saved to a directory."""
    model = build(case)
    model.save_pretrained(directory)
    return Saved(case, model, directory)


def stream(rows: int = 5) -> Tensor:
    """A residual stream so large that the epsilon of a norm is nothing beside it."""
    return 30 * torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def normalised(h: Tensor, norm: Norm) -> Tensor:
    """The stream as it stands before a norm's gain."""
    h = h - h.mean(1, keepdim=True) if norm.kind == "layer" else h
    return h / h.square().mean(1, keepdim=True).sqrt()


# -- the factors compute what the module computes ------------------------------------------------


def test_every_family_has_a_case():
    """gemma3 is a pair of towers and has its own tests below; nothing in the table is left out."""
    seen = {case.name for case in CASES} | {case.model_type for case in INSTANCES} | {"gemma3"} | PARTS | REMOTE
    assert {name for family in FAMILIES for name in family.names} <= seen


@torch.no_grad()
def test_unfolded_factors_are_the_module(each):
    x = stream() / 30
    for layer, module in each.layers(fold_norm=False):
        expected = function_of(mlp_of(module), layer.expert)(x)
        assert error(layer.forward(x), expected) < 1e-5
        assert error(layer.exchange(gauge="raw").forward(x), expected) > 1e-2


@torch.no_grad()
def test_folded_factors_are_the_module_behind_its_norm(each):
    h, norm = stream(), each.rules.norm
    for layer, module in each.layers():
        mlp = function_of(mlp_of(module), layer.expert)
        if norm is None:
            assert "no norm stands in front" in layer.functional_note()
            assert error(layer.forward(h), mlp(h)) < 1e-5
            continue
        assert layer.functional_note() is None
        expected = mlp(module.get_submodule(each.case.norm or norm.tensor)(h))
        assert error(layer.forward(normalised(h, norm)), expected) < 1e-5
        assert error(layer.exchange(gauge="raw").forward(normalised(h, norm)), expected) > 1e-2


@torch.no_grad()
def test_the_norms_of_the_table_are_those_that_the_running_model_uses(each):
    norm, post_norm = each.rules.norm, each.rules.post_norm
    seen = watched(each)
    for layer in stack_of(each.model):
        read, written = seen[mlp_of(layer)]
        norms = {name: seen[module] for name, module in layer.named_modules() if "norm" in name and module in seen}
        feeding = [name for name, (_, out) in norms.items() if torch.equal(out, read)]
        following = [name for name, (x, _) in norms.items() if torch.equal(x, written)]
        assert feeding == ([each.case.norm or norm.tensor] if norm else [])
        assert following == ([post_norm.tensor.split("|")[-1]] if post_norm else [])


def watched(tiny: Saved) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """What every module below the layers read and wrote while the model ran on a few tokens."""
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def watch(module, args, kwargs, out):
        x = args[0] if args else next(iter(kwargs.values()))
        out = out[0] if isinstance(out, tuple) else out
        if isinstance(x, Tensor) and isinstance(out, Tensor):
            seen[module] = (x.reshape(-1), out.reshape(-1))

    handles = [m.register_forward_hook(watch, with_kwargs=True) for m in stack_of(tiny.model).modules()]
    encoder = tiny.case.name in ("eurobert", "modernbert")  # which know no cache
    tiny.model(input_ids=torch.arange(3, 10)[None], **({} if encoder else {"use_cache": False}))
    for handle in handles:
        handle.remove()
    return seen


def test_the_activation_is_the_module_s(each):
    z = torch.linspace(-4, 4, 101, dtype=torch.float64)
    for layer, module in each.layers(fold_norm=False):
        mlp = mlp_of(module)
        for owner in (mlp, getattr(mlp, "experts", None)):
            names = ("act_fn", "activation_fn", "act")
            functions = [f for name in names if callable(f := getattr(owner, name, None))]
            assert all(torch.allclose(layer.activation(z), function(z), rtol=0, atol=1e-12) for function in functions)


@pytest.mark.parametrize("name", ["gemma2", "gemma4_text", "glm4", "olmo2", "exaone4"])
@torch.no_grad()
def test_the_norm_behind_is_folded_on_request(name, tmp_path):
    tiny, x = saved(BY_NAME[name], tmp_path), stream() / 30
    norm = tiny.rules.post_norm
    for layer, module in tiny.layers(fold_norm=False, fold_post_norm=True):
        raw = mlp_of(module)(x[None])[0]
        scale = (raw.square().mean(1, keepdim=True) + 1e-6).sqrt()
        name = norm.tensor.split("|")[-1]
        gain = module.get_submodule(name)(raw) * scale / raw  # the module's own gain
        assert error(layer.forward(x), raw * gain) < 1e-4
        assert layer.sources["post_norm"].endswith(f"{name}.weight")


# -- config keys ---------------------------------------------------------------------------------


@torch.no_grad()
def test_gemma_s_gelu_means_the_tanh_form(tmp_path):
    tiny = saved(Case("gemma", {"hidden_act": "gelu"}), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))  # as published
    checkpoint, x = gp.open_checkpoint(tmp_path, fold_norm=False), stream() / 30
    assert checkpoint.layer(0).activation.name == "gelu_tanh"
    assert error(checkpoint.layer(0).forward(x), mlp_of(stack_of(tiny.model)[0])(x)) < 1e-5
    assert checkpoint.provenance()["towers"]["text"]["activation_source"] == "family rule"


def test_modernbert_computes_its_hidden_activation(tmp_path):
    saved(Case("modernbert", {"hidden_activation": "silu"}), tmp_path)
    assert gp.open_checkpoint(tmp_path).layer(0).activation.name == "silu"


def test_gemma2_ignores_hidden_act(tmp_path):
    saved(Case("gemma2"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["hidden_activation"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "silu"}))
    assert gp.open_checkpoint(tmp_path).layer(0).activation.name == "gelu_tanh"


def test_a_bias_that_the_rules_do_not_know_is_refused(tmp_path):
    saved(Case("cohere"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.input_layernorm.bias"] = torch.ones(HIDDEN, dtype=torch.float64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LayoutUnknown, match=r"input_layernorm\.bias"):
        gp.open_checkpoint(tmp_path).layer(0)


def test_granite_s_residual_multiplier_is_noted(tmp_path):
    saved(Case("granite", {"residual_multiplier": 0.25}), tmp_path)
    assert any("0.25" in note for note in gp.open_checkpoint(tmp_path).notes)


# -- Gemma 3 beside a vision tower ---------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma3():
    """Gemma 3 as it is published: a text_config, and a vision tower whose MLPs are plain."""
    vision = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CONFIG_MAPPING["gemma3"](
        text_config=COMMON | {"model_type": "gemma3_text"},
        vision_config=vision | {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
    )
    return randomised(AutoModel.from_config(config).double().eval())


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@torch.no_grad()
def test_gemma3_with_its_vision_tower(gemma3, prefix, tmp_path):
    gemma3.config.save_pretrained(tmp_path)
    tensors = {
        name.replace("language_model.", prefix).replace("vision_tower.", "model.vision_tower."): value.contiguous()
        for name, value in gemma3.state_dict().items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint, h = gp.open_checkpoint(tmp_path), stream()
    assert list(checkpoint.layers_present) == ["text"]
    assert checkpoint.provenance()["towers"]["text"]["family"] == "gemma3_text"
    for layer in checkpoint.layers():
        module = gemma3.language_model.layers[layer.layer]
        expected = module.mlp(module.pre_feedforward_layernorm(h))
        assert layer.functional_note() is None
        assert layer.sources["gate"] == f"{prefix}layers.{layer.layer}.mlp.gate_proj.weight"
        assert error(layer.forward(normalised(h, Norm("pre_feedforward_layernorm"))), expected) < 1e-5


# -- GGUF ----------------------------------------------------------------------------------------

# `general.architecture` to the type whose weights it is written from.
ARCHITECTURES = {
    "llama": "llama",
    "mistral3": "ministral3",
    "qwen2": "qwen2",
    "qwen2vl": "qwen2_vl_text",
    "qwen3": "qwen3",
    "qwen3vl": "qwen3_vl_text",
    "smollm3": "smollm3",
    "ernie4_5": "ernie4_5",
    "eurobert": "eurobert",
    "hunyuan-dense": "hunyuan_v1_dense",
    "lfm2": "lfm2",
    "exaone": "exaone",
    "seed_oss": "seed_oss",
    "granite": "granite",
    "qwen35": "qwen3_5_text",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "exaone4": "exaone4",
    "command-r": "cohere",
    "cohere2": "cohere2",
    "stablelm": "stablelm",
    "phi3": "phi3",
    "glm4": "glm4",
}
BAKED = ("gemma", "gemma2", "gemma3", "qwen35")  # whose converters write 1 + w


def write_gguf(directory: Path, architecture: str, path: Path, *, parallel: bool | None = None) -> None:
    """The MLPs and norms of a Hugging Face directory under the names that llama.cpp's own table gives them."""
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture], LAYERS)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    if parallel is not None:
        writer.add_parallel_residual(parallel)
    for name, value in load_file(directory / "model.safetensors").items():
        full = name if name.startswith(("model.", "transformer.")) else f"model.{name}"
        renamed = names.get_name(full, try_suffixes=(".weight", ".bias"))
        if renamed and renamed.startswith("blk.") and ("norm" in renamed or "ffn" in renamed):
            offset = architecture in BAKED and renamed.endswith("norm.weight")
            writer.add_tensor(renamed, (value.float() + 1 if offset else value.float()).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_same_function(first: GatedLayer, second: GatedLayer) -> None:
    """Assert that two layers have the same factors, constants and activation."""
    assert first.activation == second.activation
    assert first.functional_note() == second.functional_note()
    for name in ("query", "key", "value", "query_bias", "key_bias", "output_bias"):
        a, b = getattr(first, name), getattr(second, name)
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-7)


def test_every_architecture_s_norm_is_one_that_the_gguf_library_lists():
    tensors = {name: gguf.MODEL_TENSORS[arch] for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    for family in FAMILIES:
        for name in family.gguf:
            norms = [norm for norm in (family.norm, *(place.norm for place in family.places.values())) if norm]
            wanted = {norm.gguf or GGUF_NORMS[norm.tensor] for norm in norms if norm.weight != "none"}
            listed = {gguf.TENSOR_NAMES[tensor].rpartition(".")[2] for tensor in tensors[name]}
            assert wanted <= listed, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("post_norm", [False, True])
def test_gguf_gives_the_factors_of_the_directory(architecture, post_norm, tmp_path):
    case = BY_NAME[ARCHITECTURES[architecture]]
    saved(case, tmp_path / "directory")
    write_gguf(tmp_path / "directory", architecture, tmp_path / "model.gguf")
    assert find_family(architecture, gguf=True) is find_family(case.name)
    first = gp.open_checkpoint(tmp_path / "model.gguf", fold_post_norm=post_norm)
    second = gp.open_checkpoint(tmp_path / "directory", fold_post_norm=post_norm)
    assert len(first.sites) == len(second.sites) == LAYERS
    for a, b in zip(first.layers(), second.layers(), strict=True):
        assert_same_function(a, b)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("key", [None, False, True])
def test_gguf_tensors_say_whether_stablelm_is_parallel(parallel, key, tmp_path):
    """Converters of some versions write the key with a default of their own."""
    saved(Case("stablelm", {"use_parallel_residual": parallel}), tmp_path / "directory")
    write_gguf(tmp_path / "directory", "stablelm", tmp_path / "model.gguf", parallel=key)
    layers = (gp.open_checkpoint(tmp_path / name).layers() for name in ("model.gguf", "directory"))
    for a, b in zip(*layers, strict=True):
        assert_same_function(a, b)
