"""From results of MLPs to the frames of a report: in memory, or by way of a directory of parts, where memory is short.

Results come in any order; rows are in the order of the MLPs. With parts every result goes to disk as it comes, and the
frames are made from there when all are finished, a layer of neurons in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import pandas as pd

from .checkpoint.sites import Site
from .errors import Unreadable
from .frames import LayerResult, class_rows, empty_row, join, layer_frame, layer_row, neuron_frame
from .neuron_file import NeuronFile, common_dtypes, write_neurons
from .parts import NEURONS, Parts
from .report import refusals, write_atomically
from .results import decode, encode


class Tables:
    """What grows by a row for every layer and expert group: small, however large the layers are.

    Attributes:
        notes: sentences about odd weights.
        samples: numbers of Gaussian inputs that were used.
        methods: measure to the ways in which it was found.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._rows: dict[tuple[str, int, str], dict[str, object]] = {}
        self._classes: list[pd.DataFrame] = []
        self.notes: list[str] = []
        self.samples: set[int] = set()
        self.methods: dict[str, set[str]] = {}

    def add(self, results: Sequence[LayerResult]) -> None:
        """Add the row of all MLPs of one layer and expert group."""
        first = results[0]
        self._rows[first.tower, first.layer, first.group] = layer_row(self._model, results)
        self._classes.append(class_rows(self._model, results))
        for result in results:
            self.notes += result.oddities
            self.samples.add(result.samples)
            for name, method in result.methods.items():
                self.methods.setdefault(name, set()).add(method)

    def layers(self, without: Sequence[tuple[str, int]]) -> pd.DataFrame:
        """The layer frame, with rows for layers that have no gated MLP."""
        columns = list(next(iter(self._rows.values())))
        rows = self._rows | {
            (tower, layer, "none"): empty_row(self._model, tower, layer, columns) for tower, layer in without
        }
        return layer_frame([rows[key] for key in sorted(rows, key=lambda key: (key[0] != "text", *key))])

    def classes(self) -> pd.DataFrame:
        """The frame of input-output classes."""
        return join(self._classes)


def in_memory(
    tables: Tables, model: str, sites: Sequence[Site], results: Iterable[tuple[Site, LayerResult]]
) -> pd.DataFrame:
    """Fill the tables, and give the neuron frame."""
    frames = []
    for group in _groups(sites, _in_order(sites, results)):
        tables.add(group)
        frames += [neuron_frame(model, result) for result in group]
    return join(frames)


def _in_order(sites: Sequence[Site], results: Iterable[tuple[Site, LayerResult]]) -> Iterator[LayerResult]:
    """Results in the order of their MLPs; those that come early wait."""
    early: dict[int, LayerResult] = {}
    due = iter(sites)
    site = next(due, None)
    for done, result in results:
        early[id(done)] = result
        while site is not None and id(site) in early:
            yield early.pop(id(site))
            site = next(due, None)


def _groups(sites: Sequence[Site], results: Iterator[LayerResult]) -> Iterator[list[LayerResult]]:
    """Results of each layer and expert group together."""
    for _, group in groupby(sites, key=lambda site: (site.tower, site.layer, site.group)):
        yield [next(results) for _ in group]


# -- by way of the disk ------------------------------------------------------------------------------


def part_name(number: int, site: Site) -> str:
    """What the result of the MLP of that number among all of a checkpoint is kept under."""
    expert = "" if site.expert is None else f" expert {site.expert}"
    return f"{number:05} {site.tower} layer {site.layer}{expert}"


class Kept:
    """Results of MLPs in a directory of parts."""

    def __init__(self, parts: Parts, every: Sequence[Site]) -> None:
        self._parts = parts
        self._names = {id(site): part_name(number, site) for number, site in enumerate(every)}

    def keep(self, site: Site, result: LayerResult) -> None:
        """Keep a result.

        Raises:
            CannotWrite: it cannot be written; what was kept before is whole.
        """
        self._parts.keep(self._names[id(site)], encode(result))

    def has(self, site: Site) -> bool:
        """Whether a whole result of an MLP is there."""
        return self._parts.get(self._names[id(site)]) is not None

    def of(self, site: Site) -> LayerResult:
        """The result of an MLP that is finished.

        Raises:
            Unreadable: it was there, and is not any more.
        """
        body = self._parts.get(self._names[id(site)])
        if body is None:
            raise Unreadable(
                f"the part of {site.where} was removed or damaged during the run", where=self._parts.directory,
                hint="Run the same command again: it is made anew",
            )  # fmt: skip
        return decode(body)

    def assemble(self, tables: Tables, model: str, sites: Sequence[Site]) -> NeuronFile:
        """Fill the tables, and put the neurons of all layers into one file beside the parts.

        Raises:
            CannotWrite: it cannot be written; the parts are whole.
        """
        dtypes = common_dtypes(self._frames(tables, model, sites))
        path = self._parts.directory / NEURONS

        def layers() -> Iterator[pd.DataFrame]:
            for _, group in groupby(sites, key=lambda site: (site.tower, site.layer)):
                yield join([neuron_frame(model, self.of(site)) for site in group])

        with refusals(self._parts.directory):
            write_atomically(path, lambda temporary: write_neurons(temporary, layers(), dtypes))
        return NeuronFile(path)

    def _frames(self, tables: Tables, model: str, sites: Sequence[Site]) -> Iterator[pd.DataFrame]:
        for group in _groups(sites, (self.of(site) for site in sites)):
            tables.add(group)
            for result in group:
                yield neuron_frame(model, result)
