"""What a reader of the results should know: where config and file differ, what is not known, what decided nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ShapeMismatch
from .inventory import Inventory
from .layout import config_width
from .rules import Config, Options, TowerRules
from .sites import Site
from .source import TensorInfo
from .towers import is_main


def refuse_other_widths(inventory: Inventory, config: Config, infos: Mapping[str, TensorInfo]) -> None:
    """A d_model that the config denies, or that no norm of the layer has while one has the size of d_mlp."""
    declared = config_width(config.of("text", inventory.prefixes.get("text", "")))
    norms = inventory.norm_widths(infos)
    for site in inventory.sites:
        width = declared if site.tower == "text" else None
        beside = norms.get((site.prefix, site.layer), set())
        swapped = site.d_mlp in beside and site.d_model not in beside
        if swapped or (width is not None and site.d_model != width):
            name = site.tensors["down"]
            says = f"the layer's norms have {site.d_mlp}" if width is None else f"the config says {width}"
            raise ShapeMismatch(
                f"{name!r} is {list(infos[name].shape)}, so d_model would be {site.d_model}, but {says}",
                where=site.where,
                hint="The tensors are transposed, or the config is of another model",
            )


def disagreements(inventory: Inventory, config: Config) -> list[str]:
    """Where the tensors settle what the config says otherwise."""
    part, notes = config.of("text", inventory.prefixes.get("text", "")), []
    text = [site for site in inventory.sites if site.tower == "text"]
    declared = part.get("intermediate_size")
    odd = [site for site in text if site.expert is None and isinstance(declared, int) and site.d_mlp != declared]
    if odd:
        widths = ", ".join(map(str, sorted({site.d_mlp for site in odd})))
        notes.append(
            f"the config says d_mlp is {declared}, but {len(odd)} layers have {widths} (from layer {odd[0].layer} on)"
        )
    if part.get("mlp_bias") is True and text and not any("gate_bias" in site.tensors for site in text):
        notes.append("the config says that the MLPs have biases (mlp_bias), but the file has none")
    count, present = part.get("num_hidden_layers"), inventory.layers.get("text", [])
    if config.gguf and present:  # which count those for predicting further tokens too
        present = [*present, *inventory.layers.get("mtp", [])]
    if isinstance(count, int) and present and len(present) != count:
        notes.append(f"the config says {count} layers, but the file has {len(present)}")
    return notes


def assumptions(inventory: Inventory, config: Config, rules: Mapping[str, TowerRules]) -> list[str]:
    """What is not known of each tower, and what factors leave out."""
    notes = []
    for tower, its in rules.items():
        if its.family is None:
            named = config.model_type_of(tower)
            what = f"model_type {named!r} is not in the table" if named else "no model_type is known"
            advice = " (if it is built like a known one, say --family; --activation alone is not enough)"
            notes.append(
                f"{_of(tower)}{what}: the norm before the MLP is not known and was not folded, and only directions and "
                "norms are reported" + (advice if tower in ("text", "mtp") else "")
            )
        elif its.activation is None:
            notes.append(
                f"{_of(tower)}the activation is not known ({its.activation_source}): measures of the neurons' function "
                "are missing" + (" (name it with --activation)" if is_main(tower) else "")
            )
        elif its.scale_note:
            notes.append(f"{_of(tower)}measures of the neurons' function are missing: {its.scale_note}")
    multiplier = config.text.get("residual_multiplier", 1.0)
    if multiplier != 1.0:
        notes.append(f"the model multiplies MLP outputs by {multiplier}; value does not include it")
    for tower, names in inventory.output_scales().items():
        notes.append(f"{_of(tower)}the model multiplies MLP outputs by {', '.join(names)}; value does not include it")
    return notes


def without_effect(sites: Sequence[Site], options: Options) -> list[str]:
    """Options that decided nothing."""
    notes = []
    if options.fused_layout and not any(site.fused for site in sites if is_main(site.tower)):
        notes.append("--fused-layout had no effect: no tensor of the language model holds gate and up together")
    if options.expert_layout and not any(site.storage.startswith("stacked") for site in sites):
        notes.append("--expert-layout had no effect: no tensor holds all experts of a layer")
    return notes


def _of(tower: str) -> str:
    return "" if tower == "text" else f"{tower}: "
