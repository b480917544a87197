"""Finding the family of a model: those of the table, those that were registered, and names of plain MLPs."""

from __future__ import annotations

import difflib

from ..errors import BadOption
from .families import FAMILIES
from .family import Family

_BY_NAME = {name: family for family in FAMILIES for name in family.names}
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.gguf}
_REGISTERED: dict[str, Family] = {}
# What configs call a tower by: a suffix, or the wrapper's own name.
_TOWER_SUFFIXES = {"vision": ("_vision", "_vision_model"), "audio": ("_audio", "_audio_encoder")}

# Plain MLPs by the name their config has; told apart from unknown families in the message.
PLAIN = frozenset(
    [
        "gpt2",
        "gpt_neox",
        "gpt_neo",
        "gptj",
        "falcon",
        "starcoder2",
        "gpt_bigcode",
        "phi",
        "persimmon",
        "nemotron",
        "nemotron_h",
        "arcee",
        "nanochat",
        "apertus",
        "jais2",
        "siglip",
        "clip",
        "bert",
        "roberta",
        "bart",
        "opt",
        "bloom",
        "mpt",
        "mamba",
        "mamba2",
        "rwkv",
        "codegen",
        "timesfm",
        "levit",
        "nllb-moe",
        "switch_transformers",
    ]
)


def all_families() -> tuple[Family, ...]:
    """The table, and behind it what was registered."""
    return (*FAMILIES, *registered_families())


def registered_families() -> tuple[Family, ...]:
    """What was registered in this process."""
    return tuple({id(family): family for family in _REGISTERED.values()}.values())


def enter(family: Family) -> None:
    """Make a registered family known under all its names; an earlier one of the same names is forgotten."""
    for name in family.names:
        _REGISTERED[name] = _BY_NAME[name] = family
    for name in family.gguf:
        _REGISTERED[f"gguf {name}"] = _BY_ARCHITECTURE[name] = family


def is_built_in(name: str) -> bool:
    """Whether the table itself has this model_type or GGUF architecture, be it as one without gates."""
    return name in PLAIN or any(name in (*family.names, *family.gguf) for family in FAMILIES)


def find_family(name: str | None, *, gguf: bool = False, tower: str = "text") -> Family | None:
    """The family of a `model_type` (or GGUF architecture), None if it is not in the table.

    Configs of some vision and audio towers carry the name of the whole model: theirs is then looked up first.
    """
    if gguf:
        return _BY_ARCHITECTURE.get(name or "")
    for suffix in _TOWER_SUFFIXES.get(tower, ()):
        if (family := _BY_NAME.get(f"{name}{suffix}")) is not None:
            return family
    return _BY_NAME.get(name or "")


def family_option(name: str) -> Family:
    """The family a user named.

    Raises:
        BadOption: there is no such family; the message says which names come near.
    """
    family = _BY_NAME.get(name) or _BY_ARCHITECTURE.get(name)
    if family is None:
        near = difflib.get_close_matches(name, sorted({*_BY_NAME, *_BY_ARCHITECTURE}), n=3)
        raise BadOption(
            f"family {name!r} is not in the table",
            hint=(f"Did you mean {' or '.join(near)}? " if near else "") + "`glu-probe ls families` lists them",
        )
    return family
