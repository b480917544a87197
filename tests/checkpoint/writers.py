"""Files for the tests of this folder: whole ones in every format, and ways to break them."""

from __future__ import annotations

import contextlib
import json
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import glu_probe as gp
from glu_probe.cli import main
from glu_probe.errors import CorruptHeader

from ..support import D_MLP, D_MODEL, LAYERS, llama_tensors

LFS_SIZE = 4_976_698_672
LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0f' * 32}\nsize {LFS_SIZE}\n".encode()
HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Please sign in.</body></html>\n" * 4


def pack_header(header: object, data: bytes = b"") -> bytes:
    """A safetensors file with this header, which may be text, bytes or JSON-able."""
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def header_of(path: Path) -> tuple[dict, bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def table(ref: object, **options: object) -> list[pd.DataFrame]:
    """What a user gets from a model, without its name: two layers measured, and all described."""
    report = gp.probe(ref, layers=range(2), samples=2, **options)
    frames = [report.layers, report.neurons, gp.open_checkpoint(ref, **options).describe()]
    return [frame.drop(columns="model") for frame in frames]


def assert_same_table(ref: object, expected: list[pd.DataFrame], **options: object) -> None:
    """Assert that a model gives exactly these frames."""
    for found, wanted in zip(table(ref, **options), expected, strict=True):
        pd.testing.assert_frame_equal(found, wanted, check_exact=True)


def assert_same_factors(ref: object, expected: object) -> None:
    """Assert that two models have bit for bit the same factors in the same layers."""
    first, second = gp.open_checkpoint(ref), gp.open_checkpoint(expected)
    layers = list(zip(first.layers(), second.layers(), strict=True))
    assert [a.layer for a, _ in layers] == list(range(LAYERS))
    for a, b in layers:
        assert torch.equal(a.query, b.query)
        assert torch.equal(a.key, b.key)
        assert torch.equal(a.value, b.value)


@contextlib.contextmanager
def cheap(seconds: float = 1.0, megabytes: float = 50.0):
    """Fail if what is done inside takes longer or allocates more than that.

    The time is that of the processor: a busy machine must not fail a test.
    """
    tracemalloc.start()
    started = time.thread_time()
    try:
        yield
        took, (_, peak) = time.thread_time() - started, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took < seconds
    assert peak < megabytes * 1e6


def assert_corrupt(path: Path, reason: str) -> None:
    """Opening the file is refused for that reason: quickly, in little memory, in a short message with advice."""
    with cheap(), pytest.raises(CorruptHeader) as caught:
        gp.open_checkpoint(path)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{path}: the header is corrupt: ")
    assert caught.value.hint == "Download the file again"
    assert len(str(caught.value)) < 1000


def command_line(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a run of the command line."""
    code: object = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return int(code or 0), out, err


GGUF_NAMES = {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}


def gguf_tensors(**shape: int) -> dict[str, np.ndarray]:
    """The weights of the plain LLaMA fixture under the names of GGUF files."""
    renamed = {}
    for name, tensor in llama_tensors(**shape).items():
        name = name.replace("model.layers.", "blk.").replace("model.embed_tokens", "token_embd")
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(f".{theirs}.", f".{ours}.")
        renamed[name] = tensor.numpy()
    return renamed


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    kind: str = "F32",
    *,
    d_model: int = D_MODEL,
    d_mlp: int = D_MLP,
    layers: int = LAYERS,
    vocabulary: int = 0,
    split: int = 1,
) -> Path:
    """A llama model as the gguf library writes it; matrices are stored as `kind`, vectors as float32.

    With a split it becomes that many files, and the path of the first is returned.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, "llama", split_max_tensors=-(-len(tensors) // split) if split > 1 else 0)
    writer.add_embedding_length(d_model)
    writer.add_feed_forward_length(d_mlp)
    writer.add_block_count(layers)
    if vocabulary:
        writer.add_token_list([f"token-{number}" for number in range(vocabulary)])
        writer.add_token_scores([0.5] * vocabulary)
    type_ = GGMLQuantizationType[kind]
    for name, values in tensors.items():
        if values.ndim == 2 and kind != "F32":
            writer.add_tensor(name, quantize(values, type_), raw_dtype=type_)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if split == 1 else path.with_name(f"{path.stem}-00001-of-{split:05d}.gguf")
