"""Finders: which neurons are of a kind, as a frame, the clearest first.

    gp.find.near_bilinear(report)                   # from the numbers of a report
    gp.find.exchange_partners("org/name", layers="0:4")   # from the factors of a model

`near_bilinear`, `aligned_branches`, `strengthening`, `weakening`, `dead` and `padded` need numbers: they take a Report,
its frame of neurons, or anything below. `duplicates`, `near_duplicates` and `exchange_partners` need factors: they take a
Checkpoint, a reference to one, or a GatedLayer, and look at every pair of neurons within each MLP. Every frame begins with model, tower, layer, expert and
neuron (and partner), then score and null: what the best score among so many isotropic directions would be, missing where no
such level exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from .arguments import share
from .errors import BadOption
from .measures.extremes import largest_cosine
from .measures.io_classes import IO_CLASSES, IO_THRESHOLD, io_class
from .measures.pairs import Pairs, alike_pairs, equal_pairs, exchanged_pairs
from .neuron_sources import Layers, Progress, Source, gated_layers, neuron_rows
from .neurons import GatedLayer

_PLACE = ("model", "tower", "layer", "expert", "neuron")


def near_bilinear(
    source: Source, *, layers: Layers = None, threshold: float = 0.9, progress: Progress = iter
) -> pd.DataFrame:
    """Neurons whose gate works in its linear range, so that they are rank-1 bilinear forms.

    Args:
        source: report, frame of neurons, checkpoint, reference or layer.
        layers: which layers, as [0, 1] or "0:8" or "0,4,7"; all by default.
        threshold: bilinear_share that must be reached, 0 to 1; a ReLU has 1/2 whatever its directions.
        progress: wraps the iteration over MLPs, where factors are read.

    Returns:
        Rows by score = bilinear_share, highest first, with exchange_asymmetry and query_norm. No null: isotropic
        directions have any share, by the scale of the gate.

    Raises:
        BadOption: no neuron has a bilinear_share, or an argument is out of range.
    """
    threshold = share("threshold", threshold)
    rows = neuron_rows(source, layers, needs=("bilinear_share",), progress=progress)
    return _found(
        rows, rows["bilinear_share"] >= threshold, rows["bilinear_share"], ("exchange_asymmetry", "query_norm")
    )


def aligned_branches(
    source: Source, *, layers: Layers = None, threshold: float = 0.8, progress: Progress = iter
) -> pd.DataFrame:
    """Quadratic amplifiers: gate and up read one direction, so that the neuron writes a^2 times S(a)/a.

    Args:
        threshold: |cos(q, k)| that must be reached, 0 to 1. The other arguments as in `near_bilinear`.

    Returns:
        Rows by score = abs_cos_qk, highest first, with amplifies, cos_qv and outlier_risk. cos_qv = cos(q, v) is in the
        canonical gauge (cos(q, k) >= 0), in which the neuron writes along +v whatever the sign of its input, since S(a) a >= 0
        for SiLU, GELU and ReLU. amplifies is "along" if cos_qv > 0 (it writes back the direction it reads), "against" if
        below 0, and "elsewhere" if |cos_qv| is within two standard deviations d_model^(-1/2) of chance; of a frame alone,
        whose d_model is not known, the sign counts. Null: the largest |cos(q, k)| among as many isotropic pairs.
    """
    threshold = share("threshold", threshold, why="it is a cosine")
    rows = neuron_rows(source, layers, needs=("abs_cos_qk", "cos_qv", "outlier_risk"), progress=progress)
    rows["null"] = _nulls(rows)
    chance = (2 / np.sqrt(rows["d_model"].astype(float))).fillna(0.0)
    ways = [rows["cos_qv"] > chance, rows["cos_qv"] < -chance]
    rows["amplifies"] = pd.array(np.select(ways, ["along", "against"], "elsewhere"), dtype="string")
    return _found(rows, rows["abs_cos_qk"] >= threshold, rows["abs_cos_qk"], ("amplifies", "cos_qv", "outlier_risk"))


def strengthening(
    source: Source, *, layers: Layers = None, threshold: float = IO_THRESHOLD, progress: Progress = iter
) -> pd.DataFrame:
    """Neurons that write along what their up branch reads: the four strengthening classes of Gerstner & Schuetze.

    Args:
        threshold: of the classes, 0 to 1. The other arguments as in `near_bilinear`.

    Returns:
        Rows by score = cos_kv, highest first, with io_class at this threshold, abs_cos_qk and cos_qv. Null: the largest
        cosine among as many isotropic pairs.
    """
    return _of_classes(source, "strengthening", 1.0, layers, threshold, progress)


def weakening(
    source: Source, *, layers: Layers = None, threshold: float = IO_THRESHOLD, progress: Progress = iter
) -> pd.DataFrame:
    """Neurons that write against what their up branch reads: the four weakening classes of Gerstner & Schuetze.

    Args:
        threshold: of the classes, 0 to 1. The other arguments as in `near_bilinear`.

    Returns:
        Rows by score = cos_kv, lowest first, with io_class at this threshold, abs_cos_qk and cos_qv. Null: the lowest
        cosine among as many isotropic pairs.
    """
    return _of_classes(source, "weakening", -1.0, layers, threshold, progress)


def dead(source: Source, *, layers: Layers = None, threshold: float = 0.0, progress: Progress = iter) -> pd.DataFrame:
    """Neurons that write nothing, or next to nothing. Padding of the matrices is not among them; see `padded`.

    Args:
        threshold: largest |q||k||v| that counts as dead, over the median of the MLP; 0 for those with a row of zeros.
            The other arguments as in `near_bilinear`.

    Returns:
        Rows by score = |q||k||v| over the median, lowest first, with flag (which row is zero). A branch with a bias and
        no row is a constant, with which a neuron may write: those of known output_energy above 0 are not dead.
    """
    if not threshold >= 0:
        raise BadOption(f"threshold is {threshold!r}", hint="Give a number of at least 0")
    rows = neuron_rows(source, layers, needs=("query_norm", "value_gain", "flag"), progress=progress)
    size = rows["query_norm"].astype(float) * rows["value_gain"].astype(float)
    middle = size.groupby([rows["tower"], rows["layer"], rows["expert"].fillna("")], observed=True).transform("median")
    # in a layer of zeros there is nothing to compare with
    relative = (size / middle.where(middle > 0)).where(size > 0, size)
    constant = (size == 0) & (rows["output_energy"] > 0 if "output_energy" in rows else False)
    return _found(rows, (relative <= threshold) & ~constant, relative, ("flag",), ascending=True)


def padded(source: Source, *, layers: Layers = None, progress: Progress = iter) -> pd.DataFrame:
    """Neurons whose three rows are all zero: padding of the matrices to a convenient size.

    Returns:
        Rows in their order; score is 0, their norm. Arguments as in `near_bilinear`.
    """
    rows = neuron_rows(source, layers, needs=("flag",), progress=progress)
    flagged = rows["flag"].str.split(",").map(lambda names: "padded" in names)
    return _found(rows, flagged.astype(bool), pd.Series(0.0, index=rows.index), ())


def duplicates(source: Source, *, layers: Layers = None, progress: Progress = iter) -> pd.DataFrame:
    """Pairs of neurons with the same gate and, up to a factor, the same up branch: each pair acts as one neuron.

    Args:
        source: a checkpoint, a reference to one, or a layer; the others as in `near_bilinear`.

    Returns:
        Rows by score = 1 - difference of the rows over their norm (at least 1 - 1e-5), with cos_value: 1 if both write
        the same direction, -1 if they cancel. Biases count as part of the rows.

    Raises:
        BadOption: the source is a report; more than a million pairs are found.
    """
    return _of_pairs(
        source, layers, progress, equal_pairs, lambda pairs: 1 - pairs.values["difference"], ("cos_value",), 0
    )


def near_duplicates(
    source: Source,
    *,
    layers: Layers = None,
    threshold: float = 0.8,
    query: float | None = None,
    key: float | None = None,
    value: float | None = None,
    progress: Progress = iter,
) -> pd.DataFrame:
    """Pairs of neurons that read and write nearly the same directions.

    Args:
        threshold: cosine that must be reached in each of q, k and v, 0 to 1.
        query, key, value: instead of the threshold for one of them, -1 to 1; value=-1 for neurons that read alike,
            whatever they write. The others as in `duplicates`.

    Returns:
        Rows by score = the smallest of the three cosines, with cos_query, cos_key and cos_value; k and v of the partner are
        flipped together so that cos_key >= 0. Null: the best pair among as many with three isotropic directions each (of
        those that have a threshold above -1).

    Raises:
        BadOption: the source is a report; an argument is out of range; more than a million pairs are found.
    """
    threshold = share("threshold", threshold, why="it is a cosine")
    limits = {
        name: threshold if limit is None else _cosine(name, limit)
        for name, limit in (("query", query), ("key", key), ("value", value))
    }
    counted = [f"cos_{name}" for name, limit in limits.items() if limit > -1] or ["cos_query"]
    return _of_pairs(
        source, layers, progress, lambda layer: alike_pairs(layer, **limits),
        lambda pairs: np.stack([pairs.values[name] for name in counted]).min(0), ("cos_query", "cos_key", "cos_value"), len(counted),
    )  # fmt: skip


def exchange_partners(
    source: Source, *, layers: Layers = None, threshold: float = 0.5, progress: Progress = iter
) -> pd.DataFrame:
    """Pairs (i, j) with q_i along k_j and k_i along q_j: together they compute S(a) b v_i + S(b) a v_j.

    Where v_j = v_i and both are of one size, the pair is unchanged when gate and up are exchanged, though neither neuron
    is; where v_j = -v_i it changes sign.

    Args:
        threshold: |cos(q_i, k_j)| and |cos(k_i, q_j)| that must be reached, 0 to 1. The others as in `duplicates`.

    Returns:
        Rows by score = the smaller of the two |cosines|, with both; cos_value = cos(v_i, v_j) once each k is flipped,
        together with its v, to lie along the other's q; and cos_query = cos(q_i, q_j). Where that is near 1 or -1, all
        four directions are one: near 1 the pair is one quadratic amplifier twice, near -1 its two halves, since
        S(a) a + S(-a) (-a) = a^2 for SiLU, GELU and ReLU. Null: the best pair among as
        many with isotropic directions.

    Raises:
        BadOption: the source is a report; the threshold is out of range; more than a million pairs are found.
    """
    threshold = share("threshold", threshold, why="it is a cosine")
    names = ("abs_cos_query_key", "abs_cos_key_query", "cos_value", "cos_query")
    return _of_pairs(
        source, layers, progress, lambda layer: exchanged_pairs(layer, threshold=threshold),
        lambda pairs: np.minimum(pairs.values[names[0]], pairs.values[names[1]]), names, 2,
    )  # fmt: skip


def _of_classes(
    source: Source, kind: str, sign: float, layers: Layers, threshold: float, progress: Progress
) -> pd.DataFrame:
    threshold = share("threshold", threshold, why="it is a cosine")
    cosines = ("abs_cos_qk", "cos_kv", "cos_qv")
    rows = neuron_rows(source, layers, needs=cosines, progress=progress)
    abs_cos_qk, cos_kv, cos_qv = (rows[name].to_numpy(dtype=float) for name in cosines)
    index = io_class(abs_cos_qk, cos_kv, cos_qv, threshold)
    rows["io_class"] = pd.Categorical.from_codes(index, list(IO_CLASSES))
    rows["null"] = sign * _nulls(rows, signed=True)
    chosen = np.isin(index, [place for place, name in enumerate(IO_CLASSES) if name.split()[-1] == kind])
    names = ("io_class", "abs_cos_qk", "cos_qv")
    return _found(rows, pd.Series(chosen, index=rows.index), rows["cos_kv"], names, ascending=sign < 0)


def _cosine(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1 <= value <= 1:
        raise BadOption(f"{name} is {value!r}", hint="Give a cosine, from -1 to 1")
    return float(value)


def _nulls(rows: pd.DataFrame, *, signed: bool = False) -> np.ndarray:
    """The largest cosine among as many isotropic pairs as each neuron's MLP has."""
    sizes = list(zip(rows["d_mlp"], rows["d_model"], strict=True))
    known = {
        size: largest_cosine(int(size[0]), int(size[1]), signed=signed) for size in {*sizes} if np.isfinite(size[1])
    }
    return np.array([known.get(size, np.nan) for size in sizes])


