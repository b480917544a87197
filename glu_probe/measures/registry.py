"""What there is to measure: every column of the frames with its meaning, range and invariances.

A run on text adds columns with the suffixes of `TEXT_SUFFIXES`. A property test proves each declared invariance. The three transformations that leave the layer's function as it is:

* permutation: of the neurons;
* gauge: (k, v) -> (c k, v / c), c of either sign, neuron by neuron;
* rotation: of the residual stream's basis (the norm's gain is folded in before).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .io_classes import IO_CLASSES

ALL = ("permutation", "gauge", "rotation")
NO_GAUGE = ("permutation", "rotation")


@dataclass(frozen=True)
class Measure:
    """One column.

    Attributes:
        name: the column's name.
        level: "neuron" (a column of the neuron frame, its statistics in the layer frame) or "layer".
        needs: "directions" (the weights alone), "function" (activation and input scale must be known) or "text" (a run of
            the model).
        range: values it can take, as text.
        invariant: transformations that leave it unchanged.
        meaning: one sentence.
        reference: where the definition comes from.
    """

    name: str
    level: Literal["neuron", "layer"]
    needs: Literal["directions", "function", "text"]
    range: str
    invariant: tuple[str, ...]
    meaning: str
    reference: str = "glu-probe"


_GS = "Gerstner & Schuetze, arXiv 2505.17936"
_BRESLOW = "after Breslow, arXiv 2606.22172"

_NEURON = (
    Measure("query_norm", "neuron", "directions", ">= 0", ALL,
            "|q|: the standard deviation s of the gate's pre-activation on isotropic input; the activation fixes its scale"),
    Measure("value_gain", "neuron", "directions", ">= 0", ALL, "|k||v|: how strongly the neuron's linear branch writes"),
    Measure("abs_cos_qk", "neuron", "directions", "[0, 1]", ALL,
            "|cos(q, k)|: 0 if gate and up read unrelated directions, 1 if the same one"),
    Measure("cos_kv", "neuron", "directions", "[-1, 1]", ALL,
            "cos(k, v): > 0 if the neuron writes along what its up branch reads, < 0 against it", _GS),
    Measure("abs_cos_qv", "neuron", "directions", "[0, 1]", ALL, "|cos(q, v)|: does the neuron write along its gate", _GS),
    Measure("cos_qv", "neuron", "directions", "[-1, 1]", ALL, "cos(q, v) times the sign of cos(q, k)", _GS),
    Measure("exchange_asymmetry", "neuron", "function", "[0, 1]", ALL,
            "share of the neuron's energy that changes sign when gate and up are exchanged: 0 symmetric, 1/2 if the exchanged "
            "neuron is uncorrelated with it, 1 antisymmetric", _BRESLOW),
    Measure("scaling_asymmetry", "neuron", "function", "[0, 1]", ALL,
            "the same for (q, k) -> (2q, k/2): 0 for ReLU and for a bilinear neuron", _BRESLOW),
    Measure("linear_share", "neuron", "function", "[0, 1]", ALL, "share of its energy that is proportional to b = k.x: 0 for a bilinear neuron, about 0.32 for a ReLU"),
    Measure("bilinear_share", "neuron", "function", "[0, 1]", ALL,
            "share that the product ab adds: 1 for a bilinear neuron, 1/2 for a ReLU whatever its directions", _BRESLOW),
    Measure("residual_share", "neuron", "function", "[0, 1]", ALL, "the rest of its energy: 0 for a bilinear neuron, about 0.18 for a ReLU, more in between"),
    Measure("output_energy", "neuron", "function", ">= 0", ALL,
            "E[g^2]|v|^2: the neuron's mean squared output on Gaussian input, the weight of `_weighted` means"),
    Measure("outlier_risk", "neuron", "directions", ">= 0", ALL,
            "|cos(q, k)||q||k||v|: gain of a quadratic amplifier, a known cause of FP8 overflow"),
    Measure("io_class", "neuron", "directions", f"one of {len(IO_CLASSES)} classes", ALL,
            "whether the neuron writes what it reads, by its three cosines at threshold 0.5", _GS),
    Measure("key_norm", "neuron", "directions", ">= 0", NO_GAUGE, "|k|, a choice of coordinates: means nothing alone"),
    Measure("value_norm", "neuron", "directions", ">= 0", NO_GAUGE, "|v|, a choice of coordinates: means nothing alone"),
    Measure("norm_ratio", "neuron", "directions", ">= 0", NO_GAUGE,
            "|q|/|k|, a choice of coordinates: means nothing alone"),
)  # fmt: skip

_LAYER = (
    Measure("exchange_asymmetry_output", "layer", "function", "[0, 1]", ALL,
            "exchange_asymmetry of the whole layer's output vector on Gaussian samples", _BRESLOW),
    Measure("scaling_asymmetry_output", "layer", "function", "[0, 1]", ALL,
            "scaling_asymmetry of the whole layer's output vector on Gaussian samples", _BRESLOW),
    Measure("exchange_asymmetry_relu_ratio", "layer", "function", ">= 0", ALL,
            "mean exchange asymmetry over that of ReLU neurons with the same directions: 0 a bilinear layer, 1 ReGLU"),
    Measure("output_energy_top_share", "layer", "function", "[0, 1]", ALL,
            "share of the strongest neuron in the layer's output energy: near 1, the weighted figures are that neuron's"),
    *(
        Measure(f"{branch}_{figure}", "layer", "directions", span,
                ALL if branch == "gate" or figure.endswith("_unit") else NO_GAUGE, f"{words} of the {branch} matrix",
                "Roy & Vetterli 2007" if "effective" in figure else "glu-probe")
        for branch in ("gate", "up", "down")
        for figure, span, words in (
            ("frobenius", ">= 0", "Frobenius norm"),
            ("spectral_norm", ">= 0", "largest singular value"),
            ("stable_rank", "[1, d_model]", "(Frobenius / spectral norm)^2"),
            ("spectral_norm_unit", ">= 1", "largest singular value, rows scaled to norm 1,"),
            ("stable_rank_unit", "[1, d_model]", "stable rank, rows scaled to norm 1,"),
            ("participation_ratio", "[1, d_model]", "(sum p^2)^2 / sum p^4 over the singular values p"),
            ("participation_ratio_unit", "[1, d_model]", "participation ratio, rows scaled to norm 1,"),
            ("effective_rank", "[1, d_model]", "exp of the entropy of p / sum p over the singular values p"),
            ("effective_rank_unit", "[1, d_model]", "effective rank, rows scaled to norm 1,"),
        )
    ),
    Measure("branch_overlap", "layer", "directions", "[0, 1]", ALL,
            "<Q'Q, K'K> / (|Q'Q| |K'K|) with unit rows: 1 if gate and up read the same subspace with the same weights"),
    Measure("branch_overlap_null", "layer", "directions", "[0, 1]", ALL,
            "branch_overlap if one of the two matrices were rotated at random: what their spectra alone give"),
    Measure("tensor_asymmetry", "layer", "directions", "[0, 1]", ALL,
            "share of the energy of sum_j q_j k_j v_j, a third-order tensor, that changes sign when q and k are exchanged: 1/2 "
            "if the exchanged tensor is orthogonal to it, as for unrelated branches", _BRESLOW),
)  # fmt: skip

MEASURES: dict[str, Measure] = {measure.name: measure for measure in (*_NEURON, *_LAYER)}
NEURON_MEASURES: tuple[str, ...] = tuple(m.name for m in _NEURON if m.name != "io_class")
FUNCTION_MEASURES: tuple[str, ...] = tuple(m.name for m in _NEURON if m.needs == "function")
STATISTICS = ("mean", "median", "q05", "q95", "weighted")

# -- on text: the same frames, further columns ------------------------------------------------------

# Neuron measures that the weights have too, and layer measures, beside which stand error and difference.
TEXT_SHARED = ("exchange_asymmetry", "scaling_asymmetry", "linear_share", "bilinear_share", "residual_share")
TEXT_OUTPUT = ("exchange_asymmetry_output", "scaling_asymmetry_output")
TEXT_SUFFIXES: dict[str, str] = {
    "_text": "the measure on text, with b in the canonical gauge of the sample",
    "_text_se": "its standard error over sequences, by the jackknife over groups of them, the gauge held fixed",
    "_text_minus_gaussian": "its difference to the value on Gaussian input: what the data adds; missing where that is missing",
}

_ON_TEXT = (
    Measure("gate_mean_text", "neuron", "text", "any", ALL, "mean of a, the gate's pre-activation, over the tokens"),
    Measure("gate_std_text", "neuron", "text", ">= 0", ALL, "standard deviation of a: beside query_norm, its value on isotropic input"),
    Measure("gate_active_text", "neuron", "text", "[0, 1]", ALL, "how often a > 0: 1/2 on Gaussian input without biases"),
    Measure("branch_correlation_text", "neuron", "text", "[-1, 1]", ALL,
            "correlation of a and b over the tokens: beside abs_cos_qk, its value on isotropic input"),
    *(
        Measure(f"quadrant_{a}_{b}_text", "neuron", "text", "[0, 1]", ALL,
                f"how often a is {'above' if a == 'plus' else 'not above'} 0 and b is {'above' if b == 'plus' else 'not above'} 0")
        for a in ("plus", "minus")
        for b in ("plus", "minus")
    ),
    Measure("output_energy_text", "neuron", "text", ">= 0", ALL,
            "E[g^2]|v|^2 on text: the weight of `_text_weighted` means"),
)  # fmt: skip

TEXT_ONLY: tuple[str, ...] = tuple(m.name.removesuffix("_text") for m in _ON_TEXT if m.name != "output_energy_text")
TEXT_MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in (
        *(
            Measure(f"{name}_text", MEASURES[name].level, "text", MEASURES[name].range, ALL,
                    f"{name} on text; with _text_se and _text_minus_gaussian", MEASURES[name].reference)
            for name in (*TEXT_SHARED, *TEXT_OUTPUT)
        ),
        *_ON_TEXT,
    )
}  # fmt: skip
TEXT_STATISTICS = ("mean", "weighted")
TEXT_MEDIANS = ("gate_std",)  # which stands beside query_norm_median
