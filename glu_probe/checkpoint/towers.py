"""The stacks of layers in a file: what they are called, and which part of the config speaks of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .places import STACKS

_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("vision", ("vision", "visual", "vit", "image", "video", "vpm")),
    ("audio", ("audio", "speech", "sound")),
    ("mtp", ("mtp", "nextn")),
    # Stacks between or beside the towers.
    ("other", ("connector", "perceiver", "resampler", "projector", "adapter", "qformer", "cross_attn", "talker",
               "depth_decoder", "code_predictor", "token2wav", "code2wav", "draft", "assistant")),
)  # fmt: skip
_LANGUAGE = ("language_model", "text_model", "llm", "thinker", "backbone_model")
_ENCODERS = ("encoder", "enc")
# Parts of configs that describe a stack although their key does not end in _config.
_PARTS = ("encoder", "decoder")
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "language_model_config", "decoder", "decoder_config")


def is_main(tower: str) -> bool:
    """Whether what a user says about the model is about this stack: the language model, and what is trained with it."""
    return tower in ("text", "mtp", "encoder")


def name_towers(prefixes: Iterable[str]) -> dict[str, str]:
    """Prefix of every stack to a name that no other stack has.

    "text" is the language model proper, or the decoder beside an encoder. A second stack of a kind keeps its prefix as
    its name, so that no rule about the first is applied to it.

    >>> name_towers(["model.language_model.layers", "model.connector.layers", "model.visual.blocks"])
    {'model.language_model.layers': 'text', 'model.visual.blocks': 'vision', 'model.connector.layers': 'model.connector.layers'}
    >>> name_towers(["encoder.block", "decoder.block"])
    {'decoder.block': 'text', 'encoder.block': 'encoder'}
    """
    names: dict[str, str] = {}
    for prefix in sorted(prefixes, key=_rank):
        kind = _kind(prefix)
        if kind == "text" and "text" in names.values() and _is_encoder(prefix):
            kind = "encoder"
        names[prefix] = prefix if kind == "other" or kind in names.values() else kind
    return names


def part_of(config: Mapping[str, Any], tower: str, prefix: str = "") -> Mapping[str, Any]:
    """The part of a config that describes a stack; empty where none does.

    Args:
        config: the whole config.
        tower: its name.
        prefix: what its tensors' names begin with.
    """
    words = (prefix or tower).lower()
    thinker = config.get("thinker_config")
    found = thinker if isinstance(thinker, dict) and _kind(words) != "other" else config
    top = found
    while True:  # into the part whose name the prefix has, as deep as it goes
        inner = [(stem, part) for stem, part in _parts(found) if _speaks_of(stem, words)]
        if not inner:
            break
        stem, found = max(inner, key=lambda pair: (pair[0].lower() in words, len(pair[0])))
        words = words.replace(stem, "", 1)
    kind = _kind((prefix or tower).lower())
    if tower in ("text", "mtp"):
        return text_part(found)
    if found is top:
        # An encoder without a part of its own shares the decoder's.
        shared = tower == "encoder" and not any(key in _PARTS or key in _TEXT_KEYS for key, _ in _dicts(config))
        return config if shared else {}
    return text_part(found) if kind == "other" else found


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about the language model, which may stand at the top."""
    thinker = config.get("thinker_config")
    config = thinker if isinstance(thinker, dict) else config
    nested = (config.get(key) for key in _TEXT_KEYS)
    return next((part for part in nested if isinstance(part, dict) and _describes_layers(part)), config)


def _describes_layers(part: Mapping[str, Any]) -> bool:
    return "model_type" in part or "hidden_size" in part or "num_hidden_layers" in part


def _dicts(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(key, part) for key, part in config.items() if isinstance(part, dict)]


def _parts(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Nested parts by what they are about."""
    return [
        (key.removesuffix("_config"), part)
        for key, part in _dicts(config)
        if (key.endswith("_config") or key in _PARTS) and (_describes_layers(part) or any(_dicts(part)))
    ]


def _speaks_of(stem: str, words: str) -> bool:
    """Whether a part called so is about a stack whose name has these words."""
    stem = stem.lower()
    if stem in ("encoder", "decoder"):
        return stem in words.split(".")
    kind = _kind(stem)
    if kind in ("vision", "audio"):
        return _kind(words) == kind
    return stem in words and stem not in ("text", "llm", "language")


def _kind(prefix: str) -> str:
    lowered = prefix.lower()
    found = [kind for kind, names in _KINDS if any(word in lowered for word in names)]
    return "other" if "other" in found else found[0] if found else "text"


def _is_encoder(prefix: str) -> bool:
    return any(part in _ENCODERS for part in prefix.lower().split("."))


def _rank(prefix: str) -> tuple:
    """First what is called a language model, then what is no encoder, then the stack nearest the root."""
    parts = prefix.lower().split(".")
    named = any(word in part for part in parts for word in _LANGUAGE)
    return _kind(prefix) == "other", not named, _is_encoder(prefix), parts[-1] not in STACKS, len(parts), prefix
