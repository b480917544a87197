"""The table: what each model family means by its tensors.

One entry a family: which projections it uses, what its activation is and where the config says so, and the norm in
front of the MLP. Adding a family is adding an entry here and nothing anywhere else. Names of norms are those of
Hugging Face checkpoints; `GGUF_NORMS` translates them.

Sources of the facts: the modeling files of transformers (what a module computes from which parameter) and the
conversion scripts of llama.cpp (what GGUF files call it, and that they store 1 + w where a family stores w).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import BadOption

FusedOrder = Literal["gate-first", "up-first", "interleaved"]
FUSED_ORDERS: tuple[str, ...] = ("gate-first", "up-first", "interleaved")


@dataclass(frozen=True)
class Projections:
    """Names of a gated MLP's parameters. Where gate and up share one tensor, both have its name and `fused` an order."""

    gate: str
    up: str
    down: str
    fused: FusedOrder | None = None

    @property
    def names(self) -> tuple[str, str, str]:
        """Gate, up, down."""
        return self.gate, self.up, self.down

    def stand_in(self, leaves: Mapping[str, Mapping[str, str]]) -> bool:
        """Whether a block has all their weights."""
        return all("weight" in leaves.get(name, {}) for name in self.names)


SEPARATE = Projections("gate_proj", "up_proj", "down_proj")
FUSED_GATE_UP = Projections("gate_up_proj", "gate_up_proj", "down_proj", fused="gate-first")
GGUF_SEPARATE = Projections("ffn_gate", "ffn_up", "ffn_down")
GGUF_FUSED = Projections("ffn_up", "ffn_up", "ffn_down", fused="gate-first")

# Names that mean the same wherever all three stand together.
UNAMBIGUOUS: tuple[Projections, ...] = (SEPARATE, Projections("wi_0", "wi_1", "wo"))

