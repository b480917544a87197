"""The factors of one MLP against a function that should be the same: how far off, and which other reading would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from .activations import ACTIVATIONS, Activation
from .neurons import GatedLayer

# float32 leaves about 1e-6 of rounding; the two readings that are hardest to tell apart, gelu and its tanh form, differ
# by 1e-4 or more on the input used here. What float32 does not settle is computed again in float64.
TOLERANCE = 1e-5
# Root mean squares of the gate's pre-activations: some where smooth activations differ most, some beyond their limits.
_GATE_SCALES = (1.5, 0.5, 5.0, 20.0)
_ROWS = 4 * len(_GATE_SCALES)
# So large that the epsilon of a norm is nothing beside it.
_STREAM_SCALE = 300.0


@dataclass(frozen=True)
class Comparison:
    """What came of one comparison.

    Attributes:
        error: distance of the factors' output from the function's, relative to its size, of the worst row.
        exchanged: the same with gate and up exchanged.
        activation: the one that was used: the layer's own, or where it has none the best of all.
        finite: the function's output was.
        silent: both give nothing but zeros, which says nothing about how the factors were read.
        explanation: where they differ, another reading of the same factors that does not.
    """

    error: float
    exchanged: float
    activation: Activation
    finite: bool
    silent: bool
    explanation: str | None

    @property
    def equal(self) -> bool:
        """The factors compute the function."""
        return self.finite and not self.silent and self.error <= TOLERANCE

    @property
    def symmetric(self) -> bool:
        """Exchanging gate and up makes next to no difference."""
        return self.exchanged <= 100 * TOLERANCE


def input_of(layer: GatedLayer, seed: int) -> Tensor:
    """Random input for an MLP alone, of scales at which its activation shows."""
    norm = layer.query.double().square().sum(1).mean().sqrt()
    scales = torch.tensor(_GATE_SCALES, dtype=torch.float64).repeat(_ROWS // len(_GATE_SCALES))[:, None]
    return _random(layer.d_model, seed) * scales / (norm if 0 < norm < torch.inf else 1.0)


def stream_of(layer: GatedLayer, seed: int) -> Tensor:
    """A random residual stream."""
    return _random(layer.d_model, seed) * _STREAM_SCALE


def normalised(stream: Tensor, *, centred: bool) -> Tensor:
    """The stream as it stands before a norm's gain: over its root mean square, for a LayerNorm less its mean first."""
    stream = stream - stream.mean(1, keepdim=True) if centred else stream
    return stream / stream.square().mean(1, keepdim=True).sqrt()


@torch.no_grad()
def compare(
    layer: GatedLayer,
    x: Tensor,
    modules: Sequence[nn.Module],
    function: Callable[[Tensor], Tensor],
    given: Tensor | None = None,
    *,
    double: bool = True,
) -> Comparison:
    """Compare what the factors make of x with what a function made of modules does.

    Args:
        layer: the factors.
        x: their input, float64.
        modules: what the function runs, to be converted to the precision of the comparison.
        function: from its input to the output.
        given: its input where that is another than the factors'.
        double: compute in float64 where float32 finds a difference.
    """
    known = [layer.activation] if layer.activation else list(ACTIVATIONS.values())
    for dtype in (torch.float32, torch.float64) if double else (torch.float32,):
        for module in modules:
            module.to(dtype)
        mine, its = x.to(dtype), (x if given is None else given).to(dtype)
        expected, cast = function(its), _cast(layer, dtype)
        errors = [_error(replace(cast, activation=act).forward(mine), expected) for act in known]
        best = min(range(len(known)), key=errors.__getitem__)
        if errors[best] <= TOLERANCE and expected.any():  # zeros may be what float32 has no numbers for
            break
    cast = replace(cast, activation=known[best])
    return Comparison(
        errors[best],
        _error(cast.exchange("raw").forward(mine), expected),
        known[best],
        bool(expected.isfinite().all()),
        errors[best] == 0 and not bool(expected.any()),
        None if errors[best] <= TOLERANCE else _explained(replace(cast, activation=layer.activation), mine, expected),
    )


def _random(width: int, seed: int) -> Tensor:
    return torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _explained(layer: GatedLayer, x: Tensor, expected: Tensor) -> str | None:
    """Which other reading of the same tensors would compute what the module does."""
    for order, other in _readings(layer):
        for act in filter(None, (layer.activation, *ACTIVATIONS.values())):
            if _error(replace(other, activation=act).forward(x), expected) <= TOLERANCE:
                changed = "" if act == layer.activation else f"with --activation {act.name}"
                return " ".join(filter(None, (order, changed))) + " they do"
    return None


def _readings(layer: GatedLayer) -> Iterator[tuple[str, GatedLayer]]:
    """The same weights with the roles of gate and up dealt out otherwise."""
    yield "", layer
    if layer.sources.get("gate") != layer.sources.get("up"):
        yield "with gate and up exchanged", layer.exchange("raw")
        return
    yield "with gate and up exchanged (see --fused-layout)", layer.exchange("raw")
    rows = [layer.query, layer.key]
    biases = None if layer.query_bias is None or layer.key_bias is None else [layer.query_bias, layer.key_bias]
    halves = torch.cat(rows), None if biases is None else torch.cat(biases)
    in_turns = torch.stack(rows, 1).flatten(0, 1), None if biases is None else torch.stack(biases, 1).flatten()
    for (both, bias), cut, order in (
        (halves, lambda t: (t[0::2], t[1::2]), "interleaved"),
        (in_turns, lambda t: t.chunk(2), "gate-first"),
        (in_turns, lambda t: t.chunk(2)[::-1], "up-first"),
    ):
        query, key = cut(both)
        query_bias, key_bias = (None, None) if bias is None else cut(bias)
        other = replace(layer, query=query, key=key, query_bias=query_bias, key_bias=key_bias)
        yield f"read as --fused-layout {order}", other


def _cast(layer: GatedLayer, dtype: torch.dtype) -> GatedLayer:
    tensors = {f.name: value for f in fields(layer) if isinstance(value := getattr(layer, f.name), Tensor)}
    changed: dict[str, Any] = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return replace(layer, **changed)


def _error(found: Tensor, expected: Tensor) -> float:
    """Distance relative to the size of what was expected, of the worst row; infinite where there is none.

    A row of zeros, as ReLU leaves where no neuron is active, is measured by the size of the others.
    """
    sizes, distances = expected.norm(dim=1), (found - expected).norm(dim=1)
    sizes = torch.where(sizes == 0, sizes.square().mean().sqrt(), sizes)
    error = float(torch.where(distances == 0, distances, distances / sizes).max())
    return error if error == error else float("inf")
