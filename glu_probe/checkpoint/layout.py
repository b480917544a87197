"""From tensor names to gated MLPs: which tensor of which layer is gate, up and down.

Names are matched on what follows the layer index and grouped by what stands before it, so that any wrapper's prefix
will do. Shapes are then checked against each other and the config. Where only the family could tell gate from up and
the family is not known, the layout is refused; nothing is ever guessed from the numbers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import (
    IncompleteTriple,
    LayoutUnknown,
    NoExpertsMapped,
    NoGatedMLP,
    QuantizedWeights,
    ShapeMismatch,
    UnmergedAdapter,
)
from .families import FUSED_NAMES, FUSED_ORDERS, PLAIN, REVERSIBLE_NAMES, SEPARATE, Family, FusedOrder, Projections
from .source import TensorInfo

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_NOT_A_LAYER = {"experts", "mlps", "shared_experts"}
# Tensors that packed formats keep in the place of (or beside) a weight.
_PACKED = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_shape", "SCB", "qzeros", "scales",
           "weight_global_scale", "absmax", "quant_state")  # fmt: skip
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "expert_count")


@dataclass(frozen=True)
class Parameter:
    """A tensor's place: stack (the prefix), layer, block within the layer, and leaf name."""

    prefix: str
    layer: int
    block: tuple[str, ...]
    leaf: str
    kind: str  # "weight", "bias", or another last component


@dataclass(frozen=True)
class Site:
    """One gated MLP in the file.

    Attributes:
        tower, layer, expert: what it is called in frames.
        prefix, block: where its tensors stand.
        tensors: role to tensor name; gate and up share one where `fused` is an order.
        d_mlp, d_model: its sizes, read from the tensors.
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


def locate(name: str) -> Parameter | None:
    """Take a tensor name apart; None where it has no layer index."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while parts and parts[0] == "module":
        parts.pop(0)
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    parts = [part for part in parts if part != "base_layer"]
    for i in range(1, len(parts) - 1):
        if parts[i].isdigit() and parts[i - 1] not in _NOT_A_LAYER:
            prefix, rest = ".".join(parts[:i]), parts[i + 1 :]
            if rest[-1] in ("weight", "bias", *_PACKED):
                block, leaf, kind = tuple(rest[:-2]), rest[-2] if len(rest) > 1 else "", rest[-1]
            else:
                block, leaf, kind = tuple(rest[:-1]), rest[-1], "weight"
            return Parameter(prefix, int(parts[i]), block, leaf, kind)
    return None


def tensor_index(names: Mapping[str, TensorInfo]) -> dict[Parameter, str]:
    """Every tensor with a layer index, by place.

    Raises:
        LayoutUnknown: two tensors have the same place under different wrappers.
    """
    index: dict[Parameter, str] = {}
    for name in names:
        place = locate(name)
        if place is None:
            continue
        if place in index:
            raise LayoutUnknown(
                f"tensors {index[place]!r} and {name!r} would be the same parameter",
                hint="The file holds the model twice; save one copy",
            )
        index[place] = name
    return index


