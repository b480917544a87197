"""Experts by name: what models call routed and shared ones, what they call routers, and where configs count them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

ADVICE = (
    "Experts are read one by one (experts.N.gate_proj / up_proj / down_proj) or stacked in one tensor of a layer, under "
    "the names of the families in the table (`glu-probe ls families`); --family names one, and in "
    "Python `gp.register_family` adds one"
)
# What the names of shared experts begin with.
SHARED = ("shared_expert", "share_expert", "shared_mlp")
# Modules that may stand in an MLP's block and leave its own function alone.
ROUTING = ("gate", "router", "experts", "shared_expert_gate", "e_score_correction", "expert")
# Lists of MLPs within a layer: the number behind one is no layer's.
LISTS = frozenset(("experts", "mlps", "shared_experts"))
_ROUTERS = frozenset(("gate", "router", "gate_inp", "ffn_gate_inp"))
_COUNTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "expert_count", "n_experts",
    "num_moe_experts", "num_routed_experts", "moe_num_routed_experts",
)  # fmt: skip
_ROUTED = re.compile(r"\bexperts\b|_c?h?exps\b")
_HINT = re.compile(r"expert|exps\b|moe|router")
_BESIDE = re.compile(r"router|gate_inp|\bgate\b|bias")


def is_shared(path: Iterable[str]) -> bool:
    """Whether a module's path leads through a shared expert."""
    return any(part.startswith(SHARED) for part in path)


def is_router(path: Iterable[str]) -> bool:
    """Whether it leads to what chooses among experts, and not through one of them."""
    parts = tuple(path)
    return not _ROUTERS.isdisjoint(parts) and not is_shared(parts) and not _ROUTED.search(".".join(parts))


def is_routed(path: Iterable[str]) -> bool:
    """Whether it leads to part of a routed expert, and not to its bias or what chooses it."""
    name = ".".join(path)
    return bool(_ROUTED.search(name)) and not _BESIDE.search(name)


def speaks_of_experts(name: str) -> bool:
    """Whether anything in a tensor's name has to do with experts."""
    return bool(_HINT.search(name.lower()))


def expert_number(path: tuple[str, ...]) -> int | None:
    """The number behind "experts"; None where there is none."""
    after = path[path.index("experts") + 1 :][:1] if "experts" in path else ()
    return int(after[0]) if after and after[0].isdigit() else None


def expert_counts(config: Mapping[str, object]) -> dict[str, int]:
    """The config's keys that say how many experts a layer has; of several numbers (by layer, or by kind) the least."""
    nested = config.get("ffn_config")
    values = {**(nested if isinstance(nested, dict) else {}), **config}
    found = {key: _least(values.get(key)) for key in _COUNTS}
    return {key: value for key, value in found.items() if value}


def expert_width(config: Mapping[str, object]) -> int | None:
    """The d_mlp of an expert that lies with others in one matrix, where the config says it."""
    nested = config.get("ffn_config")
    found = nested.get("ffn_hidden_size") if isinstance(nested, dict) else None
    return found if isinstance(found, int) else None


def _least(value: object) -> int | None:
    several = value if isinstance(value, (list, tuple)) else [value]
    return min((one for one in several if isinstance(one, int) and one > 0), default=None)
