"""One gated MLP, from what is stored to every default measure of it: the whole of a job, wherever it runs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from .arguments import whole_number
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.memory import DEFAULT as DEFAULT_MEMORY
from .checkpoint.memory import Room, Workspace, fresh, give_back, held_limit
from .checkpoint.sites import Site
from .checkpoint.stored import StoredLayer
from .costs import Shape
from .footprint import cores
from .frames import LayerResult
from .lanes import in_lanes, only_lanes
from .layer_rows import BLOCK, ROLES, Factors, LayerRows
from .measures import tensor
from .measures.neuron import flags as neuron_flags
from .measures.neuron import neuron_measures, non_finite, padded
from .measures.nulls import null_measures
from .measures.output import default_samples, inputs
from .measures.products import GramMatrices, RowProducts
from .measures.sampling import SampledLayer, sampled
from .measures.spectra import branch_spectra
from .thread_limits import torch_cores

_ROOMY = 300_000_000  # bytes of the memory beside the factors, from which on what the allocator keeps does not matter
_BLOCKS = 8  # of neurons, after which it is given back where there is less
_LARGE = 1_000_000  # weights of a matrix from which on what a layer leaves to the allocator is worth giving back


@dataclass(frozen=True)
class Settings:
    """What decides about the numbers of an MLP, besides its factors; see `measure_layer`."""

    seed: int = 0
    samples: int | None = None
    exact: bool = False
    memory: int = DEFAULT_MEMORY


def stored_layers(checkpoint: Checkpoint, sites: Sequence[Site], memory: int) -> Generator[StoredLayer, None, None]:
    """MLPs as they are stored, one at a time; the next one is read while this one is measured, if both fit.

    Each is laid into the memory of one before, which is done with. Close the iterator to stop reading.
    """
    infos, rooms = checkpoint.source.infos(), (Workspace(), Workspace())
    with ThreadPoolExecutor(1, "read-ahead", initializer=torch_cores, initargs=(1,)) as reader:
        waiting: Future[StoredLayer] | None = None
        for number, site in enumerate(sites):
            layer = _stored(checkpoint, site, memory, rooms[number % 2]) if waiting is None else waiting.result()
            following, waiting = sites[number + 1] if number + 1 < len(sites) else None, None
            if following is not None and site.held_bytes(infos) + following.held_bytes(infos) <= held_limit(memory):
                waiting = reader.submit(_stored, checkpoint, following, memory, rooms[(number + 1) % 2])
            else:
                rooms = rooms[::-1]  # the next one goes where this one is
            yield layer


def _stored(checkpoint: Checkpoint, site: Site, memory: int, room: Room) -> StoredLayer:
    return checkpoint.stored(site, room, held_limit(memory))


def measure_site(checkpoint: Checkpoint, site: Site, settings: Settings, workspace: Room = fresh) -> LayerResult:
    """Read one MLP and measure it: the whole of a job, wherever it runs.

    Args:
        checkpoint: the model, opened.
        site: one of its `sites`.
        settings: how to measure.
        workspace: memory for the factors, which are done with when this returns.
    """
    return measure_stored(_stored(checkpoint, site, settings.memory, workspace), site, settings)


def measure_stored(layer: StoredLayer, site: Site, settings: Settings) -> LayerResult:
    """Measure an MLP that was read; see `measure_site`."""
    seed, samples = checked(settings.seed, settings.samples)
    held = layer.nbytes
    if layer.held and 2 * held <= held_limit(settings.memory):  # the next one may be read meanwhile
        held *= 2
    options = {"between": give_back} if settings.memory - held < _ROOMY else {}
    with only_lanes(cores(Shape.of(layer), settings.memory, held, samples)):
        result = measure_layer(layer, seed=seed, samples=samples, exact=settings.exact, **options)
    if layer.d_mlp * layer.d_model >= _LARGE:
        give_back()
    return replace(result, oddities=tuple(_oddities(layer, result, site)))


def measure_layer(
    layer: LayerRows,
    *,
    seed: int = 0,
    samples: int | None = None,
    exact: bool = False,
    between: Callable[[], None] = lambda: None,
) -> LayerResult:
    """Every default measure of one gated MLP.

    Args:
        layer: its factors.
        seed: of the Gaussian samples, the mismatched pairs and the Lanczos start; the same seed, the same numbers.
        samples: Gaussian inputs for the output measures; None for as many as a fixed cost buys.
        exact: compute spectra and tensor asymmetry exactly whatever that costs (about 6 d_mlp d_model^2 and 5 d_mlp^2
            d_model flops); otherwise large layers get iterated and sampled values, and no effective ranks.
        between: called again and again between what takes memory.

    Raises:
        BadOption: seed or samples are not whole numbers of at least 0 and 2.
    """
    seed, samples = checked(seed, samples)
    with only_lanes():
        return _measured(layer.detach(), seed, samples, exact, between)


def _measured(
    layer: LayerRows, seed: int, samples: int | None, exact: bool, between: Callable[[], None]
) -> LayerResult:
    # named by place, so that a layer's numbers do not depend on which others are measured
    place = zlib.crc32(f"{layer.tower}/{layer.expert}".encode())
    streams = np.random.SeedSequence([seed, place, layer.layer]).spawn(3)
    for_nulls, for_output, for_spectra = (np.random.default_rng(stream) for stream in streams)
    whole_tensor = exact or tensor.is_cheap(layer)
    samples = samples or default_samples(layer)
    pairs = 0 if whole_tensor else max(samples // 2, 2)
    x = inputs(layer, for_output, max(samples, 2 * pairs))
    products, found = _first_pass(layer, SampledLayer(layer, x, outputs=samples, pairs=pairs), between)
    flags = neuron_flags(layer, products)
    alive = ~(flags["padded"] | flags["non_finite"])
    if found.too_coarse:
        found = sampled(layer, x, products, alive, outputs=samples, pairs=pairs, fine=True)
    scalars = found.output_asymmetries()
    share, error = (math.nan, math.nan) if whole_tensor else found.tensor_asymmetry()
    del found, x  # what else there is takes as much
    between()
    whole = alive & ~(flags["zero_gate"] | flags["zero_up"] | flags["zero_down"])
    spectra, spectra_method = branch_spectra(layer, products, alive, for_spectra, exact=exact or None)
    between()
    if whole_tensor:
        share, error, tensor_method = tensor.tensor_asymmetry(layer, exact=True, usable=alive, products=products)
        between()
    else:
        tensor_method = tensor.random_pairs(pairs)
    return LayerResult.of(
        layer,
        neurons=neuron_measures(layer, products),
        flags=flags,
        nulls=null_measures(layer, whole, for_nulls),
        scalars=scalars | spectra | {"tensor_asymmetry": share, "tensor_asymmetry_se": error},
        methods={"spectra": spectra_method, "tensor_asymmetry": tensor_method},
        samples=samples,
    )


def _first_pass(layer: LayerRows, found: SampledLayer, between: Callable[[], None]) -> tuple[RowProducts, SampledLayer]:
    """One read of all factors: inner products of every neuron's rows, and outputs at the inputs."""
    matrices = GramMatrices(layer.d_mlp, layer.d_model)
    # at once: a small piece kept from each block keeps the allocator from handing out the block's memory again
    grams = torch.empty(layer.d_mlp, 3, 3, dtype=torch.float64)

    def add(lane: int, item: tuple[slice, Callable[[], Factors]]) -> None:
        block, make = item
        factors = make()
        grams[block] = matrices(*factors)
        products = RowProducts.of(grams[block])
        found.add(lane, block, factors, products, ~(padded(products) | non_finite(layer, products, block)))

    def blocks() -> Iterator[tuple[slice, Callable[[], Factors]]]:
        for number, item in enumerate(layer.read_blocks()):
            if number % _BLOCKS == 0:
                between()
            yield item
            del item

    in_lanes(add, blocks(), found.lanes)
    return RowProducts.of(grams), found


