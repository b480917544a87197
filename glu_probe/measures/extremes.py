"""How large the largest of many cosines is by chance: what a nearest neighbour must exceed to be one."""

from __future__ import annotations

import math

import numpy as np

_STEPS = 1 << 13


def largest_cosine(count: int, d_model: int, *, together: int = 1, signed: bool = False) -> float:
    """Expected maximum of |cos| over `count` independent isotropic directions, in [0, 1].

    For one direction against many it is about sqrt(2 ln(2 count) / d_model), or sqrt(2 ln(count) / d_model) if signed.
    Integrated from the distribution: cos^2 of two isotropic directions is Beta(1/2, (d_model - 1) / 2).

    Args:
        count: how many candidates the maximum is over; missing (NaN) for none.
        d_model: dimension.
        together: each candidate counts by the smallest of so many independent |cos|.
        signed: the maximum of cos, not of |cos|; for `together` 1.

    >>> round(largest_cosine(9, 3), 4)  # |cos| is uniform in three dimensions
    0.9
    """
    if count < 1:
        return math.nan
    if d_model == 1:  # every |cos| is 1
        return 1 - 2 * 0.5**count if signed else 1.0
    from scipy.integrate import trapezoid
    from scipy.special import betainc

    angle = np.linspace(0.0, math.pi / 2, _STEPS + 1)
    beyond = betainc((d_model - 1) / 2, 0.5, np.cos(angle) ** 2)  # P(|cos| > sin(angle)), exact far out too
    beyond = beyond / 2 if signed else beyond**together
    with np.errstate(divide="ignore"):
        kept = 1 - np.exp(count * np.log1p(-beyond))  # P(the maximum is beyond)
    if signed:
        kept -= beyond**count  # all of them negative
    return float(trapezoid(kept * np.cos(angle), angle))
