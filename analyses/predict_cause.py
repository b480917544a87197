"""Does the asymmetry seen in the weights, or on text, predict what breaking the symmetry costs the model?

SmolLM2-135M-Instruct, 30 layers. What exchange costs a layer follows one measure of ten, the asymmetry on text
weighted by output energy: rank correlation 0.55 (0.18 to 0.83), which just stands after forty looks (p 0.04), and 0.53
(0.14 to 0.83) with the most changed neuron spared, which does not (p 0.07). From the weights alone nothing is certain:
0.38 (-0.03 to 0.75) for the Gaussian mean, -0.29 (-0.66 to 0.12) for |cos(q, k)|, 0.05 (-0.38 to 0.48) for the tensor
asymmetry. What a bilinear fit costs does follow the weights: 0.61 (0.29 to 0.80) for the Gaussian mean (p 0.01), with
depth taken out 0.59; no measure on text stands there.

Neurons: the tenth of a layer with the largest asymmetry on text costs 7.7 (6.4 to 10.6) times as much to exchange as
random ones of the same energy, more in 28 of 28 layers; the tenth by the Gaussian value 1.8 (1.3 to 2.2) times, more
in 25 of 28. In two layers each the energies could not be matched. The change of the layer's output is larger by about
as much (6.5 and 1.6 times): asymmetric neurons cost more in proportion to what exchange changes, and nothing here says
that a change of theirs does more harm.

Gemma 3 270M, 18 layers. There the text decides: the cost of exchange follows every measure on text, 0.87 (0.67 to 0.97) for
the mean asymmetry and -0.93 (-0.98 to -0.79) for the bilinear share (p below 0.001), and the weights' values less: 0.65 (0.29 to
0.80) for the Gaussian mean (p 0.03), which is nothing with depth taken out (-0.24), -0.81 (-0.94 to -0.55) for the Gaussian
bilinear share (p 0.002). Neurons: the tenth by the asymmetry on text costs 10.3 (6.9 to 16.2) times as much as random
ones, more in 18 of 18 layers; the tenth by the Gaussian value no more than they do, 0.9 (0.7 to 1.1) times, more in 7
of 17.

    python analyses/predict_cause.py [MODEL...] [--out analyses/results/predict_cause] [--figures analyses/figures]
    python analyses/predict_cause.py --saved --out analyses/results/predict_cause    # without running the models again

The first takes a quarter to half an hour of one core a model. Layer by layer: rank correlation of ten measures
with four costs, KL a token for exchanging gate and up in that layer and for putting a bilinear fit in the place of its
neurons, both also with the one neuron spared that changes most, since single neurons can be a layer's whole cost. Each
correlation has a bootstrap interval over layers, its value with depth taken out, and a p for the largest of all forty
of a model under permuted layers (`p_of_the_largest`): below 0.05 it stands after forty looks. Layers are permuted as
if they were independent, which neighbours are not. Neuron by neuron: the tenth of each layer's neurons with the
largest measure is exchanged, and as many random neurons of the same output energy. The measures on text are from a
text that contains the one on which costs are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats
from study import (
    SAMPLES,
    arguments,
    axes_grid,
    bootstrap,
    colored,
    file_stem,
    finish,
    gated,
    holm,
    one_line_errors,
    opened,
    partial_rank_correlation,
    rank_correlation,
    save,
    show,
    sign_test,
    write,
)

import glu_probe as gp
from glu_probe.errors import NoReport

COSTS = ("exchange", "bilinear_fit")
VARIANTS = ("kl", "kl_spared")
MEASURES = (
    "exchange_asymmetry_mean",
    "exchange_asymmetry_weighted",
    "exchange_asymmetry_output",
    "exchange_asymmetry_text_mean",
    "exchange_asymmetry_text_weighted",
    "exchange_asymmetry_output_text",
    "bilinear_share_mean",
    "bilinear_share_text_mean",
    "abs_cos_qk_mean",
    "tensor_asymmetry",
)
SUBSETS = ("exchange_asymmetry", "exchange_asymmetry_text")
SHARE = 0.1
PERMUTATIONS = 10_000
RAW = ("layers", "costs", "subset_costs")  # frames that running the model gives, of one model each


def run(checkpoint: gp.Checkpoint, tokens: int, text: object = None, **options: object) -> dict[str, pd.DataFrame]:
    """What only the model can say: measures of layers, costs of layers, costs of subsets of their neurons.

    Args:
        checkpoint: the model.
        tokens: of evaluation text; twice as many calibrate.
        text: as `probe_text` takes it; by default the sample that comes with the package.
        options: of `probe_text` and `causal`: length, tokenizer.
    """
    report = gp.probe_text(checkpoint, text, **options)
    common = {"tokens": tokens, "calibration": 2 * tokens, **options}
    costs = gp.causal(checkpoint, text, interventions=[*COSTS, "zero_ablation", "mean_ablation"], **common)
    parts = [
        gp.causal(
            checkpoint, text, interventions=["exchange"], subset=(measure, SHARE, report.neurons), spare=0, **common
        ).assign(measure=measure)
        for measure in SUBSETS
    ]
    layers = gated(report.layers)[["layer", *MEASURES]]
    return {"layers": layers, "costs": costs, "subset_costs": pd.concat(parts, ignore_index=True)}


def read(directory: Path, model: str) -> dict[str, pd.DataFrame]:
    """The same, as an earlier run wrote it.

    Raises:
        NoReport: a frame is absent.
    """
    paths = {name: directory / f"{file_stem(model)}-{name}.csv" for name in RAW}
    for path in paths.values():
        if not path.is_file():
            raise NoReport(
                "there is no such frame", where=path, hint="Run without --saved, or name the models that were run"
            )
    return {name: pd.read_csv(path, dtype={"layers": str}) for name, path in paths.items()}


def correlations(layers: pd.DataFrame, costs: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """Spearman's correlation over layers of every measure with every cost, and what is to be thought of it.

    Args:
        layers: with a column for each of `MEASURES`.
        costs: a causal frame of single layers.
        seed: of the permutations.

    Returns:
        A row per cost and measure: rank_correlation with its interval, depth_taken_out, and p_of_the_largest: how often
        the largest correlation of all, of either sign, is as large when the layers of the costs are permuted.
    """
    table = layers[["layer", *MEASURES]].astype(float)
    names = []
    for intervention in COSTS:
        part = costs[costs["intervention"] == intervention].set_index("layers")
        for variant in VARIANTS:
            names.append(f"{variant} of {intervention}")
            table[names[-1]] = part[variant].reindex(layers["layer"].astype(str)).to_numpy(dtype=float)
    table = table.dropna()
    depth, measures, prices = (table[columns].to_numpy() for columns in ("layer", list(MEASURES), names))
    found, largest = largest_under_permutation(measures, prices, seed)
    rows = []
    for column, name in enumerate(names):
        for row, measure in enumerate(MEASURES):
            pair = measures[:, row], prices[:, column]
            rows.append(
                {
                    "cost": name,
                    "measure": measure,
                    **bootstrap(rank_correlation, *pair).columns("rank_correlation"),
                    "depth_taken_out": partial_rank_correlation(*pair, depth),
                    "p_of_the_largest": float(
                        (1 + (largest >= abs(found[row, column]) - 1e-12).sum()) / (1 + len(largest))
                    ),
                    "layers": len(table),
                }
            )
    return pd.DataFrame(rows)


def largest_under_permutation(measures: np.ndarray, costs: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank correlations [measure, cost], and the largest of them, of either sign, under each permutation of the layers.

    What measures have in common with each other, and costs, they keep: forty correlated looks do not count as forty.

    Args:
        measures: [layer, measure].
        costs: [layer, cost].
        seed: of the permutations.
    """
    scaled = []
    for values in (measures, costs):
        ranks = stats.rankdata(values, axis=0)
        ranks = ranks - ranks.mean(0)
        size = np.linalg.norm(ranks, axis=0)
        scaled.append(np.divide(ranks, size, out=np.zeros_like(ranks), where=size > 0))
    of_measures, of_costs = scaled
    rng = np.random.default_rng(seed)
    draws = (of_measures.T @ of_costs[rng.permutation(len(of_costs))] for _ in range(PERMUTATIONS))
    return of_measures.T @ of_costs, np.array([np.abs(one).max() for one in draws])


