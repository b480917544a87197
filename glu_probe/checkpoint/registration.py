"""Families that a user adds: what is asked for, and what is checked before it counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..activations import Activation, activation
from ..errors import BadOption
from .families import GGUF_NORMS
from .family import (
    FUSED_ORDERS,
    NORM_KINDS,
    NORM_WEIGHTS,
    STORAGES,
    ActivationRule,
    Family,
    FusedOrder,
    Norm,
    Part,
    Projections,
    Storage,
)
from .known_families import enter, is_built_in

Names = tuple[str, str, str] | tuple[str, str]
Word = TypeVar("Word", bound=str)


def register_family(
    *names: str,
    projections: Names | Sequence[Names],
    order: FusedOrder | None = None,
    stored: Storage = "rows",
    act: str | Activation | None = None,
    act_key: str | Sequence[str] = (),
    norm: str | None = None,
    norm_kind: str = "rms",
    norm_weight: str = "plain",
    norm_bias: bool = False,
    post_norm: str | None = None,
    gguf: str | Sequence[str] = (),
    missing: str | Callable[[Part, int, str], str | None] | None = None,
    replace: bool = False,
) -> Family:
    """Say how a family stores its gated MLPs, for models that the table does not have.

    It holds for this process. `--family NAME` and `family=` know it too.

    Args:
        *names: `model_type` values of the configs it is for.
        projections: the tensors' names within the MLP, as (gate, up, down), or (gate_and_up, down) for one tensor of
            both. A sequence of those where dense MLPs and experts have different names.
        order: for one tensor of both: "gate-first", "up-first" or "interleaved".
        stored: "rows" for [out, in], as linear layers are, "columns" for [in, out]; "either" for stacked experts whose
            shape decides; "row-stacked" for experts below each other in two dimensions.
        act: the gate's nonlinearity, if no key of the config says it.
        act_key: config key or keys that say it; the first present one counts, and `act` where none is.
        norm: name within the layer of the norm that the MLP reads; None where it reads the stream as it is.
        norm_kind: "rms" or "layer".
        norm_weight: "plain" for a gain w, "offset" for 1 + w, "none" for none.
        norm_bias: whether the norm adds a bias.
        post_norm: name of a norm on the MLP's output, of the same kind and weight.
        gguf: `general.architecture` values of GGUF files; their names of tensors are llama.cpp's, with the gate apart.
        missing: why measures of the neurons' function are not to be had, always or by (config, layer, group).
        replace: take the place of a family that the table has. Without it such a name is refused.

    Returns:
        What was registered.

    Raises:
        BadOption: something is missing, misspelt, contradictory, or taken; nothing is registered then.
        UnknownActivation: `act` has no formula here.

    >>> family = register_family("my_model", projections=("w1", "w3", "w2"), act="silu", norm="ffn_norm")
    >>> family.norm.words
    'RMSNorm, gain w'
    """
    architectures = _texts("gguf", gguf, empty=True)
    if not names:
        raise BadOption(
            "a family without a name", hint='Give the model_type of its configs: register_family("my_model", ...)'
        )
    for name in (*_texts("names", names), *architectures):
        if is_built_in(name) and not replace:
            raise BadOption(
                f"{name!r} is a family of the table",
                hint="Take another name, or say replace=True to read its files your way",
            )
    if act is None and not act_key:
        raise BadOption(
            "neither act nor act_key says what the gate's nonlinearity is",
            hint='Give act="silu" or act_key="hidden_act"',
        )
    known = activation(act) if act is not None else None
    several = [_projections(one, order, stored) for one in _several(projections)]
    _refuse_contradictions(several, order, norm, norm_kind, norm_weight, norm_bias, post_norm)
    family = Family(
        names=tuple(names),
        gguf=architectures,
        projections=tuple(several),
        activation=ActivationRule(_texts("act_key", act_key, empty=True), default=known, gguf=known),
        norm=_norm(norm, norm_kind, norm_weight, norm_bias, bool(architectures)),
        post_norm=_norm(post_norm, norm_kind, norm_weight, False, bool(architectures)),
        missing=(lambda part, layer, group: missing) if isinstance(missing, str) else _called(missing),
    )
    enter(family)
    return family


def _refuse_contradictions(
    several: list[Projections], order: object, norm: object, kind: str, weight: str, bias: bool, post_norm: object
) -> None:
    """What is well formed on its own, and together would be ignored or mean two things."""
    swapped = next(
        ((a, b) for a in several for b in several if a.gate != a.up and (a.gate, a.up) == (b.up, b.gate)), None
    )
    if swapped:
        raise BadOption(
            f"{swapped[0].gate!r} is the gate in one of projections and the up projection in another",
            hint="Register the two as families of their own",
        )
    if order is not None and not any(one.fused for one in several):
        raise BadOption(
            f"order is {order!r}, and no tensor of projections holds gate and up together",
            hint="Give (gate_and_up, down), or leave order out",
        )
    if norm is None and (bias or (post_norm is None and (kind, weight) != ("rms", "plain"))):
        raise BadOption("norm is None, and norm_kind, norm_weight or norm_bias is given", hint="Name the norm")
    if weight == "none" and bias:
        raise BadOption("norm_weight is 'none', and norm_bias is true", hint="A norm without a gain has no bias here")


def _texts(what: str, values: object, *, empty: bool = False) -> tuple[str, ...]:
    found = (values,) if isinstance(values, str) else values
    if (
        not isinstance(found, (tuple, list))
        or not all(isinstance(v, str) and v.strip() for v in found)
        or not (found or empty)
    ):
        raise BadOption(f"{what} is {values!r}", hint="Give a text, or several")
    return tuple(found)


def _called(missing: object) -> Callable[[Part, int, str], str | None] | None:
    if missing is not None and not callable(missing):
        raise BadOption(
            f"missing is {missing!r}", hint="Give the reason as a text, or a function of (config, layer, group)"
        )
    return missing


def _several(projections: object) -> list[Names]:
    one = isinstance(projections, (tuple, list)) and projections and all(isinstance(name, str) for name in projections)
    several = [projections] if one else projections
    if not isinstance(several, (tuple, list)) or not several:
        raise BadOption(
            f"projections is {projections!r}", hint='Give (gate, up, down), such as ("w1", "w3", "w2"), or several'
        )
    return list(several)


def _projections(names: object, order: object, stored: object) -> Projections:
    names = _texts("projections", names)
    fused = None if order is None else _one_of(FUSED_ORDERS, "order", order)
    storage = _one_of(STORAGES, "stored", stored)
    if any("." in name for name in names) or len(names) not in (2, 3) or len(set(names)) < len(names):
        raise BadOption(
            f"projections has {names!r}",
            hint="Give (gate, up, down) or (gate_and_up, down): different names, each the last one before .weight",
        )
    if len(names) == 3:
        return Projections(*names, stored=storage)
    if fused is None:
        raise BadOption(
            f"gate and up share {names[0]!r}, and order does not say which part is the gate",
            hint=f"Give order, one of {', '.join(FUSED_ORDERS)}",
        )
    if storage == "row-stacked":
        raise BadOption(
            f"gate and up share {names[0]!r}, and stored is 'row-stacked'",
            hint="Experts below each other are read from gate, up and down apart: give three names",
        )
    return Projections(names[0], names[0], names[1], fused, storage)


def _one_of(allowed: Sequence[Word], what: str, given: object) -> Word:
    for word in allowed:
        if word == given:
            return word
    raise BadOption(f"{what} is {given!r}", hint=f"Use one of {', '.join(allowed)}")


def _norm(name: object, kind: str, weight: str, bias: bool, gguf: bool) -> Norm | None:
    if name is None:
        return None
    if not isinstance(name, str) or not name or set("{}") & set(name) or name.endswith((".weight", ".bias")):
        raise BadOption(
            f"the norm's name is {name!r}", hint='Give the module\'s name within the layer, such as "ffn_norm"'
        )
    known = _one_of(NORM_KINDS, "norm_kind", kind), _one_of(NORM_WEIGHTS, "norm_weight", weight)
    if gguf and name not in GGUF_NORMS:
        raise BadOption(
            f"what GGUF files call the norm {name!r} is not known",
            hint=f"Known are {', '.join(GGUF_NORMS)}; register GGUF files apart, under one of them",
        )
    return Norm(name, *known, bool(bias))
