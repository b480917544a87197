"""Spectra of the three matrices and what gate and up share: exact, iterated and sampled."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import glu_probe as gp
from glu_probe.errors import BadOption
from glu_probe.layer_rows import Fold
from glu_probe.measures import arithmetic
from glu_probe.measures.gram import GramOperator
from glu_probe.measures.products import row_products
from glu_probe.measures.spectra import branch_spectra, effective_rank

from ..support import random_layer


def measured(layer: gp.GatedLayer, usable: np.ndarray | None = None, *, exact: bool | None = None, seed: int = 0):
    usable = np.ones(layer.d_mlp, dtype=bool) if usable is None else usable
    return branch_spectra(layer, row_products(layer), usable, np.random.default_rng(seed), exact=exact)[0]


def by_svd(layer: gp.GatedLayer) -> dict[str, float]:
    """Every column from singular values, as the definitions read."""
    out, units = {}, {}
    for name, matrix in (("gate", layer.query), ("up", layer.key), ("down", layer.value)):
        units[name] = matrix / matrix.norm(dim=1, keepdim=True)
        out[f"{name}_frobenius"] = matrix.norm().item()
        for suffix, version in (("", matrix), ("_unit", units[name])):
            p = torch.linalg.svdvals(version).numpy()
            share = p / p.sum()
            out[f"{name}_spectral_norm{suffix}"] = p[0]
            out[f"{name}_stable_rank{suffix}"] = (p**2).sum() / p[0] ** 2
            out[f"{name}_participation_ratio{suffix}"] = (p**2).sum() ** 2 / (p**4).sum()
            out[f"{name}_effective_rank{suffix}"] = math.exp(-(share * np.log(share)).sum())
    gate, up = (units[name].T @ units[name] for name in ("gate", "up"))
    out["branch_overlap"] = ((gate * up).sum() / gate.norm() / up.norm()).item()
    return out


@pytest.mark.parametrize("d_mlp", [100, 16, 7])
def test_small_layers_are_exact(d_mlp):
    layer = random_layer(d_mlp=d_mlp)
    found = measured(layer)
    for column, value in by_svd(layer).items():
        assert found[column] == pytest.approx(value, rel=1e-9), column
    assert found["spectral_residual"] == found["spectral_sampling_error"] == 0


def test_flat_and_one_dimensional_spectra():
    """Orthonormal rows fill every count; parallel ones leave 1."""
    eye, row = torch.eye(6, dtype=torch.float64), torch.ones(6, 6, dtype=torch.float64)
    found = measured(gp.GatedLayer(eye, row, row * 0, "silu"))
    for count in ("stable_rank", "participation_ratio", "effective_rank"):
        assert found[f"gate_{count}"] == pytest.approx(6)
        assert found[f"up_{count}_unit"] == pytest.approx(1)
        assert math.isnan(found[f"down_{count}"])
    assert found["branch_overlap"] == pytest.approx(1 / math.sqrt(6))
    assert found["down_frobenius"] == 0


def test_effective_rank_of_known_values():
    assert effective_rank(np.array([1.0, 1.0, 0.0])) == pytest.approx(2)
    assert effective_rank(np.array([3e300, 1e300])) == pytest.approx(
        math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    )
    assert math.isnan(effective_rank(np.zeros(3)))
    assert effective_rank([2, 2]) == 2
    for wrong in ([1, np.inf], [-1, 2], [1j], ["a"], [np.nan]):
        with pytest.raises(BadOption, match="at least 0"):
            effective_rank(wrong)


def test_overlap_of_equal_and_of_disjoint_branches():
    layer = random_layer(d_mlp=40)
    signs = torch.where(torch.arange(40) % 2 == 0, 1.0, -1.0).double()[:, None]
    same = gp.GatedLayer(layer.query, layer.query * signs * 3, layer.value, "silu")
    assert measured(same)["branch_overlap"] == pytest.approx(1, abs=1e-12)
    left, right = layer.query.clone(), layer.key.clone()
    left[:, 8:] = 0
    right[:, :8] = 0
    assert measured(gp.GatedLayer(left, right, layer.value, "silu"))["branch_overlap"] == 0


def test_overlap_null_is_the_mean_over_rotations():
    layer = random_layer(d_mlp=40, d_model=8)
    decay = torch.linspace(0, 2, 8, dtype=torch.float64).exp().reciprocal()
    layer = gp.GatedLayer(layer.query * decay, layer.key * decay, layer.value, "silu")
    rng = np.random.default_rng(1)
    rotated = []
    for _ in range(300):
        basis = torch.linalg.qr(torch.from_numpy(rng.standard_normal((8, 8))))[0]
        rotated.append(measured(gp.GatedLayer(layer.query, layer.key @ basis, layer.value, "silu"))["branch_overlap"])
    error = np.std(rotated) / math.sqrt(len(rotated))
    assert measured(layer)["branch_overlap_null"] == pytest.approx(np.mean(rotated), abs=4 * error)


def decaying(d_mlp: int = 900, d_model: int = 300) -> gp.GatedLayer:
    """A spectrum that decays, as trained matrices' do."""
    layer = random_layer(d_mlp=d_mlp, d_model=d_model)
    decay = torch.linspace(0, 3, d_model, dtype=torch.float64).exp().reciprocal()
    return gp.GatedLayer(layer.query * decay, layer.key * decay, layer.value * decay, layer.activation)


