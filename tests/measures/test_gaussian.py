"""The Gaussian measures: reference values, closed forms, independent quadrature, limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate

import glu_probe as gp
from glu_probe.activations import ACTIVATIONS
from glu_probe.errors import BadOption, UnknownActivation
from glu_probe.measures.gaussian import GAUSSIAN_MEASURES, gaussian_quadrature, gaussian_table

# Published reference values: exchange, scaling, linear, bilinear.
REFERENCE = [
    ("silu", 1.0, 0.0, (0.148655, 0.009180, 0.119998, 0.702690)),
    ("silu", 3.0, 0.3, (0.075762, 0.000820, 0.260825, 0.524432)),
    ("gelu", 0.5, 0.7, (0.005925, 0.010055, 0.156782, 0.688355)),
    ("relu", 1.0, 0.0, (0.25, 0.0, 1 / math.pi, 0.5)),
    ("linear", 1.0, 0.4, (0.0, 0.0, 0.0, 1.0)),
]


@pytest.mark.parametrize(("name", "scale", "rho", "expected"), REFERENCE)
def test_reference_values(name, scale, rho, expected):
    row = gp.gaussian_measures(name, scale, rho).iloc[0]
    found = row[["exchange_asymmetry", "scaling_asymmetry", "linear_share", "bilinear_share"]].to_numpy(dtype=float)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert row["linear_share"] + row["bilinear_share"] + row["residual_share"] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_relu_closed_form(scale):
    rho = np.concatenate([np.linspace(0, 1, 101), 1 - np.geomspace(1e-10, 1e-2, 20)])
    t = np.arccos(rho)
    j = 3 * np.sin(t) * np.cos(t) + (math.pi - t) * (1 + 2 * np.cos(t) ** 2)
    expected = (1 - j / (math.pi * (1 + 2 * rho**2))) / 2
    found = gp.gaussian_measures("relu", scale, rho)
    np.testing.assert_allclose(found["exchange_asymmetry"], expected, atol=1e-6)
    assert (found["scaling_asymmetry"] == 0).all()


def by_scipy(function, scale: float, rho: float) -> dict[str, float]:
    """The measures by adaptive quadrature over (a, b) = scale (u, rho u + sqrt(1 - rho^2) w), straight from the definition."""
    orthogonal = math.sqrt(1 - rho**2)

    def expect(integrand):
        def over_w(u):
            kink = -rho * u / orthogonal if orthogonal > 0 else 0.0
            density = math.exp(-u * u / 2) / math.sqrt(2 * math.pi)
            inner = integrate.quad(
                lambda w: (
                    integrand(scale * u, scale * (rho * u + orthogonal * w))
                    * math.exp(-w * w / 2)
                    / math.sqrt(2 * math.pi)
                ),
                -9,
                9,
                points=sorted(p for p in (kink - 4 / scale, kink, kink + 4 / scale) if abs(p) < 9),
                epsabs=1e-11 * max(1.0, scale**4),
                limit=200,
            )[0]
            return density * inner

        points = [p for p in (-4 / scale, 0.0, 4 / scale) if abs(p) < 9]
        return integrate.quad(over_w, -9, 9, points=points, epsabs=1e-10 * max(1.0, scale**4), limit=200)[0]

    def g(a, b):
        return function(a) * b

    gg = expect(lambda a, b: g(a, b) ** 2)
    swapped = expect(lambda a, b: (g(a, b) - g(b, a)) ** 2)
    rescaled = expect(lambda a, b: (g(a, b) - function(2 * a) * b / 2) ** 2)
    rescaled_energy = expect(lambda a, b: (function(2 * a) * b / 2) ** 2)
    linear = expect(lambda a, b: g(a, b) * b) ** 2 / scale**2 / gg
    bilinear = expect(lambda a, b: g(a, b) * a * b) ** 2 / (scale**4 * (1 + 2 * rho**2)) / gg
    return {
        "exchange_asymmetry": swapped / (4 * gg),
        "scaling_asymmetry": rescaled / (2 * (gg + rescaled_energy)),
        "linear_share": linear,
        "bilinear_share": bilinear,
        "residual_share": 1 - linear - bilinear,
    }


PLAIN = {
    "silu": lambda z: z / (1 + math.exp(-z)) if z > -700 else 0.0,
    "gelu": lambda z: z * 0.5 * math.erfc(-z / math.sqrt(2)),
    "gelu_tanh": lambda z: 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "relu2": lambda z: max(z, 0.0) ** 2,
    "sigmoid": lambda z: 1 / (1 + math.exp(-z)) if z > -700 else 0.0,
    "tanh": math.tanh,
}


@pytest.mark.parametrize("name", sorted(PLAIN))
@pytest.mark.parametrize(("scale", "rho"), [(0.3, 0.0), (1.3, 0.45), (6.0, 0.8)])
def test_table_against_scipy(name, scale, rho):
    found = gp.gaussian_measures(name, scale, rho).iloc[0]
    for measure, value in by_scipy(PLAIN[name], scale, rho).items():
        assert found[measure] == pytest.approx(value, abs=1e-6), measure


def by_panels(names, scale: float, rho: float) -> dict[str, dict[str, float]]:
    """The measures of several activations on a grid over (a, b): Gauss-Legendre panels that double away from both kinks."""
    points, weights = np.polynomial.legendre.leggauss(12)
    edges = np.concatenate(([0.0], np.geomspace(1e-3, 9.0 * scale, 24))) if scale > 1 else np.linspace(0, 9 * scale, 25)
    middle, half = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
    side = (middle[:, None] + half[:, None] * points).ravel()
    side_weights = (half[:, None] * weights).ravel()
    z, w = np.concatenate((-side[::-1], side)), np.concatenate((side_weights[::-1], side_weights))
    a, b = z[:, None], z[None, :]
    spread = scale**2 * (1 - rho**2)
    density = np.exp(-(a * a - 2 * rho * a * b + b * b) / (2 * spread)) / (2 * math.pi * scale * math.sqrt(spread))
    weight = density * w[:, None] * w[None, :]
    out = {}
    for name in names:
        act = gp.activation(name)
        s, s2 = (act(torch.from_numpy(factor * z)).numpy() for factor in (1.0, 2.0))
        g, swapped, rescaled = s[:, None] * b, a * s[None, :], s2[:, None] * b / 2
        gg, ss, rr, bb = ((f * f * weight).sum() for f in (g, swapped, rescaled, b + 0 * a))
        product = a * b  # uncorrelated with b: a third moment
        out[name] = {
            "exchange_asymmetry": ((g - swapped) ** 2 * weight).sum() / 2 / (gg + ss),
            "scaling_asymmetry": ((g - rescaled) ** 2 * weight).sum() / 2 / (gg + rr),
            "linear_share": (g * b * weight).sum() ** 2 / bb / gg,
            "bilinear_share": (g * product * weight).sum() ** 2 / (product**2 * weight).sum() / gg,
        }
        out[name]["residual_share"] = 1 - out[name]["linear_share"] - out[name]["bilinear_share"]
    return out


@pytest.mark.parametrize("rho", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("scale", [1e-3, 0.03, 0.5, 4.0, 50.0, 1e3])
def test_every_activation_against_an_independent_grid(scale, rho):
    for name, expected in by_panels(ACTIVATIONS, scale, rho).items():
        found = gp.gaussian_measures(name, scale, rho).iloc[0]
        for measure, value in expected.items():
            assert found[measure] == pytest.approx(value, abs=1e-5), (name, measure)


def test_closed_forms_at_the_ends_of_bounded_and_squared_gates():
    """A gate that is constant, a step, a sign; and a degree that scaling sees whatever the directions are."""
    rho = np.linspace(0, 0.99, 12)
    t = np.arccos(rho)
    small, large = (gp.gaussian_measures("sigmoid", scale, rho) for scale in (0.0, np.inf))
    np.testing.assert_allclose(small["exchange_asymmetry"], (1 - rho) / 2, atol=1e-6)
    np.testing.assert_allclose(small["scaling_asymmetry"], 0.1, atol=1e-9)
    np.testing.assert_allclose(small["linear_share"], 1, atol=1e-9)
    quadrant = (np.sin(t) + (math.pi - t) * rho) / math.pi  # E[ab; a, b > 0] over E[b^2; a > 0]
    np.testing.assert_allclose(large["exchange_asymmetry"], (1 - quadrant) / 2, atol=1e-5)
    absolute = 2 / math.pi * (np.sqrt(1 - rho**2) + rho * np.arcsin(rho))  # E|ab|
    sign = gp.gaussian_measures("tanh", np.inf, rho)
    np.testing.assert_allclose(sign["exchange_asymmetry"], (1 - absolute) / 2, atol=1e-5)
    tanh = gp.gaussian_measures("tanh", 0.0, rho)
    np.testing.assert_allclose(tanh["bilinear_share"], 1, atol=1e-9)
    np.testing.assert_allclose(tanh["exchange_asymmetry"], 0, atol=1e-9)
    for scale in (0.0, 1e-3, 1.0, 1e3, np.inf):
        np.testing.assert_allclose(gp.gaussian_measures("relu2", scale, rho)["scaling_asymmetry"], 0.1, atol=1e-9)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_table_against_neuronwise_quadrature(name):
    """The two roads agree for every activation, through the whole range of scales and up to rho = 1."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.uniform(math.log(1e-3), math.log(1e3), 600))
    rho = np.concatenate([rng.uniform(0, 1, 400), 1 - 10 ** rng.uniform(-12, -1, 190), np.ones(5), np.zeros(5)])
    table, direct = gaussian_table(name)(scale, rho), gaussian_quadrature(name, scale, scale, rho)
    for measure in GAUSSIAN_MEASURES:
        np.testing.assert_allclose(table[measure], direct[measure], atol=1e-6, err_msg=measure)
    np.testing.assert_allclose(table["energy"] * scale**2, direct["energy"], rtol=1e-6)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "quick_gelu", "mish"])
