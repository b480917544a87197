"""What a layout is refused for after its names were matched: parts or gates that could not be placed.

A layer that is left out in silence, or half an MLP, gives plausible averages of the wrong things.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import IncompleteTriple, LayoutUnknown, NoGatedMLP
from .family import Group, Projections
from .known_families import PLAIN, find_family
from .packed import is_of_activations
from .places import BlockKey, Blocks, Leaves, is_attention, locate, pattern
from .source import TensorInfo

if TYPE_CHECKING:
    from .sites import Site

# Gated convolutions and projections of attention can have an MLP's shapes.
_NO_MLP = re.compile(r"conv|attn|attention|quer")
_MLP = re.compile(r"mlp|ffn|feed_forward|fc\d|ff|intermediate|output|c_proj|h_to|proj")

# Of gates under unknown names: whether they stand in one module decides what can be done.
_WAYS_OUT = {
    True: "If you know the gate, `gp.register_family` says so in Python; or ask for the family to be added",
    False: "Ask for the family to be added, or save the model with plain linear layers",
}


def refuse_incomplete(
    blocks: Blocks, matched: Mapping[tuple[str, tuple[str, ...], Group | None], Projections], own: Sequence[Projections]
) -> None:
    """An MLP that lacks a part: one its sisters in other layers have, or one that its names call for.

    Args:
        blocks: everything in the file.
        matched: (stack, block without numbers, group that the names say) to what was found there.
        own: every set of names that means one thing.
    """
    groups = {wanted.group: [one for one in own if one.group == wanted.group] for wanted in own}
    for (prefix, layer, block), leaves in blocks.items():
        if is_attention(block):
            continue
        for group, choices in groups.items():
            sister = matched.get((prefix, pattern(block), group))
            if any(wanted.stand_in(leaves) for wanted in (sister, *choices) if wanted):
                continue
            for wanted in (sister,) if sister else choices:
                _refuse_part(wanted, leaves, layer, expected=sister is not None)


def _refuse_part(wanted: Projections, leaves: Leaves, layer: int, *, expected: bool) -> None:
    parts = dict.fromkeys(wanted.names)
    present = [leaf for leaf in parts if "weight" in leaves.get(leaf, {})]
    absent = [leaf for leaf in parts if leaf not in present]
    if absent and present and (expected or wanted.gate in present):
        raise IncompleteTriple(
            f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing beside "
            f"{leaves[present[0]]['weight']!r}",
            where=f"layer {layer}",
            hint="The checkpoint is incomplete: a shard may be missing, or the save went wrong",
        )


def refuse_beneath(key: BlockKey, found: Sequence[Projections], inside: Mapping[BlockKey, set[str]]) -> None:
    """Parameters of a projection besides its weight and bias: what they make of the weight is not known."""
    prefix, layer, block = key
    for leaf in dict.fromkeys(name for names in found for name in names.names):
        others = {name for name in inside.get((prefix, layer, (*block, leaf)), ()) if not is_of_activations(name)}
        if others:
            path = ".".join((prefix, str(layer), *block, leaf))
            raise LayoutUnknown(
                f"{path!r} has {', '.join(sorted(others)[:6])} besides its weight, and what that does is not known",
                where=f"layer {layer}",
                hint="Save the model with plain linear layers, such as after merging what was trained beside them",
            )


def refuse_twins(sites: list[Site]) -> None:
    """Two MLPs that a frame could not tell apart."""
    seen: dict[tuple, Site] = {}
    for site in sites:
        other = seen.setdefault((site.tower, site.layer, site.expert), site)
        if other is not site:
            raise LayoutUnknown(
                f"layer {site.layer} has two gated MLPs for expert {site.expert!r}, {'.'.join(other.block)} and "
                f"{'.'.join(site.block)}",
                hint="The file holds the experts twice, or two kinds of them; ask for the family to be added",
            )


def refuse_ungated(blocks: Blocks, infos: Mapping[str, TensorInfo], model_type: str | None) -> None:
    """A checkpoint without any gated MLP: says what there is instead."""
    plain = sorted({
        f"{'.'.join((*block, leaf))}"
        for (_, _, block), leaves in blocks.items()
        for leaf in leaves
        if _MLP.search(".".join((*block, leaf)))
    })  # fmt: skip
    if model_type not in PLAIN:
        for layer, names in gated_in_shape(blocks, infos):
            known = find_family(model_type) or find_family(model_type, gguf=True)
            table = "whose own files have other names" if known else "which is not in the table"
            says = f"model_type {model_type!r}, {table}," if model_type else "a file without model_type"
            raise LayoutUnknown(
                f"{', '.join(map(repr, names[:6]))} have the shapes of a gated MLP, and {says} does not say which part is "
                "the gate",
                where=f"layer {layer}",
                hint=_WAYS_OUT[_is_one_module(names)],
            )
        outside = gated_outside_layers(infos)
        if outside:
            raise LayoutUnknown(
                f"the gated MLPs {', '.join(outside)} stand outside of any layer, and there are no others",
                hint="Only MLPs of numbered layers are measured",
            )
    what = f"no gated MLP was found in {len(infos)} tensors"
    if model_type:
        what += f" of model_type {model_type!r}" + (" (its MLPs are plain ones)" if model_type in PLAIN else "")
    found = f"Found instead: {', '.join(plain[:8])}" if plain else f"Found instead: {', '.join(list(infos)[:5])}"
    raise NoGatedMLP(what, hint=f"{found}. Gated MLPs have a gate beside up and down projections")


def _is_one_module(names: Sequence[str]) -> bool:
    """Whether the weights stand beside each other, as those of a family do that could be registered."""
    return len({name.removesuffix(".weight").rpartition(".")[0] for name in names}) == 1


def gated_outside_layers(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Modules that have gate, up and down but no layer's number in their name, such as projectors between towers."""
    found = []
    for name in infos:
        stem, _, leaf = name.removesuffix(".weight").rpartition(".")
        whole = all(f"{stem}.{part}_proj.weight" in infos for part in ("up", "down"))
        if leaf == "gate_proj" and whole and locate(name) is None:
            found.append(stem)
    return found


def gated_in_shape(blocks: Blocks, infos: Mapping[str, TensorInfo]) -> Iterator[tuple[int, list[str]]]:
    """(layer, names) of what has the shapes of a gated MLP under names of which none is known to be the gate."""
    weights: dict[tuple[str, int, tuple[str, ...]], list[str]] = defaultdict(list)
    for (prefix, layer, block), leaves in blocks.items():
        names = [kinds["weight"] for kinds in leaves.values() if "weight" in kinds]
        if not any(_NO_MLP.search(name.lower()) for name in names):
            weights[prefix, layer, block[:1]] += [name for name in names if len(infos[name].shape) == 2]
    for (_, layer, _), names in weights.items():
        wrapped = next((name for name in names if "gate_proj." in name or "gate_up_proj." in name), None)
        if wrapped or _looks_gated([infos[name].shape for name in names]):
            yield layer, names


def _looks_gated(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Two of [d_mlp, d_model] and one the other way round, or one of twice the height and one the other way round."""
    counts = Counter(shapes)
    apart = any(r != c and counts[r, c] == 2 and counts[c, r] == 1 for r, c in counts)
    return apart or (len(shapes) == 2 and any(counts[2 * c, r] == 1 for r, c in counts))
