"""Any model of transformers, made small: its default configuration with every size cut down, and random weights.

Nothing here knows how a model stores its MLPs.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

WIDTH, INNER, ROUTED, SHARED = 32, 40, 24, 56
LAYERS, EXPERTS = 2, 4
_LARGEST = 20_000_000  # parameters

# Names of sizes in configurations to what they become; the first that fits.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"^(moe_intermediate_size|expert_ffn_hidden_size|moe_ffn_hidden_size|expert_intermediate_size)$", ROUTED),
    (r"^(moe_)?(shared|share)_(expert_)?(intermediate_size|dim)$", SHARED),
    (r"^intermediate_size_mlp$", 48),
    (r"(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|inner_dim|d_inner|mlp_dim|intermediate_dim)$", INNER),
    (r"(layers|^n_layer|^depth|num_blocks|num_hidden_blocks)$", LAYERS),
    (r"(num_key_value_heads|num_kv_heads|kv_heads|n_head_kv|kv_n_heads)$", 2),
    (r"(heads|n_head)$", 4),
    (r"(qk_rope_head_dim)$", 4),
    (r"(head_dim|d_kv|kv_channels|head_size)$", 8),
    (r"(lora_rank)$", 8),
    (r"^(hidden_size|d_model|n_embd|dim|embed_dim|width|embedding_size|hidden_dim|model_dim|out_hidden_size|output_dim|"
     r"text_hidden_size|vision_hidden_size|cross_attention_hidden_size|projection_dim|embedding_dim|lru_width|hidden|"
     r"word_embed_proj_dim|audio_hidden_size|encoder_hidden_size|decoder_hidden_size|output_hidden_size|n_state|"
     r"attention_hidden_size|target_hidden_size|mm_hidden_size)$", WIDTH),
    (r"(vocab_size|codebook_size|vocab_size_per_layer_input)$", 128),
    (r"hidden_size_per_layer_input$", 8),
    (r"(max_position_embeddings|max_sequence_length|n_positions|max_(source|target)_positions|max_seq_len|n_ctx)$", 64),
    (r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|n_experts)$", EXPERTS),
    (r"^(num_experts_per_tok|moe_k|moe_top_?k|top_k|num_experts_per_token|moe_num_experts_per_tok|n_activated)$", 2),
    (r"^(n_group|topk_group|num_expert_groups?|n_groups|zero_expert_num)$", 1),
    (r"^(first_k_dense_replace|num_dense_layers|moe_layer_start_index)$", 1),
    (r"^(image_size|input_size|img_size)$", 56),
    (r"^patch_size$", 14),
    (r"^num_mel_bins$", 16),
)  # fmt: skip
_KEPT = ("num_nextn", "mtp_num", "num_mtp", "num_kv_shared")
_KINDS_OF_LAYERS = re.compile(r"(layer_types|layers_block_type|block_types|block_type|layers_types|ffn_types)$")
_TABLES = [name for name in vars(modeling_auto) if re.fullmatch(r"MODEL(_FOR_\w+)?_MAPPING_NAMES", name)]
_FIRST = ("CAUSAL_LM", "IMAGE_TEXT", "SEQ_TO_SEQ", "SPEECH_SEQ", "MULTIMODAL", "MODEL_MAPPING")

_STAGES = {"stage_names": ["stem", "stage1", "stage2"], "_out_features": ["stage2"], "_out_indices": [2]}
_LATENT = {"head_dim": 4, "qk_head_dim": 12, "num_key_value_heads": 4}
# What a configuration needs besides.
NEEDS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mlp_multipliers": [0.5, 0.25]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "num_local_experts": EXPERTS},
    "dots1": {"num_key_value_heads": 4, "n_shared_experts": 2, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2},
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_linear": _LATENT,
    "longcat_flash": _LATENT,
    "gemma4_text": {"per_layer_config": {}},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": [INNER] * LAYERS,
                     "activation_sparsity_pattern": [0.9, 0.0]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "csm_depth_decoder_model": {"vocab_size": 128},
    "nemotron": {"head_dim": 8},
    "dinov2": _STAGES,
    "dinov2_with_registers": _STAGES,
}  # fmt: skip


class CannotBuild(Exception):
    """A type that has no small model here; the text says why."""


def configuration(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The smallest sensible configuration of a type.

    Raises:
        CannotBuild: the type's own checks refuse it.
    """
    try:
        config = CONFIG_MAPPING[model_type]()
        _shrink(config)
        for name, value in (NEEDS.get(model_type, {}) | changes).items():
            *parts, last = name.split(".")
            owner = config
            for part in parts:
                owner = getattr(owner, part)
            setattr(owner, last, value)
        return type(config).from_dict(config.to_dict())
    except Exception as error:
        raise CannotBuild(f"{type(error).__name__}: {error}"[:200]) from None


