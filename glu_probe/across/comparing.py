"""compare(): two or more models, or saved reports, beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pandas as pd

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.sites import Site
from ..errors import BadOption
from ..probing import probe
from ..report import Report, software_versions
from .alignment import alignment, joined_layers
from .comparability import obstacles
from .comparison import Comparison
from .differences import difference_frame
from .members import Member, Thing, last_layers, opened, selected, short_names
from .neuron_pairs import pair_up
from .sensitivity import rounding_sensitivity

Progress = Callable[[str, Iterable[Any]], Iterable[Any]]


def _silent(_what: str, steps: Iterable[Any]) -> Iterable[Any]:
    return steps


def compare(
    *things: Thing,
    align: str | None = None,
    neurons: bool | None = None,
    rounding: bool = True,
    layers: Iterable[int] | str | None = None,
    names: Sequence[str] | None = None,
    seed: int = 0,
    samples: int | None = None,
    exact: bool = False,
    progress: Progress = _silent,
    **options: Any,
) -> Comparison:
    """Compare models: a base and its tuned versions, revisions of one run, sizes, quantisations.

    Args:
        *things: two or more references as `open_checkpoint` takes them ("org/name@rev1", "org/name@rev2", ...), opened
            checkpoints, directories of saved reports, or reports. The first is the base.
        align: "layer" (by index), "depth" (by relative depth, in as many bins as the shallowest model has layers), or None:
            by layer if all are equally deep.
        neurons: None to follow single neurons where shapes agree and neurons are the same ones; True to take neuron i of
            one for neuron i of the other whatever they look like; False not to.
        rounding: measure what one more rounding of the weights would change: as much work again as measuring.
        layers: which layers, as `probe` takes it, each model and each saved report must have them; all by default.
        names: names for the model column; by default the models' own, as short as they tell them apart.
        seed, samples, exact: as `probe` takes them, for what is measured; saved reports are as they are.
        progress: called with what is done and the steps, gives the steps back; for a progress bar.
        **options: of `open_checkpoint`, for the references.

    Returns:
        A `Comparison` with the frames `layers`, `differences`, `neurons` and `mlps`. Of two models one MLP each is in memory
        at a time, and what rounding does to one of them.

    Raises:
        BadOption: fewer than two things; nothing that they share; a layer that one of them does not have; neurons=True where
            no shapes agree; a seed, samples or exact where nothing is measured.
        GluProbeError: another subclass, as `open_checkpoint`, `probe` and `Report.load` raise it.
    """
    if neurons not in (None, True, False):
        raise BadOption(f"neurons is {neurons!r}", hint="Use True, False, or None for a choice by the models")
    ready = opened(things, options)
    _refuse_idle({"seed": seed != 0, "samples": samples is not None, "exact": exact}, ready)
    labels = short_names(ready, names)
    measuring = {"layers": layers, "seed": seed, "samples": samples, "exact": exact}
    members = [_member(thing, name, measuring, progress) for thing, name in zip(ready, labels, strict=True)]
    align = alignment(members, align)
    between = {member.name: obstacles(members[0], member) for member in members[1:]}
    _refuse_strangers(members)
    sites = [_sites(member) for member in members]
    roundings: list[pd.DataFrame | None] = [None] * len(members)
    errors: list[dict | None] = [None] * len(members)
    notes: list[str] = []
    for index, member in enumerate(members):
        if member.checkpoint is None or not rounding:
            continue
        roundings[index], errors[index], storage = rounding_sensitivity(
            member, sites[index], seed=seed, samples=samples, exact=exact,
            progress=partial(progress, f"{member.name}, rounding"),
        )  # fmt: skip
        if storage.unknown:
            notes.append(
                f"{member.name} has weights stored as {', '.join(sorted(storage.unknown))}: what rounding to that explains is "
                "not known"
            )
    saved = [member.name for member in members if member.checkpoint is None]
    if saved:
        notes.append(
            f"of {', '.join(saved)} there is a saved report only: what rounding explains, and angles of neurons, need the weights"
        )
    differences = difference_frame(members, roundings, align, between)
    pairs = [] if neurons is False else list(
        pair_up(members, sites, errors, forced=neurons is True, progress=lambda steps: progress("neurons", steps))
    )  # fmt: skip
    if neurons is True and not any(pair.neurons is not None for pair in pairs):
        raise BadOption(
            "no MLP of the base has one of the same shape in another model, so neurons cannot be told apart by index",
            where=members[0].name, hint="Leave neurons out to compare layers alone",
        )  # fmt: skip
    notes += [obstacle.sentence for found in between.values() for obstacle in found]
    notes += [f"{member.name}: {note}" for member in members for note in member.facts.get("notes", ())]
    provenance = {
        "models": [{"name": member.name, **member.facts} for member in members],
        "base": members[0].name,
        "align": align,
        "rounding": rounding,
        "neurons": neurons,
        "seed": seed,
        "software": software_versions(),
        "notes": list(dict.fromkeys(notes)),
    }
    return Comparison(joined_layers(members), differences, _neurons(pairs), _mlps(pairs), provenance)


def _member(thing: Checkpoint | Report, name: str, measuring: dict[str, Any], progress: Progress) -> Member:
    last, whole = last_layers(thing)
    try:
        if isinstance(thing, Report):
            return Member(name, selected(thing, measuring["layers"]), None, last, whole)
        report = probe(thing, progress=lambda steps: progress(name, steps), **measuring)
    except BadOption as error:
        raise error.within(name) from None
    return Member(name, report, thing, last, whole)


def _refuse_idle(given: dict[str, bool], things: Sequence[Checkpoint | Report]) -> None:
    """Options of how it is measured, where nothing is: they would be taken for heeded."""
    idle = [name for name, is_given in given.items() if is_given]
    if idle and all(isinstance(thing, Report) for thing in things):
        raise BadOption(
            f"{', '.join(idle)} given, but there is no model to measure with it",
            hint="Saved reports were measured already: leave it out, or give the models",
        )


def _sites(member: Member) -> list[Site]:
    """The MLPs that its report has."""
    if member.checkpoint is None:
        return []
    places = {*map(tuple, member.report.layers[["tower", "layer"]].itertuples(index=False))}
    return [site for site in member.checkpoint.sites if (site.tower, site.layer) in places]


def _refuse_strangers(members: Sequence[Member]) -> None:
    """Make sure that each has a stack of layers and a kind of MLP that the base has."""
    kinds = []
    for member in members:
        gated = member.report.layers[~member.report.layers["no_mlp"].astype(bool)]
        kinds.append({*map(tuple, gated[["tower", "group"]].itertuples(index=False))})
    for member, found in zip(members[1:], kinds[1:], strict=True):
        if not kinds[0] & found:
            words = [", ".join(sorted(f"{tower} {group}" for tower, group in each)) for each in (kinds[0], found)]
            raise BadOption(
                f"{members[0].name} has MLPs of kind {words[0]}, {member.name} of kind {words[1]}: they share none",
                hint="Layers are compared within a tower and a kind of MLP (dense, routed, shared)",
            )


def _neurons(pairs: Sequence[Any]) -> pd.DataFrame:
    from ..frames import join
    from .neuron_pairs import NEURON_COLUMNS

    frames = [pair.neurons for pair in pairs if pair.neurons is not None]
    return join(frames) if frames else pd.DataFrame(columns=list(NEURON_COLUMNS))


def _mlps(pairs: Sequence[Any]) -> pd.DataFrame:
    from .neuron_pairs import ANGLES, ROUNDING_ANGLES

    first = ["base", "model", "tower", "layer", "expert", "identity", "own_index_share", "n_elsewhere"]
    measured = [*ANGLES, *ROUNDING_ANGLES, "movement", "rounding", "beyond_rounding_share"]
    frame = pd.DataFrame([pair.row for pair in pairs], columns=[*first, *measured, "note"])
    frame[measured] = frame[measured].astype("float32")
    return frame.astype(dict.fromkeys(("base", "model", "tower", "expert", "identity", "note"), "string"))
