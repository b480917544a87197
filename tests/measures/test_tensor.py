"""Tensor asymmetry, interaction matrices and neuron groups: layers as more than a list of neurons."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate

import glu_probe as gp
from glu_probe.errors import BadOption, ShapeMismatch, UnknownActivation
from glu_probe.measures.gaussian import bilinear_coefficient

from ..support import random_layer, shared_value_layer

measures = gp.measures


def dense_tensor(layer: gp.GatedLayer) -> torch.Tensor:
    """sum_j q_j (x) k_j (x) v_j written out."""
    return torch.einsum("ja,jb,jc->abc", layer.query, layer.key, layer.value)


# -- tensor asymmetry ----------------------------------------------------------------------------


@pytest.mark.parametrize("d_mlp", [1, 24, 700])
def test_tensor_asymmetry_is_its_definition(d_mlp):
    layer = random_layer(d_mlp=d_mlp)
    tensor = dense_tensor(layer)
    anti = (tensor - tensor.transpose(0, 1)) / 2
    expected = (anti.square().sum() / tensor.square().sum()).item()
    found, error, how = measures.tensor_asymmetry(layer, exact=True)
    assert found == pytest.approx(expected, rel=1e-10)
    assert (error, how) == (0.0, "exact")


def test_tensor_asymmetry_of_symmetric_and_antisymmetric_layers():
    half = random_layer(d_mlp=20)
    query, key, value = (
        torch.cat(pair) for pair in ((half.query, half.key), (half.key, half.query), (half.value,) * 2)
    )
    assert measures.tensor_asymmetry(gp.GatedLayer(query, key, value, "silu"))[0] == pytest.approx(0, abs=1e-12)
    value = torch.cat((half.value, -half.value))
    assert measures.tensor_asymmetry(gp.GatedLayer(query, key, value, "silu"))[0] == pytest.approx(1, abs=1e-12)


def test_tensor_asymmetry_of_one_neuron_is_that_of_its_matrix():
    """Of q k^T the antisymmetric part has (1 - cos^2) / 2 of the energy."""
    layer = random_layer(d_mlp=1)
    cosine = torch.nn.functional.cosine_similarity(layer.query, layer.key).item()
    assert measures.tensor_asymmetry(layer)[0] == pytest.approx((1 - cosine**2) / 2, rel=1e-10)


def test_sampled_tensor_asymmetry_agrees_within_its_error():
    layer = random_layer(d_mlp=60)
    layer = gp.GatedLayer(layer.query, layer.key + layer.query, layer.value, "silu")
    exact = measures.tensor_asymmetry(layer)[0]
    runs = [measures.tensor_asymmetry(layer, exact=False, samples=200, seed=seed)[:2] for seed in range(200)]
    values, errors = np.array(runs).T
    assert values.std() == pytest.approx(errors.mean(), rel=0.2)
    assert values.mean() == pytest.approx(exact, abs=4 * values.std() / math.sqrt(200) + values.std() ** 2)
    assert measures.tensor_asymmetry(layer, exact=False, samples=200)[2] == "200 random pairs"


def test_a_tensor_that_cancels_has_no_asymmetry():
    """Neurons that undo each other leave rounding, and a share of rounding means nothing."""
    half = random_layer(d_mlp=6)
    query, key = (torch.cat((f, f)) for f in (half.query, half.key))
    for noise in (0.0, 1e-9):
        value = torch.cat((half.value, -half.value + noise * half.query))
        layer = gp.GatedLayer(query, key, value, "silu")
        for exact in (True, False):
            assert all(math.isnan(found) for found in measures.tensor_asymmetry(layer, exact=exact)[:2])
    assert math.isnan(gp.measure_layer(layer).scalars["tensor_asymmetry"])
    value = torch.cat((half.value, -half.value + 0.1 * half.query))
    layer = gp.GatedLayer(query, key, value, "silu")
    tensor = dense_tensor(layer)
    anti = (tensor - tensor.transpose(0, 1)) / 2
    assert measures.tensor_asymmetry(layer)[0] == pytest.approx((anti.square().sum() / tensor.square().sum()).item())


def test_sampled_tensor_asymmetry_in_single_precision(monkeypatch):
    from glu_probe.measures import arithmetic, sampling

    monkeypatch.setattr(arithmetic, "native_bfloat16", lambda: False)  # for which there is test_sampling
    layer = random_layer(d_mlp=700)
    expected = measures.tensor_asymmetry(layer, exact=False, samples=50)
    monkeypatch.setattr(sampling, "_SINGLE", 0)
    assert measures.tensor_asymmetry(layer, exact=False, samples=50) == (
        pytest.approx(expected[0], rel=1e-4),
        pytest.approx(expected[1], rel=1e-3),
        expected[2],
    )


def test_tensor_asymmetry_chooses_by_cost_and_survives_extremes():
    layer = random_layer(d_mlp=40)
    expected = measures.tensor_asymmetry(layer)[0]
    extreme = gp.GatedLayer(layer.query * 1e150, layer.key * 1e-140, layer.value * 1e-150, "silu")
    assert measures.tensor_asymmetry(extreme)[0] == pytest.approx(expected, rel=1e-9)
    dead = torch.zeros(1, 16, dtype=torch.float64)
    padded = gp.GatedLayer(*(torch.cat((f, dead)) for f in (layer.query, layer.key, layer.value)), "silu")
    assert measures.tensor_asymmetry(padded)[0] == pytest.approx(expected, rel=1e-9)
    assert math.isnan(measures.tensor_asymmetry(gp.GatedLayer(dead, dead, dead, "silu"))[0])
    wide = random_layer(d_mlp=4000, d_model=300)
    assert "random pairs" in measures.tensor_asymmetry(wide)[2]
    with pytest.raises(BadOption, match="at least 2"):
        measures.tensor_asymmetry(layer, samples=1)


# -- bilinear coefficients -----------------------------------------------------------------------


def by_integration(function, scale, rho, mean_a=0.0, mean_b=0.0) -> float:
    """The least-squares coefficient of ab in S(a) b ~ linear * b + beta * ab, from its normal equations."""

    def expect(f):
        def over_a(u):
            a = mean_a + scale * u
            # b = mean_b + rho u + sqrt(1 - rho^2) w, key scale 1: its first two moments given a
            first = mean_b + rho * u
            second = first**2 + 1 - rho**2
            return f(a, second) * math.exp(-u * u / 2) / math.sqrt(2 * math.pi)

        points = [-mean_a / scale] if abs(mean_a / scale) < 9 else None
        return integrate.quad(over_a, -9, 9, points=points, epsabs=1e-12, limit=200)[0]

    def moment(power, with_gate=False):
        return expect(lambda a, second: a**power * second * (function(a) if with_gate else 1.0))

    system = np.array([[moment(0), moment(1)], [moment(1), moment(2)]])
    return float(np.linalg.solve(system, [moment(0, True), moment(1, True)])[1])


PLAIN = {
    "silu": lambda z: z / (1 + math.exp(-z)),
    "gelu": lambda z: z * 0.5 * math.erfc(-z / math.sqrt(2)),
    "relu": lambda z: max(z, 0.0),
    "relu2": lambda z: max(z, 0.0) ** 2,
    "sigmoid": lambda z: 1 / (1 + math.exp(-z)),
    "tanh": math.tanh,
    "linear": lambda z: z,
}


@pytest.mark.parametrize("name", sorted(PLAIN))
@pytest.mark.parametrize("place", [(0.2, 0.0), (1.0, 0.5), (4.0, -0.8), (1.0, 0.3, 0.7, -0.4)])
def test_bilinear_coefficient_against_least_squares(name, place):
    scale, rho, *means = place
    found = bilinear_coefficient(name, scale, 1.0, rho, *means)[0]
    assert found == pytest.approx(by_integration(PLAIN[name], scale, rho, *means), abs=1e-7)


def test_bilinear_coefficients_of_a_layer():
    layer = random_layer(biases=True)
    found = measures.bilinear_coefficients(layer)
    for neuron in (0, 7):
        q, k = layer.query[neuron], layer.key[neuron]
        size = k.norm().item()
        cosine = (q @ k).item() / q.norm().item() / size
        bias = layer.query_bias[neuron].item(), layer.key_bias[neuron].item() / size
        assert found[neuron].item() == pytest.approx(
            by_integration(PLAIN["silu"], q.norm().item(), cosine, *bias), abs=1e-7
        )
    torch.testing.assert_close(
        measures.bilinear_coefficients(random_layer(activation="relu")), torch.full((24,), 0.5).double()
    )
    c = torch.linspace(-2, 3, 24, dtype=torch.float64)
    torch.testing.assert_close(measures.bilinear_coefficients(layer.regauge(c)), found)


def test_bilinear_coefficients_of_odd_neurons():
    layer = random_layer(d_mlp=4)
    layer.query[1] = 0
    layer.key[2] = 0
    layer.query[3] = torch.nan
    found = measures.bilinear_coefficients(layer)
    assert found[0] > 0.4
    assert found[1:3].tolist() == [0, 0]
    assert found[3].isnan()


def test_coefficients_need_a_known_function():
    layer = random_layer()
    unscaled = gp.GatedLayer(layer.query, layer.key, layer.value, "silu", scale_note="no norm in front")
    with pytest.raises(UnknownActivation, match="no norm in front"):
        measures.bilinear_coefficients(unscaled)
    with pytest.raises(UnknownActivation):
        measures.interaction_matrix(gp.GatedLayer(layer.query, layer.key, layer.value, None), layer.value[0])
    assert measures.interaction_matrix(unscaled, layer.value[0], torch.ones(24)).shape == (16, 16)


# -- interaction matrices ------------------------------------------------------------------------


def test_a_bilinear_layers_output_along_a_direction_is_its_quadratic_form():
    layer = random_layer(activation="linear")
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    direction = layer.value[3] * 7
    matrix = measures.interaction_matrix(layer, direction)
    torch.testing.assert_close(matrix, matrix.T)
    form = torch.einsum("ni,ij,nj->n", x, matrix, x)
    torch.testing.assert_close(form, layer.forward(x) @ (direction / direction.norm()))


def test_interaction_matrix_of_a_gated_neuron_is_the_quadratic_part_of_its_output():
    """E[(F.u) x x^T] / 2 off the diagonal is the second Hermite part of any function of Gaussian x, found by sampling.

    With orthogonal branches no other term of that order mixes in, so that it must be beta sym(q k^T).
    """
    layer = random_layer(d_mlp=1, d_model=4, activation="silu", seed=2)
    key = layer.key - layer.query * (layer.key @ layer.query.T) / layer.query.square().sum()
    layer = gp.GatedLayer(layer.query, key, layer.value, "silu")
    x = torch.randn(400_000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    direction = layer.value[0] / layer.value[0].norm()
    along = layer.forward(x) @ direction
    products = along[:, None, None] * x[:, :, None] * x[:, None, :] / 2
    error = products.std(dim=0) / len(x) ** 0.5
    matrix = measures.interaction_matrix(layer, direction)
    assert ((products.mean(dim=0) - matrix).abs() < 5 * error).all()
    assert matrix.abs().max() > 20 * error.max()


def test_interaction_features_diagonalise():
    layer = random_layer()
    found = measures.interaction_features(layer, layer.value[0])
    matrix = measures.interaction_matrix(layer, layer.value[0])
    torch.testing.assert_close((found.features.T * found.eigenvalues) @ found.features, matrix)
    torch.testing.assert_close(found.features @ found.features.T, torch.eye(16, dtype=torch.float64))
    sizes = found.eigenvalues.abs()
    assert (sizes[:-1] >= sizes[1:]).all()
    p = (sizes / sizes.sum()).numpy()
    assert found.effective_rank == pytest.approx(math.exp(-(p * np.log(p)).sum()))
    l2 = found.eigenvalues.square()
    assert found.participation_ratio == pytest.approx((l2.sum() ** 2 / l2.square().sum()).item())
    assert found.top_share == pytest.approx((l2[0] / l2.sum()).item())
    assert found.direction.norm().item() == pytest.approx(1)


def test_a_single_neuron_has_two_features():
    """Eigenvalues |q||k| (cos +- 1) / 2 of sym(q k^T), times beta and u.v."""
    layer = random_layer(d_mlp=1, activation="linear")
    found = measures.interaction_features(layer, layer.value[0])
    size = (layer.query.norm() * layer.key.norm() * layer.value.norm()).item()
    cosine = torch.nn.functional.cosine_similarity(layer.query, layer.key).item()
    expected = sorted((size * (cosine + 1) / 2, size * (cosine - 1) / 2), key=abs, reverse=True)
    np.testing.assert_allclose(found.eigenvalues[:2], expected, rtol=1e-10)
    assert found.eigenvalues[2:].abs().max() < 1e-12


def test_interactions_do_not_depend_on_gauge_or_order():
    layer = random_layer()
    changed = layer.regauge(torch.linspace(-2, 3, 24, dtype=torch.float64))
    order = torch.arange(23, -1, -1)
    changed = gp.GatedLayer(changed.query[order], changed.key[order], changed.value[order], "silu")
    u = torch.arange(16.0)
    torch.testing.assert_close(measures.interaction_matrix(changed, u), measures.interaction_matrix(layer, u))
    torch.testing.assert_close(measures.output_directions(changed, 3)[1], measures.output_directions(layer, 3)[1])
    assert measures.neuron_groups(changed)["size"].tolist() == measures.neuron_groups(layer)["size"].tolist()


def test_output_directions_have_the_largest_forms():
    layer = random_layer(d_mlp=60)
    directions, energies = measures.output_directions(layer, 16)
    torch.testing.assert_close(directions @ directions.T, torch.eye(16, dtype=torch.float64))
    for direction, energy in zip(directions, energies, strict=True):
        form = measures.interaction_matrix(layer, direction)
        assert form.square().sum().item() == pytest.approx(energy.item(), rel=1e-8)
    assert (energies[:-1] >= energies[1:]).all()
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        other = torch.randn(16, generator=generator, dtype=torch.float64)
        assert measures.interaction_matrix(layer, other).square().sum() <= energies[0] * (1 + 1e-9)


def test_sampled_output_directions_span_the_same_plane():
    layer = shared_value_layer(groups=3, size=40)
    boosted = layer.value.clone()
    boosted[:40] *= 4
    boosted[40:80] *= 2
    layer = gp.GatedLayer(layer.query, layer.key, boosted, "linear")
    exact, energies = measures.output_directions(layer, 2)
    sampled, estimated = measures.output_directions(layer, 2, exact=False)
    assert torch.linalg.svdvals(exact @ sampled.T).min() > 0.99
    for direction, energy in zip(sampled, estimated, strict=True):  # of what was returned, not of what was aimed at
        assert measures.interaction_matrix(layer, direction).square().sum().item() == pytest.approx(energy.item())
    np.testing.assert_allclose(estimated, energies, rtol=0.05)


def test_interaction_arguments():
    layer = random_layer()
    with pytest.raises(ShapeMismatch, match=r"expected \[16\]"):
        measures.interaction_matrix(layer, torch.ones(15))
    with pytest.raises(BadOption, match="zero or not finite"):
        measures.interaction_features(layer, torch.zeros(16))
    with pytest.raises(ShapeMismatch, match=r"expected \[24\]"):
        measures.interaction_matrix(layer, torch.ones(16), torch.ones(3))
    with pytest.raises(BadOption, match="from 1 to 16"):
        measures.output_directions(layer, 17)
    layer.value[3] = torch.inf
    assert measures.interaction_matrix(layer, torch.ones(16)).isfinite().all()
    assert measures.interaction_matrix(layer, list(range(1, 17)), np.ones(24)).shape == (16, 16)
    silent = gp.GatedLayer(layer.query * 0, layer.key, layer.value, "relu")
    assert math.isnan(measures.interaction_features(silent, torch.ones(16)).effective_rank)


@pytest.mark.parametrize("size", [1e-50, 1e-30, 1e30, 1e50])
def test_interactions_of_extreme_layers(size):
    layer = random_layer(activation="linear")
    expected = measures.interaction_features(layer, layer.value[0])
    expected_directions, _ = measures.output_directions(layer, 3)
    extreme = gp.GatedLayer(*(f * size for f in (layer.query, layer.key, layer.value)), "linear")
    found = measures.interaction_features(extreme, layer.value[0])
    for name in ("effective_rank", "participation_ratio", "top_share"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9), name
    directions, _ = measures.output_directions(extreme, 3)
    torch.testing.assert_close((directions * expected_directions).sum(1).abs(), torch.ones(3, dtype=torch.float64))
    assert measures.neuron_groups(extreme)["size"].tolist() == measures.neuron_groups(layer)["size"].tolist()


# -- neuron groups -------------------------------------------------------------------------------


def test_groups_that_were_put_there_are_found():
    layer = shared_value_layer(groups=5, size=4)
    shuffled = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    layer = gp.GatedLayer(layer.query[shuffled], layer.key[shuffled], layer.value[shuffled], "linear")
    found = measures.neuron_groups(layer, threshold=0.9)
    assert found["size"].tolist() == [4] * 5
    together = {frozenset((shuffled[list(neurons)] // 4).tolist()) for neurons in found["neurons"]}
    assert together == {frozenset([group]) for group in range(5)}
    np.testing.assert_allclose(found["value_share"], 1)
    assert found["rank"].tolist() == [4] * 5
    assert sorted(n for group in found["neurons"] for n in group) == list(range(20))


@pytest.mark.parametrize("activation", ["linear", "silu"])
def test_ranks_of_a_group_from_its_dense_form(activation):
    layer = shared_value_layer(groups=2, size=5, activation=activation)
    row = measures.neuron_groups(layer).iloc[0]
    members = list(row["neurons"])
    beta = measures.bilinear_coefficients(layer)[members]
    signed = layer.value[members] @ layer.value[members[0]]  # they share one direction, up to sign
    form = torch.einsum("j,ja,jb->ab", signed * beta, layer.query[members], layer.key[members])
    for column, matrix in (("effective_rank", form), ("symmetric_effective_rank", (form + form.T) / 2)):
        p = torch.linalg.svdvals(matrix).numpy()
        p = p[p > 1e-12 * p[0]] / p.sum()
        assert row[column] == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-6)
    assert row["rank"] == torch.linalg.matrix_rank(form).item() == 5


def test_equal_neurons_are_a_group_of_rank_one():
    layer = random_layer(d_mlp=3)
    factors = [torch.cat((f, f[:1], f[:1])) for f in (layer.query, layer.key, layer.value)]
    row = measures.neuron_groups(gp.GatedLayer(*factors, "silu"), threshold=0.95).iloc[0]
    assert (row["neurons"], row["size"], row["rank"]) == ((0, 3, 4), 3, 1)
    assert row["effective_rank"] == pytest.approx(1, abs=1e-6)
    assert row["symmetric_effective_rank"] <= 2


def test_chained_neurons_are_one_group_and_value_share_says_so():
    angles = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    value = torch.zeros(3, 16, dtype=torch.float64)
    value[:, 0], value[:, 1] = angles.cos(), angles.sin()
    layer = random_layer(d_mlp=3)
    layer = gp.GatedLayer(*(f / f.norm(dim=1, keepdim=True) for f in (layer.query, layer.key)), value, "linear")
    row = measures.neuron_groups(layer, threshold=0.8).iloc[0]
    assert row["size"] == 3
    top = torch.linalg.eigvalsh(value.T @ value)[-1].item() / 3
    assert row["value_share"] == pytest.approx(top)


def test_no_group_is_an_empty_frame_and_unknown_functions_count_as_bilinear():
    layer = random_layer(d_mlp=4)
    none = measures.neuron_groups(layer, threshold=1.0)
    assert none.empty
    unknown = gp.GatedLayer(*(torch.cat((f, f[:1])) for f in (layer.query, layer.key, layer.value)), None)
    found = measures.neuron_groups(unknown, threshold=0.99)
    assert list(found) == list(none)
    assert found["neurons"].tolist() == [(0, 4)]
    nothing = gp.GatedLayer(layer.query * 0, layer.key, layer.value, "silu")
    assert measures.neuron_groups(nothing).empty
    for wrong, error in ((torch.ones(3), ShapeMismatch), (torch.ones(4, 1), ShapeMismatch), ("a", BadOption)):
        with pytest.raises(error):
            measures.neuron_groups(layer, coefficients=wrong)
    silent = measures.neuron_groups(shared_value_layer(groups=2, size=3), coefficients=np.zeros(6))
    assert silent["size"].tolist() == [3, 3]
    assert silent[["value_share", "rank", "effective_rank"]].isna().all(axis=None)
    with pytest.raises(BadOption, match="cosine"):
        measures.neuron_groups(layer, threshold=1.5)


def test_parallel_values_are_within_any_threshold_below_one_only():
    value = torch.ones(60, 16, dtype=torch.float64) * torch.linspace(0.1, 3, 60, dtype=torch.float64)[:, None]
    layer = random_layer(d_mlp=60)
    layer = gp.GatedLayer(layer.query, layer.key, value, "silu")
    assert measures.neuron_groups(layer, threshold=1).empty
    assert measures.neuron_groups(layer, threshold=0.999)["size"].tolist() == [60]


def test_large_groups_of_narrow_layers():
    """Far more neurons than dimensions: the cost is that of the narrow side, and blocks are joined across."""
    layer = random_layer(d_mlp=3000, d_model=4)
    row = measures.neuron_groups(layer, threshold=0.9).iloc[0]
    assert row["size"] == 3000
    assert row["rank"] <= 4
