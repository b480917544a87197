"""Where in a TransformerBridge to listen to a gated MLP, and which norm feeds it.

A component counts as a gated MLP that can be heard if its branches, their product and its output have hooks. Names alone
mislead: in mixtures of experts `mlp.gate` is the router.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..checkpoint.sites import Site

Stream = Float[Tensor, "*batch d_model"]
_EPSILON = ("variance_epsilon", "eps")
_CONFIG_EPSILON = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")


@dataclass(frozen=True)
class Listener:
    """Hook names of one MLP: what it reads, a, b, S(a) b and its output.

    Attributes:
        norms: names of the components of its block that could be the norm in front of it.
        multipliers: constants that the model applies behind the hooks of a and b, and behind that of the output.
    """

    reads: str
    gate: str
    up: str
    product: str
    output: str
    norms: tuple[str, ...] = ()
    multipliers: tuple[float, float, float] = (1.0, 1.0, 1.0)


def listener_of(site: Site, hooks: Iterable[str], multipliers: tuple[float, float, float]) -> Listener | str:
    """Where to listen to an MLP, or why that cannot be done.

    Args:
        site: the MLP.
        hooks: every hook name of the bridge.
        multipliers: the family's constants on gate, up and down.
    """
    hooks = set(hooks)
    if site.tower != "text":
        return f"the {site.tower} tower does not run on text"
    if site.group == "routed":
        return "routed experts run batched, without hooks for neurons"
    block = f"blocks.{site.layer}."
    stems = (
        (f"{block}mlp.shared_experts.", f"{block}mlp.shared_expert.")
        if site.group == "shared"
        else (f"{block}mlp.", f"{block}mlp.dense_")
    )
    for stem in stems:
        names = {role: f"{stem}{part}" for role, part in (
            ("gate", "gate.hook_out"), ("up", "in.hook_out"), ("product", "out.hook_in"), ("output", "out.hook_out"),
        )}  # fmt: skip
        if set(names.values()) <= hooks:
            children = (name.removesuffix(".hook_in") for name in sorted(hooks) if name.endswith(".hook_in"))
            norms = tuple(
                name
                for name in children
                if name.startswith(block) and "." not in name[len(block) :] and f"{name}.hook_out" in hooks
            )
            return Listener(f"{stem}gate.hook_in", **names, norms=norms, multipliers=multipliers)
    return "TransformerLens has no hooks for its branches"


def feeding_norm(listener: Listener, held: Mapping[str, Any]) -> str | None:
    """The component whose output, in this run, is what the MLP reads; None if it reads no such output.

    Args:
        listener: of the MLP.
        held: tensors by hook name.
    """
    reads = held[listener.reads]
    for name in listener.norms:
        into, out = held.get(f"{name}.hook_in"), held.get(f"{name}.hook_out")
        if not isinstance(into, Tensor) or not isinstance(out, Tensor) or into.shape != out.shape:
            continue
        # blocks of experts read the tokens of all sequences in one row
        if out.numel() == reads.numel() and torch.equal(out.reshape(reads.shape), reads):
            return name
    return None


def normalised(stream: Stream, module: Any, config: Any, *, centred: bool) -> Stream:
    """h / rms(h), or (h - mean(h)) / std(h), float32: what a norm makes of the stream before its gain.

    Args:
        stream: h, what the norm reads.
        module: the norm, for its epsilon.
        config: the model's, where the module does not say.
        centred: whether it subtracts the mean.
    """
    places = [(module, name) for name in _EPSILON] + [(config, name) for name in _CONFIG_EPSILON]
    epsilon = next((value for place, name in places if isinstance(value := getattr(place, name, None), float)), 0.0)
    stream = stream.float()
    if centred:
        stream = stream - stream.mean(-1, keepdim=True)
    return stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + epsilon)
