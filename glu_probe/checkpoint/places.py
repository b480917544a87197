"""Where a tensor stands, from its name: which stack, which layer, which block of it.

Names are taken apart at the layer index. What precedes it names the stack, so that any wrapper's prefix will do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import LayoutUnknown
from .expert_names import LISTS

# What stacks of layers are called.
STACKS = ("layers", "layer", "h", "block", "blocks", "blk")
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_layer"}

# (stack, layer, block) to leaf name to "weight" or "bias" to tensor name.
BlockKey = tuple[str, int, tuple[str, ...]]
Leaves = Mapping[str, Mapping[str, str]]
Blocks = Mapping[BlockKey, Leaves]


@dataclass(frozen=True)
class Parameter:
    """A tensor's place: stack (the prefix), layer, block within the layer, and leaf name."""

    prefix: str
    layer: int
    block: tuple[str, ...]
    leaf: str
    kind: str  # "weight", "bias", or another last component


def locate(name: str) -> Parameter | None:
    """Take a tensor name apart; None where it has no layer index."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while parts and parts[0] == "module":
        parts.pop(0)
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    numbered = [i for i in range(1, len(parts) - 1) if parts[i].isdigit() and parts[i - 1] not in LISTS]
    if not numbered:
        return None
    # The first number behind a stack's name; a number before it (of a stage) is part of the stack's own.
    i = next((i for i in numbered if parts[i - 1] in STACKS), numbered[0])
    prefix, rest = ".".join(parts[:i]), parts[i + 1 :]
    kind = rest.pop() if len(rest) > 1 and rest[-1] in ("weight", "bias") else "weight"
    if rest[-1].endswith("_bias"):  # of stacked experts: down_proj and down_proj_bias
        rest[-1], kind = rest[-1].removesuffix("_bias"), "bias"
    return Parameter(prefix, int(parts[i]), tuple(rest[:-1]), rest[-1], kind)


def located(name: str) -> Parameter:
    """The same for a name that is known to be in a layer.

    Raises:
        ValueError: it is in none.
    """
    place = locate(name)
    if place is None:
        raise ValueError(f"the name {name!r} has no layer index")
    return place


def tensor_index(names: Iterable[str]) -> dict[Parameter, str]:
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


def blocks_of(index: Mapping[Parameter, str]) -> Blocks:
    """Every tensor with a layer index, by the block it stands in."""
    blocks: dict[BlockKey, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for place, name in index.items():
        blocks[place.prefix, place.layer, place.block][place.leaf][place.kind] = name
    return blocks


def is_attention(block: tuple[str, ...]) -> bool:
    """Whether the block is not an MLP's, whatever the names in it."""
    return any("attn" in part.lower() or "attention" in part.lower() for part in block)


def in_attention(name: str) -> bool:
    """Whether a tensor is an attention's within its layer, whatever the stack is called."""
    place = locate(name)
    return is_attention((*place.block, place.leaf) if place else tuple(name.split(".")))


def pattern(block: tuple[str, ...]) -> tuple[str, ...]:
    """The block without its numbers: the same for every expert."""
    return tuple("N" if part.isdigit() else part for part in block)


def contents(blocks: Blocks) -> dict[BlockKey, set[str]]:
    """What stands directly in every block: the names of its parameters and of the modules in it."""
    found: dict[BlockKey, set[str]] = defaultdict(set)
    for (prefix, layer, path), leaves in blocks.items():
        found[prefix, layer, path].update(leaves)
        for depth in range(len(path)):
            found[prefix, layer, path[:depth]].add(path[depth])
    return found


def numbers(block: tuple[str, ...]) -> list[int]:
    """The numbers in a block's name, in order."""
    return [int(part) for part in block if part.isdigit()]
