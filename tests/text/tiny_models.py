"""Language models of a few thousand random weights, built by transformers itself, and a tokenizer for them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from .made_tokenizers import byte_tokenizer

VOCABULARY, LAYERS = 320, 3
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
# What each is here for: the config beyond the sizes.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"model_type": "llama", "mlp_bias": True},
    "phi3": {},  # fused gate and up
    "gemma2": {"query_pre_attn_scalar": 8},  # norms of 1 + w, and one on the output
    "olmo2": {},  # no norm in front
    "cohere": {},  # attention and MLP side by side, LayerNorm without bias
    "stablelm": {},  # LayerNorm with bias
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
                  "mlp_multipliers": [0.5, 0.7]},  # constants on gate and down
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                  "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},  # a shared expert in each layer
    "deepseek_v3": _LATENT,  # a dense layer, then shared experts
    "mixtral": {"num_local_experts": 4},  # routed experts only
    "helium": {},  # no bridge
    "modernbert-decoder": {},  # a bridge that takes it for a plain MLP
}  # fmt: skip


def build(name: str, **changes: Any) -> torch.nn.Module:
    """A transformers model in memory, the same weights every time; norms are not 1 and neurons not linear."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**_SIZES, **MODELS[name], **changes}
    config = AutoConfig.for_model(values.pop("model_type", name), **values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(30 if "embed" in parameter_name else 6)
    return model


def save(directory: Path, name: str, *, tokenizer: bool = True, **changes: Any) -> Path:
    """The same as a directory of files."""
    directory.mkdir(parents=True, exist_ok=True)
    build(name, **changes).save_pretrained(directory)
    if tokenizer:
        tokens().save_pretrained(directory)
    return directory


@lru_cache
def tokens():
    """A byte-level tokenizer of 300 tokens."""
    return byte_tokenizer()


def words(count: int, seed: int = 0) -> str:
    """So many words of nonsense."""
    generator = torch.Generator().manual_seed(seed)
    letters = "etaoinshrdlucmfwyp"
    sizes = torch.randint(2, 8, (count,), generator=generator).tolist()
    picks = torch.randint(len(letters), (sum(sizes),), generator=generator).tolist()
    out, start = [], 0
    for size in sizes:
        out.append("".join(letters[i] for i in picks[start : start + size]))
        start += size
    return " ".join(out)
