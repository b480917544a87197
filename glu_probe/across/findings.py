"""What a comparison says, in about five sentences with numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..phrases import counted, listed, percent

if TYPE_CHECKING:
    from .comparison import Comparison

_FEW = 2  # models beside the base of which each has sentences of its own
_NAMED = 4  # models that a sentence names one by one
_SMALL, _NOTABLE = 0.02, 0.1  # Cohen's d
_CLOSE = 0.1  # of an angle: what rounding is expected to make and what is measured are the same
_FACTORS = {"q": "gate rows", "k": "up rows", "v": "down columns"}


def findings(comparison: Comparison) -> list[str]:
    """Sentences about the models; what cannot be said is said to be so."""
    others = comparison.models[1:]
    few = len(others) <= _FEW
    sentences = [_overview(comparison), _regime(comparison)]
    # of a long row the last one, which is furthest along
    sentences += [_effects(comparison, model) for model in (others if few else others[-1:])]
    sentences += [_rounding(comparison)]
    sentences += [_movement(comparison, model) for model in others] if few else [_row_of_movements(comparison)]
    return [sentence for sentence in sentences if sentence]


def _number(value: float) -> str:
    return f"{value:+.2g}" if abs(value) < 1e4 else f"{value:+.3g}"


def place(row: pd.Series) -> str:
    """A row of the differences by name."""
    where = f"layer {row['layer']}" if "layer" in row else f"relative depth {row['relative_depth']:.2f}"
    return where if row["tower"] == "text" else f"{where} of {row['tower']}"


def _overview(comparison: Comparison) -> str:
    words = []
    gated = comparison.layers[~comparison.layers["no_mlp"].astype(bool)]
    for facts in comparison.provenance["models"]:
        rows = gated[gated["model"] == facts["name"]]
        gates = listed(sorted({*rows["activation"].dropna()}) or ["unknown activation"])
        stored = sorted({dtype for tower in facts.get("towers", {}).values() for dtype in tower.get("dtypes", ())})
        kept = f", stored as {listed(stored)}" if stored else ""
        words.append(
            f"{facts['name']} ({counted(len(rows[['tower', 'layer']].drop_duplicates()), 'layer')}, {gates}{kept})"
        )
    others = words[1:] if len(words) <= _NAMED + 1 else [*words[1:3], f"{len(words) - 3} more"]
    how = (
        "layer by layer"
        if comparison.provenance["align"] == "layer"
        else f"in {comparison.differences.groupby('tower')['depth_bin'].nunique().max()} bins of relative depth"
    )
    return f"{words[0]} is the base, beside it {listed(others)}; they are compared {how}."


def _regime(comparison: Comparison) -> str:
    layers = comparison.layers
    known = layers[layers["exchange_asymmetry_relu_ratio"].notna()]
    shares = {}
    for model in comparison.models:
        rows = known[known["model"] == model]
        if len(rows):
            weights = rows["n_neurons"].to_numpy(dtype=float)
            shares[model] = float(
                np.average(rows["exchange_asymmetry_relu_ratio"].to_numpy(dtype=float), weights=weights)
            )
    if len(shares) < 2:
        return ""
    rows = comparison.differences[comparison.differences["measure"] == "exchange_asymmetry_relu_ratio"].dropna(
        subset=["difference"]
    )
    if len(shares) > _NAMED + 2:
        low, high = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
        first, last = next(iter(shares)), list(shares)[-1]
        values = (
            f"{first} stands at {percent(shares[first])} and {last} at {percent(shares[last])}, the lowest is {low} "
            f"({percent(shares[low])}), the highest {high} ({percent(shares[high])})"
        )
    else:
        first, *rest = [
            f"{model} {'at' if index else 'stands at'} {percent(share)}"
            for index, (model, share) in enumerate(shares.items())
        ]
        values = listed([first, *rest])
    text = f"Between bilinear (0 %) and ReGLU (100 %), by mean exchange asymmetry over that of ReLU gates, {values}"
    if rows.empty or rows["difference"].abs().max() < 0.005:
        return f"{text}; no layer differs by as much as 0.5 points."
    most = rows.loc[rows["difference"].abs().idxmax()]
    other = "" if len(comparison.models) == 2 else f" in {most['model']}"
    return f"{text}; the largest step is at {place(most)}, from {percent(most['base_value'])} to {percent(most['value'])}{other}."


def _effects(comparison: Comparison, model: str) -> str:
    rows = comparison.differences
    rows = rows[(rows["model"] == model) & (rows["effect_kind"] == "d")]
    if rows.empty:
        return ""
    middle = rows.groupby("measure", sort=False)["effect"].median()
    size = (
        rows.assign(size=rows["effect"].abs())
        .groupby("measure", sort=False)["size"]
        .median()
        .sort_values(ascending=False)
    )
    most = size.index[0]
    if size.iloc[0] < _SMALL:
        largest = rows.loc[rows["effect"].abs().idxmax()]
        where = f"{largest['measure']} at {place(largest)} (d = {_number(largest['effect'])})"
        if abs(largest["effect"]) < _NOTABLE:
            return (
                f"No neuron measure of {model} differs from {comparison.base} by as much as {_NOTABLE:g} standard deviations of "
                f"neurons (Cohen's d) anywhere; the largest is {where}."
            )
        return (
            f"In most places the neuron measures of {model} are those of {comparison.base} (median |d| below {_SMALL:g} standard "
            f"deviations of neurons), but not everywhere: the largest difference is {where}."
        )
    here = rows[rows["measure"] == most]
    top = here.loc[here["effect"].abs().idxmax()]
    then = listed([f"{name} ({_number(middle[name])})" for name in size.index[1:3]]) if len(size) > 1 else ""
    return (
        f"In units of the spread between neurons, {model} differs from {comparison.base} most in {most}: Cohen's d is "
        f"{_number(middle[most])} in the median over places, most at {place(top)} ({_number(top['effect'])})"
        f"{f'; then come {then}' if then else ''}."
    )


def _rounding(comparison: Comparison) -> str:
    rows = comparison.differences
    known = rows[rows["beyond_rounding"].notna()]
    if known.empty:
        return (
            "" if comparison.provenance.get("rounding") else "What rounding of the weights explains was not measured."
        )
    text = "Rounding every weight once more by the step of its stored type makes differences too"
    words, groups = [], list(known.groupby("model", sort=False))
    if len(groups) > _FEW:
        beyond, count = int(known["beyond_rounding"].sum()), len(known)
        least, most = (pick(groups, key=lambda pair: pair[1]["beyond_rounding"].mean()) for pick in (min, max))
        ends = [f"{percent(here['beyond_rounding'].mean())} in {model}" for model, here in (least, most)]
        return f"{text}: {beyond:,} of the {count:,} found here are larger ({ends[0]} to {ends[1]})."
    for model, here in groups:
        beyond = int(here["beyond_rounding"].sum())
        share = f"{beyond:,} of the {len(here):,} of {model} are larger ({percent(beyond / len(here))})"
        words.append(share if beyond else f"none of the {len(here):,} of {model} is larger")
    return f"{text}: {listed(words)}."


def _movement(comparison: Comparison, model: str) -> str:
    rows = comparison.mlps[comparison.mlps["model"] == model]
    if rows.empty:
        return ""
    counts = rows["identity"].value_counts()
    total = len(rows)
    if counts.get("other shape", 0) == total:
        return f"{model} and {comparison.base} have MLPs of different shapes, so no neuron of one is a neuron of the other."
    unrelated = int(counts.get("unrelated", 0))
    followed = rows[rows["angle_q"].notna()]
    if unrelated == total and followed.empty:
        return (
            f"{model} has the shapes of {comparison.base} but other neurons: of sampled ones, {percent(rows['own_index_share'].mean())} "
            "are most similar to the neuron at their own index, so that no movement is reported."
        )
    text = []
    permuted = rows[rows["identity"] == "permuted"]
    if len(permuted):
        text.append(
            f"In {len(permuted)} of {total} MLPs {model} has {int(permuted['n_elsewhere'].sum()):,} neurons of {comparison.base} "
            "at another index: that is another order, no movement, and they were matched before anything was measured"
        )
    if len(followed):
        angles = listed([f"{words} {followed[f'angle_{letter}'].median():.2g}°" for letter, words in _FACTORS.items()])
        text.append(
            f"from {comparison.base} to {model} neurons turn, {angles} in the median"
            + _explained(followed, comparison.base, model)
        )
        share = followed["beyond_rounding_share"]
        if share.notna().any():
            text.append(
                f"{percent(share.mean())} of the neurons moved by more than 1.5 times what rounding explains"
                + _most(comparison, model)
            )
    elif not len(permuted):
        return f"Neurons of {model} cannot be followed from saved reports; the models themselves are needed."
    if unrelated:
        text.append(f"{unrelated} of {total} MLPs have other neurons altogether and are left out")
    joined = "; ".join(text)
    return f"{joined[0].upper()}{joined[1:]}."


def _row_of_movements(comparison: Comparison) -> str:
    """How far gate rows turned, model by model."""
    followed = comparison.mlps[comparison.mlps["angle_q"].notna()]
    if followed.empty:
        return ""
    angles = followed.groupby("model", sort=False)["angle_q"].median()
    shown = (
        angles if len(angles) <= 8 else angles.iloc[[0, len(angles) // 4, len(angles) // 2, 3 * len(angles) // 4, -1]]
    )
    words = listed([f"{angle:.2g}° in {model}" for model, angle in shown.items()])
    permuted = int(followed["n_elsewhere"].sum())
    order = f" {permuted:,} neurons were found at another index and matched." if permuted else ""
    last = followed[followed["model"] == angles.index[-1]]
    known = last["rounding_angle_q"].notna().any()
    noise = f", where rounding explains {last['rounding_angle_q'].median():.2g}° in the last" if known else ""
    return f"Against {comparison.base} gate rows turn, in the median, by {words}{noise}.{order}"


def _explained(rows: pd.DataFrame, base: str, model: str) -> str:
    """Whether rounding of both files, or of one, turns rows by as much."""
    if rows["rounding_angle_q"].isna().all():
        return ", and what rounding explains of that is not known"
    measured = np.array([rows[f"angle_{letter}"].dropna().median() for letter in _FACTORS])
    expected = {
        side: np.array([rows[f"rounding_angle_{letter}{side}"].dropna().median() for letter in _FACTORS])
        for side in ("", "_base", "_model")
    }
    if not measured.any():
        return f": none at all, where rounding could explain {_angles(expected[''])}"
    if (expected[""] < 1e-4).all():
        return ", and rounding explains nothing of that, as both are stored in full precision"
    whose = {"": "the two files", "_model": model, "_base": base}
    fits = [side for side, angles in expected.items() if (np.abs(measured - angles) <= _CLOSE * angles).all()]
    if fits:
        side = fits[0]
        rest = {"_model": (base, "_base"), "_base": (model, "_model")}.get(side)
        more = f" (that of {rest[0]} alone would make {_angles(expected[rest[1]])})" if rest else ""
        return f", and the rounding of {whose[side]} alone explains {_angles(expected[side])}{more}"
    sides = f"{_angles(expected[''])}, of which {base} makes {_angles(expected['_base'])} and {model} {_angles(expected['_model'])}"
    relation = (
        "less than rounding could explain" if (measured < expected[""]).all() else "where rounding alone explains"
    )
    return f", {relation}: {sides}" if "less" in relation else f", {relation} {sides}"


def _angles(angles: np.ndarray) -> str:
    """The three, or one where they are alike."""
    words = [f"{angle:.2g}°" if np.isfinite(angle) else "an unknown angle" for angle in angles]
    return words[0] if len({*words}) == 1 else listed(words)


def _most(comparison: Comparison, model: str) -> str:
    rows = comparison.neurons[
        (comparison.neurons["model"] == model) & comparison.neurons["beyond_rounding"].fillna(False)
    ]
    if rows.empty:
        return ""
    top = rows.loc[rows["moved"].astype(float).idxmax()]
    return f", neuron {top['neuron']} of layer {top['layer']} most (by {top['movement']:.2g} of its size)"
