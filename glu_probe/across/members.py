"""What is compared: models and saved reports as one kind of thing, with names that tell them apart."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..errors import BadOption
from ..report import Report, is_saved_report
from ..selection import select_layers

_LONGEST = 44


@dataclass(frozen=True, eq=False)
class Member:
    """One side of a comparison.

    Attributes:
        name: short and unique among those compared.
        report: its frames.
        checkpoint: its weights, or None for a saved report.
        last_layer: tower to the index of its last layer, measured or not.
        whole: whether that is known; else it is the last one that was measured.
    """

    name: str
    report: Report
    checkpoint: Checkpoint | None
    last_layer: dict[str, int]
    whole: bool

    @property
    def facts(self) -> dict[str, Any]:
        """Provenance of its report."""
        return self.report.provenance


Thing = str | os.PathLike | Checkpoint | Report


def opened(things: Sequence[Thing], options: dict[str, Any]) -> list[Checkpoint | Report]:
    """Checkpoints and reports of what was named: a directory that holds a saved report is one.

    Raises:
        BadOption: fewer than two things, or options for things that are open already.
        GluProbeError: of `open_checkpoint` and `Report.load`.
    """
    if len(things) < 2:
        raise BadOption(
            f"{len(things)} given: there is nothing to compare",
            hint="Name two or more models or directories of saved reports",
        )
    ready: list[Checkpoint | Report] = []
    used = False
    for thing in things:
        if isinstance(thing, (Checkpoint, Report)):
            ready.append(thing)
        elif is_saved_report(thing):
            ready.append(Report.load(Path(thing).expanduser()))
        else:
            ready.append(open_checkpoint(thing, **options))
            used = True
    if options and not used:
        raise BadOption(
            f"{', '.join(sorted(options))} given, but there is no model to open with it",
            hint="These options are for models that are named; open checkpoints and saved reports are as they are",
        )
    return ready


def last_layers(thing: Checkpoint | Report) -> tuple[dict[str, int], bool]:
    """Index of each tower's last layer, and whether the whole model counts or only what was measured of it."""
    if isinstance(thing, Checkpoint):
        return {tower: max(layers) for tower, layers in thing.layers_present.items()}, True
    towers = thing.provenance.get("towers", {})
    measured = thing.layers.groupby("tower")["layer"].max()
    known = {tower: facts["last_layer"] for tower, facts in towers.items() if "last_layer" in facts}
    counts = thing.layers.groupby("tower")["layer"].nunique()
    whole = all(
        tower in known or towers.get(tower, {}).get("gated_mlps") == count == measured[tower] + 1
        for tower, count in counts.items()
    )
    return {tower: int(known.get(tower, last)) for tower, last in measured.items()}, whole


def selected(report: Report, layers: Iterable[int] | str | None) -> Report:
    """The report with these layers only.

    Raises:
        BadOption: it has no such layers.
    """
    if layers is None:
        return report
    chosen = select_layers(layers, sorted({int(layer) for layer in report.layers["layer"]}))
    frames = {
        name: frame[frame["layer"].isin(chosen)].reset_index(drop=True)
        for name in ("layers", "neurons", "classes")
        if (frame := getattr(report, name)) is not None
    }
    return replace(report, **frames, provenance=report.provenance | {"layers": sorted(chosen)})


def short_names(things: Sequence[Checkpoint | Report], given: Sequence[str] | None = None) -> list[str]:
    """A name for each, short and all different: the model's own, with as much of its place as it takes.

    Raises:
        BadOption: the given names are not one for each, or not all different.
    """
    if given is not None:
        names = [str(name) for name in given]
        if len(names) != len(things) or len({*names}) != len(names) or not all(names):
            raise BadOption(
                f"names are {', '.join(map(repr, names))}", hint=f"Give {len(things)} names that are all different"
            )
        return names
    facts = [thing.provenance() if isinstance(thing, Checkpoint) else thing.provenance for thing in things]
    full = [str(each.get("model") or "model") for each in facts]
    # the organisation goes unless it is what tells two apart, then the directory comes, then a number
    last = [name.rsplit("/", 1)[-1] for name in full]
    places = [Path(str(each.get("ref") or "")).parent.name for each in facts]
    placed = [f"{place}/{name}" if place else name for place, name in zip(places, last, strict=True)]
    for names in (last, full, placed):
        shortened = [_shortened(name) for name in names]
        if len({*shortened}) == len(shortened):
            return shortened
    numbered: list[str] = []
    count: dict[str, int] = {}
    for name in map(_shortened, last):
        count[name] = count.get(name, 0) + 1
        numbered.append(name if count[name] == 1 else f"{name} ({count[name]})")
    return numbered


def _shortened(name: str) -> str:
    half = (_LONGEST - 1) // 2
    return name if len(name) <= _LONGEST else f"{name[:half]}…{name[-half:]}"
