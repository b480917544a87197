"""What interventions cost: the frame of `causal` as a heatmap and as lines."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, SymLogNorm

from ..errors import BadOption
from .axes import axes_or_new, label_positions, legend_beside, mesh, set_labels
from .columns import nothing, require

_DECADES = 4  # of the colour scale
_YARDSTICKS = {"zero_ablation": "--", "mean_ablation": ":"}


def causal_heatmap(costs: pd.DataFrame, *, value: str = "kl", ax: Axes | None = None) -> Axes:
    """What every intervention costs in every layer: layers across, interventions down, colours logarithmic.

    Of values from 0 up four decades below the largest are told apart. Where some are negative, as changes of the loss
    can be, the colours are those of a scale that is logarithmic to both sides and linear within a hundredth of the largest.

    Args:
        costs: the frame of `causal`, of one model.
        value: its column to show.
        ax: where to draw.

    Raises:
        BadOption: a column is absent, there are several models, or no value is there to draw.
    """
    table = _costs_table(costs, value)
    values = table.to_numpy(dtype=float)
    ax = axes_or_new(ax, causal_grid_size(*values.shape))
    most = np.nanmax(np.abs(values)) or 1.0
    if value.startswith("delta") and np.nanmin(values) < 0:
        norm: SymLogNorm | LogNorm = SymLogNorm(most / 100, vmin=-most, vmax=most)
        cmap = "RdBu_r"
    else:
        positive = values[values > 0]
        low = max(positive.min(initial=most / 10), most / 10**_DECADES)
        low = min(low, most / 2)
        norm, cmap = LogNorm(low, most), "viridis"
        values = np.where(np.isnan(values), np.nan, np.maximum(values, low))
    mesh(ax, values, cmap=cmap, norm=norm, label=f"{value} [nats a token]" if "gap" not in value else value)
    _label(ax, list(table.columns), offset=0.5)
    ax.set_yticks(np.arange(len(table)) + 0.5, list(table.index), rotation=0)
    return ax


def _label(ax: Axes, labels: list[str], offset: float = 0.0) -> None:
    positions = label_positions(len(labels))
    set_labels(ax, positions, [labels[position] for position in positions], offset)


def causal_grid_size(n_rows: int, n_layers: int) -> tuple[float, float]:
    """Size of a figure of `causal_heatmap`, in inches."""
    return max(6.0, 3.6 + 0.14 * n_layers), max(2.4, 1.2 + 0.3 * n_rows)


def causal_profile(costs: pd.DataFrame, *, value: str = "kl", ax: Axes | None = None) -> Axes:
    """The cost of each intervention through the layers, in bands of one standard error; ablations are drawn as yardsticks.

    Args:
        costs: the frame of `causal`, of one model.
        value: its column to show; the bands come from the column with `_se` behind it, if there is one.
        ax: where to draw.

    Raises:
        BadOption: a column is absent, there are several models, or no value is there to draw.
    """
    costs = costs[costs["intervention"] != "identity"] if "intervention" in costs else costs
    table = _costs_table(costs, value)
    errors = (
        _costs_table(costs, f"{value}_se") if f"{value}_se" in costs and costs[f"{value}_se"].notna().any() else None
    )
    ax = axes_or_new(ax, (8.4, 3.8))
    values, x = table.to_numpy(dtype=float), np.arange(table.shape[1])
    logarithmic = not (values <= 0).any()
    floor = np.nanmin(values) / 3 if logarithmic else -np.inf  # a band that reaches 0 has no end on a logarithmic axis
    names = [row.split(",")[0] for row in table.index]
    colours = iter(sns.color_palette("colorblind", len(table)))
    for number, (row, name) in enumerate(zip(table.index, names, strict=True)):
        colour = (
            ("black" if row == table.index[names.index(name)] else "0.55") if name in _YARDSTICKS else next(colours)
        )
        if errors is not None:
            band = errors.loc[row].to_numpy(dtype=float)
            low = np.maximum(values[number] - band, floor)
            ax.fill_between(x, low, values[number] + band, color=colour, alpha=0.15, lw=0)
        ax.plot(x, values[number], _YARDSTICKS.get(name, ".-"), color=colour, lw=1.2, label=row)
    ax.set_yscale("log") if logarithmic else ax.set_yscale("symlog", linthresh=np.nanmax(np.abs(values)) / 1000 or 1.0)
    ax.set_ylabel(f"{value} [nats a token]" if "gap" not in value else value)
    legend_beside(ax)
    ax.margins(x=0.01)
    _label(ax, list(table.columns))
    return ax


def _costs_table(costs: pd.DataFrame, value: str) -> pd.DataFrame:
    """Interventions down, layers across, both in the order of the frame."""
    require(costs, ["model", "layers", "expert", "neurons", "intervention", value])
    if costs["model"].nunique() > 1:
        raise BadOption(f"the frame has {costs['model'].nunique()} models", hint="Pass the rows of one")
    if costs[value].isna().all():
        raise nothing(value)
    column = costs["layers"].astype(str)
    if costs.groupby("layers")["expert"].nunique(dropna=False).max() > 1:
        column = column + costs["expert"].map(lambda expert: "" if pd.isna(expert) else f" {expert}").astype(str)
    row = costs["intervention"].astype(str)
    if costs["neurons"].nunique() > 1:
        row = row + ", " + costs["neurons"].astype(str)
    if pd.DataFrame({"row": row, "column": column}).duplicated().any():
        raise BadOption(
            "the frame has several rows for one intervention in one layer", hint="Pass the frame of one run"
        )
    table = pd.DataFrame({"row": row, "column": column, "value": costs[value].replace([np.inf, -np.inf], np.nan)})
    return table.pivot(index="row", columns="column", values="value").loc[row.unique(), column.unique()]
