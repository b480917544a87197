"""What the trainings of `train_forms` amount to: frames with intervals, and two figures.

Intervals are Student's, 95 %, over seeds. Two forms are compared by the differences of runs of the same seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

BASELINE = "gated silu"
# First minus second: s inside against outside the product, s inside against none, s outside against none, higher rank.
CONTRASTS = (
    ("gated silu", "rank-1 silu"),
    ("gated relu", "rank-1 relu"),
    ("gated silu", "bilinear"),
    ("gated relu", "bilinear"),
    ("rank-1 silu", "bilinear"),
    ("rank-1 relu", "bilinear"),
    ("rank-2 bilinear", "bilinear"),
    ("rank-4 bilinear", "bilinear"),
)
COLORS = {  # warm where the symmetry is broken
    "standard gelu": "0.45",
    "bilinear": "tab:blue",
    "rank-1 silu": "tab:cyan",
    "rank-1 relu": "tab:purple",
    "gated silu": "tab:red",
    "gated gelu": "tab:orange",
    "gated relu": "tab:brown",
    "rank-2 bilinear": "tab:green",
    "rank-4 bilinear": "tab:olive",
}
MEASURES = {
    "query_norm": "median |q|",
    "exchange_asymmetry": "mean exchange asymmetry",
    "scaling_asymmetry": "mean scaling asymmetry",
    "bilinear_share": "mean bilinear share",
    "abs_cos_qk": "mean |cos(q, k)|, dotted: null",
    "qk_norm": "median |q||k|",
}


def t_quantile(degrees: int, probability: float = 0.95) -> float:
    """The t that Student's |T| stays below with this probability.

    With t = sqrt(degrees) tan(angle), the density of the angle is proportional to cos(angle)^(degrees - 1).
    """
    angle = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angle) ** (degrees - 1)
    below = np.append(0.0, np.cumsum(density[1:] + density[:-1]))
    return float(np.sqrt(degrees) * np.tan(np.interp(probability, below / below[-1], angle)))


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval; NaN where there are too few values."""
    values = np.asarray(values, dtype=float)
    if len(values) < 2:
        return (float(values[0]) if len(values) else float("nan")), float("nan")
    return float(values.mean()), float(t_quantile(len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))


def paired_difference(finals: pd.DataFrame, first: str, second: str) -> dict[str, float]:
    """Validation loss of one form minus that of another, over the seeds at which both ended.

    Returns:
        pairs: how many such seeds; difference and interval: mean and half-width in nats per token; lower: at how many
        seeds the first form had the lower loss.
    """
    table = finals.pivot(index="seed", columns="form", values="loss")
    differences = (table[first] - table[second]).dropna()
    mean, half = t_interval(differences)
    return {"pairs": len(differences), "difference": mean, "interval": half, "lower": int((differences < 0).sum())}


def summary_frame(finals: pd.DataFrame) -> pd.DataFrame:
    """A row per form, by rising loss. Diverged runs are counted in a column of their own and are in no mean."""
    rows = []
    for form, group in finals.groupby("form", sort=False):
        ended = group[~group["diverged"]]
        loss, interval = t_interval(ended["loss"])
        paired = paired_difference(finals, form, BASELINE) if BASELINE in set(finals["form"]) else {}
        rows.append(
            {
                "form": form,
                "runs": len(group),
                "diverged": int(group["diverged"].sum()),
                "loss": loss,
                "interval": interval,
                f"minus {BASELINE}": paired.get("difference"),
                f"interval of minus {BASELINE}": paired.get("interval"),
                "bits_per_byte": ended["bits_per_byte"].mean(),
                "train_loss": ended["train_loss"].mean(),
                "rate": group["rate"].iloc[0],
                "largest_rise": ended["largest_rise"].max(),
                "largest_gradient_norm": ended["largest_gradient_norm"].max(),
                "seconds": group["seconds"].mean(),
                **group[["d_mlp", "mlp_parameters", "mlp_flops_per_token", "model_parameters"]].iloc[0],
            }
        )
    return pd.DataFrame(rows).sort_values("loss", ignore_index=True)


def contrast_frame(finals: pd.DataFrame) -> pd.DataFrame:
    """A row per contrast of `CONTRASTS` whose forms were both trained."""
    present = set(finals["form"])
    rows = [
        {"first": first, "second": second, **paired_difference(finals, first, second)}
        for first, second in CONTRASTS
        if {first, second} <= present
    ]
    return pd.DataFrame(rows)


def rate_frame(tuning: pd.DataFrame, best: Mapping[str, float]) -> pd.DataFrame:
    """A row per form and learning rate: tuning loss, whether it diverged, and whether it was chosen."""
    frame = tuning.sort_values(["form", "rate"], ignore_index=True)
    frame["chosen"] = frame["rate"] == frame["form"].map(best)
    return frame[["form", "rate", "seed", "steps", "loss", "diverged", "chosen", "largest_rise"]]


