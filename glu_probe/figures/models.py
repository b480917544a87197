"""One measure in several models: through the layers of each, and from model to model."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from ..errors import BadOption
from .axes import axes_or_new, label_models, label_positions, legend_beside, sparse_ticks
from .columns import nothing, require

FEW_MODELS = 6  # models that each get a colour of their own; more get their place on a scale
_NAMED = 12  # that a legend has room for


def model_profiles(
    layers: pd.DataFrame, measure: str = "exchange_asymmetry", *, by: str | None = None, ax: Axes | None = None
) -> Axes:
    """One measure through the layers of every model, on one scale: means, and the 5-95 % band of neurons for up to 3 models.

    Args:
        layers: the layer frame of a comparison.
        measure: a neuron measure, or a column of the frame.
        by: "layer" or "relative_depth"; None for layers where all models have the same ones.
        ax: where to draw.

    Raises:
        BadOption: there is no such measure, or no value of it.
    """
    column, names = _column_and_models(layers, measure)
    present = {tuple(layers.loc[layers["model"] == name, "layer"]) for name in names}
    by = by or ("layer" if len(present) == 1 else "relative_depth")
    if by not in ("layer", "relative_depth"):
        raise BadOption(f"by is {by!r}", hint='Use "layer" or "relative_depth"')
    ax = axes_or_new(ax, (8.2, 3.4))
    band = [f"{measure}_q05", f"{measure}_q95"]
    for index, (name, colour) in enumerate(zip(names, _colours(len(names)), strict=True)):
        rows = layers[layers["model"] == name]
        # the base shows on both sides of a line that covers it
        width = 3.2 if index == 0 and len(names) <= FEW_MODELS else 1.4
        styles = iter((".-", ".--", ".:", ".-."))
        for (tower, group), part in rows.groupby(["tower", "group"], sort=False):
            if part[column].isna().all():
                continue
            x, values = (part[name].to_numpy(dtype=float) for name in (by, column))
            extra = [tower] if rows["tower"].nunique() > 1 else []
            extra += [group] if rows["group"].nunique() > 1 else []
            if len(names) <= 3 and set(band) <= {*part} and not extra:
                ax.fill_between(x, *(part[end].to_numpy(dtype=float) for end in band), color=colour, alpha=0.12, lw=0)
            ax.plot(x, values, next(styles, ".-"), color=colour, lw=width, label=" ".join([name, *extra]))
    _scale(ax, layers[column])
    ax.set_ylabel(measure)
    ax.set_xlabel("layer" if by == "layer" else "relative depth: 0 the first layer, 1 the last")
    if by == "layer":
        shown = sorted({*layers["layer"]})
        ax.set_xticks([shown[index] for index in label_positions(len(shown))])
    ax.margins(x=0.01)
    if len(names) > _NAMED:
        _scale_of_models(ax, names)
    else:
        legend_beside(ax)
    return ax


def model_trajectory(layers: pd.DataFrame, measure: str = "exchange_asymmetry", *, ax: Axes | None = None) -> Axes:
    """One measure over the models in the order given, as revisions of a training run: a line per layer, and the mean of layers.

    Args:
        layers: the layer frame of a comparison.
        measure: a neuron measure, or a column of the frame.
        ax: where to draw.

    Raises:
        BadOption: there is no such measure, or no value of it.
    """
    column, names = _column_and_models(layers, measure)
    place = {name: index for index, name in enumerate(names)}
    ax = axes_or_new(ax, (max(5.5, 3.4 + 0.4 * len(names)), 3.6))
    scale = mpl.colors.Normalize(0.0, 1.0)
    for _, rows in layers.groupby(["tower", "group", "layer"], sort=False):
        colour = mpl.colormaps["viridis"](scale(float(rows["relative_depth"].iloc[0])))
        ax.plot(rows["model"].map(place), rows[column].to_numpy(dtype=float), "-", color=colour, lw=0.8, alpha=0.8)
    means = layers.groupby("model", sort=False)[column].mean()
    x, y = [place[name] for name in means.index], means.to_numpy(dtype=float)
    ax.plot(x, y, "o-", color="black", lw=2.0, ms=4, label="mean of layers")
    label_models(ax, names)
    _scale(ax, layers[column])
    ax.set_ylabel(measure)
    ax.figure.colorbar(mpl.cm.ScalarMappable(scale, "viridis"), ax=ax, label="relative depth of the layer")
    ax.legend(fontsize="small", frameon=False, loc="best")
    return ax


def _scale(ax: Axes, values: pd.Series) -> None:
    """A logarithmic axis where values of models are more than a factor of ten apart and all positive."""
    known = values[values.notna()].astype(float)
    if known.min() > 0 and known.max() > 10 * known.min():
        ax.set_yscale("log")
        sparse_ticks(ax.yaxis, known.to_numpy())


def _scale_of_models(ax: Axes, names: Sequence[str]) -> None:
    """A colour bar in the place of a legend that would not fit."""
    mappable = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, len(names) - 1), "viridis")
    bar = ax.figure.colorbar(mappable, ax=ax)
    places = label_positions(len(names), 10)
    bar.set_ticks(places, labels=[names[place] for place in places], fontsize="small")


def _colours(count: int) -> list:
    return sns.color_palette("colorblind", count) if count <= FEW_MODELS else sns.color_palette("viridis", count)


def _column_and_models(layers: pd.DataFrame, measure: str) -> tuple[str, list[str]]:
    """The column that is drawn, which has values, and the models in their order."""
    column = f"{measure}_mean" if f"{measure}_mean" in layers else measure
    require(layers, ["model", "tower", "group", "layer", "relative_depth", column], whole="comparison.layers")
    if layers[column].isna().all():
        raise nothing(column)
    return column, list(dict.fromkeys(layers["model"]))
