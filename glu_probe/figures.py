"""Pictures of the frames: a frame goes in, matplotlib Axes come out.

Nothing here opens a window, changes a style or keeps a figure: with `ax` given, only that is drawn on; without, a new
figure is made the way seaborn makes one. What is missing in a frame is drawn as missing.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, PowerNorm, SymLogNorm
from matplotlib.ticker import FuncFormatter

from .activations import activation as gp_activation
from .errors import BadOption
from .frames import class_column
from .measures.gaussian import gaussian_table
from .measures.io_classes import IO_CLASSES

HEATMAP_MEASURES = (
    "query_norm_median",
    "abs_cos_qk_mean",
    "abs_cos_qk_effect",
    "cos_kv_mean",
    "abs_cos_qv_mean",
    "exchange_asymmetry_relu_ratio",
    "exchange_asymmetry_mean",
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
_MISSING = "#d9d9d9"
_PLACES = ("tower", "group", "activation", "model", "layers", "expert", "neurons", "intervention")
# what a gate is at an end of the scale
_ENDS = {"linear": "bilinear", "relu": "ReLU", "constant": "linear in b", "step": "step", "sign": "sign"}
_LABELS_AT_MOST = 20
_BINS = 100


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")[1]


def _require(frame: pd.DataFrame, columns: Sequence[str]) -> None:
    absent = [name for name in columns if name not in frame]
    if absent:
        near = difflib.get_close_matches(absent[0], list(map(str, frame.columns)), n=3)
        raise BadOption(
            f"the frame has no column {absent[0]!r}",
            hint=(f"Did you mean {' or '.join(near)}? " if near else "")
            + "Pass report.layers, report.neurons or the frame of `causal` as it is",
        )
    text = [name for name in columns if name not in _PLACES and not pd.api.types.is_numeric_dtype(frame[name])]
    if text:
        raise BadOption(f"column {text[0]!r} holds no numbers")
    if frame.empty:
        raise BadOption("the frame has no rows: there is nothing to draw")


def layer_labels(layers: pd.DataFrame) -> list[str]:
    """A label per row: the layer, with tower and expert group where there are several."""
    groups = layers["group"].where(layers["group"] != "none")
    labels = layers["layer"].astype(str)
    if layers["layer"].duplicated().any():
        labels = labels + groups.fillna("").map(lambda group: f" {group}".rstrip())
    if layers["tower"].nunique() > 1:
        labels = layers["tower"].astype(str) + " " + labels
    return labels.tolist()


def label_positions(count: int, at_most: int = _LABELS_AT_MOST) -> list[int]:
    """Which of `count` positions to label: a constant step from the first, and always the last.

    >>> label_positions(80)
    [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 79]
    """
    if count <= at_most:
        return list(range(count))
    step = next(step for step in (2, 5, 10, 20, 50, 100, 200, 500, count) if count / step <= at_most)
    inner = [position for position in range(0, count, step) if count - 1 - position >= step]
    return [*inner, count - 1]


def _label_layers(ax: Axes, labels: Sequence[str], offset: float = 0.0) -> None:
    positions = label_positions(len(labels))
    longest = max(len(labels[position]) for position in positions)
    ax.set_xticks([position + offset for position in positions])
    ax.set_xticklabels([labels[position] for position in positions], rotation=90 if longest > 3 else 0)
    ax.set_xlabel("layer")


def layer_heatmap(layers: pd.DataFrame, *, measures: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
    """Layers across, measures down. Each row is scaled to its own range, which its label states.

    Args:
        layers: the layer frame.
        measures: columns to show; by default `HEATMAP_MEASURES` as far as they are there.
        ax: where to draw.

    Raises:
        BadOption: a column is absent, or no value is there to draw.
    """
    _require(layers, ["layer", "tower", "group", *(measures or ())])
    chosen = list(measures or (name for name in HEATMAP_MEASURES if name in layers))
    values = layers[chosen].to_numpy(dtype=float).T
    values = np.where(np.isfinite(values), values, np.nan)
    if np.isnan(values).all():
        raise BadOption(f"every value of {', '.join(chosen)} is missing: there is nothing to draw")
    ax = _axes(ax, (max(6.0, 3.2 + 0.11 * len(layers)), 1.2 + 0.28 * len(chosen)))
    scaled, labels = np.full_like(values, np.nan), []
    for row, name in enumerate(chosen):
        known = values[row][~np.isnan(values[row])]
        if known.size:
            low, high = known.min(), known.max()
            scaled[row] = (
                (values[row] - low) / (high - low) if high > low else np.where(np.isnan(values[row]), np.nan, 0.5)
            )
            labels.append(f"{name}  {low:.3g} … {high:.3g}")
        else:
            labels.append(f"{name}  missing")
    sns.heatmap(
        scaled, ax=ax, cmap="viridis", vmin=0, vmax=1, linewidths=0, mask=np.isnan(scaled),
        xticklabels=False, yticklabels=labels, cbar_kws={"label": "lowest … highest of the row", "ticks": []},
    )  # fmt: skip
    ax.set_facecolor(_MISSING)
    _label_layers(ax, layer_labels(layers), offset=0.5)
    ax.tick_params(axis="y", rotation=0)
    if np.isnan(scaled).any():
        ax.set_title("grey: missing", fontsize="small", loc="right")
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
    _require(neurons, ["layer", "tower", measure])
    means, layers = _expert_means(neurons, measure, tower)
    ax = _axes(ax, expert_grid_size(len(layers), len(means)))
    sns.heatmap(
        means, ax=ax, cmap="viridis", linewidths=0, mask=np.isnan(means), xticklabels=False, yticklabels=False,
        cbar_kws={"label": f"mean {measure}"}, rasterized=True,
    )  # fmt: skip
    ax.set_facecolor(_MISSING)
    _label_layers(ax, [str(layer) for layer in layers], offset=0.5)
    experts = label_positions(len(means))
    ax.set_yticks([expert + 0.5 for expert in experts], [str(expert) for expert in experts], rotation=0)
    ax.set_ylabel("expert")
    if np.isnan(means).any():
        ax.set_title("grey: missing", fontsize="small", loc="right")
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
        raise BadOption(f"there are no routed experts{f' in {tower!r}' if tower else ''}: there is nothing to draw")
    here = towers == tower
    layers, column = np.unique(neurons["layer"].to_numpy()[here], return_inverse=True)
    expert, values = expert[here], neurons[measure].to_numpy(dtype=float)[here]
    shape, used = (expert.max() + 1, len(layers)), (expert >= 0) & np.isfinite(values)
    cells = expert[used] * len(layers) + column[used]
    count = np.bincount(cells, minlength=shape[0] * shape[1])
    total = np.bincount(cells, values[used], minlength=shape[0] * shape[1])
    if not count.any():
        raise BadOption(f"every value of {measure} is missing: there is nothing to draw")
    means = np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
    return means.reshape(shape), layers.tolist()


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
    _require(layers, ["layer", "tower", "group", *columns.values()])
    if layers[columns["mean"]].isna().all():
        raise BadOption(f"every value of {measure} is missing: there is nothing to draw")
    ax = _axes(ax, (8.0, 3.2))
    colour = sns.color_palette()[0]
    band = [layers[columns[end]].to_numpy(dtype=float) for end in ("q05", "q95")]
    ax.fill_between(np.arange(len(layers)), *band, color=colour, alpha=0.18, lw=0, label="5-95 %")
    # not seaborn's lineplot: it draws across layers that are missing
    for column, style, width, line_colour, label in (
        (columns["mean"], ".-", 1.5, colour, "mean"),
        (columns["median"], "-", 0.8, colour, "median"),
        (f"{measure}_weighted", "--", 1.0, "black", "mean weighted by output energy"),
        (f"{measure}_null_mean", ":", 1.4, "black", "mean of mismatched pairs"),
        (f"{measure}_output", "-.", 1.0, "black", "of the layer's output"),
    ):
        if column in layers and layers[column].notna().any():
            values = layers[column].to_numpy(dtype=float)
            ax.plot(np.arange(len(layers)), values, style, color=line_colour, lw=width, label=label)
    ax.set_ylabel(measure)
    return _finish_lines(ax, layers)


def layer_lines(layers: pd.DataFrame, columns: Sequence[str], *, ax: Axes | None = None) -> Axes:
    """Columns of the layer frame as lines through the layers, on one axis.

    Args:
        layers: the layer frame.
        columns: of it, of one kind.
        ax: where to draw.

    Raises:
        BadOption: a column is absent, or all values are missing.
    """
    _require(layers, ["layer", "tower", "group", *columns])
    if layers[list(columns)].isna().to_numpy().all():
        raise BadOption(f"every value of {', '.join(columns)} is missing: there is nothing to draw")
    ax = _axes(ax, (8.0, 3.2))
    for column, colour in zip(columns, sns.color_palette("colorblind", len(columns)), strict=True):
        ax.plot(np.arange(len(layers)), layers[column].to_numpy(dtype=float), ".-", color=colour, label=column)
    ax.set_ylim(bottom=0)
    return _finish_lines(ax, layers)


def _finish_lines(ax: Axes, layers: pd.DataFrame) -> Axes:
    ax.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.margins(x=0.01)
    _label_layers(ax, layer_labels(layers))
    return ax


def phase_diagram(frame: pd.DataFrame | None = None, *, activation: str | None = None, ax: Axes | None = None) -> Axes:
    """Where layers or neurons sit between a bilinear layer (left) and a ReLU one (right).

    Contours: exchange_asymmetry of a neuron with gate scale s = |q| (across) and rho = |cos(q, k)| (up) on Gaussian
    input. On top, one point per layer at its medians, or the density of all neurons.

    Args:
        frame: the layer frame or the neuron frame, or None for the contours alone.
        activation: the gate; taken from the layer frame if that names one only.
        ax: where to draw.

    Raises:
        BadOption: no activation is given or found, or nothing can be placed.
    """
    activation = activation or _only_activation(frame)
    ax = _axes(ax, (7.0, 4.6))
    x, y, by_layer = _placed(frame)
    low, high = (0.1, 10.0) if x is None else (min(0.1, x.min() / 1.3), max(10.0, x.max() * 1.3))
    scale, rho = np.geomspace(low, high, 160), np.linspace(0, 1, 120)
    grid_scale, grid_rho = np.meshgrid(scale, rho)
    values = gaussian_table(activation)(grid_scale.ravel(), grid_rho.ravel())["exchange_asymmetry"].reshape(
        grid_rho.shape
    )
    levels = [
        level for level in (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4) if level < values.max()
    ]
    ax.contourf(scale, rho, values, levels=[0, *levels, 1], cmap="Greys", alpha=0.4, norm=PowerNorm(0.5, 0, 0.6))
    if levels:
        lines = ax.contour(scale, rho, values, levels=levels, colors="0.35", linewidths=0.6)
        ax.clabel(lines, fontsize=7, fmt="%g")
    ax.set_xscale("log")
    if x is not None and by_layer is None:
        _density(ax, x, y, (True, False))
    elif x is not None:
        ax.plot(x, y, color="0.3", lw=0.5, zorder=2)
        points = ax.scatter(x, y, c=by_layer, cmap="viridis", s=34, edgecolor="white", linewidth=0.6, zorder=3)
        ax.figure.colorbar(points, ax=ax, label="layer")
        for position in sorted({0, len(x) - 1, int(x.argmin()), int(x.argmax()), int(y.argmax())}):
            ax.annotate(
                str(by_layer[position]),
                (x[position], y[position]),
                xytext=(5, 4),
                textcoords="offset points",
                fontsize=8,
            )
    top = 1.0 if y is None or y.max() > 0.45 else 0.5  # medians of layers crowd at the bottom
    ax.set(xlim=(low, high), ylim=(0, top), xlabel="gate scale  s = |q|", ylabel="ρ = |cos(q, k)|")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_title(f"exchange asymmetry of {activation} neurons", fontsize="medium")
    tends = gp_activation(activation)
    for end, position, align in ((tends.small, 0.01, "left"), (tends.large, 0.99, "right")):
        name = end and _ENDS.get(end.activation)
        if name:
            arrow = f"← {name}" if align == "left" else f"{name} →"
            ax.text(
                position,
                0.985,
                arrow,
                transform=ax.transAxes,
                ha=align,
                va="top",
                fontsize=9,
                style="italic",
                bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.5},
            )
    return ax


def _only_activation(frame: pd.DataFrame | None) -> str:
    named = set() if frame is None or "activation" not in frame else set(frame["activation"].dropna())
    if len(named) != 1:
        raise BadOption(
            "the activation is not known" if not named else f"the layers have several: {', '.join(sorted(named))}",
            hint='Pass activation="silu" or the like',
        )
    return named.pop()


def _placed(frame: pd.DataFrame | None) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Scale and correlation to draw, and the layer of each point where points are layers."""
    if frame is None:
        return None, None, None
    by_layer = "query_norm_median" in frame
    names = ["query_norm_median", "abs_cos_qk_median"] if by_layer else ["query_norm", "abs_cos_qk"]
    _require(frame, ["layer", *names])
    known = frame[frame[names[0]].gt(0) & frame[names[1]].notna()]
    if known.empty:
        raise BadOption(f"every value of {' or '.join(names)} is missing: there is nothing to draw")
    x, y = (known[name].to_numpy(dtype=float) for name in names)
    return x, y, known["layer"].to_numpy() if by_layer else None