# Pairs of names that some family uses for a fused gate and up (with either half first) and others for a plain MLP.
# Twice as many rows as the down projection has columns tells a fused one; which half is the gate only a family does.
FUSED_NAMES: tuple[tuple[str, str], ...] = (
    ("gate_up_proj", "down_proj"),
    ("up_gate_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("Wi", "Wo"),
    ("w12", "w3"),
    ("weights_in", "weights_out"),
    ("fc1", "fc2"),
    ("ff_proj", "ff_out"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("linear_in", "linear_out"),
    ("w13", "w2"),
    ("ffn_up", "ffn_down"),
)
# Separate names whose roles differ from family to family.
REVERSIBLE_NAMES: tuple[tuple[str, str, str], ...] = (
    ("w1", "w3", "w2"),
    ("w1", "w2", "c_proj"),
    ("fc11", "fc12", "fc2"),
)


@dataclass(frozen=True)
class Norm:
    """A norm next to the MLP.

    Attributes:
        tensor: its module's name within the layer.
        kind: "rms" (h / rms(h)) or "layer" (h less its mean, over its standard deviation).
        weight: the gain is the stored w ("plain"), 1 + w ("offset"), or absent ("none").
        bias: a bias is added; a text names the config key that says whether.
        gguf: its name in GGUF files, where it is not the usual one of `GGUF_NORMS`.
    """

    tensor: str
    kind: Literal["rms", "layer"] = "rms"
    weight: Literal["plain", "offset", "none"] = "plain"
    bias: bool | str = False
    gguf: str | None = None

    @property
    def words(self) -> str:
        """For reports."""
        kind = {"rms": "RMSNorm", "layer": "LayerNorm"}[self.kind]
        gain = {"plain": "gain w", "offset": "gain 1 + w", "none": "no gain"}[self.weight]
        return f"{kind}, {gain}{', bias' if self.bias else ''}"


@dataclass(frozen=True)
class ActivationRule:
    """Where a family's activation stands.

    Attributes:
        keys: config keys, the first present one counts.
        default: what the model computes where its published configs leave the key out; None where they never do.
        renamed: config value to what the model really computes.
        gguf: what it is in GGUF files, which have no key for it.
    """

    keys: tuple[str, ...] = ("hidden_act",)
    default: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    gguf: str | None = "silu"


@dataclass(frozen=True)
class Family:
    """How one family of models stores and computes its gated MLPs.

    Attributes:
        names: `model_type` values of configs.
        gguf: `general.architecture` values of GGUF files.
        projections: names in Hugging Face files.
        gguf_projections: names in GGUF files.
        activation: the gate's nonlinearity.
        norm: what the MLP reads; None if it reads the residual stream as it is.
        norm_if_parallel: (config key, norm) for families that can feed attention and MLP from one norm.
        post_norm: norm on the MLP's output.
    """

    names: tuple[str, ...]
    norm: Norm | None
    gguf: tuple[str, ...] = ()
    projections: Projections = SEPARATE
    gguf_projections: Projections = GGUF_SEPARATE
    activation: ActivationRule = ActivationRule()
    norm_if_parallel: tuple[str, Norm] | None = None
    post_norm: Norm | None = None


_LLAMA_NORM = Norm("post_attention_layernorm")
# Gemma 2 and 3 compute `hidden_activation`, whatever `hidden_act` says; their published configs often leave it out.
_GEMMA_ACTIVATION = ActivationRule(keys=("hidden_activation",), default="gelu_pytorch_tanh", gguf="gelu_tanh")

FAMILIES: tuple[Family, ...] = (
    # The LLaMA block: RMSNorm, then gate, up and down. Most families are one of these.
    Family(
        names=(
            "llama",
            "mistral",
            "ministral",
            "ministral3",
            "qwen2",
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "qwen3",
            "qwen3_vl_text",
            "smollm3",
            "helium",
            "ernie4_5",
            "internlm3",
            "eurobert",
            "hunyuan_v1_dense",
            "emu3_text_model",
            "iquestcoder",
            "cwm",
            "diffllama",
            "doge",
        ),
        gguf=(
            "llama",
            "mistral3",
            "qwen2",
            "qwen2vl",
            "qwen3",
            "qwen3vl",
            "smollm3",
            "ernie4_5",
            "eurobert",
            "hunyuan-dense",
        ),
        norm=_LLAMA_NORM,
    ),
    # The same block with the MLP's place taken by experts in some layers or all, each of them the same gated MLP.
    # Routers scale what an expert writes, never what it reads.
    Family(
        names=(
            "qwen2_moe",
            "qwen3_moe",
            "deepseek_v2",
            "deepseek_v3",
            "glm4_moe",
            "ernie4_5_moe",
            "olmoe",
        ),
        norm=_LLAMA_NORM,
    ),
    # Mixtral: the LLaMA block with experts whose gate is w1, up w3 and down w2.
    Family(names=("mixtral",), projections=Projections("w1", "w3", "w2"), norm=_LLAMA_NORM),
    # LFM2: those names for a dense MLP; its activation is in no config.
    Family(
        names=("lfm2",),
        gguf=("lfm2",),
        projections=Projections("w1", "w3", "w2"),
        norm=Norm("ffn_norm"),
        activation=ActivationRule(keys=(), default="silu"),
    ),
    # EXAONE 3: the LLaMA block under GPT-2's names.
    Family(
        names=("exaone",),
        gguf=("exaone",),
        projections=Projections("c_fc_0", "c_fc_1", "c_proj"),
        norm=Norm("ln_2"),
        activation=ActivationRule(keys=("hidden_act", "activation_function")),
    ),
    # Seed-OSS: the LLaMA block, with another name for its norm in GGUF files.
    Family(names=("seed_oss",), gguf=("seed_oss",), norm=Norm("post_attention_layernorm", gguf="post_attention_norm")),
    # Granite multiplies what the MLP adds to the stream; the config says by how much.
    Family(names=("granite", "granite_swa"), gguf=("granite",), norm=_LLAMA_NORM),
    # Qwen 3.5: norm weights are offsets from 1.
    Family(
        names=("qwen3_5_text",),
        gguf=("qwen35",),
        norm=Norm("post_attention_layernorm", weight="offset", gguf="post_attention_norm"),
    ),
    # Gemma 1: `hidden_act: gelu` in its configs means the tanh form; weights of norms are offsets from 1.
    Family(
        names=("gemma",),
        gguf=("gemma",),
        norm=Norm("post_attention_layernorm", weight="offset"),
        activation=ActivationRule(
            keys=("hidden_activation", "hidden_act"), renamed={"gelu": "gelu_tanh"}, gguf="gelu_tanh"
        ),
    ),
    Family(
        names=("gemma2", "gemma3", "gemma3_text"),
        gguf=("gemma2", "gemma3"),
        norm=Norm("pre_feedforward_layernorm", weight="offset"),
        post_norm=Norm("post_feedforward_layernorm", weight="offset"),
        activation=_GEMMA_ACTIVATION,
    ),
    # VaultGemma is Gemma 2 without the norm behind; Gemma 4 stores its norm weights as they are.
    Family(
        names=("vaultgemma",),
        norm=Norm("pre_feedforward_layernorm", weight="offset"),
        activation=_GEMMA_ACTIVATION,
    ),
    Family(
        names=("gemma4_text", "gemma4_unified_text", "embedding_gemma2_text"),
        gguf=("gemma4",),
        norm=Norm("pre_feedforward_layernorm"),
        post_norm=Norm("post_feedforward_layernorm"),
        activation=_GEMMA_ACTIVATION,
    ),
    # RecurrentGemma: Griffin's block; its projections have biases.
    Family(
        names=("recurrent_gemma",),
        norm=Norm("channel_pre_norm", weight="offset"),
        activation=_GEMMA_ACTIVATION,
    ),
    # OLMo 1: LayerNorm without weights. OLMo 2, 3 and EXAONE 4: no norm in front, one behind.
    Family(names=("olmo",), gguf=("olmo",), norm=Norm("post_attention_layernorm", kind="layer", weight="none")),
    Family(
        names=("olmo2", "olmo3", "exaone4"),
        gguf=("olmo2", "exaone4"),
        norm=None,
        post_norm=Norm("post_feedforward_layernorm"),
    ),
    # One norm feeds attention and MLP in parallel.
    Family(names=("cohere", "cohere2"), gguf=("command-r", "cohere2"), norm=Norm("input_layernorm", kind="layer")),
    Family(
        names=("stablelm",),
        gguf=("stablelm",),
        norm=Norm("post_attention_layernorm", kind="layer", bias=True),
        norm_if_parallel=("use_parallel_residual", Norm("input_layernorm", kind="layer", bias=True)),
    ),
    # Gate and up in one tensor, gate first.
    Family(
        names=("phi3",),
        gguf=("phi3",),
        projections=FUSED_GATE_UP,
        gguf_projections=GGUF_FUSED,
        norm=_LLAMA_NORM,
    ),
    Family(names=("glm",), projections=FUSED_GATE_UP, norm=_LLAMA_NORM),
    Family(
        names=("glm4",),
        gguf=("glm4",),
        projections=FUSED_GATE_UP,
        gguf_projections=GGUF_FUSED,
        norm=_LLAMA_NORM,
        post_norm=Norm("post_mlp_layernorm"),
    ),
    # LayerNorm, as published without bias, and fused `Wi`; the config's `hidden_activation` is really used.
    Family(
        names=("modernbert", "modernbert-decoder"),
        projections=Projections("Wi", "Wi", "Wo", fused="gate-first"),
        norm=Norm("mlp_norm", kind="layer", bias="norm_bias"),
        activation=ActivationRule(keys=("hidden_activation",), default="gelu", gguf=None),
    ),
)

GGUF_NORMS: dict[str, str] = {
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "input_layernorm": "attn_norm",
    "ln_2": "ffn_norm",
    "ffn_norm": "ffn_norm",
}

_BY_NAME = {name: family for family in FAMILIES for name in family.names}
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.gguf}

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
    ]
)


def find_family(name: str | None, *, gguf: bool = False) -> Family | None:
    """The family of a `model_type` (or GGUF architecture), None if it is not in the table."""
    return (_BY_ARCHITECTURE if gguf else _BY_NAME).get(name or "")


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
