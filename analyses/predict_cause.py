"""Does the asymmetry seen in the weights, or on text, predict what breaking the symmetry costs the model?

    python analyses/predict_cause.py [--out DIR] [--tokens 1024] [--models smollm2 gemma3]

Layer by layer: rank correlation of each measure with the cost (KL a token) of exchanging gate and up in that layer, and of
putting a bilinear fit in the place of its neurons; with a bootstrap interval over layers. The cost with the one neuron that
changes most spared is correlated too, since single neurons can be a layer's whole cost. Neuron by neuron: the tenth of each
layer's neurons with the largest measure is exchanged, against as many random neurons of the same output energy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

import glu_probe as gp
from glu_probe.sample_models import GEMMA3, SMOLLM2, SampleModel, fetch

COSTS = ("exchange", "bilinear_fit")
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
SAMPLES = {"smollm2": SMOLLM2, "gemma3": GEMMA3}


def correlations(layers: pd.DataFrame, costs: pd.DataFrame, *, draws: int = 2000, seed: int = 0) -> pd.DataFrame:
    """Spearman correlation over layers of every measure with every cost, and its 95 % bootstrap interval.

    Args:
        layers: a layer frame with text columns.
        costs: a causal frame of single layers.
        draws: bootstrap samples of layers.
        seed: of the bootstrap.
    """
    rng, rows = np.random.default_rng(seed), []
    for intervention in COSTS:
        part = costs[costs["intervention"] == intervention].set_index("layers")
        for column in ("kl", "kl_spared"):
            cost = part[column].reindex(layers["layer"].astype(str)).to_numpy(dtype=float)
            for measure in MEASURES:
                values = layers[measure].to_numpy(dtype=float)
                picks = rng.integers(0, len(values), (draws, len(values)))
                drawn = [spearmanr(values[pick], cost[pick]).statistic for pick in picks if len(set(pick)) > 2]
                low, high = np.nanquantile(drawn, (0.025, 0.975))
                rows.append(
                    {
                        "cost": f"{column} of {intervention}",
                        "measure": measure,
                        "rank_correlation": spearmanr(values, cost).statistic,
                        "low": low,
                        "high": high,
                    }
                )
    return pd.DataFrame(rows)


def subsets(costs: pd.DataFrame) -> pd.DataFrame:
    """How much more the top neurons cost than their random controls: medians over layers, and in how many layers."""
    rows = []
    for (measure, intervention), part in costs.groupby(["measure", "intervention"], sort=False):
        top = part[part["neurons"].str.startswith("top")].set_index("layers")["kl"]
        control = part[part["neurons"].str.startswith("random")].set_index("layers")["kl"].reindex(top.index)
        rows.append(
            {
                "measure": measure,
                "intervention": intervention,
                "top_kl_median": top.median(),
                "control_kl_median": control.median(),
                "ratio_median": (top / control).median(),
                "layers_where_top_costs_more": int((top > control).sum()),
                "layers": len(top),
            }
        )
    return pd.DataFrame(rows)


def analyse(sample: SampleModel, tokens: int) -> dict[str, pd.DataFrame]:
    """The frames of one model: costs of layers, correlations, costs of subsets, their summary."""
    checkpoint = gp.open_checkpoint(fetch(sample))
    report = gp.probe_text(checkpoint)
    common = {"tokens": tokens, "calibration": 2 * tokens}
    costs = gp.causal(checkpoint, interventions=[*COSTS, "zero_ablation", "mean_ablation"], **common)
    parts = [
        gp.causal(
            checkpoint, interventions=["exchange"], subset=(measure, SHARE, report.neurons), spare=0, **common
        ).assign(measure=measure)
        for measure in SUBSETS
    ]
    groups = pd.concat(parts, ignore_index=True)
    return {
        "costs": costs,
        "correlations": correlations(report.layers, costs),
        "subset_costs": groups,
        "subsets": subsets(groups),
    }


def main() -> None:
    """Print the tables of both models; with --out, save the frames."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="save the frames below this directory")
    parser.add_argument("--models", nargs="+", choices=[*SAMPLES], default=[*SAMPLES], help="which")
    parser.add_argument("--tokens", type=int, default=1024, help="of evaluation text; twice as many calibrate")
    options = parser.parse_args()
    for sample in (SAMPLES[name] for name in options.models):
        frames = analyse(sample, options.tokens)
        print(f"\n{sample.name}")
        medians = frames["costs"].groupby("intervention", sort=False)[["delta_loss", "kl", "kl_spared"]].median()
        print(medians.round(4).to_string())
        print(frames["correlations"].round(2).to_string(index=False))
        print(frames["subsets"].round(4).to_string(index=False))
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            for name, frame in frames.items():
                frame.to_csv(options.out / f"{sample.name}-{name}.csv", index=False)


if __name__ == "__main__":
    main()
