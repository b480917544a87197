"""Lines and bars through the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from ..frames import class_column
from ..measures.io_classes import IO_CLASSES
from .axes import Across, axes_or_new, legend_beside, sparse_ticks
from .columns import nothing, require

_CLASS_COLOURS = {
    "strengthening": "#08519c", "atypical strengthening": "#3182bd", "conditional strengthening": "#6baed6",
    "atypical conditional strengthening": "#bdd7e7", "proportional change": "#31a354",
    "atypical proportional change": "#a1d99b", "orthogonal output": "#e0e0e0",
    "atypical conditional weakening": "#fcbba1", "conditional weakening": "#fb6a4a", "atypical weakening": "#de2d26",
    "weakening": "#a50f15",
}  # fmt: skip


def layer_profile(layers: pd.DataFrame, measure: str = "exchange_asymmetry", *, ax: Axes | None = None) -> Axes:
    """One neuron measure through the layers: mean, median, 5-95 % band, energy-weighted mean, and its null if it has one.

    Args:
        layers: the layer frame.
        measure: name of a neuron measure.
        ax: where to draw.

    Raises:
        BadOption: the frame has no such measure, or all its values are missing.
    """
    columns = {statistic: f"{measure}_{statistic}" for statistic in ("mean", "median", "q05", "q95")}
    require(layers, ["layer", "tower", "group", *columns.values()])
    if layers[columns["mean"]].isna().all():
        raise nothing(measure)
    ax, across = axes_or_new(ax, (8.0, 3.2)), Across.of(layers)
    colour = sns.color_palette()[0]
    low, high = (across.values(columns[end]) for end in ("q05", "q95"))
    for number, block in enumerate(across.blocks):
        label = None if number else "5-95 %"
        ax.fill_between(across.x[block], low[block], high[block], color=colour, alpha=0.18, lw=0, label=label)
    alone = _alone(across, low)
    ax.vlines(across.x[alone], low[alone], high[alone], color=colour, alpha=0.25, lw=4)
    # not seaborn's lineplot: it draws across layers that are missing
    for column, style, width, line_colour, words in (
        (columns["mean"], ".-", 1.5, colour, "mean"),
        (columns["median"], "-", 0.8, colour, "median"),
        (f"{measure}_weighted", "--", 1.0, "black", "mean weighted by\noutput energy"),
        (f"{measure}_null_mean", ":", 1.4, "black", "mean of\nmismatched pairs"),
        (f"{measure}_output", "-.", 1.0, "black", "of the layer's output"),
    ):
        if column in layers and layers[column].notna().any():
            _line(ax, across, column, style, color=line_colour, lw=width, label=words)
    ax.set_ylabel(measure)
    return _finish(ax, across)


def layer_lines(
    layers: pd.DataFrame, columns: Sequence[str], *, logarithmic: bool = False, ax: Axes | None = None
) -> Axes:
    """Columns of the layer frame as lines through the layers, on one axis.

    Args:
        layers: the layer frame.
        columns: of it, of one kind. One that was measured on text beside its own value on Gaussian input is dashed, in the
            colour of that.
        logarithmic: on a logarithmic axis, for scales; what is not above 0 is not drawn there. Else the axis begins at 0.
        ax: where to draw.

    Raises:
        BadOption: a column is absent, or all values are missing.
    """
    require(layers, ["layer", "tower", "group", *columns])
    if layers[list(columns)].isna().to_numpy().all():
        raise nothing(columns)
    ax, across = axes_or_new(ax, (8.0, 3.2)), Across.of(layers)
    kinds = list(dict.fromkeys(column.replace("_text", "") for column in columns))
    colours = dict(zip(kinds, sns.color_palette("colorblind", len(kinds)), strict=True))
    for column in columns:
        kind = column.replace("_text", "")
        style = ".--" if kind != column and kind in columns else ".-"
        _line(ax, across, column, style, color=colours[kind], label=column)
    if logarithmic:
        ax.set_yscale("log", nonpositive="mask")
        values = layers[list(columns)].to_numpy(dtype=float)
        sparse_ticks(ax.yaxis, values[values > 0])
    else:
        ax.set_ylim(bottom=0)
    if len(columns) == 1:
        ax.set_ylabel(columns[0])
    return _finish(ax, across, legend=len(columns) > 1)


def _line(ax: Axes, across: Across, column: str, style: str, *, label: str, **options: Any) -> None:
    """A column, broken where values are missing and between blocks; a value with no neighbour is a mark."""
    values = across.values(column)
    for number, block in enumerate(across.blocks):
        ax.plot(across.x[block], values[block], style, label=label if number == 0 else None, **options)
    alone = _alone(across, values)
    if "." not in style.replace("-.", "") and alone.any():
        ax.plot(across.x[alone], values[alone], "_", color=options["color"], ms=8)


def _alone(across: Across, values: np.ndarray) -> np.ndarray:
    """Where a value has no neighbour in its block: a line through it has no length."""
    out = np.zeros(len(values), dtype=bool)
    for block in across.blocks:
        known = np.pad(~np.isnan(values[block]), 1)
        out[block] = known[1:-1] & ~known[:-2] & ~known[2:]
    return out


def _finish(ax: Axes, across: Across, *, legend: bool = True) -> Axes:
    if legend:
        legend_beside(ax)
    ax.set_xlim(-0.6, len(across.frame) - 0.4)
    across.label(ax)
    return ax


def class_bars(layers: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Fractions of the input-output classes in every layer, stacked; classes that do not occur are left out.

    Args:
        layers: the layer frame.
        ax: where to draw.

    Raises:
        BadOption: the frame has no class columns, or all are missing.
    """
    columns = {name: class_column(name) for name in IO_CLASSES}
    require(layers, ["layer", "tower", "group", *columns.values()])
    across = Across.of(layers)
    values = {name: across.values(column) for name, column in columns.items()}
    missing = np.isnan([*values.values()]).all(axis=0)
    if missing.all():
        raise nothing("the input-output classes")
    ax = axes_or_new(ax, (7.6, 3.6))
    bottom, width = np.zeros(len(layers)), 0.92 if len(layers) <= 40 else 1.0  # gaps of less than a pixel come and go
    for name, colour in _CLASS_COLOURS.items():
        height = np.nan_to_num(values[name])
        if height.max() > 0:
            ax.bar(across.x, height, bottom=bottom, width=width, color=colour, label=name)
            bottom = bottom + height
    if missing.any():
        ax.bar(
            np.flatnonzero(missing), 1.0, width=width, facecolor="none", edgecolor="0.6", hatch="///", label="missing"
        )
    ax.set(ylim=(0, 1), ylabel="fraction of neurons")
    _finish(ax, across)
    handles, labels = ax.get_legend_handles_labels()
    legend_beside(ax, handles[::-1], labels[::-1])
    return ax
