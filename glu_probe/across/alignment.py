"""Which layer of one model stands beside which of another: by index, or by relative depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd

from ..errors import BadOption
from ..layer_rows import expert_group
from .members import Member

Align = Literal["layer", "depth"]
ALIGNMENTS: tuple[Align, ...] = ("layer", "depth")


def alignment(members: Sequence[Member], wanted: str | None) -> Align:
    """The given one, or by layer if every tower that models share is as deep in all of them, else by depth.

    Raises:
        BadOption: there is no such alignment, or the depth of a model is not known.
    """
    known = next((one for one in ALIGNMENTS if one == wanted), None)
    if wanted is not None and known is None:
        raise BadOption(f"align is {wanted!r}", hint='Use "layer", "depth" or nothing for a choice by the models')
    depths: dict[str, set[int]] = {}
    for member in members:
        for tower, last in member.last_layer.items():
            depths.setdefault(tower, set()).add(last)
    chosen = known or ("layer" if all(len(found) == 1 for found in depths.values()) else "depth")
    partial = [member.name for member in members if not member.whole]
    if chosen == "depth" and partial:
        raise BadOption(
            f"how many layers {partial[0]} has is not known: its report was saved by a version that did not write it down",
            hint='Name the model instead of the report, make the report again, or use align="layer" (`--align layer`)',
        )
    return chosen


def relative_depth(layer: pd.Series | np.ndarray, last: int) -> np.ndarray:
    """0 for the first layer, 1 for the last; 0 where there is one layer only."""
    return np.asarray(layer, dtype=float) / max(last, 1)


def depth_bins(members: Sequence[Member], tower: str) -> int:
    """Number of bins of relative depth: the layers of the shallowest model, so that none of its bins holds two."""
    return min(member.last_layer[tower] + 1 for member in members if tower in member.last_layer)


def positions(layer: pd.Series, last: int, align: Align, bins: int) -> np.ndarray:
    """Where a layer stands in the comparison: its index, or the index of its bin."""
    if align == "layer":
        return layer.to_numpy(dtype=int)
    return np.minimum((relative_depth(layer, last) * bins + 1e-9).astype(int), bins - 1)


def joined_layers(members: Sequence[Member]) -> pd.DataFrame:
    """The layer frames below each other: `model` is the short name, `relative_depth` stands behind `layer`."""
    parts = []
    for member in members:
        frame = member.report.layers.copy()
        frame["model"] = pd.array([member.name] * len(frame), dtype="string")
        last = frame["tower"].map(member.last_layer).to_numpy(dtype=float)
        depth = relative_depth(frame["layer"], 1) / np.maximum(last, 1)
        frame.insert(list(frame.columns).index("layer") + 1, "relative_depth", depth.astype(np.float32))
        parts.append(frame)
    # columns that one report has and another lacks are missing there
    columns = list(dict.fromkeys(name for part in parts for name in part.columns))
    stacked = {}
    for name in columns:
        pieces = [part[name] if name in part else pd.Series(np.nan, index=part.index) for part in parts]
        kept = [piece for piece in pieces if piece.notna().any()] or pieces
        dtype = kept[0].dtype if len({piece.dtype for piece in kept}) == 1 else None
        values = np.concatenate([piece.astype(object).to_numpy() for piece in pieces])
        column = pd.Series(values)
        if dtype is not None and not (dtype.kind in "iub" and column.isna().any()):
            column = column.astype(dtype)
        else:
            column = column.infer_objects()
        stacked[name] = column
    return pd.DataFrame(stacked)


def groups_of(neurons: pd.DataFrame) -> np.ndarray:
    """The expert group of every row of a neuron frame: "dense", "routed" or "shared"."""
    codes, names = pd.factorize(neurons["expert"])
    known = [expert_group(int(name) if str(name).isdigit() else str(name)) for name in names]
    return np.array([*known, "dense"])[codes]
