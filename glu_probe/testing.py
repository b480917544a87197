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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import BadOption

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


@dataclass(frozen=True)
class _Part:
    """One kind of MLP in a layer: block, names, order and storage; which layers have it."""

    block: str
    names: tuple[str, ...]
    order: str = "separate"
    storage: str = "linear"
    expert: str | None = None  # None dense, "routed", or a label
    where: str = "all"  # or "first", "rest"
    ending: str = ".weight"
    biases: tuple[str, ...] = ()  # of gate and up, and of down
    norm: _Norm | None = None  # where it differs from the stack's
    bias_ending: str = ".bias"


@dataclass(frozen=True)
class _Norm:
    name: str
    centred: bool = False
    gain: str = "w"  # "1+w", "none"
    shift: bool = False


@dataclass(frozen=True)
class _Stack:
    prefix: str
    parts: tuple[_Part, ...]
    norm: _Norm | None
    tower: str = "text"


@dataclass(frozen=True)
class _Model:
    stacks: tuple[_Stack, ...]
    config: dict[str, Any] = field(default_factory=dict)


_GLU = ("gate_proj", "up_proj", "down_proj")
_FUSED = ("gate_up_proj", "down_proj")
_MIX = ("w1", "w3", "w2")
_POST = _Norm("post_attention_layernorm")
_SILU = {"hidden_act": "silu"}
_TANH = {"hidden_activation": "gelu_pytorch_tanh"}


def _one(part: _Part | tuple[_Part, ...], norm: _Norm | None = _POST, prefix: str = "model.layers", **config) -> _Model:
    """A model of one stack."""
    parts = part if isinstance(part, tuple) else (part,)
    return _Model((_Stack(prefix, parts, norm),), config or _SILU)


def _experts(block: str = "mlp.experts", names: tuple[str, ...] = _GLU, **changes) -> _Part:
    return replace(_Part(block, names, storage="one by one", expert="routed", where="rest"), **changes)


def _shared(block: str, names: tuple[str, ...] = _GLU, **changes) -> _Part:
    return replace(_Part(block, names, expert="shared", where="rest"), **changes)


_DENSE = _Part("mlp", _GLU)
_FIRST = replace(_DENSE, where="first")
_EVERY = {"where": "all"}
_NEEDS_COUNT = {"num_experts": "E"} | _SILU
_STACKED = {"storage": "stacked", "ending": ""}


def _llama_like(*names: str) -> dict[str, _Model]:
    return dict.fromkeys(names, _one(_DENSE))


