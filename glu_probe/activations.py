"""The scalar nonlinearities of gated MLPs, and the facts about them that the theory needs.

A gate `S` matters here through three facts: whether it is linear (then exchange of the branches is a
symmetry), whether it is positively homogeneous (then inverse scaling is one), and what it tends to for
very small and very large arguments (the two ends of the phase diagram).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn import functional

from .errors import BadOption, UnknownActivation


@dataclass(frozen=True)
class Limit:
    """`S(z) ~ coefficient * activation(z)` at one end of the scale; `activation` is homogeneous."""

    activation: str
    coefficient: float = 1.0


@dataclass(frozen=True)
class Activation:
    """A scalar nonlinearity S and what is known of it.

    Attributes:
        name: canonical name, the one used in frames and reports.
        formula: S(z) as text.
        function: S, element-wise on tensors of any shape and floating dtype.
        degree: p where S(c z) = c^p S(z) for every c > 0, else None. Linear is degree 1 and `linear`.
        linear: S(z)/z is constant.
        odd: S(-z) = -S(z).
        small, large: what S tends to for |z| -> 0 and |z| -> infinity; None where S is homogeneous itself.
        aliases: other names of the same function in configs.
        up: what the neuron makes of the up branch where that is not b itself: it computes S(a) up(b) v. The theory
            takes a linear up branch, so measures of the neuron's function are missing then.
        up_formula: up(b) as text.
    """

    name: str
    formula: str
    function: Callable[[Tensor], Tensor]
    degree: float | None = None
    linear: bool = False
    small: Limit | None = None
    large: Limit | None = None
    aliases: tuple[str, ...] = ()
    odd: bool = False
    up: Callable[[Tensor], Tensor] | None = None
    up_formula: str = "b"

    def __call__(self, z: Tensor) -> Tensor:
        """S(z), element-wise."""
        return self.function(z)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Those of the table pickle by name: their lambdas would not, and worker processes need them."""
        known = _BY_NAME.get(self.name) is self
        return (activation, (self.name,)) if known else super().__reduce_ex__(protocol)


def _gelu_tanh(z: Tensor) -> Tensor:
    return functional.gelu(z, approximate="tanh")


_RELU_END = Limit("relu")

ACTIVATIONS: dict[str, Activation] = {
    entry.name: entry
    for entry in (
        Activation(
            "silu", "z sigmoid(z)", functional.silu, small=Limit("linear", 0.5), large=_RELU_END, aliases=("swish",)
        ),
        Activation(
            "gelu",
            "z Phi(z), Phi the normal distribution function",
            functional.gelu,
            small=Limit("linear", 0.5),
            large=_RELU_END,
            aliases=("gelu_python",),
        ),
        Activation(
            "gelu_tanh",
            "z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) / 2",
            _gelu_tanh,
            small=Limit("linear", 0.5),
            large=_RELU_END,
            aliases=("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate"),
        ),
        Activation(
            "quick_gelu",
            "z sigmoid(1.702 z)",
            lambda z: z * torch.sigmoid(1.702 * z),
            small=Limit("linear", 0.5),
            large=_RELU_END,
        ),
        Activation(
            "mish",
            "z tanh(log(1 + exp(z)))",
            functional.mish,
            small=Limit("linear", math.tanh(math.log(2.0))),
            large=_RELU_END,
        ),
        Activation("relu", "max(z, 0)", torch.relu, degree=1.0),
        Activation("relu2", "max(z, 0)^2", lambda z: torch.relu(z).square(), degree=2.0, aliases=("squared_relu",)),
        Activation("linear", "z", lambda z: z, degree=1.0, linear=True, odd=True, aliases=("identity",)),
        Activation(
            "sigmoid",
            "1 / (1 + exp(-z)), the gate of the original GLU",
            torch.sigmoid,
            small=Limit("constant", 0.5),
            large=Limit("step"),
        ),
        Activation("tanh", "tanh(z)", torch.tanh, small=Limit("linear"), large=Limit("sign"), odd=True),
    )
}

