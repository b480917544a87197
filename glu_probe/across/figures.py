"""Pictures of a comparison: a frame goes in, matplotlib Axes come out. All models of a picture share its scales."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ..errors import BadOption
from ..figures import label_positions, layer_labels

_MISSING = "#d9d9d9"
_FEW = 6  # models that each get a colour of their own; more get their place on a scale
_FACTORS = {"q": ("gate rows q", 0), "k": ("up rows k", 2), "v": ("down columns v", 1)}
_FLOOR = 1e-4  # degrees: rows that turned by less did not turn
_SIDES = {"model": "--", "base": ":"}
_CAP = 4.0  # most that the colour scale of effects spans

# What the heatmap shows by default: one of each family of measures, gauge-invariant ones alone.
SHOWN = (
    "query_norm", "value_gain", "abs_cos_qk", "cos_kv", "abs_cos_qv", "cos_qv", "exchange_asymmetry", "scaling_asymmetry",
    "linear_share", "bilinear_share", "residual_share", "output_energy", "outlier_risk",
)  # fmt: skip


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")[1]


def _require(frame: pd.DataFrame, columns: Sequence[str], which: str) -> None:
    absent = [name for name in columns if name not in frame]
    if absent:
        raise BadOption(f"the frame has no column {absent[0]!r}", hint=f"Pass comparison.{which} as it is")
    if frame.empty:
        raise BadOption("the frame has no rows: there is nothing to draw")


def _colours(count: int) -> list:
    return sns.color_palette("colorblind", count) if count <= _FEW else sns.color_palette("viridis", count)


def _one_model(frame: pd.DataFrame, model: str | None) -> tuple[pd.DataFrame, str]:
    names = list(dict.fromkeys(frame["model"].astype(str)))
    if model is None and len(names) > 1:
        raise BadOption(f"the frame has {len(names)} models beside the base", hint=f"Say which: {', '.join(names)}")
    model = model or names[0]
    if model not in names:
        raise BadOption(f"model is {model!r}", hint=f"Use one of {', '.join(names)}")
    return frame[frame["model"].astype(str) == model], model


def _legend(ax: Axes, **options) -> None:
    ax.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), **options)


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
    column = f"{measure}_mean" if f"{measure}_mean" in layers else measure
    _require(layers, ["model", "tower", "group", "layer", "relative_depth", column], "layers")
    if layers[column].isna().all():
        raise BadOption(f"every value of {column} is missing: there is nothing to draw")
    names = list(dict.fromkeys(layers["model"]))
    present = {tuple(layers.loc[layers["model"] == name, "layer"]) for name in names}
    by = by or ("layer" if len(present) == 1 else "relative_depth")
    if by not in ("layer", "relative_depth"):
        raise BadOption(f"by is {by!r}", hint='Use "layer" or "relative_depth"')
    ax = _axes(ax, (8.2, 3.4))
    band = [f"{measure}_q05", f"{measure}_q95"]
    for index, (name, colour) in enumerate(zip(names, _colours(len(names)), strict=True)):
        rows = layers[layers["model"] == name]
        width = (
            3.2 if index == 0 and len(names) <= _FEW else 1.4
        )  # the base shows on both sides of a line that covers it
        styles = iter((".-", ".--", ".:", ".-."))
        for (tower, group), part in rows.groupby(["tower", "group"], sort=False):
            if part[column].isna().all():
                continue
            x = part[by].to_numpy(dtype=float)
            extra = [
                word
                for word, several in ((tower, rows["tower"].nunique() > 1), (group, rows["group"].nunique() > 1))
                if several
            ]
            if len(names) <= 3 and set(band) <= {*part} and not extra:
                ax.fill_between(x, *(part[end].to_numpy(dtype=float) for end in band), color=colour, alpha=0.12, lw=0)
            ax.plot(
                x,
                part[column].to_numpy(dtype=float),
                next(styles, ".-"),
                color=colour,
                lw=width,
                label=" ".join([name, *extra]),
            )
    _scaled(ax, layers[column])
    ax.set_ylabel(measure)
    ax.set_xlabel("layer" if by == "layer" else "relative depth: 0 the first layer, 1 the last")
    if by == "layer":
        shown = sorted({*layers["layer"]})
        ax.set_xticks([shown[index] for index in label_positions(len(shown))])
    ax.margins(x=0.01)
    if len(names) > 12:
        _scale_of_models(ax, names)
    else:
        _legend(ax)
    return ax


def _scaled(ax: Axes, values: pd.Series) -> None:
    """A logarithmic axis where values of models are more than a factor of ten apart and all positive."""
    known = values[values.notna()].astype(float)
    if known.min() > 0 and known.max() > 10 * known.min():
        ax.set_yscale("log")
        _few_ticks(ax.yaxis, known.to_numpy())


def _scale_of_models(ax: Axes, names: Sequence[str]) -> None:
    """A colour bar in the place of a legend that would not fit."""
    mappable = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, len(names) - 1), "viridis")
    bar = ax.figure.colorbar(mappable, ax=ax)
    places = label_positions(len(names), 10)
    bar.set_ticks(places, labels=[names[place] for place in places], fontsize="small")


def difference_heatmap(
    differences: pd.DataFrame,
    *,
    model: str | None = None,
    measures: Sequence[str] | None = None,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Effect sizes of one model against the base: layers or bins of depth across, measures down, white where equal.

    Effects are Cohen's d, so all measures share one scale. A dot marks differences that rounding explains.

    Args:
        differences: the frame of a comparison.
        model: which, where there are several.
        measures: which, of those with an effect size d; `SHOWN` by default.
        limit: end of the colour scale; by default the largest effect, at most 4.
        ax: where to draw.

    Raises:
        BadOption: no effect is there to draw.
    """
    _require(
        differences, ["model", "measure", "effect", "effect_kind", "tower", "group", "beyond_rounding"], "differences"
    )
    rows, model = _one_model(differences, model)
    rows = rows[rows["effect_kind"].eq("d").fillna(False)]
    names = [name for name in (measures or SHOWN) if name in {*rows["measure"]}]
    if not names:
        raise BadOption(f"no measure of {model} has an effect size d: there is nothing to draw")
    rows = rows[rows["measure"].isin(names)]
    across = "layer" if "layer" in rows else "depth_bin"
    places = rows[["tower", "group", across]].drop_duplicates().sort_values(["tower", "group", across], kind="stable")
    keys = list(places.itertuples(index=False, name=None))
    column = {key: index for index, key in enumerate(keys)}
    values = np.full((len(names), len(keys)), np.nan)
    explained = np.zeros(values.shape, dtype=bool)
    for row in rows.itertuples():
        where = names.index(row.measure), column[row.tower, row.group, getattr(row, across)]
        values[where] = row.effect
        explained[where] = row.beyond_rounding is not pd.NA and not row.beyond_rounding
    limit = limit or effect_limit(rows)
    ax = _axes(ax, heatmap_size(len(names), len(keys)))
    over = np.nanmax(np.abs(values)) > limit * (1 + 1e-9)
    sns.heatmap(
        values, ax=ax, cmap="RdBu_r", vmin=-limit, vmax=limit, mask=np.isnan(values), linewidths=0, xticklabels=False,
        yticklabels=names, cbar_kws={"label": "Cohen's d against the base", "extend": "both" if over else "neither"},
    )  # fmt: skip
    ax.set_facecolor(_MISSING)
    y, x = np.nonzero(explained)
    ax.plot(x + 0.5, y + 0.5, ".", color="0.25", ms=2.5)
    if across == "layer":
        labels = layer_labels(places.reset_index(drop=True))
        ax.set_xlabel("layer")
    else:
        depth = rows.drop_duplicates(["tower", "group", across]).set_index(["tower", "group", across])["relative_depth"]
        labels = [f"{depth[key]:.2f}" for key in keys]
        ax.set_xlabel("relative depth, middle of the bin")
    shown = label_positions(len(labels))
    longest = max(len(labels[index]) for index in shown)
    ax.set_xticks(
        [index + 0.5 for index in shown], [labels[index] for index in shown], rotation=90 if longest > 3 else 0
    )
    ax.tick_params(axis="y", rotation=0)
    remarks = [
        *(["dot: rounding explains it"] if explained.any() else []),
        *(["grey: missing"] if np.isnan(values).any() else []),
    ]
    ax.set_title(model, fontsize="medium", loc="left")
    ax.set_title(", ".join(remarks), fontsize="small", loc="right")
    return ax


