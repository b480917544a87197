"""Normal inputs through a layer, a block of neurons at a time: what exchange and rescaling do to its whole output.

One pass over the factors serves the output asymmetries, at inputs x, and the tensor asymmetry, at pairs of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..lanes import LANES, in_lanes
from ..layer_rows import Factors, LayerRows
from ..neurons import gauge_of
from .arithmetic import coarse, times
from .gaussian import RESCALE
from .products import RowProducts

_SINGLE = 8_000_000  # weights of one matrix beyond which float32 does: the sampling error is a thousand times larger
_IN_RANGE = (1e-12, 1e12)  # squared norms between which products of three factors stay well within float32
_SUMS = 6_000_000  # values that all lanes together may keep: a small layer has many samples
_CANCELLED = 1e-9  # of the energy that the terms would have if they were orthogonal: below, rounding is what is left
# The same, and the tensor asymmetry, below which bfloat16 would show.
_COARSELY_CANCELLED, _COARSELY_SYMMETRIC = 0.1, 1e-3
_SUMS = 40_000_000  # bytes of the sums of all lanes, but for two of them
OUTPUT_MEASURES = ("exchange_asymmetry_output", "scaling_asymmetry_output")

Outputs = Float[Tensor, "kind sample d_model"]


@dataclass(eq=False)
class _Lane:
    """Sums over some of the blocks.

    Attributes:
        shape: of the outputs.
        single, double: outputs of blocks in single and in double precision; None before the first.
        outputs_apart, tensor_apart: energy of the outputs and of the tensor if neurons were orthogonal.
        rounded: whether bfloat16 was used.
        neurons: how many.
    """

    shape: tuple[int, int]
    single: Tensor | None = None
    double: Tensor | None = None
    outputs_apart: float = 0.0
    tensor_apart: float = 0.0
    rounded: bool = False
    neurons: int = 0

    def add(self, coefficients: Float[Tensor, "output neuron"], value: Float[Tensor, "neuron d_model"]) -> None:
        """Their product, in the precision of `value`."""
        if value.dtype == torch.float64:
            self.double = _plus(self.double, coefficients, value)
        elif value.dtype == torch.float32:
            self.single = _plus(self.single, coefficients, value)
        elif self.single is None:
            self.single = times(coefficients, value)
        else:
            self.single += coefficients.to(value.dtype) @ value

    @functools.cached_property
    def outputs(self) -> Outputs:
        """All of them, in the memory of those in double precision if there are some."""
        if self.double is None:
            self.double = torch.zeros(self.shape, dtype=torch.float64)
        if self.single is not None:
            self.double += self.single
            self.single = None
        return self.double

    def join(self, other: _Lane) -> None:
        """Take over another lane's sums, each in its own precision."""
        self.single = _sum(self.single, other.single)
        self.double = _sum(self.double, other.double)
        self.outputs_apart += other.outputs_apart
        self.tensor_apart += other.tensor_apart
        self.rounded |= other.rounded
        self.neurons += other.neurons