# Ends of the scale that no model uses as its gate, but that some gates tend to.
_ENDS: dict[str, Activation] = {
    entry.name: entry
    for entry in (
        Activation("constant", "1", torch.ones_like, degree=0.0),
        Activation("step", "1 for z > 0, else 0", lambda z: (z > 0).to(z.dtype), degree=0.0),
        Activation("sign", "sign(z)", torch.sign, degree=0.0, odd=True),
    )
}

_BY_NAME = {alias: entry for entry in ACTIVATIONS.values() for alias in (entry.name, *entry.aliases)} | _ENDS


def activation(name: str | Activation) -> Activation:
    """The activation of that name, by its canonical name or any of its config names.

    Raises:
        UnknownActivation: the name is not in the table. Nothing is ever substituted for it.

    >>> activation("gelu_pytorch_tanh").name
    'gelu_tanh'
    """
    if isinstance(name, Activation):
        return name
    try:
        return _BY_NAME[name.strip().lower()]
    except (KeyError, AttributeError):
        raise UnknownActivation(
            f"activation {name!r} is not known here",
            hint=f"Known are {', '.join(sorted(ACTIVATIONS))}; name one with `activation=` (`--activation`) "
            "only if it is the function that the model really computes",
        ) from None


# -- gates that single families make of these ----------------------------------------------------


@dataclass(frozen=True)
class _Swish:
    alpha: float

    def __call__(self, z: Tensor) -> Tensor:
        return z * torch.sigmoid(self.alpha * z)


@dataclass(frozen=True)
class _LimitedGate:
    base: Callable[[Tensor], Tensor]
    limit: float
    after: bool

    def __call__(self, z: Tensor) -> Tensor:
        return self.base(z).clamp(max=self.limit) if self.after else self.base(z.clamp(max=self.limit))


@dataclass(frozen=True)
class _LimitedUp:
    limit: float
    offset: float

    def __call__(self, b: Tensor) -> Tensor:
        return b.clamp(-self.limit, self.limit) + self.offset


def swish(alpha: float) -> Activation:
    """z sigmoid(alpha z): silu for 1, quick_gelu for 1.702.

    >>> swish(1.702).name
    'quick_gelu'
    """
    if alpha in (1.0, 1.702):
        return activation("silu" if alpha == 1.0 else "quick_gelu")
    return Activation(
        f"swish({alpha:g})",
        f"z sigmoid({alpha:g} z)",
        _Swish(alpha),
        small=Limit("linear", 0.5),
        large=_RELU_END if alpha > 0 else None,
    )


def limited(
    base: Activation, limit: float, *, after: bool = False, limit_up: bool = True, up_offset: float = 0.0
) -> Activation:
    """A gate whose pre-activation (or, with `after`, whose value) is cut at `limit` from above.

    Args:
        base: S without the limit.
        limit: the largest pre-activation, or value.
        after: whether the value is cut.
        limit_up: whether the up branch is cut at both plus and minus the limit.
        up_offset: what is added to the up branch behind that.

    Raises:
        BadOption: the limit is not a positive number.

    >>> limited(activation("silu"), 7.0).up(torch.tensor([-9.0, 1.0])).tolist()
    [-7.0, 1.0]
    """
    if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit > 0:
        raise BadOption(f"the limit of a gate is {limit!r}", hint="It must be a positive number")
    largest = float(limit) if after else float(base(torch.tensor(float(limit), dtype=torch.float64)))
    cut = f"min(S(z), {limit:g})" if after else f"S(min(z, {limit:g}))"
    up_formula = f"clamp(b, -{limit:g}, {limit:g})" if limit_up else "b"
    up = _LimitedUp(float(limit) if limit_up else math.inf, float(up_offset)) if limit_up or up_offset else None
    return Activation(
        f"{base.name}, at most {limit:g}" if after else f"{base.name} up to {limit:g}",
        f"{cut}, S(z) = {base.formula}",
        _LimitedGate(base, float(limit), after),
        small=base.small,
        large=Limit("step", largest),
        up=up,
        up_formula=f"{up_formula} + {up_offset:g}" if up_offset else up_formula,
    )
