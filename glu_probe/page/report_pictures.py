"""Which pictures a report has, in which order, and how each is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pandas as pd

from ..report import Report
from .pictures import FULL, HALF, Picture, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# measure, title, caption
_PROFILES = (
    ("exchange_asymmetry", "Exchange asymmetry by layer",
     "How much of a neuron's energy changes sign when gate and up are exchanged: 0 if they are interchangeable, 1/4 for a "
     "ReLU with unrelated branches, 1/2 if the exchanged neuron is uncorrelated with the original. Where the weighted mean "
     "leaves the plain one, few neurons carry the layer's energy (see output_energy_top_share)."),
    ("bilinear_share", "Bilinear share by layer",
     "How much of a neuron's energy the plain product of its two branches carries: 1 in a bilinear neuron, 1/2 in a ReLU."),
    ("abs_cos_qk", "Alignment of gate and up",
     "|cos(q, k)|: 1 where both branches read the same direction. The dotted line is the mean over mismatched pairs of the "
     "same layer, what anisotropy alone would give: alignment is what lies above it."),
    ("cos_kv", "What is read and what is written",
     "cos(k, v): above 0 the neurons write along what their up branch reads, below 0 against it."),
)  # fmt: skip

# of the neuron frame, which may lie in its file
_PICTURED = (
    "model", "tower", "layer", "expert", "neuron", "query_norm", "abs_cos_qk", "cos_kv", "exchange_asymmetry",
    "exchange_asymmetry_text", "bilinear_share", "bilinear_share_text", "output_energy",
)  # fmt: skip


def report_pictures(report: Report) -> Iterator[Picture]:
    """Every picture of a report's page; drawing one may find that there is nothing to draw."""
    from .. import figures as f

    layers, neurons = report.layers, report.neuron_columns(*_PICTURED)
    wide = min(FULL, max(7.0, 5.0 + 0.5 * len(layers)))
    yield Picture(
        "phase_diagram", "Between bilinear and ReLU",
        "Each point is a layer at the medians of its neurons. To the left the gate works in its linear range and the neuron is "
        "bilinear: exchanging the branches changes nothing. To the right it is a ReLU. Upwards gate and up read the same "
        "direction. Contours: exchange asymmetry of a single neuron on Gaussian input.",
        (HALF, 4.1), lambda ax: f.phase_diagram(layers, ax=ax), shaded=True,
    )  # fmt: skip
    yield Picture(
        "phase_diagram_neurons", "All neurons in the same picture",
        "How many neurons lie where, on a logarithmic colour scale: whether the layers' medians speak for their neurons, and "
        "which lie apart.",
        (HALF, 4.1), lambda ax: _neurons_in_the_plane(layers, neurons, ax), shaded=True,
    )  # fmt: skip
    yield Picture(
        "relu_ratio", "Is this layer bilinear or ReGLU?",
        "Mean exchange asymmetry of the layer's neurons over what it would be if their gates were ReLUs with the same "
        "directions, both on isotropic Gaussian input: 0 is a bilinear layer, 1 is ReGLU.",
        (wide, 2.6), lambda ax: _between_the_ends(layers, ax),
    )  # fmt: skip
    yield from _layers_on_text(report, wide)
    yield Picture(
        "heatmap", "Every layer at a glance",
        "A column per layer, a row per measure; each row has its own scale, from the lowest to the highest value in its label. "
        "A column that differs from its neighbours in many rows is a layer that stands apart.",
        (wide, 5.0), lambda ax: f.layer_heatmap(layers, ax=ax), shaded=True,
    )  # fmt: skip
    for measure, title, caption in _PROFILES:
        yield Picture(f"profile_{measure}", title, caption, (wide, 3.0), drawing(f.layer_profile, layers, measure))
    yield Picture(
        "stable_ranks", "Stable ranks of the three matrices",
        "(Frobenius / spectral norm) squared, rows scaled to norm 1, so that no choice of coordinates enters: over how many "
        "directions a matrix spreads. Low values: all neurons read, or write, much the same.",
        (wide, 3.0), lambda ax: f.layer_lines(layers, [f"{b}_stable_rank_unit" for b in ("gate", "up", "down")], ax=ax),
    )  # fmt: skip
    yield Picture(
        "branch_overlap", "Do gate and up read the same subspace?",
        "Overlap of the two matrices' Gram matrices, unit rows: 1 if they read the same directions with the same weights. "
        "The other line is what their spectra alone would give if one were rotated at random.",
        (wide, 2.6), lambda ax: f.layer_lines(layers, ["branch_overlap", "branch_overlap_null"], ax=ax),
    )  # fmt: skip
    yield Picture(
        "class_bars", "Input-output classes by layer",
        "Classes of Gerstner & Schuetze (arXiv 2505.17936) at threshold 0.5: blue neurons strengthen what they read, red ones "
        "weaken it, green ones write along or against what the gate alone reads (proportional change), grey ones write something "
        "else. Each class is explained below, under what the measures mean; classes.csv has other thresholds.",
        (wide, 3.4), lambda ax: f.class_bars(layers, ax=ax),
    )  # fmt: skip
    yield Picture(
        "neuron_scatter", "Alignment and writing, neuron by neuron",
        "Right: gate and up read the same direction. Up: the neuron writes along what its up branch reads. Down: against it.",
        (HALF, 4.1), lambda ax: f.neuron_scatter(neurons, ax=ax), shaded=True,
    )  # fmt: skip
    yield Picture(
        "neuron_energy", "What the neurons that do most are like",
        "Up: the neuron's mean squared output on Gaussian input, logarithmic. Where the top of the cloud lies to one side, the "
        "weighted means leave the plain ones; single neurons far above the rest can carry a layer.",
        (HALF, 4.1), lambda ax: f.neuron_scatter(neurons, "exchange_asymmetry", "output_energy", ax=ax), shaded=True,
    )  # fmt: skip
    yield from _neurons_on_text(report)
    yield from _of_experts(report)


