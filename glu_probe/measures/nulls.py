"""What the measures would be if a layer's branches had nothing to do with each other.

The analytic null takes isotropic directions. The empirical one pairs the gate row of one neuron with the up row
of another and the down column of a third: it keeps the layer's anisotropy, so effect sizes use it.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from ..neurons import GatedLayer
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


def mismatched(layer: GatedLayer, usable: np.ndarray, rng: np.random.Generator) -> GatedLayer | None:
    """A layer of made-up neurons (q_i, k_j, v_l), i, j, l all different, drawn from the usable ones.

    Up to `NULL_PAIRS` of them, each row used once; None where fewer than three neurons are usable.
    """
    live = rng.permutation(np.flatnonzero(usable))[:NULL_PAIRS]
    if len(live) < 3:
        return None
    other, third = np.roll(live, 1), np.roll(live, 2)
    return GatedLayer(
        query=layer.query[live],
        key=layer.key[other],
        value=layer.value[third],
        query_bias=None if layer.query_bias is None else layer.query_bias[live],
        key_bias=None if layer.key_bias is None else layer.key_bias[other],
        activation=layer.activation,
        layer=layer.layer,
        scale_note=layer.scale_note,
    )


def null_measures(layer: GatedLayer, usable: np.ndarray, rng: np.random.Generator) -> dict[str, Array]:
    """The measures of `NULL_MEASURES` on mismatched neurons; empty arrays where there are too few."""
    pairs = mismatched(layer, usable, rng)
    if pairs is None:
        return {name: np.empty(0) for name in NULL_MEASURES}
    products = row_products(pairs)
    values = directions(products)
    values |= functional(pairs, np.sqrt(products.qq), np.sqrt(products.kk), signed_cosine(products))
    return {name: values[name] for name in NULL_MEASURES}
