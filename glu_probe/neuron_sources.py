"""What can be searched for neurons: saved reports, frames, checkpoints and layers, as rows of numbers or as factors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .checkpoint.checkpoint import Checkpoint, open_checkpoint
from .checkpoint.memory import Workspace
from .checkpoint.sites import Site
from .errors import BadOption
from .frames import LayerResult, join, neuron_frame
from .measures.neuron import flags, neuron_measures
from .measures.products import row_products
from .neurons import GatedLayer
from .report import Report, is_saved_report
from .selection import select_layers

Source = Report | pd.DataFrame | Checkpoint | GatedLayer | str | os.PathLike
Layers = Iterable[int] | str | None
Progress = Callable[[Iterable[Site]], Iterable[Site]]
_PLACE = ("model", "tower", "layer", "expert", "neuron")


def opened(source: Source) -> Report | pd.DataFrame | Checkpoint | GatedLayer:
    """The thing itself: a path or name is a saved report where there is one, else a model.

    Raises:
        BadOption: it is nothing that can be searched.
        GluProbeError: another of its subclasses, as of `load_report` and `open_checkpoint`.
    """
    if isinstance(source, (Report, pd.DataFrame, Checkpoint, GatedLayer)):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise BadOption(
            f"neurons cannot be searched for in {type(source).__name__}",
            hint="Give a Report, its frame of neurons, a Checkpoint, a GatedLayer, or the name of a model or a report",
        )
    if is_saved_report(source):
        return Report.load(Path(source).expanduser())
    return open_checkpoint(source)


def neuron_rows(
    source: Source, layers: Layers = None, *, needs: Iterable[str] = (), progress: Progress = iter
) -> pd.DataFrame:
    """The frame of neurons of a source, with two columns more: `d_model` (missing where only the frame is given) and
    `d_mlp` (neurons of that MLP).

    Args:
        source: a report, its frame of neurons, or something with factors, of which the measures are then computed.
        layers: which layers; see `select_layers`.
        needs: columns that must be there and not wholly missing.
        progress: wraps the iteration over MLPs.

    Raises:
        BadOption: it has no such layers, or lacks columns.
    """
    source = opened(source)
    if isinstance(source, Report):
        widths = source.layers.loc[~source.layers["no_mlp"].astype(bool)].drop_duplicates(["tower", "layer"])
        widths = widths.set_index(["tower", "layer"])["d_model"]
        rows = _selected(source.neurons, layers)
        places = pd.MultiIndex.from_arrays([rows["tower"].astype(str), rows["layer"]])
        rows["d_model"] = widths.reindex(places).to_numpy()
    elif isinstance(source, pd.DataFrame):
        rows = _selected(source, layers)
        rows["d_model"] = np.nan
    else:
        parts = []
        for model, layer in gated_layers(source, layers, progress=progress):
            rows = _measured(model, layer)
            rows["d_model"] = layer.d_model
            parts.append(rows)
        rows = join(parts)
    for name in needs:
        if name not in rows:
            raise BadOption(
                f"the frame has no column {name!r}", hint="Give the frame of neurons of a report, with all its columns"
            )
        if rows[name].dtype.kind == "f" and rows[name].isna().all():
            raise BadOption(
                f"{name!r} is missing for all these neurons", where=str(rows["model"].iloc[0]),
                hint="The activation or the scale of the MLP's input is not known: the report's notes say why",
            )  # fmt: skip
    rows["d_mlp"] = rows.groupby(["tower", "layer", rows["expert"].fillna("")], observed=True)["neuron"].transform(
        "size"
    )
    return rows


def gated_layers(
    source: Source, layers: Layers = None, *, progress: Progress = iter
) -> Iterator[tuple[str | None, GatedLayer]]:
    """Name of the model and factors of each MLP, one at a time; the next one takes the memory of the one before.

    Raises:
        BadOption: the source has numbers and no factors, or no such layers.
    """
    source = opened(source)
    if isinstance(source, (Report, pd.DataFrame)):
        ref = source.provenance.get("ref") if isinstance(source, Report) else None
        raise BadOption(
            "a report holds numbers, and this needs the factors themselves",
            hint=f"Give the model{f': {ref}' if ref else ''}",
        )
    if isinstance(source, GatedLayer):
        select_layers(layers, [source.layer])
        yield None, source.detach()
        return
    chosen = select_layers(layers, sorted({site.layer for site in source.sites}))
    workspace = Workspace()
    for site in progress([site for site in source.sites if site.layer in chosen]):
        yield source.name, source.load(site, workspace)


def _selected(frame: pd.DataFrame, layers: Layers) -> pd.DataFrame:
    absent = [name for name in _PLACE if name not in frame]
    if absent or not len(frame):
        raise BadOption(
            f"this frame has no column {absent[0]!r}" if absent else "this frame has no rows",
            hint="Give the frame of neurons of a report: report.neurons",
        )
    chosen = select_layers(layers, sorted({int(layer) for layer in frame["layer"].unique()}))
    return frame[frame["layer"].isin(chosen)].reset_index(drop=True)


def _measured(model: str | None, layer: GatedLayer) -> pd.DataFrame:
    """Rows of one MLP, as in a report."""
    products = row_products(layer)
    parts: dict[str, Any] = {"neurons": neuron_measures(layer, products), "flags": flags(layer, products)}
    return neuron_frame(model or "", LayerResult.of(layer, **parts, nulls={}, scalars={}, methods={}))
