"""Layer by layer, or bin by bin of relative depth: how far each measure of one model is from the base's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ..frames import as_stored
from ..measures.registry import MEASURES, TEXT_MEASURES
from .alignment import Align, depth_bins, groups_of, positions
from .comparability import Obstacle, gauge_dependent, measure_of
from .members import Member

_PLACE = ["tower", "group", "position"]
# A difference is beyond rounding if it exceeds so many times the change by one more rounding and so many standard errors.
_TIMES_ROUNDING, _STANDARD_ERRORS = 3.0, 2.0
_FLOAT32 = 1e-6  # relative: what storing values in float32 may leave


def summary(member: Member, rounding: pd.DataFrame | None, align: Align, bins: dict[str, int]) -> pd.DataFrame:
    """A row per place (tower, group, position) and measure: value, spread over neurons, count, standard error, rounding.

    A neuron measure's value is its mean over the neurons of the place; a layer measure's the mean over the layers there,
    its standard error that of the mean. In neuron measures `se` is missing: their neurons are all there are.
    """
    neurons, layers = member.report.neurons, member.report.layers
    layers = layers[~layers["no_mlp"].astype(bool)].copy()
    layers["position"] = _position(layers, member, align, bins)
    parts = []
    per_neuron = [name for name in _columns("neuron") if name in neurons]
    place = pd.DataFrame(
        {"tower": neurons["tower"].astype(str), "group": groups_of(neurons), "layer": neurons["layer"]}
    )
    place["position"] = _position(place, member, align, bins)
    codes = place.groupby(_PLACE, sort=False).ngroup().to_numpy()
    keys = place[_PLACE].drop_duplicates(ignore_index=True)
    for name in per_neuron:
        values = neurons[name].to_numpy(dtype=float)
        known = np.isfinite(values)
        count = np.bincount(codes[known], minlength=len(keys))
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.bincount(codes[known], values[known], minlength=len(keys)) / count
            square = np.bincount(codes[known], (values[known] - mean[codes[known]]) ** 2, minlength=len(keys))
            spread = np.sqrt(square / (count - 1))
        parts.append(keys.assign(measure=name, value=mean, spread=spread, count=count, se=np.nan))
    grouped = layers.groupby(_PLACE, sort=False)
    for name in _columns("layer"):
        if name not in layers:
            continue
        mean = grouped[name].mean()
        error = pd.Series(np.nan, index=mean.index)
        if f"{name}_se" in layers:
            squares = (layers[f"{name}_se"].astype(float) ** 2).groupby([layers[key] for key in _PLACE], sort=False)
            error = squares.sum(min_count=1) ** 0.5 / squares.count()
        frame = mean.index.to_frame(index=False)
        count = grouped[name].count().to_numpy()
        parts.append(
            frame.assign(
                measure=name, value=mean.to_numpy(dtype=float), spread=np.nan, count=count, se=error.to_numpy()
            )
        )
    out = pd.concat(parts, ignore_index=True)
    if rounding is None or rounding.empty:
        return out.assign(rounding=np.nan)
    moved = rounding.assign(position=_position(rounding, member, align, bins))
    moved = moved.groupby([*_PLACE, "measure"], sort=False)["rounding"].mean()
    return out.join(moved, on=[*_PLACE, "measure"])


def _columns(level: str) -> list[str]:
    names = [name for name, one in (MEASURES | TEXT_MEASURES).items() if one.level == level]
    return [name for name in names if name != "io_class"]


def _position(frame: pd.DataFrame, member: Member, align: Align, bins: dict[str, int]) -> np.ndarray:
    out = np.zeros(len(frame), dtype=int)
    towers = frame["tower"].astype(str).to_numpy()
    for tower in {*towers}:
        here = towers == tower
        out[here] = positions(frame["layer"][here], member.last_layer[tower], align, bins[tower])
    return out


def difference_frame(
    members: Sequence[Member],
    roundings: Sequence[pd.DataFrame | None],
    align: Align,
    obstacles: Mapping[str, Sequence[Obstacle]],
) -> pd.DataFrame:
    """Every model against the first, place by place and measure by measure.

    Columns:
        tower, group, and `layer` (aligned by layer) or `depth_bin` and its middle `relative_depth` (by depth).
        base, model, measure: which two, and the registry's name.
        base_value, value, difference: means over the place's neurons, or the layer measure, and value - base_value.
        effect, effect_kind: difference over its yardstick. "d", for neuron measures: Cohen's d with the pooled standard
            deviation over neurons, sqrt(((n1 - 1) s1^2 + (n2 - 1) s2^2) / (n1 + n2 - 2)). "z", for sampled layer measures:
            over the combined standard error, sqrt(se1^2 + se2^2). Missing for exact layer measures, which have neither, where
            coordinates could change the measure, and where the two cannot be compared.
        rounding: what one more rounding of both models' weights would change, sqrt(r1^2 + r2^2); see
            `rounding_sensitivity`. Missing for saved reports.
        beyond_rounding: |difference| > 3 rounding + 2 combined standard errors; missing where rounding is.
        gauge_dependent: a choice of coordinates changes the measure: it says nothing about a model.
        comparable: False where the two were read in ways that no difference bridges.
        note: what stands between the two numbers.
    """
    base = members[0]
    bins = {tower: depth_bins(members, tower) for member in members for tower in member.last_layer}
    sums = [summary(member, found, align, bins) for member, found in zip(members, roundings, strict=True)]
    order = {name: index for index, name in enumerate(dict.fromkeys(sums[0]["measure"]))}
    parts = []
    for member, own in zip(members[1:], sums[1:], strict=True):
        both = sums[0].merge(own, on=[*_PLACE, "measure"], suffixes=("_1", "_2"))
        both = both.assign(model=member.name)
        parts.append(_pair(both, obstacles[member.name]))
    frame = pd.concat(parts, ignore_index=True)
    rank = {member.name: index for index, member in enumerate(members)}
    frame = frame.assign(
        _model=frame["model"].map(rank), _measure=frame["measure"].map(order), _text=frame["tower"] != "text"
    )
    frame = frame.sort_values(["_model", "_measure", "_text", *_PLACE], kind="stable", ignore_index=True)
    where: dict[str, object] = {"tower": frame["tower"], "group": frame["group"]}
    if align == "layer":
        where["layer"] = frame["position"]
    else:
        where["depth_bin"] = frame["position"]
        where["relative_depth"] = as_stored(
            ((frame["position"] + 0.5) / frame["tower"].map(bins)).to_numpy(dtype=float)
        )
    kept = ["measure", "base_value", "value", "difference", "effect", "effect_kind", "rounding", "beyond_rounding",
            "gauge_dependent", "comparable", "note"]  # fmt: skip
    out = pd.DataFrame(where | {"base": base.name, "model": frame["model"]} | {name: frame[name] for name in kept})
    for name in ("base_value", "value", "difference", "effect", "rounding"):
        out[name] = as_stored(out[name].to_numpy(dtype=float))
    text = ("tower", "group", "base", "model", "measure", "effect_kind", "note")
    return out.astype(dict.fromkeys(text, "string"))


def _pair(both: pd.DataFrame, obstacles: Sequence[Obstacle]) -> pd.DataFrame:
    level = both["measure"].map(lambda name: measure_of(name).level)
    one, two = both["value_1"], both["value_2"]
    difference = two - one
    n1, n2 = both["count_1"], both["count_2"]
    with np.errstate(divide="ignore", invalid="ignore"):
        pooled = np.sqrt(((n1 - 1) * both["spread_1"] ** 2 + (n2 - 1) * both["spread_2"] ** 2) / (n1 + n2 - 2))
        error = np.hypot(both["se_1"], both["se_2"])
        yardstick = np.where(level == "neuron", pooled, error)
        effect = np.where(yardstick > 0, difference / yardstick, np.nan)
    names = both["measure"]
    gauge = names.map(gauge_dependent)
    notes, comparable = dict.fromkeys(names, ""), dict.fromkeys(names, True)
    for obstacle in obstacles:
        for name in notes:
            if name.removesuffix("_text") in obstacle.touches or name in obstacle.touches:
                notes[name] = f"{notes[name]}; {obstacle.what}" if notes[name] else obstacle.what
                comparable[name] = comparable[name] and not obstacle.forbids
    for name in notes:
        if gauge_dependent(name):
            notes[name] = f"a choice of coordinates{'; ' if notes[name] else ''}{notes[name]}"
    comparable = names.map(comparable)
    effect = np.where(comparable & ~gauge, effect, np.nan)
    rounding = np.hypot(both["rounding_1"], both["rounding_2"])
    size = np.maximum(one.abs(), two.abs())
    threshold = _TIMES_ROUNDING * rounding + _STANDARD_ERRORS * error.fillna(0.0) + _FLOAT32 * size
    beyond = pd.array(difference.abs() > threshold, dtype="boolean")
    beyond[(rounding.isna() | difference.isna() | ~comparable | gauge).to_numpy()] = pd.NA
    kind = np.where(np.isnan(effect), np.array(None), np.where(level == "neuron", "d", "z"))
    return both.assign(
        base_value=one, value=two, difference=difference, effect=effect, effect_kind=kind, rounding=rounding,
        beyond_rounding=beyond, gauge_dependent=gauge.to_numpy(), comparable=comparable.to_numpy(),
        note=names.map(notes),
    )  # fmt: skip
