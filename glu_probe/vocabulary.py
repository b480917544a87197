"""One neuron in terms of tokens: which it reads with its query and key, which it writes with its value.

Cosines, not products, so that long embeddings do not win. With the norm in front folded in, a = |q| sqrt(d_model) cos(q, e)
on a stream that is one token's embedding e; in later layers the embedding is only a part of what the stream holds, and
the logit only a part of what the value is good for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .checkpoint.checkpoint import Checkpoint
from .checkpoint.factors import read_gain
from .checkpoint.sites import Site
from .checkpoint.source import TensorSource
from .errors import GluProbeError
from .measures.extremes import largest_cosine
from .measures.neighbours import FACTORS
from .measures.pairs import sign_is_free
from .neurons import GatedLayer

if TYPE_CHECKING:
    import pandas as pd

    from .text.token_strings import TokenStrings

_VALUES = 1 << 23  # of a matrix in memory at a time
_COLUMNS = {
    "factor": "string", "side": "string", "rank": "int32", "token_id": "int64", "token": "string", "cosine": float,
    "null": float,
}  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """What one neuron reads and writes.

    Attributes:
        tokens: frame with a row per factor ("query", "key", "value"), side ("top", "bottom") and rank: token_id, token (a Python
            literal), cosine, null (the largest or lowest cosine to be expected of so many isotropic directions).
        missing: factor to the reason why it has no rows.
        notes: how the cosines were taken, one sentence each.
    """

    tokens: pd.DataFrame
    missing: dict[str, str]
    notes: list[str]


def read_tokens(
    checkpoint: Checkpoint, site: Site, layer: GatedLayer, neuron: int, *, count: int = 10, tokenizer: Any = None
) -> Reading:
    """The tokens whose embeddings lie most along, and most against, the query and key of a neuron, and whose unembedding
    rows its value.

    k and v are in the canonical gauge: flipped together so that E[ab] >= 0 on isotropic input, which without biases is cos(q, k) >= 0. The gain of the
    norm in front of the MLP is in q and k, that of a norm on its output is put into v, that of the final norm into the
    unembedding. Memory: 8 million values of a matrix at a time.

    Args:
        checkpoint, site, layer: the MLP, as it stands in the files and as factors.
        neuron: 0 <= neuron < d_mlp.
        count: tokens on each side.
        tokenizer: a transformers tokenizer, instead of the one that comes with the model.
    """
    from .text.token_strings import token_strings

    missing = _faults(checkpoint, site)
    ends, infos, notes, rows = checkpoint.ends(site), checkpoint.source.infos(), [], []
    if len(missing) < len(FACTORS):
        try:
            strings = token_strings(checkpoint, tokenizer)
        except GluProbeError as error:
            missing |= {factor: error.what for factor in FACTORS if factor not in missing}
    directions = _directions(checkpoint, site, layer, neuron, missing)
    reads = [factor for factor in ("query", "key") if factor in directions]
    if reads:
        assert ends.embedding is not None  # or there were a reason against it
        cosines = vocabulary_cosines(
            checkpoint.source, ends.embedding, torch.stack([directions[f] for f in reads]), centred=ends.centred
        )
        notes.append(
            f"tokens of q and k (norm in front: {layer.norm}) from {ends.embedding}"
            f"{', less its mean' if ends.centred else ''}; a scale on the embedding changes no cosine"
        )
        for factor, row in zip(reads, cosines, strict=True):
            rows += _ranked(factor, row, strings, layer.d_model, count)
    if "value" in directions:
        assert ends.unembedding is not None
        assert ends.norm is not None
        gain = None
        if ends.norm_tensor is not None and ends.norm.weight != "none":
            gain = read_gain(checkpoint.source, ends.norm_tensor, ends.norm, torch.float64)
        cosines = vocabulary_cosines(
            checkpoint.source, ends.unembedding, directions["value"][None], gain=gain, centred=ends.norm.kind == "layer"
        )
        folded = f"the gain of {ends.norm_tensor} folded in" if gain is not None else "a final norm without gain"
        behind = "" if checkpoint.output_gain(site) is None else " (with the gain of the norm behind the MLP)"
        tied = " (tied to the embedding)" if ends.tied else ""
        notes.append(f"tokens of v{behind} from {ends.unembedding}{tied}, {folded}")
        rows += _ranked("value", cosines[0], strings, layer.d_model, count)
    if rows:
        used = {
            name
            for name in (ends.embedding if reads else None, ends.unembedding if "value" in directions else None)
            if name
        }
        padding = max(infos[name].shape[0] for name in used) - sum(piece is not None for piece in strings.pieces)
        if padding > 0:
            notes.append(f"{padding} rows of the vocabulary are no token of the tokenizer and left out")
    return Reading(tokens_frame(rows), missing, notes)


def tokens_frame(rows: Sequence[tuple] = ()) -> pd.DataFrame:
    """A frame of tokens with these rows."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=list(_COLUMNS)).astype(_COLUMNS)


