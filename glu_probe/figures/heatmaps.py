"""Heatmaps of a model: measures of its layers, and its experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ..errors import BadOption
from .axes import Across, axes_or_new, label_positions, mesh, set_labels
from .columns import nothing, require

HEATMAP_MEASURES = (
    "query_norm_median",
    "gate_std_text_median",
    "abs_cos_qk_mean",
    "abs_cos_qk_effect",
    "cos_kv_mean",
    "abs_cos_qv_mean",
    "exchange_asymmetry_relu_ratio",
    "exchange_asymmetry_mean",
    "exchange_asymmetry_text_mean",
    "exchange_asymmetry_weighted",
    "exchange_asymmetry_output",
    "scaling_asymmetry_output",
    "linear_share_mean",
    "bilinear_share_mean",
    "residual_share_mean",
    "gate_stable_rank",
    "gate_stable_rank_unit",
    "up_stable_rank_unit",
    "down_stable_rank_unit",
    "branch_overlap",
    "tensor_asymmetry",
)


def layer_heatmap(layers: pd.DataFrame, *, measures: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
    """Layers across, measures down. Each row is scaled to its own range, which its label states.

    Args:
        layers: the layer frame.
        measures: columns to show; by default `HEATMAP_MEASURES` as far as they are there.
        ax: where to draw.

    Raises:
        BadOption: a column is absent, or no value is there to draw.
    """
    require(layers, ["layer", "tower", "group", *(measures or ())])
    chosen, across = list(measures or (name for name in HEATMAP_MEASURES if name in layers)), Across.of(layers)
    values = np.array([across.values(name) for name in chosen])
    if np.isnan(values).all():
        raise nothing(chosen)
    ax = axes_or_new(ax, (max(6.0, 3.2 + 0.11 * len(layers)), 1.2 + 0.28 * len(chosen)))
    scaled, labels = np.full_like(values, np.nan), []
    for row, name in enumerate(chosen):
        known = ~np.isnan(values[row])
        if known.any():
            low, high = values[row][known].min(), values[row][known].max()
            scaled[row, known] = (values[row][known] - low) / (high - low) if high > low else 0.5
            labels.append(f"{name}  {low:.3g} … {high:.3g}")
        else:
            labels.append(f"{name}  missing")
    mesh(ax, scaled, cmap="viridis", vmin=0, vmax=1, label="lowest … highest of the row", bar={"ticks": []})
    ax.set_yticks(np.arange(len(labels)) + 0.5, labels, rotation=0)
    across.label(ax, offset=0.5, edges="white")
    return ax


def expert_heatmap(
    neurons: pd.DataFrame, measure: str = "exchange_asymmetry", *, tower: str | None = None, ax: Axes | None = None
) -> Axes:
    """Layers across, routed experts down: the mean of one neuron measure over every expert's neurons.

    Layers without routed experts, and experts without a value, are drawn as missing; shared experts are not drawn.

    Args:
        neurons: the neuron frame.
        measure: one of its columns.
        tower: which stack of layers; needed only where several have routed experts.
        ax: where to draw.

    Raises:
        BadOption: there is no such column, no routed expert, or no value to draw.
    """
    require(neurons, ["layer", "tower", measure])
    means, layers = _expert_means(neurons, measure, tower)
    ax = axes_or_new(ax, expert_grid_size(len(layers), len(means)))
    mesh(ax, means, cmap="viridis", label=f"mean {measure}")
    columns, rows = label_positions(len(layers)), label_positions(len(means))
    set_labels(ax, columns, [str(layers[column]) for column in columns], offset=0.5)
    ax.set_yticks([row + 0.5 for row in rows], [str(row) for row in rows], rotation=0)
    ax.set_ylabel("expert")
    return ax


def expert_grid_size(n_layers: int, n_experts: int) -> tuple[float, float]:
    """Size of a figure, in inches, in which the cells of `expert_heatmap` can be told apart, as far as a page allows."""
    return min(14.0, max(6.0, 2.6 + 0.16 * n_layers)), min(8.5, max(2.8, 1.2 + 0.16 * n_experts))


def _expert_means(neurons: pd.DataFrame, measure: str, tower: str | None) -> tuple[np.ndarray, list[int]]:
    """Means by expert and layer, missing where there is none, and the layers."""
    names, known = pd.factorize(neurons["expert"])
    indices = np.array([int(name) if str(name).isdigit() else -1 for name in known] or [-1])
    expert = np.where(names < 0, -1, indices[names])
    towers = neurons["tower"].astype(str).to_numpy()
    routed = sorted({*towers[expert >= 0]})
    if tower is None and len(routed) > 1:
        raise BadOption(f"the stacks {', '.join(routed)} have routed experts", hint="Say which with tower=")
    tower = tower or (routed[0] if routed else None)
    if tower not in routed:
        raise BadOption(
            f"there are no routed experts{f' in {tower!r}' if tower else ''}: there is nothing to draw",
            hint="Give the neuron frame of a model with routed experts, or draw its layers",
        )
    here = towers == tower
    layers, column = np.unique(neurons["layer"].to_numpy()[here], return_inverse=True)
    expert, values = expert[here], neurons[measure].to_numpy(dtype=float)[here]
    shape, used = (expert.max() + 1, len(layers)), (expert >= 0) & np.isfinite(values)
    cells = expert[used] * len(layers) + column[used]
    count = np.bincount(cells, minlength=shape[0] * shape[1])
    total = np.bincount(cells, values[used], minlength=shape[0] * shape[1])
    if not count.any():
        raise nothing(measure)
    means = np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
    return means.reshape(shape), layers.tolist()
