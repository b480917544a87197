"""What can be said of a family of models: the names of its projections, how they are stored, its gate and its norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..activations import Activation

FusedOrder = Literal["gate-first", "up-first", "interleaved"]
FUSED_ORDERS: tuple[FusedOrder, ...] = ("gate-first", "up-first", "interleaved")
Storage = Literal["rows", "columns", "either", "row-stacked"]
STORAGES: tuple[Storage, ...] = ("rows", "columns", "either", "row-stacked")
NormKind = Literal["rms", "layer"]
NORM_KINDS: tuple[NormKind, ...] = ("rms", "layer")
NormWeight = Literal["plain", "offset", "none"]
NORM_WEIGHTS: tuple[NormWeight, ...] = ("plain", "offset", "none")
Group = Literal["routed", "shared"]
EXPERT_LAYOUTS: tuple[str, ...] = ("rows", "columns")


@dataclass(frozen=True)
class Projections:
    """Names of a gated MLP's parameters, and how they are stored.

    Attributes:
        gate, up, down: the names. Where gate and up share one tensor, both have its name and `fused` an order.
        fused: which part of the shared tensor is the gate.
        stored: "rows" where gate and up are [out, in] as in a linear layer (a neuron is a row of them), "columns" where
            all are [in, out]; "either" where files of both kinds exist for stacked experts, so that only the shape can
            tell; "row-stacked" where the experts of a layer lie below each other as rows of all three tensors.
        group: "routed" or "shared" where the name itself says it, as in GGUF files.
    """

    gate: str
    up: str
    down: str
    fused: FusedOrder | None = None
    stored: Storage = "rows"
    group: Group | None = None

    @property
    def names(self) -> tuple[str, str, str]:
        """Gate, up, down."""
        return self.gate, self.up, self.down

    def stand_in(self, leaves: Mapping[str, Mapping[str, str]]) -> bool:
        """Whether a block has all their weights."""
        return all("weight" in leaves.get(name, {}) for name in self.names)


@dataclass(frozen=True)
class Norm:
    """A norm next to the MLP.

    Attributes:
        tensor: its module's name within the layer; "{0}" stands for the first number in the name of the MLP's block.
            Where files of different versions have different names they stand with "|" between them.
        kind: "rms" (h / rms(h)) or "layer" (h less its mean, over its standard deviation).
        weight: the gain is the stored w ("plain"), 1 + w ("offset"), or absent ("none").
        bias: a bias is added; a text names the config key that says whether.
        gguf: its name in GGUF files, where it is not the usual one of `GGUF_NORMS`.
    """

    tensor: str
    kind: NormKind = "rms"
    weight: NormWeight = "plain"
    bias: bool | str = False
    gguf: str | None = None

    @property
    def words(self) -> str:
        """For reports."""
        kind = {"rms": "RMSNorm", "layer": "LayerNorm"}[self.kind]
        gain = {"plain": "gain w", "offset": "gain 1 + w", "none": "no gain"}[self.weight]
        return f"{kind}, {gain}{', bias' if self.bias else ''}"


# (config part of the tower, layer, "dense" | "routed" | "shared") to a decision about that MLP.
Part = Mapping[str, Any]


@dataclass(frozen=True)
class ActivationRule:
    """Where a family's activation stands.

    Attributes:
        keys: config keys, the first present one counts; dots lead into nested parts.
        default: what the model computes where its published configs leave the key out; None where they never do.
        renamed: config value to what the model really computes.
        gguf: what it is in GGUF files, which have no key for it.
        adjust: what a model makes of that function where it is not applied as it is (clamps, functions of the up
            branch): from it, the config part, the layer and the group to the real one.
    """

    keys: tuple[str, ...] = ("hidden_act",)
    default: str | Activation | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    gguf: str | Activation | None = "silu"
    adjust: Callable[[Activation, Part, int, str], Activation] | None = None


@dataclass(frozen=True)
class Place:
    """What differs from the rest of the family for the MLPs of one block.

    Attributes:
        norm, post_norm: its norms.
    """

    norm: Norm | None
    post_norm: Norm | None = None


@dataclass(frozen=True)
class Family:
    """How one family of models stores and computes its gated MLPs.

    Attributes:
        names: `model_type` values of configs.
        norm: what the MLP reads; None if it reads the residual stream as it is.
        gguf: `general.architecture` values of GGUF files.
        projections: names in Hugging Face files; several where dense MLPs and experts, or files of different
            versions, have different ones.
        gguf_fused: in GGUF files, where there is no ffn_gate, ffn_up holds gate and up.
        activation: the gate's nonlinearity.
        norm_if_parallel: (config key, norm) for families that can feed attention and MLP from one norm.
        post_norm: norm on the MLP's output.
        places: block within the layer (numbers written N) or group ("routed", "shared") to what differs there.
        missing: why the neurons' function cannot be had from the weights, None where it can.
        multipliers: constants that the config puts on gate, up and down, where it has any.
        identity_experts: config key that counts experts, numbered behind the others, which write what they read.
    """

    names: tuple[str, ...]
    norm: Norm | None
    gguf: tuple[str, ...] = ()
    projections: tuple[Projections, ...] = ()
    gguf_fused: FusedOrder | None = None
    activation: ActivationRule = ActivationRule()
    norm_if_parallel: tuple[str, Norm] | None = None
    post_norm: Norm | None = None
    places: Mapping[str, Place] = field(default_factory=dict)
    missing: Callable[[Part, int, str], str | None] | None = None
    multipliers: Callable[[Part], tuple[float, float, float]] | None = None
    identity_experts: str | None = None

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Every norm next to an MLP that its rules know."""
        places = (norm for place in self.places.values() for norm in (place.norm, place.post_norm))
        parallel = self.norm_if_parallel[1] if self.norm_if_parallel else None
        return tuple(norm for norm in (self.norm, self.post_norm, parallel, *places) if norm is not None)

    @property
    def layouts(self) -> tuple[Projections, ...]:
        """The names that its files have, those that need no family included."""
        return self.projections or (SEPARATE,)


SEPARATE = Projections("gate_proj", "up_proj", "down_proj")
FUSED_GATE_UP = Projections("gate_up_proj", "gate_up_proj", "down_proj", fused="gate-first")
