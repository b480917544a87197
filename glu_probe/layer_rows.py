"""What every measure sees of a gated MLP: facts about it, and the rows of its factors, a few at a time.

A `GatedLayer` has its factors in memory. Those of a file may be too large for that, and are then made of what is stored
a block of neurons at a time (`checkpoint.stored.StoredLayer`). Measures ask for rows and see no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from .activations import Activation

Role = Literal["query", "key", "value"]
ROLES: tuple[Role, ...] = ("query", "key", "value")
# Neurons of a block: three of its factors in float32 stay within the last cache of a core's neighbourhood, and no sum
# over blocks depends on how much memory there is.
BLOCK = 256

PerNeuron = Float[Tensor, " d_mlp"]
Rows = Float[Tensor, "rows d_model"]
Factors = tuple[Rows, Rows, Rows]
# Rows of a matrix by range or number.
Read = Callable[[slice | Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class HeldRows:
    """Rows of a matrix in memory, [d_mlp, d_model]."""

    matrix: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.matrix.nbytes

    def __call__(self, which: slice | Tensor) -> Tensor:
        """Some of them."""
        return self.matrix[which]


@dataclass(frozen=True, eq=False)
class Fold:
    """What a stored matrix is multiplied with from the right to be a factor: constant W diag(gain), centred or not.

    Attributes:
        gain: [d_model], or None for ones.
        centred: what a row has along the ones direction is taken away.
        constant: what all of it is multiplied with.
    """

    gain: Float[Tensor, " d_model"] | None = None
    centred: bool = False
    constant: float = 1.0

    def inward(self, vectors: Float[Tensor, "d_model count"]) -> Float[Tensor, "d_model count"]:
        """What W is to be applied to in place of the factor to the vectors."""
        return self._scaled(self._centred(vectors))

    def outward(self, vectors: Float[Tensor, "d_model count"]) -> Float[Tensor, "d_model count"]:
        """The factor's transpose applied to what W's transpose gives."""
        return self._centred(self._scaled(vectors))

    def _scaled(self, vectors: Tensor) -> Tensor:
        if self.constant != 1.0:
            vectors = vectors * self.constant
        return vectors if self.gain is None else vectors * self.gain.to(vectors.dtype)[:, None]

    def _centred(self, vectors: Tensor) -> Tensor:
        return vectors - vectors.mean(0) if self.centred else vectors


class Sizes(Protocol):
    """Whatever has the sizes of an MLP."""

    @property
    def d_mlp(self) -> int:
        """Number of neurons."""
        ...

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        ...


class Sampled(Sizes, Protocol):
    """What also belongs to a group: "dense", "routed" or "shared"."""

    @property
    def group(self) -> str:
        """The group."""
        ...


class LayerRows:
    """One gated MLP, whatever its factors are made of; for the attributes see `neurons.GatedLayer`."""

    activation: Activation | None
    layer: int
    expert: int | str | None
    tower: str
    query_bias: PerNeuron | None
    key_bias: PerNeuron | None
    scale_note: str | None

    @property
    def d_mlp(self) -> int:
        """Number of neurons."""
        raise NotImplementedError

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        raise NotImplementedError

    def rows(self, role: Role, which: slice | Tensor) -> Rows:
        """Some rows of a factor, float32 or wider; not to be written to."""
        raise NotImplementedError

    def unfolded(self, role: Role) -> tuple[Read, Fold]:
        """A factor as rows in the dtype they are kept in, and what is to be done with them to make them the factor's.

        For who applies a factor to vectors: there are fewer of those than of rows. The rows are `HeldRows` where all of
        them are in memory.
        """
        raise NotImplementedError

    def detach(self) -> LayerRows:
        """The same layer without gradients."""
        return self

    @property
    def group(self) -> str:
        """Kind of MLP this is: "dense", "routed" or "shared"."""
        return expert_group(self.expert)

    def functional_note(self) -> str | None:
        """Why measures of the neuron's function are missing, or None where they are defined."""
        if self.activation is None:
            return "the activation is not known"
        if self.activation.up is not None:
            return (
                f"the up branch acts as {self.activation.up_formula}, and the theory is that of neurons linear in it"
                + (f"; {self.scale_note}" if self.scale_note else "")
            )
        return self.scale_note

    def blocks(self, step: int = BLOCK) -> Iterator[tuple[slice, Factors]]:
        """All neurons in order, block by block, with the rows of their three factors."""
        for block, make in self.read_blocks(step):
            yield block, make()

    def read_blocks(self, step: int = BLOCK) -> Iterator[tuple[slice, Callable[[], Factors]]]:
        """The same blocks, read when they are taken and made into factors when called: another core can do that."""
        for start in range(0, self.d_mlp, step):
            block = slice(start, min(start + step, self.d_mlp))
            yield block, self._read(block)

    def _read(self, block: slice) -> Callable[[], Factors]:
        query, key, value = (self.rows(role, block) for role in ROLES)
        return lambda: (query, key, value)

    def biases(self, which: slice | Tensor = slice(None)) -> tuple[PerNeuron, PerNeuron]:
        """Constants of a and b, float64; zeros where there are none."""
        zeros = torch.zeros(self.d_mlp, dtype=torch.float64)
        query, key = (zeros if bias is None else bias.double() for bias in (self.query_bias, self.key_bias))
        return query[which], key[which]


def expert_group(expert: int | str | None) -> str:
    """Kind of MLP by its expert: "routed" (an index), "shared" ("shared", "shared.1") or "dense" (None or a name).

    >>> [expert_group(expert) for expert in (3, "shared.1", None, "mlps.0")]
    ['routed', 'shared', 'dense', 'dense']
    """
    if isinstance(expert, int):
        return "routed"
    return "shared" if expert is not None and expert.split(".")[0] == "shared" else "dense"
