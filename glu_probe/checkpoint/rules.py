"""What was decided for a stack of layers before any weight is read: family, activation and norms, and from where."""

from __future__ import annotations

from collections.abc import Mapping
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


@dataclass(frozen=True)
class Config:
    """The model's own description: a config.json, or GGUF metadata under the same keys."""

    values: Mapping[str, Any]
    gguf: bool

    def of(self, tower: str) -> Mapping[str, Any]:
        """The part about one tower; the language model's may stand at the top."""
        nested = self.values.get(f"{tower}_config")
        if isinstance(nested, dict):
            return nested
        return {} if tower in ("vision", "audio") else self.text

    @property
    def text(self) -> Mapping[str, Any]:
        """The part about the language model."""
        nested = self.values.get("text_config")
        return nested if isinstance(nested, dict) else self.values

    @property
    def model_type(self) -> str | None:
        """`model_type` of the language model, or `general.architecture` of a GGUF file."""
        return self.text.get("model_type") or self.values.get("model_type")

    def family(self, tower: str, named: str | None) -> tuple[str | None, Family | None]:
        """Name and rules of a tower's family: the user's word, else the config's."""
        language = tower not in ("vision", "audio")
        if named is not None and language:
            return named, family_option(named)
        for part in (self.of(tower), self.values if language else {}):
            name = part.get("model_type")
            family = find_family(name, gguf=self.gguf)
            if family is not None:
                return name, family
        return None, None


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
    if family.norm_if_parallel and config.of(tower).get(family.norm_if_parallel[0]):
        norm = family.norm_if_parallel[1]
    return TowerRules(name, family, act, source, _as_stored(norm, config), _as_stored(post_norm, config))


def _as_stored(norm: Norm | None, config: Config) -> Norm | None:
    """GGUF files have the 1 of 1 + w baked in."""
    return replace(norm, weight="plain") if norm and config.gguf and norm.weight == "offset" else norm


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


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF metadata under the names that Hugging Face configs use."""
    architecture = metadata.get("general.architecture")
    renamed = {
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers",
        "expert_count": "num_experts",
        "use_parallel_residual": "use_parallel_residual",
    }
    config = {new: metadata.get(f"{architecture}.{old}") for old, new in renamed.items()}
    return {"model_type": architecture} | {key: value for key, value in config.items() if value is not None}