def find_sites(
    infos: Mapping[str, TensorInfo],
    family_of: Mapping[str, Family | None],
    config: Mapping[str, object],
    *,
    gguf: bool,
    model_type: str | None,
    fused_layout: FusedOrder | None = None,
) -> Inventory:
    """All gated MLPs of a checkpoint, in order of tower, layer and expert.

    Args:
        infos: the tensors.
        family_of: family of each tower, None where it is not in the table.
        config: flat configuration values of the text tower.
        gguf: whether names are those of GGUF files.
        model_type: as the file calls itself, for messages.
        fused_layout: the user's word on which half of a fused tensor is the gate.

    Raises:
        NoGatedMLP, NoExpertsMapped, LayoutUnknown, IncompleteTriple, ShapeMismatch, QuantizedWeights, UnmergedAdapter.
    """
    index = tensor_index(infos)
    towers = _name_towers({place.prefix for place in index})
    blocks: dict[tuple[str, int, tuple[str, ...]], dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for place, name in index.items():
        blocks[place.prefix, place.layer, place.block][place.leaf][place.kind] = name
    sites, gated_blocks, skipped = [], set(), {}
    for (prefix, layer, block), leaves in blocks.items():
        tower = towers[prefix]
        family = family_of.get(tower)
        try:
            projections = _match(leaves, family, infos, gguf, fused_layout, model_type)
        except LayoutUnknown as error:
            if tower == "text":
                raise
            skipped[tower] = error.what  # a tower beside the language model: say so and go on
            continue
        if projections is None:
            continue
        gated_blocks.add((prefix, block))
        sites.append(_site(tower, prefix, layer, block, leaves, projections, infos))
    _refuse_incomplete(blocks, gated_blocks, gguf)
    _refuse_twins(sites)
    _refuse_unmapped_experts(sites, infos, config)
    if not sites:
        _refuse_ungated(index, infos, blocks, model_type)
    stacks = {(site.prefix, site.tower) for site in sites}
    layers = {tower: sorted({p.layer for p in index if p.prefix == prefix}) for prefix, tower in stacks}
    sites.sort(key=lambda s: (s.tower != "text", s.tower, s.layer, s.block[:1], _expert_rank(s.expert)))
    return Inventory(sites, layers, index, [f"{tower} was left out: {why}" for tower, why in skipped.items()])


def _expert_rank(expert: int | str | None) -> tuple[int, int]:
    return (0, 0) if expert is None else (1, expert) if isinstance(expert, int) else (2, 0)


def _name_towers(prefixes: set[str]) -> dict[str, str]:
    """A short name for every stack of layers, by the words in its prefix; the prefix itself where two would clash."""
    words = (("vision", ("vision", "visual", "vit")), ("audio", ("audio", "speech")), ("mtp", ("mtp", "nextn")))
    names: dict[str, str] = {}
    for prefix in prefixes:
        lowered = prefix.lower()
        names[prefix] = next((name for name, hints in words if any(hint in lowered for hint in hints)), "text")
    clashing = [p for p in prefixes if sum(names[p] == names[other] for other in prefixes) > 1]
    for name in {names[p] for p in clashing}:
        group = sorted((p for p in clashing if names[p] == name), key=lambda p: (len(p), p))
        # The language model proper is the stack called layers (or h, blocks, blk) nearest the root.
        main = next((p for p in group if name == "text" and p.split(".")[-1] in ("layers", "h", "blocks", "blk")), None)
        for prefix in group:
            if prefix != main:
                names[prefix] = prefix
    return names


def _match(leaves, family, infos, gguf, fused_layout, model_type) -> Projections | None:
    """Which projections a block's leaves are, None if it is no gated MLP."""
    if family is not None:
        wanted = family.gguf_projections if gguf else family.projections
        if all("weight" in leaves.get(leaf, {}) for leaf in (wanted.gate, wanted.up, wanted.down)):
            if wanted.fused and not _is_fused(leaves, wanted.gate, wanted.down, infos):
                return None
            order = (fused_layout or wanted.fused) if wanted.fused else None
            return Projections(wanted.gate, wanted.up, wanted.down, order)
    plain = Projections("ffn_gate", "ffn_up", "ffn_down") if gguf else SEPARATE
    if all("weight" in leaves.get(leaf, {}) for leaf in (plain.gate, plain.up, plain.down)):
        return plain  # names that mean the same in every family
    packed = next(
        (leaf for leaf in (SEPARATE.gate, "gate_up_proj", "w1") if leaves.get(leaf, {}).keys() & {*_PACKED}), None
    )
    if packed and "weight" not in leaves[packed]:
        kinds = sorted(leaves[packed].keys() & {*_PACKED})
        raise QuantizedWeights(
            f"weights are packed ({packed}: {', '.join(kinds)})",
            where=next(iter(leaves[packed].values())),
            hint="Use the unquantised checkpoint",
        )
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
    for gate, up, down in REVERSIBLE_NAMES:
        if all("weight" in leaves.get(leaf, {}) for leaf in (gate, up, down)):
            raise LayoutUnknown(
                f"{leaves[gate]['weight']!r} and {leaves[up]['weight']!r} are gate and up in one family and the other way "
                f"round in the next, and {_family_words(model_type, family)} does not say which",
                hint="Say `--family NAME` if you know one that stores them the same way",
            )
    return None


def _family_words(model_type: str | None, family: Family | None) -> str:
    if family is not None:
        return f"family {family.names[0]!r}, whose own files have other names,"
    return f"model_type {model_type!r}, which is not in the table," if model_type else "a file without model_type"


def _is_fused(leaves, first: str, down: str, infos) -> bool:
    rows, columns = infos[leaves[first]["weight"]].shape, infos[leaves[down]["weight"]].shape
    return len(rows) == len(columns) == 2 and rows[0] == 2 * columns[1]


def _site(tower, prefix, layer, block, leaves, projections: Projections, infos) -> Site:
    expert: int | str | None = None
    if any(part.startswith(("shared_expert", "share_expert", "shared_mlp")) for part in block):
        expert = "shared"
    elif "experts" in block:
        number = block[block.index("experts") + 1 : block.index("experts") + 2]
        expert = int(number[0]) if number and number[0].isdigit() else None
    roles = {"gate": projections.gate, "up": projections.up, "down": projections.down}
    tensors = {role: leaves[leaf]["weight"] for role, leaf in roles.items()}
    tensors |= {f"{role}_bias": leaves[leaf]["bias"] for role, leaf in roles.items() if "bias" in leaves[leaf]}
    d_mlp, d_model = _sizes(tensors, projections.fused, infos)
    return Site(tower, layer, expert, prefix, block, tensors, projections.fused, d_mlp, d_model)


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


def _refuse_incomplete(blocks, gated_blocks, gguf: bool) -> None:
    """A lone gate, or a block that lacks a part which its sisters in other layers have."""
    projections = Projections("ffn_gate", "ffn_up", "ffn_down") if gguf else SEPARATE
    trio = (projections.gate, projections.up, projections.down)
    for (prefix, layer, block), leaves in blocks.items():
        if any("attn" in part or "attention" in part for part in block):
            continue
        lora = next((leaf for leaf in leaves if leaf.startswith("lora_")), None)
        if lora and block and block[-1] in trio:
            raise UnmergedAdapter(
                f"{next(iter(leaves[lora].values()))!r} is a low-rank update beside the weights",
                hint="Merge the adapter into the model (PEFT: merge_and_unload) and save that",
            )
        present = [leaf for leaf in trio if "weight" in leaves.get(leaf, {})]
        if not present or len(present) == 3 or leaves.get("gate_up_proj"):
            continue
        if projections.gate in present or (prefix, block) in gated_blocks:
            absent = [leaf for leaf in trio if leaf not in present]
            raise IncompleteTriple(
                f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing beside "
                f"{leaves[present[0]]['weight']!r}",
                where=f"layer {layer}",
                hint="The checkpoint is incomplete: a shard may be missing, or the save went wrong",
            )


def _refuse_twins(sites: list[Site]) -> None:
    """Two MLPs that a frame could not tell apart."""
    seen: dict[tuple, Site] = {}
    for site in sites:
        other = seen.setdefault((site.tower, site.layer, site.expert), site)
        if other is not site:
            raise LayoutUnknown(
                f"layer {site.layer} has two gated MLPs, {'.'.join(other.block)} and {'.'.join(site.block)}",
                hint="Layers with several dense MLPs are not supported yet",
            )


def _refuse_unmapped_experts(sites: list[Site], infos: Mapping[str, TensorInfo], config: Mapping[str, object]) -> None:
    if any(isinstance(site.expert, int) for site in sites):
        return
    counts = {key: config[key] for key in _EXPERT_COUNTS if isinstance(config.get(key), int) and config[key] > 0}
    hints = sorted(
        {re.sub(r"\d+", "{}", name) for name in infos if re.search(r"expert|_exps\b|moe|router", name.lower())}
    )
    named = any(re.search(r"\bexperts\b|_exps\b", hint) for hint in hints)
    # A count alone proves nothing (some dense models keep the key): layers without an MLP, or expert-like names, do.
    if not named and not (counts and (hints or not sites)):
        return
    patterns = hints
    if not patterns and not sites:
        patterns = sorted({re.sub(r"\d+", "{}", name) for name in infos})
    said = ", ".join(f"{key} = {value}" for key, value in counts.items()) or "tensors named after experts"
    raise NoExpertsMapped(
        f"the model has experts ({said}), but none of their tensors could be mapped. Unmatched: "
        f"{', '.join(patterns[:12])}{' ...' if len(patterns) > 12 else ''}",
        hint="Experts stored one by one as experts.N.gate_proj / up_proj / down_proj are read; stacked ones are not yet",
    )


def _refuse_ungated(index, infos, blocks, model_type: str | None) -> None:
    plain = sorted({
        f"{'.'.join((*block, leaf))}"
        for (_, _, block), leaves in blocks.items()
        for leaf in leaves
        if re.search(r"mlp|ffn|feed_forward|fc\d|ff|intermediate|output|c_proj|h_to|proj", ".".join((*block, leaf)))
    })  # fmt: skip
    what = f"no gated MLP was found in {len(infos)} tensors"
    if model_type:
        what += f" of model_type {model_type!r}" + (" (its MLPs are plain ones)" if model_type in PLAIN else "")
    found = f"Found instead: {', '.join(plain[:8])}" if plain else f"Found instead: {', '.join(list(infos)[:5])}"
    raise NoGatedMLP(what, hint=f"{found}. Gated MLPs have a gate beside up and down projections")