def test_iteration_approaches_the_exact_norm_from_below():
    layer = decaying()
    exact, found = measured(layer), measured(layer, exact=False)
    for column, value in exact.items():
        if "spectral_norm" in column:
            assert value * (1 - 2e-2) <= found[column] <= value * (1 + 1e-9), column
        if "effective_rank" in column:
            assert math.isnan(found[column])
            assert value > 1
    assert 0 < found["spectral_residual"] < 0.1


def test_sampled_figures_agree_within_their_error():
    """Over many seeds: right in the mean, and as far off as the stated error says."""
    layer = decaying(d_mlp=300, d_model=100)
    exact = measured(layer)
    runs = [measured(layer, exact=False, seed=seed) for seed in range(60)]
    for column in (
        "gate_participation_ratio",
        "up_participation_ratio_unit",
        "down_participation_ratio",
        "branch_overlap",
    ):
        off = np.array([run[column] / exact[column] - 1 for run in runs])
        stated = np.mean([run["spectral_sampling_error"] for run in runs])
        assert abs(off.mean()) < 4 * off.std() / math.sqrt(len(runs)) + stated**2, column
        assert off.std() < 1.3 * stated, column
        assert off.std() > 1e-4, column


@pytest.mark.parametrize("rows", [1, 511, 512, 1300])
def test_gram_operator_is_its_definition(rows):
    generator = torch.Generator().manual_seed(rows)
    matrix = torch.randn(rows, 20, generator=generator, dtype=torch.float64)
    square = matrix.square().sum(1)
    operator = GramOperator(matrix.__getitem__, 20, square)
    raw, unit = torch.randn(2, 20, 3, generator=generator, dtype=torch.float64)
    found_raw, found_unit = operator(raw, unit[:, :2])
    normed = matrix / square.sqrt()[:, None]
    torch.testing.assert_close(found_raw * operator.scale, matrix.T @ (matrix @ raw))
    torch.testing.assert_close(found_unit, normed.T @ (normed @ unit[:, :2]))


