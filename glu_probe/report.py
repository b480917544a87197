"""The result of a run: frames, where they came from, and their way to disk and back."""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from .errors import BadOption, CannotWrite, NoReport
from .neuron_file import NeuronFile, by_layer, common_dtypes, write_neurons

_LAYER_TABLE = (
    "layer", "group", "n_neurons", "exchange_asymmetry_relu_ratio", "query_norm_median", "abs_cos_qk_mean", "abs_cos_qk_null_mean", "cos_kv_mean",
    "exchange_asymmetry_mean", "exchange_asymmetry_output", "exchange_asymmetry_output_se", "scaling_asymmetry_output",
    "exchange_asymmetry_text_mean", "exchange_asymmetry_text_mean_se", "exchange_asymmetry_output_text",
    "exchange_asymmetry_output_text_se", "bilinear_share_mean", "bilinear_share_text_mean", "output_energy_top_share",
    "gate_stable_rank_unit", "up_stable_rank_unit", "down_stable_rank_unit", "branch_overlap", "tensor_asymmetry",
)  # fmt: skip


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
    classes: pd.DataFrame
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
        provenance.json, contexts.parquet and contexts.csv if there are contexts, then figures/*.png and report.html.

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
        """Write figures/*.png and report.html alone; see `save`."""
        directory = prepare_directory(directory)
        pictures, troubles = self._pictures()
        with refusals(directory):
            (directory / "figures").mkdir(exist_ok=True)
            for picture in pictures:
                if picture["png"]:
                    data = picture["png"]
                    write_atomically(
                        directory / "figures" / f"{picture['name']}.png", lambda p, d=data: p.write_bytes(d)
                    )
            write_text(directory / "report.html", self._html(pictures))
        return troubles

    @classmethod
    def load(cls, directory: str | os.PathLike) -> Report:
        """Read a saved report.

        Raises:
            NoReport: a file of it is absent or cannot be read.
        """
        directory = Path(directory)
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
            raise NoReport(
                f"there is no complete report here ({_first_line(error)})", where=directory,
                hint="Make one with `glu-probe report MODEL -o DIR`",
            ) from None  # fmt: skip
        return cls(layers, neurons, classes, provenance, contexts)

    def to_html(self) -> str:
        """The report as one self-contained page."""
        return self._html(self._pictures()[0])

    def _html(self, pictures: list[dict[str, Any]]) -> str:
        import jinja2

        from .measures.registry import MEASURES, TEXT_MEASURES, TEXT_SUFFIXES

        on_text = "text" in self.provenance
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("glu_probe", "."), autoescape=True, undefined=jinja2.StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        columns = [name for name in _LAYER_TABLE if name in self.layers]
        if self.layers["group"].nunique() == 1:
            columns.remove("group")
        rows = [[_cell(row[name]) for name in columns] for _, row in self.layers.iterrows()]
        encoded = [p | {"png": base64.b64encode(p["png"]).decode()} if p["png"] else p for p in pictures]
        return environment.get_template("report.html.jinja").render(
            provenance=self.provenance, findings=self.findings, pictures=encoded, columns=columns, rows=rows,
            measures=[*MEASURES.values(), *(TEXT_MEASURES.values() if on_text else ())],
            suffixes=TEXT_SUFFIXES if on_text else {}, version=importlib.metadata.version("glu-probe"),
        )  # fmt: skip

    def _pictures(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Every figure of the page: name, title, caption, and its PNG, or why there is none."""
        pictures, troubles = [], []
        for name, title, caption, size, draw in _figures(self):
            png, reason = None, ""
            try:
                png = render(draw, size)
            except BadOption as error:
                reason = error.what
            except Exception as error:  # whatever a plotting library raises must not cost the data
                reason = f"the figure could not be drawn: {type(error).__name__}: {error}"
                troubles.append(f"{name}: {reason}")
            pictures.append({"name": name, "title": title, "caption": caption, "png": png, "reason": reason})
        return pictures, troubles


def _contexts_files(contexts: pd.DataFrame | None) -> list[tuple[str, Callable[[Path], object] | None]]:
    if contexts is None:
        return [("contexts.parquet", None), ("contexts.csv", None)]
    return [
        ("contexts.parquet", contexts.to_parquet),
        ("contexts.csv", lambda path: contexts.to_csv(path, index=False)),
    ]


def _figures(report: Report) -> Iterator[tuple[str, str, str, tuple[float, float], Callable]]:
    from . import figures as f

    layers = report.layers
    wide = max(6.5, 3.4 + 0.11 * len(layers))
    yield (
        "heatmap", "Every layer at a glance",
        "A column per layer, a row per measure; each row has its own scale, from the lowest to the highest value in its label.",
        (wide + 2.2, 5.0), lambda ax: f.layer_heatmap(layers, ax=ax),
    )  # fmt: skip
    yield (
        "phase_diagram", "Between bilinear and ReLU",
        "Each point is a layer at the medians of its neurons. To the left the gate works in its linear range and the neuron is "
        "bilinear: exchanging the branches changes nothing. To the right it is a ReLU. Upwards gate and up read the same "
        "direction. Contours: exchange asymmetry of a single neuron on Gaussian input.",
        (7.0, 4.6), lambda ax: f.phase_diagram(layers, ax=ax),
    )  # fmt: skip
    yield (
        "phase_diagram_neurons", "All neurons in the same picture", "Density of neurons, on a logarithmic colour scale.",
        (7.0, 4.6), lambda ax: f.phase_diagram(
            report.neuron_columns("layer", "query_norm", "abs_cos_qk"), activation=f._only_activation(layers), ax=ax
        ),
    )  # fmt: skip
    yield (
        "relu_ratio", "Is this layer bilinear or ReGLU?",
        "Mean exchange asymmetry of the layer's neurons over what it would be if their gates were ReLUs with the same "
        "directions: 0 is a bilinear layer, 1 is ReGLU.",
        (max(8.2, wide + 0.8), 2.8), lambda ax: f.layer_lines(layers, ["exchange_asymmetry_relu_ratio"], ax=ax),
    )  # fmt: skip
    for measure, title, caption in (
        ("exchange_asymmetry", "Exchange asymmetry by layer",
         "How much of a neuron's energy changes sign when gate and up are exchanged: 0 if they are interchangeable, 1/4 for "
         "a ReLU with unrelated branches, 1/2 if the exchanged neuron is uncorrelated with the original. Where the weighted "
         "mean leaves the plain one, few neurons carry the layer's energy (see output_energy_top_share)."),
        ("bilinear_share", "Bilinear share by layer",
         "How much of a neuron's energy the plain product of its two branches carries: 1 in a bilinear neuron, 1/2 in a ReLU."),
        ("abs_cos_qk", "Alignment of gate and up",
         "|cos(q, k)|, with the mean over mismatched pairs of the same layer: what anisotropy alone would give."),
        ("cos_kv", "What is read and what is written",
         "cos(k, v): above 0 the neurons write along what their up branch reads, below 0 against it."),
    ):  # fmt: skip
        yield (
            f"profile_{measure}", title, caption, (max(8.2, wide + 0.8), 3.2),
            lambda ax, m=measure: f.layer_profile(layers, m, ax=ax),
        )  # fmt: skip
    yield (
        "stable_ranks", "Stable ranks of the three matrices",
        "(Frobenius / spectral norm) squared, rows scaled to norm 1, so that no choice of coordinates enters.",
        (max(8.2, wide + 0.8), 3.2),
        lambda ax: f.layer_lines(layers, [f"{b}_stable_rank_unit" for b in ("gate", "up", "down")], ax=ax),
    )  # fmt: skip
    yield (
        "branch_overlap", "Do gate and up read the same subspace?",
        "Overlap of the two matrices' Gram matrices, unit rows: 1 if they read the same directions with the same weights. "
        "The other line is what their spectra alone would give if one were rotated at random.",
        (max(8.2, wide + 0.8), 2.8),
        lambda ax: f.layer_lines(layers, ["branch_overlap", "branch_overlap_null"], ax=ax),
    )  # fmt: skip
    yield (
        "class_bars", "Input-output classes by layer",
        "Classes of Gerstner & Schuetze (arXiv 2505.17936) at threshold 0.5; classes.csv has other thresholds.",
        (max(8.2, wide + 0.8), 3.6), lambda ax: f.class_bars(layers, ax=ax),
    )  # fmt: skip
    yield (
        "neuron_scatter", "Alignment and writing, neuron by neuron",
        "Right: gate and up read the same direction. Up: the neuron writes along what its up branch reads. Down: against it.",
        (6.6, 4.4), lambda ax: f.neuron_scatter(report.neuron_columns("abs_cos_qk", "cos_kv", "layer"), ax=ax),
    )  # fmt: skip
    yield from _expert_figures(report)
    yield from _text_figures(report)


def _expert_figures(report: Report) -> Iterator[tuple[str, str, str, tuple[float, float], Callable]]:
    """Pictures of every stack that has routed experts."""
    from . import figures as f

    layers = report.layers
    routed = layers[layers["group"] == "routed"]
    for tower in dict.fromkeys(routed["tower"]):
        experts = int(routed.loc[routed["tower"] == tower, "n_experts"].max())
        size = f.expert_grid_size(layers.loc[layers["tower"] == tower, "layer"].nunique(), experts)
        for measure, title in (
            ("exchange_asymmetry", "Exchange asymmetry"),
            ("abs_cos_qk", "Alignment of gate and up"),
        ):
            suffix, where = ("", "") if routed["tower"].nunique() == 1 else (f"_{tower}", f" of {tower}")
            yield (
                f"experts_{measure}{suffix}", f"{title}, expert by expert{where}",
                f"Mean {measure} of each routed expert's neurons: a column per layer, a row per expert. Experts of different "
                "layers have nothing to do with each other; what to look for is experts that differ from the rest of their layer.",
                size, lambda ax, m=measure, t=tower: f.expert_heatmap(
                    report.neuron_columns("layer", "tower", "expert", m), m, tower=t, ax=ax
                ),
            )  # fmt: skip


def _text_figures(report: Report) -> Iterator[tuple[str, str, str, tuple[float, float], Callable]]:
    """What a text adds, if one was run."""
    from . import figures as f

    if "text" not in report.provenance:
        return
    layers = report.layers
    pairs = [f"exchange_asymmetry_{kind}" for kind in ("mean", "text_mean", "output", "output_text")]
    yield (
        "text_profile", "Exchange asymmetry on text",
        "Of neurons (mean) and of the layer's output, on Gaussian input and on text, each in the canonical gauge of its own "
        "input. Where the lines of one pair part, what the layer meets in text is not what its weights alone suggest.",
        (max(8.2, 4.6 + 0.11 * len(layers)), 3.4), lambda ax: f.layer_lines(layers, pairs, ax=ax),
    )  # fmt: skip
    yield (
        "text_scatter", "Exchange asymmetry of every neuron, Gaussian input against text",
        "On the line a neuron is as asymmetric on text as on isotropic input.",
        (6.6, 4.8), lambda ax: f.text_scatter(
            report.neuron_columns("layer", "exchange_asymmetry", "exchange_asymmetry_text"), ax=ax
        ),
    )  # fmt: skip


def render(draw: Callable, size: tuple[float, float]) -> bytes:
    """A figure as PNG bytes, without a display and without leaving a figure open."""
    from .figures import figure_axes

    ax = figure_axes(size)
    draw(ax)
    buffer = io.BytesIO()
    # the version of the plotting library is not part of the result
    ax.figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def _cell(value: Any) -> str:
    if pd.isna(value):
        return "–"
    return (
        f"{value:.4g}"
        if isinstance(value, float) or (hasattr(value, "dtype") and value.dtype.kind == "f")
        else str(value)
    )


def _first_line(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"no {Path(error.filename).name}"
    return (str(error).splitlines() or [type(error).__name__])[0]


def software_versions() -> dict[str, str]:
    """Versions of everything that could change a number."""
    import platform

    versions = {"python": platform.python_version()}
    for name in ("glu-probe", "torch", "numpy", "pandas", "gguf", "huggingface_hub"):
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
