"""Is the exchange asymmetry that the weights predict for Gaussian input borne out on text, and where is it not?

For neurons, no. On the sample text the Gaussian value says next to nothing about which neurons of a layer are
asymmetric: rank correlation 0.13 (0.10 to 0.16) in SmolLM2-135M-Instruct and -0.06 (-0.08 to -0.03) in Gemma 3 270M,
where errors of the text would allow 0.97 and 0.98. More than half of the neurons break the prediction in each: 0.53
(0.50 to 0.55) and 0.73 (0.67 to 0.78).

For means of layers, by luck in SmolLM2: 0.114 on text, 0.110 predicted, difference 0.004 (-0.002 to 0.010), rank
correlation over layers 0.51 (0.15 to 0.79). A Gaussian with the text's own covariance predicts half of that, 0.056
(0.051 to 0.061); means and tails make up for it. In Gemma the means part: early layers are more asymmetric on text
than predicted (layer 0: 0.33 against 0.21), late ones far less (layers 15 to 17: 0.05 against 0.16).

The scale is what breaks it there. |q| is the standard deviation of the gate's pre-activation on isotropic input, 3 to
31 in Gemma, where every gate is a ReLU. On text it is 0.055 (0.039 to 0.059) times that, 0.19 to 0.97: most of what
varies in the input lies where gates do not read, and late gates work where they are nearly linear. Over layers the
asymmetry on text follows that scale, 0.98 (0.90 to 1.00). In SmolLM2 it is about half of |q|, 0.53 (0.51 to 0.63), and
says less, 0.38 (0.02 to 0.67).

Within a layer, which way it fails goes with how often the gate is on. A gate that is mostly on passes b through and is
bilinear, one that is mostly off leaves exchange to put something where there was nothing: text minus prediction falls
with the share of tokens on which the gate is on, by rank correlations of -0.58 (-0.63 to -0.53) and -0.54 (-0.65 to
-0.44) within layers. (How far it fails hardly goes with the distance of the gate's mean from 0: 0.17 (0.11 to 0.23)
and 0.07 (-0.05 to 0.21).) The neurons that weigh most among those that break it are such ones, means of the gate
several standard deviations from 0: neuron 1229 of SmolLM2's layer 11 (off, 0.50 on text, 0.015 predicted, 87 % of the
layer's output energy), neuron 1015 of Gemma's layer 10 (on, 0.00 on text, 0.21 predicted, 37 %). The covariance alone
helps the ranks within layers some of the way, to 0.34 (0.31 to 0.37) and 0.42 (0.39 to 0.45). Outputs of whole layers:
rank correlation 0.03 (-0.39 to 0.44) and 0.54 (0.11 to 0.79).

One text of 4,200 tokens; some two dozen figures a model, whose intervals are not adjusted for that.

    python analyses/gaussian_or_text.py [MODEL...] [--out analyses/results/gaussian_or_text] [--figures DIR]

Two predictions stand beside the value on text: `isotropic`, from the weights alone, and `matched`, for Gaussian input
on which the neuron's branches have the standard deviation and the correlation that they have on this text. What the
second repairs is due to the input's covariance, what it leaves to the mean and to tails. Errors of the text values are
jackknifed over sequences; `reliability` is the share of the variance over a layer's neurons that is not that error,
and bounds what any prediction can correlate with. A neuron breaks the prediction if it is off by more than three
standard errors and by more than a third of its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
    partial_rank_correlation,
    rank_correlation,
    reports,
    show,
    sign_test,
    write,
)

import glu_probe as gp
from glu_probe.errors import BadOption

MEASURE = "exchange_asymmetry"
TEXT, ERROR = f"{MEASURE}_text", f"{MEASURE}_text_se"
PREDICTIONS = ("isotropic", "matched")
# what could make a neuron break the prediction, as found on the text
CAUSES = {
    "mean of the gate": lambda n: (n["gate_mean_text"] / n["gate_std_text"]).abs(),
    "scale off": lambda n: np.log(n["gate_std_text"] / n["query_norm"]).abs(),
    "correlation off": lambda n: (n["branch_correlation_text"].abs() - n["abs_cos_qk"]).abs(),
    "scale of the gate": lambda n: n["query_norm"],
    "output energy": lambda n: n["output_energy_text"],
}
ONE_SIDED = 0.05  # of the tokens at most have the gate's rarer sign
KEPT = 20  # neurons of the list of those that break it most


def with_predictions(report: gp.Report) -> pd.DataFrame:
    """The neuron frame with both predictions, the error of the first in standard errors, and whether it is broken.

    Raises:
        BadOption: the report has no text columns.
    """
    if TEXT not in report.neurons:
        raise BadOption(
            f"the report of {report.provenance['model']} has no column {TEXT}",
            hint="Make it with `glu-probe activations MODEL -o DIR`, or give the model itself",
        )
    neurons = report.neurons[report.neurons[TEXT].notna() & report.neurons[MEASURE].notna()].copy()
    gates = dict(zip(report.layers["layer"], report.layers["activation"], strict=True))
    matched = np.full(len(neurons), np.nan)
    for layer, rows in neurons.groupby("layer").indices.items():
        part = neurons.iloc[rows]
        rho = part["branch_correlation_text"].abs().clip(0, 1).to_numpy(dtype=float)
        std = part["gate_std_text"].to_numpy(dtype=float)
        known = np.isfinite(rho) & np.isfinite(std)
        matched[rows[known]] = gp.gaussian_measures(gates[layer], std[known], rho[known])[MEASURE]
    neurons["isotropic"], neurons["matched"] = neurons[MEASURE], matched
    off = neurons[TEXT] - neurons["isotropic"]
    neurons["errors_off"] = off / neurons[ERROR]
    neurons["breaks"] = (off.abs() > 3 * neurons[ERROR]) & (off.abs() > neurons[TEXT] / 3)
    return neurons


def agreement(neurons: pd.DataFrame) -> pd.DataFrame:
    """A row per layer: how the predictions fare on its neurons."""
    rows = []
    for layer, part in neurons.groupby("layer", sort=True):
        text = part[TEXT].to_numpy(dtype=float)
        row = {"layer": layer, "neurons": len(part), "text": text.mean(), "broken": part["breaks"].mean()}
        row["reliability"] = 1 - (part[ERROR].to_numpy(dtype=float) ** 2).mean() / text.var()
        for name in PREDICTIONS:
            value = part[name].to_numpy(dtype=float)
            known = np.isfinite(value)
            row |= {
                name: value[known].mean(),
                f"{name}_bias": (text - value)[known].mean(),
                f"{name}_off": np.abs(text - value)[known].mean(),
                f"{name}_rank_correlation": rank_correlation(value[known], text[known]),
            }
        row["scale"], row["scale_on_text"] = part["query_norm"].median(), part["gate_std_text"].median()
        active = part["gate_active_text"].to_numpy(dtype=float)
        row["one_sided"] = np.mean((active < ONE_SIDED) | (active > 1 - ONE_SIDED))
        row["change_follows_gate_active"] = rank_correlation(active, text - part["isotropic"].to_numpy(dtype=float))
        for name, cause in CAUSES.items():
            values = cause(part).to_numpy(dtype=float)
            known = np.isfinite(values)
            row[f"off_follows_{name.replace(' ', '_')}"] = rank_correlation(
                values[known], np.abs(part[TEXT] - part["isotropic"]).to_numpy(dtype=float)[known]
            )
        rows.append(row)
    return pd.DataFrame(rows)


def summary(layers: pd.DataFrame, by_layer: pd.DataFrame) -> pd.DataFrame:
    """What the layers amount to, each figure with its interval over layers.

    Args:
        layers: the layer frame, for means and outputs on text with their errors.
        by_layer: of `agreement`.
    """
    frame = by_layer.merge(layers, on="layer", suffixes=("", "_frame"))
    depth = frame["layer"].to_numpy(dtype=float)
    bias = frame["isotropic_bias"].to_numpy(dtype=float)
    significant = np.abs(bias) > 2 * frame[f"{TEXT}_mean_se"].to_numpy(dtype=float)
    figures = {
        "exchange asymmetry of neurons on text": bootstrap(np.mean, frame["text"]),
        "scale of the gate on text over |q|, medians of layers": bootstrap(
            np.median, frame["scale_on_text"] / frame["scale"]
        ),
        "rank correlation of text with the scale on text over layers": bootstrap(
            rank_correlation, frame["text"], frame["scale_on_text"]
        ),
    }
    for name in PREDICTIONS:
        mean = frame[name].to_numpy(dtype=float)
        figures |= {
            f"{name}: predicted": bootstrap(np.mean, mean),
            f"{name}: text minus predicted": bootstrap(np.mean, frame[f"{name}_bias"]),
            f"{name}: mean distance of a neuron": bootstrap(np.mean, frame[f"{name}_off"]),
            f"{name}: rank correlation over layers": bootstrap(rank_correlation, mean, frame["text"]),
            f"{name}: the same, depth taken out": bootstrap(partial_rank_correlation, mean, frame["text"], depth),
            f"{name}: rank correlation over the neurons of a layer": bootstrap(
                np.mean, frame[f"{name}_rank_correlation"]
            ),
        }
    figures |= {
        "bound on that by the errors of the text": bootstrap(np.mean, np.sqrt(frame["reliability"].clip(lower=0))),
        "neurons whose gate has one sign on 95 % of the tokens": bootstrap(np.mean, frame["one_sided"]),
        "text minus isotropic follows how often the gate is on": bootstrap(
            np.mean, frame["change_follows_gate_active"]
        ),
        "neurons that break the isotropic prediction": bootstrap(np.mean, frame["broken"]),
        "output of the layer: text minus Gaussian": bootstrap(np.mean, frame[f"{MEASURE}_output_text_minus_gaussian"]),
        "output of the layer: rank correlation over layers": bootstrap(
            rank_correlation, frame[f"{MEASURE}_output"], frame[f"{MEASURE}_output_text"]
        ),
    }
    for name in CAUSES:
        figures[f"distance of a neuron follows {name}"] = bootstrap(
            np.mean, frame[f"off_follows_{name.replace(' ', '_')}"]
        )
    rows = [{"figure": name, **interval.columns("value"), "layers": len(frame)} for name, interval in figures.items()]
    above, of, p = sign_test(bias)
    rows.append({"figure": "layers above the isotropic prediction", "value": above, "layers": of, "sign_test_p": p})
    rows.append(
        {"figure": "layers off by more than 2 standard errors", "value": int(significant.sum()), "layers": len(frame)}
    )
    return pd.DataFrame(rows)


def breakers(neurons: pd.DataFrame) -> pd.DataFrame:
    """The neurons that break the prediction most, by the energy of what it misses."""
    off = neurons[TEXT] - neurons["isotropic"]
    share = neurons["output_energy_text"] / neurons.groupby("layer")["output_energy_text"].transform("sum")
    columns = ["layer", "neuron", "isotropic", "matched", TEXT, ERROR, "errors_off", "query_norm", "gate_mean_text",
               "gate_std_text", "gate_active_text", "abs_cos_qk", "branch_correlation_text"]  # fmt: skip
    table = neurons[columns].assign(energy_share=share, energy_missed=off.abs() * share)
    return table[neurons["breaks"]].nlargest(KEPT, "energy_missed")


def figure(by_layer: pd.DataFrame, layers: pd.DataFrame) -> Figure:
    """A row per model: means of layers, and rank correlations over the neurons of each."""
    models = list(colored(by_layer))
    drawn, axes = axes_grid(len(models), 3, (12.5, 3.2 * len(models)))
    for (means, ranks, broken), (model, part, color) in zip(axes, models, strict=True):
        error = layers.loc[layers["model"] == model, f"{TEXT}_mean_se"]
        means.errorbar(
            part["layer"], part["text"], yerr=2 * error, color=color, marker="o", markersize=3.5, label="text"
        )
        means.plot(part["layer"], part["isotropic"], color="0.3", linestyle="--", label="isotropic Gaussian")
        means.plot(
            part["layer"], part["matched"], color="0.3", linestyle=":", label="Gaussian of the text's covariance"
        )
        means.set(title=f"{model}\nmean exchange asymmetry; bars: 2 standard errors", ylabel="exchange asymmetry")
        means.set_ylim(bottom=0)
        means.legend(frameon=False, fontsize="small")
        ranks.plot(
            part["layer"], part["isotropic_rank_correlation"], color="0.3", linestyle="--", marker="o", markersize=3
        )
        ranks.plot(
            part["layer"], part["matched_rank_correlation"], color="0.3", linestyle=":", marker="o", markersize=3
        )
        ranks.plot(part["layer"], np.sqrt(part["reliability"].clip(lower=0)), color=color, linewidth=1)
        ranks.axhline(0, color="0.6", linewidth=0.8)
        ranks.set(ylim=(-0.4, 1.02), title="rank correlation with text over neurons;\nline: bound by the text's errors")
        broken.bar(part["layer"], part["broken"], color=color, alpha=0.7)
        broken.set(ylim=(0, 1), title="share of neurons that break\nthe isotropic prediction")
        for one in (means, ranks, broken):
            one.set_xlabel("layer")
            finish(one)
    return drawn


def main(given: Sequence[str] | None = None) -> None:
    """Print, and with --out and --figures write, frames and figure."""
    parser = arguments(__doc__)
    parser.add_argument("--text", default=None, help="a file to use instead of the sample text")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    options = parser.parse_args(given)
    on_text = partial(gp.probe_text, text=options.text, length=options.length)
    by_layer, means, whole, worst = [], [], [], []
    with one_line_errors(parser):
        for model, report in reports(options.models, on_text):
            neurons, layers = with_predictions(report), gated(report.layers)
            found = agreement(neurons)
            by_layer.append(found.assign(model=model))
            means.append(layers[["layer", f"{TEXT}_mean_se"]].assign(model=model))
            whole.append(summary(layers, found).assign(model=model))
            worst.append(breakers(neurons).assign(model=model))
            show(model, whole[-1].drop(columns="model"))
            show("neurons that break it most", worst[-1].drop(columns="model").head(8))
        by_layer, means = pd.concat(by_layer, ignore_index=True), pd.concat(means, ignore_index=True)
        frames = {"layers": by_layer, "summary": pd.concat(whole), "breakers": pd.concat(worst)}
        write(options, frames, "gaussian-or-text", lambda: figure(by_layer, means))


if __name__ == "__main__":
    main()
