"""The main job: every gated MLP of a checkpoint, one at a time, from factors to a report."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from .checkpoint.checkpoint import Checkpoint, open_checkpoint
from .checkpoint.layout import Site
from .checkpoint.memory import Workspace
from .errors import BadOption, NonFinite
from .frames import LayerResult, class_rows, empty_row, join, layer_frame, layer_row, neuron_frame
from .measures.neuron import flags as neuron_flags
from .measures.neuron import neuron_measures
from .measures.nulls import null_measures
from .measures.output import default_samples, output_asymmetry
from .measures.products import row_products
from .measures.spectra import branch_spectra
from .neurons import GatedLayer
from .report import Report, software_versions

Progress = Callable[[Iterable[Site]], Iterable[Site]]


def measure_layer(layer: GatedLayer, *, seed: int = 0, samples: int | None = None) -> LayerResult:
    """Every default measure of one gated MLP.

    Args:
        layer: its factors.
        seed: of the Gaussian samples, the mismatched pairs and the Lanczos start; the same seed, the same numbers.
        samples: Gaussian inputs for the output measures; None for as many as a fixed cost buys.
    """
    expert = {None: 0, "shared": 1}.get(layer.expert, 2 if isinstance(layer.expert, str) else 3 + (layer.expert or 0))
    streams = np.random.SeedSequence([seed, zlib.crc32(layer.tower.encode()), layer.layer, expert]).spawn(3)
    for_nulls, for_output, for_spectra = (np.random.default_rng(stream) for stream in streams)
    products = row_products(layer)
    flags = neuron_flags(layer, products)
    alive = ~(flags["padded"] | flags["non_finite"])
    whole = alive & ~(flags["zero_gate"] | flags["zero_up"] | flags["zero_down"])
    return LayerResult.of(
        layer,
        neurons=neuron_measures(layer, products),
        flags=flags,
        nulls=null_measures(layer, whole, for_nulls),
        scalars=output_asymmetry(layer, products, alive, for_output, samples)
        | branch_spectra(layer, products, alive, for_spectra),
    )


def probe(
    model: str | os.PathLike | Checkpoint,
    *,
    layers: Sequence[int] | range | str | None = None,
    towers: Sequence[str] | None = None,
    seed: int = 0,
    samples: int | None = None,
    strict: bool = False,
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
        strict: raise NonFinite at the first weight that is not finite, instead of counting it.
        progress: wraps the iteration over MLPs, for a progress bar.
        **options: of `open_checkpoint`, if `model` is a reference.

    Returns:
        A report with the frames `layers`, `neurons` and `classes`. One MLP is in memory at a time.

    Raises:
        GluProbeError: one of its subclasses.
    """
    if isinstance(model, Checkpoint):
        if options:
            raise BadOption(
                f"{', '.join(sorted(options))} given for a checkpoint that is already open",
                hint="Give them to open_checkpoint",
            )
        checkpoint = model
    else:
        checkpoint = open_checkpoint(model, **options)
    if samples is not None and samples < 2:
        raise BadOption(f"samples is {samples}", hint="A standard error needs at least 2")
    sites = _chosen(checkpoint, layers, towers)
    neurons, rows, classes, notes, counts = [], {}, [], [], set()
    iterator, workspace = iter(progress(sites)), Workspace()
    for key, group in groupby(iterator, key=lambda site: (site.tower, site.layer, _group(site))):
        results = []
        for site in group:
            layer = checkpoint.load(site, workspace)  # in the memory of the one before, which is done with
            counts.add(samples or default_samples(layer))
            result = measure_layer(layer, seed=seed, samples=samples)
            notes += _non_finite(layer, result, site, strict)
            results.append(result)
            neurons.append(neuron_frame(checkpoint.name, result))
        rows[key] = layer_row(checkpoint.name, results)
        classes.append(class_rows(checkpoint.name, results))
    columns = list(next(iter(rows.values())))
    for tower, layer in _without_mlp(checkpoint, layers, towers):
        rows[tower, layer, "none"] = empty_row(checkpoint.name, tower, layer, columns)
    ordered = [rows[key] for key in sorted(rows, key=lambda key: (key[0] != "text", *key))]
    provenance = checkpoint.provenance() | {
        "layers": sorted({site.layer for site in sites}),
        "seed": seed,
        "samples": sorted(counts),
        "software": software_versions(),
    }
    provenance["notes"] = [*provenance["notes"], *notes]
    return Report(layer_frame(ordered), join(neurons), join(classes), provenance)


