"""The largest of many cosines by chance, against closed forms and draws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from glu_probe.measures import largest_cosine
from glu_probe.measures.nulls import isotropic_null


@pytest.mark.parametrize("count", [1, 2, 9, 1000])
def test_in_three_dimensions_the_cosine_is_uniform(count):
    assert largest_cosine(count, 3) == pytest.approx(count / (count + 1), abs=1e-5)
    assert largest_cosine(count, 3, signed=True) == pytest.approx((count - 1) / (count + 1), abs=1e-5)


@pytest.mark.parametrize("d_model", [2, 3, 16, 576, 4096])
def test_of_one_it_is_the_mean(d_model):
    assert largest_cosine(1, d_model) == pytest.approx(isotropic_null("abs_cos_qk", d_model)[0], abs=1e-6)
    assert largest_cosine(1, d_model, signed=True) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("together", [1, 2, 3])
def test_against_draws(together):
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal((4000, together, 30, 8))
    cosine = drawn[..., 0] / np.linalg.norm(drawn, axis=-1)
    best = np.abs(cosine).min(1).max(1)
    assert largest_cosine(30, 8, together=together) == pytest.approx(best.mean(), abs=4 * best.std() / math.sqrt(4000))
    if together == 1:
        best = cosine[:, 0].max(1)
        assert largest_cosine(30, 8, signed=True) == pytest.approx(best.mean(), abs=4 * best.std() / math.sqrt(4000))


def test_of_very_many_it_is_below_its_bound_and_near_it():
    for count, d_model in ((49152, 576), (10**9, 4096)):
        bound = math.sqrt(2 * math.log(2 * count) / d_model)
        assert 0.88 * bound < largest_cosine(count, d_model) < bound


def test_edges():
    assert math.isnan(largest_cosine(0, 16))
    assert largest_cosine(5, 1) == 1
    assert largest_cosine(2, 1, signed=True) == pytest.approx(0.5)  # +1 unless both are -1
