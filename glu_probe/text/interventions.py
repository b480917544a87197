"""What a causal test puts in the place of a neuron's coefficient S(a) b.

All are functions of the pre-activations a and b of one MLP, fitted on calibration text where they have something to fit. b is
taken in the canonical gauge of that text, except by the raw exchange, which is there to show what the gauge is worth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..activations import Activation
from .moments import GaugeMoments

Branch = Float[Tensor, "... d_mlp"]
PerNeuron = Float[Tensor, " d_mlp"]


@dataclass(frozen=True)
class Fitted:
    """What the calibration text said of one MLP.

    Attributes:
        activation: the gate.
        gauge: c of the canonical gauge, b -> c b.
        linear, product: the least-squares fit (linear + product a) b of S(a) b, b canonical.
        symmetric: the factor of the least-squares fit symmetric S(a b), b canonical.
        mean: mean of S(a) b, b canonical.
    """

    activation: Activation
    gauge: PerNeuron
    linear: PerNeuron
    product: PerNeuron
    symmetric: PerNeuron
    mean: PerNeuron


class Calibration:
    """Sums over calibration tokens, in two passes: first the gauge, then the fits in it."""

    def __init__(self, act: Activation, d_mlp: int) -> None:
        self._act, self._moments = act, GaugeMoments(d_mlp)
        self._gauge: PerNeuron | None = None
        self._sums = torch.zeros(8, d_mlp, dtype=torch.float64)
        self._count = 0

    def first(self, a: Branch, b: Branch) -> None:
        """Tokens [token, d_mlp] of the first pass."""
        self._moments.update(a, b)

    def second(self, a: Branch, b: Branch) -> None:
        """The same tokens again."""
        if self._gauge is None:
            self._gauge = self._moments.gauge()
        b = b * self._gauge.to(b)
        g, ab = self._act(a) * b, a * b
        s = self._act(ab)
        pairs = ((b, b), (ab, b), (ab, ab), (g, b), (g, ab), (s, s), (g, s))
        for row, (left, right) in enumerate(pairs):
            self._sums[row] += (left * right).sum(0).double().cpu()
        self._sums[7] += g.sum(0).double().cpu()
        self._count += len(a)

    def fitted(self) -> Fitted:
        """The fits; where a neuron never did anything its coefficients are 0."""
        assert self._gauge is not None  # of the second pass
        bb, ab_b, ab_ab, gb, g_ab, ss, gs, total = self._sums
        determinant = bb * ab_ab - ab_b * ab_b
        regular = determinant > 1e-12 * bb * ab_ab
        safe = torch.where(regular, determinant, 1.0)
        linear = torch.where(regular, (gb * ab_ab - g_ab * ab_b) / safe, torch.where(bb > 0, gb / bb, 0.0))
        product = torch.where(regular, (g_ab * bb - gb * ab_b) / safe, 0.0)
        symmetric = torch.where(ss > 0, gs / torch.where(ss > 0, ss, 1.0), 0.0)
        return Fitted(self._act, self._gauge, linear, product, symmetric, total / max(self._count, 1))


# From a, canonical b and the fits to the new coefficient, in the canonical gauge.
Rule = Callable[[Branch, Branch, Fitted], Branch]


def _own(a: Branch, b: Branch, fitted: Fitted) -> Branch:
    return fitted.activation(a) * b


def _exchanged(a: Branch, b: Branch, fitted: Fitted) -> Branch:
    return fitted.activation(b) * a


def _exchanged_raw(a: Branch, b: Branch, fitted: Fitted) -> Branch:
    gauge = fitted.gauge.to(b)
    return fitted.activation(b / gauge) * a * gauge


def _rescaled(c: float) -> Rule:
    return lambda a, b, fitted: fitted.activation(c * a) * b / c


def _bilinear(a: Branch, b: Branch, fitted: Fitted) -> Branch:
    return (fitted.linear.to(a) + fitted.product.to(a) * a) * b


def _symmetric(a: Branch, b: Branch, fitted: Fitted) -> Branch:
    return fitted.symmetric.to(a) * fitted.activation(a * b)


def _mean(a: Branch, b: Branch, fitted: Fitted) -> Branch:
    return fitted.mean.to(a).expand_as(a)


def _zero(a: Branch, b: Branch, fitted: Fitted) -> Branch:
    return torch.zeros_like(a)


@dataclass(frozen=True)
class Intervention:
    """One of them.

    Attributes:
        rule: the coefficient to go to.
        gauge: the one it works in, "canonical" (of the calibration text) or "raw".
        meaning: in words.
        way: how much of the way to go, from S(a) b on; so the symmetrised change is half the exchange to the last bit.
    """

    rule: Rule
    gauge: str
    meaning: str
    way: float = 1.0


INTERVENTIONS: dict[str, Intervention] = {
    "identity": Intervention(_own, "canonical", "nothing changes: must cost exactly 0"),
    "exchange": Intervention(_exchanged, "canonical", "S(b) a: gate and up change places"),
    "exchange_raw": Intervention(_exchanged_raw, "raw", "the same on the rows as they are written"),
    "rescale_half": Intervention(_rescaled(0.5), "canonical", "2 S(a / 2) b"),
    "rescale_double": Intervention(_rescaled(2.0), "canonical", "S(2 a) b / 2"),
    "symmetrised": Intervention(
        _exchanged, "canonical", "(S(a) b + S(b) a) / 2: the part that exchange leaves alone", way=0.5
    ),
    "bilinear_fit": Intervention(_bilinear, "canonical", "(c0 + c1 a) b, fitted on other text"),
    "symmetric_fit": Intervention(_symmetric, "canonical", "c S(a b), fitted on other text"),
    "mean_ablation": Intervention(_mean, "canonical", "the mean of S(a) b on other text"),
    "zero_ablation": Intervention(_zero, "canonical", "0"),
}


def change(name: str, a: Branch, b: Branch, fitted: Fitted) -> Branch:
    """New coefficient less the old one, for a and b as the model computes them; exactly 0 for identity."""
    one, gauge = INTERVENTIONS[name], fitted.gauge.to(b)
    canonical = b * gauge
    return (one.rule(a, canonical, fitted) - _own(a, canonical, fitted)).mul_(one.way / gauge)