def _facts() -> dict[str, _Model]:
    """Every family: how its files look."""
    shared = _shared("mlp.shared_experts")
    post_1 = _Norm("post_attention_layernorm", gain="1+w")
    gemma = _Norm("pre_feedforward_layernorm", gain="1+w")
    gemma_plain = _Norm("pre_feedforward_layernorm")
    layer_norm = _Norm("post_attention_layernorm", centred=True, shift=True)
    linear = ("input_linear", "output_linear")
    t5 = _Model(
        (
            _Stack("encoder.block", (_Part("layer.1.DenseReluDense", ("wi_0", "wi_1", "wo")),), _Norm("layer.1.layer_norm"),
                   "encoder"),
            _Stack("decoder.block", (_Part("layer.2.DenseReluDense", ("wi_0", "wi_1", "wo")),), _Norm("layer.2.layer_norm")),
        ),
        {"d_model": "D", "d_ff": "F", "num_layers": "L", "feed_forward_proj": "gated-gelu", "is_encoder_decoder": True},
    )  # fmt: skip
    gated_audio = [
        _Part(f"feed_forward_{side}", _FUSED, "up-first", expert=f"feed_forward_{side}", biases=("all", "down"),
              norm=_Norm(f"feed_forward_{side}.layer_norm", centred=True, shift=True))
        for side in ("in", "out")
    ]  # fmt: skip
    oss = _experts("mlp.experts", _FUSED, order="interleaved", storage="stacked-transposed", ending="", where="all",
                   biases=("all", "down"), bias_ending="_bias")  # fmt: skip
    mixtral = _one(_experts("block_sparse_moe.experts", _MIX, **_EVERY), num_local_experts="E", **_SILU)
    next_moe = _one((_experts(**_EVERY), _shared("mlp.shared_expert", **_EVERY)), post_1, **_NEEDS_COUNT)
    vl_moe = _one(_experts(names=_FUSED, order="gate-first", **_STACKED, **_EVERY), **_NEEDS_COUNT)
    deepseek = _one((_FIRST, _experts(), shared), n_routed_experts="E", **_SILU)
    granite = _experts("block_sparse_moe", linear, order="gate-first", storage="stacked", **_EVERY)
    granite_shared = _Part("shared_mlp", linear, "gate-first", expert="shared")
    aria = (
        _experts("mlp.experts", ("fc1", "fc2"), order="gate-first", storage="stacked-transposed", **_EVERY),
        replace(shared, where="all"),
    )
    llama4 = (
        _experts("feed_forward.experts", _FUSED, order="gate-first", storage="stacked-transposed", ending="", **_EVERY),
        _shared("feed_forward.shared_expert", **_EVERY),
    )
    step = (
        _FIRST,
        _experts("moe", storage="stacked"),
        _shared("share_expert"),
    )
    audio = _Stack("encoders", tuple(gated_audio), None)
    swiglu = _Part("mlp", ("weights_in", "weights_out"), "gate-first", biases=("all", "down"))
    csm_depth = _Stack("layers", (_DENSE,), _POST)
    return {
        **_llama_like(
            "llama", "mistral", "ministral", "ministral3", "qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl",
            "qwen2_5_vl_text", "qwen3", "qwen3_vl_text", "smollm3", "helium", "ernie4_5", "internlm3", "eurobert",
            "hunyuan_v1_dense", "emu3_text_model", "iquestcoder", "cwm", "diffllama", "mllama_text_model", "csm", "doge",
            "seed_oss", "granite", "granite_swa", "granite_docling_text", "granite4_vision_text", "baichuan", "internlm",
        ),
        "csm_depth_decoder_model": _Model((csm_depth,), _SILU),
        "qwen2_moe": _one((_experts(**_EVERY), _shared("mlp.shared_expert", **_EVERY)), **_NEEDS_COUNT),
        "laguna": _one((_FIRST, _experts(), _shared("mlp.shared_expert")), **_NEEDS_COUNT),
        "hy_v3": _one((_FIRST, _experts(), _shared("mlp.shared_mlp")), **_NEEDS_COUNT),
        "glm4v_moe_text": _one((_FIRST, _experts(names=_FUSED, order="gate-first", **_STACKED), shared),
                               n_routed_experts="E", **_SILU),
        "lara_mini": _one((_experts(names=_FUSED, order="gate-first", **_STACKED, **_EVERY),
                           _shared("mlp.shared_expert", **_EVERY)), **_NEEDS_COUNT),
        "afmoe": _one((_FIRST, _experts(), shared), _Norm("pre_mlp_layernorm"), **_NEEDS_COUNT),
        "cohere2_moe": _one(_experts(**_EVERY), _Norm("input_layernorm", centred=True), **_NEEDS_COUNT),
        **dict.fromkeys(("qwen3_moe", "olmoe", "mellum", "qwen3_omni_moe_text"), _one(_experts(**_EVERY), **_NEEDS_COUNT)),
        **dict.fromkeys(("deepseek", "deepseek_v2", "deepseek_v3", "dots1", "kimi_k2", "kimi_k25", "glm4_moe",
                         "exaone_moe", "solar_open"), deepseek),
        "ernie4_5_moe": _one((_FIRST, _experts(), shared), moe_num_experts="E", **_SILU),
        "mimo_v2_flash": _one((_FIRST, _experts()), n_routed_experts="E", **_SILU),
        "hunyuan_v1_moe": _one((_experts(**_EVERY), _shared("mlp.shared_mlp", **_EVERY)), **_NEEDS_COUNT),
        **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), vl_moe),
        **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), mixtral),
        "phimoe": _one(_experts("block_sparse_moe.experts", _MIX, **_EVERY), layer_norm, num_local_experts="E", **_SILU),
        "kimi_linear": _one(
            (_Part("block_sparse_moe", _GLU, where="first"), _experts("block_sparse_moe.experts", _MIX),
             _shared("block_sparse_moe.shared_experts")), num_experts="E", **_SILU,
        ),
        "jamba": _one((_Part("feed_forward", _GLU, where="first"), _experts("feed_forward.experts")),
                      _Norm("pre_ff_layernorm"), **_NEEDS_COUNT),
        "bamba": _one(_Part("feed_forward", _GLU), _Norm("pre_ff_layernorm")),
        "falcon_h1": _one(_Part("feed_forward", _GLU), _Norm("pre_ff_layernorm"), mlp_multipliers=[1.0, 1.0], **_SILU),
        **dict.fromkeys(("t5", "mt5", "umt5", "pop2piano"), t5),
        **dict.fromkeys(("lfm3", "internlm2"), _one(_Part("feed_forward", _MIX), _Norm("ffn_norm"))),
        "qwen": _one(_Part("mlp", ("w2", "w1", "c_proj")), _Norm("ln_2"), "transformer.h", hidden_act=None),
        "llada": _one(_Part("", ("ff_proj", "up_proj", "ff_out")), _Norm("ff_norm"), "model.transformer.blocks",
                      activation_type="silu"),
        "jais": _one(_Part("mlp", ("c_fc2", "c_fc", "c_proj"), storage="conv1d", biases=("all", "down")),
                     _Norm("ln_2", centred=True, shift=True), "transformer.h", activation_function="swiglu"),
        "lfm2": _one(_Part("feed_forward", _MIX), _Norm("ffn_norm"), hidden_act=None),
        "lfm2_moe": _one((_Part("feed_forward", _MIX, where="first"), _experts("feed_forward.experts", _MIX)),
                         _Norm("ffn_norm"), num_experts="E"),
        "exaone": _one(_Part("mlp", ("c_fc_0", "c_fc_1", "c_proj")), _Norm("ln_2"), "transformer.h"),
        "granitemoe": _one(granite, num_local_experts="E", **_SILU),
        **dict.fromkeys(("granitemoehybrid", "granitemoeshared"),
                        _one((granite, granite_shared), num_local_experts="E", **_SILU)),
        "granitemoe_swa": _one(_experts("block_sparse_moe.experts", _FUSED, order="gate-first", **_STACKED, **_EVERY),
                               num_local_experts="E", **_SILU),
        "jetmoe": _one(replace(granite, block="mlp"), num_local_experts="E", activation_function="silu"),
        **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _one(_DENSE, post_1)),
        **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"), next_moe),
        **dict.fromkeys(("step3p7", "step3p5"), _one(step, post_1, num_local_experts="E", **_SILU)),
        "gemma": _one(_DENSE, post_1, hidden_act="gelu"),
        **dict.fromkeys(("gemma2", "gemma3", "gemma3_text", "vaultgemma"), _one(_DENSE, gemma, **_TANH)),
        **dict.fromkeys(("gemma3n", "gemma3n_text"),
                        _one(_DENSE, gemma_plain, activation_sparsity_pattern=[0.0] * 64, **_TANH)),
        **dict.fromkeys(("gemma4_unified_text", "embedding_gemma2_text"), _one(_DENSE, gemma_plain, **_TANH)),
        "gemma4_text": _one(
            (_DENSE, _experts("experts", _FUSED, order="gate-first", norm=_Norm("pre_feedforward_layernorm_2"), **_STACKED,
                              **_EVERY)), gemma_plain, num_experts="E", **_TANH,
        ),
        "recurrent_gemma": _one(_Part("mlp_block", _GLU, biases=("all", "down")), _Norm("channel_pre_norm", gain="1+w"),
                                **_TANH),
        "olmo": _one(_DENSE, _Norm("post_attention_layernorm", centred=True, gain="none")),
        **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _one(_DENSE, None)),
        "flex_olmo": _one(_experts(**_EVERY), None, **_NEEDS_COUNT),
        **dict.fromkeys(("cohere", "cohere2"), _one(_DENSE, _Norm("input_layernorm", centred=True))),
        **dict.fromkeys(("stablelm", "esmc"), _one(_DENSE, layer_norm)),
        "bitnet": _one(_DENSE, hidden_act="relu2"),
        "chatglm": _one(_Part("mlp", ("dense_h_to_4h", "dense_4h_to_h"), "gate-first"), _POST, "transformer.encoder.layers",
                        hidden_act=None),
        **dict.fromkeys(("moshi", "kyutai_speech_to_text"), _one(_Part("mlp", ("fc1", "fc2"), "gate-first"))),
        "molmo2_text": _one(_Part("mlp", ("ff_proj", "ff_out"), "up-first")),
        **dict.fromkeys(("phi3", "phi4_multimodal", "glm", "glm4", "glm4v_text", "glm_ocr_text", "glm_image_text"), _one(_Part("mlp", _FUSED, "gate-first"))),
        **dict.fromkeys(("llama4", "llama4_text"), _one(llama4, num_local_experts="E", **_SILU)),
        **dict.fromkeys(("aria", "aria_text"), _one(aria, moe_num_experts="E", **_SILU)),
        "openai_privacy_filter": _one(replace(oss, order="gate-first"), num_local_experts="E", **_SILU),
        "minimax_m3_vl_text": _one((_FIRST, _experts("block_sparse_moe.experts", _MIX)),
                                   _Norm("post_attention_layernorm", gain="1+w"), num_local_experts="E", **_SILU),
        "gpt_oss": _one(oss, num_local_experts="E", swiglu_limit=7.0, **_SILU),
        "dbrx": _one(
            _experts("ffn.experts.mlp", ("w1", "v1", "w2"), storage="row-stacked", ending="", **_EVERY),
            _Norm("norm_attn_norm.norm_2", centred=True), "transformer.blocks", d_model="D",
            ffn_config={"moe_num_experts": "E", "ffn_hidden_size": "F", "ffn_act_fn": {"name": "silu"}},
        ),
        "deepseek_v4": _one(
            (_experts("ffn.experts", _MIX, **_EVERY), _shared("ffn.shared_experts", _MIX, **_EVERY)), _Norm("ffn_norm"),
            "layers", n_routed_experts="E", swiglu_limit=10.0, **_SILU,
        ),
        "longcat_flash": _one(
            (*(_Part(f"mlps.{m}", _GLU, expert=f"mlps.{m}", norm=_Norm(f"post_attention_layernorm.{m}")) for m in (0, 1)),
             _experts(**_EVERY)), _Norm("post_attention_layernorm.0"), n_routed_experts="E", **_SILU,
        ),
        "xlstm": _one(_Part("ffn", ("proj_up_gate", "proj_up", "proj_down")), _Norm("norm_ffn"), "backbone.blocks", hidden_act=None),
        "zamba2": _one(_Part("shared_transformer.feed_forward", _FUSED, "gate-first"),
                       _Norm("shared_transformer.pre_ff_layernorm"), hidden_act="gelu", use_shared_mlp_adapter=False),
        **dict.fromkeys(("modernbert", "modernbert-decoder"),
                        _one(_Part("mlp", ("Wi", "Wo"), "gate-first"), _Norm("mlp_norm", centred=True),
                             hidden_activation="gelu")),
        "nomic_bert": _one(_Part("mlp", ("fc12", "fc11", "fc2")), _Norm("norm1", centred=True, shift=True),
                           "encoder.layers"),
        "gte": _one(_Part("mlp", ("up_gate_proj", "down_proj"), "up-first", biases=("down",)),
                    _Norm("attn_ln", centred=True, shift=True), "encoder.layer", hidden_act="gelu"),
        "moonshine": _one(_Part("mlp", ("fc1", "fc2"), "up-first", biases=("all", "down")),
                          _Norm("final_layernorm", centred=True), "model.decoder.layers", decoder_hidden_act="silu"),
        "pixtral": _one(_Part("feed_forward", _GLU), _Norm("ffn_norm"), "transformer.layers", hidden_act="gelu"),
        "qwen2_5_vl_vision": _one(replace(_DENSE, biases=("all", "down")), _Norm("norm2"), "blocks"),
        **dict.fromkeys(("dinov2", "dinov2_with_registers"),
                        _one(swiglu, _Norm("norm2", centred=True, shift=True), "encoder.layer", use_swiglu_ffn=True)),
        "phi4_multimodal_audio": _Model((audio,), {"activation": "silu"}),
    }  # fmt: skip


