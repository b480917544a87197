"""From arrays to frames: what a row is, which statistics a layer gets, and how numbers are stored.

`neurons` has a row per neuron, `layers` a row per layer and expert group ("dense", "routed", "shared"), `classes` a
row per layer, threshold and input-output class. A layer's statistics are those of the neuron frame's columns with
missing values left out; where a group has several experts, measures of whole layers are means over the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .activations import activation
from .errors import UnknownActivation
from .measures.gaussian import gaussian_table
from .measures.io_classes import IO_CLASSES, IO_SWEEP, io_class
from .measures.nulls import NULL_MEASURES, isotropic_null
from .measures.registry import NEURON_MEASURES, STATISTICS
from .neurons import GatedLayer

if TYPE_CHECKING:
    from .layer_rows import LayerRows

FLAGS = ("zero_gate", "zero_up", "zero_down", "padded", "non_finite", "duplicated")
COUNTS = ("n_dead", "n_padded", "n_non_finite", "n_duplicated")


@dataclass(frozen=True)
class LayerResult:
    """What was measured on one gated MLP.

    Attributes:
        tower, layer, expert, group, d_model, d_mlp, activation: which one it is; activation None if not known.
        neurons: measure name to [d_mlp] float64, and `io_class` as an index.
        flags: flag name to [d_mlp] bool.
        nulls: measure name to its values on mismatched neurons.
        scalars: measures of the layer as a whole.
        methods: how those with a choice of ways were found, in words.
        note: why something is missing, or "".
        samples: Gaussian inputs that the output measures took.
        oddities: what its weights hold that they should not, one sentence each.
    """

    tower: str
    layer: int
    expert: int | str | None
    group: str
    d_model: int
    d_mlp: int
    activation: str | None
    neurons: dict[str, np.ndarray]
    flags: dict[str, np.ndarray]
    nulls: dict[str, np.ndarray]
    scalars: dict[str, float]
    methods: dict[str, str]
    note: str = ""
    samples: int = 0
    oddities: tuple[str, ...] = ()

    @classmethod
    def of(cls, layer: GatedLayer | LayerRows, **measured: Any) -> LayerResult:
        """The result of measuring this layer."""
        where = {name: getattr(layer, name) for name in ("tower", "layer", "expert", "group", "d_model", "d_mlp")}
        act = layer.activation.name if layer.activation else None
        return cls(**where, activation=act, **measured, note=layer.functional_note() or "")


def as_stored(values: np.ndarray) -> np.ndarray:
    """float32, unless a value would overflow or vanish in it: then float64, so that nothing becomes 0 or infinite."""
    finite = np.abs(values[np.isfinite(values) & (values != 0)])
    limits = np.finfo(np.float32)
    if finite.size and (finite.max() > limits.max or finite.min() < limits.tiny):
        return values
    return values.astype(np.float32)


def neuron_frame(model: str, result: LayerResult) -> pd.DataFrame:
    """Rows of one MLP."""
    count = result.d_mlp
    expert = None if result.expert is None else str(result.expert)
    columns: dict[str, object] = {
        "model": pd.Categorical.from_codes(np.zeros(count, dtype=np.int8), [model]),
        "tower": pd.Categorical.from_codes(np.zeros(count, dtype=np.int8), [result.tower]),
        "layer": np.full(count, result.layer, dtype=np.int32),
        "expert": pd.array([expert] * count, dtype="string"),
        "neuron": np.arange(count, dtype=np.int32),
    }
    columns |= {name: as_stored(result.neurons[name]) for name in NEURON_MEASURES}
    columns["io_class"] = pd.Categorical.from_codes(result.neurons["io_class"].astype(np.int8), list(IO_CLASSES))
    flags = np.full(count, "", dtype=object)
    for name in FLAGS:
        for neuron in np.flatnonzero(result.flags[name]):
            flags[neuron] = f"{flags[neuron]},{name}" if flags[neuron] else name
    columns["flag"] = pd.array(flags, dtype="string")
    return pd.DataFrame(columns)


def join(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Frames below each other; categories are united instead of falling back to objects."""
    out = {}
    for name in frames[0].columns:
        parts = [frame[name] for frame in frames]
        if isinstance(parts[0].dtype, pd.CategoricalDtype):
            out[name] = pd.api.types.union_categoricals(parts)
        else:
            out[name] = pd.concat(parts, ignore_index=True)
    return pd.DataFrame(out)


