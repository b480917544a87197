"""What single families do besides: gates with limits, layers whose neurons are coupled, constants of the config.

The family table for people says what the first line of a `..._missing` function's description says, or, where it has none,
what the function answers.
"""

from __future__ import annotations

from ..activations import Activation, limited, swish
from .family import Part


def gpt_oss_gate(_: Activation, part: Part, layer: int, group: str) -> Activation:
    """min(g, L) sigmoid(alpha min(g, L)) times clamp(u, -L, L) + 1, whatever `hidden_act` says."""
    alpha, limit = part.get("swiglu_alpha", 1.702), part.get("swiglu_limit", 7.0)
    return limited(swish(alpha), limit, up_offset=1.0)


def limited_gate(base: Activation, part: Part, layer: int, group: str) -> Activation:
    """S(min(g, L)) times clamp(u, -L, L)."""
    limit = part.get("swiglu_limit")
    return base if limit is None else limited(base, limit)


def limited_experts(base: Activation, part: Part, layer: int, group: str) -> Activation:
    """The same for routed experts alone."""
    return limited_gate(base, part, layer, group) if group == "routed" else base


def step_gate(base: Activation, part: Part, layer: int, group: str) -> Activation:
    """min(S(g), L) times clamp(u, -L, L), with limits by layer; 0 or nothing is no limit."""
    limits = part.get("swiglu_limits" if group == "routed" else "swiglu_limits_shared") or ()
    limit = limits[layer] if layer < len(limits) else None
    return limited(base, limit, after=True) if limit else base


def llama4_missing(part: Part, layer: int, group: str) -> str | None:  # noqa: D103
    return "the router's score multiplies the input of an expert, so its scale depends on the token" if (
        group == "routed"
    ) else None  # fmt: skip


def gemma3n_missing(part: Part, layer: int, group: str) -> str | None:
    """Layers with `activation_sparsity_pattern`: only neurons with large pre-activations act, so they are coupled."""
    pattern = part.get("activation_sparsity_pattern")
    if not isinstance(pattern, (list, tuple)) or layer >= len(pattern):
        return "the file does not say which layers keep only the neurons with the largest pre-activations of a token"
    if pattern[layer]:
        return "only the neurons with the largest pre-activations of a token act, so they are coupled"
    return None


def sub_norm_missing(part: Part, layer: int, group: str) -> str | None:  # noqa: D103
    return "a norm over all neurons stands before the down projection, so they are coupled"


def zamba2_missing(part: Part, layer: int, group: str) -> str | None:  # noqa: D103
    if part.get("use_shared_mlp_adapter", True):
        return "each use of the shared block adds a low-rank update of its own to gate and up"
    return None


def falcon_h1_multipliers(part: Part) -> tuple[float, float, float]:
    """Constants on gate, up and down."""
    gate, down = part.get("mlp_multipliers") or (1.0, 1.0)  # GGUF files have them in the weights
    return gate, 1.0, down
