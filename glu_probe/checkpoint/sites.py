"""One gated MLP in a file, and what it is called: by its expert, its block, or nothing where it is its layer's only one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..errors import NoExpertsMapped
from ..layer_rows import expert_group
from .expert_names import ADVICE, SHARED, expert_number, is_shared
from .family import FusedOrder, Projections
from .places import numbers, pattern
from .slabs import Slab
from .source import TensorInfo

_GROUPS = ("dense", "routed", "shared")


@dataclass(frozen=True, eq=False)
class Site:
    """One gated MLP in the file.

    Attributes:
        tower, layer, expert: what it is called in frames.
        prefix, block: where its tensors stand.
        tensors: role to tensor name; gate and up share one where `fused` is an order.
        slabs: role to the part of that tensor that is this MLP's.
        d_mlp, d_model: its sizes, read from the tensors.
        storage: how experts share tensors, in words; "" where none are shared.
        extras: other modules in its block; what they do to its function is not known.
    """

    tower: str
    layer: int
    expert: int | str | None
    prefix: str
    block: tuple[str, ...]
    tensors: Mapping[str, str]
    fused: FusedOrder | None
    d_mlp: int
    d_model: int
    slabs: Mapping[str, Slab] = field(default_factory=dict)
    storage: str = ""
    extras: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """Kind of MLP this is: "dense", "routed" or "shared"."""
        return expert_group(self.expert)

    @property
    def layout(self) -> str:
        """How gate and up, and experts, share tensors, in words."""
        return ", ".join(filter(None, (self.fused or "separate", self.storage)))

    def held_bytes(self, infos: Mapping[str, TensorInfo]) -> int:
        """Bytes of its three matrices in memory, in the dtypes that they are read in."""
        dtypes = (infos[self.tensors[role]] for role in ("gate", "up", "down"))
        widths = ({"F64": 8, "BF16": 2, "F16": 2}.get("" if one.decoded else one.dtype, 4) for one in dtypes)
        return self.d_mlp * self.d_model * sum(widths)

    @property
    def where(self) -> str:
        """For messages."""
        expert = f", expert {self.expert}" if self.storage and self.expert is not None else ""
        return f"layer {self.layer}, {'.'.join(self.block) or 'MLP'}{expert}"

    @property
    def rank(self) -> tuple:
        """Order in frames: by tower, layer, group and expert."""
        expert = self.expert
        return (
            self.tower != "text",
            self.tower,
            self.layer,
            _GROUPS.index(self.group),
            expert if isinstance(expert, int) else -1,
            pattern(self.block),
            numbers(self.block),
            str(expert),
        )


def labelled(sites: list[Site]) -> list[Site]:
    """Several dense MLPs of one layer told apart by the names of their blocks."""
    counts = Counter((site.tower, site.layer) for site in sites if site.expert is None)
    return [
        replace(site, expert=".".join(site.block))
        if site.expert is None and counts[site.tower, site.layer] > 1 and site.block
        else site
        for site in sites
    ]


def dense_where_alone(sites: list[Site]) -> list[Site]:
    """What a model calls shared is dense where there is nothing else in its layers."""
    experts = {site.tower for site in sites if isinstance(site.expert, int)}
    dense = {(site.tower, site.layer) for site in sites if site.group == "dense"}
    return [
        replace(site, expert=None)
        if site.expert == "shared" and site.tower not in experts and (site.tower, site.layer) not in dense
        else site
        for site in sites
    ]


def expert_of(
    projections: Projections, block: tuple[str, ...], gate: str, number: int | None, count: int
) -> int | str | None:
    """Which expert it is: from its place in a stacked tensor, or from its name."""
    shared = projections.group == "shared" or is_shared(block)
    named = number
    if number is None and "experts" in block:
        named = expert_number(block)
        if named is None:
            raise NoExpertsMapped(f"{gate!r} belongs to experts, but its name does not say to which", hint=ADVICE)
    if shared:
        own = numbers(block[next((i for i, part in enumerate(block) if part.startswith(SHARED)), 0) :])
        which = named if named is not None and count > 1 else own[0] if own else None
        return "shared" if which is None else f"shared.{which}"
    return named
