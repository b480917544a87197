"""What a model with experts is refused for: experts that no MLP was found for, layer by layer.

Shared experts alone, or the experts of all layers but one, are a plausible model of another kind.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING

from ..errors import IncompleteTriple, LayoutUnknown, NoExpertsMapped
from .expert_names import ADVICE, expert_counts, expert_number, is_routed, is_router, speaks_of_experts
from .known_families import PLAIN
from .places import Blocks, Parameter, is_attention, locate
from .source import TensorInfo
from .towers import name_towers

if TYPE_CHECKING:
    from .sites import Site

# Names of stacked gates: a count of experts and one of these that no MLP has is a layer that was not understood.
_STACKED = re.compile(r"gate_proj|up_proj|gate_up_proj|input_linear|\bw1\b|\bw13\b")
# (stack, layer)
LayerKey = tuple[str, int]


def routers_of(blocks: Blocks, infos: Mapping[str, TensorInfo]) -> dict[LayerKey, str]:
    """The matrix of every layer that chooses among its experts."""
    found: dict[LayerKey, str] = {}
    for (prefix, layer, block), leaves in blocks.items():
        if is_attention(block):
            continue
        for leaf, kinds in leaves.items():
            if "weight" in kinds and is_router((*block, leaf)):
                shape = infos[kinds["weight"]].shape
                beside = [infos[k["weight"]].shape for other, k in leaves.items() if other != leaf and "weight" in k]
                # As many rows as columns, or a matrix of the same shape beside it: another kind of gate.
                if len(shape) == 2 and shape[0] > 1 and shape[0] != shape[1] and shape not in beside:
                    found[prefix, layer] = kinds["weight"]
    return found


def choices(router: TensorInfo, d_model: int) -> int | None:
    """Among how many a router chooses; None if it does not read what the MLP reads."""
    rows, columns = router.shape
    return rows if columns == d_model else columns if rows == d_model else None


def refuse_unmapped_experts(
    sites: list[Site],
    index: Mapping[Parameter, str],
    infos: Mapping[str, TensorInfo],
    routers: Mapping[LayerKey, str],
    config: Mapping[str, object],
    model_type: str | None,
    skipped: Container[str] = (),
    identities: int = 0,
) -> None:
    """Experts that the file or the config speaks of, and that no site is; unless the model's are known to be plain.

    Args:
        sites: the MLPs that were found, shared ones still called so.
        index, infos: every tensor, by place and by name.
        routers: see `routers_of`.
        config: the part about the language model.
        model_type: as the file calls itself.
        skipped: stacks that are left out as a whole.
        identities: experts of a layer that have no weights.

    Raises:
        NoExpertsMapped, IncompleteTriple.
    """
    if not sites and model_type in PLAIN:
        return
    counts = {key: count for key, count in expert_counts(config).items() if count > 1}
    routed: dict[LayerKey, list[Site]] = defaultdict(list)
    for site in sites:
        if isinstance(site.expert, int):
            routed[site.prefix, site.layer].append(site)
    left = _left(sites, index, infos, skipped)
    matrices = [name for name in left if len(infos[name].shape) > 1 and is_routed(_path(name))]
    if matrices:
        hints = [name for name in left if speaks_of_experts(name)]
        raise _unmapped([*matrices, *hints], counts, some=bool(routed))
    lonely = {
        key: name
        for key, name in routers.items()
        if key not in routed and key[0] not in skipped and _is_of_an_mlp(key, name, sites)
    }
    if lonely and (sites or counts):  # of a file without any MLP `refuse_ungated` says what it has
        (_, layer), name = min(lonely.items(), key=lambda item: item[0][1])
        raise _unmapped(list(lonely.values()), counts, some=bool(routed), where=(
            f"layer {layer}: {name!r} {list(infos[name].shape)} chooses among experts, and the layer has none. "
        ))  # fmt: skip
    if counts and not routed:
        # A count alone proves nothing (some dense models keep the key): layers without an MLP, or expert-like names, do.
        hints = [name for name in left if speaks_of_experts(name)]
        stacked = [name for name, info in infos.items() if len(info.shape) > 2 and _STACKED.search(name)]
        shared = [name for site in sites if site.group == "shared" for name in site.tensors.values()]
        if hints or stacked or shared or not sites:
            raise _unmapped([*stacked, *hints] or shared or list(infos), counts, some=False)
    for key, present in routed.items():
        _refuse_missing(present, sites, infos.get(routers.get(key, "")), next(iter(counts.values()), 0), identities)


def refuse_read_identities(infos: Mapping[str, TensorInfo], count: int, identities: int) -> None:
    """Experts behind the config's number of them that have weights, or are more than it says write what they read."""
    parts: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in infos:
        number = expert_number(_path(name))
        if number is not None and number >= count:
            parts[name.partition(".experts.")[0], number].add(_path(name)[-1])
    behind = {number for _, number in parts}
    whole = next(((stem, number) for (stem, number), leaves in parts.items() if len(leaves) > 2), None)
    if whole or len(behind) > identities:
        stem, number = whole or next(iter(parts))
        raise LayoutUnknown(
            f"the config says {count} experts with weights and {identities} without, but '{stem}.experts.{number}' has "
            + ("gate, up and down" if whole else f"weights, as {len(behind)} such have"),
            hint="The config is of another model, or its number of experts is wrong",
        )