def subsets(costs: pd.DataFrame) -> pd.DataFrame:
    """How much more the top neurons cost than their random controls: medians over layers, and in how many layers.

    Only layers count whose two subsets have the same energy within a tenth, which few neurons that carry a layer forbid.
    """
    rows = []
    for measure, part in costs.groupby("measure", sort=False):
        top, control = (part[part["neurons"].str.startswith(word)].set_index("layers") for word in ("top", "random"))
        control = control.loc[top.index]
        equal = np.abs(np.log(top["energy_share"] / top["other_energy_share"])) < np.log(1.1)
        top, control = top[equal], control[equal]
        above, of, p = sign_test(top["kl"] - control["kl"])
        rows.append(
            {
                "measure": measure,
                "top_kl_median": top["kl"].median(),
                "control_kl_median": control["kl"].median(),
                **bootstrap(np.median, top["kl"] / control["kl"]).columns("ratio_median"),
                "output_gap_ratio_median": (top["output_gap"] / control["output_gap"]).median(),
                "layers_where_top_costs_more": above,
                "layers": of,
                "layers_left_out": int((~equal).sum()),
                "sign_test_p": p,
            }
        )
    return pd.DataFrame(rows).assign(p_adjusted=lambda table: holm(table["sign_test_p"]))


def figure(found: pd.DataFrame, groups: pd.DataFrame) -> Figure:
    """A row per model: correlations with both costs, and what exchange of top and random neurons costs in every layer.

    Args:
        found: correlations, with a column model.
        groups: costs of subsets, with a column model.
    """
    models = list(colored(found))
    drawn, axes = axes_grid(len(models), 3, (14, 3.9 * len(models)), width_ratios=(1, 1, 1.3))
    for row, (model, part, color) in zip(axes, models, strict=True):
        for panel, cost in zip(row, COSTS, strict=False):
            shown = part[part["cost"] == f"kl of {cost}"].set_index("measure").loc[list(MEASURES)]
            value = shown["rank_correlation"]
            sides = np.abs(
                shown[["rank_correlation_low", "rank_correlation_high"]].to_numpy() - value.to_numpy()[:, None]
            ).T
            stands = (shown["p_of_the_largest"] < 0.05).to_numpy()
            places = np.arange(len(shown))
            panel.errorbar(value, places, xerr=sides, fmt="none", color="0.6", capsize=2)
            panel.plot(value[stands], places[stands], "D", color=color, markersize=5)
            panel.plot(value[~stands], places[~stands], "D", color=color, markersize=5, markerfacecolor="white")
            panel.axvline(0, color="0.6", linewidth=0.8)
            panel.set_yticks(places, shown.index if cost == COSTS[0] else [""] * len(shown))
            panel.invert_yaxis()
            panel.set(
                xlim=(-1, 1), xlabel="rank correlation over layers", title=f"{model}\nKL of {cost.replace('_', ' ')}"
            )
            finish(panel, grid="x")
        panel = row[-1]
        chosen = groups[groups["model"] == model]
        for measure, style in zip(SUBSETS, ("--", "-"), strict=True):
            here = chosen[chosen["measure"] == measure].assign(layer=lambda frame: frame["layers"].astype(int))
            top, control = (
                here[here["neurons"].str.startswith(word)].sort_values("layer") for word in ("top", "random")
            )
            panel.plot(top["layer"], top["kl"], style, color=color, label=f"top tenth by {measure}")
            panel.plot(control["layer"], control["kl"], style, color="0.6", label="random, equal energy")
        panel.set(
            yscale="log",
            xlabel="layer",
            ylabel="KL of exchange (nats a token)",
            title="a tenth of the neurons exchanged",
        )
        panel.legend(frameon=False, fontsize="small")
        finish(panel)
    return drawn


