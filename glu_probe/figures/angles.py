"""By how many degrees the neurons of one model turned on the way to another."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from ..errors import BadOption
from .axes import axes_or_new, label_models, label_positions, legend_beside, set_labels, sparse_ticks
from .columns import of_model, require

_FACTORS = {"q": ("gate rows q", 0), "k": ("up rows k", 2), "v": ("down columns v", 1)}  # label, colour of the palette
_FLOOR = 1e-4  # degrees: rows that turned by less did not turn
_SIDES = {"model": "--", "base": ":"}


def angle_trajectory(mlps: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """How far neurons turned from the base, over the models in the order given: medians over MLPs, and their 5-95 % band.

    Args:
        mlps: the frame of a comparison.
        ax: where to draw.

    Raises:
        BadOption: no angle is there to draw.
    """
    require(mlps, ["model", *(f"angle_{letter}" for letter in _FACTORS)], whole="comparison.mlps")
    names = list(dict.fromkeys(mlps["model"].astype(str)))
    if mlps["angle_q"].isna().all():
        raise BadOption(
            "no neuron was followed: there is nothing to draw",
            hint="Neurons are followed where models have the same ones: compare with neurons=None or True",
        )
    ax = axes_or_new(ax, (max(5.5, 3.4 + 0.4 * len(names)), 3.6))
    palette, x, drawn = sns.color_palette("colorblind"), np.arange(len(names)), []
    for letter, (label, colour) in _FACTORS.items():
        by_model = mlps.groupby(mlps["model"].astype(str), sort=False)[f"angle_{letter}"]
        low, middle, high = (
            by_model.quantile(share).reindex(names).to_numpy(dtype=float) for share in (0.05, 0.5, 0.95)
        )
        ax.fill_between(x, low, high, color=palette[colour], alpha=0.15, lw=0)
        ax.plot(x, middle, "o-", color=palette[colour], lw=1.4, ms=4, label=label)
        drawn.append(high)
    label_models(ax, names)
    _degrees(ax, "y", np.concatenate([[0.0], *drawn]))
    ax.set_ylabel("angle, median of neurons")
    legend_beside(ax)
    return ax


def angle_profile(mlps: pd.DataFrame, *, model: str | None = None, ax: Axes | None = None) -> Axes:
    """By how much the neurons of every MLP turned (medians, lines), and by how much rounding in one file alone would turn them
    (dashed: the model's, dotted: the base's; where errors of both are independent, they add in quadrature).

    Args:
        mlps: the frame of a comparison.
        model: which, where there are several.
        ax: where to draw.

    Raises:
        BadOption: no angle is there to draw.
    """
    require(
        mlps,
        ["base", "model", "tower", "layer", "expert", "angle_q", "rounding_angle_q_model"],
        whole="comparison.mlps",
    )
    rows, model = of_model(mlps, model)
    rows = rows[rows["angle_q"].notna()]
    if rows.empty:
        raise BadOption(
            f"no neuron of {model} was followed: there is nothing to draw",
            hint="Name a model whose neurons are those of the base: its rows of mlps have angles",
        )
    experts = rows["expert"].map(lambda expert: "" if pd.isna(expert) else f" {expert}").astype(str)
    labels = (rows["layer"].astype(str) + experts).tolist()
    ax = axes_or_new(ax, (8.2, 3.4))
    x, palette, drawn = np.arange(len(rows)), sns.color_palette("colorblind"), []
    for letter, (label, colour) in _FACTORS.items():
        values = rows[f"angle_{letter}"].to_numpy(dtype=float)
        ax.plot(x, values, ".-", color=palette[colour], lw=1.4, label=label)
        drawn.append(values)
        for side, style in _SIDES.items():
            expected = rows[f"rounding_angle_{letter}_{side}"].to_numpy(dtype=float)
            if _worth_drawing(rows, letter, side):
                ax.plot(x, expected, style, color=palette[colour], lw=1.2)
                drawn.append(expected)
    _explain_sides(ax, rows, model)
    shown = label_positions(len(labels))
    set_labels(ax, shown, [labels[index] for index in shown])
    _degrees(ax, "y", np.concatenate(drawn))
    ax.set_ylabel("angle, median of neurons")
    ax.set_title(model, fontsize="medium", loc="left")
    ax.margins(x=0.01)
    legend_beside(ax)
    return ax


def angle_histogram(neurons: pd.DataFrame, *, model: str | None = None, ax: Axes | None = None) -> Axes:
    """How many neurons turned by which angle, gate, up and down; dashed and dotted, the medians that rounding of
    the model's and of the base's weights alone would give.

    Args:
        neurons: the frame of a comparison.
        model: which, where there are several.
        ax: where to draw.

    Raises:
        BadOption: no angle is there to draw.
    """
    require(neurons, ["base", "model", "angle_q", "rounding_angle_q_model"], whole="comparison.neurons")
    rows, model = of_model(neurons, model)
    angles = {letter: rows[f"angle_{letter}"].dropna().to_numpy(dtype=float) for letter in _FACTORS}
    if not any(map(len, angles.values())):
        raise BadOption(
            f"no neuron of {model} was followed: there is nothing to draw",
            hint="Name a model whose neurons are those of the base: its rows of mlps have angles",
        )
    ax = axes_or_new(ax, (7.0, 3.6))
    together = np.concatenate([*angles.values()])
    logarithmic = _far_apart(together)
    low = max(together[together > 0].min(initial=180.0), _FLOOR) / 1.15
    high = max(together.max(), _FLOOR) * 1.15
    bins = (np.geomspace(low, high, 81) if logarithmic else np.linspace(0, high, 81)).tolist()
    palette, middles = sns.color_palette("colorblind"), []
    for letter, (label, colour) in _FACTORS.items():
        shown = np.maximum(angles[letter], low * 1.01) if logarithmic else angles[letter]
        ax.hist(shown, bins=bins, histtype="stepfilled", color=palette[colour], alpha=0.25, lw=0)
        ax.hist(shown, bins=bins, histtype="step", color=palette[colour], lw=1.2, label=label)
        for side, style in _SIDES.items():
            expected = float(rows[f"rounding_angle_{letter}_{side}"].dropna().median())
            if _worth_drawing(rows, letter, side):
                ax.axvline(expected, color=palette[colour], ls=style, lw=1.2)
                middles.append(expected)
    _explain_sides(ax, rows, model)
    _degrees(ax, "x", np.array([*middles, low if logarithmic else 0.0, high]))
    ax.set_xlabel("angle between the two models")
    ax.set_ylabel("neurons")
    ax.set_title(model, fontsize="medium", loc="left")
    legend_beside(ax)
    return ax


def _worth_drawing(rows: pd.DataFrame, letter: str, side: str) -> bool:
    """Whether rounding in that file is not nothing beside that in the other."""
    here, there = (
        float(rows[f"rounding_angle_{letter}_{each}"].dropna().median()) for each in (side, *({*_SIDES} - {side}))
    )
    return here > max(_FLOOR, 0.05 * (there if there > 0 else 0.0))


def _explain_sides(ax: Axes, rows: pd.DataFrame, model: str) -> None:
    """Entries of the legend for the lines of rounding, in no factor's colour."""
    names = {"model": model, "base": str(rows["base"].iloc[0])}
    for side, style in _SIDES.items():
        if any(_worth_drawing(rows, letter, side) for letter in _FACTORS):
            ax.plot([], [], style, color="0.4", lw=1.2, label=f"rounding of {names[side]}")


def _far_apart(values: np.ndarray) -> bool:
    positive = values[np.isfinite(values) & (values > 0)]
    return bool(positive.size) and float(np.quantile(positive, 0.99)) > 5 * float(np.quantile(positive, 0.01))


def _degrees(ax: Axes, which: str, values: np.ndarray) -> None:
    """Degrees along an axis, from 0, or logarithmic where they are far apart."""
    axis = getattr(ax, f"{which}axis")
    if (values > 0).all() and _far_apart(values):
        getattr(ax, f"set_{which}scale")("log")
        sparse_ticks(axis, values)
    else:
        getattr(ax, f"set_{which}lim")(0, max(1.05 * np.nanmax(values), _FLOOR))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}°"))
