"""Normal inputs through a layer, a block of neurons at a time: what exchange and rescaling do to its whole output.

One pass over the factors serves the output asymmetries, at inputs x, and the tensor asymmetry, at pairs of them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..layer_rows import LayerRows, Rows
from ..neurons import gauge_of
from .arithmetic import coarse, times
from .gaussian import RESCALE
from .products import RowProducts

_SINGLE = 8_000_000  # weights of one matrix beyond which float32 does: the sampling error is a thousand times larger
_IN_RANGE = (1e-12, 1e12)  # squared norms between which products of three factors stay well within float32
_CANCELLED = 1e-9  # of the energy that the terms would have if they were orthogonal: below, rounding is what is left
OUTPUT_MEASURES = ("exchange_asymmetry_output", "scaling_asymmetry_output")

Outputs = Float[Tensor, "kind sample d_model"]


class SampledLayer:
    """Outputs of a layer at normal inputs, summed up block by block.

    Cost: 4 d_model flops a neuron and input, 6 more for the output asymmetries and 4 for each pair.

    Args:
        layer: whose blocks `add` will get.
        x: [samples, d_model] float64 inputs.
        outputs: take F(x), the exchanged F and the rescaled F at the first so many inputs.
        pairs: take F(x, y) = sum_j (q_j.x)(k_j.y) v_j and F(y, x), x from the first so many inputs and y from the next.
    """

    def __init__(
        self, layer: LayerRows, x: Float[Tensor, "sample d_model"], *, outputs: int = 0, pairs: int = 0
    ) -> None:
        self._layer, self._pairs = layer, pairs
        self._samples = outputs if layer.functional_note() is None else 0
        self._single = layer.d_mlp * layer.d_model > _SINGLE
        self._x = {torch.float64: x, torch.float32: x.float()}
        count = 3 * self._samples + 2 * pairs
        self._sums = {dtype: torch.zeros(count, layer.d_model, dtype=dtype) for dtype in self._x}
        self._apart = 0.0  # energy of the tensor's terms if they were orthogonal
        self.neurons = 0

    def add(self, block: slice, factors: tuple[Rows, Rows, Rows], products: RowProducts, usable: np.ndarray) -> None:
        """The share of a block of neurons.

        Args:
            block: which they are.
            factors: their query, key and value rows.
            products: the rows' inner products.
            usable: which of them take part.
        """
        if not usable.any() or not (self._samples or self._pairs):
            return
        gram = (torch.from_numpy(part[usable]) for part in (products.qq, products.kk, products.vv, products.qk))
        square_q, square_k, square_v, product = gram
        bias_q, bias_k = self._layer.biases(block)
        if not usable.all():
            live = torch.from_numpy(usable)
            bias_q, bias_k = bias_q[live], bias_k[live]
            factors = tuple(rows[live] for rows in factors)
        sizes = torch.cat((square_q, square_k, square_v))
        sizes = sizes[sizes > 0]
        moderate = len(sizes) > 0 and bool((sizes > _IN_RANGE[0]).all() & (sizes < _IN_RANGE[1]).all())
        dtype = torch.float32 if moderate and self._single else torch.float64
        query, key, value = (coarse(rows.to(dtype)) for rows in factors)
        x, pairs = self._x[dtype], self._pairs
        a, b = times(x, query.T), times(x, key.T)
        parts = []
        if count := self._samples:
            gauge = gauge_of(square_q + bias_q**2, square_k + bias_k**2, product + bias_q * bias_k).to(dtype)
            branches = a[:count] + bias_q.to(dtype), (b[:count] + bias_k.to(dtype)) * gauge
            parts += [part / gauge for part in self._coefficients(*branches)]
        if pairs:
            parts += [a[:pairs] * b[pairs : 2 * pairs], a[pairs : 2 * pairs] * b[:pairs]]
            self._apart += (square_q * square_k * square_v).sum().item()
        self._sums[dtype] += times(torch.cat(parts), value)
        self.neurons += len(query)

    def _coefficients(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """S(a) b, and what exchange and rescaling take away from it: small where they do nothing, and then exact."""
        act = self._layer.activation
        plain = act(a) * b
        return plain, plain - act(b) * a, plain - act(RESCALE * a) * b / RESCALE

    def _outputs(self) -> Outputs:
        return self._sums[torch.float64] + self._sums[torch.float32]

    def output_asymmetries(self) -> dict[str, float]:
        """`OUTPUT_MEASURES`, each with `_se`; missing where the function is not known or the output is zero."""
        if not self._samples or not self.neurons:
            return {name + suffix: math.nan for name in OUTPUT_MEASURES for suffix in ("", "_se")}
        plain, *differences = self._outputs()[: 3 * self._samples].view(3, self._samples, -1)
        out = {}
        for name, difference in zip(OUTPUT_MEASURES, differences, strict=True):
            out[name], out[name + "_se"] = _asymmetry(plain, difference)
        return out

    def tensor_asymmetry(self) -> tuple[float, float]:
        """The share and its standard error; missing where no neuron took part or they cancel each other to rounding."""
        forth, back = self._outputs()[-2 * self._pairs :].view(2, self._pairs, -1)
        energy = 2 * (forth.square().sum(1) + back.square().sum(1)).mean().item()
        return _asymmetry(forth, forth - back) if energy > 4 * _CANCELLED * self._apart else (math.nan, math.nan)


def _asymmetry(plain: Float[Tensor, "sample d_model"], change: Float[Tensor, "sample d_model"]) -> tuple[float, float]:
    """E|F - F'|^2 / (2 (E|F|^2 + E|F'|^2)) as a ratio of means over samples, with its error by the delta method.

    Args:
        change: F - F'.
    """
    difference = change.square().sum(1)
    energy = 2 * (plain.square().sum(1) + (plain - change).square().sum(1))
    total = energy.mean().item()
    if not total > 0:
        return math.nan, math.nan
    value = difference.mean().item() / total
    spread = ((difference - value * energy) / total).std().item()
    return value, spread / math.sqrt(len(energy))
