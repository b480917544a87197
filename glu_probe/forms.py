"""The formulations of an MLP that the theory compares, as torch modules.

Each sums values v_j with a coefficient; they differ in where the coefficient comes from (x is a row, s a scalar
nonlinearity; formulas as in N. Breslow, arXiv 2606.22172):

    StandardMLP            s(k_j.x)                      static keys, the query is x itself
    GlobalQueryMLP         s(k_j.(xQ))                   one dynamic query for all neurons: nothing gained
    BilinearAttentionMLP   s(x Q_j K_j^T x^T)            query and key of rank r per neuron; r = d_model: the full form
    RankOneBilinearMLP     s((q_j.x)(k_j.x))             r = 1: exchange of q and k, and scaling, are exact symmetries
    GatedMLP               s(q_j.x) (k_j.x)              what SwiGLU, GeGLU and ReGLU models use: s on one branch

Everything is neuron-major: the first axis of every factor except the global query is d_mlp. The modules are
differentiable, take any leading batch axes, and follow `.to(dtype, device)`. `device="meta"` builds one without memory,
to read off what it would cost. `conversions` has the exact equivalences, `symmetries` the operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from .activations import Activation, activation
from .errors import BadOption, ShapeMismatch

if TYPE_CHECKING:
    from typing_extensions import Self

Batch = Float[Tensor, "*batch d_model"]


class MLPForm(nn.Module):
    """What the forms share: named factors and biases, their shapes, and counting.

    Attributes:
        axes: of every factor and bias that the form can have, by name; biases are absent unless asked for.
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]]
    key: Tensor
    value: Tensor
    output_bias: Tensor | None

    def __init__(
        self,
        d_model: int,
        d_mlp: int,
        activation: Activation | str,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """A randomly initialised form.

        Args:
            d_model: width of input and output.
            d_mlp: number of neurons.
            activation: s, or its name.
            bias: give every branch and the output a bias (zero at first).
            device, dtype: of the parameters.

        Raises:
            BadOption: a size that is not a whole number of at least 1, or an activation with a function of the up branch.
            UnknownActivation.
        """
        super().__init__()
        self._build({"d_model": d_model, "d_mlp": d_mlp}, activation, bias, device, dtype)

    def _build(
        self,
        sizes: Mapping[str, int],
        act: Activation | str,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise BadOption(f"{name} is {size!r}", hint="Give a whole number of at least 1")
        self.sizes = dict(sizes)
        self.activation = activation(act)
        if self.activation.up is not None:
            raise BadOption(
                f"{self.activation.name} makes {self.activation.up_formula} of the up branch",
                hint="The forms take one scalar nonlinearity; `GatedLayer.forward` computes such neurons",
            )
        for name, axes in self.axes.items():
            if name.endswith("_bias") and not bias:
                self.register_parameter(name, None)
            else:
                shape = tuple(sizes[axis] for axis in axes)
                self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    @classmethod
    def from_factors(cls, activation: Activation | str, **factors: Tensor | None) -> Self:
        """The form with these factors, copied; biases may be left out.

        Raises:
            ShapeMismatch: factors whose shapes do not go together, or one that the form does not have or lacks.
            BadOption: factors of several dtypes or devices, or not of floating point.
        """
        given = {name: tensor for name, tensor in factors.items() if tensor is not None}
        needed = {name for name in cls.axes if not name.endswith("_bias")}
        if not needed <= {*given} <= {*cls.axes}:
            raise ShapeMismatch(
                f"{cls.__name__} has {', '.join(cls.axes)}, found {', '.join(given) or 'nothing'}",
                hint="Give these factors by name, those that end in _bias if there are any",
            )
        sizes: dict[str, Any] = {}
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor):
                raise BadOption(
                    f"{name} is {type(tensor).__name__}", where=cls.__name__, hint="Give a tensor: torch.as_tensor(...)"
                )
            axes = cls.axes[name]
            shape = tuple(tensor.shape)
            if len(shape) != len(axes) or any(
                sizes.setdefault(axis, size) != size for axis, size in zip(axes, shape, strict=True)
            ):
                raise ShapeMismatch(
                    f"{name} must be [{', '.join(axes)}], found {list(shape)}"
                    + "".join(f"; {axis} is {sizes[axis]}" for axis in dict.fromkeys(axes) if axis in sizes),
                    where=cls.__name__,
                    hint="Transpose or cut it so that all factors have the same sizes",
                )
        example = given["value"]
        if len({(tensor.dtype, tensor.device) for tensor in given.values()}) > 1 or not example.is_floating_point():
            raise BadOption(
                f"{cls.__name__} needs factors of one floating dtype on one device, found "
                + ", ".join(f"{name} {tensor.dtype} on {tensor.device}" for name, tensor in given.items()),
                hint="Convert them with .to(dtype=..., device=...)",
            )
        form = cls(**sizes, activation=activation, device="meta", dtype=example.dtype)
        for name in cls.axes:
            own = given.get(name)
            form.register_parameter(name, None if own is None else nn.Parameter(own.detach().clone()))
        return form

    @property
    def factors(self) -> dict[str, Tensor]:
        """Factors and biases that are there, by name."""
        return {name: getattr(self, name) for name in self.axes if getattr(self, name) is not None}

    def with_factors(self, **changes: Tensor) -> Self:
        """The same form and activation with some factors replaced; all are copied."""
        return type(self).from_factors(self.activation, **(self.factors | changes))

    @property
    def d_model(self) -> int:
        """Width of input and output."""
        return self.sizes["d_model"]

    @property
    def d_mlp(self) -> int:
        """Number of neurons."""
        return self.sizes["d_mlp"]

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(tensor.numel() for tensor in self.factors.values())

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of one forward pass for one token.

        A multiplication and an addition count one each, an evaluation of the activation one.
        """
        biases = sum(tensor.numel() for name, tensor in self.factors.items() if name.endswith("_bias"))
        return self._flops() + biases + 2 * self.d_mlp * self.d_model

    def _flops(self) -> int:
        """Up to the coefficients, without biases."""
        raise NotImplementedError

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the factors and set the biases to 0.

        On input of unit variance, what s acts on and what it multiplies then have unit variance, for every rank.
        """
        for name, parameter in self.factors.items():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=self._std(name), generator=generator)

    def _std(self, name: str) -> float:
        return (self.d_mlp if name == "value" else self.d_model) ** -0.5

    def coefficients(self, x: Batch) -> Float[Tensor, "*batch d_mlp"]:
        """What each neuron multiplies its value with."""
        raise NotImplementedError

    def forward(self, x: Batch) -> Batch:
        """The MLP's output.

        Raises:
            ShapeMismatch: x is not d_model wide.
        """
        if x.shape[-1:] != (self.d_model,):
            raise ShapeMismatch(
                f"x is {list(x.shape)}, expected [..., {self.d_model}]",
                where=type(self).__name__,
                hint="The last axis of x is the input's direction",
            )
        out = einsum(self.coefficients(x), self.value, "... d_mlp, d_mlp d_model -> ... d_model")
        return out if self.output_bias is None else out + self.output_bias

    def extra_repr(self) -> str:
        """Sizes and activation, for print()."""
        return ", ".join(f"{name}={size}" for name, size in self.sizes.items()) + f", activation={self.activation.name}"


