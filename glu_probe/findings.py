"""What a report says, in sentences: the numbers a reader would otherwise have to find in the table."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .activations import activation
from .measures.gaussian import gaussian_table


def findings(layers: pd.DataFrame, neurons: pd.DataFrame) -> list[str]:
    """Sentences about the model, each with its numbers; what is missing is said to be missing.

    Args:
        layers, neurons: the frames of a report.
    """
    gated = layers[~layers["no_mlp"].astype(bool)]
    if gated.empty:
        return ["No layer of this selection has a gated MLP."]
    sentences = [
        _regime(gated, neurons),
        _bilinear(gated),
        _output(gated),
        _dominated(gated, neurons),
        _alignment(gated),
        _writing(gated),
        _ranks(gated),
        _oddities(layers),
    ]
    return [sentence for sentence in sentences if sentence]


def _span(values: pd.Series, form: str = ".3g") -> str:
    return f"{values.min():{form}} to {values.max():{form}}"


def _regime(layers: pd.DataFrame, neurons: pd.DataFrame) -> str:
    names = layers["activation"].dropna().unique()
    scale = layers["query_norm_median"]
    if len(names) != 1 or layers["exchange_asymmetry_mean"].isna().all():
        return (
            f"The gate rows have norms of {_span(scale)} (medians of layers); the neurons' function was not measured."
        )
    text = (
        f"Gate scale: with a pre-activation of standard deviation s = |q|, the layers have medians of s between "
        f"{scale.min():.3g} (layer {layers.loc[scale.idxmin(), 'layer']}) and {scale.max():.3g} "
        f"(layer {layers.loc[scale.idxmax(), 'layer']})"
    )
    large = activation(names[0]).large
    if large is None or large.activation != "relu":
        return text + f", mean exchange asymmetry {layers['exchange_asymmetry_mean'].mean():.3f}."
    known = neurons[neurons["exchange_asymmetry"].notna()]
    relu = gaussian_table("relu")(np.full(len(known), np.inf), known["abs_cos_qk"].to_numpy(dtype=float))
    share = known["exchange_asymmetry"].mean() / relu["exchange_asymmetry"].mean()
    place = "near the bilinear end" if share < 0.25 else "near the ReLU end" if share > 0.75 else "between the two ends"
    return text + (
        f". Their neurons are {known['exchange_asymmetry'].mean():.3f} asymmetric under exchange of gate and up, "
        f"{share:.0%} of what ReLU neurons with the same directions would be: {place} (0 % bilinear, 100 % ReLU)."
    )


def _bilinear(layers: pd.DataFrame) -> str:
    share = layers["bilinear_share_mean"]
    if share.isna().all():
        return ""
    return (
        f"The product of the two branches, a rank-1 bilinear unit, carries {share.mean():.0%} of a neuron's energy on "
        f"Gaussian input (layers: {share.min():.0%} to {share.max():.0%}); {layers['linear_share_mean'].mean():.0%} are "
        f"linear in the up branch and {layers['residual_share_mean'].mean():.0%} are neither."
    )


def _output(layers: pd.DataFrame) -> str:
    value, error = layers["exchange_asymmetry_output"], layers["exchange_asymmetry_output_se"]
    if value.isna().all():
        return ""
    top = value.idxmax()
    return (
        f"The outputs of whole layers are {_span(value)} asymmetric under exchange, most in layer "
        f"{layers.loc[top, 'layer']} (standard error at most {error.max():.2g})."
    )


def _dominated(layers: pd.DataFrame, neurons: pd.DataFrame) -> str:
    share = layers["output_energy_top_share"]
    alone = layers[share > 0.5]
    if share.isna().all():
        return ""
    if alone.empty:
        return f"No single neuron carries more than {share.max():.0%} of a layer's output energy."
    named = []
    for _, row in alone.head(4).iterrows():
        here = neurons[(neurons["layer"] == row["layer"]) & (neurons["tower"] == row["tower"])]
        named.append(
            f"layer {row['layer']} (neuron {here.loc[here['output_energy'].idxmax(), 'neuron']}, "
            f"{row['output_energy_top_share']:.0%})"
        )
    more = f" and {len(alone) - 4} more" if len(alone) > 4 else ""
    return (
        f"One neuron carries more than half of the output energy in {', '.join(named)}{more}: energy-weighted and "
        "output figures of these layers are that neuron's."
    )


def _alignment(layers: pd.DataFrame) -> str:
    mean, null, effect = (layers[f"abs_cos_qk{part}"] for part in ("_mean", "_null_mean", "_effect"))
    if mean.isna().all():
        return ""
    above = int((effect > 0.2).sum())
    return (
        f"Gate and up rows of one neuron have |cos| of {mean.mean():.3f} on average, mismatched rows of the same layers "
        f"{null.mean():.3f}, isotropic ones {layers['abs_cos_qk_null_isotropic_mean'].mean():.3f}; in {above} of "
        f"{len(layers)} layers the neurons stand more than 0.2 standard deviations above the mismatched ones."
    )


def _writing(layers: pd.DataFrame) -> str:
    cosine = layers["cos_kv_mean"]
    if cosine.isna().all():
        return ""
    high, low = cosine.idxmax(), cosine.idxmin()
    return (
        f"What neurons write follows what their up branch reads most in layer {layers.loc[high, 'layer']} (mean cos(k, v) "
        f"{cosine[high]:+.2f}) and opposes it most in layer {layers.loc[low, 'layer']} ({cosine[low]:+.2f})."
    )


def _ranks(layers: pd.DataFrame) -> str:
    gate, up = layers["gate_stable_rank_unit"], layers["up_stable_rank_unit"]
    known = gate.notna() & up.notna()
    if not known.any():
        return ""
    return (
        f"With rows scaled to norm 1, the gate matrix has the lower stable rank of the two in "
        f"{int((gate < up)[known].sum())} of {int(known.sum())} layers (means {gate.mean():.1f} and {up.mean():.1f})."
    )


def _oddities(layers: pd.DataFrame) -> str:
    counts = {
        "with a zero row": layers["n_dead"].sum(),
        "of padding": layers["n_padded"].sum(),
        "with NaN or infinity": layers["n_non_finite"].sum(),
        "that repeat another": layers["n_duplicated"].sum(),
    }
    found = [f"{int(count):,} {name}" for name, count in counts.items() if count]
    empty = int(layers["no_mlp"].sum())
    text = f"Of {int(layers['n_neurons'].sum()):,} neurons, " + (
        f"flagged: {', '.join(found)}." if found else "none is dead, padded, duplicated or not finite."
    )
    return text + (f" {empty} layers have no gated MLP." if empty else "")
