"""Asymmetry of a whole layer's output on Gaussian input: what single neurons do not show when they cancel."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..layer_rows import LayerRows, Sampled
from .products import RowProducts
from .sampling import sampled

_COST = 2_000_000_000  # sample x weight products spent on a dense layer by default
_EXPERTS = 16  # among as many is that divided where there are routed ones, which a layer has dozens of


def default_samples(layer: Sampled) -> int:
    """Number of Gaussian inputs for a layer of this size: as many as a fixed cost buys, 32 to 1024.

    A routed expert gets a sixteenth of it: there are dozens in a layer, and a figure of the layer is over all of them.
    """
    cost = _COST // _EXPERTS if layer.group == "routed" else _COST
    return int(np.clip(cost // (layer.d_mlp * layer.d_model), 32, 1024))


def inputs(layer: LayerRows, rng: np.random.Generator, samples: int) -> Float[Tensor, "sample d_model"]:
    """Standard normal inputs, float64."""
    return torch.from_numpy(rng.standard_normal((samples, layer.d_model)))


def output_asymmetry(
    layer: LayerRows,
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
    samples = samples or default_samples(layer)
    return sampled(layer, inputs(layer, rng, samples), products, usable, outputs=samples).output_asymmetries()
