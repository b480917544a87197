"""From tensor names to gated MLPs: which tensor of which layer is gate, up and down.

Names are matched on what follows the layer index and grouped by what stands before it, so that any wrapper's prefix
will do. Shapes are then checked against each other and the config.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..errors import LayoutUnknown
from .expert_names import ROUTING, SHARED, expert_counts, expert_number, expert_width
from .expert_refusals import choices, refuse_read_identities, refuse_unmapped_experts, routers_of
from .family import Family, FusedOrder, Projections
from .inventory import Inventory, norm_widths
from .known_families import PLAIN
from .matching import Matcher
from .packed import refuse_packed
from .places import BlockKey, Blocks, Leaves, Parameter, blocks_of, contents, pattern, tensor_index
from .refusals import (
    gated_in_shape,
    gated_outside_layers,
    refuse_beneath,
    refuse_incomplete,
    refuse_twins,
    refuse_ungated,
)
from .sites import Site, dense_where_alone, expert_of, labelled
from .slabs import Evidence, cut
from .source import TensorInfo
from .towers import is_main, name_towers

# What only a layer for predicting further tokens has.
_MTP_PARTS = {"eh_proj", "enorm", "hnorm", "shared_head", "nextn"}


@dataclass(frozen=True)
class Reading:
    """What besides the tensors decides on a layout.

    Attributes:
        family_of: family of a tower, from its name and prefix; None where it is not in the table.
        config_of: the part of the config about it.
        gguf: whether names are those of GGUF files.
        model_type: as the file calls itself, for messages.
        fused_layout, expert_layout: the user's word.
        scheme: the config's name for how weights are packed, for messages.
    """

    family_of: Callable[[str, str], Family | None]
    config_of: Callable[[str, str], Mapping[str, object]]
    gguf: bool
    model_type: str | None
    fused_layout: FusedOrder | None = None
    expert_layout: str | None = None
    scheme: object = None


_WIDTH_KEYS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim")


def config_width(config: Mapping[str, object]) -> int | None:
    """The d_model that a part of the config says; None where it does not."""
    return next((width for key in _WIDTH_KEYS if isinstance(width := config.get(key), int)), None)


def find_sites(infos: Mapping[str, TensorInfo], reading: Reading) -> Inventory:
    """All gated MLPs of a checkpoint, in order of tower, layer and expert.

    Raises:
        NoGatedMLP, NoExpertsMapped, LayoutUnknown, LayoutAmbiguous, IncompleteTriple, ShapeMismatch, QuantizedWeights,
        UnscaledFP8, UnmergedAdapter.
    """
    infos, identities = _without_identities(infos, reading)
    index = tensor_index(infos)
    blocks, any_tower = blocks_of(index), _matcher(reading, "text", "")
    indexed = {name: infos[name] for name in index.values()}
    refuse_packed(
        indexed, {leaf for names in any_tower.named for leaf in names.names}, gguf=reading.gguf, scheme=reading.scheme
    )
    finder = _Finder(infos, index, blocks, reading)
    matched, skipped = finder.match_all(blocks)
    if reading.model_type not in PLAIN:
        seen = {(key[0], pattern(key[2]), names.group): names for key, (_, found) in matched.items() for names in found}
        text = next((prefix for prefix, tower in finder.towers.items() if tower == "text"), "")
        refuse_incomplete(blocks, seen, _matcher(reading, "text", text).own)
    inside = contents(blocks)
    sites = [
        site
        for key, (tower, found) in matched.items()
        for names in found
        for site in finder.sites(tower, key, blocks[key], names, inside[key])
    ]
    sites = labelled(finder.apart(sites))
    refuse_twins(sites)
    left_out = {prefix for prefix, tower in finder.towers.items() if tower in skipped}
    refuse_unmapped_experts(
        sites, index, infos, finder.routers, reading.config_of("text", ""), reading.model_type, left_out, identities
    )
    sites = dense_where_alone(sites)
    if not sites:
        refuse_ungated(blocks, infos, reading.model_type)
    prefixes = {site.tower: site.prefix for site in sites}
    layers = {tower: finder.layers_of(tower, prefix) for tower, prefix in prefixes.items()}
    sites.sort(key=lambda site: site.rank)
    notes = [f"{tower} was left out: {why}" for tower, why in skipped.items()]
    if identities:
        notes.append(f"{identities} experts of a layer write what they read and have no neurons; they are left out")
    read = {(site.prefix, site.layer) for site in sites}
    beside = {key: leaves for key, leaves in blocks.items() if key[:2] not in read and key[0] in prefixes.values()}
    for layer, names in gated_in_shape(beside, infos):
        notes.append(f"layer {layer} was left out: {', '.join(names)} have the shapes of a gated MLP under other names")
    outside = gated_outside_layers(infos)
    if outside:
        notes.append(f"gated MLPs outside the layers were left out: {', '.join(outside)}")
    return Inventory(sites, layers, index, notes, prefixes)


def _without_identities(infos: Mapping[str, TensorInfo], reading: Reading) -> tuple[Mapping[str, TensorInfo], int]:
    """The tensors without those of experts that the model does not run, and how many experts that are."""
    family, config = reading.family_of("text", ""), reading.config_of("text", "")
    number = config.get(family.identity_experts) if family and family.identity_experts else 0
    if not isinstance(number, int) or not number:
        return infos, 0
    count = next(iter(expert_counts(config).values()), None)
    if count is None:
        return infos, number
    refuse_read_identities(infos, count, number)
    return {name: info for name, info in infos.items() if (expert_number(tuple(name.split("."))) or 0) < count}, number


def _matcher(reading: Reading, tower: str, prefix: str) -> Matcher:
    said = reading.fused_layout if is_main(tower) else None
    return Matcher(reading.family_of(tower, prefix), reading.model_type, reading.gguf, said)


class _Finder:
    """What is worked out once for a file."""

    def __init__(
        self, infos: Mapping[str, TensorInfo], index: Mapping[Parameter, str], blocks: Blocks, reading: Reading
    ) -> None:
        self.infos, self.index, self.reading = infos, index, reading
        self.widths = norm_widths(index, infos)
        self.routers = routers_of(blocks, infos)
        self.towers: dict[str, str] = {}
        self._present: dict[str, set[int]] = defaultdict(set)
        ahead: dict[tuple[str, int], bool] = {}
        for place in index:
            self._present[place.prefix].add(place.layer)
            if place.leaf in _MTP_PARTS or not _MTP_PARTS.isdisjoint(place.block):
                ahead[place.prefix, place.layer] = True
        self.ahead = set(ahead)

    def match_all(self, blocks: Blocks) -> tuple[dict[BlockKey, tuple[str, tuple[Projections, ...]]], dict[str, str]]:
        """Tower and projections of every block that is a gated MLP, and why towers beside the text were skipped."""
        any_tower = _matcher(self.reading, "text", "")
        prefixes = {key[0] for key, leaves in blocks.items() if any_tower.may_be_gated(leaves, self.infos)}
        prefixes |= self._of_other_families({key[0] for key in blocks} - prefixes, blocks)
        self.towers = name_towers(prefixes)
        matchers = {prefix: _matcher(self.reading, tower, prefix) for prefix, tower in self.towers.items()}
        inside = contents(blocks)
        matched: dict[BlockKey, tuple[str, tuple[Projections, ...]]] = {}
        skipped: dict[str, str] = {}
        for key, leaves in blocks.items():
            tower = self.towers.get(key[0])
            if tower is None:
                continue
            try:
                projections = matchers[key[0]].match(key[2], leaves, self.infos)
                refuse_beneath(key, projections, inside)
            except LayoutUnknown as error:
                if tower == "text":
                    raise
                skipped.setdefault(tower, error.what)
                continue
            if projections:
                matched[key] = tower, projections
        return matched, skipped

    def _of_other_families(self, prefixes: set[str], blocks: Blocks) -> set[str]:
        """Stacks whose names only the family of their own tower knows."""
        named = {prefix: _matcher(self.reading, tower, prefix) for prefix, tower in name_towers(prefixes).items()}
        return {
            key[0]
            for key, leaves in blocks.items()
            if key[0] in named and named[key[0]].may_be_gated(leaves, self.infos)
        }

    def sites(
        self, tower: str, key: BlockKey, leaves: Leaves, projections: Projections, inside: set[str]
    ) -> list[Site]:
        """The MLPs of one block."""
        prefix, layer, block = key
        roles = {"gate": projections.gate, "up": projections.up, "down": projections.down}
        tensors = {role: leaves[leaf]["weight"] for role, leaf in roles.items()}
        tensors |= {f"{role}_bias": leaves[leaf]["bias"] for role, leaf in roles.items() if "bias" in leaves[leaf]}
        cuts = cut(projections, tensors, self.infos, self._evidence(tower, prefix, layer))
        others = inside - set(roles.values())
        if not block:  # it is the whole layer, as in GGUF
            a_neuron = (cuts[0].d_mlp,) if cuts[0].d_mlp != cuts[0].d_model else ()
            others = {
                name
                for name in others
                if name.startswith(("ffn_sub", "ffn_act")) or self._shape(leaves.get(name, {})) == a_neuron
            }
        extras = tuple(sorted(name for name in others if name not in ROUTING and not name.startswith(SHARED)))
        stacked = cuts[0].storage not in ("", "transposed")
        return [
            Site(
                tower, layer, expert_of(projections, block, tensors["gate"], number if stacked else None, len(cuts)), prefix,
                block, tensors, projections.fused, one.d_mlp, one.d_model, one.slabs, one.storage, extras,
            )
            for number, one in enumerate(cuts)
        ]  # fmt: skip

    def _shape(self, kinds: Mapping[str, str]) -> tuple[int, ...] | None:
        return self.infos[kinds["weight"]].shape if "weight" in kinds else None

    def _evidence(self, tower: str, prefix: str, layer: int) -> Evidence:
        config = self.reading.config_of(tower, prefix)
        beside = self.widths.get((prefix, layer), set())
        width = config_width(config) or (next(iter(beside)) if len(beside) == 1 else None)
        router = self.infos.get(self.routers.get((prefix, layer), ""))
        return Evidence(
            width,
            next(iter(expert_counts(config).values()), None),
            self.reading.expert_layout,
            choices(router, width) if router and width else None,
            expert_width(config),
        )

    def apart(self, sites: list[Site]) -> list[Site]:
        """Layers that predict further tokens, which some files number on behind the model's own, as a tower of theirs."""
        out = []
        for site in sites:
            count = self.reading.config_of(site.tower, site.prefix).get("num_hidden_layers")
            beyond = not isinstance(count, int) or site.layer >= count or self.reading.gguf
            ahead = site.tower == "text" and beyond and (site.prefix, site.layer) in self.ahead
            out.append(replace(site, tower="mtp") if ahead else site)
        return out

    def layers_of(self, tower: str, prefix: str) -> list[int]:
        """All layers of a tower."""
        return sorted(
            layer for layer in self._present[prefix] if (tower == "mtp") == ((prefix, layer) in self.ahead)
        ) or sorted(self._present[prefix])