def test_limits_are_bilinear_and_relu(name):
    rho = np.linspace(0, 1, 11)
    small, large = gp.gaussian_measures(name, 0.0, rho), gp.gaussian_measures(name, np.inf, rho)
    relu = gp.gaussian_measures("relu", 1.0, rho)
    assert (small[["exchange_asymmetry", "scaling_asymmetry", "linear_share", "residual_share"]] == 0).all(axis=None)
    assert (small["bilinear_share"] == 1).all()
    np.testing.assert_array_equal(large[list(GAUSSIAN_MEASURES)], relu[list(GAUSSIAN_MEASURES)])
    # and they are reached continuously
    np.testing.assert_allclose(
        gp.gaussian_measures(name, 1e-3, rho)[list(GAUSSIAN_MEASURES)], small[list(GAUSSIAN_MEASURES)], atol=1e-5
    )
    np.testing.assert_allclose(
        gp.gaussian_measures(name, 1e4, rho)[list(GAUSSIAN_MEASURES)], relu[list(GAUSSIAN_MEASURES)], atol=1e-5
    )


@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_limits_of_bounded_gates_are_reached(name):
    rho = np.linspace(0, 1, 11)
    for limit, near in ((0.0, 1e-4), (np.inf, 9e5)):
        a, b = (gp.gaussian_measures(name, scale, rho)[list(GAUSSIAN_MEASURES)] for scale in (limit, near))
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_biases_against_sampling():
    """Means shift the canonical gauge: rms instead of standard deviation, and E[ab] decides the sign."""
    rng = np.random.default_rng(1)
    scale_a, scale_b, rho = np.array([0.8, 2.0, 1.0]), np.array([1.5, 0.3, 1.0]), np.array([0.3, -0.6, -0.2])
    mean_a, mean_b = np.array([0.5, -1.0, 2.0]), np.array([-0.2, 0.4, 1.5])
    found = gaussian_quadrature("silu", scale_a, scale_b, rho, mean_a, mean_b)
    u, w = rng.standard_normal((2, 3_000_000))
    for i in range(3):
        a = mean_a[i] + scale_a[i] * u
        b = mean_b[i] + scale_b[i] * (rho[i] * u + math.sqrt(1 - rho[i] ** 2) * w)
        raw_energy = np.mean((a / (1 + np.exp(-a)) * b) ** 2)
        b = b * np.sqrt(np.mean(a**2) / np.mean(b**2)) * (-1 if np.mean(a * b) < 0 else 1)
        g, swapped = a / (1 + np.exp(-a)) * b, b / (1 + np.exp(-b)) * a
        rescaled = 2 * a / (1 + np.exp(-2 * a)) * b / 2
        basis = np.stack([b, a * b], axis=1)
        shares = []
        for columns in (basis[:, :1], basis):
            fit = columns @ np.linalg.lstsq(columns, g, rcond=None)[0]
            shares.append(np.mean(fit**2) / np.mean(g**2))
        expected = {
            "exchange_asymmetry": np.mean((g - swapped) ** 2) / 2 / (np.mean(g**2) + np.mean(swapped**2)),
            "scaling_asymmetry": np.mean((g - rescaled) ** 2) / 2 / (np.mean(g**2) + np.mean(rescaled**2)),
            "linear_share": shares[0],
            "bilinear_share": shares[1] - shares[0],
        }
        for measure, value in expected.items():
            assert found[measure][i] == pytest.approx(value, abs=3e-3), (i, measure)
        assert found["energy"][i] == pytest.approx(raw_energy, rel=0.02)


