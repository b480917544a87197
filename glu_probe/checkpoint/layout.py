"""From tensor names to gated MLPs: which tensor of which layer is gate, up and down.

Names are matched on what follows the layer index and grouped by what stands before it, so that any wrapper's prefix
will do. Shapes are then checked against each other and the config. Where only the family could tell gate from up and
the family is not known, the layout is refused; nothing is ever guessed from the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..errors import LayoutUnknown, NoExpertsMapped, ShapeMismatch
from ..neurons import expert_group
from .families import (
    FUSED_NAMES,
    FUSED_ORDERS,
    GGUF_SEPARATE,
    PLAIN,
    REVERSIBLE_NAMES,
    UNAMBIGUOUS,
    Family,
    FusedOrder,
    Projections,
)
from .packed import refuse_packed
from .places import BlockKey, Leaves, Parameter, blocks_of, contents, pattern, tensor_index
from .refusals import EXPERT_ADVICE, refuse_incomplete, refuse_twins, refuse_ungated, refuse_unmapped_experts
from .source import TensorInfo
from .towers import name_towers

_SHARED = ("shared_expert", "share_expert", "shared_mlp")
# Modules that may stand in an MLP's block and leave its own function alone.
_ROUTING = ("gate", "router", "experts", "shared_expert_gate")


@dataclass(frozen=True)
class Site:
    """One gated MLP in the file.

    Attributes:
        tower, layer, expert: what it is called in frames.
        prefix, block: where its tensors stand.
        tensors: role to tensor name; gate and up share one where `fused` is an order.
        d_mlp, d_model: its sizes, read from the tensors.
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
    extras: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """Kind of MLP this is: "dense", "routed" or "shared"."""
        return expert_group(self.expert)

    @property
    def where(self) -> str:
        """For messages."""
        return f"layer {self.layer}, {'.'.join(self.block) or 'MLP'}"


@dataclass
class Inventory:
    """Everything `find_sites` found.

    Attributes:
        sites: the MLPs in order.
        layers: all layers of each tower that has any MLP, those without one too.
        index: every tensor with a layer index, by place.
        notes: what was left out, and why.
    """

    sites: list[Site]
    layers: dict[str, list[int]]
    index: dict[Parameter, str]
    notes: list[str]

    def beside(self, site: Site, module: str, kind: str) -> str | None:
        """The tensor of that module in the site's layer, whatever wrappers stand in its name; None if absent."""
        *block, leaf = module.split(".")
        return self.index.get(Parameter(site.prefix, site.layer, tuple(block), leaf, kind))

    def norm_widths(self, infos: Mapping[str, TensorInfo]) -> dict[tuple[str, int], set[int]]:
        """Sizes of the norms that stand directly in each layer of each stack."""
        widths: dict[tuple[str, int], set[int]] = {}
        for place, name in self.index.items():
            if not place.block and "norm" in place.leaf and len(infos[name].shape) == 1:
                widths.setdefault((place.prefix, place.layer), set()).add(infos[name].shape[0])
        return widths


