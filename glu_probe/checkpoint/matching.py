"""From the names in a block to what they mean: which projections it has, if it is a gated MLP at all.

A name that only its family gives a meaning is refused without the family; nothing is ever guessed from the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..errors import LayoutUnknown
from .family import FUSED_ORDERS, Family, FusedOrder, Projections
from .places import Leaves, is_attention
from .source import TensorInfo
from .tensor_names import FUSED_NAMES, GGUF_EXPERTS, GGUF_SEPARATE, REVERSIBLE_NAMES, UNAMBIGUOUS


@dataclass(frozen=True)
class Matcher:
    """Reads the names of one stack of layers.

    Attributes:
        family: its family, None if that is not in the table.
        model_type: as the file calls itself, for messages.
        gguf: whether names are those of GGUF files.
        fused_layout: the user's word on which half of a fused tensor is the gate.
    """

    family: Family | None
    model_type: str | None
    gguf: bool
    fused_layout: FusedOrder | None

    @property
    def own(self) -> tuple[Projections, ...]:
        """The names that mean one thing whatever is next to them: the family's, and those no family uses otherwise."""
        if self.gguf:
            order = self.family.gguf_fused if self.family else None
            return (
                GGUF_SEPARATE,
                *GGUF_EXPERTS,
                *((Projections("ffn_up", "ffn_up", "ffn_down", order),) if order else ()),
            )
        own = self.family.projections if self.family else ()
        # The family's own statement about a name comes first, also on how it is stored.
        return (*own, *(names for names in UNAMBIGUOUS if names.names not in {one.names for one in own}))

    @property
    def named(self) -> tuple[Projections, ...]:
        """Every set of names that a gated MLP may have."""
        fused = (Projections(first, first, down, "gate-first") for first, down in FUSED_NAMES)
        return (*self.own, *fused, *(Projections(*names) for names in REVERSIBLE_NAMES))

    def may_be_gated(self, leaves: Leaves, infos: Mapping[str, TensorInfo]) -> bool:
        """Whether a block's names and shapes can be a gated MLP's, whoever could read it."""
        return any(
            names.stand_in(leaves) and not (names.fused and _is_plain(leaves, names, infos)) for names in self.named
        )

    def match(self, block: tuple[str, ...], leaves: Leaves, infos: Mapping[str, TensorInfo]) -> tuple[Projections, ...]:
        """Which projections a block holds: none, one, or in GGUF files several.

        Raises:
            LayoutUnknown: it has an MLP's names or shapes, and which part is the gate is not known.
        """
        found: dict[str | None, Projections] = {}
        for wanted in self.own:
            if wanted.group in found or not wanted.stand_in(leaves):
                continue
            if wanted.fused and _is_plain(leaves, wanted, infos):
                continue
            said = self.fused_layout if wanted.fused and self.fused_layout else wanted.fused
            found[wanted.group] = replace(wanted, fused=said)
        if None not in found and not is_attention(block):
            for other in self._others(leaves, infos):
                found[None] = other
        return tuple(found.values())

    def _others(self, leaves: Leaves, infos: Mapping[str, TensorInfo]) -> Iterable[Projections]:
        """Names that the family does not have, and whose order must be said."""
        for first, down in FUSED_NAMES:
            names = Projections(first, first, down, self.fused_layout or "gate-first", stored="either")
            if not names.stand_in(leaves) or not _is_fused(leaves, names, infos):
                continue
            if self.fused_layout is not None:
                yield names
                return
            weight = leaves[first]["weight"]
            raise LayoutUnknown(
                f"{weight!r} {list(infos[weight].shape)} holds gate and up in one tensor, and {self._words} does not say "
                "which half is which (the gate could be the first half, the second, or every other row)",
                hint=f"Say `--fused-layout {'|'.join(FUSED_ORDERS)}` or `--family NAME` if you know; in Python, "
                "`gp.register_family` adds a family with its order",
            )
        for names in (Projections(*triple) for triple in REVERSIBLE_NAMES):
            if names.stand_in(leaves):
                raise LayoutUnknown(
                    f"{leaves[names.gate]['weight']!r} and {leaves[names.up]['weight']!r} are gate and up in one family "
                    f"and the other way round in the next, and {self._words} does not say which",
                    hint="Say `--family NAME` if you know one that stores them the same way; in Python, `gp.register_family` "
                    "adds one",
                )

    @property
    def _words(self) -> str:
        if self.family is not None:
            return f"family {self.family.names[0]!r}, whose own files have other names,"
        return (
            f"model_type {self.model_type!r}, which is not in the table,"
            if self.model_type
            else "a file without model_type"
        )


def _matrices(
    leaves: Leaves, names: Projections, infos: Mapping[str, TensorInfo]
) -> tuple[tuple[int, ...], ...] | None:
    """Shapes of the first tensor and of down, without an axis of experts; None where they have none in common."""
    shapes = [infos[leaves[name]["weight"]].shape for name in (names.gate, names.down)]
    if {len(shape) for shape in shapes} not in ({2}, {3}):
        return None
    return tuple(shape[-2:] for shape in shapes)


def _is_plain(leaves: Leaves, names: Projections, infos: Mapping[str, TensorInfo]) -> bool:
    """As many rows as the down projection has columns: an MLP without a gate has the same names."""
    shapes = _matrices(leaves, names, infos)
    return shapes is not None and shapes[0] == shapes[1][::-1]


def _is_fused(leaves: Leaves, names: Projections, infos: Mapping[str, TensorInfo]) -> bool:
    """Twice as many rows as the down projection has columns, or with all axes exchanged."""
    shapes = _matrices(leaves, names, infos)
    if shapes is None:
        return False
    (rows, columns), (height, width) = shapes
    stacked = len(infos[leaves[names.down]["weight"]].shape) == 3
    return (rows == 2 * width and columns == height) or (
        stacked and ((columns == 2 * height and rows == width) or (rows == 2 * height and columns == width))
    )
