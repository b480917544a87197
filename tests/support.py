"""Checkpoints small enough to read by eye, written for tests. All sizes differ, so that no transpose can pass."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

D_MODEL, D_MLP, LAYERS = 16, 24, 12


def llama_tensors(
    *, layers: int = LAYERS, d_mlp: int = D_MLP, d_model: int = D_MODEL, seed: int = 0, prefix: str = "model."
) -> dict[str, Tensor]:
    """Random weights under LLaMA's names, with norms that are not 1."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * d_model**-0.5

    tensors = {f"{prefix}embed_tokens.weight": draw(32, d_model)}
    for layer in range(layers):
        stem = f"{prefix}layers.{layer}."
        tensors |= {
            f"{stem}mlp.gate_proj.weight": draw(d_mlp, d_model),
            f"{stem}mlp.up_proj.weight": draw(d_mlp, d_model),
            f"{stem}mlp.down_proj.weight": draw(d_model, d_mlp),
            f"{stem}post_attention_layernorm.weight": 1 + draw(d_model),
            f"{stem}input_layernorm.weight": 1 + draw(d_model),
        }
    return tensors


def llama_config(**changes) -> dict:
    """The config that goes with `llama_tensors`; a change to None removes the key."""
    config = {
        "model_type": "llama",
        "hidden_size": D_MODEL,
        "intermediate_size": D_MLP,
        "num_hidden_layers": LAYERS,
        "hidden_act": "silu",
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def write_checkpoint(
    directory: Path, tensors: dict[str, Tensor], config: dict | None, *, name: str = "model.safetensors"
) -> Path:
    """A directory with one safetensors file and, unless config is None, a config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, directory / name)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_llama(directory: Path, **changes) -> Path:
    """The plain LLaMA fixture; keyword arguments of `llama_tensors` change the weights, others the config."""
    shape = {key: changes.pop(key) for key in ("layers", "d_mlp", "d_model", "seed", "prefix") if key in changes}
    config = llama_config(
        num_hidden_layers=shape.get("layers", LAYERS),
        intermediate_size=shape.get("d_mlp", D_MLP),
        hidden_size=shape.get("d_model", D_MODEL),
    )
    return write_checkpoint(directory, llama_tensors(**shape), llama_config(**(config | changes)))


def random_layer(
    *, d_mlp: int = D_MLP, d_model: int = D_MODEL, activation: str = "silu", seed: int = 0, biases: bool = False
):
    """A `GatedLayer` of random float64 factors."""
    import glu_probe as gp

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5

    return gp.GatedLayer(
        draw(d_mlp, d_model) * 1.5,
        draw(d_mlp, d_model),
        draw(d_mlp, d_model),
        gp.activation(activation),
        query_bias=draw(d_mlp) if biases else None,
        key_bias=draw(d_mlp) if biases else None,
    )


def shared_value_layer(*, groups: int, size: int, d_model: int = D_MODEL, activation: str = "linear", seed: int = 0):
    """A `GatedLayer` whose neurons come in groups that share one value direction each, orthogonal between groups."""
    import glu_probe as gp

    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, groups * size, d_model, generator=generator, dtype=torch.float64) * d_model**-0.5
    value = torch.eye(d_model, dtype=torch.float64)[:groups].repeat_interleave(size, dim=0)
    signs = torch.tensor([(-1.0) ** i for i in range(groups * size)], dtype=torch.float64)
    return gp.GatedLayer(query, key, value * signs[:, None], gp.activation(activation))
