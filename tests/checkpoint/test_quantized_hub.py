"""Packed weights in repositories on the hub: looking at them fetches headers, and what describes a weight."""

from __future__ import annotations

import pytest
import torch

import glu_probe as gp
from glu_probe.checkpoint.quantized import libraries

from .packing import assert_factors, packed_model
from .test_quantized import FP8, fp8
from .test_quantized_libraries import BNB, four_bits

SIZES = {"d_model": 256, "d_mlp": 512}


@pytest.fixture
def repository(hub, tmp_path):
    """Puts a packed model on the hub; gives the path it was made at and what its weights mean."""

    def put(pack, quantization):
        model, expected = packed_model(tmp_path / "local", pack, quantization, **SIZES)
        hub.add("org/name", model)
        return model, expected

    return put


def facts(ref):
    return gp.open_checkpoint(ref, fold_norm=False).describe().drop(columns="model")


def test_scales_are_not_fetched_to_look(hub, repository):
    model, expected = repository(fp8(128, 128), FP8)
    assert facts("org/name").equals(facts(model))
    assert hub.sent_of("model.safetensors") <= 100_000 < (model / "model.safetensors").stat().st_size
    assert_factors("org/name", expected, **SIZES)


def test_shapes_that_only_data_tells_are_fetched_alone(hub, repository):
    """bitsandbytes keeps a weight as a column of bytes, and its shape in a tensor beside it."""
    model, expected = repository(four_bits(libraries.bitsandbytes("a test"), quant_type="nf4"), BNB)
    assert facts("org/name").equals(facts(model))
    assert 100_000 < hub.sent_of("model.safetensors") <= 101_000
    assert not any(path.is_symlink() for path in (model.parent / "hf").rglob("model.safetensors"))
    assert_factors("org/name", expected, **SIZES)
    assert not any(path.is_symlink() for path in (model.parent / "hf").rglob("model.safetensors"))


def test_a_downloaded_one_is_read_from_the_cache(hub, repository):
    """Looking downloads nothing; the first tensor does, once for all."""
    _, expected = repository(four_bits(libraries.bitsandbytes("a test"), quant_type="nf4"), BNB)
    checkpoint = gp.open_checkpoint("org/name", fold_norm=False, download=True)
    assert 100_000 < hub.sent_of("model.safetensors") <= 101_000
    assert torch.equal(checkpoint.layer(0).key, expected["up_proj"].float())
    hub.forget()
    assert torch.equal(gp.open_checkpoint("org/name", fold_norm=False).layer(0).key, expected["up_proj"].float())
    assert hub.sent_of("model.safetensors") == 0
