"""What a gated MLP's neurons do on a stream of tokens: sums that are updated token by token, and what follows from them.

Two passes. `GaugeMoments` finds each neuron's canonical gauge, the c for which c b has the root mean square of a and
E[ab] >= 0. `NeuronMoments` and `OutputMoments` then sum, with b in that gauge, everything that the measures are made of.
Memory depends on the number of neurons, not of tokens. All sums are kept apart for a few groups of sequences, and standard
errors are those of the jackknife that leaves out one group at a time: they hold for sequences, whose tokens depend on each
other, and for every measure alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
        for row, product in enumerate(((a, a), (b, b), (a, b))):
            self._sums[row] += _sum(*product)

    def gauge(self) -> Float[Tensor, " d_mlp"]:
        """c by which to multiply b; 1 where a branch is zero throughout."""
        return gauge_of(*self._sums)


def _sum(left: Tensor, right: Tensor) -> Tensor:
    """Sum over tokens of a product, float64."""
    return (left * right).sum(0).double().cpu()


class _Grouped:
    """Named sums, kept apart for groups of sequences."""

    names: tuple[str, ...]

    def __init__(self, width: tuple[int, ...], groups: int) -> None:
        self._sums = torch.zeros(groups, len(self.names), *width, dtype=torch.float64)
        self._tokens = np.zeros(groups)

    def _add(self, group: int, sums: dict[str, Tensor], tokens: int) -> None:
        self._tokens[group] += tokens
        for row, name in enumerate(self.names):
            self._sums[group, row] += sums[name]

    @property
    def tokens(self) -> int:
        """Number of tokens seen."""
        return int(self._tokens.sum())

    def _estimate(
        self, measures: Callable[[dict[str, np.ndarray], float], dict[str, np.ndarray]]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Measures from the sums of all groups, and their jackknife errors; those are missing with fewer than 2 groups."""
        held = np.flatnonzero(self._tokens > 0)
        sums, tokens = self._sums[held].numpy(), self._tokens[held]
        whole, count = sums.sum(0), tokens.sum()

        def named(part: np.ndarray) -> dict[str, np.ndarray]:
            return dict(zip(self.names, part, strict=True))

        with np.errstate(divide="ignore", invalid="ignore"):
            values = measures(named(whole), count)
            if len(held) < 2:
                return values, {name: np.full_like(value, np.nan) for name, value in values.items()}
            without = [measures(named(whole - sums[g]), count - tokens[g]) for g in range(len(held))]
        spread = math.sqrt(len(held) - 1)
        errors = {name: spread * np.std([one[name] for one in without], axis=0) for name in values}
        return values, errors


class NeuronMoments(_Grouped):
    """Everything about single neurons."""

    names = (
        "a", "b", "aa", "bb", "ab", "plus_plus", "plus_minus", "minus_plus",
        "gg", "swapped", "swapped_gap", "rescaled", "rescaled_gap", "gb", "g_ab", "ab_b", "ab_ab",
    )  # fmt: skip

    def __init__(self, act: Activation, gauge: Float[Tensor, " d_mlp"], groups: int = GROUPS) -> None:
        """Of neurons with this gate, whose b is multiplied by `gauge` first."""
        super().__init__((len(gauge),), groups)
        self._act, self._gauge = act, gauge

    def update(self, a: Branch, b: Branch, group: int) -> None:
        """Add tokens of sequences that belong to that group; a and b as the model computes them."""
        gauge = self._gauge.to(a)
        for start in range(0, len(a), _TOKENS):
            self._add(group, self._block(a[start : start + _TOKENS], b[start : start + _TOKENS] * gauge), 0)
        self._tokens[group] += len(a)

    def _block(self, a: Branch, b: Branch) -> dict[str, Tensor]:
        act = self._act
        ab = a * b
        g, swapped, rescaled = act(a) * b, act(b) * a, act(RESCALE * a) * b / RESCALE
        swapped_gap, rescaled_gap = g - swapped, g - rescaled
        positive_a, positive_b = (a > 0).to(a.dtype), (b > 0).to(a.dtype)
        both = _sum(positive_a, positive_b)
        return {
            "a": a.sum(0).double().cpu(),
            "b": b.sum(0).double().cpu(),
            "aa": _sum(a, a),
            "bb": _sum(b, b),
            "ab": ab.sum(0).double().cpu(),
            "plus_plus": both,
            "plus_minus": positive_a.sum(0).double().cpu() - both,
            "minus_plus": positive_b.sum(0).double().cpu() - both,
            "gg": _sum(g, g),
            "swapped": _sum(swapped, swapped),
            "swapped_gap": _sum(swapped_gap, swapped_gap),
            "rescaled": _sum(rescaled, rescaled),
            "rescaled_gap": _sum(rescaled_gap, rescaled_gap),
            "gb": _sum(g, b),
            "g_ab": _sum(g, ab),
            "ab_b": _sum(ab, b),
            "ab_ab": _sum(ab, ab),
        }

    def estimates(self) -> tuple[dict[str, PerNeuron], dict[str, PerNeuron]]:
        """Measures by name, and their standard errors: [d_mlp] float64 each.

        exchange_asymmetry, scaling_asymmetry, linear_share, bilinear_share, residual_share and energy (E[g^2] for b as the
        model computes it) as on Gaussian input; gate_mean, gate_std and gate_active (how often a > 0); branch_correlation
        of a and b; quadrant_* frequencies of their signs. Missing where the neuron never does anything.
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
                "gate_active": (s["plus_plus"] + s["plus_minus"]) / n,
                "branch_correlation": (s["ab"] / n - mean_a * mean_b) / np.sqrt(variance_a * variance_b),
                "quadrant_plus_plus": s["plus_plus"] / n,
                "quadrant_plus_minus": s["plus_minus"] / n,
                "quadrant_minus_plus": s["minus_plus"] / n,
                "quadrant_minus_minus": 1 - (s["plus_plus"] + s["plus_minus"] + s["minus_plus"]) / n,
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
        super().__init__((), groups)
        self._act, self._gauge, self._value = act, gauge, value

    def update(self, a: Branch, b: Branch, group: int) -> None:
        """Add tokens of sequences that belong to that group; a and b as the model computes them."""
        gauge, act = self._gauge.to(a), self._act
        b = b * gauge

        def output(coefficients: Branch) -> Tensor:
            return (coefficients / gauge) @ self._value

        plain = output(act(a) * b)
        sums = {"plain": plain.square().sum().double().cpu()}
        for name, coefficients in (("swapped", act(b) * a), ("rescaled", act(RESCALE * a) * b / RESCALE)):
            changed = output(coefficients)
            sums[name] = changed.square().sum().double().cpu()
            sums[f"{name}_gap"] = (plain - changed).square().sum().double().cpu()
        self._add(group, sums, len(a))

    def estimates(self) -> tuple[dict[str, float], dict[str, float]]:
        """exchange_asymmetry_output and scaling_asymmetry_output, and their standard errors."""

        def measures(s: dict[str, np.ndarray], _: float) -> dict[str, np.ndarray]:
            return {
                "exchange_asymmetry_output": s["swapped_gap"] / 2 / (s["plain"] + s["swapped"]),
                "scaling_asymmetry_output": s["rescaled_gap"] / 2 / (s["plain"] + s["rescaled"]),
            }

        values, errors = self._estimate(measures)
        return {n: float(v) for n, v in values.items()}, {n: float(v) for n, v in errors.items()}