def test_zero_biases_change_nothing():
    scale, rho = np.geomspace(0.01, 30, 40), np.linspace(-1, 1, 40)
    with_biases = gaussian_quadrature("silu", scale, 3 * scale, rho, np.zeros(40), np.zeros(40))
    without = gaussian_table("silu")(scale, np.abs(rho))
    for measure in GAUSSIAN_MEASURES:
        np.testing.assert_allclose(with_biases[measure], without[measure], atol=1e-7)


def test_missing_stays_missing():
    values = gaussian_table("silu")(np.array([np.nan, 1.0]), np.array([0.1, 0.1]))
    assert np.isnan(values["exchange_asymmetry"][0])
    assert np.isfinite(values["exchange_asymmetry"][1])


def test_bad_input_is_refused():
    with pytest.raises(BadOption, match="standard deviation"):
        gp.gaussian_measures("silu", -1.0, 0.0)
    with pytest.raises(BadOption, match=r"\[0, 1\]"):
        gp.gaussian_measures("silu", 1.0, -0.3)
    with pytest.raises(UnknownActivation, match="'swoosh'"):
        gp.gaussian_measures("swoosh", 1.0, 0.0)


@pytest.mark.parametrize("entry", ACTIVATIONS.values(), ids=lambda entry: entry.name)
def test_facts_about_activations(entry):
    """Declared degree, linearity and limits hold for the function itself."""
    z = torch.linspace(-3, 3, 25, dtype=torch.float64)
    for c in (0.5, 2.0):
        homogeneous = entry.degree is not None
        assert torch.allclose(entry(c * z), c ** (entry.degree or 1) * entry(z)) == homogeneous
    assert torch.allclose(entry(-z), -entry(z)) == entry.odd
    for end, scale in ((entry.small, 1e-7), (entry.large, 1e7)):
        if end is not None:
            expected = end.coefficient * gp.activation(end.activation)(scale * z)
            away = z != 0  # at 0 itself a step has no say
            assert torch.allclose(entry(scale * z)[away], expected[away], rtol=1e-5, atol=1e-12)


def test_inputs_of_many_kinds():
    plain = gp.gaussian_measures("silu", [0.5, 2.0], 0.1)
    for scale in ((0.5, 2.0), np.array([0.5, 2.0]), torch.tensor([0.5, 2.0]).bfloat16().requires_grad_()):
        np.testing.assert_array_equal(gp.gaussian_measures("silu", scale, 0.1), plain)
    assert gp.gaussian_measures("silu", [], 0.1).empty
    for scale, rho in (([1.0, 2.0], [0.1, 0.2, 0.3]), ("a lot", 0.1)):
        with pytest.raises(BadOption, match="go together"):
            gp.gaussian_measures("silu", scale, rho)


def test_equal_branches_are_exactly_symmetric():
    assert (gp.gaussian_measures("silu", [0.1, 1.0, 50.0], 1.0)["exchange_asymmetry"] == 0).all()


def test_an_activation_of_ones_own_is_not_mistaken_for_one_of_the_table():
    own = gp.Activation("relu", "z sigmoid(z)", torch.nn.functional.silu)
    found = gp.gaussian_measures(own, 1.0, 0.0)["exchange_asymmetry"]
    assert found.item() == pytest.approx(0.148655, abs=1e-6)
