"""What a gated MLP's neurons do on a stream of tokens: sums that are updated token by token, and what follows from them.

Two passes. `GaugeMoments` finds each neuron's canonical gauge, the c for which c b has the root mean square of a and
E[ab] >= 0. `NeuronMoments` and `OutputMoments` then sum, with b in that gauge, everything that the measures are made of.
Memory depends on the number of neurons, not of tokens. All sums are kept apart for a few groups of sequences, and standard
errors are those of the jackknife that leaves out one group at a time: they hold for sequences, whose tokens depend on each
other, and for every measure alike. The gauge is held fixed in them: what is left of its own error is small beside theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..activations import Activation
from ..measures.gaussian import RESCALE
from ..neurons import gauge_of

GROUPS = 10
_TOKENS = 64  # a block of activations this long stays in a core's cache through all its sums

Branch = Float[Tensor, "token d_mlp"]
PerNeuron = Float[np.ndarray, " d_mlp"]


class GaugeMoments:
    """E[a^2], E[b^2] and E[ab] of every neuron, for its canonical gauge."""

    def __init__(self, d_mlp: int) -> None:
        self._sums = torch.zeros(3, d_mlp, dtype=torch.float64)

    def update(self, a: Branch, b: Branch) -> None:
        """Add tokens."""
        sums = torch.stack([(left * right).sum(0) for left, right in ((a, a), (b, b), (a, b))])
        self._sums += sums.cpu().double()

    def gauge(self) -> Float[Tensor, " d_mlp"]:
        """c by which to multiply b; 1 where a branch is zero throughout."""
        return gauge_of(*self._sums)


@dataclass(frozen=True)
class Estimates:
    """Measures by name.

    Attributes:
        values: of each neuron [d_mlp], or of the layer; float64, missing where a neuron never does anything.
        errors: their standard errors over groups of sequences.
        mean_errors: standard errors of the means over neurons, which share the tokens and so are not independent.
    """

    values: dict[str, np.ndarray]
    errors: dict[str, np.ndarray]
    mean_errors: dict[str, float]


class _Grouped:
    """Named sums, kept apart for groups of sequences."""

    names: tuple[str, ...]

    def __init__(self, width: tuple[int, ...], groups: int) -> None:
        self._sums = torch.zeros(groups, len(self.names), *width, dtype=torch.float64)
        self._tokens = np.zeros(groups)

    def _add(self, group: int, sums: Float[Tensor, "name ..."], tokens: int) -> None:
        self._tokens[group] += tokens
        self._sums[group] += sums.cpu().double()  # in this order: not every device has float64

    @property
    def tokens(self) -> int:
        """Number of tokens seen."""
        return int(self._tokens.sum())

    def _estimate(self, measures: Callable[[dict[str, np.ndarray], float], dict[str, np.ndarray]]) -> Estimates:
        """Measures from the sums of all groups, and their jackknife errors; those are missing with fewer than 2 groups."""
        held = np.flatnonzero(self._tokens > 0)
        sums, tokens = self._sums[held].numpy(), self._tokens[held]
        whole, count = sums.sum(0), tokens.sum()

        def measured(part: np.ndarray, tokens: float) -> dict[str, np.ndarray]:
            return measures(dict(zip(self.names, part, strict=True)), tokens)

        with np.errstate(divide="ignore", invalid="ignore"):
            values = measured(whole, count)
            if len(held) < 2:
                missing = {name: np.full_like(value, np.nan) for name, value in values.items()}
                return Estimates(values, missing, dict.fromkeys(values, np.nan))
            without = [measured(whole - sums[g], count - tokens[g]) for g in range(len(held))]
            spread, errors, of_means = math.sqrt(len(held) - 1), {}, {}
            for name in values:
                parts = np.stack([one[name] for one in without])
                errors[name] = spread * parts.std(0)
                known = np.isfinite(parts).all(0)
                of_means[name] = float(spread * parts[:, known].mean(1).std()) if known.any() else np.nan
        return Estimates(values, errors, of_means)


class NeuronMoments(_Grouped):
    """Everything about single neurons."""

    names = (
        "a", "b", "ab", "plus_a", "plus_b",
        "aa", "bb", "plus_plus", "gg", "swapped", "swapped_gap", "rescaled", "rescaled_gap", "gb", "g_ab", "ab_b", "ab_ab",
    )  # fmt: skip

    def __init__(self, act: Activation, gauge: Float[Tensor, " d_mlp"], groups: int = GROUPS) -> None:
        """Of neurons with this gate, whose b is multiplied by `gauge` first."""
        super().__init__((len(gauge),), groups)
        self._act, self._gauge = act, gauge

    def update(self, a: Branch, b: Branch, group: int) -> None:
        """Add tokens of sequences that belong to that group; a and b as the model computes them."""
        gauge = self._gauge.to(a)
        sums = torch.zeros(len(self.names), a.shape[1], dtype=a.dtype, device=a.device)
        for start in range(0, len(a), _TOKENS):
            self._block(a[start : start + _TOKENS], b[start : start + _TOKENS] * gauge, sums)
        self._add(group, sums, len(a))

    def _block(self, a: Branch, b: Branch, sums: Tensor) -> None:
        """Add a block of tokens to float32 sums, in the order of `names`."""
        act, scratch = self._act, torch.empty_like(a)
        ab = a * b
        # not in place: a linear gate returns the tensor that it got
        g, swapped, rescaled = act(a) * b, act(b) * a, act(RESCALE * a) * b / RESCALE
        positive_a, positive_b = torch.gt(a, 0, out=torch.empty_like(a)), torch.gt(b, 0, out=torch.empty_like(a))
        swapped_gap, rescaled_gap = g - swapped, g - rescaled
        whole = (a, b, ab, positive_a, positive_b)
        pairs = (
            (a, a), (b, b), (positive_a, positive_b), (g, g), (swapped, swapped), (swapped_gap, swapped_gap),
            (rescaled, rescaled), (rescaled_gap, rescaled_gap), (g, b), (g, ab), (ab, b), (ab, ab),
        )  # fmt: skip
        for row, values in enumerate(whole):
            sums[row] += values.sum(0)
        for row, (left, right) in enumerate(pairs, len(whole)):
            sums[row] += torch.mul(left, right, out=scratch).sum(0)

    def estimates(self) -> Estimates:
        """Measures by name.

        exchange_asymmetry, scaling_asymmetry, linear_share, bilinear_share, residual_share and energy (E[g^2] for b as the
        model computes it) as on Gaussian input; gate_mean, gate_std and gate_active (how often a > 0); branch_correlation
        of a and b; quadrant_* frequencies of their signs.
        """
        scale = np.square(self._gauge.double().numpy())

        def measures(s: dict[str, np.ndarray], n: float) -> dict[str, np.ndarray]:
            mean_a, mean_b = s["a"] / n, s["b"] / n
            variance_a, variance_b = s["aa"] / n - mean_a**2, s["bb"] / n - mean_b**2
            linear = s["gb"] ** 2 / s["bb"] / s["gg"]
            beyond, cross = s["ab_ab"] - s["ab_b"] ** 2 / s["bb"], s["g_ab"] - s["gb"] * s["ab_b"] / s["bb"]
            bilinear = cross**2 / beyond / s["gg"]
            return {
                "exchange_asymmetry": s["swapped_gap"] / 2 / (s["gg"] + s["swapped"]),
                "scaling_asymmetry": s["rescaled_gap"] / 2 / (s["gg"] + s["rescaled"]),
                "linear_share": linear,
                "bilinear_share": bilinear,
                "residual_share": 1 - linear - bilinear,
                "energy": s["gg"] / n / scale,
                "gate_mean": mean_a,
                "gate_std": np.sqrt(np.maximum(variance_a, 0)),
                "gate_active": s["plus_a"] / n,
                "branch_correlation": (s["ab"] / n - mean_a * mean_b) / np.sqrt(variance_a * variance_b),
                "quadrant_plus_plus": s["plus_plus"] / n,
                "quadrant_plus_minus": (s["plus_a"] - s["plus_plus"]) / n,
                "quadrant_minus_plus": (s["plus_b"] - s["plus_plus"]) / n,
                "quadrant_minus_minus": 1 - (s["plus_a"] + s["plus_b"] - s["plus_plus"]) / n,
            }

        return self._estimate(measures)


class OutputMoments(_Grouped):
    """Energies of the layer's output vector, and of what the operations change in it."""

    names = ("plain", "swapped", "swapped_gap", "rescaled", "rescaled_gap")

    def __init__(
        self,
        act: Activation,
        gauge: Float[Tensor, " d_mlp"],
        value: Float[Tensor, "d_mlp d_model"],
        groups: int = GROUPS,
    ) -> None:
        """Of a layer with this gate and these values, as the model has them; b is multiplied by `gauge`, they divided."""
        super().__init__((1,), groups)
        self._act, self._gauge, self._value = act, gauge, value

    def update(self, a: Branch, b: Branch, group: int) -> None:
        """Add tokens of sequences that belong to that group; a and b as the model computes them."""
        gauge, act = self._gauge.to(a), self._act
        b = b * gauge

        def output(coefficients: Branch) -> Tensor:
            return (coefficients / gauge) @ self._value

        plain, swapped = output(act(a) * b), output(act(b) * a)
        rescaled = output(act(RESCALE * a) * b / RESCALE)
        vectors = (plain, swapped, plain - swapped, rescaled, plain - rescaled)
        self._add(group, torch.stack([vector.square().sum() for vector in vectors])[:, None], len(a))

    def estimates(self) -> Estimates:
        """exchange_asymmetry_output and scaling_asymmetry_output."""

        def measures(s: dict[str, np.ndarray], _: float) -> dict[str, np.ndarray]:
            return {
                "exchange_asymmetry_output": s["swapped_gap"] / 2 / (s["plain"] + s["swapped"]),
                "scaling_asymmetry_output": s["rescaled_gap"] / 2 / (s["plain"] + s["rescaled"]),
            }

        return self._estimate(measures)