def _found(
    rows: pd.DataFrame, chosen: pd.Series, score: pd.Series, more: Iterable[str], *, ascending: bool = False
) -> pd.DataFrame:
    null = rows["null"] if "null" in rows else pd.Series(np.nan, index=rows.index)
    frame = rows[list(_PLACE)].assign(score=score.astype(float), null=null, **{name: rows[name] for name in more})
    return frame[chosen].sort_values("score", ascending=ascending, kind="stable").reset_index(drop=True)


def _of_pairs(
    source: Source,
    layers: Layers,
    progress: Progress,
    search: Callable[[GatedLayer], Pairs],
    score: Callable[[Pairs], np.ndarray],
    names: Sequence[str],
    together: int,
) -> pd.DataFrame:
    """The pairs of every MLP; `together` independent cosines make a score, 0 if it has no null."""
    parts = []
    for model, layer in gated_layers(source, layers, progress=progress):
        pairs = search(layer)
        count, possible = len(pairs.first), pairs.candidates * (pairs.candidates - 1) // 2
        null = largest_cosine(possible, layer.d_model, together=together) if together else np.nan
        expert = None if layer.expert is None else str(layer.expert)
        place = {
            "model": pd.array([model] * count, dtype="string"), "tower": pd.array([layer.tower] * count, dtype="string"),
            "layer": np.full(count, layer.layer, dtype=np.int32), "expert": pd.array([expert] * count, dtype="string"),
            "neuron": pairs.first.astype(np.int32), "partner": pairs.second.astype(np.int32),
            "score": score(pairs), "null": np.full(count, null),
        }  # fmt: skip
        parts.append(pd.DataFrame(place | {name: pairs.values[name] for name in names}))
    frame = pd.concat(parts, ignore_index=True)
    order = ["score", "layer", "neuron", "partner"]
    return frame.sort_values(order, ascending=[False, True, True, True], kind="stable").reset_index(drop=True)
