"""The main job: every gated MLP of a checkpoint, one at a time, from factors to a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .assembly import Kept, Tables, in_memory
from .checkpoint.checkpoint import Checkpoint, open_checkpoint
from .checkpoint.memory import DEFAULT as DEFAULT_MEMORY
from .checkpoint.memory import in_bytes
from .checkpoint.sites import Site
from .errors import BadOption, NonFinite
from .frames import LayerResult
from .identity import identity, running_software
from .measuring import Settings, checked
from .parts import Parts
from .report import Report, software_versions
from .selection import select_layers
from .thread_limits import one_blas_thread

if TYPE_CHECKING:
    from .execute import Backend

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
    backend: str = "serial",
    workers: int | None = None,
    address: str | None = None,
    parts: str | os.PathLike | None = None,
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
        memory: bound on what a worker takes beside the frames, in bytes or as "1GB". An MLP that does not fit is read a
            block of neurons at a time, and again for each step of its spectra; the numbers are the same.
        backend: where to measure: "serial", "threads", "processes", "dask" or "ray". The same bytes everywhere.
        workers: how many MLPs at once at most, each with memory of its own; by default as many as there are cores.
        address: of a running Dask or Ray cluster.
        parts: a directory in which the result of every MLP is kept as it comes. The same call again goes on where it was
            interrupted; a call with other options, files or software is refused. The neuron frame then stays in a file
            there (or where the report is saved) until it is used.
        progress: wraps the iteration over MLPs, for a progress bar.
        **options: of `open_checkpoint`, if `model` is a reference.

    Returns:
        A report with the frames `layers`, `neurons` and `classes`. One MLP for each worker is in memory at a time.

    Raises:
        GluProbeError: one of its subclasses.
    """
    from .execute import Backend

    where = Backend(backend, workers, address)
    checkpoint = _opened(model, options)
    settings = Settings(*checked(seed, samples), exact, in_bytes(memory))
    sites, without = _chosen(checkpoint, layers, towers)
    tables = Tables(checkpoint.name)
    with one_blas_thread():
        if parts is None:
            with closing(_measured(checkpoint, sites, settings, where, strict, progress)) as results:
                neurons = in_memory(tables, checkpoint.name, sites, results)
        else:
            with Parts(parts, _run_facts(checkpoint, settings)) as directory:
                kept = Kept(directory, checkpoint.sites)
                waiting = [site for site in sites if not kept.has(site)]
                with closing(_measured(checkpoint, waiting, settings, where, strict, progress)) as results:
                    for site, result in results:
                        kept.keep(site, result)
                for site in sites if strict else ():
                    _refuse_odd(kept.of(site), strict)
                neurons = kept.assemble(tables, checkpoint.name, sites)
    facts = checkpoint.provenance()
    facts.pop("path", None)  # `ref` is what opens the model again; where its files lay is of this machine
    provenance = facts | {
        "layers": sorted({site.layer for site in sites}),
        "seed": settings.seed,
        "samples": sorted(tables.samples),
        "methods": {name: sorted(found) for name, found in tables.methods.items()},
        "software": software_versions(),
    }
    provenance["notes"] = [*provenance["notes"], *tables.notes]
    return Report(tables.layers(without), neurons, tables.classes(), provenance)


def _measured(
    checkpoint: Checkpoint, sites: list[Site], settings: Settings, where: Backend, strict: bool, progress: Progress
) -> Generator[tuple[Site, LayerResult], None, None]:
    """Results as they come, a step of the progress for each."""
    from .execute import measure_sites

    with closing(measure_sites(checkpoint, sites, settings, where)) as results:
        for _ in progress(sites):
            site, result = next(results)
            _refuse_odd(result, strict)
            yield site, result


def _run_facts(checkpoint: Checkpoint, settings: Settings) -> dict[str, Any]:
    """Everything that decides about the results of MLPs, by name; which of them are chosen does not."""
    if not checkpoint.in_files:
        raise BadOption(
            "parts for a model in memory, which nothing tells from another one", where=checkpoint.name,
            hint="Leave parts out, or save the model and give its directory",
        )  # fmt: skip
    return {"model": identity(checkpoint), **_deciding(settings), "software": running_software()}


def _deciding(settings: Settings) -> dict[str, Any]:
    """What of the settings the numbers depend on."""
    return {name: value for name, value in asdict(settings).items() if name != "memory"}


def _refuse_odd(result: LayerResult, strict: bool) -> None:
    if strict and result.oddities:
        raise NonFinite(result.oddities[0], hint="Without --strict they are counted and left out")


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
        raise BadOption(
            f"layers {layers!r} have no gated MLP",
            where=checkpoint.name,
            hint="`glu-probe inspect MODEL` lists the layers that have one",
        )
    gated = {(site.tower, site.layer) for site in sites}
    everything = [(tower, layer) for tower, present in stacks.items() for layer in present if layer in chosen]
    return sites, [place for place in everything if place not in gated]