def _left(
    sites: Iterable[Site], index: Mapping[Parameter, str], infos: Mapping[str, TensorInfo], skipped: Container[str]
) -> list[str]:
    """Tensors that are no MLP's, no attention's and of no stack that is left out."""
    used = {tensor for site in sites for tensor in site.tensors.values()}
    apart = {
        name for place, name in index.items() if place.prefix in skipped or is_attention((*place.block, place.leaf))
    }
    return sorted(name for name in infos if name not in used and name not in apart)


def _is_of_an_mlp(key: LayerKey, router: str, sites: list[Site]) -> bool:
    """Whether it chooses among a layer's experts; "gate" beside an MLP's block, or in another tower, can be anything."""
    blocks = [site.block[:1] for site in sites if (site.prefix, site.layer) == key]
    path = _path(router)
    if blocks:
        return "gate" not in path or path[:1] in blocks
    return any(site.prefix == key[0] for site in sites) or name_towers([key[0]])[key[0]] == "text"


def _path(name: str) -> tuple[str, ...]:
    place = locate(name)
    return (*place.block, place.leaf) if place else tuple(name.split("."))


def _unmapped(names: list[str], counts: Mapping[str, int], *, some: bool, where: str = "") -> NoExpertsMapped:
    patterns = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "{}", name) for name in names))
    said = ", ".join(f"{key} = {value}" for key, value in counts.items()) or "tensors named after experts"
    return NoExpertsMapped(
        f"{where}The model has experts ({said}), but {'not all' if some else 'none'} of their tensors could be mapped. "
        f"Unmatched: {', '.join(patterns[:12])}{' ...' if len(patterns) > 12 else ''}",
        hint=ADVICE,
    )


def _refuse_missing(
    present: list[Site], sites: list[Site], router: TensorInfo | None, declared: int, identities: int
) -> None:
    """A layer whose experts have gaps, or are fewer than the config says or its router chooses among."""
    first = present[0]
    numbers = {site.expert for site in present if isinstance(site.expert, int)}
    beside = {
        site.expert for site in sites
        if (site.prefix, site.layer) == (first.prefix, first.layer) and str(site.expert).startswith("shared.")
    }  # fmt: skip
    chosen = choices(router, first.d_model) if router else None
    # Some routers weigh numbered shared experts, too.
    wanted = [
        (max(numbers) + 1, ""),
        (declared if first.tower == "text" else 0, "the config says"),
        ((chosen or 0) - identities - len(beside), "the layer's router chooses among"),
    ]
    number, says = max(wanted)
    absent = sorted(set(range(number)) - numbers)
    if absent:
        raise IncompleteTriple(
            f"experts {', '.join(map(str, absent[:8]))} are missing beside {len(numbers)} others"
            + (f" ({says} {number})" if says else ""),
            where=f"layer {first.layer}",
            hint="The checkpoint is incomplete: a shard may be missing, or it was pruned and its config not",
        )