def tiny_families() -> list[str]:
    """The families that can be written."""
    return sorted(_facts())


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

    model = _facts().get(family)
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
        self.generator, self.tensors = generator, {}

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * shape[-1] ** -0.5

    def filled(self, value: Any) -> Any:
        """A config with its sizes in place of their letters."""
        if isinstance(value, dict):
            return {key: self.filled(inner) for key, inner in value.items() if inner is not None}
        return self.sizes.get(value, value) if isinstance(value, str) else value

    def stack(self, stack: _Stack, order: str | None, storage: str | None) -> Iterator[TrueMLP]:
        for layer in range(self.sizes["L"]):
            norms: dict[_Norm, tuple[Tensor, Tensor | None]] = {}
            for part in stack.parts:
                if part.where != "all" and (part.where == "first") != (layer == 0):
                    continue
                norm = part.norm or stack.norm
                if norm is not None and norm not in norms:
                    norms[norm] = self.norm(f"{stack.prefix}.{layer}.{norm.name}", norm)
                gain, shift = norms[norm] if norm is not None else (None, None)
                is_expert = part.expert == "routed"
                fits = storage is not None and (storage in ("linear", "conv1d")) != is_expert
                changed = _reordered(replace(part, storage=storage if fits else part.storage), order)
                for mlp in self.mlps(f"{stack.prefix}.{layer}.{part.block}".rstrip("."), changed):
                    yield replace(
                        mlp, layer=layer, tower=stack.tower, gain=gain, shift=shift, centred=bool(norm and norm.centred)
                    )

    def norm(self, name: str, norm: _Norm) -> tuple[Tensor, Tensor | None]:
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

    def mlps(self, stem: str, part: _Part) -> Iterator[TrueMLP]:
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
            full = tuple(f"{own}.{name}{part.ending}" for name in names)
            label = number if many else part.expert
            drawn.append(TrueMLP(0, label, "", *factors, *inner, outer, None, None, False, full))
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

    def layout(self, part: _Part, mlp: TrueMLP) -> dict[str, Tensor]:
        """The tensors of one MLP, as they stand in files."""
        gate, up, down = mlp.query, mlp.key, mlp.value.T
        out = {"gate": _together(gate, up, part.order)} if part.order != "separate" else {"gate": gate, "up": up}
        out["down"] = down
        if part.storage in ("conv1d", "stacked-transposed"):
            out = {role: matrix.T for role, matrix in out.items()}
        if part.storage == "row-stacked":
            out["down"] = mlp.value
        if mlp.query_bias is not None:
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


def _reordered(part: _Part, order: str | None) -> _Part:
    """The part with gate and up together or apart, under the usual names where its own do not serve."""
    if order is None or order == part.order:
        return part
    if order == "separate":
        return replace(part, order=order, names=_GLU)
    return replace(part, order=order, names=part.names if part.order != "separate" else _FUSED)
