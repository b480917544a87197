"""All neurons in one plane: points while they are few, densities beyond."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm

from ..errors import BadOption
from .axes import axes_or_new, sparse_ticks
from .columns import of_model, require

_BINS = 20, 100  # across and up: for a few hundred neurons, for tens of thousands
_POINTS_AT_MOST = 20_000
_POINTS = ListedColormap(
    mpl.colormaps["viridis"](np.linspace(0.0, 0.88, 256))
)  # without the yellow that white swallows


def density(ax: Axes, x: np.ndarray, y: np.ndarray, logarithmic: tuple[bool, bool]) -> None:
    """Numbers of neurons in the plane, on a logarithmic colour scale that has two ends whatever the numbers are."""
    x, y = (np.log10(values) if log else values for values, log in zip((x, y), logarithmic, strict=True))
    counts, *edges = np.histogram2d(x, y, bins=int(np.clip(len(x) ** 0.5, *_BINS)))
    across, up = (10**ends if log else ends for ends, log in zip(edges, logarithmic, strict=True))
    norm = LogNorm(1, max(2.0, counts.max()))
    drawn = ax.pcolormesh(
        across, up, np.where(counts > 0, counts, np.nan).T, cmap="viridis", norm=norm, rasterized=True
    )
    ax.set_xscale("log" if logarithmic[0] else "linear")
    ax.set_yscale("log" if logarithmic[1] else "linear")
    ax.figure.colorbar(drawn, ax=ax, label="neurons")


def neuron_scatter(
    neurons: pd.DataFrame, x: str = "abs_cos_qk", y: str = "cos_kv", *, hue: str = "layer", ax: Axes | None = None
) -> Axes:
    """Two measures of every neuron against each other: points up to 20,000 neurons, a density beyond.

    Args:
        neurons: the neuron frame.
        x, y: columns; norms get a logarithmic axis.
        hue: column that colours the points.
        ax: where to draw.

    Raises:
        BadOption: a column is absent, or no neuron has both values.
    """
    require(neurons, [x, y])
    if hue not in neurons:
        raise BadOption(f"the frame has no column {hue!r}", hint="Pass report.neurons as it is")
    known = neurons[[*dict.fromkeys((x, y, hue))]]
    known = known[np.isfinite(known[x].astype(float)) & np.isfinite(known[y].astype(float)) & known[hue].notna()]
    logarithmic = {name: name.endswith(("norm", "gain", "ratio", "risk", "energy")) for name in (x, y)}
    for name in (x, y):
        if logarithmic[name]:
            known = known[known[name] > 0]
    if known.empty:
        raise BadOption(
            f"no neuron has both {x} and {y}: there is nothing to draw",
            hint="Name two columns that some neuron has both of; on a logarithmic axis only values above 0 count",
        )
    ax = axes_or_new(ax, (6.0, 4.6))
    if len(known) > _POINTS_AT_MOST:
        density(ax, known[x].to_numpy(dtype=float), known[y].to_numpy(dtype=float), (logarithmic[x], logarithmic[y]))
    else:
        scale = {}
        if known[hue].dtype.kind in "iuf":  # with limits, layers 0 and 1 are numbers too
            scale = {"palette": _POINTS, "hue_norm": (known[hue].min(), known[hue].max())}
        sns.scatterplot(data=known, x=x, y=y, hue=hue, s=6, alpha=0.6, linewidth=0, ax=ax, rasterized=True, **scale)
        ax.set_xscale("log" if logarithmic[x] else "linear")
        ax.set_yscale("log" if logarithmic[y] else "linear")
        sns.move_legend(ax, "center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
    ax.set(xlabel=x, ylabel=y)
    return ax


def text_scatter(neurons: pd.DataFrame, measure: str = "exchange_asymmetry", *, ax: Axes | None = None) -> Axes:
    """A measure of every neuron on Gaussian input against the same on text, and the line where they agree.

    Args:
        neurons: the neuron frame of a report with text.
        measure: which; its columns are `measure` and `measure`_text.
        ax: where to draw.

    Raises:
        BadOption: a column is absent, or no neuron has both values.
    """
    ax = neuron_scatter(neurons, measure, f"{measure}_text", ax=ax)
    low, high = max(ax.get_xlim()[0], ax.get_ylim()[0]), min(ax.get_xlim()[1], ax.get_ylim()[1])
    ax.plot([low, high], [low, high], color="0.4", lw=0.8, ls="--", scalex=False, scaley=False)
    return ax


def movement_scatter(neurons: pd.DataFrame, *, model: str | None = None, ax: Axes | None = None) -> Axes:
    """Movement of every neuron against what rounding alone explains: on the line it explains all of it.

    Args:
        neurons: the frame of a comparison.
        model: which, where there are several.
        ax: where to draw.

    Raises:
        BadOption: no neuron has both.
    """
    require(neurons, ["model", "movement", "rounding"], whole="comparison.neurons")
    rows, model = of_model(neurons, model)
    x, y = (rows[name].to_numpy(dtype=float) for name in ("rounding", "movement"))
    known = (x > 0) & (y > 0)
    if not known.any():
        raise BadOption(
            f"no neuron of {model} has both a movement and what rounding explains: there is nothing to draw",
            hint="Name a model whose neurons were followed, compared with rounding=True",
        )
    x, y = x[known], y[known]
    ax = axes_or_new(ax, (6.4, 4.6))
    ax.set(xscale="log", yscale="log")
    if len(x) > _POINTS_AT_MOST:
        density(ax, x, y, (True, True))
    else:
        points = ax.scatter(x, y, c=rows["layer"].to_numpy()[known], cmap=_POINTS, s=8, linewidth=0, rasterized=True)
        ax.figure.colorbar(points, ax=ax, label="layer")
    ends = np.array([x.min() / 1.5, x.max() * 1.5])
    ax.plot(ends, ends, color="0.3", lw=0.9, label="rounding explains it")
    ax.plot(ends, 1.5 * ends, color="0.3", lw=0.9, ls="--", label="1.5 times that")
    ax.set_xlim(*ends)
    sparse_ticks(ax.xaxis, ends)
    sparse_ticks(ax.yaxis, np.concatenate([y, ends]))
    ax.set(xlabel="movement by rounding alone", ylabel="movement  |T' - T| / |T|")
    ax.set_title(model, fontsize="medium", loc="left")
    ax.legend(fontsize="small", frameon=False, loc="best")
    return ax
