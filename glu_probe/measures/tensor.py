"""The layer as one third-order tensor T = sum_j q_j (x) k_j (x) v_j: what is left of it when gate and up are exchanged.

T does not change with the gauge or the order of neurons. It is the layer's function where the gate is linear; with
another gate the coefficients of `interaction.bilinear_coefficients` weight its terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..arguments import whole_number
from ..lanes import every_core
from ..layer_rows import ROLES, LayerRows, Sizes
from .products import RowProducts, row_products
from .sampling import sampled

_EXACT_FLOPS = 2e10
_COST = 2_000_000_000  # samples x weights of one matrix spent by default
_ROWS = 256
_CANCELLED = 1e-9  # of the energy that the terms would have if they were orthogonal: below, rounding is what is left


@dataclass(frozen=True)
class UnitFactors:
    """Directions of the three factors and the size of each neuron's term, so that no product leaves its range.

    Attributes:
        layer: whose neurons they are.
        neurons: [live] indices of those whose three rows are finite and not zero.
        norms: [3, live] |q|, |k|, |v|.
        weight: [live] |q||k||v|, scaled to a largest of 1.
    """

    layer: LayerRows
    neurons: Tensor
    norms: Float[Tensor, "3 live"]
    weight: Float[Tensor, " live"]

    @classmethod
    def of(cls, layer: LayerRows, usable: np.ndarray | None = None, products: RowProducts | None = None) -> UnitFactors:
        """Of those neurons of a layer that are also `usable` where that is given."""
        products = row_products(layer) if products is None else products
        norms = torch.from_numpy(np.sqrt(np.stack((products.qq, products.kk, products.vv))))
        live = (norms > 0).all(0) & norms.isfinite().all(0)
        if usable is not None:
            live &= torch.from_numpy(usable)
        norms = norms[:, live]
        logs = norms.log().sum(0)
        return cls(layer.detach(), live.nonzero().flatten(), norms, (logs - logs.max()).exp() if len(logs) else logs)

    def __len__(self) -> int:
        return len(self.neurons)

    def rows(self, dtype: torch.dtype, step: int = _ROWS) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor]]]:
        """Unit rows of query, key and value, block by block."""
        for start in range(0, len(self), step):
            block = slice(start, min(start + step, len(self)))
            yield block, self.unit(block, dtype)

    def unit(self, block: slice, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        """Unit rows of query, key and value of a block: [block, d_model] each."""
        return tuple(
            (self.layer.rows(role, self.neurons[block]).double() / norm[block, None]).to(dtype)
            for role, norm in zip(ROLES, self.norms, strict=True)
        )


def tensor_asymmetry(
    layer: LayerRows,
    *,
    exact: bool | None = None,
    samples: int | None = None,
    seed: int = 0,
    usable: np.ndarray | None = None,
    products: RowProducts | None = None,
) -> tuple[float, float, str]:
    """Share of the tensor's energy that changes sign under exchange: (1 - <T, T^t> / |T|^2) / 2, T^t = T with q and k swapped.

    0 for a symmetric layer, 1 for an antisymmetric one, 1/2 if T and T^t are orthogonal, as random ones nearly are.

    Args:
        layer: its factors; biases play no part.
        exact: by the Gram matrices of the factors, 5 d_mlp^2 d_model flops, or from samples of
            F(x, y) = sum_j (q_j.x)(k_j.y) v_j at independent normal x, y, 12 d_mlp d_model flops each; None for exact up
            to 2e10 flops, about 2500 neurons of width 600.
        samples: number of pairs (x, y), at least 2; None for as many as a fixed cost buys, 64 to 1024. Where one neuron
            is most of T the estimate is biased by about its value over the number of samples.
        seed: of the samples.
        usable: [d_mlp] bool, the neurons that take part; None for all whose rows are finite and not zero.
        products: the layer's `row_products`, if they are at hand.

    Returns:
        The share, its standard error (0 where exact) and how it was found, in words. NaN where no neuron is left, or where
        the neurons cancel each other to rounding.

    Raises:
        BadOption: fewer than 2 samples, or a seed that is no whole number of at least 0.
    """
    seed, layer = whole_number("seed", seed, 0), layer.detach()
    if samples is not None:
        samples = whole_number("samples", samples, 2, why="a standard error needs them")
    if is_cheap(layer) if exact is None else exact:
        units = UnitFactors.of(layer, usable, products)
        apart = units.weight.square().sum().item()
        with every_core():
            kept, swapped = _inner_products(units)
        share = (1 - swapped / kept) / 2 if kept > _CANCELLED * apart else math.nan
        return min(max(share, 0.0), 1.0) if share == share else share, 0.0 if share == share else math.nan, "exact"
    samples = samples or int(np.clip(_COST // (layer.d_mlp * layer.d_model), 64, 1024))
    products = row_products(layer) if products is None else products
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((2 * samples, layer.d_model)))
    usable = np.ones(layer.d_mlp, dtype=bool) if usable is None else usable
    usable = usable & np.isfinite(products.qq + products.kk + products.vv)
    return (*sampled(layer, x, products, usable, pairs=samples).tensor_asymmetry(), random_pairs(samples))


def random_pairs(count: int) -> str:
    """How a sampled value was found, in words."""
    return f"{count} random pairs"


def is_cheap(layer: Sizes) -> bool:
    """Whether the exact value costs little enough to be the default."""
    return 5 * layer.d_mlp**2 * layer.d_model <= _EXACT_FLOPS


def _inner_products(units: UnitFactors) -> tuple[float, float]:
    """<T, T> and <T, T^t>, block by block of the upper triangle."""
    kept = swapped = 0.0
    every = units.unit(slice(0, len(units)))
    for start in range(0, len(units), _ROWS):
        rows, rest = slice(start, min(start + _ROWS, len(units))), slice(start, None)
        query, key, value = (factor[rows] for factor in every)
        queries, keys, values = (factor[rest] for factor in every)
        outputs = (value * units.weight[rows, None]) @ (values * units.weight[rest, None]).T
        # the block on the diagonal is whole, the part right of it stands for its mirror image too
        outputs[:, rows.stop - start :] *= 2
        kept += ((query @ queries.T) * (key @ keys.T) * outputs).sum().item()
        swapped += ((query @ keys.T) * (key @ queries.T) * outputs).sum().item()
    return kept, swapped
