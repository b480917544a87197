"""Tiny checkpoints that are written without the reader's tables, read back by them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

import glu_probe as gp
from glu_probe.checkpoint.families import FAMILIES
from glu_probe.errors import BadOption, LayoutUnknown
from glu_probe.testing import TrueMLP, tiny_families, write_tiny_checkpoint

EXPERTS = [name for name in tiny_families() if "moe" in name or name in ("mixtral", "deepseek_v3", "dots1")]


def assert_read(path, truth: list[TrueMLP], **options) -> gp.Checkpoint:
    """Assert that exactly these MLPs are read: raw, and with the norm in front."""
    raw = gp.open_checkpoint(path, fold_norm=False, **options)
    folded = gp.open_checkpoint(path, **options)
    assert len(raw.sites) == len(truth)
    for one, with_norm, mlp in zip(raw.layers(), folded.layers(), truth, strict=True):
        assert (one.layer, one.expert, one.tower) == (mlp.layer, mlp.expert, mlp.tower)
        assert tuple(one.sources[role] for role in ("gate", "up", "down")) == mlp.names
        for name in ("query", "key", "value", "query_bias", "key_bias", "output_bias"):
            found, expected = getattr(one, name), getattr(mlp, name)
            assert (found is None) == (expected is None), name
            assert found is None or torch.equal(found, expected), name
        assert not torch.equal(one.query, mlp.key)
        for name, factor in (("query", mlp.query), ("key", mlp.key)):
            assert torch.allclose(getattr(with_norm, name), behind_norm(factor, mlp), atol=1e-6)
    return folded


def behind_norm(factor: Tensor, mlp: TrueMLP) -> Tensor:
    if mlp.gain is None:
        return factor
    scaled = factor * mlp.gain
    return scaled - scaled.mean(1, keepdim=True) if mlp.centred else scaled


def test_every_family_of_the_table_can_be_written():
    assert set(tiny_families()) == {name for family in FAMILIES for name in family.names}


@pytest.mark.parametrize("family", tiny_families())
def test_every_family_is_read_as_it_was_written(family, tmp_path):
    assert_read(tmp_path, write_tiny_checkpoint(family, tmp_path, layers=3))


@pytest.mark.parametrize("family", tiny_families())
def test_the_norm_s_shift_becomes_a_constant(family, tmp_path):
    truth = write_tiny_checkpoint(family, tmp_path)
    for layer, mlp in zip(gp.open_checkpoint(tmp_path).layers(), truth, strict=True):
        expected = mlp.query_bias
        if mlp.shift is not None:
            expected = mlp.query @ mlp.shift + (0 if expected is None else expected)
        assert (layer.query_bias is None) == (expected is None)
        assert expected is None or torch.allclose(layer.query_bias, expected, atol=1e-6)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("storage", ["stacked", "stacked-transposed"])
def test_experts_stacked_either_way(family, storage, tmp_path):
    """By shape: the sizes differ."""
    if family in ("mixtral", "phimoe", "kimi_linear", "lfm2_moe"):
        pytest.skip("their separate names are for experts one by one")
    truth = write_tiny_checkpoint(family, tmp_path, storage=storage)
    checkpoint = assert_read(tmp_path, truth)
    layouts = set(checkpoint.describe().query("expert.notna() and expert != 'shared'")["layout"])
    assert all(("transposed" in layout) == (storage == "stacked-transposed") for layout in layouts)
    assert all("stacked" in layout for layout in layouts)


@pytest.mark.parametrize("order", ["gate-first", "up-first", "interleaved"])
@pytest.mark.parametrize("storage", ["stacked", "stacked-transposed", "one by one"])
def test_an_unknown_family_s_order_is_the_option_s(order, storage, tmp_path):
    truth = write_tiny_checkpoint("qwen3_moe", tmp_path, order=order, storage=storage)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "newcomer"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LayoutUnknown, match="--fused-layout"):
        gp.open_checkpoint(tmp_path)
    for layer, mlp in zip(gp.open_checkpoint(tmp_path, fused_layout=order).layers(), truth, strict=True):
        assert torch.equal(layer.query, mlp.query)
        assert torch.equal(layer.key, mlp.key)
        assert torch.equal(layer.value, mlp.value)


def test_a_prefix(tmp_path):
    truth = write_tiny_checkpoint("llama", tmp_path, prefix="language_model.model.layers")
    assert truth[0].names[0] == "language_model.model.layers.0.mlp.gate_proj.weight"
    assert_read(tmp_path, truth)


def test_the_seed_decides(tmp_path):
    first, again, other = (write_tiny_checkpoint("llama", tmp_path, seed=seed)[0].query for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("wrong", [{"family": "no"}, {"order": "no"}, {"storage": "no"}])
def test_what_cannot_be_written(wrong, tmp_path):
    with pytest.raises(BadOption, match="no"):
        write_tiny_checkpoint(wrong.pop("family", "llama"), tmp_path, **wrong)