def folded(centred: bool, rows: int, offset: float = 0.0) -> tuple[torch.Tensor, Fold, torch.Tensor]:
    """A stored matrix, what is done to it, and the factor that comes of it."""
    generator = torch.Generator().manual_seed(rows)
    stored = torch.randn(rows, 20, generator=generator, dtype=torch.float64) + offset
    gain = torch.randn(20, generator=generator).exp()
    factor = stored * gain
    return stored, Fold(gain, centred), factor - factor.mean(1, keepdim=True) if centred else factor


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize("coarse", [False, True])
def test_gram_operator_of_a_folded_matrix(centred, count, coarse, monkeypatch):
    """Few vectors and many, against the matrix itself; rounded to bfloat16 only where there are many."""
    monkeypatch.setattr(arithmetic, "native_bfloat16", lambda: coarse)
    stored, fold, factor = folded(centred, 700)
    square = factor.square().sum(1)
    square[5:9], stored[5:9], factor[5:9] = 0, torch.nan, 0
    operator = GramOperator(stored.float().__getitem__, 20, square, fold)
    raw, unit = torch.randn(2, 20, count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    normed = factor * torch.where(square > 0, square.rsqrt(), 0.0)[:, None]
    tolerance = 1e-2 if coarse and not centred and 2 * count >= 8 else 1e-5
    for found, matrix, vectors in zip(
        operator(raw, unit), (factor / operator.scale**0.5, normed), (raw, unit), strict=True
    ):
        expected = matrix.T @ (matrix @ vectors)
        assert (found - expected).norm() < tolerance * expected.norm()


def test_centred_rows_that_are_nearly_constant(monkeypatch):
    """What a LayerNorm takes away is a thousand times what is left: a vector's rounding must not bring it back."""
    monkeypatch.setattr(arithmetic, "native_bfloat16", lambda: True)
    stored, _, _ = folded(True, 600, offset=1000.0)
    factor = stored - stored.mean(1, keepdim=True)
    square = factor.square().sum(1)
    operator = GramOperator(stored.float().__getitem__, 20, square, Fold(None, True))
    vectors = torch.randn(20, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, _ = operator(vectors, vectors[:, :0])
    expected = factor.T @ (factor @ vectors)
    assert (found * operator.scale - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("shared", [0.0, 3.0, 30.0])
def test_stated_errors_are_honest(coarse, shared, monkeypatch):
    """Over many seeds, of layers whose branches share a direction more and more: unbiased, and off by what is stated."""
    monkeypatch.setattr(arithmetic, "native_bfloat16", lambda: coarse)
    layer = decaying(d_mlp=300, d_model=100)
    generator = torch.Generator().manual_seed(3)
    direction = torch.nn.functional.normalize(torch.randn(1, 100, generator=generator, dtype=torch.float64))
    query, key = (
        part + shared * part.norm(dim=1).mean() * torch.randn(300, 1, generator=generator).double() @ direction
        for part in (layer.query, layer.key)
    )
    layer = gp.GatedLayer(query.float(), key.float(), layer.value.float(), "silu")
    exact = measured(layer)
    runs = [measured(layer, exact=False, seed=seed) for seed in range(80)]
    for column in ("branch_overlap", "down_participation_ratio"):
        off = np.array([run[column] - exact[column] for run in runs])
        if column == "branch_overlap":
            stated = np.mean([run["branch_overlap_se"] for run in runs])
        else:
            stated = exact[column] * np.mean([run["spectral_sampling_error"] for run in runs])
        if shared < 30:  # there it is cut at 1
            assert abs(off.mean()) < 4 * off.std() / math.sqrt(len(runs)) + stated**2 / exact[column], column
        # at 30 what is uncertain, some 1e-6, is as much in the norms that the overlap is divided by
        assert off.std() < (1.3 if shared < 30 else 2) * stated, column
        assert off.std() > 0.2 * stated, column


def test_unusable_rows_are_left_out():
    layer = random_layer(d_mlp=60)
    smaller = gp.GatedLayer(layer.query[5:], layer.key[5:], layer.value[5:], layer.activation)
    layer.query[:5] = torch.nan
    usable = np.arange(60) >= 5
    for exact in (True, False):
        found, expected = measured(layer, usable, exact=exact), measured(smaller, exact=exact)
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_tiny_and_extreme_matrices():
    row = torch.full((5, 4), 2e19, dtype=torch.float32)
    layer = gp.GatedLayer(row, row * 1e-38, torch.zeros_like(row), gp.activation("silu"))
    for exact in (True, False):
        found = measured(layer, exact=exact)
        assert found["gate_spectral_norm"] == pytest.approx(2e19 * math.sqrt(20), rel=1e-6)
        assert found["up_spectral_norm"] == pytest.approx(2e-19 * math.sqrt(20), rel=1e-6)
        for count in ("stable_rank", "participation_ratio"):
            assert found[f"gate_{count}"] == pytest.approx(1, rel=1e-6)
        assert math.isnan(found["down_spectral_norm"])
        assert found["down_frobenius"] == 0
        assert found["branch_overlap"] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1.0, 1e20, 1e30])
def test_one_row_of_another_size(scale):
    """A nearly dead neuron, or a huge one, in a layer too wide for the exact way."""
    layer = random_layer(d_mlp=600, d_model=60)
    layer = gp.GatedLayer(layer.query.float(), layer.key.float(), layer.value.float(), "silu")
    for factor in (layer.query, layer.key, layer.value):
        factor[7] *= scale
    exact, found = measured(layer), measured(layer, exact=False)
    for column, value in exact.items():
        if column.endswith(("norm", "norm_unit", "stable_rank", "stable_rank_unit")):
            assert found[column] == pytest.approx(value, rel=0.03), column
            assert found[column] >= 1 or "rank" not in column
        if "participation" in column or column in ("branch_overlap", "branch_overlap_null"):
            error = max(found["spectral_sampling_error"], found["branch_overlap_se"] / exact["branch_overlap"])
            assert found[column] == pytest.approx(value, rel=max(5 * error, 1e-6)), column


def test_nothing_is_left():
    layer = random_layer(d_mlp=5)
    for exact in (True, False):
        found = measured(layer, np.zeros(5, dtype=bool), exact=exact)
        assert all(math.isnan(value) for value in found.values())


@pytest.mark.parametrize("d_mlp", [8, 40, 600])
def test_sampled_figures_stay_in_range(d_mlp):
    """Also where the Krylov space is the whole space, and where every direction counts the same."""
    flat = torch.linalg.qr(torch.randn(d_mlp, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    layer = gp.GatedLayer(flat, flat.flip(1), random_layer(d_mlp=d_mlp, d_model=8).value, "silu")
    for seed in range(30):
        found = measured(layer, exact=False, seed=seed)
        for column, value in found.items():
            if "participation" in column or "stable_rank" in column:
                assert 1 <= value <= 8, column
            if "overlap" in column:
                assert 0 <= value <= 1, column


def test_a_small_space_is_known_whole():
    layer = random_layer(d_mlp=40, d_model=6)
    exact, found = measured(layer), measured(layer, exact=False)
    for column, value in exact.items():
        if "effective" not in column:
            assert found[column] == pytest.approx(value, rel=1e-6, abs=1e-9), column


def test_iterated_figures_of_unit_rows_do_not_depend_on_the_gauge():
    """Each version of a matrix stops iterating for itself."""
    layer = random_layer(d_mlp=600, d_model=48)
    c = torch.exp(torch.randn(600, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3)
    before, after = measured(layer, exact=False), measured(layer.regauge(c), exact=False)
    for column in before:
        if column.startswith("gate") or column.endswith("_unit") or "overlap" in column:
            assert after[column] == pytest.approx(before[column], rel=1e-9, nan_ok=True), column


def test_rank_of_a_matrix_of_rank_one_is_one():
    for shape in ((600, 256), (64, 64), (20, 60)):
        generator = torch.Generator().manual_seed(0)
        rank_one = torch.outer(*(torch.randn(size, generator=generator, dtype=torch.float64) for size in shape))
        found = measured(gp.GatedLayer(rank_one, rank_one, rank_one, "silu"))
        assert found["gate_effective_rank"] == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("size", [1e-155, 10**153.5])
def test_rows_at_the_edge_of_float64(size):
    layer = random_layer(d_mlp=60)
    layer = gp.GatedLayer(layer.query / layer.query.norm() * size, layer.key, layer.value, "relu")
    scalars = gp.measure_layer(layer).scalars
    if size > 1:
        assert scalars["gate_frobenius"] == pytest.approx(size)
        assert scalars["gate_stable_rank"] == pytest.approx(measured(random_layer(d_mlp=60))["gate_stable_rank"])


# -- principal angles ----------------------------------------------------------------------------


def test_principal_angles_of_known_subspaces():
    """Two planes that share one direction and stand at a right angle otherwise; then one tilted by a known angle."""
    eye = torch.eye(5, dtype=torch.float64)

    def reading(*rows):
        return torch.stack(rows * 3) + 0.0

    other = random_layer(d_mlp=6, d_model=5).value
    layer = gp.GatedLayer(reading(eye[0], eye[1]), reading(eye[0], eye[2]), other, "silu")
    np.testing.assert_allclose(gp.measures.principal_angles(layer, 2), [0, math.pi / 2], atol=1e-7)
    for angle in (1e-6, 0.3, 1.2):
        tilted = math.cos(angle) * eye[1] + math.sin(angle) * eye[3]
        layer = gp.GatedLayer(reading(eye[0], eye[1]), reading(eye[0], tilted), other, "silu")
        np.testing.assert_allclose(gp.measures.principal_angles(layer, 2), [0, angle], atol=1e-7)


def test_principal_angles_against_scipy_and_gauge():
    from scipy.linalg import subspace_angles

    layer = random_layer(d_mlp=50)
    tops = []
    for matrix in (layer.query, layer.key):
        unit = (matrix / matrix.norm(dim=1, keepdim=True)).numpy()
        tops.append(np.linalg.svd(unit)[2][:4].T)
    expected = np.sort(subspace_angles(*tops))
    np.testing.assert_allclose(gp.measures.principal_angles(layer, 4), expected, atol=1e-9)
    c = torch.linspace(-2, 3, 50, dtype=torch.float64)
    np.testing.assert_allclose(gp.measures.principal_angles(layer.regauge(c), 4), expected, atol=1e-9)


def test_principal_angles_beyond_the_rank_are_refused():
    generator = torch.Generator().manual_seed(0)

    def low(rows):
        return (torch.randn(rows, 2, generator=generator) @ torch.randn(2, 10, generator=generator)).double()

    layer = gp.GatedLayer(low(20), low(20), low(20), "silu")
    assert len(gp.measures.principal_angles(layer, 2)) == 2
    with pytest.raises(BadOption, match="the gate matrix has 2 directions"):
        gp.measures.principal_angles(layer, 5)
    with pytest.raises(BadOption, match="has 0 directions"):
        gp.measures.principal_angles(gp.GatedLayer(*(f * 0 for f in (layer.query, layer.key, layer.value)), "silu"), 1)
    tracked = gp.GatedLayer(layer.query.requires_grad_(), layer.key, layer.value, "silu")
    assert len(gp.measures.principal_angles(tracked, 1)) == 1


@pytest.mark.parametrize("rank", [0, 17, 1.5, None, True])
def test_principal_angles_refuse_other_ranks(rank):
    with pytest.raises(BadOption, match="from 1 to 16"):
        gp.measures.principal_angles(random_layer(d_mlp=50), rank)
