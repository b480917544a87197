"""What a text says about MLPs, as further columns of the weight report's frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ..checkpoint.sites import Site
from ..errors import BadOption
from ..frames import as_stored, statistics
from ..layer_rows import expert_group
from ..measures.registry import TEXT_MEDIANS, TEXT_ONLY, TEXT_SHARED
from .contexts import rows_of
from .moments import Estimates


@dataclass(frozen=True)
class Measured:
    """What the text said about one MLP: its neurons, and its output as a vector."""

    neurons: Estimates
    outputs: Estimates


def refuse_other_rows(frame: pd.DataFrame, sites: list[Site]) -> None:
    """Make sure that a report has the rows of these MLPs.

    Raises:
        BadOption: it is of another model or of other layers.
    """
    for site in sites:
        found = int(rows_of(frame, site).sum())
        if found != site.d_mlp:
            raise BadOption(
                f"the report has {found} neurons for {site.where}, which has {site.d_mlp}",
                hint="Give the weight report of the same model and layers, or none: it is made then",
            )


def with_text_neurons(frame: pd.DataFrame, measured: Mapping[Site, Measured]) -> pd.DataFrame:
    """The neuron frame with the measures on text; missing for neurons of MLPs that were not listened to."""
    columns: dict[str, np.ndarray] = {}

    def put(name: str, where: np.ndarray, values: np.ndarray) -> None:
        columns.setdefault(name, np.full(len(frame), np.nan))[where] = values

    for site, found in measured.items():
        where = rows_of(frame, site)
        values, errors = found.neurons.values, found.neurons.errors
        for name in TEXT_SHARED:
            put(f"{name}_text", where, values[name])
            put(f"{name}_text_se", where, errors[name])
            put(f"{name}_text_minus_gaussian", where, values[name] - frame[name].to_numpy(dtype=float)[where])
        for name in TEXT_ONLY:
            put(f"{name}_text", where, values[name])
        put("output_energy_text", where, values["energy"] * frame["value_norm"].to_numpy(dtype=float)[where] ** 2)
    return _beside(frame, columns)


def with_text_layers(layers: pd.DataFrame, neurons: pd.DataFrame, measured: Mapping[Site, Measured]) -> pd.DataFrame:
    """The layer frame with means over the neurons of each row's MLPs, and the asymmetries of their outputs."""
    by_row: dict[tuple, list[Site]] = {}
    for site in measured:
        by_row.setdefault((site.tower, site.layer, site.group), []).append(site)
    placed = neurons.assign(group=[expert_group(_expert(e)) for e in neurons["expert"]])
    groups = placed.groupby(["tower", "layer", "group"], observed=True, sort=False)
    columns: dict[str, np.ndarray] = {}
    for row, place in enumerate(zip(layers["tower"], layers["layer"], layers["group"], strict=True)):
        if place not in by_row:
            continue
        here = [measured[site] for site in by_row[place]]
        part = groups.get_group(place)
        found = _means(part) | _mean_errors(here) | _outputs(here, layers.iloc[row])
        for name, value in found.items():
            columns.setdefault(name, np.full(len(layers), np.nan))[row] = value
    return _beside(layers, columns)


def _means(part: pd.DataFrame) -> dict[str, float]:
    weights, found = part["output_energy_text"].to_numpy(dtype=float), {}
    for name in (*TEXT_SHARED, *TEXT_ONLY):
        values = statistics(part[f"{name}_text"].to_numpy(dtype=float), weights)
        found[f"{name}_text_mean"], found[f"{name}_text_weighted"] = values["mean"], values["weighted"]
        if name in TEXT_MEDIANS:
            found[f"{name}_text_median"] = values["median"]
    for name in TEXT_SHARED:
        change = part[f"{name}_text_minus_gaussian"].to_numpy(dtype=float)
        found[f"{name}_text_minus_gaussian_mean"] = statistics(change, weights)["mean"]
    return found


def _mean_errors(here: list[Measured]) -> dict[str, float]:
    """Of the means over neurons; several MLPs of a row are taken as independent."""
    sizes = np.array([one.neurons.values["energy"].size for one in here])
    share = sizes / sizes.sum()
    return {
        f"{name}_text_mean_se": float(np.sqrt(sum((s * one.neurons.mean_errors[name]) ** 2 for s, one in zip(share, here, strict=True))))
        for name in TEXT_SHARED
    }  # fmt: skip


def _outputs(here: list[Measured], row: pd.Series) -> dict[str, float]:
    found = {}
    for name in here[0].outputs.values:
        value = float(np.mean([one.outputs.values[name] for one in here]))
        errors = np.array([one.outputs.errors[name] for one in here])
        found[f"{name}_text"] = value
        found[f"{name}_text_se"] = float(np.sqrt((errors**2).sum()) / len(here))
        found[f"{name}_text_minus_gaussian"] = value - float(row[name])
    return found


def _beside(frame: pd.DataFrame, columns: dict[str, np.ndarray]) -> pd.DataFrame:
    added = pd.DataFrame({name: as_stored(values) for name, values in columns.items()}, index=frame.index)
    return pd.concat([frame.drop(columns=[name for name in added if name in frame]), added], axis=1)


def _expert(text: Any) -> int | str | None:
    """The expert of a neuron frame's row as `expert_group` takes it."""
    if pd.isna(text):
        return None
    return int(text) if str(text).isdigit() else str(text)
