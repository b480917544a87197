"""A gated MLP as its neurons: rank-1 query, key and value factors, and the operations on them.

With x the MLP's input, neuron j computes S(a_j) b_j v_j, where a_j = q_j.x + query_bias_j and
b_j = k_j.x + key_bias_j; single families put a function of b_j in its place. Everything is neuron-major: row j of query, key and value is neuron j, whatever
the layout of the file was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from .activations import Activation, activation
from .errors import BadOption, ShapeMismatch, UnknownActivation
from .layer_rows import Fold, HeldRows, LayerRows, Read, Role

Gauge = Literal["canonical", "raw"]
Factor = Float[Tensor, "d_mlp d_model"]
PerNeuron = Float[Tensor, " d_mlp"]


@dataclass(frozen=True, eq=False, repr=False)
class GatedLayer(LayerRows):
    """The factors of one gated MLP.

    Attributes:
        query, key, value: gate rows, up rows and down columns, [d_mlp, d_model], float32 or wider.
        activation: the gate's nonlinearity S, or its name; None where it is not known.
        layer, expert, tower: where in the model it stands. `expert` is the routed index, "shared" ("shared.0" where
            there are several), the block's name where a layer has several dense MLPs, or None.
        query_bias, key_bias: [d_mlp] constants of a and b, or None.
        output_bias: [d_model], added to the MLP's output, or None.
        scale_note: None where x has a known scale (it leaves a norm that is folded in, or whose gain is left
            out on purpose); else the reason why measures that depend on |q| are missing.
        sources: role ("gate", "up", "down", "norm", ...) to the name of the tensor it was read from.
        norm: how the norm in front was folded, in words, for reports.
    """

    query: Factor
    key: Factor
    value: Factor
    activation: Activation | None
    layer: int = 0
    expert: int | str | None = None
    tower: str = "text"
    query_bias: PerNeuron | None = None
    key_bias: PerNeuron | None = None
    output_bias: Float[Tensor, " d_model"] | None = None
    scale_note: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    norm: str = "none"

    def __post_init__(self) -> None:
        where = f"layer {self.layer}"
        parts = ("query", "key", "value", "query_bias", "key_bias", "output_bias")
        for name in parts:
            part = getattr(self, name)
            if not isinstance(part, Tensor) and (part is not None or name in parts[:3]):
                raise BadOption(
                    f"{name} is {type(part).__name__}", where=where, hint="Give a tensor: torch.as_tensor(...)"
                )
        shape = self.query.shape
        if len(shape) != 2 or 0 in shape or self.key.shape != shape or self.value.shape != shape:
            raise ShapeMismatch(
                "query, key and value must all be [d_mlp, d_model], found "
                f"{list(shape)}, {list(self.key.shape)}, {list(self.value.shape)}",
                where=where,
                hint="Row i of each is neuron i: transpose what is stored the other way round",
            )
        biases = {"query_bias": shape[0], "key_bias": shape[0], "output_bias": shape[1]}
        for name, size in biases.items():
            bias = getattr(self, name)
            if bias is not None and bias.shape != (size,):
                raise ShapeMismatch(
                    f"{name} must be [{size}], found {list(bias.shape)}",
                    where=where,
                    hint="query_bias and key_bias have an entry per neuron, output_bias one per direction of the residual stream",
                )
        dtypes = {self.query.dtype, self.key.dtype, self.value.dtype}
        if len(dtypes) > 1 or dtypes.pop() not in (torch.float32, torch.float64):
            raise BadOption(
                "query, key and value must all be float32 or all float64", where=where,
                hint="Half precision is for storage: widen the factors with .float()",
            )  # fmt: skip
        if isinstance(self.activation, str):
            object.__setattr__(self, "activation", activation(self.activation))

    def __repr__(self) -> str:
        act = self.activation.name if self.activation else "activation unknown"
        expert = "" if self.expert is None else f", expert {self.expert}"
        return f"GatedLayer({self.tower} layer {self.layer}{expert}: {act}, d_model {self.d_model}, d_mlp {self.d_mlp})"

    @property
    def d_mlp(self) -> int:
        """Number of neurons."""
        return self.query.shape[0]

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.query.shape[1]

    def rows(self, role: Role, which: slice | Tensor) -> Float[Tensor, "rows d_model"]:
        """Some rows of a factor."""
        return getattr(self, role)[which]

    def unfolded(self, role: Role) -> tuple[Read, Fold]:
        """A factor itself: the norm is folded in."""
        return HeldRows(getattr(self, role)), Fold()

    def detach(self) -> GatedLayer:
        """The same layer without gradients, sharing its memory."""
        names = ("query", "key", "value", "query_bias", "key_bias", "output_bias")
        tensors: dict[str, Any] = {name: getattr(self, name) for name in names}
        detached: dict[str, Any] = {name: each if each is None else each.detach() for name, each in tensors.items()}
        return replace(self, **detached)

    def preactivations(
        self, x: Float[Tensor, "*batch d_model"]
    ) -> tuple[Float[Tensor, "*batch d_mlp"], Float[Tensor, "*batch d_mlp"]]:
        """(a, b): the gate's and the up branch's pre-activations.

        Raises:
            ShapeMismatch: x is not d_model wide.
        """
        if x.shape[-1:] != (self.d_model,):
            raise ShapeMismatch(
                f"x is {list(x.shape)}, expected [..., {self.d_model}]",
                where=f"layer {self.layer}",
                hint="The last axis of x is the residual stream",
            )
        a = einsum(x, self.query, "... d_model, d_mlp d_model -> ... d_mlp")
        b = einsum(x, self.key, "... d_model, d_mlp d_model -> ... d_mlp")
        a = a if self.query_bias is None else a + self.query_bias
        return a, b if self.key_bias is None else b + self.key_bias

    def coefficients(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_mlp"]:
        """g = S(a) b, what each neuron multiplies its value with; S(a) up(b) where the activation has an `up`."""
        a, b = self.preactivations(x)
        act = self.known_activation()
        return act(a) * (b if act.up is None else act.up(b))

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The MLP's output.

        Args:
            x: with the norm folded in, the normalised stream before the norm's gain (h / rms(h) for RMSNorm,
                (h - mean(h)) / std(h) for LayerNorm); without folding, the MLP module's own input.
        """
        out = einsum(self.coefficients(x), self.value, "... d_mlp, d_mlp d_model -> ... d_model")
        return out if self.output_bias is None else out + self.output_bias

    # -- gauge: the same function in other coordinates ------------------------------------------

    def regauge(self, c: PerNeuron) -> GatedLayer:
        """The same function with (k, v) -> (c k, v / c), c of either sign; b and its bias scale with c.

        Raises:
            BadOption: the neurons are not linear in b, so that this would be another function.
        """
        if self.activation is not None and self.activation.up is not None and bool((c != 1).any()):
            raise BadOption(
                f"key and value cannot be rescaled against each other: b acts as {self.activation.up_formula}",
                where=f"layer {self.layer}",
                hint="Such an up branch is not linear: rescale a layer whose activation leaves it as it is",
            )
        return replace(
            self,
            key=self.key * c[:, None],
            value=self.value / c[:, None],
            key_bias=None if self.key_bias is None else self.key_bias * c,
        )

    def canonical_gauge(self, x: Float[Tensor, "*batch d_model"] | None = None) -> PerNeuron:
        """The c for which b = c k.x has the root mean square of a = q.x, and E[ab] >= 0.

        Args:
            x: the sample the expectations are over; None for isotropic input of unit variance, for which they
                follow from norms and cosines.

        Returns:
            [d_mlp], 1 where a branch is zero and no gauge exists, and for neurons that are not linear in b.
        """
        if self.activation is not None and self.activation.up is not None:
            return torch.ones(self.d_mlp, dtype=self.query.dtype, device=self.query.device)
        if x is None:
            square_a = self.query.double().square().sum(1)
            square_b = self.key.double().square().sum(1)
            product = (self.query.double() * self.key.double()).sum(1)
            mean_a = 0.0 if self.query_bias is None else self.query_bias.double()
            mean_b = 0.0 if self.key_bias is None else self.key_bias.double()
            square_a, square_b = square_a + mean_a * mean_a, square_b + mean_b * mean_b
            product = product + mean_a * mean_b
        else:
            a, b = (part.double().reshape(-1, self.d_mlp) for part in self.preactivations(x))
            square_a, square_b, product = a.square().mean(0), b.square().mean(0), (a * b).mean(0)
        return gauge_of(square_a, square_b, product).to(self.query.dtype)

    def canonical(self, x: Float[Tensor, "*batch d_model"] | None = None) -> GatedLayer:
        """The same function in the canonical gauge of isotropic input, or of the sample `x`."""
        return self.regauge(self.canonical_gauge(x))

    # -- the two operations whose effect is what this project measures ---------------------------

    def exchange(self, gauge: Gauge = "canonical", x: Float[Tensor, "*batch d_model"] | None = None) -> GatedLayer:
        """The layer with gate and up branch exchanged: S(b) a in place of S(a) b (S(b) up(a) where there is an `up`).

        In the canonical gauge this is an operation on the function. In the "raw" gauge it depends on the
        accidental scale and sign of each key row; it is there for comparison with naive swaps.
        """
        if gauge not in ("canonical", "raw"):
            raise BadOption(f"gauge is {gauge!r}", hint='Use "canonical" or "raw"')
        layer = self.canonical(x) if gauge == "canonical" else self
        return replace(
            layer,
            query=layer.key,
            key=layer.query,
            query_bias=layer.key_bias,
            key_bias=layer.query_bias,
        )

    def rescale(self, c: float) -> GatedLayer:
        """The layer with (q, k) -> (c q, k / c), biases alike: S(c a) b / c in place of S(a) b."""
        if not isinstance(c, (int, float)) or not math.isfinite(c) or not c:
            raise BadOption(f"c is {c!r}", hint="Inverse scaling needs a finite number that is not 0")
        return replace(
            self,
            query=self.query * c,
            key=self.key / c,
            query_bias=None if self.query_bias is None else self.query_bias * c,
            key_bias=None if self.key_bias is None else self.key_bias / c,
        )

    def known_activation(self) -> Activation:
        """The activation.

        Raises:
            UnknownActivation: it is not known.
        """
        if self.activation is None:
            raise UnknownActivation(
                "the activation of this layer is not known",
                where=f"layer {self.layer}",
                hint="Open the checkpoint with `activation=` (`--activation`)",
            )
        return self.activation


def gauge_of(square_a: PerNeuron, square_b: PerNeuron, product: PerNeuron) -> PerNeuron:
    """The canonical c from E[a^2], E[b^2] and E[ab]: 1 in size where a branch is zero, positive where E[ab] is 0."""
    c = (square_a / square_b).sqrt()
    c = torch.where(torch.isfinite(c) & (c > 0), c, 1.0)
    return torch.where(product < 0, -c, c)