def checked(seed: int, samples: int | None) -> tuple[int, int | None]:
    """Seed and number of samples, if they are what they have to be."""
    seed = whole_number("seed", seed, 0)
    return seed, samples if samples is None else whole_number("samples", samples, 2, why="a standard error needs them")


def _oddities(layer: StoredLayer, result: LayerResult, site: Site) -> list[str]:
    """What its weights hold that they should not, one sentence each."""
    bad = np.flatnonzero(result.flags["non_finite"])
    notes = []
    if bad.size:
        which = ", ".join(map(str, bad[:8])) + (" ..." if bad.size > 8 else "")
        found = ", ".join(_holding(layer, bad)) or "rows whose norm overflows"
        notes.append(f"{site.where}: {bad.size} neurons hold NaN or infinity ({which}), in {found}; they are left out")
    if layer.output_bias is not None and not layer.output_bias.isfinite().all():
        notes.append(f"{site.where}: {layer.sources['down_bias']} holds NaN or infinity; no measure uses it")
    return notes


def _holding(layer: StoredLayer, bad: np.ndarray) -> list[str]:
    """Names of the tensors that make these neurons not finite."""
    which = torch.from_numpy(bad)
    roles = [
        tensor
        for tensor, role in zip(("gate", "up", "down"), ROLES, strict=True)
        if not all(layer.rows(role, part).isfinite().all() for part in which.split(BLOCK))
    ]
    biases = (("gate_bias", layer.query_bias), ("up_bias", layer.key_bias))
    roles += [role for role, part in biases if part is not None and not part[which].isfinite().all()]
    if {"gate", "up"} <= {*roles} and len(bad) == layer.d_mlp and "norm" in layer.sources:
        # the norm's gain is in every row of both
        roles = ["norm", *(role for role in roles if role not in ("gate", "up"))]
    if "gate_bias" in roles and "gate_bias" not in layer.sources:  # the norm's bias became the neurons'
        roles = [role for role in roles if not role.endswith("_bias")] + ["norm_bias"]
    return list(dict.fromkeys(layer.sources[role] for role in roles if role in layer.sources))