def _shrink(config: PreTrainedConfig) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _shrink(value)
        elif isinstance(value, int) and not isinstance(value, bool) and not name.startswith(("_", *_KEPT)):
            _try_set(config, name, _small(name, value))
    layers = next((n for key in ("num_hidden_layers", "n_layer", "num_layers", "depth", "n_layers")
                   if isinstance(n := getattr(config, key, None), int)), LAYERS)  # fmt: skip
    for name, value in list(vars(config).items()):
        if not isinstance(value, (list, tuple)) or not value:
            continue
        if _KINDS_OF_LAYERS.search(name):
            kinds = list(dict.fromkeys(map(str, value)))
            firsts = [next(v for v in value if str(v) == kind) for kind in kinds]
            _try_set(config, name, type(value)(firsts[i % len(firsts)] for i in range(layers)))
        elif len(value) >= 12 and all(isinstance(v, (int, float, bool)) for v in value):
            _try_set(config, name, type(value)(value[:layers]))
    for name in ("rope_parameters", "rope_scaling"):
        _fix_sections(getattr(config, name, None))


def _small(name: str, value: int) -> int:
    if name.endswith(("token_id", "_token", "_index", "_id")) and not name.endswith("start_index"):
        return value if value < 100 else 3 + sum(map(ord, name)) % 90
    if value <= 0:
        return value
    return next(
        (min(size, value) if size < 16 else size for pattern, size in _SIZES if re.search(pattern, name)), value
    )


def _try_set(config: PreTrainedConfig, name: str, value: object) -> None:
    try:
        setattr(config, name, value)
    except (TypeError, ValueError, AttributeError):
        return


def _fix_sections(value: object) -> None:
    if isinstance(value, dict):
        if "mrope_section" in value:
            value["mrope_section"] = [2, 1, 1]
        for inner in value.values():
            _fix_sections(inner)


def _classes(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    """Model classes of a configuration, those with the most parts first."""
    try:
        module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError:  # a configuration for another type's modules
        module = transformers
    names: dict[str, None] = {}
    for table in sorted(_TABLES, key=lambda name: next((i for i, w in enumerate(_FIRST) if w in name), 99)):
        found = dict(getattr(modeling_auto, table)).get(config.model_type, ())
        names |= dict.fromkeys([found] if isinstance(found, str) else found)
    classes = [
        cls for name in names if isinstance(cls := getattr(transformers, name, getattr(module, name, None)), type)
    ]
    for cls in list(vars(module).values()) if module is not transformers else []:
        own = isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.config_class is type(config)
        if own and "PreTrained" not in cls.__name__:
            classes.append(cls)
    return sorted(dict.fromkeys(classes), key=lambda cls: not cls.__name__.endswith("ForConditionalGeneration"))


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration, every parameter drawn anew: vectors around 0.7, matrices around 0.

    Raises:
        CannotBuild: no class of it can be built here.
    """
    reasons = []
    for cls in _classes(config):
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in cls(config).parameters())
            if size > _LARGEST:
                raise CannotBuild(f"{size / 1e6:.0f} million parameters")
            return randomised(cls(config).eval())
        except Exception as error:
            reasons.append(f"{cls.__name__}: {type(error).__name__}: {error}"[:200])
    raise CannotBuild(reasons[0] if reasons else "no model class")


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    """The model with random parameters of one seed."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (0.7 if parameter.ndim == 1 else 0.0))
    return model
