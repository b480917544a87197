"""What a report says, in sentences: the numbers a reader would otherwise have to find in the table."""

from __future__ import annotations

import numpy as np
import pandas as pd

# of the neuron frame, that sentences are made of
COLUMNS = (
    "tower", "layer", "neuron", "output_energy", "exchange_asymmetry", "exchange_asymmetry_text", "bilinear_share_text",
)  # fmt: skip


def findings(layers: pd.DataFrame, neurons: pd.DataFrame) -> list[str]:
    """Sentences about the model, each with its numbers; what is missing is said to be missing.

    Args:
        layers, neurons: the frames of a report; of the second, `COLUMNS` are used.
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
        _shared_subspace(gated),
        _on_text(gated, neurons),
        _oddities(layers),
    ]
    return [sentence for sentence in sentences if sentence]


def _span(values: pd.Series, form: str = ".3g") -> str:
    low, high = f"{values.min():{form}}", f"{values.max():{form}}"
    return low if low == high else f"{low} to {high}"


def _regime(layers: pd.DataFrame, neurons: pd.DataFrame) -> str:
    scale, ratio = layers["query_norm_median"], layers["exchange_asymmetry_relu_ratio"]
    if scale.isna().all():
        return ""
    if layers["exchange_asymmetry_mean"].isna().all():
        return (
            f"The gate rows have norms of {_span(scale)} (medians of layers); the neurons' function was not measured."
        )
    mean = neurons["exchange_asymmetry"].mean()
    text = f"Exchanging gate and up changes the sign of {_percent(mean)} of a neuron's energy on Gaussian input"
    if ratio.isna().all():
        return text + "."
    whole = np.average(ratio.dropna(), weights=layers.loc[ratio.notna(), "n_neurons"])
    place = "near the bilinear end" if whole < 0.25 else "near the ReLU end" if whole > 0.75 else "between the two ends"
    where = f" (layers: {_percents(ratio)}; lowest in {_layer(layers, ratio.idxmin())})" if len(layers) > 1 else ""
    return (
        f"{text}: {_percent(whole)} of what it would be for ReLU gates with the same directions{where}. On that scale, 0 % "
        f"bilinear and 100 % ReGLU, the model is {place}. Gates work at a scale s = |q| of {_span(scale)} (medians of "
        "layers): far below 1 they are linear, far above 1 a ReLU."
    )


def _percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def _percents(values: pd.Series) -> str:
    low, high = _percent(values.min()), _percent(values.max())
    return low if low == high else f"{low} to {high}"


def _layer(layers: pd.DataFrame, index: int) -> str:
    return f"layer {layers.loc[index, 'layer']}"


def _bilinear(layers: pd.DataFrame) -> str:
    share = layers["bilinear_share_mean"]
    if share.isna().all():
        return ""
    return (
        f"The product of the two branches, a rank-1 bilinear unit, carries {_percent(share.mean())} of a neuron's energy "
        f"(50 % in a ReLU neuron, 100 % in a bilinear one; layers: {_percents(share)}). "
        f"{_percent(layers['linear_share_mean'].mean())} is linear in the up branch (ReLU: about 32 %), "
        f"{_percent(layers['residual_share_mean'].mean())} neither (ReLU: about 18 %)."
    )


def _output(layers: pd.DataFrame) -> str:
    value, error = layers["exchange_asymmetry_output"], layers["exchange_asymmetry_output_se"]
    if value.isna().all():
        return ""
    most = f", most in {_layer(layers, value.idxmax())}" if len(layers) > 1 else ""
    return (
        f"As whole vectors, the outputs of the layers have an exchange asymmetry of {_span(value)}{most} (standard error at "
        f"most {error.max():.2g})."
    )


def _dominated(layers: pd.DataFrame, neurons: pd.DataFrame) -> str:
    share = layers["output_energy_top_share"]
    alone = layers[share > 0.5]
    if share.isna().all():
        return ""
    if alone.empty:
        return f"No single neuron carries more than {_percent(share.max())} of a layer's output energy."
    named = []
    for _, row in alone.head(4).iterrows():
        here = neurons[(neurons["layer"] == row["layer"]) & (neurons["tower"] == row["tower"])]
        named.append(
            f"layer {row['layer']} (neuron {here.loc[here['output_energy'].idxmax(), 'neuron']}, "
            f"{_percent(row['output_energy_top_share'])})"
        )
    more = f" and {len(alone) - 4} more" if len(alone) > 4 else ""
    return (
        f"One neuron carries more than half of the output energy in {', '.join(named)}{more}: energy-weighted and "
        "output figures of these layers are that neuron's."
    )


def _alignment(layers: pd.DataFrame) -> str:
    mean, null, effect = (layers[f"abs_cos_qk{part}"] for part in ("_mean", "_null_mean", "_effect"))
    if mean.isna().all() or null.isna().all():
        return ""
    above, known = int((effect > 0.2).sum()), int(effect.notna().sum())
    return (
        f"Gate and up rows of one neuron have |cos| of {mean.mean():.3f} on average, mismatched rows of the same layers "
        f"{null.mean():.3f}, isotropic ones {layers['abs_cos_qk_null_isotropic_mean'].mean():.3f}; in {above} of "
        f"{known} layers the mean lies above the mismatched ones by more than 0.2 of their standard deviation (a small "
        "effect)."
    )


def _writing(layers: pd.DataFrame) -> str:
    cosine = layers["cos_kv_mean"].dropna()
    if cosine.empty:
        return ""
    high, low = cosine.idxmax(), cosine.idxmin()
    most, least = (f"{_layer(layers, index)} ({cosine[index]:+.2f})" for index in (high, low))
    if len(cosine) == 1:
        return f"What neurons write has a mean cos(k, v) of {cosine[high]:+.2f} with what their up branch reads."
    if cosine[low] >= 0:
        return f"In every layer neurons write along what their up branch reads, by mean cos(k, v) most in {most}, least in {least}."
    if cosine[high] <= 0:
        return f"In every layer neurons write against what their up branch reads, by mean cos(k, v) most in {least}, least in {most}."
    return f"Neurons write along what their up branch reads most in {most}, and against it most in {least}, by mean cos(k, v)."


def _ranks(layers: pd.DataFrame) -> str:
    gate, up = layers["gate_stable_rank_unit"], layers["up_stable_rank_unit"]
    known = gate.notna() & up.notna()
    if not known.any():
        return ""
    return (
        f"With rows scaled to norm 1, the gate matrix has the lower stable rank of the two in "
        f"{int((gate < up)[known].sum())} of {int(known.sum())} layers (means {gate.mean():.1f} and {up.mean():.1f})."
    )


def _shared_subspace(layers: pd.DataFrame) -> str:
    overlap, null, tensor = layers["branch_overlap"], layers["branch_overlap_null"], layers["tensor_asymmetry"]
    text = []
    if overlap.notna().any():
        text.append(
            f"As whole matrices, gate and up have an overlap of {_span(overlap, '.2f')}, where 1 is the same subspace read with "
            f"the same weights and a random rotation of one of them would leave {_span(null, '.2f')}."
        )
    if tensor.notna().any():
        text.append(
            f"As third-order tensors the layers have {_percents(tensor)} of their energy antisymmetric under exchange: 0 % if "
            "every pair of gate and up rows had its mirror image, 50 % if the exchanged tensor is orthogonal."
        )
    return " ".join(text)


def _on_text(layers: pd.DataFrame, neurons: pd.DataFrame) -> str:
    if "exchange_asymmetry_text" not in neurons or neurons["exchange_asymmetry_text"].isna().all():
        return ""
    text, error = neurons["exchange_asymmetry_text"].mean(), layers["exchange_asymmetry_text_mean_se"].max()
    sentence = f"On text, exchanging gate and up changes the sign of {_percent(text)} of a neuron's energy"
    known = neurons["exchange_asymmetry"].notna() & neurons["exchange_asymmetry_text"].notna()
    if known.any():
        both = neurons.loc[known, ["exchange_asymmetry", "exchange_asymmetry_text"]]
        sentence += (
            f" ({_percent(both['exchange_asymmetry'].mean())} on Gaussian input; rank correlation of the two over neurons "
            f"{both.corr('spearman').iloc[0, 1]:.2f})"
        )
    output = layers["exchange_asymmetry_output_text"]
    gaussian = layers["exchange_asymmetry_output"]
    beside = "" if gaussian.isna().all() else f" (Gaussian input: {_span(gaussian, '.2g')})"
    share = neurons["bilinear_share_text"].mean()
    if pd.notna(error):
        sentence += f", with a standard error of at most {error:.1g} for a layer's mean"
    return (
        f"{sentence}. The layers' outputs have an exchange "
        f"asymmetry of {_span(output, '.2g')} there{beside}, and the product of the branches carries {_percent(share)} of a "
        "neuron's energy."
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
