"""Neuron by neuron: which is which in two models of the same shape, how far each moved, and what rounding explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ..checkpoint.sites import Site
from ..frames import as_stored
from ..measures.registry import NEURON_MEASURES
from ..probing import Progress
from .comparability import gauge_dependent
from .fingerprints import same_by_fingerprint
from .members import Member
from .movement import Counterparts, counterparts, movement

_ROLES = {"query": "q", "key": "k", "value": "v"}
ANGLES = tuple(f"angle_{letter}" for letter in _ROLES.values())
ROUNDING_ANGLES = tuple(f"rounding_{name}{side}" for side in ("", "_base", "_model") for name in ANGLES)
CHANGED = tuple(name for name in NEURON_MEASURES if not gauge_dependent(name))
_BEYOND = 1.5  # times what rounding explains: the neuron has moved further than by rounding
_PLACE = ("tower", "layer", "expert")

NEURON_COLUMNS = (
    "base", "model", "tower", "layer", "expert", "neuron", "counterpart", *ANGLES, *ROUNDING_ANGLES,
    "query_norm_relative", "value_gain_relative", "movement", "rounding", "moved", "beyond_rounding",
    *(f"{name}_change" for name in CHANGED), "io_class_changed",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class PairedMLP:
    """What came of one MLP of the base beside the same MLP of another model.

    Attributes:
        row: of the frame of MLPs.
        neurons: of the frame of neurons, or None where they are not the same neurons.
    """

    row: dict[str, object]
    neurons: pd.DataFrame | None


def pair_up(
    members: Sequence[Member],
    sites: Sequence[Sequence[Site]],
    errors: Sequence[dict[tuple, dict[str, np.ndarray]] | None],
    *,
    forced: bool,
    progress: Progress = iter,
) -> Iterator[PairedMLP]:
    """Every MLP of the base beside those of the others, one MLP of each of two models in memory at a time.

    Args:
        members: the base first.
        sites: the MLPs of each to look at; none for a saved report.
        errors: relative rounding errors of their factors, where they are known.
        forced: take the neurons of MLPs that look unrelated for the same ones, too.
        progress: wraps the iteration over the base's MLPs.
    """
    base = members[0]
    if base.checkpoint is not None:
        elsewhere = [{_key(site): site for site in own} for own in sites]
        for site in progress(sites[0]):
            partners = [
                (member, member.checkpoint, found[_key(site)], error)
                for member, found, error in zip(members[1:], elsewhere[1:], errors[1:], strict=True)
                if member.checkpoint is not None and _key(site) in found
            ]
            if not partners:
                continue
            factors = base.checkpoint.load(site).detach()
            for member, checkpoint, partner, error in partners:
                if (partner.d_mlp, partner.d_model) != (site.d_mlp, site.d_model):
                    yield PairedMLP(_row(base, member, site, "other shape", note=_shapes(site, partner)), None)
                    continue
                other = checkpoint.load(partner).detach()
                found = counterparts(factors, other)
                known = [None if each is None else each.get(_key(site)) for each in (errors[0], error)]
                if found.identity == "unrelated" and not forced:
                    yield PairedMLP(_row(base, member, site, found.identity, found=found), None)
                    continue
                moved = movement(factors, other, found.order)
                yield _paired(base, member, site, found, moved, known)
    for member in members[1:]:
        if base.checkpoint is None or member.checkpoint is None:
            yield from _from_frames(base, member, forced)


def _key(site: Site) -> tuple:
    return site.tower, site.layer, site.expert


def _shapes(one: Site, two: Site) -> str:
    return f"d_mlp and d_model are {one.d_mlp}, {one.d_model} and {two.d_mlp}, {two.d_model}"


def _row(
    base: Member, member: Member, site: Site, identity: str, *, found: Counterparts | None = None, note: str = ""
) -> dict:
    where = {"tower": site.tower, "layer": site.layer, "expert": None if site.expert is None else str(site.expert)}
    row: dict[str, object] = {"base": base.name, "model": member.name, **where, "identity": identity}
    row["own_index_share"] = np.nan if found is None else found.own
    row["n_elsewhere"] = 0 if found is None else found.elsewhere
    return row | {"note": note}


def _paired(
    base: Member,
    member: Member,
    site: Site,
    found: Counterparts,
    moved: dict[str, np.ndarray],
    errors: Sequence[dict[str, np.ndarray] | None],
) -> PairedMLP:
    """Row and neurons of two MLPs whose factors were read."""
    order, size = found.order, site.d_mlp
    sides = []
    for each, index in zip(errors, (np.arange(size), order), strict=True):
        missing = dict.fromkeys(_ROLES, np.full(size, np.nan))
        sides.append(
            missing if each is None else {role: np.where(order >= 0, each[role][index], np.nan) for role in _ROLES}
        )
    both = {role: np.hypot(sides[0][role], sides[1][role]) for role in _ROLES}
    rounding = np.sqrt(sum(square**2 for square in both.values()))
    columns = dict(moved)
    for role, letter in _ROLES.items():
        for side, each in (("", both), ("_base", sides[0]), ("_model", sides[1])):
            columns[f"rounding_angle_{letter}{side}"] = np.degrees(np.arctan(each[role]))
    columns |= _beyond(moved["movement"], rounding)
    row = _row(base, member, site, found.identity, found=found)
    row |= {name: _median(columns[name]) for name in (*ANGLES, *ROUNDING_ANGLES, "movement", "rounding")}
    known = np.isfinite(columns["movement"]) & np.isfinite(rounding)
    row["beyond_rounding_share"] = float(columns["beyond_rounding"][known].mean()) if known.any() else np.nan
    frames = [_rows_of(each, site.tower, site.layer, row["expert"]) for each in (base, member)]
    return PairedMLP(row, _neurons(row, order, columns, *frames))


def _beyond(moved: np.ndarray, rounding: np.ndarray) -> dict[str, np.ndarray]:
    with np.errstate(invalid="ignore"):
        excess = np.sqrt(np.maximum(moved**2 - np.nan_to_num(rounding) ** 2, 0.0))
        return {"rounding": rounding, "moved": excess, "beyond_rounding": moved > _BEYOND * rounding}


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else np.nan


def _rows_of(member: Member, tower: str, layer: int, expert: str | None) -> pd.DataFrame:
    frame = member.report.neurons
    rows = frame[(frame["layer"] == layer) & (frame["tower"] == tower)]
    return rows[rows["expert"].isna() if expert is None else (rows["expert"] == expert).fillna(False)]


def _neurons(
    row: dict[str, object], order: np.ndarray, columns: dict[str, np.ndarray], one: pd.DataFrame, two: pd.DataFrame
) -> pd.DataFrame:
    size = len(order)
    out: dict[str, Any] = {
        name: pd.Categorical.from_codes(np.zeros(size, dtype=np.int8), [row[name]])
        for name in ("base", "model", "tower")
    }
    out["layer"] = np.full(size, row["layer"], dtype=np.int32)
    out["expert"] = pd.array([row["expert"]] * size, dtype="string")
    out["neuron"] = np.arange(size, dtype=np.int32)
    counterpart = pd.array(order, dtype="Int32")
    counterpart[order < 0] = pd.NA
    out["counterpart"] = counterpart
    missing = np.full(size, np.nan)
    for name in NEURON_COLUMNS[7 : -len(CHANGED) - 2]:
        out[name] = as_stored(columns.get(name, missing))
    beyond = pd.array(columns.get("beyond_rounding", np.zeros(size, dtype=bool)), dtype="boolean")
    beyond[~(np.isfinite(out["movement"]) & np.isfinite(out["rounding"]))] = pd.NA
    out["beyond_rounding"] = beyond
    kept = order >= 0
    for name in CHANGED:
        before, after = (frame[name].to_numpy(dtype=float) for frame in (one, two))
        out[f"{name}_change"] = as_stored(np.where(kept, after[order], np.nan) - before)
    classes = [frame["io_class"].astype("string").to_numpy(dtype=object, na_value=None) for frame in (one, two)]
    changed = pd.array(classes[1][order] != classes[0], dtype="boolean")
    changed[~kept] = pd.NA
    out["io_class_changed"] = changed
    return pd.DataFrame(out)


def _from_frames(base: Member, member: Member, forced: bool) -> Iterator[PairedMLP]:
    """Where one of the two is a saved report: changes of measures, no angles."""
    for (tower, layer), here in base.report.neurons.groupby(["tower", "layer"], observed=True, sort=False):
        for expert in here["expert"].unique():
            label = None if pd.isna(expert) else str(expert)
            frames = [_rows_of(each, str(tower), int(layer), label) for each in (base, member)]
            if frames[1].empty:
                continue
            row = {"base": base.name, "model": member.name, "tower": str(tower), "layer": int(layer), "expert": label,
                   "own_index_share": np.nan, "n_elsewhere": 0}  # fmt: skip
            if len(frames[0]) != len(frames[1]):
                sizes = " and ".join(str(len(frame)) for frame in frames)
                yield PairedMLP(row | {"identity": "other shape", "note": f"d_mlp is {sizes}"}, None)
                continue
            identity, order, own = same_by_fingerprint(*frames)
            row |= {"identity": identity, "own_index_share": own, "n_elsewhere": int((order != np.arange(len(order))).sum()),
                    "note": "from saved reports: angles need the weights"}  # fmt: skip
            if identity not in ("index", "permuted") and not forced:
                yield PairedMLP(row, None)
                continue
            yield PairedMLP(row, _neurons(row, order, {}, *frames))
