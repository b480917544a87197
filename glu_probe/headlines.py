"""The first thing a report says: about five sentences, each with the numbers it rests on."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .phrases import listed, percent, place, span
from .text_headlines import departures, on_both_inputs, on_text, on_text_alone

# layer measure, what it is called in a sentence, how its values are written
_APART = (
    ("exchange_asymmetry_relu_ratio", "asymmetry relative to ReLU", ".0%"),
    ("query_norm_median", "gate scale |q|", ".3g"),
    ("abs_cos_qk_mean", "|cos(q, k)|", ".3f"),
    ("cos_kv_mean", "cos(k, v)", "+.3f"),
    ("branch_overlap", "branch overlap", ".3f"),
)
_FAR = 3.5  # robust standard deviations from the median: the usual bound of Iglewicz and Hoaglin
_LAYERS_AT_LEAST = 6  # fewer have no median to stand apart from
_IN_FULL = 3  # layers that stand apart, with their numbers; the others are named


def headlines(layers: pd.DataFrame, neurons: pd.DataFrame) -> list[str]:
    """What matters most about a model, in plain sentences; nothing that the frames do not carry.

    Args:
        layers, neurons: the frames of a report.
    """
    gated = layers[~layers["no_mlp"].astype(bool)]
    if gated.empty:
        return [f"None of the {len(layers)} layers of this selection has a gated MLP."]
    sentences = [
        regime(gated, neurons),
        of_which_input(gated),
        departures(gated, neurons),
        along_the_depth(gated),
        standing_apart(gated, neurons),
        of_experts(neurons),
        alignment(gated),
        oddities(layers, neurons),
    ]
    return [sentence for sentence in sentences if sentence]


# -- sentences -------------------------------------------------------------------------------------


def regime(layers: pd.DataFrame, neurons: pd.DataFrame) -> str:
    """Where the model is between bilinear and ReLU, and what the text that was run does to that."""
    scale, ratio = layers["query_norm_median"], layers["exchange_asymmetry_relu_ratio"]
    if layers["exchange_asymmetry_mean"].isna().all():
        reasons = list(dict.fromkeys(layers["note"].dropna())) if "note" in layers else []
        why = f": {reasons[0]}" if reasons and reasons[0] else ""
        unknown = (
            f"Whether the layers are closer to bilinear or to ReLU cannot be told from these weights{why}; their gate rows "
            f"have norms of {span(scale)} (medians of layers)."
        )
        return " ".join(filter(None, [unknown if scale.notna().any() else "", on_text_alone(layers)]))
    changed = neurons["exchange_asymmetry"].mean()
    text = f"Exchanging gate and up changes the sign of {percent(changed)} of a neuron's energy on Gaussian input"
    if ratio.isna().all():
        words = f"{text}; gates work at a scale |q| of {span(scale)} (medians of layers)."
        return " ".join(filter(None, [words, on_text_alone(layers)]))
    whole = np.average(ratio.dropna(), weights=layers.loc[ratio.notna(), "n_neurons"])
    end = "near the bilinear end" if whole < 0.25 else "near the ReLU end" if whole > 0.75 else "between the two ends"
    found = f"{end}: on a scale from bilinear (0 %) to ReGLU (100 %) it stands at {percent(whole)}"
    if on_text(layers):
        return on_both_inputs(found, layers, changed)
    return (
        f"On isotropic Gaussian input the model is {found}. {text}, and gates work at a scale |q| of {span(scale)} (medians of layers), where far below 1 is "
        "linear and far above 1 a ReLU."
    )


def of_which_input(layers: pd.DataFrame) -> str:
    """On what input a model is where `regime` places it, if no text was run."""
    if layers["exchange_asymmetry_mean"].isna().all() or on_text(layers):
        return ""
    routed = (layers["group"] == "routed").all()
    measured = "for routed experts this" if routed else "glu-probe activations MODEL --text FILE"
    return (
        "The scale of that input is what the model's own norm gives; on text another place is to be expected, as the gates' "
        "pre-activations can be much smaller there, in Gemma 3 270M a twentieth of that (analyses/gaussian_or_text.py): "
        f"{measured} {'cannot be measured here' if routed else 'measures it'}."
    )


# layer measure, what it is called, how it is written, and by how much it must differ to be worth a sentence of its own
_COURSES = (
    (
        "exchange_asymmetry_relu_ratio",
        "the place between bilinear and ReLU",
        ".0%",
        lambda low, high: high - low >= 0.05,
    ),
    ("query_norm_median", "the gate scale |q|", ".3g", lambda low, high: high > 1.2 * low),
    ("abs_cos_qk_mean", "the alignment |cos(q, k)|", ".3f", lambda low, high: high > 1.2 * low),
)


def along_the_depth(layers: pd.DataFrame) -> str:
    """Where the layers change from first to last, and by how much; of the largest stack."""
    tower = layers["tower"].astype(str).mode().iloc[0]
    start = f"Along the depth{f' of {tower}' if layers['tower'].nunique() > 1 else ''}"
    known = layers[layers["tower"].astype(str) == tower]
    if not on_text(known):
        return _changes(known, start)
    values, form = _by_layer(known, "exchange_asymmetry_text_mean"), ".3f"
    told = [_changes(known, f"{start}, on Gaussian input")]
    if len(values) > 1:
        told.append(_course(values, "On text, the mean exchange asymmetry", form))
    return " ".join(filter(None, told))


def _changes(known: pd.DataFrame, start: str) -> str:
    """The first measure of the weights that changes, after those that do not."""
    steady: list[str] = []
    for column, words, form, differs in _COURSES:
        values = _by_layer(known, column)
        if len(values) < 2:
            continue
        if differs(values.min(), values.max()):
            told = _hardly(start, steady)
            subject = f"{words[0].upper()}{words[1:]}" if told else f"{start}, {words}"
            return f"{told} {_course(values, subject, form)}".strip()
        steady.append(f"{words} ({span(values, form)})")
    return _hardly(start, steady)


def _hardly(start: str, steady: list[str]) -> str:
    return f"{start}, {listed(steady)} hardly change{'' if len(steady) > 1 else 's'}." if steady else ""


def _by_layer(layers: pd.DataFrame, column: str) -> pd.Series:
    """A measure layer by layer, over the neurons of all expert groups; without layers where it is missing."""
    known = layers[layers[column].notna()]
    weighted = (known[column] * known["n_neurons"]).groupby(known["layer"]).sum()
    return (weighted / known.groupby("layer")["n_neurons"].sum()).sort_index()


def _course(values: pd.Series, subject: str, form: str) -> str:
    low, high, first, last = values.idxmin(), values.idxmax(), values.index[0], values.index[-1]
    show = {layer: percent(value, form) for layer, value in values.items()}
    ends = f"lowest in layer {low} ({show[low]}), highest in layer {high} ({show[high]})."
    if len(values) < _LAYERS_AT_LEAST:
        return f"{subject} goes from {show[first]} in layer {first} to {show[last]} in layer {last}; {ends}"
    third = len(values) // 3
    parts = [values.iloc[:third], values.iloc[third:-third], values.iloc[-third:]]
    means = [percent(part.mean(), form) for part in parts]
    trend = values.reset_index(drop=True).corr(pd.Series(np.arange(float(len(values)))), method="spearman")
    how = "has no steady direction" if not abs(trend) > 0.6 else "rises" if trend > 0 else "falls"
    jump = values.diff().abs().idxmax()
    before = values.index[values.index.get_loc(jump) - 1]
    return (
        f"{subject} {how} (rank correlation with depth {trend:+.2f}): {means[0]} in layers {first} to "
        f"{parts[0].index[-1]}, {means[1]} in the middle, {means[2]} in layers {parts[2].index[0]} to {last}. It changes most "
        f"from layer {before} ({show[before]}) to layer {jump} ({show[jump]}); {ends}"
    )


def standing_apart(layers: pd.DataFrame, neurons: pd.DataFrame) -> str:
    """Layers unlike the others, and neurons that carry a layer."""
    return " ".join(filter(None, [_layers_apart(layers), _carriers(layers, neurons)]))


def _layers_apart(layers: pd.DataFrame) -> str:
    found = []
    main = layers[layers["group"] == layers["group"].mode().iloc[0]]
    main = main[main["tower"].astype(str) == main["tower"].astype(str).mode().iloc[0]]
    for column, words, form in _APART:
        values = main[column].astype(float).dropna() if column in main else pd.Series(dtype=float)
        middle = values.median()
        spread = (values - middle).abs().median() * 1.4826  # of a normal distribution, its standard deviation
        if len(values) < _LAYERS_AT_LEAST or not spread > 0:
            continue
        far = ((values - middle).abs() / spread).sort_values(ascending=False)
        found += [
            (distance, index, f"{words} {percent(values[index], form)}, median {percent(middle, form)}")
            for index, distance in far.items()
        ]
    if not found:
        return ""
    found.sort(key=lambda one: -one[0])
    beyond = [one for one in found if one[0] > _FAR]
    if not beyond:
        distance, index, words = found[0]
        return (
            f"No layer stands far apart: the farthest is {place(layers, index)} ({words}), {distance:.1f} robust standard "
            "deviations from the median layer."
        )
    by_layer: dict[object, str] = {}
    for _, index, words in beyond:
        by_layer.setdefault(index, words)
    names = [f"{place(layers, index)} ({words})" for index, words in by_layer.items()]
    verb = "stands" if len(names) == 1 else "stand"
    count = f"{len(names)} of {len(main)} layers {verb} apart, by more than {_FAR} robust standard deviations"
    others = sorted(layers["layer"].loc[[*by_layer][_IN_FULL:]])
    rest = f"; also layer{'s' if len(others) > 1 else ''} {listed([str(layer) for layer in others])}" if others else ""
    return f"{count}: {', '.join(names[:_IN_FULL])}{rest}."


def _carriers(layers: pd.DataFrame, neurons: pd.DataFrame) -> str:
    share = layers["output_energy_top_share"]
    alone = layers[share > 0.5]
    if share.isna().all():
        return ""
    if alone.empty:
        most = share.idxmax()
        return f"No single neuron carries more than {percent(share.max())} of a layer's output energy ({place(layers, most)})."
    named = []
    for index, row in alone.sort_values("output_energy_top_share", ascending=False).iterrows():
        here = neurons[(neurons["layer"] == row["layer"]) & (neurons["tower"] == row["tower"])]
        if "expert" in here:
            here = here[_in_group(here["expert"], row["group"])]
        neuron = here.loc[here["output_energy"].idxmax()]
        expert = f"expert {neuron['expert']}, " if row["group"] == "routed" else ""
        named.append(f"{place(layers, index)} ({expert}neuron {neuron['neuron']}, {percent(share[index])})")
    return (
        f"One neuron carries more than half of the output energy in {', '.join(named)}: energy-weighted and output "
        "figures of these layers are that neuron's."
    )


def _in_group(expert: pd.Series, group: str) -> pd.Series:
    """Which neurons belong to an expert group."""
    routed = expert.isin([name for name in expert.dropna().unique() if str(name).isdigit()])
    return {"routed": routed, "dense": expert.isna()}.get(group, ~routed & expert.notna())


def of_experts(neurons: pd.DataFrame) -> str:
    """How much the routed experts of a layer differ, and which differs most."""
    if "expert" not in neurons:
        return ""
    routed = neurons[_in_group(neurons["expert"], "routed")]
    column = next((c for c in ("exchange_asymmetry", "abs_cos_qk") if c in routed and routed[c].notna().any()), None)
    if column is None:
        return ""
    means = routed.groupby(["tower", "layer", "expert"], observed=True)[column].mean().dropna()
    stacks = means.groupby(level=[0, 1], observed=True)
    if stacks.size().max() < 2:
        return ""
    spread, middle = stacks.max() - stacks.min(), stacks.transform("median")
    tower, layer, expert = (means - middle).abs().idxmax()
    stack = f"{tower} " if means.index.get_level_values(0).nunique() > 1 else ""
    words = "mean exchange asymmetry" if column == "exchange_asymmetry" else "mean |cos(q, k)|"
    odd = means[tower, layer, expert], middle[tower, layer, expert]
    return (
        f"The {len(means):,} routed experts differ within a layer by {spread.median():.3f} in {words} from the lowest to the "
        f"highest (median layer; at most {spread.max():.3f}); the one farthest from its layer's median is expert {expert} of "
        f"{stack}layer {layer} ({odd[0]:.3f}, median {odd[1]:.3f})."
    )


def alignment(layers: pd.DataFrame) -> str:
    """How aligned the branches are, against mismatched pairs."""
    mean, null, effect = (layers[f"abs_cos_qk{part}"] for part in ("_mean", "_null_mean", "_effect"))
    if mean.isna().all() or null.isna().all():
        return ""
    above, known = int((effect > 0.2).sum()), int(effect.notna().sum())
    rows = "layers" if layers["group"].nunique() < 2 else "layers and expert groups"
    return (
        f"Gate and up rows of one neuron have |cos| of {mean.mean():.3f} on average, mismatched rows of the same layers "
        f"{null.mean():.3f}, isotropic ones {layers['abs_cos_qk_null_isotropic_mean'].mean():.3f}; in {above} of "
        f"{known} {rows} the mean lies above the mismatched ones by more than 0.2 of their standard deviation (a small "
        "effect)."
    )


def oddities(layers: pd.DataFrame, neurons: pd.DataFrame) -> str:
    """How many neurons are flagged, and for what."""
    counts = {
        "dead (a row of zeros)": layers["n_dead"].sum(),
        "of these padding": layers["n_padded"].sum(),
        "with NaN or infinity": layers["n_non_finite"].sum(),
        "that repeat another": layers["n_duplicated"].sum(),
    }
    total = int(layers["n_neurons"].sum())
    flagged = int((neurons["flag"].fillna("") != "").sum()) if "flag" in neurons else int(sum(counts.values()))
    named = ", ".join(f"{int(count):,} {name}" for name, count in counts.items() if count)
    text = f"Of {total:,} neurons, " + (
        f"{flagged:,} are flagged ({percent(flagged / total, '.2%')}): {named}."
        if flagged and total
        else "none is dead, padded, duplicated or not finite."
    )
    empty = int(layers["no_mlp"].sum())
    return text + (f" {empty} of {len(layers)} layers have no gated MLP." if empty else "")
