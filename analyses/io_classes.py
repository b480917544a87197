"""Which of Gerstner & Schuetze's input-output classes do neurons fall into, and how much hangs on the threshold?

At the paper's threshold of 0.5, 83 % of SmolLM2-135M-Instruct's neurons and 99 % of Gemma 3 270M's have no class
(orthogonal output): 0.83 (0.79 to 0.86) and 0.99 (0.99 to 1.00). SmolLM2 has the paper's picture over depth:
strengthening neurons, nearly all conditional, are 0.143 (0.106 to 0.179) of the first half of its layers and 0.025
(0.008 to 0.048) of the second, weakening ones 0.022 (0.014 to 0.031) and 0.073 (0.053 to 0.094); median cos(k, v)
falls with depth, -0.80 (-0.92 to -0.52). They are most in layers 18 to 20, not in the last. Gemma does not show it:
the few weakening neurons it has are early ones, rank correlation with depth -0.81 (-0.96 to -0.44), and median cos(k,
v) has no trend, -0.23 (-0.85 to 0.36).

The threshold decides about the amount, not about the existence: in a class are 91 % of SmolLM2's neurons at 0.1, 53 %
at 0.3, 2 % at 0.7, and 69 %, 15 %, 0 % of Gemma's. Neurons with |cos(k, v)| above 0.2 are 55 % and 26 %, while
mismatched rows of the same layers would make less than 0.1 %. Gemma's alignment hangs on coordinates: with the gain of
the norm behind its MLPs folded in, which is what reaches the residual stream (`--fold-post-norm`), not one neuron has
a class at 0.5 and 1.6 % have |cos(k, v)| above 0.2.

    python analyses/io_classes.py [MODEL...] [--out analyses/results/io_classes] [--figures analyses/figures]

The classes are those of arXiv 2505.17936: what a neuron writes (v) against what its two branches read (k, q), with the
gain of the norm folded in, as in that paper. For every model a table in the layout of the authors' own: a row per
layer and a last one with the total, a column per class in their order, counts of neurons at threshold 0.5. The twelve
models of the paper, where the hub can be reached and their licences have been accepted:

    python analyses/io_classes.py --twelve --out twelve

Models are read one MLP at a time, so that none needs more memory than its largest layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import norm
from study import (
    arguments,
    axes_grid,
    bootstrap,
    colored,
    file_stem,
    finish,
    gated,
    one_line_errors,
    rank_correlation,
    reports,
    save,
    show,
    write,
)

import glu_probe as gp
from glu_probe.figures import class_bars

TWELVE = (
    "allenai/OLMo-7B-0424-hf", "allenai/OLMo-1B-hf", "google/gemma-2-2b", "google/gemma-2-9b", "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "mistralai/Mistral-7B-v0.1",
    "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "01-ai/Yi-6B",
)  # fmt: skip
CLASSES = gp.measures.IO_CLASSES
NONE = "orthogonal output"  # of classes: no cosine with the output is above the threshold


def class_table(neurons: pd.DataFrame) -> pd.DataFrame:
    """Counts of neurons: a row per layer and one, "Total", for all; a column per class, those that do not occur too.

    Neurons with a zero row have no class and are not counted.
    """
    known = neurons[neurons["io_class"].notna()]
    counts = pd.crosstab(known["layer"], known["io_class"].astype(str)).reindex(
        index=sorted(neurons["layer"].unique()), columns=list(CLASSES), fill_value=0
    )
    counts.loc["Total"] = counts.sum()
    return counts.rename_axis(index="Layer", columns=None).astype(int)


def sweep(report: gp.Report) -> pd.DataFrame:
    """A row per threshold: the share of all neurons in each class, and what mismatched rows would give.

    `write_what_they_read` is the share with |cos(k, v)| above the threshold. `mismatched` is that for mismatched rows,
    as a normal distribution with their mean and standard deviation in each layer has it.
    """
    classes = report.classes.merge(report.layers[["layer", "n_neurons"]], on="layer")
    classes["count"] = classes["fraction"] * classes["n_neurons"]
    table = classes.pivot_table(index="threshold", columns="io_class", values="count", aggfunc="sum", observed=False)
    table = table[list(CLASSES)] / table.sum(axis=1).iloc[0]
    layers, cosine = gated(report.layers), report.neurons["cos_kv"].abs().to_numpy(dtype=float)
    mean, std = (layers[f"cos_kv_null_{part}"].to_numpy(dtype=float) for part in ("mean", "std"))
    table["write_what_they_read"] = [float((cosine > t).sum() / np.isfinite(cosine).sum()) for t in table.index]
    table["mismatched"] = [float(np.mean(norm.sf((t - mean) / std) + norm.cdf((-t - mean) / std))) for t in table.index]
    return table.reset_index().rename_axis(columns=None)


def summary(layers: pd.DataFrame, neurons: pd.DataFrame) -> pd.DataFrame:
    """What the layers amount to, each figure with its interval over layers.

    Args:
        layers: of `gated`.
        neurons: of the same report.
    """
    depth = layers["depth"].to_numpy()
    median = layers["cos_kv_median"].to_numpy(dtype=float)
    families = {
        "strengthening": CLASSES[:4],
        "weakening": CLASSES[7:],
        "proportional change": CLASSES[4:6],
        NONE: (NONE,),
    }
    shares = {
        family: layers[[f"io_class_{name.replace(' ', '_')}" for name in names]].sum(axis=1, min_count=1).to_numpy()
        for family, names in families.items()
    }
    early = depth < 0.5
    rows = [
        {"figure": f"share of {name}", **bootstrap(np.mean, share).columns("value")} for name, share in shares.items()
    ]
    for name in ("strengthening", "weakening"):
        halves = [bootstrap(np.mean, shares[name][half]) for half in (early, ~early)]
        for words, half in zip(("first", "second"), halves, strict=True):
            rows.append({"figure": f"share of {name}, {words} half", **half.columns("value")})
        follows = bootstrap(rank_correlation, shares[name], depth)
        rows.append({"figure": f"rank correlation of {name} with depth", **follows.columns("value")})
    rows.append(
        {
            "figure": "rank correlation of median cos(k, v) with depth",
            **bootstrap(rank_correlation, median, depth).columns("value"),
        }
    )
    known = neurons["io_class"].notna()
    atypical = neurons.loc[known, "io_class"].astype(str).str.contains("atypical")
    typed = neurons.loc[known, "io_class"].astype(str) != NONE
    rows.append(
        {"figure": "atypical among those that are not orthogonal", "value": float(atypical.sum() / max(1, typed.sum()))}
    )
    return pd.DataFrame(rows).assign(layers=len(layers))


def figure(parts: dict[str, tuple[pd.DataFrame, pd.DataFrame]]) -> Figure:
    """Left a bar chart of classes for each model, right their median cos(k, v) over relative depth and the sweep.

    Args:
        parts: model name to its layers (of `gated`) and its sweep.
    """
    drawn, axes = axes_grid(len(parts), 3, (15, 3.3 * len(parts)), width_ratios=(2.4, 1, 1))
    medians = pd.concat([layers.assign(model=model) for model, (layers, _) in parts.items()], ignore_index=True)
    for (bars, median, shares), (model, layers, color) in zip(axes, colored(medians), strict=True):
        class_bars(layers, ax=bars)
        bars.set_title(f"{model}: classes at threshold 0.5")
        median.plot(layers["depth"], layers["cos_kv_median"], color=color, marker="o", markersize=3)
        median.fill_between(
            layers["depth"], layers["cos_kv_q05"], layers["cos_kv_q95"], color=color, alpha=0.15, linewidth=0
        )
        median.axhline(0, color="0.6", linewidth=0.8)
        median.set(ylim=(-1, 1), xlabel="relative depth", title="cos(k, v): median, 5 to 95 %")
        table = parts[model][1]
        shares.plot(table["threshold"], 1 - table[NONE], color=color, marker="o", markersize=3, label="in a class")
        shares.plot(
            table["threshold"], table["write_what_they_read"], color=color, linestyle="--", label="|cos(k, v)| above"
        )
        shares.plot(table["threshold"], table["mismatched"], color="0.3", linestyle=":", label="mismatched rows")
        shares.set(ylim=(0, 1), xlabel="threshold", title="share of neurons")
        shares.legend(frameon=False, fontsize="small")
        finish(median)
        finish(shares)
    return drawn


def measured(models: Sequence[str], **options: object) -> Iterator[tuple[str, gp.Report]]:
    """Reports of the weights; of models with several MLPs a layer, an error of `gated` before anything is written."""
    for model, report in reports(models, **options):
        gated(report.layers)
        yield model, report


def main(given: Sequence[str] | None = None) -> None:
    """Print, and with --out and --figures write, tables and figure."""
    parser = arguments(__doc__)
    parser.add_argument("--twelve", action="store_true", help="the twelve models of the paper, from the hub")
    parser.add_argument(
        "--fold-post-norm", action="store_true", help="fold the gain of a norm behind the MLP into what neurons write"
    )
    options = parser.parse_args(given)
    reading = {"fold_post_norm": True} if options.fold_post_norm else {}
    models = TWELVE if options.twelve else options.models
    parts, sweeps, whole = {}, [], []
    with one_line_errors(parser):
        for model, report in measured(models, **reading):
            table, layers = class_table(report.neurons), gated(report.layers)
            parts[model] = layers, sweep(report)
            sweeps.append(parts[model][1].assign(model=model))
            whole.append(summary(layers, report.neurons).assign(model=model))
            show(model, table.reset_index())
            show("threshold", parts[model][1])
            show("summary", whole[-1].drop(columns="model"))
            if options.out is not None:  # as they come: twelve models take hours
                save({f"{file_stem(model)}-table": table.reset_index()}, options.out)
        write(options, {"sweep": pd.concat(sweeps), "summary": pd.concat(whole)}, "io-classes", lambda: figure(parts))


if __name__ == "__main__":
    main()
