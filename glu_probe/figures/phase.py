"""The plane between a bilinear layer and a ReLU one."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from ..activations import activation as gp_activation
from ..measures.gaussian import gaussian_table
from .axes import Across, axes_or_new, layer_labels
from .columns import nothing, only_activation, require
from .neurons import density

# what a gate is at an end of the scale
_ENDS = {"linear": "bilinear", "relu": "ReLU", "constant": "linear in b", "step": "step", "sign": "sign"}
_LEVELS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
_MARKERS = "osD^vP"


def phase_diagram(frame: pd.DataFrame | None = None, *, activation: str | None = None, ax: Axes | None = None) -> Axes:
    """Where layers or neurons sit between a bilinear layer (left) and a ReLU one (right).

    Contours: exchange_asymmetry of a neuron with gate scale s = |q| (across) and rho = |cos(q, k)| (up) on Gaussian
    input. On top, one point per layer at its medians, or the density of all neurons.

    Args:
        frame: the layer frame or the neuron frame, or None for the contours alone.
        activation: the gate; taken from the layer frame if that names one only. Then layers whose function was not
            measured are left out: the scale of their input is not known.
        ax: where to draw.

    Raises:
        BadOption: no activation is given or found, or nothing can be placed.
    """
    if activation is None:
        activation = only_activation(frame)
        assert frame is not None  # or no activation was found in it
        if "exchange_asymmetry_mean" in frame:
            frame = frame[frame["exchange_asymmetry_mean"].notna()]
            if frame.empty:
                raise nothing("exchange_asymmetry")
    ax = axes_or_new(ax, (7.0, 4.6))
    points, names = _placed(frame)
    low, high, top = 0.1, 10.0, 1.0
    if points is not None:
        x, y = (points[name].to_numpy(dtype=float) for name in names)
        low, high = min(0.2, x.min() / 1.3), max(5.0, x.max() * 1.3)
        top = next((top for top in (0.25, 0.5) if y.max() < 0.9 * top), 1.0)  # medians crowd at the bottom
    _contours(ax, activation, low, high)
    ax.set_xscale("log")
    if points is not None and names[0] == "query_norm":
        density(ax, x, y, (True, False))
    ax.set(xlim=(low, high), ylim=(0, top), xlabel="gate scale  s = |q|", ylabel="ρ = |cos(q, k)|")
    if points is not None and names[0] != "query_norm":
        _layers(ax, points, names)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_title(f"exchange asymmetry of {activation} neurons", fontsize="medium")
    _ends(ax, activation)
    return ax


def _placed(frame: pd.DataFrame | None) -> tuple[pd.DataFrame | None, list[str]]:
    """The rows that have a place, and the columns that say where: of layers or of neurons."""
    if frame is None:
        return None, []
    names = ["query_norm_median", "abs_cos_qk_median"] if "query_norm_median" in frame else ["query_norm", "abs_cos_qk"]
    require(frame, ["layer", *names])
    known = frame[frame[names[0]].gt(0) & np.isfinite(frame[names[0]].astype(float)) & frame[names[1]].notna()]
    if known.empty:
        raise nothing(" or ".join(names))
    return known, names


def _contours(ax: Axes, activation: str, low: float, high: float) -> None:
    scale, rho = np.geomspace(low, high, 160), np.linspace(0, 1, 120)
    grid_scale, grid_rho = np.meshgrid(scale, rho)
    values = gaussian_table(activation)(grid_scale.ravel(), grid_rho.ravel())["exchange_asymmetry"]
    values = values.reshape(grid_rho.shape)
    levels = [level for level in _LEVELS if level < values.max()]
    ax.contourf(scale, rho, values, levels=[0, *levels, 1], cmap="Greys", alpha=0.4, norm=PowerNorm(0.5, 0, 0.6))
    if levels:
        lines = ax.contour(scale, rho, values, levels=levels, colors="0.35", linewidths=0.6)
        ax.clabel(lines, fontsize=7, fmt="%g")


def _layers(ax: Axes, points: pd.DataFrame, names: list[str]) -> None:
    """A point per layer, joined in order, in a marker for every stack and expert group; the extreme ones numbered."""
    across = Across.of(points)
    x, y, layer = (across.frame[name].to_numpy(dtype=float) for name in (*names, "layer"))
    limits = {"vmin": layer.min(), "vmax": layer.max()}
    drawn, size = None, 34 if len(points) <= 40 else 18
    for number, block in enumerate(across.blocks):
        ax.plot(x[block], y[block], color="0.3", lw=0.5, zorder=2)
        drawn = ax.scatter(
            x[block], y[block], c=layer[block], cmap="viridis", s=size, edgecolor="0.2", linewidth=0.5, zorder=3,
            marker=_MARKERS[number % len(_MARKERS)], label=_block_name(across, block), **limits,
        )  # fmt: skip
    if len(across.blocks) > 1:
        ax.legend(fontsize="small", loc="center right", framealpha=0.75)
    if drawn is not None and layer.max() > layer.min():
        ax.figure.colorbar(drawn, ax=ax, label="layer", ticks=MaxNLocator(integer=True))
    text, spots = layer_labels(across.frame), ax.transData.transform(np.column_stack([x, y]))
    written: list[int] = []
    for position in dict.fromkeys((0, len(x) - 1, int(y.argmax()), int(x.argmin()), int(x.argmax()))):
        apart = np.abs(spots[written] - spots[position])
        if not ((apart[:, 0] < 8 * len(text[position])) & (apart[:, 1] < 12)).any():  # or they could not be read
            written.append(position)
            ax.annotate(
                text[position], (x[position], y[position]), xytext=(5, 4), textcoords="offset points", fontsize=8
            )


def _block_name(across: Across, block: slice) -> str:
    first = across.frame.iloc[block.start]
    parts = [first["tower"]] if across.frame["tower"].nunique() > 1 else []
    return " ".join([*parts, first["group"]])


def _ends(ax: Axes, activation: str) -> None:
    """What the gate is to the left and to the right."""
    tends = gp_activation(activation)
    for end, position, align in ((tends.small, 0.01, "left"), (tends.large, 0.99, "right")):
        name = end and _ENDS.get(end.activation)
        if name:
            arrow = f"← {name}" if align == "left" else f"{name} →"
            ax.text(
                position, 0.985, arrow, transform=ax.transAxes, ha=align, va="top", fontsize=9, style="italic",
                bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.5},
            )  # fmt: skip