def _density(ax: Axes, x: np.ndarray, y: np.ndarray, logarithmic: tuple[bool, bool]) -> None:
    """Numbers of neurons in the plane, on a logarithmic colour scale that has two ends whatever the numbers are."""
    axes = [np.log10(values) if log else values for values, log in zip((x, y), logarithmic, strict=True)]
    most = np.histogram2d(*axes, bins=_BINS)[0].max()
    sns.histplot(
        x=x, y=y, ax=ax, bins=_BINS, log_scale=logarithmic, cmap="viridis", cbar=True,
        cbar_kws={"label": "neurons"}, norm=LogNorm(1, max(2.0, most)), vmin=None, vmax=None,
    )  # fmt: skip


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
    _require(neurons, [x, y])
    if hue not in neurons:
        raise BadOption(f"the frame has no column {hue!r}", hint="Pass report.neurons as it is")
    known = neurons[
        np.isfinite(neurons[x].astype(float)) & np.isfinite(neurons[y].astype(float)) & neurons[hue].notna()
    ]
    logarithmic = {name: name.endswith(("norm", "gain", "ratio", "risk", "energy")) for name in (x, y)}
    for name in (x, y):
        if logarithmic[name]:
            known = known[known[name] > 0]
    if known.empty:
        raise BadOption(f"no neuron has both {x} and {y}: there is nothing to draw")
    ax = _axes(ax, (6.0, 4.6))
    if len(known) > 20_000:
        _density(ax, *(known[name].to_numpy(dtype=float) for name in (x, y)), (logarithmic[x], logarithmic[y]))
    else:
        sns.scatterplot(
            data=known, x=x, y=y, hue=hue, palette="viridis" if known[hue].dtype.kind in "iuf" else None, s=6,
            alpha=0.6, linewidth=0, ax=ax, rasterized=True,
        )  # fmt: skip
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


