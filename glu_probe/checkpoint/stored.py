"""One MLP as it is stored: what its factors are made of, and their rows, made when they are asked for.

A factor is a stored matrix neuron by neuron, in the dtype of the file, times the family's constant and the gain of the
norm that is folded in, and centred where that norm is a LayerNorm. In 16 bits a layer takes half the memory that its
float32 factors would, and a layer that does not fit at all is read from its file again, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from ..activations import Activation
from ..layer_rows import ROLES, Factors, Fold, HeldRows, LayerRows, PerNeuron, Read, Role
from ..neurons import GatedLayer
from .memory import Room, chunks, fresh


class StoredRows(Protocol):
    """Rows of a stored matrix, in memory or in a file, in the dtype of the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of them in memory."""
        ...

    def __call__(self, which: slice | Tensor) -> Tensor:
        """Some of them, by range or number."""
        ...


@dataclass(frozen=True, eq=False)
class StoredFactor:
    """One factor of a layer.

    Attributes:
        stored: its rows as they are in the file.
        shape: [d_mlp, d_model].
        dtype: of the rows that come out.
        constant: what all of it is multiplied with.
        fold: what a norm does to its columns.
    """

    stored: StoredRows
    shape: tuple[int, int]
    dtype: torch.dtype
    constant: float = 1.0
    fold: Fold = field(default_factory=Fold)

    def __call__(self, which: slice | Tensor) -> Tensor:
        """Rows of the factor."""
        return self.made(self.stored(which))

    def made(self, stored: Tensor) -> Tensor:
        """Rows of the factor, of those that are stored."""
        found = self._scaled(stored)
        if self.fold.gain is not None:  # in place where the rows are a copy already
            found = found * self.fold.gain if found is stored else found.mul_(self.fold.gain)
        if self.fold.centred:
            before = found.norm(dim=1, keepdim=True)
            found = found - found.mean(dim=1, keepdim=True)
            # what rounding leaves of a row along that direction is no row
            found *= found.norm(dim=1, keepdim=True) > 1e-6 * before
        return found

    def _scaled(self, stored: Tensor) -> Tensor:
        found = stored.to(self.dtype)
        return found if self.constant == 1.0 else found * self.constant

    def times(self, vector: Float[Tensor, " d_model"]) -> PerNeuron:
        """Its product with a vector, before the norm is folded in."""
        spans = chunks(*self.shape)
        return torch.cat([self._scaled(self.stored(slice(start, stop))) @ vector for start, stop in spans])

    def whole(self, role: Role, room: Room) -> Float[Tensor, "d_mlp d_model"]:
        """All rows; in the memory of what is stored, which is used up, where that has their dtype."""
        held = self.stored.matrix if isinstance(self.stored, HeldRows) else None
        if held is not None and held.dtype != self.dtype:
            held = None
        out = room(role, self.shape, self.dtype) if held is None else held
        if held is not None and self.constant == 1.0 and self.fold.gain is None and not self.fold.centred:
            return out
        for start, stop in chunks(*self.shape):
            out[start:stop] = self(slice(start, stop))
        return out


@dataclass(frozen=True, eq=False, repr=False)
class StoredLayer(LayerRows):
    """A gated MLP whose factors are made of what is stored; for the attributes see `GatedLayer`.

    Attributes:
        factors: query, key and value.
        held: whether what is stored is in memory, rather than read again each time.
    """

    factors: Mapping[Role, StoredFactor]
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
    held: bool = True

    @property
    def d_mlp(self) -> int:
        """Number of neurons."""
        return self.factors["query"].shape[0]

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.factors["query"].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes in memory: of all that is stored, or of the stripes that are held of what stays in its file."""
        return sum(factor.stored.nbytes for factor in self.factors.values())

    def rows(self, role: Role, which: slice | Tensor) -> Float[Tensor, "rows d_model"]:
        """Some rows of a factor, in float32, or float64 where the file has that."""
        return self.factors[role](which)

    def _read(self, block: slice) -> Callable[[], Factors]:
        factors = [self.factors[role] for role in ROLES]
        stored = [factor.stored(block) for factor in factors]

        def made() -> Factors:
            query, key, value = (factor.made(rows) for factor, rows in zip(factors, stored, strict=True))
            return query, key, value

        return made

    def unfolded(self, role: Role) -> tuple[Read, Fold]:
        """A factor as the file has it, and the constant and the norm that make it one."""
        factor = self.factors[role]
        return factor.stored, replace(factor.fold, constant=factor.constant)

    def widened(self, room: Room = fresh) -> GatedLayer:
        """The same layer with its factors whole in memory; what is stored may be used up."""
        query, key, value = (factor.whole(role, room) for role, factor in self.factors.items())
        return GatedLayer(
            query, key, value, self.activation, layer=self.layer, expert=self.expert, tower=self.tower,
            query_bias=self.query_bias, key_bias=self.key_bias, output_bias=self.output_bias,
            scale_note=self.scale_note, sources=self.sources, norm=self.norm,
        )  # fmt: skip
