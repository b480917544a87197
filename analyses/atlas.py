"""Where does each layer sit between bilinear and ReLU, and do its two branches read the same directions?

SmolLM2-135M-Instruct (SwiGLU) lies between the ends: its layers stand at 0.58 (0.55 to 0.61) on the way from bilinear
(0) to ReLU (1), nearly all of them between 0.52 and 0.72. Layer 0 is the exception, at 0.25, with more than half of
its neurons near bilinear; elsewhere 2 % at most are near that end, and 15 % at most, in the last layer, near ReLU.
Gemma 3 270M (GeGLU) is by its weights a ReLU model: 0.995 (0.993 to 0.998), every neuron at the ReLU end. That is said
of isotropic input: on text its gates work at a twentieth of that scale and its late layers are nearer to bilinear
(`gaussian_or_text.py`).

What places a layer is the scale of its gate, as it must where the activation is fixed (rank correlation over layers
0.99 (0.95 to 1.00) and 0.99 (0.95 to 1.00)), not how its branches are aligned (-0.13 (-0.49 to 0.26) in SmolLM2).
Within a layer it is the other way round: neurons of one layer share a scale and differ by |cos(q, k)|, with which
their asymmetry falls (-0.90 (-0.92 to -0.89) and -1.00 (-1.00 to -1.00)).

Gate and up of one neuron read more alike than mismatched rows of the same layer, in every layer of both models: mean
|cos(q, k)| lies 0.065 (0.055 to 0.074) and 0.050 (0.041 to 0.058) above theirs. In Gemma more than half of |cos(q,
k)|, 0.08 of 0.13, is what any two rows of a layer have in common; that grows with depth.

    python analyses/atlas.py [MODEL...] [--out analyses/results/atlas] [--figures analyses/figures]

From the weights alone, for Gaussian input. The place of a layer is `exchange_asymmetry_relu_ratio`: 0 for a bilinear
layer, 1 for ReGLU. A neuron is called bilinear below a quarter of what a ReLU neuron of the same directions has, ReLU
above three quarters. Alignment is the mean |cos(q, k)| of a layer, less that of mismatched rows of the same layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from study import (
    arguments,
    axes_grid,
    bootstrap,
    colored,
    finish,
    gated,
    one_line_errors,
    rank_correlation,
    reports,
    show,
    sign_test,
    write,
)

import glu_probe as gp

BILINEAR, RELU = 0.25, 0.75
COLUMNS = (
    "exchange_asymmetry_relu_ratio", "exchange_asymmetry_mean", "bilinear_share_mean", "query_norm_q05",
    "query_norm_median", "query_norm_q95", "abs_cos_qk_mean", "abs_cos_qk_null_mean", "abs_cos_qk_null_isotropic_mean",
    "abs_cos_qk_effect",
)  # fmt: skip


def relu_ratios(neurons: pd.DataFrame) -> np.ndarray:
    """Exchange asymmetry of each neuron over that of a ReLU with the same |cos(q, k)|.

    Missing where it is missing, and where |cos| is so near 1 that both vanish.
    """
    rho = neurons["abs_cos_qk"].to_numpy(dtype=float)
    known = np.isfinite(rho)
    relu = np.full(len(rho), np.nan)
    relu[known] = gp.gaussian_measures("relu", 1.0, rho[known])["exchange_asymmetry"]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(relu > 1e-3, neurons["exchange_asymmetry"].to_numpy(dtype=float) / relu, np.nan)


def layer_frame(report: gp.Report) -> pd.DataFrame:
    """A row per layer: its place, scale and alignment, and the shares of its neurons at the two ends."""
    layers = gated(report.layers)
    out = layers[["layer", "depth", *COLUMNS]].copy()
    neurons = report.neurons.assign(ratio=relu_ratios(report.neurons))
    known = neurons[neurons["ratio"].notna()]
    by_layer = known.assign(bilinear=known["ratio"] < BILINEAR, relu=known["ratio"] > RELU).groupby("layer")
    shares = by_layer[["bilinear", "relu"]].mean()
    out["bilinear_neurons"] = out["layer"].map(shares["bilinear"])
    out["relu_neurons"] = out["layer"].map(shares["relu"])
    for name in ("query_norm", "abs_cos_qk"):
        within = known.groupby("layer")[["exchange_asymmetry", name]].apply(
            lambda part: rank_correlation(*part.to_numpy().T)
        )
        out[f"asymmetry_follows_{name}"] = out["layer"].map(within)
    return out


def summary(layers: pd.DataFrame) -> pd.DataFrame:
    """What the layers amount to, each figure with its interval over layers."""
    column = {name: layers[name].to_numpy(dtype=float) for name in layers.columns}
    place, depth = column["exchange_asymmetry_relu_ratio"], column["depth"]
    scale, alignment, null = (column[n] for n in ("query_norm_median", "abs_cos_qk_mean", "abs_cos_qk_null_mean"))
    above, of, p = sign_test(alignment - null)
    figures = {
        "place between bilinear (0) and ReLU (1)": bootstrap(np.mean, place),
        "exchange asymmetry of neurons": bootstrap(np.mean, column["exchange_asymmetry_mean"]),
        "bilinear share": bootstrap(np.mean, column["bilinear_share_mean"]),
        "scale of the gate, median of layers": bootstrap(np.median, scale),
        "neurons near bilinear": bootstrap(np.mean, column["bilinear_neurons"]),
        "neurons near ReLU": bootstrap(np.mean, column["relu_neurons"]),
        "|cos(q, k)|": bootstrap(np.mean, alignment),
        "|cos(q, k)| above mismatched rows": bootstrap(np.mean, alignment - null),
        "the same in standard deviations of mismatched rows": bootstrap(np.mean, column["abs_cos_qk_effect"]),
        "rank correlation of place with depth": bootstrap(rank_correlation, place, depth),
        "rank correlation of place with scale": bootstrap(rank_correlation, place, scale),
        "rank correlation of place with |cos(q, k)|": bootstrap(rank_correlation, place, alignment),
        "rank correlation of |cos(q, k)| with depth": bootstrap(rank_correlation, alignment, depth),
        "within layers, of asymmetry with scale": bootstrap(np.mean, column["asymmetry_follows_query_norm"]),
        "within layers, of asymmetry with |cos(q, k)|": bootstrap(np.mean, column["asymmetry_follows_abs_cos_qk"]),
    }
    rows = [{"figure": name, **interval.columns("value"), "layers": len(layers)} for name, interval in figures.items()]
    plain = {
        "scale of the gate, lowest layer": scale.min(),
        "scale of the gate, highest layer": scale.max(),
        "|cos(q, k)| of mismatched rows": null.mean(),
        "|cos(q, k)| of isotropic rows": column["abs_cos_qk_null_isotropic_mean"].mean(),
    }
    rows += [{"figure": name, "value": value, "layers": len(layers)} for name, value in plain.items()]
    rows.append(
        {"figure": "layers with |cos(q, k)| above mismatched rows", "value": above, "layers": of, "sign_test_p": p}
    )
    return pd.DataFrame(rows)


def figure(layers: pd.DataFrame) -> Figure:
    """Place, scale and alignment against relative depth, a colour per model."""
    drawn, axes = axes_grid(1, 3, (12.5, 3.6))
    place, scale, alignment = axes[0]
    for model, part, color in colored(layers):
        line = {"color": color, "marker": "o", "markersize": 3.5, "linewidth": 1.2}
        place.plot(part["depth"], part["exchange_asymmetry_relu_ratio"], label=model, **line)
        scale.plot(part["depth"], part["query_norm_median"], **line)
        scale.fill_between(
            part["depth"], part["query_norm_q05"], part["query_norm_q95"], color=color, alpha=0.15, linewidth=0
        )
        alignment.plot(part["depth"], part["abs_cos_qk_mean"], **line)
        alignment.plot(part["depth"], part["abs_cos_qk_null_mean"], color=color, linestyle=":")
    for level, word in ((0.0, "bilinear"), (1.0, "ReLU")):
        place.axhline(level, color="0.5", linewidth=0.8, linestyle="--")
        place.annotate(word, (0.0, level), xytext=(0, 3), textcoords="offset points", color="0.4", fontsize="small")
    place.set(ylim=(-0.05, 1.15), title="place between bilinear and ReLU")
    place.legend(frameon=False, fontsize="small", loc="lower right")
    scale.set(yscale="log", title="scale of the gate |q|: median, 5 to 95 %")
    alignment.set(title="mean |cos(q, k)|; dotted: mismatched rows")
    alignment.set_ylim(bottom=0)
    for one in axes[0]:
        one.set_xlabel("relative depth")
        finish(one)
    return drawn


def main(given: Sequence[str] | None = None) -> None:
    """Print, and with --out and --figures write, frames and figure."""
    parser = arguments(__doc__)
    options = parser.parse_args(given)
    with one_line_errors(parser):
        parts = {model: layer_frame(report) for model, report in reports(options.models)}
        layers = pd.concat([part.assign(model=model) for model, part in parts.items()], ignore_index=True)
        whole = pd.concat([summary(part).assign(model=model) for model, part in parts.items()], ignore_index=True)
        for model, part in whole.groupby("model", sort=False):
            show(model, part.drop(columns="model"))
        write(options, {"layers": layers, "summary": whole}, "atlas", lambda: figure(layers))


if __name__ == "__main__":
    main()
