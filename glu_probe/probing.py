"""The main job: every gated MLP of a checkpoint, one at a time, from factors to a report."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import whole_number
from .assembly import Kept, Tables, in_memory
from .checkpoint.checkpoint import Checkpoint, open_checkpoint
from .checkpoint.memory import Room, fresh
from .checkpoint.sites import Site
from .errors import BadOption, NonFinite
from .frames import LayerResult
from .identity import identity, running_software
from .measures.neuron import flags as neuron_flags
from .measures.neuron import neuron_measures
from .measures.nulls import null_measures
from .measures.output import default_samples, output_asymmetry
from .measures.products import row_products
from .measures.spectra import branch_spectra
from .measures.tensor import tensor_asymmetry
from .neurons import GatedLayer
from .parts import Parts
from .report import Report, software_versions
from .selection import select_layers
from .thread_limits import one_blas_thread

if TYPE_CHECKING:
    from .execute import Backend

Progress = Callable[[Iterable[Site]], Iterable[Site]]


@dataclass(frozen=True)
class Settings:
    """What decides about the numbers of an MLP, besides its factors; see `measure_layer`."""

    seed: int = 0
    samples: int | None = None
    exact: bool = False


def measure_site(checkpoint: Checkpoint, site: Site, settings: Settings, workspace: Room = fresh) -> LayerResult:
    """Read one MLP and measure it: the whole of a job, wherever it runs.

    Args:
        checkpoint: the model, opened.
        site: one of its `sites`.
        settings: how to measure.
        workspace: memory for the factors, which are done with when this returns.
    """
    layer = checkpoint.load(site, workspace)
    result = measure_layer(layer, seed=settings.seed, samples=settings.samples, exact=settings.exact)
    samples = settings.samples or default_samples(layer)
    return replace(result, samples=samples, oddities=tuple(_non_finite(layer, result, site)))


def measure_layer(layer: GatedLayer, *, seed: int = 0, samples: int | None = None, exact: bool = False) -> LayerResult:
    """Every default measure of one gated MLP.

    Args:
        layer: its factors.
        seed: of the Gaussian samples, the mismatched pairs and the Lanczos start; the same seed, the same numbers.
        samples: Gaussian inputs for the output measures; None for as many as a fixed cost buys.
        exact: compute spectra and tensor asymmetry exactly whatever that costs (about 6 d_mlp d_model^2 and 5 d_mlp^2
            d_model flops); otherwise large layers get iterated and sampled values, and no effective ranks.

    Raises:
        BadOption: seed or samples are not whole numbers of at least 0 and 2.
    """
    seed, samples = _checked(seed, samples)
    layer = layer.detach()
    # named by place, so that a layer's numbers do not depend on which others are measured
    place = zlib.crc32(f"{layer.tower}/{layer.expert}".encode())
    streams = np.random.SeedSequence([seed, place, layer.layer]).spawn(4)
    for_nulls, for_output, for_spectra, for_tensor = (np.random.default_rng(stream) for stream in streams)
    products = row_products(layer)
    flags = neuron_flags(layer, products)
    alive = ~(flags["padded"] | flags["non_finite"])
    whole = alive & ~(flags["zero_gate"] | flags["zero_up"] | flags["zero_down"])
    spectra, spectra_method = branch_spectra(layer, products, alive, for_spectra, exact=exact or None)
    tensor, tensor_error, tensor_method = tensor_asymmetry(
        layer, exact=exact or None, seed=int(for_tensor.integers(2**32)), usable=alive, products=products
    )
    return LayerResult.of(
        layer,
        neurons=neuron_measures(layer, products),
        flags=flags,
        nulls=null_measures(layer, whole, for_nulls),
        scalars=output_asymmetry(layer, products, alive, for_output, samples)
        | spectra
        | {"tensor_asymmetry": tensor, "tensor_asymmetry_se": tensor_error},
        methods={"spectra": spectra_method, "tensor_asymmetry": tensor_method},
    )


def probe(
    model: str | os.PathLike | Checkpoint,
    *,
    layers: Iterable[int] | str | None = None,
    towers: Sequence[str] | None = None,
    seed: int = 0,
    samples: int | None = None,
    exact: bool = False,
    strict: bool = False,
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
    settings = Settings(*_checked(seed, samples), exact)
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
    provenance = checkpoint.provenance() | {
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
) -> Iterator[tuple[Site, LayerResult]]:
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
    return {"model": identity(checkpoint), **asdict(settings), "software": running_software()}


def _refuse_odd(result: LayerResult, strict: bool) -> None:
    if strict and result.oddities:
        raise NonFinite(result.oddities[0], hint="Without --strict they are counted and left out")


def _checked(seed: int, samples: int | None) -> tuple[int, int | None]:
    seed = whole_number("seed", seed, 0)
    return seed, samples if samples is None else whole_number("samples", samples, 2, why="a standard error needs them")


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


def _non_finite(layer: GatedLayer, result: LayerResult, site: Site) -> list[str]:
    bad = np.flatnonzero(result.flags["non_finite"])
    notes = []
    if bad.size:
        which = ", ".join(map(str, bad[:8])) + (" ..." if bad.size > 8 else "")
        found = ", ".join(_holding(layer, bad)) or "rows whose norm overflows"
        notes.append(f"{site.where}: {bad.size} neurons hold NaN or infinity ({which}), in {found}; they are left out")
    if layer.output_bias is not None and not layer.output_bias.isfinite().all():
        notes.append(f"{site.where}: {layer.sources['down_bias']} holds NaN or infinity; no measure uses it")
    return notes


def _holding(layer: GatedLayer, bad: np.ndarray) -> list[str]:
    """Names of the tensors that make these neurons not finite."""
    parts = {
        "gate": layer.query, "up": layer.key, "down": layer.value, "gate_bias": layer.query_bias, "up_bias": layer.key_bias,
    }  # fmt: skip
    roles = [role for role, part in parts.items() if part is not None and not part[bad].isfinite().all()]
    if {"gate", "up"} <= {*roles} and len(bad) == layer.d_mlp and "norm" in layer.sources:
        # the norm's gain is in every row of both
        roles = ["norm", *(role for role in roles if role not in ("gate", "up"))]
    if "gate_bias" in roles and "gate_bias" not in layer.sources:  # the norm's bias became the neurons'
        roles = [role for role in roles if not role.endswith("_bias")] + ["norm_bias"]
    return list(dict.fromkeys(layer.sources[role] for role in roles if role in layer.sources))