def _sum(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """total + more, in the memory of the total."""
    return total if more is None else more if total is None else total.add_(more)


def _plus(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, in the memory of the total."""
    return left @ right if total is None else total.addmm_(left, right)


class SampledLayer:
    """Outputs of a layer at normal inputs, summed up block by block.

    Cost: 4 d_model flops a neuron and input, 6 more for the output asymmetries and 4 for each pair.

    Args:
        layer: whose blocks `add` will get.
        x: [samples, d_model] float64 inputs.
        outputs: take F(x), the exchanged F and the rescaled F at the first so many inputs.
        pairs: take F(x, y) = sum_j (q_j.x)(k_j.y) v_j and F(y, x), x from the first so many inputs and y from the next.
        fine: never in bfloat16.

    Attributes:
        lanes: how many there are; as many as there is room for their sums, whatever else there is room for.
    """

    def __init__(
        self,
        layer: LayerRows,
        x: Float[Tensor, "sample d_model"],
        *,
        outputs: int = 0,
        pairs: int = 0,
        fine: bool = False,
    ) -> None:
        self._layer, self._pairs, self._narrowed = layer, pairs, (lambda part: part) if fine else coarse
        self._samples = outputs if layer.functional_note() is None else 0
        self._single = layer.d_mlp * layer.d_model > _SINGLE
        self._x = {torch.float64: x, torch.float32: self._narrowed(x.float())}
        shape = 3 * self._samples + 2 * pairs, layer.d_model
        self.lanes = lanes_of(math.prod(shape) * (4 if self._single else 8))
        self._lanes = [_Lane(shape) for _ in range(self.lanes)]

    def add(self, lane: int, block: slice, factors: Factors, products: RowProducts, usable: np.ndarray) -> None:
        """The share of a block of neurons.

        Args:
            lane: whose sum it goes to; lanes can be added to at the same time.
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
            factors = factors[0][live], factors[1][live], factors[2][live]
        sizes = torch.cat((square_q + bias_q**2, square_k + bias_k**2, square_v))
        sizes = sizes[sizes > 0]
        moderate = len(sizes) > 0 and bool((sizes > _IN_RANGE[0]).all() & (sizes < _IN_RANGE[1]).all())
        dtype = torch.float32 if moderate and self._single else torch.float64
        query, key, value = (self._narrowed(rows.to(dtype)) for rows in factors)
        found = self._lanes[lane]
        found.rounded |= value.dtype == torch.bfloat16
        x, pairs = self._x[dtype], self._pairs
        a, b = times(x, query.T), times(x, key.T)
        parts = torch.empty(found.shape[0], len(query), dtype=dtype)
        if count := self._samples:
            gauge = gauge_of(square_q + bias_q**2, square_k + bias_k**2, product + bias_q * bias_k).to(dtype)
            branches = a[:count] + bias_q.to(dtype), (b[:count] + bias_k.to(dtype)) * gauge
            self._coefficients(*branches, gauge, parts[: 3 * count].view(3, count, -1))
            found.outputs_apart += (parts[:count].square().mean(0).double() @ square_v).item()
        if pairs:
            forth, back = a[:pairs] * b[pairs : 2 * pairs], a[pairs : 2 * pairs] * b[:pairs]
            parts[-2 * pairs : -pairs] = forth
            torch.sub(forth, back, out=parts[-pairs:])
            found.tensor_apart += (square_q * square_k * square_v).sum().item()
        found.add(parts, value)
        found.neurons += len(query)

    def _coefficients(self, a: Tensor, b: Tensor, gauge: Tensor, out: Float[Tensor, "3 sample neuron"]) -> None:
        """S(a) b, and what exchange and rescaling take away from it: small where they do nothing, and then exact."""
        act = self._layer.activation
        assert act is not None  # or no outputs are taken
        plain = act(a) * b
        torch.div(plain, gauge, out=out[0])
        torch.div(plain - act(b) * a, gauge, out=out[1])
        torch.div(plain - act(RESCALE * a) * b / RESCALE, gauge, out=out[2])

    @functools.cached_property
    def _total(self) -> _Lane:
        """All lanes together, once everything is added; they are used up."""
        total = self._lanes.pop(0)
        while self._lanes:
            total.join(self._lanes.pop(0))
        return total

    @property
    def neurons(self) -> int:
        """How many took part."""
        return self._total.neurons

    @property
    def too_coarse(self) -> bool:
        """Whether bfloat16 may show in what was found: neurons cancel each other, or gate and up in the tensor."""
        total, parts = self._total, []
        if not total.rounded:
            return False
        if self._samples:
            parts.append((total.outputs[: self._samples], total.outputs_apart))
        if self._pairs:
            parts.append((total.outputs[-2 * self._pairs : -self._pairs], total.tensor_apart))
            if not self.tensor_asymmetry()[0] > _COARSELY_SYMMETRIC:
                return True
        return any(part.square().sum(1).mean().item() < _COARSELY_CANCELLED * apart for part, apart in parts)

    def output_asymmetries(self) -> dict[str, float]:
        """`OUTPUT_MEASURES`, each with `_se`; missing where the function is not known or the output is zero."""
        if not self._samples or not self.neurons:
            return {name + suffix: math.nan for name in OUTPUT_MEASURES for suffix in ("", "_se")}
        plain, *differences = self._total.outputs[: 3 * self._samples].view(3, self._samples, -1)
        out = {}
        for name, difference in zip(OUTPUT_MEASURES, differences, strict=True):
            out[name], out[name + "_se"] = _asymmetry(plain, difference)
        return out

    def tensor_asymmetry(self) -> tuple[float, float]:
        """The share and its standard error; missing where no neuron took part or they cancel each other to rounding."""
        forth, change = self._total.outputs[-2 * self._pairs :].view(2, self._pairs, -1)
        energy = 2 * (forth.square().sum(1) + (forth - change).square().sum(1)).mean().item()
        return _asymmetry(forth, change) if energy > 4 * _CANCELLED * self._total.tensor_apart else (math.nan, math.nan)


def sampled(
    layer: LayerRows,
    x: Float[Tensor, "sample d_model"],
    products: RowProducts,
    usable: np.ndarray,
    *,
    outputs: int = 0,
    pairs: int = 0,
    fine: bool = False,
) -> SampledLayer:
    """A pass over the usable neurons of a layer, and a finer one where that was too coarse; see `SampledLayer`."""
    found = SampledLayer(layer, x, outputs=outputs, pairs=pairs, fine=fine)

    def add(lane: int, item: tuple[slice, Callable[[], Factors]]) -> None:
        block, make = item
        factors = make()
        found.add(lane, block, factors, products.at(block), usable[block])

    in_lanes(add, layer.read_blocks(), found.lanes)
    if found.too_coarse:
        return sampled(layer, x, products, usable, outputs=outputs, pairs=pairs, fine=True)
    return found


def lanes_of(sums: int) -> int:
    """How many lanes sum up so many bytes each: 2 to `LANES`, by the size of the layer alone, so that no sum depends on
    how many cores there are.
    """
    return min(max(_SUMS // max(sums, 1), 2), LANES)


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