def find_sites(
    infos: Mapping[str, TensorInfo],
    family_of: Callable[[str], Family | None],
    config: Mapping[str, object],
    *,
    gguf: bool,
    model_type: str | None,
    fused_layout: FusedOrder | None = None,
    scheme: object = None,
) -> Inventory:
    """All gated MLPs of a checkpoint, in order of tower, layer and expert.

    Args:
        infos: the tensors.
        family_of: family of a tower, None where it is not in the table.
        config: flat configuration values of the text tower.
        gguf: whether names are those of GGUF files.
        model_type: as the file calls itself, for messages.
        fused_layout: the user's word on which half of a fused tensor is the gate.
        scheme: the config's name for how weights are packed, for messages.

    Raises:
        NoGatedMLP, NoExpertsMapped, LayoutUnknown, IncompleteTriple, ShapeMismatch, QuantizedWeights, UnscaledFP8,
        UnmergedAdapter.
    """
    index = tensor_index(infos)
    blocks, own, named = blocks_of(index), _own(family_of("text"), gguf), _named(family_of("text"), gguf)
    indexed = {name: infos[name] for name in index.values()}
    refuse_packed(indexed, {leaf for names in named for leaf in names.names}, gguf=gguf, scheme=scheme)
    matched, skipped = _match_all(blocks, named, family_of, infos, gguf, fused_layout, model_type)
    if model_type not in PLAIN:
        refuse_incomplete(blocks, {(key[0], pattern(key[2])): names for key, (_, names) in matched.items()}, own)
    inside = contents(blocks)
    sites = [_site(tower, key, blocks[key], names, infos, inside[key]) for key, (tower, names) in matched.items()]
    refuse_twins(sites)
    refuse_unmapped_experts(sites, infos, config)
    if not sites:
        refuse_ungated(blocks, infos, model_type)
    stacks = {(site.prefix, site.tower) for site in sites}
    layers = {tower: sorted({place.layer for place in index if place.prefix == prefix}) for prefix, tower in stacks}
    sites.sort(key=lambda s: (s.tower != "text", s.tower, s.layer, s.block[:1], _expert_rank(s.expert)))
    return Inventory(sites, layers, index, [f"{tower} was left out: {why}" for tower, why in skipped.items()])


def _match_all(
    blocks, named, family_of, infos, gguf, fused_layout, model_type
) -> tuple[dict[BlockKey, tuple[str, Projections]], dict[str, str]]:
    """Tower and projections of every block that is a gated MLP, and why towers beside the language model were skipped."""
    towers = name_towers({key[0] for key, leaves in blocks.items() if any(names.stand_in(leaves) for names in named)})
    matched, skipped = {}, {}
    for key, leaves in blocks.items():
        tower = towers.get(key[0])
        if tower is None:
            continue
        try:
            projections = _match(leaves, family_of(tower), infos, gguf, fused_layout, model_type)
        except LayoutUnknown as error:
            if tower == "text":
                raise
            skipped[tower] = error.what
            continue
        if projections is not None:
            matched[key] = tower, projections
    return matched, skipped


def _expert_rank(expert: int | str | None) -> tuple[int, int]:
    return (0, 0) if expert is None else (1, expert) if isinstance(expert, int) else (2, 0)


def _own(family: Family | None, gguf: bool) -> tuple[Projections, ...]:
    """The names that mean one thing whatever is next to them: the family's, and those no family uses otherwise."""
    own = () if family is None else (family.gguf_projections if gguf else family.projections,)
    return (*own, *((GGUF_SEPARATE,) if gguf else UNAMBIGUOUS))


def _named(family: Family | None, gguf: bool) -> tuple[Projections, ...]:
    """Every set of names that a gated MLP may have."""
    fused = tuple(Projections(first, first, down, "gate-first") for first, down in FUSED_NAMES)
    return (*_own(family, gguf), *fused, *(Projections(*names) for names in REVERSIBLE_NAMES))


def _match(leaves, family, infos, gguf, fused_layout, model_type) -> Projections | None:
    """Which projections a block's leaves are, None if it is no gated MLP."""
    for wanted in _own(family, gguf):
        if wanted.stand_in(leaves) and not _is_stacked(leaves, wanted, infos):
            if wanted.fused and gguf and GGUF_SEPARATE.stand_in(leaves):
                continue  # a file that keeps the halves apart
            return replace(wanted, fused=fused_layout or wanted.fused) if wanted.fused else wanted
    for first, down in FUSED_NAMES:
        if {"weight"} <= leaves.get(first, {}).keys() & leaves.get(down, {}).keys() and _is_fused(
            leaves, first, down, infos
        ):
            if fused_layout is not None:
                return Projections(first, first, down, fused_layout)
            raise LayoutUnknown(
                f"{leaves[first]['weight']!r} {list(infos[leaves[first]['weight']].shape)} holds gate and up in one tensor, "
                f"and {_family_words(model_type, family)} does not say which half is which (the gate could be the first "
                "half, the second, or every other row)",
                hint=f"Say `--fused-layout {'|'.join(FUSED_ORDERS)}` or `--family NAME` if you know",
            )
    for names in REVERSIBLE_NAMES:
        wanted = Projections(*names)
        if wanted.stand_in(leaves) and not _is_stacked(leaves, wanted, infos):
            raise LayoutUnknown(
                f"{leaves[wanted.gate]['weight']!r} and {leaves[wanted.up]['weight']!r} are gate and up in one family and "
                f"the other way round in the next, and {_family_words(model_type, family)} does not say which",
                hint="Say `--family NAME` if you know one that stores them the same way",
            )
    return None