def main(given: Sequence[str] | None = None) -> None:
    """Run the models, or read what they said, and print, and with --out and --figures write, frames and figure."""
    parser = arguments(__doc__, saved_reports=False)
    parser.add_argument("--tokens", type=int, default=1024, help="of evaluation text; twice as many calibrate")
    parser.add_argument("--text", default=None, help="a file to use instead of the sample text")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument(
        "--saved", action="store_true", help="take what an earlier run wrote into --out; models by their short names"
    )
    options = parser.parse_args(given)
    if options.saved and options.out is None:
        parser.error("--saved needs --out, the directory of the frames")
    with one_line_errors(parser):
        found, groups, compared = [], [], []
        for model in options.models:
            if options.saved:
                name = SAMPLES[model].name if model in SAMPLES else model
                frames = read(options.out, name)
            else:
                name, checkpoint = opened(model)
                frames = run(checkpoint, options.tokens, options.text, length=options.length)
                if options.out is not None:  # at once: the next model may take an hour
                    save({f"{file_stem(name)}-{part}": frame for part, frame in frames.items()}, options.out)
                    frames = read(options.out, name)  # rounded: --saved will find the same to the last digit
            found.append(correlations(frames["layers"], frames["costs"]).assign(model=name))
            groups.append(frames["subset_costs"].assign(model=name))
            compared.append(subsets(groups[-1]).assign(model=name))
            medians = frames["costs"].groupby("intervention", sort=False)[["delta_loss", "kl", "kl_spared"]].median()
            show(f"{name}: medians over layers", medians.reset_index(), 4)
            show("rank correlations", found[-1].drop(columns="model"))
            show("subsets", compared[-1].drop(columns="model"), 4)
        found, groups, compared = (pd.concat(parts, ignore_index=True) for parts in (found, groups, compared))
        write(options, {"correlations": found, "subsets": compared}, "predict-cause", lambda: figure(found, groups))


if __name__ == "__main__":
    main()
