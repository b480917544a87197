"""Checkpoints that are headers and holes, in the shape of models too large to be here: for plans, and nothing else.

Every shard has its true header and its true length, but no data was ever written: the rest of the file is a hole, made by
`truncate`. `ls` shows hundreds of gigabytes, `du` a few megabytes. Only copy such a file with something that knows holes
(`cp --sparse=always`). A plan reads the headers alone:

    python analyses/bench/header_only.py llama-405b llama-405b-headers
    glu-probe inspect llama-405b-headers --plan --bandwidth 2GB/s

    python analyses/bench/header_only.py deepseek-671b deepseek-671b-headers
    glu-probe inspect deepseek-671b-headers --plan --bandwidth 2GB/s --workers 16

The shapes are those that the models' public configs give: Llama 3.1 405B (126 layers of 16384 x 53248, bfloat16) and
DeepSeek-V3 (61 layers of width 7168: 3 dense of 18432 neurons, 58 of 256 routed experts of 2048 and one shared, FP8 with a
float32 scale for each block of 128 x 128). MLPs and the norms in front of them are written; attention and vocabulary, which no
report reads, are not.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
_SHARD = 5 * 10**9  # bytes, about as the models' own shards have
_BLOCK = 128

# (name, dtype, shape) of every tensor, in order.
Tensors = Iterator[tuple[str, str, tuple[int, ...]]]


def llama_405b() -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of Llama 3.1 405B."""
    layers, d_model, d_mlp = 126, 16384, 53248
    config = {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": d_model, "intermediate_size": d_mlp,
        "num_hidden_layers": layers,
    }  # fmt: skip

    def tensors() -> Tensors:
        for layer in range(layers):
            stem = f"model.layers.{layer}"
            for name, shape in _mlp(f"{stem}.mlp", d_model, d_mlp):
                yield name, "BF16", shape
            yield f"{stem}.post_attention_layernorm.weight", "BF16", (d_model,)

    return config, tensors()


def deepseek_671b() -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of DeepSeek-V3."""
    layers, dense, experts, d_model, d_mlp, d_expert = 61, 3, 256, 7168, 18432, 2048
    config = {
        "model_type": "deepseek_v3", "hidden_act": "silu", "hidden_size": d_model, "intermediate_size": d_mlp,
        "moe_intermediate_size": d_expert, "n_routed_experts": experts, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": dense, "num_hidden_layers": layers,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [_BLOCK, _BLOCK]},
    }  # fmt: skip

    def tensors() -> Tensors:
        for layer in range(layers):
            stem = f"model.layers.{layer}"
            blocks = [(f"{stem}.mlp", d_mlp)]
            if layer >= dense:
                blocks = [(f"{stem}.mlp.experts.{expert}", d_expert) for expert in range(experts)]
                blocks.append((f"{stem}.mlp.shared_experts", d_expert))
                yield f"{stem}.mlp.gate.weight", "BF16", (experts, d_model)
            for block, size in blocks:
                for name, shape in _mlp(block, d_model, size):
                    yield name, "F8_E4M3", shape
                    yield f"{name}_scale_inv", "F32", tuple(-(-axis // _BLOCK) for axis in shape)
            yield f"{stem}.post_attention_layernorm.weight", "BF16", (d_model,)

    return config, tensors()


def _mlp(stem: str, d_model: int, d_mlp: int) -> Iterator[tuple[str, tuple[int, int]]]:
    for projection in ("gate_proj", "up_proj"):
        yield f"{stem}.{projection}.weight", (d_mlp, d_model)
    yield f"{stem}.down_proj.weight", (d_model, d_mlp)


MODELS: dict[str, Callable[[], tuple[dict[str, Any], Tensors]]] = {
    "llama-405b": llama_405b,
    "deepseek-671b": deepseek_671b,
}


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> tuple[int, int]:
    """Write a checkpoint of headers and holes.

    Returns:
        Its bytes as the file system lists them, and those that it takes on the disk.
    """
    directory.mkdir(parents=True)
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, dtype, shape in tensors:
        count = math.prod(shape) * _BYTES[dtype]
        if shards[-1] and size + count > _SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [size, size + count]}
        size += count
    weight_map = {}
    for number, header in enumerate(shards, 1):
        file = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        raw = json.dumps(header).encode()
        with file.open("wb") as handle:
            handle.write(len(raw).to_bytes(8, "little") + raw)
            handle.truncate(8 + len(raw) + max(entry["data_offsets"][1] for entry in header.values()))
        weight_map |= dict.fromkeys(header, file.name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config))
    stats = [file.stat() for file in directory.iterdir()]
    return sum(stat.st_size for stat in stats), sum(stat.st_blocks * 512 for stat in stats)


def main() -> None:
    """Write one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("directory", type=Path, help="must not exist")
    given = parser.parse_args()
    if given.directory.exists():
        sys.exit(f"{given.directory} exists: give the name of a new directory")
    listed, taken = write(given.directory, *MODELS[given.model]())
    print(f"{given.directory}: {listed / 1e9:,.1f} GB as listed, {taken / 1e6:,.1f} MB on the disk")


if __name__ == "__main__":
    main()
