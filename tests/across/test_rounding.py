"""What rounding explains: steps of stored types against errors that are really made, and twins that only rounding made."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

import glu_probe as gp
from glu_probe.across.rounding import StorageRounding, relative_errors, rounded_anew, rounding_steps

from ..support import llama_config, llama_tensors, write_checkpoint


def normal(rows: int = 100, columns: int = 512, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.03


def through_gguf(values: torch.Tensor, kind: str) -> torch.Tensor:
    packed = quantize(values.numpy(), GGMLQuantizationType[kind])
    return torch.from_numpy(dequantize(packed, GGMLQuantizationType[kind]).copy())


def in_groups(values: torch.Tensor, size: int, levels: int) -> torch.Tensor:
    """Rounded to a grid of that many steps from the smallest to the largest value of each group."""
    blocks = values.reshape(len(values), -1, size)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    step = (high - low) / levels
    return (((blocks - low) / step).round() * step + low).reshape(values.shape)


def by_row(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().amax(1, keepdim=True) / 127
    return (values / scale).round() * scale


def float8(values: torch.Tensor, dtype: torch.dtype, largest: float) -> torch.Tensor:
    scale = values.abs().amax(1, keepdim=True) / largest
    return (values / scale).to(dtype).float() * scale


NF4 = torch.tensor([
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105004, 0.0, 0.0795803, 0.1609302, 0.2461123,
    0.3379152, 0.4407098, 0.562617, 0.7229568, 1.0,
])  # fmt: skip


def nf4(values: torch.Tensor, size: int = 64) -> torch.Tensor:
    blocks = values.reshape(len(values), -1, size)
    largest = blocks.abs().amax(-1, keepdim=True)
    nearest = (blocks / largest)[..., None].sub(NF4).abs().argmin(-1)
    return (NF4[nearest] * largest).reshape(values.shape)


ROUNDED = [
    ("BF16", lambda w: w.bfloat16().float(), 0.02),
    ("F16", lambda w: w.half().float(), 0.02),
    ("F8_E4M3", lambda w: w.to(torch.float8_e4m3fn).float(), 0.03),
    ("F8_E4M3 x row scale", lambda w: float8(w, torch.float8_e4m3fn, 448), 0.05),
    ("F8_E5M2 x 128x128 scale", lambda w: float8(w, torch.float8_e5m2, 57344), 0.05),
    *((kind, lambda w, k=kind: through_gguf(w, k), 0.03) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")),
    ("bitsandbytes INT8", by_row, 0.02),
    ("I8 x row scale", by_row, 0.02),
    ("GPTQ INT4 x 1x128", lambda w: in_groups(w, 128, 15), 0.03),
    ("AWQ INT4 x 1x64", lambda w: in_groups(w, 64, 15), 0.04),
    ("bitsandbytes NF4", nf4, 0.05),
    # the quantiser's own search is in C; a grid of its form stands for it
    ("Q4_K", lambda w: in_groups(w, 32, 15), 0.06),
    ("Q5_K", lambda w: in_groups(w, 32, 31), 0.06),
    ("Q2_K", lambda w: in_groups(w, 16, 3), 0.12),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "rounded", "tolerance"), ROUNDED, ids=[one[0] for one in ROUNDED])
def test_the_error_that_is_expected_is_the_one_that_is_made(dtype, rounded, tolerance):
    original = normal()
    stored = rounded(original)
    made = (stored - original).norm().item()
    assert made > 0
    expected = rounding_steps(stored, dtype).norm().item() / math.sqrt(12)
    assert expected == pytest.approx(made, rel=tolerance)


def test_float_steps_are_units_in_the_last_place():
    values = torch.tensor([[1.0, 1.99, 2.0, -3.0, 0.0, 2.0**-20]])
    steps = rounding_steps(values, "F16")
    assert steps.tolist() == [[2.0**-10, 2.0**-10, 2.0**-9, 2.0**-9, 0.0, 2.0**-24]]  # the last is subnormal
    assert rounding_steps(values.double(), "F64")[0, 0] == 2.0**-52


def test_types_whose_grid_is_not_known_have_no_steps():
    assert rounding_steps(normal(), "MXFP4") is None
    assert rounding_steps(normal(), "IQ2_XS") is None
    assert rounding_steps(nf4(normal(), size=128), "bitsandbytes NF4") is None  # blocks of another size: another grid


def test_a_block_that_is_cut_short_and_constant_blocks():
    values = torch.full((2, 40), 0.5)
    values[:, :32] = through_gguf(normal(2, 32), "Q4_1")
    steps = rounding_steps(values, "Q4_1")
    assert (steps[:, 32:] == 0).all()
    assert (steps[:, :32] > 0).all()


@pytest.fixture
def halved(tmp_path):
    """A checkpoint in bfloat16 with the original in float32, gains of norms far from 1."""
    tensors = llama_tensors(layers=2, d_mlp=48, d_model=64)
    generator = torch.Generator().manual_seed(5)
    for name in tensors:
        if "post_attention" in name:
            tensors[name] = torch.exp(torch.randn(64, generator=generator))
    config = llama_config(num_hidden_layers=2, intermediate_size=48, hidden_size=64)
    exact = write_checkpoint(tmp_path / "exact", tensors, config)
    narrow = {name: t if "norm" in name else t.bfloat16() for name, t in tensors.items()}
    return gp.open_checkpoint(exact), gp.open_checkpoint(write_checkpoint(tmp_path / "narrow", narrow, config))


def test_errors_of_folded_factors_are_those_that_rounding_made(halved):
    exact, narrow = halved
    site = narrow.sites[1]
    layer, original = narrow.load(site), exact.load(exact.sites[1])
    storage = StorageRounding(narrow)
    assert not storage.exact
    assert StorageRounding(exact).exact
    errors = relative_errors(layer, storage.steps(site, layer))
    for role, expected in errors.items():
        made = (getattr(layer, role) - getattr(original, role)).norm(dim=1) / getattr(layer, role).norm(dim=1)
        assert np.mean(expected) == pytest.approx(made.mean().item(), rel=0.05), role
    assert storage.unknown == set()


def test_rounding_anew_moves_as_far_as_expected_and_keeps_the_rest(halved):
    _, narrow = halved
    site = narrow.sites[0]
    layer = narrow.load(site)
    steps = StorageRounding(narrow).steps(site, layer)
    noisy = rounded_anew(layer, steps, torch.Generator().manual_seed(0))
    for role, expected in relative_errors(layer, steps).items():
        made = (getattr(noisy, role) - getattr(layer, role)).norm(dim=1) / getattr(layer, role).norm(dim=1)
        assert np.mean(expected) == pytest.approx(made.mean().item(), rel=0.05), role
    assert (noisy.activation, noisy.layer) == (layer.activation, layer.layer)


def test_a_zero_row_has_no_relative_error():
    layer = gp.GatedLayer(torch.zeros(2, 4), torch.ones(2, 4), torch.ones(2, 4), "silu")
    steps = {"query": torch.zeros(2, 4), "key": None, "value": torch.full((2, 4), 0.12)}
    errors = relative_errors(layer, steps)
    assert np.isnan(errors["query"]).all()
    assert np.isnan(errors["key"]).all()
    np.testing.assert_allclose(errors["value"], 0.12 / math.sqrt(12), rtol=1e-6)
