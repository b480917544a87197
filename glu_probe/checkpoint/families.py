"""The table: what each model family means by its tensors.

One entry a family: which names its projections have and how they are stored, what its activation is and where the
config says so, and the norm in front of the MLP. Adding a family is adding an entry here and nothing anywhere else.
Names of norms are those of Hugging Face checkpoints; `GGUF_NORMS` translates them.

Sources of the facts: the modeling files of transformers (what a module computes from which parameter), what it writes
and reads, and the conversion scripts of llama.cpp (what GGUF files call it, and that they store 1 + w where a family
stores w).
"""

from __future__ import annotations

from dataclasses import replace

from .family import FUSED_GATE_UP, SEPARATE, ActivationRule, Family, Norm, Place, Projections
from .peculiarities import (
    falcon_h1_multipliers,
    gemma3n_missing,
    gpt_oss_gate,
    limited_experts,
    limited_gate,
    llama4_missing,
    step_gate,
    sub_norm_missing,
    zamba2_missing,
)
from .tensor_names import FUSED_COLUMNS, FUSED_EXPERTS_EITHER, LINEAR_PAIR, MIXTRAL

_LLAMA_NORM = Norm("post_attention_layernorm")
_LLAMA_OFFSET = Norm("post_attention_layernorm", weight="offset", gguf="post_attention_norm")
_LLAMA_LAYER_NORM = Norm("post_attention_layernorm", kind="layer", bias=True)
# Gemma 2 and 3 compute `hidden_activation`, whatever `hidden_act` says; their published configs often leave it out.
_GEMMA_ACTIVATION = ActivationRule(keys=("hidden_activation",), default="gelu_pytorch_tanh", gguf="gelu_tanh")
_SILU = ActivationRule(keys=(), default="silu")
# The forms of experts that transformers reads and writes: one by one, or gate and up of all in one tensor.
_EXPERTS = (SEPARATE, FUSED_GATE_UP)