def effect_limit(differences: pd.DataFrame) -> float:
    """End of a colour scale for these effects, one for all models: the largest, at least 0.1 and at most 4."""
    sizes = differences.loc[differences["effect_kind"].eq("d").fillna(False), "effect"].abs()
    sizes = sizes[np.isfinite(sizes)]
    return float(min(_CAP, max(0.1, sizes.max()))) if len(sizes) else 0.1


def heatmap_size(n_measures: int, n_places: int) -> tuple[float, float]:
    """Size of a figure of `difference_heatmap`, in inches."""
    return max(6.5, 3.6 + 0.11 * n_places), 1.3 + 0.26 * n_measures


def trajectory(layers: pd.DataFrame, measure: str = "exchange_asymmetry", *, ax: Axes | None = None) -> Axes:
    """One measure over the models in the order given, as revisions of a training run: a line per layer, and the mean of layers.

    Args:
        layers: the layer frame of a comparison.
        measure: a neuron measure, or a column of the frame.
        ax: where to draw.

    Raises:
        BadOption: there is no such measure, or no value of it.
    """
    column = f"{measure}_mean" if f"{measure}_mean" in layers else measure
    _require(layers, ["model", "tower", "group", "layer", "relative_depth", column], "layers")
    if layers[column].isna().all():
        raise BadOption(f"every value of {column} is missing: there is nothing to draw")
    names = list(dict.fromkeys(layers["model"]))
    place = {name: index for index, name in enumerate(names)}
    ax = _axes(ax, (max(5.5, 3.4 + 0.4 * len(names)), 3.6))
    scale = mpl.colors.Normalize(0.0, 1.0)
    for _, rows in layers.groupby(["tower", "group", "layer"], sort=False):
        colour = mpl.colormaps["viridis"](scale(float(rows["relative_depth"].iloc[0])))
        ax.plot(rows["model"].map(place), rows[column].to_numpy(dtype=float), "-", color=colour, lw=0.8, alpha=0.8)
    means = layers.groupby("model", sort=False)[column].mean()
    ax.plot(
        [place[name] for name in means.index],
        means.to_numpy(dtype=float),
        "o-",
        color="black",
        lw=2.0,
        ms=4,
        label="mean of layers",
    )
    _label_models(ax, names)
    _scaled(ax, layers[column])
    ax.set_ylabel(measure)
    ax.figure.colorbar(mpl.cm.ScalarMappable(scale, "viridis"), ax=ax, label="relative depth of the layer")
    ax.legend(fontsize="small", frameon=False, loc="best")
    return ax


