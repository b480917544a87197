"""What was decided for a stack of layers before any weight is read: family, activation and norms, and from where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..activations import Activation, activation
from .families import Family, FusedOrder, Norm, family_option, find_family


@dataclass(frozen=True)
class Options:
    """How a checkpoint is read; every one of them is recorded with the results.

    Attributes:
        fold_norm: multiply the norm in front of the MLP into query and key, so that x is the normalised stream.
        fold_post_norm: multiply the gain of a norm on the MLP's output into value.
        family: take this family's rules, whatever the config says.
        fused_layout: which half of a fused gate-and-up tensor is the gate.
        activation: take this activation, whatever the config says.
    """

    fold_norm: bool = True
    fold_post_norm: bool = False
    family: str | None = None
    fused_layout: FusedOrder | None = None
    activation: str | None = None


_TEXT_KEYS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class Config:
    """The model's own description: a config.json, or GGUF metadata under the same keys."""

    values: Mapping[str, Any]
    gguf: bool

    def of(self, tower: str) -> Mapping[str, Any]:
        """The part about one tower; empty for a stack that no part describes."""
        if tower in ("text", "mtp"):
            return self.text
        nested = self._outer.get(f"{tower}_config")
        return nested if isinstance(nested, dict) else {}

    @property
    def text(self) -> Mapping[str, Any]:
        """The part about the language model, which may stand at the top."""
        nested = (self._outer.get(key) for key in _TEXT_KEYS)
        return next((part for part in nested if isinstance(part, dict)), self._outer)

    @property
    def _outer(self) -> Mapping[str, Any]:
        """The part that has a key for every tower."""
        nested = self.values.get("thinker_config")
        return nested if isinstance(nested, dict) else self.values

    @property
    def model_type(self) -> str | None:
        """`model_type` of the language model, or `general.architecture` of a GGUF file."""
        return _text(self.text.get("model_type")) or _text(self.values.get("model_type"))

    def model_type_of(self, tower: str) -> str | None:
        """`model_type` of one tower, None where the config does not say."""
        return self.model_type if tower in ("text", "mtp") else _text(self.of(tower).get("model_type"))

    def family(self, tower: str, named: str | None) -> tuple[str | None, Family | None]:
        """Name and rules of a tower's family: the user's word about the language model, else the config's."""
        if named is not None and tower in ("text", "mtp"):
            return named, family_option(named)
        name = self.model_type_of(tower)
        family = find_family(name, gguf=self.gguf)
        return (name, family) if family else (None, None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


@dataclass(frozen=True)
class TowerRules:
    """The decisions for one stack of layers.

    Attributes:
        name, family: the family's name as found or given, and its rules; None if it is not in the table.
        activation, activation_source: the gate, and where it was read; None with the reason as source.
        norm: what feeds the MLP, None if nothing is known or the stream feeds it as it is.
        post_norm: norm on the MLP's output.
    """

    name: str | None
    family: Family | None
    activation: Activation | None
    activation_source: str
    norm: Norm | None
    post_norm: Norm | None

    @property
    def scale_note(self) -> str | None:
        """Why the scale of the MLP's input is not known, or None where it is."""
        if self.family is None:
            return "the family is not in the table, so the norm in front of the MLP is not known"
        if self.norm is None:
            return "no norm stands in front of the MLP, so the scale of its input is not known without text"
        return None

    def norm_words(self, *, folded: bool) -> str:
        """The norm in front, for reports."""
        if self.family is None:
            return "unknown, not folded"
        if self.norm is None:
            return "none in front of the MLP"
        return f"{self.norm.words}, {'folded' if folded else 'not folded'}"


def decide(config: Config, tower: str, options: Options) -> TowerRules:
    """The rules of one tower.

    Raises:
        UnknownActivation: the config names an activation whose formula is not known here.
    """
    name, family = config.family(tower, options.family)
    act, source = _activation(config, config.of(tower), family, options)
    if family is None:
        return TowerRules(None, None, act, source, None, None)
    norm, post_norm = family.norm, family.post_norm
    part = config.of(tower)
    if family.norm_if_parallel and part.get(family.norm_if_parallel[0]):
        norm = family.norm_if_parallel[1]
    norm, post_norm = (_as_configured(one, part, gguf=config.gguf) for one in (norm, post_norm))
    return TowerRules(name, family, act, source, norm, post_norm)


def _as_configured(norm: Norm | None, part: Mapping[str, Any], *, gguf: bool) -> Norm | None:
    """The norm with what the config decides; GGUF files have the 1 of 1 + w baked in."""
    if norm is None:
        return None
    weight = "plain" if gguf and norm.weight == "offset" else norm.weight
    return replace(norm, weight=weight, bias=bool(part.get(norm.bias)) if isinstance(norm.bias, str) else norm.bias)


def _activation(
    config: Config, part: Mapping[str, Any], family: Family | None, options: Options
) -> tuple[Activation | None, str]:
    if options.activation is not None:
        return activation(options.activation), "option"
    if family is None:
        return None, "family not in the table"
    rule = family.activation
    if config.gguf:
        return (activation(rule.gguf), "family rule") if rule.gguf else (None, "the family has no rule for GGUF")
    for key in rule.keys:
        named = part.get(key)
        if named is not None:
            renamed = rule.renamed.get(named) if isinstance(named, str) else None
            return (activation(renamed), "family rule") if renamed else (activation(named), f"config {key}")
    if rule.default is not None:
        return activation(rule.default), "family rule"
    return None, f"config has none of {', '.join(rule.keys)}"


def gguf_config(metadata: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
    """GGUF metadata under the names that Hugging Face configs use."""
    architecture = metadata.get("general.architecture")
    renamed = {
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers",
        "expert_count": "num_experts",
        "residual_scale": "residual_multiplier",
    }
    config = {new: metadata.get(f"{architecture}.{old}") for old, new in renamed.items()}
    # The file's own key for this is wrong in files of some converters; llama.cpp goes by the tensors too.
    config["use_parallel_residual"] = not any(name.endswith(".ffn_norm.weight") for name in tensors)
    return {"model_type": architecture} | {key: value for key, value in config.items() if value is not None}