def _is_stacked(leaves, wanted: Projections, infos) -> bool:
    """Whether all experts of a layer are one tensor, which is not read yet."""
    return len(infos[leaves[wanted.gate]["weight"]].shape) > 2


def _family_words(model_type: str | None, family: Family | None) -> str:
    if family is not None:
        return f"family {family.names[0]!r}, whose own files have other names,"
    return f"model_type {model_type!r}, which is not in the table," if model_type else "a file without model_type"


def _is_fused(leaves, first: str, down: str, infos) -> bool:
    rows, columns = infos[leaves[first]["weight"]].shape, infos[leaves[down]["weight"]].shape
    return len(rows) == len(columns) == 2 and rows[0] == 2 * columns[1]


def _site(tower: str, key: BlockKey, leaves: Leaves, projections: Projections, infos, inside: set[str]) -> Site:
    prefix, layer, block = key
    roles = {"gate": projections.gate, "up": projections.up, "down": projections.down}
    tensors = {role: leaves[leaf]["weight"] for role, leaf in roles.items()}
    tensors |= {f"{role}_bias": leaves[leaf]["bias"] for role, leaf in roles.items() if "bias" in leaves[leaf]}
    d_mlp, d_model = _sizes(tensors, projections.fused, infos)
    others = inside - set(roles.values()) if block else ()  # without a block it is the whole layer, as in GGUF
    extras = tuple(sorted(name for name in others if name not in _ROUTING and not name.startswith(_SHARED)))
    return Site(
        tower, layer, _expert(block, tensors["gate"]), prefix, block, tensors, projections.fused, d_mlp, d_model, extras
    )


def _expert(block: tuple[str, ...], gate: str) -> int | str | None:
    if any(part.startswith(_SHARED) for part in block):
        return "shared"
    if "experts" not in block:
        return None
    number = block[block.index("experts") + 1 : block.index("experts") + 2]
    if number and number[0].isdigit():
        return int(number[0])
    raise NoExpertsMapped(
        f"{gate!r} belongs to experts, but its name does not say to which",
        hint=EXPERT_ADVICE,
    )


def _sizes(tensors: Mapping[str, str], fused: FusedOrder | None, infos: Mapping[str, TensorInfo]) -> tuple[int, int]:
    shapes = {role: infos[name].shape for role, name in tensors.items()}
    gate, up, down = shapes["gate"], shapes["up"], shapes["down"]
    factor = 2 if fused else 1
    fits = (
        len(gate) == len(up) == len(down) == 2
        and gate == up
        and gate[1] == down[0]
        and gate[0] == factor * down[1]
        and 0 not in (*gate, *down)
    )
    if not fits:
        listed = ", ".join(f"{infos[tensors[role]].name!r} {list(shapes[role])}" for role in ("gate", "up", "down"))
        expected = f"[{factor if factor > 1 else ''}d_mlp, d_model]"
        raise ShapeMismatch(
            f"the tensors of one MLP do not fit each other: {listed}",
            hint=f"Gate and up must be {expected} and down [d_model, d_mlp]",
        )
    rows = {"gate_bias": gate[0], "up_bias": up[0], "down_bias": down[0]}
    for role, size in rows.items():
        if role in shapes and shapes[role] != (size,):
            raise ShapeMismatch(f"{tensors[role]!r} is {list(shapes[role])}, expected [{size}]")
    return down[1], down[0]
