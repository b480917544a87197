"""Tiny checkpoints of any family, with their true factors: for tests, and to check one's own tools.

    from glu_probe.testing import write_tiny_checkpoint

    truth = write_tiny_checkpoint("gpt_oss", "tiny")           # config.json and model.safetensors
    gp.open_checkpoint("tiny").layer(0, expert=2)              # truth[2].query, .key, .value, up to the norm

What is written follows from how the files of each family look, stated here once more and apart from the tables that the
reader goes by: a mistake in one of them shows when both are compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import BadOption
from .file_forms import FUSED, GLU, Norm, Part, Stack, file_forms

ORDERS = ("separate", "gate-first", "up-first", "interleaved")
STORAGES = ("linear", "conv1d", "one by one", "stacked", "stacked-transposed", "row-stacked")


@dataclass(frozen=True)
class TrueMLP:
    """One gated MLP as it was drawn.

    Attributes:
        layer, expert, tower: where it stands, in the words of `GatedLayer`.
        query, key, value: [d_mlp, d_model], as they act on the MLP's own input (`fold_norm=False`).
        query_bias, key_bias, output_bias: constants, or None.
        gain, shift: of the norm in front, [d_model]; None where there is none. The gain of a norm without weights is 1.
        centred: whether that norm subtracts the mean.
        names: tensors that it was written to: gate, up, down.
    """

    layer: int
    expert: int | str | None
    tower: str
    query: Tensor
    key: Tensor
    value: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    output_bias: Tensor | None
    gain: Tensor | None
    shift: Tensor | None
    centred: bool
    names: tuple[str, str, str]


def tiny_families() -> list[str]:
    """The families that can be written."""
    return sorted(file_forms())


def write_tiny_checkpoint(
    family: str,
    directory: str | os.PathLike,
    *,
    order: str | None = None,
    storage: str | None = None,
    layers: int = 2,
    d_model: int = 16,
    d_mlp: int = 24,
    experts: int = 3,
    seed: int = 0,
    prefix: str | None = None,
) -> list[TrueMLP]:
    """Write config.json and model.safetensors of a small random model, and return what is in them.

    Only MLPs and the norms in front of them are written: the files serve to read weights, not to run models.

    Args:
        family: `model_type` of the config.
        directory: where to; made if need be.
        order: "separate", "gate-first", "up-first" or "interleaved", instead of the family's own, for all MLPs.
        storage: "linear" or "conv1d" ([in, out]) for dense MLPs; "one by one", "stacked" ([expert, out, in]),
            "stacked-transposed" ([expert, in, out]) or "row-stacked" for experts; instead of the family's own.
        layers, d_model, d_mlp, experts: sizes.
        seed: of the weights.
        prefix: what names begin with, down to the word before the layer's number; for models of one stack.

    Raises:
        BadOption: the family, order or storage is not known here.

    >>> import tempfile
    >>> truth = write_tiny_checkpoint("mixtral", tempfile.mkdtemp())
    >>> [(mlp.layer, mlp.expert) for mlp in truth][:4]
    [(0, 0), (0, 1), (0, 2), (1, 0)]
    """
    from safetensors.torch import save_file

    model = file_forms().get(family)
    if model is None:
        raise BadOption(f"no files of family {family!r} can be written", hint=f"There are {', '.join(tiny_families())}")
    for name, value, known in (("order", order, ORDERS), ("storage", storage, STORAGES)):
        if value is not None and value not in known:
            raise BadOption(f"{name} is {value!r}", hint=f"Use one of {', '.join(known)}")
    writer = _Writer(d_model, d_mlp, experts, layers, torch.Generator().manual_seed(seed))
    truth = []
    for stack in model.stacks:
        changed = replace(stack, prefix=stack.prefix if prefix is None else prefix)
        truth += list(writer.stack(changed, order, storage))
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(writer.tensors, directory / "model.safetensors")
    config = {"model_type": family, "hidden_size": d_model, "num_hidden_layers": layers} | writer.filled(model.config)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return sorted(truth, key=lambda mlp: (mlp.tower != "text", mlp.layer, *_rank(mlp.expert)))


def _rank(expert: int | str | None) -> tuple:
    """Dense, routed, shared."""
    if isinstance(expert, int):
        return 1, expert, ""
    return (2 if expert == "shared" else 0), 0, expert or ""


class _Writer:
    """Draws weights and lays them out."""

    def __init__(self, d_model: int, d_mlp: int, experts: int, layers: int, generator: torch.Generator) -> None:
        self.sizes = {"D": d_model, "F": d_mlp, "E": experts, "L": layers}
        self.generator = generator
        self.tensors: dict[str, Tensor] = {}

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * shape[-1] ** -0.5

    def filled(self, value: Any) -> Any:
        """A config with its sizes in place of their letters."""
        if isinstance(value, dict):
            return {key: self.filled(inner) for key, inner in value.items() if inner is not None}
        return self.sizes.get(value, value) if isinstance(value, str) else value

    def stack(self, stack: Stack, order: str | None, storage: str | None) -> Iterator[TrueMLP]:
        for layer in range(self.sizes["L"]):
            norms: dict[Norm, tuple[Tensor, Tensor | None]] = {}
            for part in stack.parts:
                if part.where != "all" and (part.where == "first") != (layer == 0):
                    continue
                norm = part.norm or stack.norm
                if norm is not None and norm not in norms:
                    norms[norm] = self.norm(f"{stack.prefix}.{layer}.{norm.name}", norm)
                gain, shift = norms[norm] if norm is not None else (None, None)
                is_expert = part.expert == "routed"
                if storage is not None and (storage in ("linear", "conv1d")) != is_expert:
                    part = replace(part, storage=storage)
                changed = _reordered(part, order)
                for mlp in self.mlps(f"{stack.prefix}.{layer}.{part.block}".rstrip("."), changed):
                    yield replace(
                        mlp, layer=layer, tower=stack.tower, gain=gain, shift=shift, centred=bool(norm and norm.centred)
                    )

    def norm(self, name: str, norm: Norm) -> tuple[Tensor, Tensor | None]:
        """Gain and shift of a norm, which is written."""
        width = self.sizes["D"]
        if norm.gain == "none":
            return torch.ones(width), None
        weight = 0.7 + self.draw(width)
        self.tensors[f"{name}.weight"] = weight
        shift = self.draw(width) if norm.shift else None
        if shift is not None:
            self.tensors[f"{name}.bias"] = shift
        return (1 + weight if norm.gain == "1+w" else weight), shift

    def mlps(self, stem: str, part: Part) -> Iterator[TrueMLP]:
        """One MLP, or the experts of a layer, which are written."""
        d_model, d_mlp = self.sizes["D"], self.sizes["F"]
        many = part.expert == "routed"
        drawn = []
        for number in range(self.sizes["E"] if many else 1):
            inner = [self.draw(d_mlp) if "all" in part.biases else None for _ in range(2)]
            outer = self.draw(d_model) if "down" in part.biases else None
            factors = self.draw(d_mlp, d_model), self.draw(d_mlp, d_model), self.draw(d_mlp, d_model)
            names = part.names if len(part.names) == 3 else (part.names[0], *part.names)
            own = f"{stem}.{number}" if part.storage == "one by one" else stem
            gate, up, down = (f"{own}.{name}{part.ending}" for name in names)
            label = number if many else part.expert
            drawn.append(
                TrueMLP(0, label, "", *factors, inner[0], inner[1], outer, None, None, False, (gate, up, down))
            )
        written = [self.layout(part, mlp) for mlp in drawn]
        for role in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
            parts = [one[role] for one in written if role in one]
            if not parts:
                continue
            base = role.split("_")[0]
            for number, mlp in enumerate(drawn):
                name = mlp.names[("gate", "up", "down").index(base)]
                if role.endswith("_bias"):
                    name = name.removesuffix(part.ending) + part.bias_ending
                if part.storage in ("stacked", "stacked-transposed", "row-stacked"):
                    joined = torch.stack(parts) if part.storage != "row-stacked" else torch.cat(parts)
                    self.tensors[name] = joined.contiguous()
                else:
                    self.tensors[name] = parts[number].contiguous()
        yield from drawn

    def layout(self, part: Part, mlp: TrueMLP) -> dict[str, Tensor]:
        """The tensors of one MLP, as they stand in files."""
        gate, up, down = mlp.query, mlp.key, mlp.value.T
        out = {"gate": _together(gate, up, part.order)} if part.order != "separate" else {"gate": gate, "up": up}
        out["down"] = down
        if part.storage in ("conv1d", "stacked-transposed"):
            out = {role: matrix.T for role, matrix in out.items()}
        if part.storage == "row-stacked":
            out["down"] = mlp.value
        if mlp.query_bias is not None and mlp.key_bias is not None:
            both = part.order != "separate"
            out["gate_bias"] = _together(mlp.query_bias, mlp.key_bias, part.order) if both else mlp.query_bias
            if not both:
                out["up_bias"] = mlp.key_bias
        if mlp.output_bias is not None:
            out["down_bias"] = mlp.output_bias
        return out


def _together(gate: Tensor, up: Tensor, order: str) -> Tensor:
    """Gate and up in one tensor."""
    if order == "interleaved":
        return torch.stack([gate, up], dim=1).flatten(0, 1)
    return torch.cat([gate, up] if order == "gate-first" else [up, gate])


def _reordered(part: Part, order: str | None) -> Part:
    """The part with gate and up together or apart, under the usual names where its own do not serve."""
    if order is None or order == part.order:
        return part
    if order == "separate":
        return replace(part, order=order, names=GLU)
    return replace(part, order=order, names=part.names if part.order != "separate" else FUSED)