def vocabulary_cosines(
    source: TensorSource,
    name: str,
    directions: Float[Tensor, "direction d_model"],
    *,
    gain: Float[Tensor, " d_model"] | None = None,
    centred: bool = False,
) -> Float[np.ndarray, "direction vocabulary"]:
    """Cosine of each direction with each row of a matrix, missing where the row is zero.

    Args:
        source, name: where the matrix [vocabulary, d_model] is.
        directions: in float64.
        gain: each row is multiplied by it first.
        centred: each row, and each direction, less its mean.
    """
    count, width = source.infos()[name].shape
    directions = directions - directions.mean(1, keepdim=True) if centred else directions
    directions = directions / directions.norm(dim=1, keepdim=True)
    out, step = np.empty((len(directions), count)), max(1, _VALUES // width)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        block = source.read(name, rows).double()
        block = block if gain is None else block * gain
        block = block - block.mean(1, keepdim=True) if centred else block
        norm = block.norm(dim=1)
        out[:, rows] = torch.where(norm > 0, directions @ block.T / norm, torch.nan).numpy()
    return out


def _faults(checkpoint: Checkpoint, site: Site) -> dict[str, str]:
    """Factor to the reason why it cannot be told in tokens, as far as names and options say."""
    rules, ends = checkpoint.rules_of(site), checkpoint.ends(site)
    reads = ends.no_embedding
    if not rules.known:
        reads = "the family is not in the table, so the norm in front of the MLP, whose gain belongs to q and k, is not known"
    elif rules.norm is not None and not checkpoint.options.fold_norm:
        reads = "the norm in front of the MLP is not folded in, and its gain belongs to q and k"
    faults = {"query": reads, "key": reads, "value": ends.no_unembedding}
    for name, factors in ((ends.embedding, ("query", "key")), (ends.unembedding, ("value",))):
        info = None if name is None else checkpoint.source.infos().get(name)
        if info is not None and info.fault is not None:
            faults |= dict.fromkeys(factors, info.fault.what)
    return {factor: reason for factor, reason in faults.items() if reason}


def _directions(
    checkpoint: Checkpoint, site: Site, layer: GatedLayer, neuron: int, missing: dict[str, str]
) -> dict[str, Tensor]:
    """Factor to its direction in the stream, those that have one; reasons for the others go to `missing`."""
    query, key, value = (matrix[neuron].double() for matrix in (layer.query, layer.key, layer.value))
    constant = torch.zeros(())
    if layer.query_bias is not None and layer.key_bias is not None:
        constant = layer.query_bias[neuron].double() * layer.key_bias[neuron].double()
    if sign_is_free(layer) and query @ key + constant < 0:
        key, value = -key, -value
    gain = checkpoint.output_gain(site) if "value" not in missing else None
    if gain is not None and not checkpoint.options.fold_post_norm:
        value = value * gain
    out = {}
    for factor, row in zip(FACTORS, (query, key, value), strict=True):
        if factor in missing:
            continue
        if not row.isfinite().all() or not row.any():
            missing[factor] = "its row is zero" if row.isfinite().all() else "its row holds NaN or infinity"
            continue
        out[factor] = row / row.abs().max()  # so that no format's extremes overflow its norm
    return out


def _ranked(factor: str, cosines: np.ndarray, strings: TokenStrings, d_model: int, count: int) -> list[tuple]:
    known = np.array(
        [piece is not None for piece in strings.pieces[: len(cosines)]] + [False] * (len(cosines) - len(strings))
    )
    tokens = np.flatnonzero(known & np.isfinite(cosines))
    null = largest_cosine(len(tokens), d_model, signed=True)
    rows = []
    for side, sign in (("top", 1.0), ("bottom", -1.0)):
        order = tokens[np.argsort(-sign * cosines[tokens], kind="stable")[:count]]
        rows += [
            (factor, side, rank, token, strings.quoted(token), cosines[token], sign * null)
            for rank, token in enumerate(order.tolist(), 1)
        ]
    return rows
