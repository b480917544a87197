"""Which pictures a comparison has, in which order, and how each is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pandas as pd

from .pictures import FULL, Picture, drawing

if TYPE_CHECKING:
    from ..across.comparison import Comparison

# measure, title, caption
_PROFILES = (
    ("exchange_asymmetry_relu_ratio", "Between bilinear and ReGLU",
     "Mean exchange asymmetry of a layer's neurons over what it would be if their gates were ReLUs: 0 is a bilinear layer, 1 is "
     "ReGLU."),
    ("exchange_asymmetry", "Exchange asymmetry",
     "How much of a neuron's energy changes sign when gate and up are exchanged; mean of neurons."),
    ("bilinear_share", "Bilinear share",
     "How much of a neuron's energy the plain product of its branches carries: 1 in a bilinear neuron, 1/2 in a ReLU."),
    ("query_norm", "Gate scale",
     "s = |q|: how far the gate is driven, in units of its activation. Compare it between models of one activation only."),
    ("abs_cos_qk", "Alignment of gate and up", "|cos(q, k)|, mean of neurons."),
    ("cos_kv", "What is read and what is written",
     "cos(k, v), mean of neurons: above 0 they write along what their up branch reads, below 0 against it."),
)  # fmt: skip
_TRAJECTORIES = ("exchange_asymmetry_relu_ratio", "bilinear_share", "query_norm", "abs_cos_qk")


def comparison_pictures(comparison: Comparison) -> Iterator[Picture]:
    """Every picture of a comparison's page; drawing one may find that there is nothing to draw."""
    from .. import figures as f

    layers, differences = comparison.layers, comparison.differences
    by = "layer" if comparison.provenance["align"] == "layer" else "relative_depth"
    deepest = int(layers.groupby("model")["layer"].nunique().max())
    wide = min(FULL, max(8.2, 4.4 + 0.08 * deepest))
    row = min(FULL, max(6.5, 3.6 + 0.4 * len(comparison.models))), 3.6
    few = len(comparison.models) <= 3
    for measure, title, caption in _PROFILES:
        band = " Bands: 5 to 95 % of neurons." if few and f"{measure}_q05" in layers else ""
        yield Picture(
            f"profile_{measure}", title, caption + band, (wide, 3.3),
            drawing(f.model_profiles, layers, measure, by=by), shaded=len(comparison.models) > f.FEW_MODELS,
        )  # fmt: skip
    limit, others = f.effect_limit(differences[differences["measure"].isin(f.EFFECT_MEASURES)]), comparison.models[1:]
    for index, model in _own_pictures(others, 4):
        suffix = "" if len(others) == 1 else f"_{index + 1}"
        places = differences.loc[differences["model"] == model].groupby("measure", observed=True).size().max()
        width, height = f.effect_grid_size(len(f.EFFECT_MEASURES), int(places) if pd.notna(places) else 1)
        yield Picture(
            f"effects{suffix}", f"Where {model} differs from {comparison.base}",
            "Cohen's d of every neuron measure: the difference of means in units of the spread between neurons. Red: larger than "
            "in the base, blue: smaller. One scale for all measures"
            f"{'' if len(others) == 1 else ' and models'}. A dot: rounding of the weights explains as much.",
            (min(FULL, width), height), drawing(f.difference_heatmap, differences, model=model, limit=limit),
        )  # fmt: skip
    if len(comparison.models) > 2:
        for measure in _TRAJECTORIES:
            yield Picture(
                f"trajectory_{measure}", f"{measure} over the models, in the order given",
                "A line per layer, coloured by its relative depth; the thick line is the mean of layers.",
                row, drawing(f.model_trajectory, layers, measure), shaded=True,
            )  # fmt: skip
        yield Picture(
            "angle_trajectory", "How far neurons turned, in the order given",
            f"Angles against {comparison.base}, median of neurons: the median over MLPs, and the band of 5 to 95 % of MLPs.",
            row, lambda ax: f.angle_trajectory(comparison.mlps, ax=ax),
        )  # fmt: skip
    for index, model in _own_pictures(others, 2):
        followed = comparison.mlps[(comparison.mlps["model"] == model) & comparison.mlps["angle_q"].notna()]
        if followed.empty:
            continue
        suffix = "" if len(others) == 1 else f"_{index + 1}"
        yield Picture(
            f"angles{suffix}", f"How far the neurons of {model} turned",
            "Medians over the neurons of each MLP, gate, up and down. Dashed: what rounding to the stored types of "
            f"{model} alone would turn them by; dotted, those of {comparison.base}. Where a line lies on one of its own "
            "colour, nothing but that rounding is seen; errors of both files, where independent, add in quadrature.",
            (min(FULL, max(8.2, 4.4 + 0.08 * len(followed))), 3.4), drawing(f.angle_profile, comparison.mlps, model=model),
        )  # fmt: skip
        yield Picture(
            f"angle_histogram{suffix}", f"Angles of all neurons of {model}",
            "Neurons by the angle between their factors in the two models. Dashed and dotted: the medians that rounding in one file alone "
            "would give.",
            (7.6, 3.5), drawing(f.angle_histogram, comparison.neurons, model=model),
        )  # fmt: skip
        if followed["rounding"].gt(0).any():
            yield Picture(
                f"movement{suffix}", f"Movement of every neuron of {model}, and what rounding explains of it",
                "On the line rounding explains all of it; neurons above the dashed one moved further than rounding takes them.",
                (6.6, 4.6), drawing(f.movement_scatter, comparison.neurons, model=model), shaded=True,
            )  # fmt: skip


def _own_pictures(others: list[str], at_most: int) -> list[tuple[int, str]]:
    """Models that get pictures of their own: all, or of a long row the last."""
    numbered = list(enumerate(others))
    return numbered if len(numbered) <= at_most else numbered[-1:]
