"""The result of a run: frames, where they came from, and their way to disk and back."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from .errors import CannotWrite
from .neuron_file import NeuronFile, by_layer, common_dtypes, write_neurons
from .saved_results import no_results


class _ReadWhenUsed:
    """The field of a frame, which may hold the file that the frame lies in: it is read when it is asked for, and kept."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, report: Report | None, owner: type | None = None) -> pd.DataFrame:
        if report is None:  # the field has no default
            raise AttributeError(self._name)
        held = report.__dict__[self._name]
        if isinstance(held, NeuronFile):
            held = report.__dict__[self._name] = held.read()
        return held

    def __set__(self, report: Report, value: pd.DataFrame | NeuronFile) -> None:
        report.__dict__[self._name] = value


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """What was measured on one model.

    Attributes:
        layers: a row per layer and expert group; `<measure>_mean`, `_median`, `_q05`, `_q95`, `_weighted`, nulls and
            effect sizes, layer measures, counts of odd neurons.
        neurons: a row per neuron, with every neuron measure, `io_class` and `flag` (what is odd about it, or ""). It may
            be given as a `NeuronFile`, and is then read when it is first used.
        classes: fractions of the input-output classes per layer over a sweep of thresholds.
        provenance: files or revision, family, activation, norm, options, seed, versions, and `notes`, what a reader
            must know. JSON-ready; "text" in it is what was run, if anything was.
        contexts: where in a text some neurons do most, a row per context; None if that was not asked for.
    """

    layers: pd.DataFrame
    neurons: pd.DataFrame = _ReadWhenUsed()
    classes: pd.DataFrame  # type: ignore[misc]  # `neurons` has no default: its descriptor refuses to give one
    provenance: dict[str, Any] = field(default_factory=dict)
    contexts: pd.DataFrame | None = None

    def __repr__(self) -> str:
        held = self.__dict__["neurons"]
        count = held.rows if isinstance(held, NeuronFile) else len(held)
        return f"Report({self.provenance.get('model')}: {len(self.layers)} rows of layers, {count} neurons)"

    def neuron_columns(self, *names: str) -> pd.DataFrame:
        """Some columns of the neuron frame, as far as it has them; what is in a file stays there."""
        held = self.__dict__["neurons"]
        known = [name for name in names if name in held.columns]
        return held.read(known) if isinstance(held, NeuronFile) else held[known]

    @property
    def findings(self) -> list[str]:
        """The main results as sentences."""
        from .findings import COLUMNS, findings

        return findings(self.layers, self.neuron_columns(*COLUMNS))

    def save(self, directory: str | os.PathLike, *, figures: bool = True) -> list[str]:
        """Write everything into a directory, data first: layers.csv, layers.parquet, neurons.parquet, classes.csv,
        provenance.json, contexts.parquet and contexts.csv if there are contexts, then figures/*.png, figures/*.svg and report.html.

        Every file appears whole or not at all. A figure that cannot be drawn does not keep the rest from being written.

        Returns:
            What went wrong with figures, one sentence each.

        Raises:
            CannotWrite: the directory or a file in it cannot be written.
        """
        directory = prepare_directory(directory)
        with refusals(directory):
            write_atomically(directory / "layers.parquet", self.layers.to_parquet)
            write_atomically(directory / "layers.csv", lambda path: self.layers.to_csv(path, index=False))
            self._save_neurons(directory / "neurons.parquet")
            write_atomically(directory / "classes.csv", lambda path: self.classes.to_csv(path, index=False))
            for name, write in _contexts_files(self.contexts):
                if write is None:  # of another run that was saved here
                    (directory / name).unlink(missing_ok=True)
                else:
                    write_atomically(directory / name, write)
            write_text(directory / "provenance.json", json.dumps(self.provenance, indent=2, allow_nan=False) + "\n")
        return self.draw(directory) if figures else []

    def _save_neurons(self, path: Path) -> None:
        held = self.__dict__["neurons"]
        if isinstance(held, pd.DataFrame):
            write_atomically(path, lambda temporary: write_neurons(temporary, by_layer(held), common_dtypes([held])))
        elif held.path != path.absolute():
            write_atomically(path, held.copy_to)
            self.__dict__["neurons"] = NeuronFile(path)

    def draw(self, directory: str | os.PathLike) -> list[str]:
        """Write figures/*.png, figures/*.svg and report.html alone; see `save`."""
        from .page.report_page import report_page

        directory = prepare_directory(directory)
        with refusals(directory):
            return report_page(self).write(directory)

    @classmethod
    def load(cls, directory: str | os.PathLike) -> Report:
        """Read a saved report.

        Raises:
            NoReport: a file of it is absent or cannot be read, or something else is saved here.
        """
        directory = Path(directory).expanduser()
        try:
            provenance = json.loads((directory / "provenance.json").read_text(encoding="utf-8"))
            layers = pd.read_parquet(directory / "layers.parquet")
            neurons = NeuronFile(directory / "neurons.parquet")
            names = dict.fromkeys(("model", "tower", "group", "io_class"), str)
            # a model may be called 007, or NA
            classes = pd.read_csv(
                directory / "classes.csv", dtype=names, keep_default_na=False, na_values={"fraction": [""]}
            )
            kept = directory / "contexts.parquet"
            contexts = pd.read_parquet(kept) if kept.exists() else None
        except (OSError, ValueError) as error:
            raise no_results(directory, "report", cause(error)) from None
        return cls(layers, neurons, classes, provenance, contexts)

    def to_html(self) -> str:
        """The report as one self-contained page."""
        from .page.report_page import report_page

        return report_page(self).html()

    def to_markdown(self) -> str:
        """The main results for a README or a model card: sentences, a table of at most about 20 rows, where they come from."""
        from .findings import COLUMNS
        from .markdown import report_markdown

        return report_markdown(self.layers, self.neuron_columns(*COLUMNS), self.provenance)


