"""What all pictures share: axes to draw on, layers across, labels that do not run into each other, missing cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ..layer_groups import groups_of

MISSING = "#d9d9d9"
LABELS_AT_MOST = 20
_VECTOR_CELLS = 2_000  # a mesh of more cells is an image, in vector formats too


def axes_or_new(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The axes that were given, or those of a new figure of pyplot."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")[1]


def figure_axes(size: tuple[float, float]) -> Axes:
    """Axes of a figure that no window manager knows: for files, where no display need be."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = mpl.figure.Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.subplots()


def label_positions(count: int, at_most: int = LABELS_AT_MOST) -> list[int]:
    """Which of `count` positions to label: a constant step from the first, and always the last.

    >>> label_positions(80)
    [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 79]
    """
    if count <= at_most:
        return list(range(count))
    step = next(step for step in (2, 5, 10, 20, 50, 100, 200, 500, count) if count / step <= at_most)
    inner = [position for position in range(0, count, step) if count - 1 - position >= step]
    return [*inner, count - 1]


def layer_labels(layers: pd.DataFrame) -> list[str]:
    """A label per row: the layer, with tower and expert group where there are several."""
    groups = layers["group"].where(layers["group"] != "none")
    labels = layers["layer"].astype(str)
    if layers["layer"].duplicated().any():
        labels = labels + groups.fillna("").map(lambda group: f" {group}".rstrip())
    if layers["tower"].nunique() > 1:
        labels = layers["tower"].astype(str) + " " + labels
    return labels.tolist()


@dataclass(frozen=True)
class Across:
    """The rows of a layer frame as positions from left to right.

    Attributes:
        frame: the rows, those of one stack and expert group beside each other, in the order in which these first occur.
        blocks: the positions of each stack and group. Lines are not drawn from one block to the next.
    """

    frame: pd.DataFrame
    blocks: list[slice]

    @classmethod
    def of(cls, layers: pd.DataFrame) -> Across:
        """The rows of this layer frame."""
        codes = pd.factorize(layers["tower"].astype(str) + " " + groups_of(layers))[0]
        order = np.argsort(codes, kind="stable")
        edges = [0, *(np.flatnonzero(np.diff(codes[order])) + 1).tolist(), len(layers)]
        return cls(layers.iloc[order], [slice(start, end) for start, end in pairwise(edges)])

    @property
    def x(self) -> np.ndarray:
        """The positions."""
        return np.arange(len(self.frame))

    def values(self, column: str) -> np.ndarray:
        """A column as floats; what is not finite is missing."""
        values = self.frame[column].to_numpy(dtype=float)
        return np.where(np.isfinite(values), values, np.nan)

    def label(self, ax: Axes, offset: float = 0.0, *, edges: str = "0.8") -> None:
        """Layers along the axis; where there are several blocks, the first label of each names it, and a line parts them."""
        positions, labels = [], []
        for block in self.blocks:
            count = block.stop - block.start
            budget = max(2, round(LABELS_AT_MOST * count / len(self.frame)))
            positions += [block.start + position for position in label_positions(count, budget)]
        named = layer_labels(self.frame)
        starts = {block.start for block in self.blocks}
        for position in positions:
            labels.append(named[position] if position in starts else str(self.frame["layer"].iloc[position]))
        set_labels(ax, positions, labels, offset)
        for start in sorted(starts - {0}):
            ax.axvline(start - 0.5 + offset, color=edges, lw=1.0, zorder=5)


def set_labels(ax: Axes, positions: Sequence[int], labels: Sequence[str], offset: float = 0.0) -> None:
    """Labels of layers, upright where they are too long to lie."""
    ax.set_xticks([position + offset for position in positions], labels)
    upright = any(len(label) > 3 for label in labels)
    for tick, label in zip(ax.get_xticklabels(), labels, strict=True):
        tick.set(rotation=90 if len(label) > 3 else 0, fontsize="small" if upright else "medium")
    ax.set_xlabel("layer")


def mesh(ax: Axes, values: np.ndarray, *, label: str, bar: Mapping[str, Any] | None = None, **options: Any) -> None:
    """A grid of values with its colour bar, for which `bar` has options; missing cells are grey, and a note says so."""
    missing = np.isnan(values)
    sns.heatmap(
        values, ax=ax, linewidths=0, mask=missing, xticklabels=False, yticklabels=False, cbar_kws={"label": label, **(bar or {})},
        rasterized=values.size > _VECTOR_CELLS, **options,
    )  # fmt: skip
    ax.set_facecolor(MISSING)
    if missing.any():
        ax.set_title("grey: missing", fontsize="small", loc="right")


def sparse_ticks(axis: Axis, values: np.ndarray) -> None:
    """Plain numbers along a logarithmic axis, at 1, 2 and 5 of every decade where there is room for them."""
    decades = np.log10(np.nanmax(values) / np.nanmin(values))
    axis.set_major_locator(MaxNLocator(4) if decades < 0.7 else LogLocator(subs=(1, 2, 5) if decades < 2 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def label_models(ax: Axes, names: Sequence[str]) -> None:
    """Models along the axis, slanted where their names are long."""
    shown = label_positions(len(names), 16)
    turned = max(map(len, names)) > 6
    words = [names[index] for index in shown]
    ax.set_xticks(shown, words, rotation=30 if turned else 0, ha="right" if turned else "center")


def legend_beside(ax: Axes, *entries: Sequence, **options: Any) -> None:
    """A legend to the right of the axes, of what is labelled or of these handles and labels."""
    placed: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    ax.legend(*entries, fontsize="small", frameon=False, **placed, **options)
