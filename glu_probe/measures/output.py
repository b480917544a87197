"""Asymmetry of a whole layer's output on Gaussian input: what single neurons do not show when they cancel."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..neurons import GatedLayer, gauge_of
from .gaussian import RESCALE
from .products import RowProducts

_ROWS = 256
_COST = 2_000_000_000  # sample x weight products spent on a layer by default
_SINGLE = 8_000_000  # weights of one matrix beyond which float32 does: the sampling error is a thousand times larger
_IN_RANGE = (1e-12, 1e12)  # squared norms between which products of three factors stay well within float32


def default_samples(layer: GatedLayer) -> int:
    """Number of Gaussian inputs for a layer of this size: as many as a fixed cost buys, 32 to 1024."""
    return int(np.clip(_COST // (layer.d_mlp * layer.d_model), 32, 1024))


def output_asymmetry(
    layer: GatedLayer,
    products: RowProducts,
    usable: np.ndarray,
    rng: np.random.Generator,
    samples: int | None = None,
) -> dict[str, float]:
    """exchange_asymmetry_output and scaling_asymmetry_output, each with `_se`, its standard error.

    E|F - F'|^2 / (2 (E|F|^2 + E|F'|^2)) with F(x) = sum_j S(a_j) b_j v_j, x standard normal, and F' with the
    branches exchanged in the canonical gauge, or rescaled by c = 2. The output's own bias is left out: it takes
    no part in either operation. Cost: 10 d_mlp d_model flops a sample.

    Args:
        products: inner products of the layer's rows, for the gauge.
        usable: [d_mlp] bool, the neurons that take part.
        samples: number of inputs, at least 2; None for `default_samples`.

    Returns:
        NaN throughout where the layer's function is not known or its output is zero.
    """
    samples = default_samples(layer) if samples is None else samples
    names = ("exchange_asymmetry_output", "scaling_asymmetry_output")
    if layer.functional_note() is not None or not usable.any():
        return {name + suffix: math.nan for name in names for suffix in ("", "_se")}
    small = layer.d_mlp * layer.d_model <= _SINGLE
    squares = np.concatenate([part[usable] for part in (products.qq, products.kk, products.vv)])
    squares = squares[squares > 0]
    moderate = squares.size and squares.min() > _IN_RANGE[0] and squares.max() < _IN_RANGE[1]
    dtype = torch.float32 if moderate and not small else torch.float64
    x = torch.from_numpy(rng.standard_normal((samples, layer.d_model))).to(dtype)
    act, pick = layer.activation, torch.from_numpy(np.flatnonzero(usable))
    every = len(pick) == layer.d_mlp
    bias_q, bias_k = (
        torch.zeros(layer.d_mlp, dtype=torch.float64) if bias is None else bias.double()
        for bias in (layer.query_bias, layer.key_bias)
    )
    square_a, square_b, product = (torch.from_numpy(part) for part in (products.qq, products.kk, products.qk))
    gauge = gauge_of(square_a + bias_q**2, square_b + bias_k**2, product + bias_q * bias_k).to(dtype)
    bias_q, bias_k = bias_q.to(dtype), bias_k.to(dtype)
    outputs = torch.zeros(3 * samples, layer.d_model, dtype=dtype)
    # one buffer for all blocks that need converting: fresh memory for each would cost more than the conversion
    buffer = torch.empty(3, min(_ROWS, len(pick)), layer.d_model, dtype=dtype)
    factors = (layer.query, layer.key, layer.value)
    for start in range(0, len(pick), _ROWS):
        rows = slice(start, min(start + _ROWS, len(pick))) if every else pick[start : start + _ROWS]
        if every and all(factor.dtype == dtype for factor in factors):
            q, k, v = (factor[rows] for factor in factors)
        else:
            q, k, v = (buffer[i, : len(gauge[rows])].copy_(factor[rows]) for i, factor in enumerate(factors))
        a = x @ q.T + bias_q[rows]
        b = (x @ k.T + bias_k[rows]) * gauge[rows]
        coefficients = torch.cat((act(a) * b, act(b) * a, act(RESCALE * a) * b / RESCALE))
        outputs.addmm_(coefficients / gauge[rows], v)
    plain, exchanged, rescaled = outputs.double().view(3, samples, -1)
    return _ratio(names[0], plain, exchanged) | _ratio(names[1], plain, rescaled)


def _ratio(name: str, plain: torch.Tensor, changed: torch.Tensor) -> dict[str, float]:
    """Ratio of means over samples, with its standard error by the delta method."""
    difference = (plain - changed).square().sum(1)
    energy = 2 * (plain.square().sum(1) + changed.square().sum(1))
    total = energy.mean().item()
    if not total > 0:
        return {name: math.nan, name + "_se": math.nan}
    value = difference.mean().item() / total
    spread = ((difference - value * energy) / total).std().item()
    return {name: value, name + "_se": spread / math.sqrt(len(energy))}
