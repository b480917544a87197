"""What the measures would be if a layer's branches had nothing to do with each other.

The analytic null takes isotropic directions. The empirical one pairs the gate row of one neuron with the up row
of another and the down column of a third: it keeps the layer's anisotropy, so effect sizes use it.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from ..layer_rows import LayerRows
from .neuron import directions, functional, signed_cosine
from .products import row_products

NULL_MEASURES = ("abs_cos_qk", "cos_kv", "abs_cos_qv", "cos_qv", "exchange_asymmetry")
NULL_PAIRS = 1024  # the null mean is then known to a thirtieth of the null's own spread

Array = Float[np.ndarray, " pair"]


def isotropic_null(measure: str, d_model: int) -> tuple[float, float]:
    """Mean and standard deviation of a cosine of independent isotropic directions in d_model dimensions.

    Signed cosines: 0 and d^(-1/2). Absolute ones: Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2)) and what is left of 1/d.
    """
    if not measure.startswith("abs_"):
        return 0.0, d_model**-0.5
    mean = math.exp(math.lgamma(d_model / 2) - math.lgamma((d_model + 1) / 2)) / math.sqrt(math.pi)
    return mean, math.sqrt(max(1 / d_model - mean * mean, 0.0))


def mismatched(usable: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Which query, key and value rows make up neurons that do not exist: i, j, l all different, drawn from the usable.

    Up to `NULL_PAIRS` of them, each row used once; None where fewer than three neurons are usable.
    """
    live = rng.permutation(np.flatnonzero(usable))[:NULL_PAIRS]
    return None if len(live) < 3 else (live, np.roll(live, 1), np.roll(live, 2))


def null_measures(layer: LayerRows, usable: np.ndarray, rng: np.random.Generator) -> dict[str, Array]:
    """The measures of `NULL_MEASURES` on mismatched neurons; empty arrays where there are too few."""
    pairs = mismatched(usable, rng)
    if pairs is None:
        return {name: np.empty(0) for name in NULL_MEASURES}
    products = row_products(layer, pairs)
    values = directions(products)
    values |= functional(layer, np.sqrt(products.qq), np.sqrt(products.kk), signed_cosine(products), pairs[:2])
    return {name: values[name] for name in NULL_MEASURES}