def statistics(values: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """mean, median, q05, q95 and weighted mean of what is not missing; all missing if nothing is left."""
    known = np.isfinite(values)
    if not known.any():
        return dict.fromkeys(STATISTICS, np.nan)
    kept = values[known]
    low, median, high = np.quantile(kept, (0.05, 0.5, 0.95))
    # scaled by the largest, so that no storage format's extremes overflow the sum
    weighted = known & np.isfinite(weights)
    largest = weights[weighted].max(initial=0.0)
    share = weights[weighted] / largest if largest > 0 else np.zeros(0)
    total = share.sum()
    return {
        "mean": kept.mean(),
        "median": median,
        "q05": low,
        "q95": high,
        "weighted": (values[weighted] * share).sum() / total if total > 0 else np.nan,
    }


def layer_row(model: str, results: Sequence[LayerResult]) -> dict[str, Any]:
    """The row of one layer and expert group."""
    first = results[0]
    neurons = {name: np.concatenate([r.neurons[name] for r in results]) for name in (*NEURON_MEASURES, "io_class")}
    flags = {name: np.concatenate([r.flags[name] for r in results]) for name in FLAGS}
    row: dict[str, Any] = {
        "model": model,
        "tower": first.tower,
        "layer": first.layer,
        "group": first.group,
        "no_mlp": False,
        "n_experts": len(results) if first.group == "routed" else 0,
        "n_neurons": sum(r.d_mlp for r in results),
        "d_model": first.d_model,
        "activation": first.activation,
        "n_dead": int((flags["zero_gate"] | flags["zero_up"] | flags["zero_down"]).sum()),
        "n_padded": int(flags["padded"].sum()),
        "n_non_finite": int(flags["non_finite"].sum()),
        "n_duplicated": int(flags["duplicated"].sum()),
    }
    weights = neurons["output_energy"]
    for name in NEURON_MEASURES:
        row |= {f"{name}_{statistic}": value for statistic, value in statistics(neurons[name], weights).items()}
    for name in NULL_MEASURES:
        row |= _null_columns(name, row[f"{name}_mean"], [r.nulls[name] for r in results], first.d_model)
    row["exchange_asymmetry_relu_ratio"] = _relu_ratio(neurons, first.activation)
    row["output_energy_top_share"] = _top_share(weights)
    classes = neurons["io_class"]
    known = classes >= 0
    for index, name in enumerate(IO_CLASSES):
        row[class_column(name)] = (classes[known] == index).mean() if known.any() else np.nan
    for name in first.scalars:
        row[name] = _mean_over_experts(name, [r.scalars[name] for r in results])
    row["note"] = first.note
    return row


def class_column(name: str) -> str:
    """Layer column with the fraction of neurons in an input-output class."""
    return f"io_class_{name.replace(' ', '_')}"


def _relu_ratio(neurons: dict[str, np.ndarray], name: str | None) -> float:
    """Mean exchange asymmetry over what it would be if every gate were a ReLU: 0 bilinear, 1 ReLU.

    Missing for gates that do not tend to a ReLU.
    """
    known = np.isfinite(neurons["exchange_asymmetry"])
    if name is None or not known.any():
        return np.nan
    try:
        act = activation(name)
    except UnknownActivation:  # one that a single family or user makes: its limits are not known by its name
        return np.nan
    if not (act.name == "relu" or (act.large and act.large.activation == "relu")):
        return np.nan
    relu = gaussian_table("relu")(np.ones(known.sum()), neurons["abs_cos_qk"][known])["exchange_asymmetry"].mean()
    # where gate and up coincide both are 0, and their ratio is noise
    return float(neurons["exchange_asymmetry"][known].mean() / relu) if relu > 1e-6 else np.nan


def _top_share(energy: np.ndarray) -> float:
    """Share of the strongest neuron in the sum: near 1 where a layer's energy-weighted figures are one neuron's."""
    known = energy[np.isfinite(energy)]
    return float(1 / (known / known.max()).sum()) if known.size and known.max() > 0 else np.nan


def _null_columns(name: str, mean: float, nulls: Sequence[np.ndarray], d_model: int) -> dict[str, float]:
    values = np.concatenate(nulls)
    values = values[np.isfinite(values)]
    null_mean, null_std = (values.mean(), values.std()) if values.size else (np.nan, np.nan)
    out = {
        f"{name}_null_mean": null_mean,
        f"{name}_null_std": null_std,
        f"{name}_effect": (mean - null_mean) / null_std if null_std > 0 else np.nan,
    }
    if "cos" in name:
        out[f"{name}_null_isotropic_mean"], out[f"{name}_null_isotropic_std"] = isotropic_null(name, d_model)
    return out


def _mean_over_experts(name: str, values: Sequence[float]) -> float:
    known = np.array(values, dtype=float)
    known = known[np.isfinite(known)]
    if not known.size:
        return np.nan
    # a standard error of a mean of independent estimates
    return float(np.sqrt((known**2).sum()) / known.size) if name.endswith("_se") else float(known.mean())


def empty_row(model: str, tower: str, layer: int, columns: Sequence[str]) -> dict[str, object]:
    """The row of a layer that has no gated MLP."""
    row: dict[str, object] = dict.fromkeys(columns, np.nan)
    counts = dict.fromkeys(("n_experts", "n_neurons", "d_model", *COUNTS), 0)
    return row | counts | {
        "model": model, "tower": tower, "layer": layer, "group": "none", "no_mlp": True, "activation": None,
        "note": "no gated MLP",
    }  # fmt: skip


def layer_frame(rows: Sequence[dict[str, object]]) -> pd.DataFrame:
    """The layer frame from its rows; integers for counts, `as_stored` floats for measures."""
    frame = pd.DataFrame(list(rows))
    for name in frame.columns:
        if frame[name].dtype.kind == "f":
            frame[name] = as_stored(frame[name].to_numpy())
    return frame.astype(dict.fromkeys(("model", "tower", "group", "activation", "note"), "string"))


def class_rows(model: str, results: Sequence[LayerResult]) -> pd.DataFrame:
    """Fractions of the input-output classes over the threshold sweep, for one layer and expert group."""
    first = results[0]
    abs_cos_qk, cos_kv, cos_qv = (
        np.concatenate([r.neurons[n] for r in results]) for n in ("abs_cos_qk", "cos_kv", "cos_qv")
    )
    parts = []
    for threshold in IO_SWEEP:
        classes = io_class(abs_cos_qk, cos_kv, cos_qv, threshold)
        known = classes >= 0
        counts = np.bincount(classes[known], minlength=len(IO_CLASSES))
        parts.append(
            pd.DataFrame(
                {
                    "model": model,
                    "tower": first.tower,
                    "layer": first.layer,
                    "group": first.group,
                    "threshold": threshold,
                    "io_class": list(IO_CLASSES),
                    "fraction": counts / known.sum() if known.any() else np.nan,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)