def _neurons_in_the_plane(layers: pd.DataFrame, neurons: pd.DataFrame, ax: Axes) -> None:
    """Neurons whose function was measured: of the others, the scale of the input is not known."""
    from .. import figures as f

    known = neurons.loc[neurons["exchange_asymmetry"].notna(), ["layer", "query_norm", "abs_cos_qk"]]
    if known.empty:
        raise f.columns.nothing("exchange_asymmetry")
    f.phase_diagram(known, activation=f.columns.only_activation(layers), ax=ax)


def _between_the_ends(layers: pd.DataFrame, ax: Axes) -> None:
    """The ratio to ReLU, and where its two ends are."""
    from .. import figures as f

    f.layer_lines(layers, ["exchange_asymmetry_relu_ratio"], ax=ax)
    ax.axhline(1.0, color="0.4", lw=0.8, ls="--")
    ax.set(ylim=(0, max(1.1, ax.get_ylim()[1])), ylabel="")
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0  bilinear", "0.25", "0.5", "0.75", "1  ReGLU"])


def _layers_on_text(report: Report, wide: float) -> Iterator[Picture]:
    """Where the layers are on the text that was run, beside where Gaussian input has them."""
    from .. import figures as f

    if "text" not in report.provenance:
        return
    pairs = [f"exchange_asymmetry_{kind}" for kind in ("mean", "text_mean", "output", "output_text")]
    yield Picture(
        "text_profile", "Exchange asymmetry on text",
        "Of neurons (mean) and of the layer's output, on Gaussian input and on text, each in the canonical gauge of its own "
        "input; dashed is text. Where the lines of one colour part, what the layer meets in text is not what its weights alone suggest.",
        (wide, 3.2), lambda ax: f.layer_lines(report.layers, pairs, ax=ax),
    )  # fmt: skip
    yield Picture(
        "text_gate_scale", "The scale at which gates work on text",
        "Medians of neurons, on a logarithmic axis: |q|, the standard deviation of the gate's pre-activation on isotropic input, "
        "and the standard deviation that it has on text. Far below 1 a gate is linear around its mean, far above 1 a ReLU: "
        "where the lines part, text has the gates work elsewhere than the weights alone suggest.",
        (wide, 2.8), lambda ax: _scales_of_gates(report.layers, ax),
    )  # fmt: skip


def _scales_of_gates(layers: pd.DataFrame, ax: Axes) -> None:
    """Their scale on Gaussian input and on text, and the 1 that parts linear ones from ReLUs."""
    from .. import figures as f

    f.layer_lines(layers, ["query_norm_median", "gate_std_text_median"], logarithmic=True, ax=ax)
    ax.axhline(1.0, color="0.4", lw=0.8, ls=":")


def _neurons_on_text(report: Report) -> Iterator[Picture]:
    """Neuron by neuron, what a text adds."""
    from .. import figures as f

    if "text" not in report.provenance:
        return
    yield Picture(
        "text_scatter", "Exchange asymmetry of every neuron, Gaussian input against text",
        "On the line a neuron is as asymmetric on text as on isotropic input.",
        (HALF, 4.1), lambda ax: f.text_scatter(report.neuron_columns(*_PICTURED), ax=ax), shaded=True,
    )  # fmt: skip
    yield Picture(
        "text_scatter_bilinear", "Bilinear share of every neuron, Gaussian input against text",
        "Below the line a neuron is less bilinear on text than on isotropic input.",
        (HALF, 4.1), lambda ax: f.text_scatter(report.neuron_columns(*_PICTURED), "bilinear_share", ax=ax), shaded=True,
    )  # fmt: skip


def _of_experts(report: Report) -> Iterator[Picture]:
    """Pictures of every stack that has routed experts."""
    from .. import figures as f

    layers, neurons = report.layers, report.neuron_columns(*_PICTURED)
    routed = layers[layers["group"] == "routed"]
    for tower in dict.fromkeys(routed["tower"]):
        experts = int(routed.loc[routed["tower"] == tower, "n_experts"].max())
        n_layers = layers.loc[layers["tower"] == tower, "layer"].nunique()
        size = HALF if n_layers <= 48 else FULL, min(6.5, f.expert_grid_size(n_layers, experts)[1])
        for measure, title in (
            ("exchange_asymmetry", "Exchange asymmetry"),
            ("abs_cos_qk", "Alignment of gate and up"),
        ):
            suffix, where = ("", "") if routed["tower"].nunique() == 1 else (f"_{tower}", f" of {tower}")
            yield Picture(
                f"experts_{measure}{suffix}", f"{title}, expert by expert{where}",
                f"Mean {measure} of each routed expert's neurons: a column per layer, a row per expert. Experts of different "
                "layers have nothing to do with each other; what to look for is experts that differ from the rest of their layer.",
                size, drawing(f.expert_heatmap, neurons, measure, tower=tower), shaded=True,
            )  # fmt: skip