def is_saved_report(source: str | os.PathLike) -> bool:
    """Whether it is the directory of a saved report."""
    try:
        return Path(source).expanduser().joinpath("provenance.json").is_file()
    except (OSError, RuntimeError, ValueError):  # a name too long, or ~name of a user that does not exist
        return False


def _contexts_files(contexts: pd.DataFrame | None) -> list[tuple[str, Callable[[Path], object] | None]]:
    if contexts is None:
        return [("contexts.parquet", None), ("contexts.csv", None)]
    return [
        ("contexts.parquet", contexts.to_parquet),
        ("contexts.csv", lambda path: contexts.to_csv(path, index=False)),
    ]


def cause(error: Exception) -> str:
    """Why a file could not be read, in a few words."""
    if isinstance(error, FileNotFoundError):
        return f"no {Path(error.filename or str(error)).name}"  # of a parquet file the path is all that is said
    return (str(error).splitlines() or [type(error).__name__])[0]


def software_versions() -> dict[str, str]:
    """Versions of everything that could change a number."""
    import platform

    versions = {"python": platform.python_version()}
    for name in ("glu-probe", "torch", "numpy", "numba", "pandas", "gguf", "huggingface_hub"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


# -- files ---------------------------------------------------------------------------------------


def prepare_directory(directory: str | os.PathLike) -> Path:
    """The directory, made if need be.

    Raises:
        CannotWrite: it is a file, or may not be written.
    """
    path = Path(directory).expanduser()
    blocking = next((part for part in (path, *path.parents) if part.is_file()), None)
    if blocking is not None:
        raise CannotWrite("this is a file, not a directory", where=blocking, hint="Choose another directory with -o")
    with refusals(path):
        path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise CannotWrite("the directory may not be written", where=path, hint="Choose another with -o")
    return path


@contextlib.contextmanager
def refusals(where: Path) -> Iterator[None]:
    """Errors of the system as CannotWrite."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(
            f"cannot write: {error.strerror or error}", where=error.filename or where,
            hint="Free space or choose another directory with -o; files written before are whole",
        ) from None  # fmt: skip


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: under the final name it is whole or not there.

    That holds if the machine itself stops, too: the data is on the disk before the name is.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(temporary)
        _flush(temporary, os.O_RDWR)
        os.replace(temporary, path)
        with contextlib.suppress(OSError):  # not every system opens directories
            _flush(path.parent, os.O_RDONLY)
    finally:
        temporary.unlink(missing_ok=True)


def _flush(path: Path, mode: int) -> None:
    opened = os.open(path, mode)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
