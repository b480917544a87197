"""What a report says, in sentences: the numbers a reader would otherwise have to find in the table."""

from __future__ import annotations

import pandas as pd

from .headlines import headlines
from .phrases import percent, place, span

# of the neuron frame, that sentences are made of
COLUMNS = (
    "tower", "layer", "expert", "neuron", "query_norm", "output_energy", "exchange_asymmetry",
    "exchange_asymmetry_text", "bilinear_share_text", "abs_cos_qk", "flag",
)  # fmt: skip


def findings(layers: pd.DataFrame, neurons: pd.DataFrame) -> list[str]:
    """Sentences about the model, each with its numbers: what matters most, then the rest.

    Args:
        layers, neurons: the frames of a report.
    """
    return [*headlines(layers, neurons), *details(layers, neurons)]


def details(layers: pd.DataFrame, neurons: pd.DataFrame) -> list[str]:
    """What there is to say beyond the headlines.

    Args:
        layers, neurons: the frames of a report; of the second, `COLUMNS` are used.
    """
    gated = layers[~layers["no_mlp"].astype(bool)]
    if gated.empty:
        return []
    sentences = [
        _bilinear(gated),
        _output(gated),
        _writing(gated),
        _ranks(gated),
        _shared_subspace(gated),
        _text(gated, neurons),
    ]
    return [sentence for sentence in sentences if sentence]


def _bilinear(layers: pd.DataFrame) -> str:
    share = layers["bilinear_share_mean"]
    if share.isna().all():
        return ""
    return (
        f"The product of the two branches, a rank-1 bilinear unit, carries {percent(share.mean())} of a neuron's energy "
        f"(50 % in a ReLU neuron, 100 % in a bilinear one; layers: {span(share, '.0%')}). "
        f"{percent(layers['linear_share_mean'].mean())} is linear in the up branch (ReLU: about 32 %), "
        f"{percent(layers['residual_share_mean'].mean())} neither (ReLU: about 18 %)."
    )


def _output(layers: pd.DataFrame) -> str:
    value, error = layers["exchange_asymmetry_output"], layers["exchange_asymmetry_output_se"]
    if value.isna().all():
        return ""
    most = f", most in {place(layers, value.idxmax())}" if len(layers) > 1 else ""
    return (
        f"As whole vectors, the outputs of the layers have an exchange asymmetry of {span(value)}{most} (standard error at "
        f"most {error.max():.2g})."
    )


def _writing(layers: pd.DataFrame) -> str:
    cosine = layers["cos_kv_mean"].dropna()
    if cosine.empty:
        return ""
    high, low = cosine.idxmax(), cosine.idxmin()
    most, least = (f"{place(layers, index)} ({cosine[index]:+.2f})" for index in (high, low))
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
            f"As whole matrices, gate and up have an overlap of {span(overlap, '.2f')}, where 1 is the same subspace read with "
            f"the same weights and a random rotation of one of them would leave {span(null, '.2f')}."
        )
    if tensor.notna().any():
        text.append(
            f"As third-order tensors the layers have {span(tensor, '.0%')} of their energy antisymmetric under exchange: 0 % if "
            "every pair of gate and up rows had its mirror image, 50 % if the exchanged tensor is orthogonal."
        )
    return " ".join(text)


def _text(layers: pd.DataFrame, neurons: pd.DataFrame) -> str:
    if "exchange_asymmetry_output_text" not in layers or layers["exchange_asymmetry_output_text"].isna().all():
        return ""
    gaussian, share = layers["exchange_asymmetry_output"], neurons["bilinear_share_text"].mean()
    beside = "" if gaussian.isna().all() else f" (Gaussian input: {span(gaussian, '.2g')})"
    return (
        f"On text, the layers' outputs have an exchange asymmetry of {span(layers['exchange_asymmetry_output_text'], '.2g')}"
        f"{beside}, and the product of the branches carries {percent(share)} of a neuron's energy."
    )
