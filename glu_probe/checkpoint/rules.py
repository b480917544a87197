"""What was decided for a stack of layers before any weight is read: family, activation and norms, and from where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..activations import Activation, activation
from ..errors import BadOption, LayoutUnknown, UnknownActivation
from ..layer_rows import expert_group
from .families import gguf_norm
from .family import Family, FusedOrder, Norm, Place
from .known_families import family_option, find_family
from .places import numbers, pattern
from .towers import is_main, part_of, text_part

_NO_NORM = "no norm stands in front of the MLP, so the scale of its input is not known without text"


@dataclass(frozen=True)
class Options:
    """How a checkpoint is read; every one of them is recorded with the results.

    Attributes:
        fold_norm: multiply the norm in front of the MLP into query and key, so that x is the normalised stream.
        fold_post_norm: multiply the gain of a norm on the MLP's output into value.
        family: take this family's rules, whatever the config says.
        fused_layout: which half of a fused gate-and-up tensor is the gate.
        activation: take this activation, whatever the config says. Like the two above it is about the language model,
            not about towers beside it.
        expert_layout: whether stacked experts are [out, in] ("rows") or [in, out] ("columns").
    """

    fold_norm: bool = True
    fold_post_norm: bool = False
    family: str | None = None
    fused_layout: FusedOrder | None = None
    activation: str | None = None
    expert_layout: str | None = None


@dataclass(frozen=True)
class Config:
    """The model's own description: a config.json, or GGUF metadata under the same keys."""

    values: Mapping[str, Any]
    gguf: bool

    def of(self, tower: str, prefix: str = "") -> Mapping[str, Any]:
        """The part about one tower; empty for a stack that no part describes."""
        return part_of(self.values, tower, prefix)

    @property
    def text(self) -> Mapping[str, Any]:
        """The part about the language model, which may stand at the top."""
        return text_part(self.values)

    @property
    def model_type(self) -> str | None:
        """`model_type` of the language model, or `general.architecture` of a GGUF file."""
        return _text(self.text.get("model_type")) or _text(self.values.get("model_type"))

    def model_type_of(self, tower: str, prefix: str = "") -> str | None:
        """`model_type` of one tower, None where the config does not say."""
        named = _text(self.of(tower, prefix).get("model_type"))
        return named or (self.model_type if tower in ("text", "mtp") else None)

    def family(self, tower: str, named: str | None, prefix: str = "") -> tuple[str | None, Family | None]:
        """Name and rules of a tower's family: the user's word about the language model, else the config's."""
        if named is not None and is_main(tower):
            return named, family_option(named)
        name = self.model_type_of(tower, prefix)
        family = find_family(name, gguf=self.gguf, tower=tower)
        if (
            tower in ("vision", "audio")
            and name == self.values.get("model_type")
            and name in (family.names if family else ())
        ):
            family = None  # the whole model's name, under which the table has its language model
        return (name, family) if family else (None, None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


@dataclass(frozen=True)
class MLPRules:
    """The decisions for one MLP.

    Attributes:
        activation: the gate; None where it is not known.
        norm, post_norm: what feeds the MLP, and what stands on its output; None if nothing is known or nothing does.
        note: why measures of the neurons' function are missing; None where they are not.
        multipliers: constants on gate, up and down.
        known: whether the family is in the table.
    """

    activation: Activation | None
    norm: Norm | None
    post_norm: Norm | None
    note: str | None
    multipliers: tuple[float, float, float] = (1.0, 1.0, 1.0)
    known: bool = True

    def norm_words(self, *, folded: bool) -> str:
        """The norm in front, for reports."""
        return _norm_words(self.known, self.norm, folded=folded)


@dataclass(frozen=True)
class TowerRules:
    """The decisions for one stack of layers.

    Attributes:
        name, family: the family's name as found or given, and its rules; None if it is not in the table.
        activation, activation_source: the gate, and where it was read; None with the reason as source.
        norm: what feeds the MLP, None if nothing is known or the stream feeds it as it is.
        post_norm: norm on the MLP's output.
        part, gguf: the part of the config that describes the stack, and whether it is that of a GGUF file.
        adjusted: whether the family's changes to the activation apply; not to one that the user named.
    """

    name: str | None
    family: Family | None
    activation: Activation | None
    activation_source: str
    norm: Norm | None
    post_norm: Norm | None
    part: Mapping[str, Any] = field(default_factory=dict)
    gguf: bool = False
    adjusted: bool = True

    @property
    def scale_note(self) -> str | None:
        """Why the scale of the MLP's input is not known, or None where it is."""
        if self.family is None:
            return "the family is not in the table, so the norm in front of the MLP is not known"
        if self.norm is None:
            return _NO_NORM
        return None

    def norm_words(self, *, folded: bool) -> str:
        """The norm in front, for reports."""
        return _norm_words(self.family is not None, self.norm, folded=folded)

    def at(self, layer: int, block: tuple[str, ...], expert: int | str | None, extras: Iterable[str] = ()) -> MLPRules:
        """The rules of one MLP.

        Args:
            layer, block, expert: where it stands.
            extras: other modules in its block.
        """
        if self.family is None:
            return MLPRules(self.activation, None, None, self.scale_note, known=False)
        group, act = expert_group(expert), self.activation
        place = _place(self.family, block, group)
        norm, post_norm = self.norm, self.post_norm
        if place is not None:
            norm, post_norm = (_as_configured(one, self.part, gguf=self.gguf) for one in (place.norm, place.post_norm))
        norm, post_norm = (_in_block(one, block) if not self.gguf else one for one in (norm, post_norm))
        if act is not None and self.adjusted and self.family.activation.adjust is not None:
            act = self.family.activation.adjust(act, self.part, layer, group)
        known = _own_parts(norm, post_norm, block)
        others = sorted(name for name in extras if name not in known)
        reasons = [
            self.family.missing(self.part, layer, group) if self.family.missing is not None else None,
            _NO_NORM if norm is None else None,
            f"the MLP holds {', '.join(others)} besides, which the family's rules do not know" if others else None,
            _unforeseen(block, expert, place),
        ]
        multipliers = self.family.multipliers(self.part) if self.family.multipliers else (1.0, 1.0, 1.0)
        return MLPRules(act, norm, post_norm, next(filter(None, reasons), None), multipliers)


def _norm_words(known: bool, norm: Norm | None, *, folded: bool) -> str:
    if not known:
        return "unknown, not folded"
    if norm is None:
        return "none in front of the MLP"
    return f"{norm.words}, {'folded' if folded else 'not folded'}"


def _place(family: Family, block: tuple[str, ...], group: str) -> Place | None:
    """What differs there: by the block's name, else by its group."""
    return family.places.get(".".join(pattern(block)), family.places.get(group))


def _in_block(norm: Norm | None, block: tuple[str, ...]) -> Norm | None:
    if norm is None:
        return None
    found = numbers(block)
    if "{0}" in norm.tensor and not found:
        raise LayoutUnknown(
            f"the family's norm {norm.tensor} has the number of the MLP's block in its name, and the block "
            f"{'.'.join(block) or 'of the MLP'} has none",
            hint="The file is of another family than its config or --family says",
        )
    return replace(norm, tensor=norm.tensor.format(*found))


def _own_parts(norm: Norm | None, post_norm: Norm | None, block: tuple[str, ...]) -> set[str]:
    """Norms that stand within the MLP's own block."""
    paths = [path.split(".") for one in (norm, post_norm) if one is not None for path in one.tensor.split("|")]
    return {path[-1] for path in paths if tuple(path[:-1]) == block}


def _unforeseen(block: tuple[str, ...], expert: int | str | None, place: Place | None) -> str | None:
    """A layer of several dense MLPs of which the family's rules know one."""
    if expert_group(expert) == "dense" and expert is not None and place is None:
        return f"the layer has several MLPs, and the family's rules do not know of {'.'.join(block)}"
    return None


def decide(config: Config, tower: str, options: Options, prefix: str = "") -> TowerRules:
    """The rules of one tower.

    Raises:
        UnknownActivation: the config names an activation whose formula is not known here.
        BadOption: the user named a family of which no GGUF file is known.
    """
    name, family = config.family(tower, options.family, prefix)
    unnamed = [norm for norm in family.norms if gguf_norm(norm) is None] if family and config.gguf else []
    if unnamed:
        raise BadOption(
            f"what GGUF files call the norm {unnamed[0].tensor} of family {name!r} is not known",
            hint="Name a family that has GGUF files (`glu-probe ls families`)",
        )
    part = config.of(tower, prefix)
    said = options.activation if is_main(tower) else None
    try:
        act, source = _activation(config, part, family, said)
    except UnknownActivation as error:
        if is_main(tower):
            raise
        act, source = None, error.what
    if family is None:
        return TowerRules(None, None, act, source, None, None)
    norm, post_norm = family.norm, family.post_norm
    if family.norm_if_parallel and part.get(family.norm_if_parallel[0]):
        norm = family.norm_if_parallel[1]
    norm, post_norm = (_as_configured(one, part, gguf=config.gguf) for one in (norm, post_norm))
    adjusted = said is None
    return TowerRules(name, family, act, source, norm, post_norm, part, config.gguf, adjusted)


def _as_configured(norm: Norm | None, part: Mapping[str, Any], *, gguf: bool) -> Norm | None:
    """The norm with what the config decides; GGUF files have the 1 of 1 + w baked in."""
    if norm is None:
        return None
    weight = "plain" if gguf and norm.weight == "offset" else norm.weight
    return replace(norm, weight=weight, bias=bool(part.get(norm.bias)) if isinstance(norm.bias, str) else norm.bias)


def _activation(
    config: Config, part: Mapping[str, Any], family: Family | None, said: str | None
) -> tuple[Activation | None, str]:
    if said is not None:
        return activation(said), "option"
    if family is None:
        return None, "family not in the table"
    rule = family.activation
    if config.gguf:
        return (activation(rule.gguf), "family rule") if rule.gguf else (None, "the family has no rule for GGUF")
    for key in rule.keys:
        named = lookup(part, key)
        if named is not None:
            renamed = rule.renamed.get(named) if isinstance(named, str) else None
            return (activation(renamed), "family rule") if renamed else (activation(named), f"config {key}")
    if rule.default is not None:
        return activation(rule.default), "family rule"
    return None, f"config has none of {', '.join(rule.keys)}"


def lookup(part: Mapping[str, Any], key: str) -> Any:
    """A value of the config; dots in the key lead into nested parts. None where it is absent."""
    found: Any = part
    for step in key.split("."):
        found = found.get(step) if isinstance(found, dict) else None
    return found


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
