"""Packers of quantised weights, written from the formats' descriptions, and tiny models whose MLPs are packed by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import glu_probe as gp
from glu_probe.checkpoint.files import open_files
from glu_probe.checkpoint.ref import parse_ref

from ..support import llama_config, llama_tensors, write_checkpoint

# Takes a weight [out, in]; gives the stored tensors by what follows the module's name, and what they mean.
Pack = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
WIDE = {"d_model": 64, "d_mlp": 96}  # groups of 16 and 32 fit, blocks of 64 values end in the midst of rows
RAGGED = {"d_model": 160, "d_mlp": 200}  # blocks of 128 are cut short on both sides
MODULES = ("gate_proj", "up_proj", "down_proj")
STEM = "model.layers.0.mlp."


def packed_model(
    directory: Path, pack: Pack, quantization: dict | None, **sizes: int
) -> tuple[Path, dict[str, Tensor]]:
    """A LLaMA of two layers, of which the first's MLP is packed and the second's is not, and what the packed ones mean.

    Its attention holds words that no decoder could make anything of.
    """
    sizes = sizes or WIDE
    tensors, expected = llama_tensors(layers=2, **sizes), {}
    for module in MODULES:
        stored, expected[module] = pack(tensors.pop(f"{STEM}{module}.weight"))
        tensors |= {f"{STEM}{module}.{suffix}": tensor for suffix, tensor in stored.items()}
    attention = "model.layers.0.self_attn.q_proj."
    tensors |= {
        f"{attention}{part}": torch.zeros(3, 5, dtype=torch.int32) for part in ("qweight", "weight_packed", "qzeros")
    }
    tensors[f"{attention}weight"] = torch.ones(7, 3).to(torch.float8_e4m3fn)
    tensors[f"{attention}weight_scale_inv"] = torch.ones(5, 5)
    config = llama_config(num_hidden_layers=2, hidden_size=sizes["d_model"], intermediate_size=sizes["d_mlp"])
    return write_checkpoint(
        directory, tensors, config | {"quantization_config": quantization} if quantization else config
    ), expected


def assert_factors(model: Path, expected: dict[str, Tensor], **sizes: int) -> None:
    """Assert that the packed layer has exactly these factors, and the plain one its own."""
    checkpoint = gp.open_checkpoint(model, fold_norm=False)
    first, second = checkpoint.layers()
    torch.testing.assert_close(first.query, expected["gate_proj"].float(), rtol=0, atol=0)
    torch.testing.assert_close(first.key, expected["up_proj"].float(), rtol=0, atol=0)
    torch.testing.assert_close(first.value, expected["down_proj"].float().T, rtol=0, atol=0)
    plain = llama_tensors(layers=2, **(sizes or WIDE))
    torch.testing.assert_close(second.query, plain["model.layers.1.mlp.gate_proj.weight"], rtol=0, atol=0)
    for module in MODULES:  # the fixture must not be trivial
        assert expected[module].float().std() > 0.01


def assert_ranges(model: Path) -> None:
    """Assert that any range of rows of a packed weight is that of the whole."""
    source = open_files(parse_ref(model)).source
    decoded = [name for name, info in source.infos().items() if info.decoded]
    assert len(decoded) == 3
    for name in decoded:
        whole = source.read(name)
        rows = source.infos()[name].shape[0]
        assert tuple(whole.shape) == source.infos()[name].shape
        for start, stop in ((0, rows), (0, 1), (rows - 1, rows), (5, 6), (3, 50), (31, 33), (7, rows - 2)):
            found = source.read(name, slice(start, stop))
            assert found.shape == whole[start:stop].shape
            assert torch.equal(found, whole[start:stop]), (name, start, stop)
        assert source.read(name, slice(9, 9)).shape == (0, *whole.shape[1:])


def words(values: np.ndarray, bits: int) -> Tensor:
    """Pack along the last axis into 32-bit words, the first value into the low bits."""
    per_word = 32 // bits
    values = values.astype(np.uint64).reshape(*values.shape[:-1], -1, per_word)
    packed = np.zeros(values.shape[:-1], dtype=np.uint64)
    for place in range(per_word):
        packed |= values[..., place] << np.uint64(bits * place)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def draw(*shape: int, low: int, high: int, seed: int = 0) -> np.ndarray:
    """Random integers, both ends included."""
    return np.random.default_rng(seed).integers(low, high + 1, shape)


def scales_like(weight: Tensor, groups: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Random scales [out, groups] that differ from one another."""
    generator = torch.Generator().manual_seed(7)
    return (0.01 + 0.05 * torch.rand(weight.shape[0], groups, generator=generator)).to(dtype)


def gptq(
    bits: int = 4, size: int = 32, form: str = "gptq", *, act_order: bool = False, symmetric: bool = False
) -> Pack:
    """As GPTQ stores it: everything transposed, zero points one too small in the first form."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        height, width = weight.shape
        groups = -(-width // size)
        values = draw(height, width, low=0, high=2**bits - 1)
        zeros = draw(height, groups, low=1, high=2**bits - 1, seed=1)
        if symmetric:
            zeros = np.full_like(zeros, 2 ** (bits - 1))
        order = np.arange(width) // size
        if act_order:
            order = np.random.default_rng(3).permutation(order)
        scales = scales_like(weight, groups)
        expected = (torch.from_numpy(values - zeros[:, order]).float() * scales.float()[:, order]).half()
        stored = {
            "qweight": words(values, bits).T.contiguous(),
            "qzeros": words((zeros - (form == "gptq")).T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": torch.from_numpy(order.astype(np.int32)),
        }
        return stored, expected

    return pack


def awq(size: int = 32) -> Pack:
    """As AWQ stores it: words of eight neighbouring outputs, first the even ones, then the odd ones."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        height, width = weight.shape
        groups = -(-width // size)
        values, zeros = draw(height, width, low=0, high=15), draw(height, groups, low=0, high=15, seed=1)
        order = np.arange(width) // size
        scales = scales_like(weight, groups)
        expected = (torch.from_numpy(values - zeros[:, order]).float() * scales.float()[:, order]).half()

        def interleaved(matrix: np.ndarray) -> Tensor:
            eights = matrix.T.reshape(matrix.shape[1], -1, 8)
            return words(np.concatenate((eights[..., 0::2], eights[..., 1::2]), axis=-1).reshape(matrix.shape[::-1]), 4)

        return {"qweight": interleaved(values), "qzeros": interleaved(zeros), "scales": scales.T.contiguous()}, expected

    return pack


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1(codes: np.ndarray) -> Tensor:
    """What 4-bit floats mean: a sign, two bits of exponent, one of significand."""
    return torch.tensor(np.where(codes > 7, -1.0, 1.0) * np.array(E2M1)[codes & 7], dtype=torch.float32)


def half_bytes(codes: np.ndarray) -> Tensor:
    """Two values a byte, the first in the low half."""
    return torch.from_numpy((codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8))


def blocks_of(
    weight: Tensor, rows: int, columns: int, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """(FP8, scales, meaning) of a weight in blocks, one block after the other."""
    height, width = weight.shape
    grid = torch.empty(-(-height // rows), -(-width // columns), dtype=scale_dtype)
    small, expected = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            here = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            grid[i, j] = (weight[here].abs().max() / 448 * (1 + i + 3 * j)).to(scale_dtype)
            small[here] = (weight[here] / grid[i, j].float()).to(torch.float8_e4m3fn)
            expected[here] = small[here].float() * grid[i, j].float()
    return small, grid, expected
