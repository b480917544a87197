"""SmolLM2-135M beside its own requantisations and beside Gemma 3 270M."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import glu_probe as gp
from glu_probe.sample_models import GEMMA3, SMOLLM2, fetch

from ..checkpoint.writers import write_gguf

pytestmark = pytest.mark.slow
CHOSEN = (0, 1)


@pytest.fixture(scope="module")
def tensors():
    """The first layers of the file, decoded."""
    source = gp.open_checkpoint(fetch(SMOLLM2)).source
    names = [name for name in source.infos() if name.startswith(tuple(f"blk.{layer}.ffn" for layer in CHOSEN))]
    return {name: source.read(name).float().numpy() for name in names}


def twin(directory, tensors, kind: str, name: str = "twin"):
    return write_gguf(directory / f"{name}.gguf", tensors, kind, d_model=576, d_mlp=1536, layers=len(CHOSEN))


def beside(base, other, **options):
    return gp.compare(base, other, layers=CHOSEN, align="layer", samples=64, **options)


@pytest.mark.parametrize(("kind", "degrees"), [("Q8_0", 0.31), ("Q5_0", 2.5), ("BF16", 0.0)])
def test_a_requantised_twin_moved_by_its_rounding(tensors, tmp_path, kind, degrees):
    result = beside(fetch(SMOLLM2), twin(tmp_path, tensors, kind))
    assert set(result.mlps["identity"]) == {"index"}
    for letter in "qkv":
        angle = result.mlps[f"angle_{letter}"]
        if degrees:  # what 4 bits have is more than bfloat16 can lose
            np.testing.assert_allclose(angle, result.mlps[f"rounding_angle_{letter}_model"], rtol=0.03)
            assert angle.between(0.9 * degrees, 1.1 * degrees).all()
        np.testing.assert_allclose(result.mlps[f"rounding_angle_{letter}_base"], 4.5, rtol=0.1)
    assert not result.neurons["beyond_rounding"].any()
    assert result.differences["beyond_rounding"].mean() < 0.03
    if degrees:
        assert "the rounding of twin alone explains" in result.findings[-1]


def test_rounding_of_both_files_adds_in_quadrature(tensors, tmp_path):
    """Two quantisations of one original, which is the decoded file. Q4_0 clips one end of its blocks, which no step says."""
    result = beside(twin(tmp_path, tensors, "Q5_0", "five"), twin(tmp_path, tensors, "Q4_0", "four"))
    for letter in "qkv":
        np.testing.assert_allclose(result.mlps[f"angle_{letter}"], result.mlps[f"rounding_angle_{letter}"], rtol=0.1)


def test_tuning_is_seen_through_rounding_where_it_is_larger(tensors, tmp_path):
    generator = np.random.default_rng(0)
    tuned = dict(tensors)
    name = "blk.1.ffn_gate.weight"
    tuned[name] = tensors[name].copy()
    tuned[name][100:110] += 0.3 * tensors[name].std() * generator.standard_normal((10, 576), dtype=np.float32)
    result = beside(twin(tmp_path, tensors, "Q8_0", "base"), twin(tmp_path, tuned, "Q8_0", "tuned"))
    top = result.moved(10)
    assert set(top["layer"]) == {1}
    assert sorted(top["neuron"]) == list(range(100, 110))
    assert top["beyond_rounding"].all()
    assert int(result.neurons["beyond_rounding"].sum()) == 10
    expected = np.degrees(
        np.arctan(0.3 * tensors[name].std() * np.sqrt(576) / np.linalg.norm(tensors[name][100:110], axis=1))
    )
    # the gains of the norm weigh inputs differently
    np.testing.assert_allclose(np.sort(top["angle_q"]), np.sort(expected), rtol=0.25)


def test_a_permuted_twin_of_a_real_layer(tensors, tmp_path):
    order = torch.randperm(1536, generator=torch.Generator().manual_seed(0)).numpy()
    mixed = {
        name: tensor[:, order] if "down" in name else tensor if "norm" in name else tensor[order]
        for name, tensor in tensors.items()
    }
    result = beside(fetch(SMOLLM2), twin(tmp_path, mixed, "F32"), rounding=False)
    assert set(result.mlps["identity"]) == {"permuted"}
    assert result.neurons["angle_q"].max() < 1e-3
    assert (result.neurons.loc[result.neurons["layer"] == 0, "counterpart"] == np.argsort(order)).all()


def test_gemma_beside_smollm2(tmp_path):
    for sample, name in ((SMOLLM2, "smollm2"), (GEMMA3, "gemma3")):
        gp.probe(fetch(sample), samples=32).save(tmp_path / name, figures=False)
    result = gp.compare(tmp_path / "smollm2", tmp_path / "gemma3")
    assert result.provenance["align"] == "depth"
    assert result.differences.groupby("measure")["depth_bin"].nunique().eq(18).all()
    scale = result.differences[result.differences["measure"] == "query_norm"]
    assert (scale["value"] > 2.5 * scale["base_value"]).all()
    assert scale["note"].eq("other activation (silu and gelu_tanh)").all()
    assert any("different activations" in note for note in result.provenance["notes"])
    assert "SmolLM2-135M-Instruct.Q4_1 stands at 58 % and gemma-3-270m-q4_k_m at 100 %" in " ".join(result.findings)