_CLASS_COLOURS = {
    "strengthening": "#08519c", "atypical strengthening": "#3182bd", "conditional strengthening": "#6baed6",
    "atypical conditional strengthening": "#bdd7e7", "proportional change": "#31a354",
    "atypical proportional change": "#a1d99b", "orthogonal output": "#e0e0e0",
    "atypical conditional weakening": "#fcbba1", "conditional weakening": "#fb6a4a", "atypical weakening": "#de2d26",
    "weakening": "#a50f15",
}  # fmt: skip


def class_bars(layers: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Fractions of the input-output classes in every layer, stacked; classes that do not occur are left out.

    Args:
        layers: the layer frame.
        ax: where to draw.

    Raises:
        BadOption: the frame has no class columns, or all are missing.
    """
    columns = {name: class_column(name) for name in IO_CLASSES}
    _require(layers, ["layer", "tower", "group", *columns.values()])
    values = layers[list(columns.values())].astype(float)
    if values.isna().to_numpy().all():
        raise BadOption("every input-output class is missing: there is nothing to draw")
    ax = _axes(ax, (7.6, 3.6))
    bottom = np.zeros(len(layers))
    for name, colour in _CLASS_COLOURS.items():
        height = values[columns[name]].fillna(0.0).to_numpy()
        if height.max() > 0:
            ax.bar(np.arange(len(layers)), height, bottom=bottom, width=0.92, color=colour, label=name)
            bottom = bottom + height
    missing = values.isna().all(axis=1).to_numpy()
    if missing.any():
        ax.bar(
            np.flatnonzero(missing), 1.0, width=0.92, facecolor="none", edgecolor="0.6", hatch="///", label="missing"
        )
    ax.set(ylim=(0, 1), xlim=(-0.6, len(layers) - 0.4), ylabel="fraction of neurons")
    _label_layers(ax, layer_labels(layers))
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False
    )
    return ax


# -- causal costs ---------------------------------------------------------------------------------

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
    ax = _axes(ax, causal_grid_size(*values.shape))
    most = np.nanmax(np.abs(values)) or 1.0
    if value.startswith("delta") and np.nanmin(values) < 0:
        norm, cmap = SymLogNorm(most / 100, vmin=-most, vmax=most), "RdBu_r"
    else:
        positive = values[values > 0]
        low = max(positive.min(initial=most / 10), most / 10**_DECADES)
        norm, cmap = LogNorm(min(low, most / 2), most), "viridis"
        values = np.where(np.isnan(values), np.nan, np.maximum(values, norm.vmin))
    sns.heatmap(
        values, ax=ax, cmap=cmap, norm=norm, linewidths=0, mask=np.isnan(values), xticklabels=False,
        yticklabels=False, cbar_kws={"label": f"{value} [nats a token]" if "gap" not in value else value},
    )  # fmt: skip
    ax.set_facecolor(_MISSING)
    _label_layers(ax, list(table.columns), offset=0.5)
    ax.set_yticks(np.arange(len(table)) + 0.5, list(table.index), rotation=0)
    if np.isnan(values).any():
        ax.set_title("grey: missing", fontsize="small", loc="right")
    return ax


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
    ax = _axes(ax, (8.4, 3.8))
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
    ax.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.margins(x=0.01)
    _label_layers(ax, list(table.columns))
    return ax


def _costs_table(costs: pd.DataFrame, value: str) -> pd.DataFrame:
    """Interventions down, layers across, both in the order of the frame."""
    _require(costs, ["model", "layers", "expert", "neurons", "intervention", value])
    if costs["model"].nunique() > 1:
        raise BadOption(f"the frame has {costs['model'].nunique()} models", hint="Pass the rows of one")
    if costs[value].isna().all():
        raise BadOption(f"every value of {value} is missing: there is nothing to draw")
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


def figure_axes(size: tuple[float, float]) -> Axes:
    """Axes of a figure that no window manager knows: for files, where no display need be."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = mpl.figure.Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.subplots()
