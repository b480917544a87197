"""The main job: every gated MLP of a checkpoint, one at a time, from factors to a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from .checkpoint.checkpoint import Checkpoint, open_checkpoint
from .checkpoint.memory import DEFAULT as DEFAULT_MEMORY
from .checkpoint.memory import Workspace, in_bytes
from .checkpoint.sites import Site
from .errors import BadOption, NonFinite
from .frames import class_rows, empty_row, join, layer_frame, layer_row, neuron_frame
from .measuring import Settings, checked, measure_site
from .report import Report, software_versions
from .selection import select_layers

Progress = Callable[[Iterable[Site]], Iterable[Site]]


def probe(
    model: str | os.PathLike | Checkpoint,
    *,
    layers: Iterable[int] | str | None = None,
    towers: Sequence[str] | None = None,
    seed: int = 0,
    samples: int | None = None,
    exact: bool = False,
    strict: bool = False,
    memory: int | str = DEFAULT_MEMORY,
    progress: Progress = iter,
    **options: Any,
) -> Report:
    """Measure the gated MLPs of a model, from its weights alone.

    Args:
        model: a reference as `open_checkpoint` takes it, or an opened checkpoint.
        layers: which layers; a sequence of indices or "0:8" or "0,4,7". All by default.
        towers: which stacks of layers ("text", "vision", ...). All by default.
        seed: of everything that is sampled.
        samples: Gaussian inputs for the output measures of each layer; by default as many as a fixed cost buys.
        exact: spectra and tensor asymmetry exactly, whatever that costs; see `measure_layer`.
        strict: raise NonFinite at the first weight that is not finite, instead of counting it.
        memory: bound on what the run takes beside the frames, in bytes or as "1GB". An MLP that does not fit is read a
            block of neurons at a time, and again for each step of its spectra; the numbers are the same.
        progress: wraps the iteration over MLPs, for a progress bar.
        **options: of `open_checkpoint`, if `model` is a reference.

    Returns:
        A report with the frames `layers`, `neurons` and `classes`. One MLP at most is in memory at a time.

    Raises:
        GluProbeError: one of its subclasses.
    """
    checkpoint = _opened(model, options)
    settings = Settings(*checked(seed, samples), exact, in_bytes(memory))
    sites, without = _chosen(checkpoint, layers, towers)
    neurons, rows, classes, notes, counts, methods = [], {}, [], [], set(), {}
    iterator, workspace = iter(progress(sites)), Workspace()
    for key, group in groupby(iterator, key=lambda site: (site.tower, site.layer, site.group)):
        results = []
        for site in group:
            result = measure_site(checkpoint, site, settings, workspace)  # in the memory of the one before
            if strict and result.oddities:
                raise NonFinite(result.oddities[0], hint="Without --strict they are counted and left out")
            counts.add(result.samples)
            for name, method in result.methods.items():
                methods.setdefault(name, set()).add(method)
            notes += result.oddities
            results.append(result)
            neurons.append(neuron_frame(checkpoint.name, result))
        rows[key] = layer_row(checkpoint.name, results)
        classes.append(class_rows(checkpoint.name, results))
    columns = list(next(iter(rows.values())))
    for tower, layer in without:
        rows[tower, layer, "none"] = empty_row(checkpoint.name, tower, layer, columns)
    ordered = [rows[key] for key in sorted(rows, key=lambda key: (key[0] != "text", *key))]
    provenance = checkpoint.provenance() | {
        "layers": sorted({site.layer for site in sites}),
        "seed": settings.seed,
        "samples": sorted(counts),
        "methods": {name: sorted(found) for name, found in methods.items()},
        "software": software_versions(),
    }
    provenance["notes"] = [*provenance["notes"], *notes]
    return Report(layer_frame(ordered), join(neurons), join(classes), provenance)


def _opened(model: str | os.PathLike | Checkpoint, options: dict[str, Any]) -> Checkpoint:
    if not isinstance(model, Checkpoint):
        return open_checkpoint(model, **options)
    if options:
        raise BadOption(
            f"{', '.join(sorted(options))} given for a checkpoint that is already open",
            hint="Give them to open_checkpoint",
        )
    return model


def _chosen(
    checkpoint: Checkpoint, layers: Iterable[int] | str | None, towers: Sequence[str] | None
) -> tuple[list[Site], list[tuple[str, int]]]:
    """The MLPs to measure, and (tower, layer) of chosen layers that have none."""
    stacks = checkpoint.layers_present
    unknown = [tower for tower in towers or () if tower not in stacks]
    if unknown:
        raise BadOption(f"there is no tower {unknown[0]!r}", hint=f"There are {', '.join(stacks)}")
    stacks = {tower: present for tower, present in stacks.items() if not towers or tower in towers}
    chosen = select_layers(layers, sorted({layer for present in stacks.values() for layer in present}))
    sites = [site for site in checkpoint.sites if site.tower in stacks and site.layer in chosen]
    if not sites:
        raise BadOption(f"layers {layers!r} have no gated MLP", where=checkpoint.name)
    gated = {(site.tower, site.layer) for site in sites}
    everything = [(tower, layer) for tower, present in stacks.items() for layer in present if layer in chosen]
    return sites, [place for place in everything if place not in gated]