def _label_models(ax: Axes, names: Sequence[str]) -> None:
    shown = label_positions(len(names), 16)
    turned = max(map(len, names)) > 6
    words = [names[index] for index in shown]
    ax.set_xticks(shown, words, rotation=30 if turned else 0, ha="right" if turned else "center")


def angle_trajectory(mlps: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """How far neurons turned from the base, over the models in the order given: medians over MLPs, and their 5-95 % band.

    Args:
        mlps: the frame of a comparison.
        ax: where to draw.

    Raises:
        BadOption: no angle is there to draw.
    """
    _require(mlps, ["model", *(f"angle_{letter}" for letter in _FACTORS)], "mlps")
    names = list(dict.fromkeys(mlps["model"].astype(str)))
    if mlps["angle_q"].isna().all():
        raise BadOption("no neuron was followed: there is nothing to draw")
    ax = _axes(ax, (max(5.5, 3.4 + 0.4 * len(names)), 3.6))
    palette, x, drawn = sns.color_palette("colorblind"), np.arange(len(names)), []
    for letter, (label, colour) in _FACTORS.items():
        by_model = mlps.groupby(mlps["model"].astype(str), sort=False)[f"angle_{letter}"]
        low, middle, high = (
            by_model.quantile(share).reindex(names).to_numpy(dtype=float) for share in (0.05, 0.5, 0.95)
        )
        ax.fill_between(x, low, high, color=palette[colour], alpha=0.15, lw=0)
        ax.plot(x, middle, "o-", color=palette[colour], lw=1.4, ms=4, label=label)
        drawn.append(high)
    _label_models(ax, names)
    _degrees(ax, "y", np.concatenate([[0.0], *drawn]))
    ax.set_ylabel("angle, median of neurons")
    _legend(ax)
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
    _require(mlps, ["base", "model", "tower", "layer", "expert", "angle_q", "rounding_angle_q_model"], "mlps")
    rows, model = _one_model(mlps, model)
    rows = rows[rows["angle_q"].notna()]
    if rows.empty:
        raise BadOption(f"no neuron of {model} was followed: there is nothing to draw")
    labels = [str(layer) for layer in rows["layer"]]
    if rows["expert"].notna().any():
        labels = [
            f"{layer} {'' if pd.isna(expert) else expert}".rstrip()
            for layer, expert in zip(rows["layer"], rows["expert"], strict=True)
        ]
    ax = _axes(ax, (8.2, 3.4))
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
    ax.set_xticks(shown, [labels[index] for index in shown], rotation=90 if max(map(len, labels)) > 3 else 0)
    ax.set_xlabel("layer")
    _degrees(ax, "y", np.concatenate(drawn))
    ax.set_ylabel("angle, median of neurons")
    ax.set_title(model, fontsize="medium", loc="left")
    ax.margins(x=0.01)
    _legend(ax)
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
    _require(neurons, ["base", "model", "angle_q", "rounding_angle_q_model"], "neurons")
    rows, model = _one_model(neurons, model)
    angles = {letter: rows[f"angle_{letter}"].dropna().to_numpy(dtype=float) for letter in _FACTORS}
    if not any(map(len, angles.values())):
        raise BadOption(f"no neuron of {model} was followed: there is nothing to draw")
    ax = _axes(ax, (7.0, 3.6))
    together = np.concatenate([*angles.values()])
    logarithmic = _far_apart(together)
    low = max(together[together > 0].min(initial=180.0), _FLOOR) / 1.15
    high = max(together.max(), _FLOOR) * 1.15
    bins = np.geomspace(low, high, 81) if logarithmic else np.linspace(0, high, 81)
    palette, middles = sns.color_palette("colorblind"), []
    for letter, (label, colour) in _FACTORS.items():
        shown = np.maximum(angles[letter], low * 1.01) if logarithmic else angles[letter]
        ax.hist(shown, bins=bins, histtype="stepfilled", color=palette[colour], alpha=0.25, lw=0)
        ax.hist(shown, bins=bins, histtype="step", color=palette[colour], lw=1.2, label=label)
        for side, style in _SIDES.items():
            expected = float(rows[f"rounding_angle_{letter}_{side}"].median())
            if _worth_drawing(rows, letter, side):
                ax.axvline(expected, color=palette[colour], ls=style, lw=1.2)
                middles.append(expected)
    _explain_sides(ax, rows, model)
    _degrees(ax, "x", np.array([*middles, low if logarithmic else 0.0, high]))
    ax.set_xlabel("angle between the two models")
    ax.set_ylabel("neurons")
    ax.set_title(model, fontsize="medium", loc="left")
    _legend(ax)
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
    _require(neurons, ["model", "movement", "rounding"], "neurons")
    rows, model = _one_model(neurons, model)
    x, y = (rows[name].to_numpy(dtype=float) for name in ("rounding", "movement"))
    known = (x > 0) & (y > 0)
    if not known.any():
        raise BadOption(
            f"no neuron of {model} has both a movement and what rounding explains: there is nothing to draw"
        )
    x, y = x[known], y[known]
    ax = _axes(ax, (6.4, 4.6))
    ax.set(xscale="log", yscale="log")
    if len(x) > 5000:
        drawn = ax.hexbin(
            x, y, gridsize=70, xscale="log", yscale="log", bins="log", cmap="viridis", mincnt=1, linewidths=0.1
        )
        ax.figure.colorbar(drawn, ax=ax, label="neurons")
    else:
        points = ax.scatter(x, y, c=rows["layer"].to_numpy()[known], cmap="viridis", s=8, linewidth=0, rasterized=True)
        ax.figure.colorbar(points, ax=ax, label="layer")
    ends = np.array([x.min() / 1.5, x.max() * 1.5])
    ax.plot(ends, ends, color="0.3", lw=0.9, label="rounding explains it")
    ax.plot(ends, 1.5 * ends, color="0.3", lw=0.9, ls="--", label="1.5 times that")
    ax.set_xlim(*ends)
    _few_ticks(ax.xaxis, ends)
    _few_ticks(ax.yaxis, np.concatenate([y, ends]))
    ax.set(xlabel="movement by rounding alone", ylabel="movement  |T' - T| / |T|")
    ax.set_title(model, fontsize="medium", loc="left")
    ax.legend(fontsize="small", frameon=False, loc="best")
    return ax


def _worth_drawing(rows: pd.DataFrame, letter: str, side: str) -> bool:
    """Whether rounding in that file is not nothing beside that in the other."""
    here, there = (float(rows[f"rounding_angle_{letter}_{each}"].median()) for each in (side, *({*_SIDES} - {side})))
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


def _few_ticks(axis: Axis, values: np.ndarray) -> None:
    """Plain numbers along a logarithmic axis, at 1, 2 and 5 of every decade where there is room for them."""
    decades = np.log10(np.nanmax(values) / np.nanmin(values))
    axis.set_major_locator(MaxNLocator(4) if decades < 0.7 else LogLocator(subs=(1, 2, 5) if decades < 2 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _degrees(ax: Axes, which: str, values: np.ndarray) -> None:
    """Degrees along an axis, from 0, or logarithmic where they are far apart."""
    axis = getattr(ax, f"{which}axis")
    if (values > 0).all() and _far_apart(values):
        getattr(ax, f"set_{which}scale")("log")
        _few_ticks(axis, values)
    else:
        getattr(ax, f"set_{which}lim")(0, max(1.05 * np.nanmax(values), _FLOOR))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}°"))
