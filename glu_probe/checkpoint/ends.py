"""Where a model's vocabulary enters and leaves the residual stream: embedding, final norm, unembedding, by their names.

What would have to be guessed is missing with the reason: an unknown family may store the final norm as w or as 1 + w, an
encoder has no unembedding, and a norm behind the embedding changes what the layers read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .family import Norm
from .source import TensorInfo

_EMBEDDINGS = (
    "embed_tokens", "wte", "tok_embeddings", "token_embd", "word_embeddings", "token_embeddings", "embed_in", "shared",
    "embedding.word_embeddings", "embeddings.word_embeddings", "embeddings.tok_embeddings", "embeddings",
)  # fmt: skip
_EMBEDDING_NORMS = (
    "token_embd_norm", "embedding_norm", "embed_norm", "word_embeddings_layernorm", "emb_ln", "embed_ln",
    "embeddings.norm", "embeddings.LayerNorm",
)  # fmt: skip
_FINAL_NORMS = ("norm", "output_norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "final_norm")
_FINAL_NORMS_OF = {"lfm2": ("embedding_norm", "token_embd_norm")}  # whose final norm is called so
_UNEMBEDDINGS = ("lm_head", "output", "output_layer", "embed_out", "ff_out")
_HAS_HEAD = re.compile("ForCausalLM|ForConditionalGeneration|LMHeadModel")


@dataclass(frozen=True)
class Ends:
    """The two ends of the residual stream.

    Attributes:
        embedding: tensor [vocabulary, d_model] of what a token begins as; None with `no_embedding`, the reason.
        unembedding: tensor [vocabulary, d_model] of what a token's logit reads; None with `no_unembedding`.
        tied: whether that is the embedding.
        norm: the norm before the unembedding, with its gain as it is stored; its tensor is `norm_tensor`, None if it has
            no gain.
        centred: whether the layers read the embedding less its mean (LayerNorm).
    """

    embedding: str | None = None
    no_embedding: str | None = None
    unembedding: str | None = None
    no_unembedding: str | None = None
    tied: bool = False
    norm: Norm | None = None
    norm_tensor: str | None = None
    centred: bool = False


def find_ends(
    infos: Mapping[str, TensorInfo],
    prefix: str,
    d_model: int,
    *,
    tower: str,
    norm: Norm | None,
    family: str | None,
    config: Mapping[str, Any],
    parts: Mapping[str, Any],
    gguf: bool,
) -> Ends:
    """The ends of a stack of layers.

    Args:
        infos: every tensor of the files.
        prefix: what the names of the stack's tensors begin with, up to the layer's number.
        d_model: width of the stream.
        tower: name of the stack; what is not the language model has no vocabulary, and its encoder writes none.
        norm: the norm in front of its MLPs, else the one behind them, as it is stored; the final one is of its kind.
        family: name of its family, None if that is not known.
        config, parts: the whole config, and the part about this stack.
        gguf: whether the names are those of GGUF files.
    """
    if tower not in ("text", "encoder"):
        reason = f"the stack {tower!r} has no vocabulary"
        return Ends(no_embedding=reason, no_unembedding=reason)
    embedding, no_embedding = _matrix(infos, prefix, _EMBEDDINGS, d_model, "embedding")
    final_names = (*_FINAL_NORMS, *_final_norms_of(family))
    final, final_fault = _nearest(infos, prefix, final_names, "final norm")
    inner, _ = _nearest(infos, prefix, _EMBEDDING_NORMS, "norm")
    reads, no_reads = embedding, no_embedding
    if embedding is not None and "altup_num_inputs" in parts:
        reads, no_reads = None, "the residual stream is several streams that are mixed in every layer (AltUp)"
    elif embedding is not None and inner is not None and inner != final:
        reads, no_reads = None, f"the norm {inner!r} stands behind the embedding"
    writes: str | None = None
    no_writes: str | None = "an encoder writes no logits"
    tied = False
    if tower == "text":
        writes, no_writes, tied = _unembedding(infos, prefix, d_model, embedding, config, parts, gguf)
    if writes is not None:
        no_writes = final_fault or _final_fault(infos, final, norm, family, d_model)
    if writes is not None and no_writes is None and "altup_num_inputs" in parts:
        no_writes = "the residual stream is several streams that are mixed in every layer (AltUp)"
    return Ends(
        reads, no_reads, None if no_writes else writes, no_writes, tied and not no_writes,
        norm, final, norm is not None and norm.kind == "layer",
    )  # fmt: skip


def _final_norms_of(family: str | None) -> tuple[str, ...]:
    """What only this family calls its final norm."""
    return () if family is None else _FINAL_NORMS_OF.get(family.split("_")[0], ())


def _unembedding(
    infos: Mapping[str, TensorInfo], prefix: str, d_model: int, embedding: str | None,
    config: Mapping[str, Any], parts: Mapping[str, Any], gguf: bool,
) -> tuple[str | None, str | None, bool]:  # fmt: skip
    """The tensor or the reason why there is none, and whether it is the embedding."""
    head, fault = _matrix(infos, prefix, _UNEMBEDDINGS, d_model, "unembedding")
    if head is not None or "is not there" not in (fault or ""):
        return head, fault, False
    if embedding is None:
        return None, "the file holds neither unembedding nor embedding under a known name", False
    said = [part["tie_word_embeddings"] for part in (config, parts) if "tie_word_embeddings" in part]
    architectures = " ".join(map(str, config.get("architectures") or ()))
    if any(said) or gguf or (not said and _HAS_HEAD.search(architectures)):
        return embedding, None, True
    if said:
        return None, "the file holds no unembedding, and by its config it is not the embedding", False
    return None, "the file holds no unembedding, and its config does not say that it is the embedding", False


def _final_fault(
    infos: Mapping[str, TensorInfo], final: str | None, norm: Norm | None, family: str | None, d_model: int
) -> str | None:
    """Why the final norm cannot be folded into the unembedding; None if it can."""
    if family is None:
        return "the family is not in the table, so how its final norm is stored is not known"
    if norm is None:
        return "what kind of norm the family has is not known"
    if final is None:
        return None if norm.weight == "none" else "the final norm is not in the file under a known name"
    if infos[final].shape != (d_model,):
        return f"the final norm {final!r} is {list(infos[final].shape)}, not [{d_model}]"
    if norm.kind == "rms" and final.removesuffix("weight") + "bias" in infos:
        return f"the final norm {final!r} has a bias, which an RMSNorm has not"
    return None


def _matrix(
    infos: Mapping[str, TensorInfo], prefix: str, names: tuple[str, ...], d_model: int, what: str
) -> tuple[str | None, str | None]:
    name, fault = _nearest(infos, prefix, names, what)
    if name is None:
        return None, fault or f"the {what} is not there under a known name"
    shape = infos[name].shape
    if len(shape) != 2 or shape[1] != d_model:
        return None, f"the {what} {name!r} is {list(shape)}, not [vocabulary, {d_model}]"
    return name, None


def _nearest(
    infos: Mapping[str, TensorInfo], prefix: str, names: tuple[str, ...], what: str
) -> tuple[str | None, str | None]:
    """The only tensor of these names beside the stack, or beside what it is in; None if there is none, or with a reason."""
    steps = prefix.split(".")[:-1]
    for depth in range(len(steps), -1, -1):
        stem = "".join(f"{step}." for step in steps[:depth])
        found = [f"{stem}{name}.weight" for name in names if f"{stem}{name}.weight" in infos]
        if len(found) > 1:
            return None, f"{' and '.join(map(repr, found))} could both be the {what}"
        if found:
            return found[0], None
    return None, None
