"""Interventions by their formulas, fits by least squares, and what holds between them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import glu_probe as gp
from glu_probe.text.interventions import INTERVENTIONS, Calibration, change

from .plain import FORMULAS

SHAPE = (400, 7)


@pytest.fixture(params=["silu", "gelu", "relu"])
def act(request):
    return gp.activation(request.param)


@pytest.fixture
def branches():
    """a and b of neurons that differ in scale, mean and sign of their correlation."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, *SHAPE, generator=generator)
    correlation = torch.linspace(-0.9, 0.9, SHAPE[1])
    b = correlation * a + (1 - correlation.square()).sqrt() * b
    return 1.5 * a + 0.2, b * torch.linspace(0.1, 5.0, SHAPE[1]) - 0.1


def calibrated(act, a, b):
    sums = Calibration(act, a.shape[1])
    for phase in (sums.first, sums.second):
        for start in range(0, len(a), 150):
            phase(a[start : start + 150], b[start : start + 150])
    return sums.fitted()


def by_least_squares(act, a, b):
    a, b = a.double(), b.double()
    c = (a.square().mean(0) / b.square().mean(0)).sqrt() * torch.where((a * b).mean(0) < 0, -1.0, 1.0)
    g, columns = act(a) * b, range(a.shape[1])
    two = [np.linalg.lstsq(torch.stack([b[:, j], (a * b)[:, j]], 1), g[:, j], rcond=None)[0] for j in columns]
    scale = [np.linalg.lstsq(act(a * b * c)[:, j, None], g[:, j], rcond=None)[0][0] for j in columns]
    return {
        "c": c,
        "linear": torch.tensor([one[0] for one in two]),
        "product": torch.tensor([one[1] for one in two]),
        "scale": torch.tensor(scale),
        "mean": g.mean(0),
    }


def test_every_intervention_has_a_formula_here():
    assert set(INTERVENTIONS) == set(FORMULAS)


@pytest.mark.parametrize("name", list(INTERVENTIONS))
def test_change_is_the_formula_less_the_coefficient(name, act, branches):
    a, b = branches
    expected = FORMULAS[name](a.double(), b.double(), act, by_least_squares(act, a, b)) - act(a.double()) * b.double()
    found = change(name, a, b, calibrated(act, a, b))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-5)
    nothing = name == "identity" or (act.name == "relu" and name.startswith("rescale"))  # a symmetry of ReLU
    assert nothing == (not found.any())


def test_the_symmetrised_change_is_half_the_exchange_to_the_last_bit(act, branches):
    fitted = calibrated(act, *branches)
    whole, half = (change(name, *branches, fitted) for name in ("exchange", "symmetrised"))
    assert torch.equal(half * 2, whole)
    value = torch.randn(SHAPE[1], 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal((half @ value).square() * 4, (whole @ value).square())


def test_only_the_raw_exchange_depends_on_the_gauge(act, branches):
    a, b = branches
    c = torch.tensor([-3.0, 0.2, -0.5, 7.0, 1.0, -1.0, 0.1])
    before, after = calibrated(act, a, b), calibrated(act, a, b * c)
    for name in INTERVENTIONS:
        plain, moved = change(name, a, b, before), change(name, a, b * c, after) / c
        same = torch.allclose(plain, moved, rtol=1e-4, atol=1e-5)
        assert same == (name != "exchange_raw"), name


def test_fits_do_not_depend_on_how_tokens_come(branches):
    act, (a, b) = gp.activation("silu"), branches
    whole, pieces = Calibration(act, SHAPE[1]), calibrated(act, a, b)
    whole.first(a, b)
    whole.second(a, b)
    for name in ("gauge", "linear", "product", "symmetric", "mean"):
        torch.testing.assert_close(getattr(whole.fitted(), name), getattr(pieces, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dead", ["a", "b", "both"])
def test_neurons_that_do_nothing_stay_finite(dead, branches):
    a, b = (branch.clone() for branch in branches)
    if dead != "b":
        a[:, 2] = 0
    if dead != "a":
        b[:, 2] = 0
    fitted = calibrated(gp.activation("silu"), a, b)
    for name in INTERVENTIONS:
        found = change(name, a, b, fitted)
        assert torch.isfinite(found).all(), name
        if dead != "a" and name != "exchange_raw":  # S(0) a is 0 too
            assert not found[:, 2].any(), name