FAMILIES: tuple[Family, ...] = (
    # The LLaMA block: RMSNorm, then gate, up and down. Most families are one of these.
    Family(
        names=(
            "llama",
            "mistral",
            "ministral",
            "ministral3",
            "qwen2",
            "qwen2_vl",
            "qwen2_vl_text",
            "qwen2_5_vl",
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
            "mllama_text_model",
            "csm",
            "csm_depth_decoder_model",
            "granite_docling_text",
            "granite4_vision_text",
            "baichuan",
            "internlm",
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
            "llama-embed",
            "deci",
            "baichuan",
            "xverse",
            "internlm2",
            "refact",
            "qwen",
            "minicpm3",
            "dream",
            "llada",
            "hunyuan_vl",
            "paddleocr",
            "maincoder",
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
            "ernie4_5_moe",
            "olmoe",
            "hunyuan_v1_moe",
            "dots1",
            "mimo_v2_flash",
            "kimi_k25",
            "kimi_k2",
            "deepseek",
            "doge",
            "exaone_moe",
            "hy_v3",
            "laguna",
            "lara_mini",
            "mellum",
            "mistral4",
            "qwen3_omni_moe_text",
            "solar_open",
        ),
        gguf=(
            "qwen2moe",
            "qwen3moe",
            "deepseek",
            "deepseek2",
            "ernie4_5-moe",
            "olmoe",
            "hunyuan-moe",
            "dots1",
            "mimo2",
            "qwen3vlmoe",
            "bailingmoe",
            "bailingmoe2",
        ),
        projections=_EXPERTS,
        norm=_LLAMA_NORM,
    ),
    Family(
        names=("glm4_moe", "glm4v_moe_text"),
        gguf=("glm4moe",),
        projections=_EXPERTS,
        norm=Norm("post_attention_layernorm", gguf="post_attention_norm"),
    ),
    # Qwen3-VL: experts were published as [in, out] and are saved as [out, in] since.
    Family(
        names=("qwen3_vl_moe", "qwen3_vl_moe_text"),
        projections=(SEPARATE, FUSED_EXPERTS_EITHER),
        norm=_LLAMA_NORM,
    ),
    # Mixtral: the LLaMA block with experts whose gate is w1, up w3 and down w2.
    Family(
        names=("mixtral", "minimax", "minimax_m2"),
        gguf=("minimax-m2",),
        projections=(MIXTRAL, FUSED_GATE_UP),
        norm=_LLAMA_NORM,
    ),
    Family(
        names=("phimoe",),
        gguf=("phimoe",),
        projections=(MIXTRAL, FUSED_GATE_UP),
        norm=_LLAMA_LAYER_NORM,
    ),
    Family(
        names=("kimi_linear",),
        gguf=("kimi-linear",),
        projections=(SEPARATE, MIXTRAL, FUSED_GATE_UP),
        norm=_LLAMA_NORM,
    ),
    # AFMoE: a norm behind as well, under names of its own.
    Family(
        names=("afmoe",),
        projections=_EXPERTS,
        norm=Norm("pre_mlp_layernorm"),
        post_norm=Norm("post_mlp_layernorm"),
    ),
    # Jamba, Falcon-H1, Bamba: Mamba layers, and the same MLP under other names.
    Family(
        names=("jamba", "bamba"),
        gguf=("jamba",),
        projections=_EXPERTS,
        norm=Norm("pre_ff_layernorm"),
    ),
    Family(
        names=("falcon_h1",),
        gguf=("falcon-h1",),
        norm=Norm("pre_ff_layernorm"),
        multipliers=falcon_h1_multipliers,
    ),
    # T5 1.1: gated where `feed_forward_proj` says so. In decoders the MLP is the third part of a block, not the second.
    Family(
        names=("t5", "mt5", "umt5"),
        gguf=("t5", "t5encoder"),
        norm=Norm("layer.{0}.layer_norm", gguf="ffn_norm"),
        activation=ActivationRule(
            keys=("feed_forward_proj",),
            renamed={"gated-gelu": "gelu_tanh", "gated-silu": "silu", "gated-relu": "relu"},
            gguf="gelu_tanh",
        ),
    ),
    # Pop2Piano has T5's blocks, gated where `feed_forward_proj` says so, with an activation that another key says.
    Family(
        names=("pop2piano",),
        norm=Norm("layer.{0}.layer_norm"),
        activation=ActivationRule(keys=("dense_act_fn",), default="relu"),
    ),
    # LFM2: names as Mixtral's for a dense MLP and for experts; its activation is in no config.
    Family(
        names=("lfm2", "lfm2_moe"),
        gguf=("lfm2", "lfm2moe"),
        projections=(MIXTRAL, FUSED_GATE_UP),
        norm=Norm("ffn_norm"),
        activation=_SILU,
    ),
    # LFM3 has a norm behind it too.
    Family(
        names=("lfm3",),
        projections=(MIXTRAL,),
        norm=Norm("ffn_norm"),
        post_norm=Norm("post_ffn_norm"),
        activation=_SILU,
    ),
    # Meta's and InternLM's own names: w1 is the gate, w3 the up projection.
    Family(names=("internlm2",), projections=(MIXTRAL,), norm=Norm("ffn_norm")),
    # Qwen 1 has them the other way round: w2 is the gate, w1 the up projection.
    Family(names=("qwen",), projections=(Projections("w2", "w1", "c_proj"),), norm=Norm("ln_2"), activation=_SILU),
    # LLaDA: `ff_proj` is the gate alone.
    Family(
        names=("llada",),
        projections=(Projections("ff_proj", "up_proj", "ff_out"),),
        norm=Norm("ff_norm"),
        activation=ActivationRule(keys=("activation_type",), default="silu"),
    ),
    # Jais: GPT-2's block with a gate; all its matrices are [in, out].
    Family(
        names=("jais",),
        projections=(Projections("c_fc2", "c_fc", "c_proj", stored="columns"),),
        norm=Norm("ln_2", kind="layer", bias=True),
        activation=ActivationRule(keys=("activation_function",), renamed={"swiglu": "silu"}),
    ),
    # EXAONE 3: the LLaMA block under GPT-2's names.
    Family(
        names=("exaone",),
        gguf=("exaone",),
        projections=(Projections("c_fc_0", "c_fc_1", "c_proj"),),
        norm=Norm("ln_2"),
        activation=ActivationRule(keys=("hidden_act", "activation_function")),
    ),
    # Seed-OSS: the LLaMA block, with another name for its norm in GGUF files.
    Family(names=("seed_oss",), gguf=("seed_oss",), norm=Norm("post_attention_layernorm", gguf="post_attention_norm")),
    # Granite multiplies what the MLP adds to the stream; the config says by how much.
    Family(names=("granite", "granite_swa"), gguf=("granite",), norm=_LLAMA_NORM),
    Family(
        names=("granitemoe", "granitemoehybrid", "granitemoeshared", "granitemoe_swa"),
        gguf=("granitemoe", "granitehybrid"),
        projections=(LINEAR_PAIR, FUSED_GATE_UP),
        norm=_LLAMA_NORM,
    ),
    Family(
        names=("jetmoe",),
        projections=(LINEAR_PAIR,),
        norm=_LLAMA_NORM,
        activation=ActivationRule(keys=("activation_function",)),
    ),
    # Qwen 3.5 and Qwen3-Next: norm weights are offsets from 1. Published experts are stacked.
    Family(
        names=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
        gguf=("qwen35", "qwen35moe", "qwen3next"),
        projections=_EXPERTS,
        norm=_LLAMA_OFFSET,
    ),
    # Step: experts are stacked as gate, up and down apart; limits by layer.
    Family(
        names=("step3p7", "step3p5"),
        projections=(SEPARATE, FUSED_GATE_UP),
        norm=_LLAMA_OFFSET,
        activation=ActivationRule(adjust=step_gate),
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
        gguf=("gemma2", "gemma3", "gemma-embedding"),
        norm=Norm("pre_feedforward_layernorm", weight="offset"),
        post_norm=Norm("post_feedforward_layernorm", weight="offset"),
        activation=_GEMMA_ACTIVATION,
    ),
    # VaultGemma is Gemma 2 without the norm behind; Gemma 3n and 4 store their norm weights as they are.
    Family(
        names=("vaultgemma",),
        norm=Norm("pre_feedforward_layernorm", weight="offset"),
        activation=_GEMMA_ACTIVATION,
    ),
    Family(
        names=("gemma3n_text", "gemma3n"),
        gguf=("gemma3n",),
        norm=Norm("pre_feedforward_layernorm"),
        post_norm=Norm("post_feedforward_layernorm"),
        activation=_GEMMA_ACTIVATION,
        missing=gemma3n_missing,
    ),
    # Gemma 4 with experts has them beside the MLP, each with a norm of its own.
    Family(
        names=("gemma4_text", "gemma4_unified_text", "embedding_gemma2_text"),
        gguf=("gemma4",),
        projections=_EXPERTS,
        norm=Norm("pre_feedforward_layernorm"),
        post_norm=Norm("post_feedforward_layernorm_1|post_feedforward_layernorm"),
        places={
            "routed": Place(
                norm=Norm("pre_feedforward_layernorm_2", gguf="pre_ffw_norm_2"),
                post_norm=Norm("post_feedforward_layernorm_2", gguf="post_ffw_norm_2"),
            )
        },
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
        names=("olmo2", "olmo3", "exaone4", "flex_olmo"),
        gguf=("olmo2", "exaone4"),
        projections=_EXPERTS,
        norm=None,
        post_norm=Norm("post_feedforward_layernorm"),
    ),
    # One norm feeds attention and MLP in parallel.
    Family(names=("cohere2_moe",), projections=_EXPERTS, norm=Norm("input_layernorm", kind="layer")),
    Family(names=("cohere", "cohere2"), gguf=("command-r", "cohere2"), norm=Norm("input_layernorm", kind="layer")),
    Family(
        names=("stablelm",),
        gguf=("stablelm",),
        norm=_LLAMA_LAYER_NORM,
        norm_if_parallel=("use_parallel_residual", Norm("input_layernorm", kind="layer", bias=True)),
    ),
    Family(names=("esmc",), norm=_LLAMA_LAYER_NORM),
    # BitNet: the neurons pass a norm together.
    Family(names=("bitnet",), gguf=("bitnet",), norm=_LLAMA_NORM, missing=sub_norm_missing),
    # Gate and up in one tensor, gate first.
    Family(
        names=("phi3", "phi4_multimodal"),
        gguf=("phi3",),
        projections=(FUSED_GATE_UP,),
        gguf_fused="gate-first",
        norm=_LLAMA_NORM,
    ),
    Family(
        names=("chatglm",),
        projections=(Projections("dense_h_to_4h", "dense_h_to_4h", "dense_4h_to_h", fused="gate-first"),),
        norm=_LLAMA_NORM,
        activation=_SILU,
    ),
    # Dia: speech from text, by an encoder and a decoder.
    Family(names=("dia_encoder",), projections=(FUSED_GATE_UP,), norm=Norm("post_sa_norm")),
    Family(names=("dia_decoder",), projections=(FUSED_GATE_UP,), norm=Norm("pre_mlp_norm")),
    # Moshi's text models; their depth decoders have weights for each codebook.
    Family(
        names=("moshi", "kyutai_speech_to_text"),
        projections=(Projections("fc1", "fc1", "fc2", fused="gate-first"),),
        norm=_LLAMA_NORM,
    ),
    # Molmo 2: up first.
    Family(
        names=("molmo2_text",),
        projections=(Projections("ff_proj", "ff_proj", "ff_out", fused="up-first"),),
        norm=Norm("post_attention_layernorm|ff_norm"),
    ),
    Family(names=("glm",), gguf=("chatglm",), projections=(FUSED_GATE_UP,), gguf_fused="gate-first", norm=_LLAMA_NORM),
    Family(
        names=("glm4", "glm4v_text", "glm_ocr_text", "glm_image_text"),
        gguf=("glm4",),
        projections=(FUSED_GATE_UP,),
        gguf_fused="gate-first",
        norm=_LLAMA_NORM,
        post_norm=Norm("post_mlp_layernorm"),
    ),
    # Llama 4: experts are [in, out].
    Family(
        names=("llama4_text", "llama4"),
        gguf=("llama4",),
        projections=(SEPARATE, FUSED_COLUMNS),
        norm=_LLAMA_NORM,
        missing=llama4_missing,
    ),
    # Aria: experts are [in, out] too, and their activation is in no config.
    Family(
        names=("aria_text", "aria"),
        projections=(SEPARATE, Projections("fc1", "fc1", "fc2", fused="gate-first", stored="columns")),
        norm=_LLAMA_NORM,
        activation=ActivationRule(default="silu"),
    ),
    # gpt-oss: experts are [in, out], in its packed files [out, in]; gate and up take turns. Converters to GGUF part them.
    Family(
        names=("gpt_oss",),
        gguf=("gpt-oss",),
        projections=(replace(FUSED_GATE_UP, fused="interleaved", stored="columns"),),
        norm=Norm("post_attention_layernorm", gguf="post_attention_norm"),
        activation=ActivationRule(keys=(), default="silu", adjust=gpt_oss_gate),
    ),
    # Its gate, with gate and up apart in one tensor.
    Family(
        names=("openai_privacy_filter",),
        projections=(FUSED_COLUMNS,),
        norm=_LLAMA_NORM,
        activation=ActivationRule(keys=(), default="silu", adjust=gpt_oss_gate),
    ),
    Family(
        names=("minimax_m3_vl_text",),
        projections=(MIXTRAL, FUSED_GATE_UP, SEPARATE),
        norm=Norm("post_attention_layernorm", weight="offset"),
        activation=ActivationRule(keys=(), default="silu", adjust=gpt_oss_gate),
    ),
    # DBRX: the experts of a layer lie below each other, also those of w2, whose rows are the neurons' values.
    Family(
        names=("dbrx",),
        gguf=("dbrx",),
        projections=(Projections("w1", "v1", "w2", stored="row-stacked"), FUSED_GATE_UP),
        norm=Norm("norm_attn_norm.norm_2", kind="layer", gguf="attn_output_norm"),
        activation=ActivationRule(keys=("ffn_config.ffn_act_fn.name",), default="silu"),
    ),
    # DeepSeek-V4: saved under its makers' names, read under transformers' own as well.
    Family(
        names=("deepseek_v4",),
        projections=(MIXTRAL, SEPARATE, FUSED_GATE_UP),
        norm=Norm("ffn_norm|post_attention_layernorm"),
        activation=ActivationRule(adjust=limited_gate),
    ),
    # HY-V4: the gate of dense MLPs has a name of its own; experts alone have limits.
    Family(
        names=("hy_v4", "hy_v4_vl_text"),
        projections=(Projections("linear_gate", "up_proj", "down_proj"), SEPARATE, FUSED_GATE_UP),
        norm=_LLAMA_NORM,
        activation=ActivationRule(adjust=limited_experts),
    ),
    # Inkling: gate and up take turns in published files, not where transformers' own names stand.
    Family(
        names=("inkling_text",),
        projections=(
            *(
                Projections(f"{prefix}w13{end}", f"{prefix}w13{end}", f"{prefix}w2{end}", fused="interleaved")
                for prefix, end in (("", "_weight"), ("shared_", "_weight"), ("", ""))
            ),
            SEPARATE,
            FUSED_GATE_UP,
        ),
        norm=Norm("mlp_norm|post_attention_layernorm"),
    ),
    # LongCat: two attentions and two dense MLPs a layer; the experts read what the first of them reads.
    Family(
        names=("longcat_flash",),
        projections=_EXPERTS,
        norm=Norm("post_attention_layernorm.0"),
        places={"mlps.N": Place(norm=Norm("post_attention_layernorm.{0}"))},
        identity_experts="zero_expert_num",
    ),
    Family(
        names=("xlstm",),
        projections=(Projections("proj_up_gate", "proj_up", "proj_down"),),
        norm=Norm("norm_ffn"),
        activation=_SILU,
    ),
    # Zamba 2: one block is used at several depths.
    Family(
        names=("zamba2",),
        projections=(FUSED_GATE_UP,),
        norm=Norm("shared_transformer.pre_ff_layernorm"),
        activation=ActivationRule(keys=("hidden_act",), default="gelu"),
        missing=zamba2_missing,
    ),
    # LayerNorm, as published without bias, and fused `Wi`; the config's `hidden_activation` is really used.
    Family(
        names=("modernbert", "modernbert-decoder"),
        gguf=("modern-bert",),
        projections=(Projections("Wi", "Wi", "Wo", fused="gate-first"),),
        gguf_fused="gate-first",
        norm=Norm("mlp_norm", kind="layer", bias="norm_bias"),
        activation=ActivationRule(keys=("hidden_activation",), default="gelu", gguf=None),
    ),
    # BERTs whose norms stand behind each part: the MLP reads what the attention's norm leaves.
    Family(
        names=("nomic_bert",),
        gguf=("nomic-bert",),
        projections=(Projections("fc12", "fc11", "fc2"),),
        norm=Norm("norm1", kind="layer", bias=True),
        activation=ActivationRule(
            keys=("hidden_act", "activation_function"), renamed={"swiglu": "silu", "geglu": "gelu"}
        ),
    ),
    Family(
        names=("gte",),
        projections=(Projections("up_gate_proj", "up_gate_proj", "down_proj", fused="up-first"),),
        norm=Norm("attn_ln", kind="layer", bias=True),
    ),
    # Moonshine: the decoder's MLP alone is gated, by its second half.
    Family(
        names=("moonshine",),
        projections=(Projections("fc1", "fc1", "fc2", fused="up-first"),),
        norm=Norm("final_layernorm", kind="layer"),
        activation=ActivationRule(keys=("decoder_hidden_act",)),
    ),
    # Towers for pictures and sound.
    Family(names=("pixtral",), norm=Norm("ffn_norm")),
    Family(names=("qwen2_5_vl_vision",), norm=Norm("norm2")),
    Family(
        names=("sapiens2",),
        projections=(Projections("w12", "w12", "w3", fused="gate-first"),),
        norm=Norm("ln2|norm2"),
    ),
    Family(names=("dots3_note_vision_encoder",), projections=(Projections("fc1", "fc3", "fc2"),), norm=Norm("norm2")),
    Family(
        names=("dinov2", "dinov2_with_registers"),
        projections=(Projections("weights_in", "weights_in", "weights_out", fused="gate-first"),),
        norm=Norm("norm2", kind="layer", bias=True),
        activation=_SILU,
    ),
    # Phi-4's audio tower: up first, unlike its text model; two MLPs a layer, each with its norm inside.
    Family(
        names=("phi4_multimodal_audio",),
        projections=(replace(FUSED_GATE_UP, fused="up-first"),),
        norm=Norm("feed_forward_in.layer_norm", kind="layer", bias=True),
        places={
            block: Place(norm=Norm(f"{block}.layer_norm", kind="layer", bias=True))
            for block in ("feed_forward_in", "feed_forward_out")
        },
        activation=ActivationRule(keys=("activation",)),
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
    "post_feedforward_layernorm_1|post_feedforward_layernorm": "post_ffw_norm_1|post_ffw_norm",
    "pre_ff_layernorm": "ffn_norm",
    "mlp_norm": "ffn_norm",
    "norm1": "attn_output_norm",
}


def gguf_norm(norm: Norm) -> str | None:
    """What GGUF files call a norm; None if that is not known."""
    return norm.gguf or GGUF_NORMS.get(norm.tensor)
