"""What a report says first of a text: where the model stands on it, and which layers part from the Gaussian prediction."""

from __future__ import annotations

import pandas as pd

from .phrases import listed, percent, place, span

_MEASURE = "exchange_asymmetry"
_SCALE = "gate_std_text_median"  # older reports have it for neurons alone
_ERRORS = 2  # standard errors of the text by which a layer parts from its prediction
_NAMED = 3  # layers in each direction


def on_text(layers: pd.DataFrame) -> bool:
    """Whether a text was run that some of these layers were measured on."""
    return f"{_MEASURE}_text_mean" in layers and layers[f"{_MEASURE}_text_mean"].notna().any()


def on_both_inputs(place: str, layers: pd.DataFrame, changed: float) -> str:
    """Where the model is on Gaussian input and on the text that was run.

    There is no place on text itself: what a ReLU gate with the same directions would do there has no closed form. So the scale
    of the gates stands beside |q|, and the asymmetry on text beside that on Gaussian input.

    Args:
        place: words for where it is on Gaussian input.
        layers: the layer frame.
        changed: share of a neuron's energy that changes sign on Gaussian input, mean of neurons.
    """
    scales, predicted = "", layers[f"{_MEASURE}_mean"]
    if _SCALE in layers:
        scales = (
            f"; on the text that was run, the gates' pre-activations have {_part(layers):.2g} times that input's standard deviation, "
            f"{span(layers[_SCALE])} where |q| is {span(layers['query_norm_median'])} (medians of layers; far below 1 a gate is "
            "linear, far above 1 a ReLU)"
        )
    return (
        f"On isotropic Gaussian input the model is {place}{scales}. Exchanging gate and up changes the sign of "
        f"{percent(changed)} of a neuron's energy on Gaussian input and of {percent(_mean(layers))} on text (means of layers: "
        f"{span(predicted, '.0%')}, and {span(layers[f'{_MEASURE}_text_mean'], '.0%')})."
    )


def on_text_alone(layers: pd.DataFrame) -> str:
    """What the text says where the weights cannot place the model."""
    if not on_text(layers):
        return ""
    scales = ""
    if _SCALE in layers:
        scales = (
            f", and the gates' pre-activations have a standard deviation of {span(layers[_SCALE])} (medians of layers)"
        )
    return (
        f"On the text that was run, exchanging gate and up changes the sign of {percent(_mean(layers))} of a neuron's energy "
        f"(means of layers: {span(layers[f'{_MEASURE}_text_mean'], '.0%')}){scales}."
    )


def _mean(layers: pd.DataFrame) -> float:
    """Over all neurons that were listened to."""
    known = layers[layers[f"{_MEASURE}_text_mean"].notna()]
    return (known[f"{_MEASURE}_text_mean"] * known["n_neurons"]).sum() / known["n_neurons"].sum()


def _part(layers: pd.DataFrame) -> float:
    """The scale of the gates on text over |q|, median layer."""
    return (layers[_SCALE] / layers["query_norm_median"]).median()


def departures(layers: pd.DataFrame, neurons: pd.DataFrame) -> str:
    """Which layers are more and less asymmetric on text than on Gaussian input, by how much, and at what scale of the gate."""
    needed = [f"{_MEASURE}_mean", f"{_MEASURE}_text_mean"]
    if not on_text(layers) or layers[needed].isna().any(axis="columns").all():
        return ""
    known = layers[layers[needed].notna().all(axis="columns")]
    off = known[f"{_MEASURE}_text_mean"] - known[f"{_MEASURE}_mean"]
    error = known[f"{_MEASURE}_text_mean_se"]
    beyond = off.abs() > _ERRORS * error.fillna(0.0)
    above = off[beyond & (off > 0)].sort_values(ascending=False, kind="stable")
    below = off[beyond & (off < 0)].sort_values(kind="stable")
    by = (
        f"by more than {_ERRORS} standard errors"
        if error.notna().any()
        else "by errors that a text this short does not tell"
    )
    if not len(above) and not len(below):
        sentence = f"None of {len(known)} layers parts on text from what Gaussian input predicts {by}"
    else:
        parts = [
            f"{len(some)} of {len(known)} layers {'is' if len(some) == 1 else 'are'} {way} asymmetric than that"
            f"{f', most of all {_named(known, some)}' if len(some) else ''}"
            for some, way in ((above, "more"), (below, "less"))
        ]
        sentence = f"Text parts from what Gaussian input predicts ({by}): {'; '.join(parts)}"
    return f"{sentence}.{_over_neurons(neurons)}" + (
        f" Standard errors of layers on text: at most {error.max():.1g}." if error.notna().any() else ""
    )


def _named(layers: pd.DataFrame, some: pd.Series) -> str:
    """The layers that come first, with their numbers."""
    names = []
    for index, row in layers.loc[some.index[:_NAMED]].iterrows():
        scales = f"; gates at {row[_SCALE]:.2g} where |q| is {row['query_norm_median']:.2g}" if _SCALE in layers else ""
        text, gaussian = row[f"{_MEASURE}_text_mean"], row[f"{_MEASURE}_mean"]
        names.append(f"{place(layers, index)} ({text:.3f} on text, {gaussian:.3f} predicted{scales})")
    return listed(names)


def _over_neurons(neurons: pd.DataFrame) -> str:
    both = neurons[[_MEASURE, f"{_MEASURE}_text"]].dropna()
    rank = both.corr("spearman").iloc[0, 1] if len(both) > 1 else float("nan")
    return f" Over neurons, the two have a rank correlation of {rank:+.2f}." if rank == rank else ""
