"""How the files of every family look, for writing tiny ones: stated apart from the tables that the reader goes by."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Part:
    """One kind of MLP in a layer: block, names, order and storage; which layers have it."""

    block: str
    names: tuple[str, ...]
    order: str = "separate"
    storage: str = "linear"
    expert: str | None = None  # None dense, "routed", or a label
    where: str = "all"  # or "first", "rest"
    ending: str = ".weight"
    biases: tuple[str, ...] = ()  # of gate and up, and of down
    norm: Norm | None = None  # where it differs from the stack's
    bias_ending: str = ".bias"


@dataclass(frozen=True)
class Norm:
    """The norm in front: name, whether it subtracts the mean, its gain ("w", "1+w", "none"), and whether it adds a bias."""

    name: str
    centred: bool = False
    gain: str = "w"  # "1+w", "none"
    shift: bool = False


@dataclass(frozen=True)
class Stack:
    """A stack of layers."""

    prefix: str
    parts: tuple[Part, ...]
    norm: Norm | None
    tower: str = "text"


@dataclass(frozen=True)
class Model:
    """The stacks of a file, and its config with D, F, E and L for sizes."""

    stacks: tuple[Stack, ...]
    config: dict[str, Any] = field(default_factory=dict)


GLU = ("gate_proj", "up_proj", "down_proj")
FUSED = ("gate_up_proj", "down_proj")
_MIX = ("w1", "w3", "w2")
_POST = Norm("post_attention_layernorm")
_SILU: dict[str, Any] = {"hidden_act": "silu"}
_TANH: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"}


def _one(
    part: Part | tuple[Part, ...], norm: Norm | None = _POST, prefix: str = "model.layers", **config: Any
) -> Model:
    """A model of one stack."""
    parts = part if isinstance(part, tuple) else (part,)
    return Model((Stack(prefix, parts, norm),), config or _SILU)


def _experts(block: str = "mlp.experts", names: tuple[str, ...] = GLU, **changes: Any) -> Part:
    return replace(Part(block, names, storage="one by one", expert="routed", where="rest"), **changes)


def _shared(block: str, names: tuple[str, ...] = GLU, **changes: Any) -> Part:
    return replace(Part(block, names, expert="shared", where="rest"), **changes)


_DENSE = Part("mlp", GLU)
_FIRST = replace(_DENSE, where="first")
_EVERY: dict[str, Any] = {"where": "all"}
_NEEDS_COUNT: dict[str, Any] = {"num_experts": "E"} | _SILU
_STACKED: dict[str, Any] = {"storage": "stacked", "ending": ""}


def _llama_like(*names: str) -> dict[str, Model]:
    return dict.fromkeys(names, _one(_DENSE))


def file_forms() -> dict[str, Model]:
    """Every family: how its files look."""
    shared = _shared("mlp.shared_experts")
    post_1 = Norm("post_attention_layernorm", gain="1+w")
    gemma = Norm("pre_feedforward_layernorm", gain="1+w")
    gemma_plain = Norm("pre_feedforward_layernorm")
    layer_norm = Norm("post_attention_layernorm", centred=True, shift=True)
    linear = ("input_linear", "output_linear")
    t5 = Model(
        (
            Stack("encoder.block", (Part("layer.1.DenseReluDense", ("wi_0", "wi_1", "wo")),), Norm("layer.1.layer_norm"),
                   "encoder"),
            Stack("decoder.block", (Part("layer.2.DenseReluDense", ("wi_0", "wi_1", "wo")),), Norm("layer.2.layer_norm")),
        ),
        {"d_model": "D", "d_ff": "F", "num_layers": "L", "feed_forward_proj": "gated-gelu", "is_encoder_decoder": True},
    )  # fmt: skip
    gated_audio = [
        Part(f"feed_forward_{side}", FUSED, "up-first", expert=f"feed_forward_{side}", biases=("all", "down"),
              norm=Norm(f"feed_forward_{side}.layer_norm", centred=True, shift=True))
        for side in ("in", "out")
    ]  # fmt: skip
    oss = _experts("mlp.experts", FUSED, order="interleaved", storage="stacked-transposed", ending="", where="all",
                   biases=("all", "down"), bias_ending="_bias")  # fmt: skip
    mixtral = _one(_experts("block_sparse_moe.experts", _MIX, **_EVERY), num_local_experts="E", **_SILU)
    next_moe = _one((_experts(**_EVERY), _shared("mlp.shared_expert", **_EVERY)), post_1, **_NEEDS_COUNT)
    vl_moe = _one(_experts(names=FUSED, order="gate-first", **_STACKED, **_EVERY), **_NEEDS_COUNT)
    deepseek = _one((_FIRST, _experts(), shared), n_routed_experts="E", **_SILU)
    granite = _experts("block_sparse_moe", linear, order="gate-first", storage="stacked", **_EVERY)
    granite_shared = Part("shared_mlp", linear, "gate-first", expert="shared")
    aria = (
        _experts("mlp.experts", ("fc1", "fc2"), order="gate-first", storage="stacked-transposed", **_EVERY),
        replace(shared, where="all"),
    )
    llama4 = (
        _experts("feed_forward.experts", FUSED, order="gate-first", storage="stacked-transposed", ending="", **_EVERY),
        _shared("feed_forward.shared_expert", **_EVERY),
    )
    step = (
        _FIRST,
        _experts("moe", storage="stacked"),
        _shared("share_expert"),
    )
    audio = Stack("encoders", tuple(gated_audio), None)
    swiglu = Part("mlp", ("weights_in", "weights_out"), "gate-first", biases=("all", "down"))
    csm_depth = Stack("layers", (_DENSE,), _POST)
    return {
        **_llama_like(
            "llama", "mistral", "ministral", "ministral3", "qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl",
            "qwen2_5_vl_text", "qwen3", "qwen3_vl_text", "smollm3", "helium", "ernie4_5", "internlm3", "eurobert",
            "hunyuan_v1_dense", "emu3_text_model", "iquestcoder", "cwm", "diffllama", "mllama_text_model", "csm", "doge",
            "seed_oss", "granite", "granite_swa", "granite_docling_text", "granite4_vision_text", "baichuan", "internlm",
        ),
        "csm_depth_decoder_model": Model((csm_depth,), _SILU),
        "qwen2_moe": _one((_experts(**_EVERY), _shared("mlp.shared_expert", **_EVERY)), **_NEEDS_COUNT),
        "laguna": _one((_FIRST, _experts(), _shared("mlp.shared_expert")), **_NEEDS_COUNT),
        "hy_v3": _one((_FIRST, _experts(), _shared("mlp.shared_mlp")), **_NEEDS_COUNT),
        "glm4v_moe_text": _one((_FIRST, _experts(names=FUSED, order="gate-first", **_STACKED), shared),
                               n_routed_experts="E", **_SILU),
        "lara_mini": _one((_experts(names=FUSED, order="gate-first", **_STACKED, **_EVERY),
                           _shared("mlp.shared_expert", **_EVERY)), **_NEEDS_COUNT),
        "afmoe": _one((_FIRST, _experts(), shared), Norm("pre_mlp_layernorm"), **_NEEDS_COUNT),
        "cohere2_moe": _one(_experts(**_EVERY), Norm("input_layernorm", centred=True), **_NEEDS_COUNT),
        **dict.fromkeys(("qwen3_moe", "olmoe", "mellum", "qwen3_omni_moe_text"), _one(_experts(**_EVERY), **_NEEDS_COUNT)),
        **dict.fromkeys(("deepseek", "deepseek_v2", "deepseek_v3", "dots1", "kimi_k2", "kimi_k25", "glm4_moe",
                         "exaone_moe", "solar_open", "mistral4"), deepseek),
        "ernie4_5_moe": _one((_FIRST, _experts(), shared), moe_num_experts="E", **_SILU),
        "mimo_v2_flash": _one((_FIRST, _experts()), n_routed_experts="E", **_SILU),
        "hunyuan_v1_moe": _one((_experts(**_EVERY), _shared("mlp.shared_mlp", **_EVERY)), **_NEEDS_COUNT),
        **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), vl_moe),
        **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), mixtral),
        "phimoe": _one(_experts("block_sparse_moe.experts", _MIX, **_EVERY), layer_norm, num_local_experts="E", **_SILU),
        "kimi_linear": _one(
            (Part("block_sparse_moe", GLU, where="first"), _experts("block_sparse_moe.experts", _MIX),
             _shared("block_sparse_moe.shared_experts")), num_experts="E", **_SILU,
        ),
        "jamba": _one((Part("feed_forward", GLU, where="first"), _experts("feed_forward.experts")),
                      Norm("pre_ff_layernorm"), **_NEEDS_COUNT),
        "bamba": _one(Part("feed_forward", GLU), Norm("pre_ff_layernorm")),
        "falcon_h1": _one(Part("feed_forward", GLU), Norm("pre_ff_layernorm"), mlp_multipliers=[1.0, 1.0], **_SILU),
        **dict.fromkeys(("t5", "mt5", "umt5", "pop2piano"), t5),
        **dict.fromkeys(("lfm3", "internlm2"), _one(Part("feed_forward", _MIX), Norm("ffn_norm"))),
        "qwen": _one(Part("mlp", ("w2", "w1", "c_proj")), Norm("ln_2"), "transformer.h", hidden_act=None),
        "llada": _one(Part("", ("ff_proj", "up_proj", "ff_out")), Norm("ff_norm"), "model.transformer.blocks",
                      activation_type="silu"),
        "jais": _one(Part("mlp", ("c_fc2", "c_fc", "c_proj"), storage="conv1d", biases=("all", "down")),
                     Norm("ln_2", centred=True, shift=True), "transformer.h", activation_function="swiglu"),
        "lfm2": _one(Part("feed_forward", _MIX), Norm("ffn_norm"), hidden_act=None),
        "lfm2_moe": _one((Part("feed_forward", _MIX, where="first"), _experts("feed_forward.experts", _MIX)),
                         Norm("ffn_norm"), num_experts="E"),
        "exaone": _one(Part("mlp", ("c_fc_0", "c_fc_1", "c_proj")), Norm("ln_2"), "transformer.h"),
        "granitemoe": _one(granite, num_local_experts="E", **_SILU),
        **dict.fromkeys(("granitemoehybrid", "granitemoeshared"),
                        _one((granite, granite_shared), num_local_experts="E", **_SILU)),
        "granitemoe_swa": _one(_experts("block_sparse_moe.experts", FUSED, order="gate-first", **_STACKED, **_EVERY),
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
            (_DENSE, _experts("experts", FUSED, order="gate-first", norm=Norm("pre_feedforward_layernorm_2"), **_STACKED,
                              **_EVERY)), gemma_plain, num_experts="E", **_TANH,
        ),
        "recurrent_gemma": _one(Part("mlp_block", GLU, biases=("all", "down")), Norm("channel_pre_norm", gain="1+w"),
                                **_TANH),
        "olmo": _one(_DENSE, Norm("post_attention_layernorm", centred=True, gain="none")),
        **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _one(_DENSE, None)),
        "flex_olmo": _one(_experts(**_EVERY), None, **_NEEDS_COUNT),
        **dict.fromkeys(("cohere", "cohere2"), _one(_DENSE, Norm("input_layernorm", centred=True))),
        **dict.fromkeys(("stablelm", "esmc"), _one(_DENSE, layer_norm)),
        "bitnet": _one(_DENSE, hidden_act="relu2"),
        "chatglm": _one(Part("mlp", ("dense_h_to_4h", "dense_4h_to_h"), "gate-first"), _POST, "transformer.encoder.layers",
                        hidden_act=None),
        **dict.fromkeys(("moshi", "kyutai_speech_to_text"), _one(Part("mlp", ("fc1", "fc2"), "gate-first"))),
        "molmo2_text": _one(Part("mlp", ("ff_proj", "ff_out"), "up-first")),
        **dict.fromkeys(("phi3", "phi4_multimodal", "glm", "glm4", "glm4v_text", "glm_ocr_text", "glm_image_text"), _one(Part("mlp", FUSED, "gate-first"))),
        **dict.fromkeys(("llama4", "llama4_text"), _one(llama4, num_local_experts="E", **_SILU)),
        **dict.fromkeys(("aria", "aria_text"), _one(aria, moe_num_experts="E", **_SILU)),
        "openai_privacy_filter": _one(replace(oss, order="gate-first"), num_local_experts="E", **_SILU),
        "minimax_m3_vl_text": _one((_FIRST, _experts("block_sparse_moe.experts", _MIX)),
                                   Norm("post_attention_layernorm", gain="1+w"), num_local_experts="E", **_SILU),
        "gpt_oss": _one(oss, num_local_experts="E", swiglu_limit=7.0, **_SILU),
        "dbrx": _one(
            _experts("ffn.experts.mlp", ("w1", "v1", "w2"), storage="row-stacked", ending="", **_EVERY),
            Norm("norm_attn_norm.norm_2", centred=True), "transformer.blocks", d_model="D",
            ffn_config={"moe_num_experts": "E", "ffn_hidden_size": "F", "ffn_act_fn": {"name": "silu"}},
        ),
        "deepseek_v4": _one(
            (_experts("ffn.experts", _MIX, **_EVERY), _shared("ffn.shared_experts", _MIX, **_EVERY)), Norm("ffn_norm"),
            "layers", n_routed_experts="E", swiglu_limit=10.0, **_SILU,
        ),
        **dict.fromkeys(("hy_v4", "hy_v4_vl_text"), _one(
            (Part("mlp", ("linear_gate", "up_proj", "down_proj"), where="first"),
             _experts(names=FUSED, order="gate-first", **_STACKED),
             _shared("mlp.shared_experts", ("linear_gate", "up_proj", "down_proj"))),
            n_routed_experts="E", swiglu_limit=10.0, **_SILU,
        )),
        "inkling_text": _one(_experts(names=("w13_weight", "w2_weight"), order="interleaved", **_STACKED, **_EVERY),
                             Norm("mlp_norm"), "model.llm.layers", n_routed_experts="E", **_SILU),
        "sapiens2": _one(Part("ffn", ("w12", "w3"), "gate-first", biases=("all", "down")), Norm("ln2"), "blocks"),
        "dots3_note_vision_encoder": _one(Part("mlp", ("fc1", "fc3", "fc2")), Norm("norm2"), "blocks"),
        "dia_encoder": _one(Part("mlp", FUSED, "gate-first"), Norm("post_sa_norm"), "layers"),
        "dia_decoder": _one(Part("mlp", FUSED, "gate-first"), Norm("pre_mlp_norm"), "layers"),
        "longcat_flash": _one(
            (*(Part(f"mlps.{m}", GLU, expert=f"mlps.{m}", norm=Norm(f"post_attention_layernorm.{m}")) for m in (0, 1)),
             _experts(**_EVERY)), Norm("post_attention_layernorm.0"), n_routed_experts="E", **_SILU,
        ),
        "xlstm": _one(Part("ffn", ("proj_up_gate", "proj_up", "proj_down")), Norm("norm_ffn"), "backbone.blocks", hidden_act=None),
        "zamba2": _one(Part("shared_transformer.feed_forward", FUSED, "gate-first"),
                       Norm("shared_transformer.pre_ff_layernorm"), hidden_act="gelu", use_shared_mlp_adapter=False),
        **dict.fromkeys(("modernbert", "modernbert-decoder"),
                        _one(Part("mlp", ("Wi", "Wo"), "gate-first"), Norm("mlp_norm", centred=True),
                             hidden_activation="gelu")),
        "nomic_bert": _one(Part("mlp", ("fc12", "fc11", "fc2")), Norm("norm1", centred=True, shift=True),
                           "encoder.layers"),
        "gte": _one(Part("mlp", ("up_gate_proj", "down_proj"), "up-first", biases=("down",)),
                    Norm("attn_ln", centred=True, shift=True), "encoder.layer", hidden_act="gelu"),
        "moonshine": _one(Part("mlp", ("fc1", "fc2"), "up-first", biases=("all", "down")),
                          Norm("final_layernorm", centred=True), "model.decoder.layers", decoder_hidden_act="silu"),
        "pixtral": _one(Part("feed_forward", GLU), Norm("ffn_norm"), "transformer.layers", hidden_act="gelu"),
        "qwen2_5_vl_vision": _one(replace(_DENSE, biases=("all", "down")), Norm("norm2"), "blocks"),
        **dict.fromkeys(("dinov2", "dinov2_with_registers"),
                        _one(swiglu, Norm("norm2", centred=True, shift=True), "encoder.layer", use_swiglu_ffn=True)),
        "phi4_multimodal_audio": Model((audio,), {"activation": "silu"}),
    }  # fmt: skip
