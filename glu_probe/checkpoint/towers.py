"""What the stacks of layers in a file are called: text, vision, audio, mtp, or by their own prefix."""

from __future__ import annotations

from collections.abc import Iterable

_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("vision", ("vision", "visual", "vit", "image", "video")),
    ("audio", ("audio", "speech")),
    ("mtp", ("mtp", "nextn")),
    # Stacks between or beside the towers. No part of a config that is read here describes them.
    ("other", ("connector", "perceiver", "resampler", "projector", "adapter", "qformer", "cross_attn", "talker")),
)
_LANGUAGE = ("language_model", "text_model", "llm", "thinker")
_STACKS = ("layers", "layer", "h", "block", "blocks", "blk")


def name_towers(prefixes: Iterable[str]) -> dict[str, str]:
    """Prefix of every stack to a name that no other stack has.

    "text" is the language model proper. A second stack of a kind keeps its prefix as its name, so that no rule about
    the first is applied to it.

    >>> name_towers(["model.language_model.layers", "model.connector.layers", "model.visual.blocks"])
    {'model.language_model.layers': 'text', 'model.visual.blocks': 'vision', 'model.connector.layers': 'model.connector.layers'}
    """
    names: dict[str, str] = {}
    for prefix in sorted(prefixes, key=_rank):
        kind = _kind(prefix)
        names[prefix] = prefix if kind == "other" or kind in names.values() else kind
    return names


def _kind(prefix: str) -> str:
    lowered = prefix.lower()
    return next((kind for kind, words in _KINDS if any(word in lowered for word in words)), "text")


def _rank(prefix: str) -> tuple:
    """First what is called a language model, then the stack nearest the root."""
    parts = prefix.lower().split(".")
    named = any(word in part for part in parts for word in _LANGUAGE)
    return _kind(prefix) == "other", not named, parts[-1] not in _STACKS, len(parts), prefix