def _branch(x: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    out = einsum(x, rows, "... d_model, d_mlp d_model -> ... d_mlp")
    return out if bias is None else out + bias


_NEURON, _ROW, _OUT = ("d_mlp",), ("d_mlp", "d_model"), ("d_model",)


class StandardMLP(MLPForm):
    """s(x K^T) V: a key-value memory whose keys do not depend on x.

    key, value: [d_mlp, d_model]; key_bias: [d_mlp]; output_bias: [d_model].
    """

    axes: ClassVar = {"key": _ROW, "value": _ROW, "key_bias": _NEURON, "output_bias": _OUT}
    key_bias: Tensor | None

    def _flops(self) -> int:
        return 2 * self.d_mlp * self.d_model + self.d_mlp

    def coefficients(self, x: Batch) -> Float[Tensor, "*batch d_mlp"]:
        """s(k_j.x)."""
        return self.activation(_branch(x, self.key, self.key_bias))


class GlobalQueryMLP(MLPForm):
    """s((x Q) K^T) V: one query, made from x, that all neurons share.

    query: [d_model, d_query], d_query = d_model; key, value: [d_mlp, d_model]; biases as in `StandardMLP`.
    """

    axes: ClassVar = {"query": ("d_model", "d_model"), **StandardMLP.axes}
    query: Tensor
    key_bias: Tensor | None

    def _flops(self) -> int:
        return 2 * self.d_model**2 + 2 * self.d_mlp * self.d_model + self.d_mlp

    def coefficients(self, x: Batch) -> Float[Tensor, "*batch d_mlp"]:
        """s(k_j.(xQ))."""
        query = einsum(x, self.query, "... d_model, d_model d_query -> ... d_query")
        return self.activation(_branch(query, self.key, self.key_bias))


class BilinearAttentionMLP(MLPForm):
    """s(x Q_j K_j^T x^T) v_j, summed over j: every neuron attends from x to x through its own rank-r form.

    query, key: [d_mlp, d_model, rank]; value: [d_mlp, d_model]; query_bias, key_bias: [d_mlp, rank], added to x Q_j and
    x K_j; output_bias: [d_model]. Symmetries: exchange of Q_j and K_j, and (Q_j M, K_j M^-T) for every invertible
    M [rank, rank], of which scaling is a part.
    """

    axes: ClassVar = {
        "query": (*_ROW, "rank"),
        "key": (*_ROW, "rank"),
        "value": _ROW,
        "query_bias": (*_NEURON, "rank"),
        "key_bias": (*_NEURON, "rank"),
        "output_bias": _OUT,
    }
    query: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None

    def __init__(
        self,
        d_model: int,
        d_mlp: int,
        activation: Activation | str,
        *,
        rank: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """As `MLPForm`, with the rank of every neuron's form; rank = d_model is the full one."""
        nn.Module.__init__(self)
        self._build({"d_model": d_model, "d_mlp": d_mlp, "rank": rank}, activation, bias, device, dtype)

    @property
    def rank(self) -> int:
        """Width r of every neuron's query and key."""
        return self.sizes["rank"]

    def _std(self, name: str) -> float:
        # so that the sum of `rank` products has unit variance
        return super()._std(name) * (1.0 if name == "value" else self.rank**-0.25)

    def _flops(self) -> int:
        return 4 * self.d_mlp * self.d_model * self.rank + (2 * self.rank - 1) * self.d_mlp + self.d_mlp

    def logits(self, x: Batch) -> Float[Tensor, "*batch d_mlp"]:
        """x Q_j K_j^T x^T, before the nonlinearity."""
        branches = []
        for factor, bias in ((self.query, self.query_bias), (self.key, self.key_bias)):
            branch = einsum(x, factor, "... d_model, d_mlp d_model rank -> ... d_mlp rank")
            branches.append(branch if bias is None else branch + bias)
        return einsum(branches[0], branches[1], "... rank, ... rank -> ...")

    def coefficients(self, x: Batch) -> Float[Tensor, "*batch d_mlp"]:
        """s(x Q_j K_j^T x^T)."""
        return self.activation(self.logits(x))


class RankOneBilinearMLP(MLPForm):
    """s((x Q^T) * (x K^T)) V: the nonlinearity outside the product, so that both branches play the same part.

    query, key, value: [d_mlp, d_model]; query_bias, key_bias: [d_mlp]; output_bias: [d_model].
    """

    axes: ClassVar = {
        "query": _ROW,
        "key": _ROW,
        "value": _ROW,
        "query_bias": _NEURON,
        "key_bias": _NEURON,
        "output_bias": _OUT,
    }
    query: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None

    def _flops(self) -> int:
        return 4 * self.d_mlp * self.d_model + 2 * self.d_mlp

    def coefficients(self, x: Batch) -> Float[Tensor, "*batch d_mlp"]:
        """s((q_j.x)(k_j.x))."""
        return self.activation(_branch(x, self.query, self.query_bias) * _branch(x, self.key, self.key_bias))


class GatedMLP(MLPForm):
    """(s(x Q^T) * (x K^T)) V: the nonlinearity on one branch, which breaks the symmetry between them.

    query (gate), key (up), value (down): [d_mlp, d_model]; biases as in `RankOneBilinearMLP`.
    """

    axes: ClassVar = RankOneBilinearMLP.axes
    query: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None

    def _flops(self) -> int:
        return 4 * self.d_mlp * self.d_model + 2 * self.d_mlp

    def coefficients(self, x: Batch) -> Float[Tensor, "*batch d_mlp"]:
        """s(q_j.x) (k_j.x)."""
        return self.activation(_branch(x, self.query, self.query_bias)) * _branch(x, self.key, self.key_bias)


FORMS: tuple[type[MLPForm], ...] = (
    StandardMLP,
    GlobalQueryMLP,
    BilinearAttentionMLP,
    RankOneBilinearMLP,
    GatedMLP,
)