def measure_frame(finals: pd.DataFrame) -> pd.DataFrame:
    """A row per final run, checkpoint and layer of the forms that have one query and one key a neuron."""
    return pd.DataFrame(
        {"form": run.form, "seed": run.seed, "share": row["step"] / run.steps, **row}
        for run in finals.itertuples()
        for row in run.measures
    )


def loss_figure(finals: pd.DataFrame) -> Figure:
    """Left: validation loss of every run, with mean and interval. Right: the paired contrasts."""
    summary, contrasts = summary_frame(finals), contrast_frame(finals)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, row in enumerate(summary.itertuples()):
        color = COLORS[row.form]
        runs = finals.loc[finals["form"] == row.form, "loss"]
        above = np.full(len(runs), place - 0.25)
        left.plot(runs, above, "o", color=color, alpha=0.5, markersize=4.5, markeredgewidth=0)
        left.errorbar(row.loss, place, xerr=row.interval, fmt="D", color=color, markersize=4.5, capsize=3)
    left.set_yticks(range(len(summary)), summary["form"])
    left.invert_yaxis()
    left.set(xlabel="validation loss (nats per token)", title="a dot per seed; mean and 95 % interval")
    right.axvline(0, color="0.6", linewidth=1)
    for place, row in enumerate(contrasts.itertuples()):
        right.errorbar(
            row.difference, place, xerr=row.interval, fmt="D", color=COLORS[row.first], markersize=4.5, capsize=3
        )
    labels = contrasts["first"] + " \N{MINUS SIGN} " + contrasts["second"]
    right.set_yticks(range(len(contrasts)), labels)
    right.invert_yaxis()
    right.set(xlabel="difference of validation loss (nats per token)", title="pairs of the same seed; 95 % interval")
    for axes in (left, right):
        sns.despine(ax=axes)
        axes.grid(axis="x", alpha=0.3)
    return figure


def measure_figure(measures: pd.DataFrame) -> Figure:
    """Symmetry measures against training; mean over layers, bands of one standard deviation over seeds."""
    frame = measures.groupby(["form", "seed", "step"], as_index=False).mean(numeric_only=True)
    order = list(dict.fromkeys(measures["form"]))
    steps = sorted(frame["step"].unique())
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 3).ravel()
    for ax, (name, label) in zip(axes, MEASURES.items(), strict=True):
        shown = frame.dropna(subset=name) if name in frame else frame.iloc[:0]
        options = {"x": "step", "hue": "form", "hue_order": order, "palette": COLORS, "legend": False, "ax": ax}
        sns.lineplot(shown, y=name, marker="o", markersize=4, errorbar="sd", **options)
        if name == "abs_cos_qk":
            sns.lineplot(shown, y="abs_cos_qk_null", linestyle=":", errorbar=None, **options)
        ax.set_xscale("symlog", linthresh=100)  # most happens early
        ax.set(title=label, ylabel="", xlabel="step")
        ax.set_xticks(steps, labels=map(str, steps))
        ax.set_xlim(-5, 1.2 * steps[-1])
        ax.minorticks_off()
        sns.despine(ax=ax)
        ax.grid(alpha=0.3)
    handles = [matplotlib.lines.Line2D([], [], color=COLORS[form], marker="o", markersize=4) for form in order]
    figure.legend(handles, order, loc="outside lower center", ncols=len(order), frameon=False)
    return figure


def write_results(
    tuning: pd.DataFrame, best: Mapping[str, float], finals: pd.DataFrame, out: Path, figures: Path
) -> None:
    """Write the five frames as csv and the two figures as png, and print what the analysis is about.

    Args:
        tuning, finals: a row per run, as `train_forms.perform` describes it.
        best: form to its chosen learning rate.
    """
    summary, contrasts, measures = summary_frame(finals), contrast_frame(finals), measure_frame(finals)
    frames = {
        "summary": summary,
        "contrasts": contrasts,
        "losses": finals.drop(columns="measures"),
        "learning_rates": rate_frame(tuning, best),
        "measures": measures,
    }
    for name, frame in frames.items():
        frame.to_csv(out / f"{name}.csv", index=False, float_format="%.6g")
    figures.mkdir(parents=True, exist_ok=True)
    loss_figure(finals).savefig(figures / "train-forms.png", dpi=130)
    measure_figure(measures).savefig(figures / "train-forms-symmetry.png", dpi=130)
    print(summary.to_string(float_format="%.4f"), contrasts.to_string(float_format="%.4f"), sep="\n\n")