def _group(site: Site) -> str:
    return "dense" if site.expert is None else "shared" if site.expert == "shared" else "routed"


def parse_layers(text: str) -> Callable[[int], bool]:
    """A test for layer indices from "0:8" (a half-open range), "0,4,7", or a mixture.

    Raises:
        BadOption: it is neither.
    """
    tests: list[Callable[[int], bool]] = []
    for part in text.split(","):
        bounds = part.strip().split(":")
        try:
            numbers = [int(bound) if bound.strip() else None for bound in bounds]
        except ValueError:
            numbers = []
        if len(numbers) == 1 and numbers[0] is not None:
            tests.append(lambda layer, only=numbers[0]: layer == only)
        elif len(numbers) == 2:
            start, stop = numbers[0] or 0, numbers[1]
            tests.append(lambda layer, a=start, b=stop: a <= layer and (b is None or layer < b))
        else:
            raise BadOption(f"layers is {text!r}", hint='Write "0:8" for layers 0 to 7, or "0,4,7"')
    return lambda layer: any(test(layer) for test in tests)


def _wanted(layers: Sequence[int] | range | str | None) -> Callable[[int], bool]:
    if layers is None:
        return lambda layer: True
    return parse_layers(layers) if isinstance(layers, str) else set(layers).__contains__


def _chosen(checkpoint: Checkpoint, layers, towers) -> list[Site]:
    present = list(dict.fromkeys(site.tower for site in checkpoint.sites))
    unknown = [tower for tower in towers or () if tower not in present]
    if unknown:
        raise BadOption(f"there is no tower {unknown[0]!r}", hint=f"There are {', '.join(present)}")
    wanted = _wanted(layers)
    if layers is not None and not isinstance(layers, str):
        absent = sorted(set(layers) - {layer for stack in checkpoint.layers_present.values() for layer in stack})
        if absent:
            raise BadOption(f"there is no layer {absent[0]}", where=checkpoint.name, hint=_layers_hint(checkpoint))
    sites = [s for s in checkpoint.sites if wanted(s.layer) and (not towers or s.tower in towers)]
    if not sites:
        raise BadOption(f"layers {layers!r} name no gated MLP", where=checkpoint.name, hint=_layers_hint(checkpoint))
    return sites


def _layers_hint(checkpoint: Checkpoint) -> str:
    known = sorted({site.layer for site in checkpoint.sites})
    return f"There are gated MLPs in layers {known[0]} to {known[-1]}"


def _without_mlp(checkpoint: Checkpoint, layers, towers) -> list[tuple[str, int]]:
    gated = {(site.tower, site.layer) for site in checkpoint.sites}
    wanted = _wanted(layers)
    return [
        (tower, layer)
        for tower, stack in checkpoint.layers_present.items()
        for layer in stack
        if (tower, layer) not in gated and wanted(layer) and (not towers or tower in towers)
    ]


def _non_finite(layer: GatedLayer, result: LayerResult, site: Site, strict: bool) -> list[str]:
    bad = np.flatnonzero(result.flags["non_finite"])
    if not bad.size:
        return []
    factors = {"gate": layer.query, "up": layer.key, "down": layer.value}
    tensors = [site.tensors[role] for role, rows in factors.items() if not rows[bad].isfinite().all()]
    which = ", ".join(map(str, bad[:8])) + (" ..." if bad.size > 8 else "")
    text = f"{bad.size} neurons hold NaN or infinity ({which}), in {', '.join(dict.fromkeys(tensors))}"
    if strict:
        raise NonFinite(text, where=site.where, hint="Without --strict they are counted and left out")
    return [f"{site.where}: {text}; they are left out of every figure"]
