"""What is said of one MLP beside its module: reproduced, mismatch or not compared, and why.

Every function takes the row of a `Check` that the MLP has, and fills in what it finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .activations import Activation
from .checkpoint.places import locate
from .checkpoint.rules import MLPRules
from .comparison import compare, input_of, normalised, stream_of
from .neurons import GatedLayer
from .reference_model import function_of

Function = Callable[[Tensor], Tensor]


def compare_alone(
    row: dict[str, Any],
    layer: GatedLayer,
    rules: MLPRules,
    module: nn.Module,
    function: Function,
    *,
    seed: int,
    double: bool,
) -> Activation | None:
    """The MLP on its own input."""
    x = input_of(layer, seed)
    found = compare(layer, x, [module], function, double=double)
    if found.silent:
        row["reason"] = "it writes nothing: module and factors give zeros alone"
        return found.activation
    row |= {"relative_error": found.error, "exchanged_error": found.exchanged}
    if found.equal:
        said = None if layer.activation else f"with --activation {found.activation.name}, which was not known"
        same = "gate and up are interchangeable here, so this does not tell them apart"
        row |= {"verdict": "reproduced", "reason": _join(said, same if found.symmetric else None)}
    elif not found.finite:
        row["reason"] = "the module's output is not finite"
    elif layer.activation is None and found.explanation is None:
        row["reason"] = "with no activation that is known here the factors compute what the module does"
    elif found.explanation is None and _does_more(rules):
        row["reason"] = f"the module does more than its neurons: {rules.note}"
    else:
        why = found.explanation or "no other reading was found to"
        row |= {"verdict": "mismatch", "reason": f"the factors do not compute what the module does: {why}"}
    return found.activation


def is_rightly_fed(row: dict[str, Any], rules: MLPRules, norm: str | None) -> bool:
    """Whether a norm was folded in, and as far as can be seen the one that the model's MLP reads."""
    fed_by, folded, claimed = row["fed_by"], rules.norm, rules.norm is not None
    if not rules.known:
        fed = f"; the model feeds it from {_within(fed_by)}" if fed_by else ""
        row["reason"] = _join(row["reason"], f"the norm in front is not known to glu-probe and was not compared{fed}")
    elif claimed and fed_by is None:
        row["reason"] = _join(row["reason"], "which norm the model feeds it from could not be seen")
    elif claimed and fed_by == "" and _does_more(rules):
        row["reason"] = _join(row["reason"], f"something stands between norm and MLP: {rules.note}")
    elif fed_by and not claimed:
        reads = (
            f"in the model the MLP reads the output of {_within(fed_by)}, which is not folded in (another --family?)"
        )
        row |= {"verdict": "mismatch", "reason": reads}
    elif folded is not None and fed_by != norm:
        reads = f"the output of {_within(fed_by)}" if fed_by else "no module's output but the residual stream"
        row |= {
            "verdict": "mismatch",
            "reason": f"in the model the MLP reads {reads}, but the norm folded in is "
            f"{_within(norm) if norm else folded.words} (another --family?)",
        }
    return claimed and row["verdict"] == "reproduced"


def compare_behind_norm(
    row: dict[str, Any], layer: GatedLayer, rules: MLPRules, activation: Activation | None, norm: str,
    norm_module: nn.Module, module: nn.Module, function: Function, *, seed: int, double: bool,
) -> None:  # fmt: skip
    """The MLP behind its norm, on a residual stream."""
    h, apply = stream_of(layer, seed), function_of(norm_module, routed=False)
    x = normalised(h, centred=_is_centred(rules))
    known = replace(layer, activation=activation)
    found = compare(known, x, [module, norm_module], lambda h: function(apply(h).to(h.dtype)), h, double=double)
    if found.silent:
        row["reason"] = _join(row["reason"], f"behind {_within(norm)} it writes nothing, so that one was not compared")
        return
    row["folded_error"] = found.error
    if not found.equal:
        where = f"{_within(norm)} ({type(norm_module).__name__})"
        row |= {"verdict": "mismatch", "reason": f"behind its norm the factors differ: {where} is not {layer.norm}"}


def compare_with_norm_inside(
    row: dict[str, Any],
    layer: GatedLayer,
    rules: MLPRules,
    module: nn.Module,
    function: Function,
    *,
    seed: int,
    double: bool,
) -> None:
    """An MLP whose module begins with its norm: there is no comparison without it."""
    h = stream_of(layer, seed)
    x = normalised(h, centred=_is_centred(rules))
    found = compare(layer, x, [module], function, h, double=double)
    if found.silent:
        row["reason"] = "it writes nothing: module and factors give zeros alone"
        return
    row |= {"relative_error": found.error, "folded_error": found.error, "exchanged_error": found.exchanged}
    why = found.explanation or "no other reading was found to"
    row |= {"verdict": "reproduced"} if found.equal else {
        "verdict": "mismatch", "reason": f"the factors do not compute what the module with its norm does: {why}",
    }  # fmt: skip


def _does_more(rules: MLPRules) -> bool:
    """Whether the module is known to do more than the neurons: not a reading that is wrong, and no measure claims it.

    Of a family that is known, and whose norm is, a note can say nothing else.
    """
    return rules.known and rules.norm is not None and rules.note is not None


def _is_centred(rules: MLPRules) -> bool:
    return rules.norm is not None and rules.norm.kind == "layer"


def _within(path: str) -> str:
    """A module's path within its layer: what is the same for all layers."""
    place = locate(f"{path}.weight")
    return path if place is None else ".".join((*place.block, place.leaf))


def _join(*parts: str | None) -> str:
    return "; ".join(part for part in parts if part)
