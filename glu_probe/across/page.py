"""The page of a comparison: sentences, figures, tables, in one file."""

from __future__ import annotations

import base64
import importlib.metadata
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..errors import BadOption

if TYPE_CHECKING:
    from .comparison import Comparison

_PROFILES = (
    ("exchange_asymmetry_relu_ratio", "Between bilinear and ReGLU",
     "Mean exchange asymmetry of a layer's neurons over what it would be if their gates were ReLUs: 0 is a bilinear layer, 1 is "
     "ReGLU."),
    ("exchange_asymmetry", "Exchange asymmetry",
     "How much of a neuron's energy changes sign when gate and up are exchanged; mean of neurons."),
    ("bilinear_share", "Bilinear share",
     "How much of a neuron's energy the plain product of its branches carries: 1 in a bilinear neuron, 1/2 in a ReLU."),
    ("query_norm", "Gate scale",
     "s = |q|: how far the gate is driven, in units of its activation. Compare it between models of one activation only."),
    ("abs_cos_qk", "Alignment of gate and up", "|cos(q, k)|, mean of neurons."),
    ("cos_kv", "What is read and what is written",
     "cos(k, v), mean of neurons: above 0 they write along what their up branch reads, below 0 against it."),
)  # fmt: skip
_TRAJECTORIES = ("exchange_asymmetry_relu_ratio", "bilinear_share", "query_norm", "abs_cos_qk")
_MOVED = 20
Draw = Callable[[Any], object]


@dataclass(frozen=True)
class Picture:
    """A figure of the page: its files by ending ("png", "svg"), none if it could not be drawn for `reason`."""

    name: str
    title: str
    caption: str
    files: dict[str, bytes]
    reason: str = ""


def pictures(comparison: Comparison) -> tuple[list[Picture], list[str]]:
    """Every figure, drawn, and what went wrong with any of them."""
    drawn, troubles = [], []
    for name, title, caption, size, draw in _figures(comparison):
        files, reason = {}, ""
        try:
            files = rendered(draw, size)
        except BadOption as error:
            reason = error.what
        except Exception as error:  # whatever a plotting library raises must not cost the data
            reason = f"the figure could not be drawn: {type(error).__name__}: {error}"
            troubles.append(f"{name}: {reason}")
        drawn.append(Picture(name, title, caption, files, reason))
    return drawn, troubles


def rendered(draw: Draw, size: tuple[float, float]) -> dict[str, bytes]:
    """A figure as PNG and SVG, the same bytes for the same figure, without a display."""
    import matplotlib as mpl

    from ..figures import figure_axes

    with mpl.rc_context({"svg.hashsalt": "glu-probe"}):
        ax = figure_axes(size)
        draw(ax)
        files = {}
        for ending, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            buffer = io.BytesIO()
            ax.figure.savefig(buffer, format=ending, dpi=120, metadata=metadata)
            files[ending] = buffer.getvalue()
    return files


def _figures(comparison: Comparison) -> Iterator[tuple[str, str, str, tuple[float, float], Draw]]:
    from . import figures as f

    layers, differences = comparison.layers, comparison.differences
    by = "layer" if comparison.provenance["align"] == "layer" else "relative_depth"
    deepest = int(layers.groupby("model")["layer"].nunique().max())
    wide = max(8.2, 4.4 + 0.08 * deepest)
    few = len(comparison.models) <= 3
    for measure, title, caption in _PROFILES:
        band = " Bands: 5 to 95 % of neurons." if few and f"{measure}_q05" in layers else ""
        yield (
            f"profile_{measure}", title, caption + band, (wide, 3.3),
            lambda ax, m=measure: f.model_profiles(layers, m, by=by, ax=ax),
        )  # fmt: skip
    limit, others = f.effect_limit(differences[differences["measure"].isin(f.SHOWN)]), comparison.models[1:]
    for index, model in _own_pictures(others, 4):
        places = differences.loc[differences["model"] == model].groupby("measure", observed=True).size().max()
        suffix = "" if len(others) == 1 else f"_{index + 1}"
        yield (
            f"effects{suffix}", f"Where {model} differs from {comparison.base}",
            "Cohen's d of every neuron measure: the difference of means in units of the spread between neurons. Red: larger than "
            "in the base, blue: smaller. One scale for all measures"
            f"{'' if len(others) == 1 else ' and models'}. A dot: rounding of the weights explains as much.",
            f.heatmap_size(len(f.SHOWN), int(places) if pd.notna(places) else 1),
            lambda ax, m=model: f.difference_heatmap(differences, model=m, limit=limit, ax=ax),
        )  # fmt: skip
    if len(comparison.models) > 2:
        for measure in _TRAJECTORIES:
            yield (
                f"trajectory_{measure}", f"{measure} over the models, in the order given",
                "A line per layer, coloured by its relative depth; black, the mean of layers.",
                (max(6.5, min(12.0, 3.6 + 0.4 * len(comparison.models))), 3.6), lambda ax, m=measure: f.trajectory(layers, m, ax=ax),
            )  # fmt: skip
        yield (
            "angle_trajectory", "How far neurons turned, in the order given",
            f"Angles against {comparison.base}, median of neurons: the median over MLPs, and the band of 5 to 95 % of MLPs.",
            (max(6.5, min(12.0, 3.6 + 0.4 * len(comparison.models))), 3.6), lambda ax: f.angle_trajectory(comparison.mlps, ax=ax),
        )  # fmt: skip
    for index, model in _own_pictures(others, 2):
        followed = comparison.mlps[(comparison.mlps["model"] == model) & comparison.mlps["angle_q"].notna()]
        if followed.empty:
            continue
        suffix = "" if len(others) == 1 else f"_{index + 1}"
        yield (
            f"angles{suffix}", f"How far the neurons of {model} turned",
            "Medians over the neurons of each MLP, gate, up and down. Dashed: what rounding to the stored types of "
            f"{model} alone would turn them by; dotted, those of {comparison.base}. Where a line lies on one of its own "
            "colour, nothing but that rounding is seen; errors of both files, where independent, add in quadrature.",
            (max(8.2, 4.4 + 0.08 * len(followed)), 3.4), lambda ax, m=model: f.angle_profile(comparison.mlps, model=m, ax=ax),
        )  # fmt: skip
        yield (
            f"angle_histogram{suffix}", f"Angles of all neurons of {model}",
            "Neurons by the angle between their factors in the two models. Dashed and dotted: the medians that rounding in one file alone "
            "would give.",
            (7.6, 3.5), lambda ax, m=model: f.angle_histogram(comparison.neurons, model=m, ax=ax),
        )  # fmt: skip
        if followed["rounding"].gt(0).any():
            yield (
                f"movement{suffix}", f"Movement of every neuron of {model}, and what rounding explains of it",
                "On the line rounding explains all of it; neurons above the dashed one moved further than rounding takes them.",
                (6.6, 4.6), lambda ax, m=model: f.movement_scatter(comparison.neurons, model=m, ax=ax),
            )  # fmt: skip


def _own_pictures(others: list[str], at_most: int) -> list[tuple[int, str]]:
    """Models that get pictures of their own: all, or of a long row the last."""
    numbered = list(enumerate(others))
    return numbered if len(numbered) <= at_most else numbered[-1:]


def page(comparison: Comparison, drawn: list[Picture]) -> str:
    """The page as HTML, self-contained."""
    import jinja2

    from ..measures.registry import MEASURES, TEXT_MEASURES

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("glu_probe", "across"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    shown = {*comparison.differences["measure"]}
    return environment.get_template("compare.html.jinja").render(
        models=comparison.models, base=comparison.base, provenance=comparison.provenance, findings=[sentence.replace(" %", "\N{NO-BREAK SPACE}%") for sentence in comparison.findings],
        pictures=[
            {"name": p.name, "title": p.title, "caption": p.caption, "reason": p.reason,
             "png": base64.b64encode(p.files["png"]).decode() if p.files else ""}
            for p in drawn
        ],
        tables=list(_tables(comparison)),
        measures=[one for name, one in (MEASURES | TEXT_MEASURES).items() if name in shown],
        version=importlib.metadata.version("glu-probe"),
    )  # fmt: skip


def _tables(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Heading, lead, columns and rows of every table."""
    yield _measures_table(comparison)
    columns = ["model", "tower", "layer", "expert", "neuron", "counterpart", "movement", "rounding", "moved", "angle_q", "angle_k",
               "angle_v", "query_norm_relative", "value_gain_relative", "exchange_asymmetry_change", "io_class_changed"]  # fmt: skip
    try:
        rows = comparison.moved(_MOVED)
    except BadOption:
        rows = None
    if rows is not None:
        yield _table(
            "moved", "Neurons that moved most",
            "By movement that rounding does not explain; neurons.parquet has all. Angles in degrees.", rows, columns,
        )  # fmt: skip
    if len(comparison.mlps):
        columns = ["model", "tower", "layer", "expert", "identity", "own_index_share", "n_elsewhere", "angle_q", "rounding_angle_q",
                   "angle_k", "rounding_angle_k", "angle_v", "rounding_angle_v", "movement", "rounding", "beyond_rounding_share",
                   "note"]  # fmt: skip
        rows = comparison.mlps
        more = f" The first 200 of {len(rows):,}." if len(rows) > 200 else ""
        yield _table(
            "mlps", "Which neurons are which",
            "index: neurons keep theirs; permuted: some are found at another index; unrelated: other neurons. Angles in degrees, "
            f"medians of neurons; beside each, what rounding alone explains.{more}", rows.head(200), columns,
        )  # fmt: skip


def _measures_table(comparison: Comparison) -> dict[str, Any]:
    rows = []
    for (model, measure), here in comparison.differences.groupby(["model", "measure"], sort=False):
        if here["difference"].isna().all():
            continue
        most = here.loc[here["difference"].abs().idxmax()]
        judged = here["beyond_rounding"].dropna()
        rows.append({
            "model": model, "measure": measure, "base_value": here["base_value"].mean(), "value": here["value"].mean(),
            "difference": here["difference"].mean(), "effect": here["effect"].median(),
            "effect_kind": next(iter(here["effect_kind"].dropna()), None), "largest_difference": most["difference"],
            "at": _where(most), "rounding": here["rounding"].mean(),
            "beyond_rounding": f"{int(judged.sum())} of {len(judged)}" if len(judged) else None,
            "note": most["note"],
        })  # fmt: skip
    frame = pd.DataFrame(rows)
    return _table(
        "measures", "Every measure",
        "Means over layers or bins, the median effect, and the largest difference with its place; differences.csv has every place. "
        "effect d: Cohen's d over neurons; z: over the standard error of sampling. rounding: what one more rounding of the weights "
        "would change, mean. Measures that depend on a choice of coordinates have no effect size and say nothing. “–”: missing.",
        frame, list(frame.columns),
    )  # fmt: skip


def _where(row: pd.Series) -> str:
    place = f"layer {row['layer']}" if "layer" in row else f"depth {row['relative_depth']:.2f}"
    return place if row["tower"] == "text" else f"{row['tower']} {place}"


def _table(name: str, heading: str, lead: str, frame: pd.DataFrame, columns: list[str]) -> dict[str, Any]:
    kept = [column for column in columns if column in frame and not frame[column].isna().all()]
    for place in ("tower", "model"):
        if place in kept and frame[place].nunique() == 1:
            kept.remove(place)
    words = ("model", "measure", "at", "note", "identity", "effect_kind", "expert")
    return {
        "name": name, "heading": heading, "lead": lead,
        "columns": [{"name": column, "words": column in words} for column in kept],
        "rows": [[_cell(value) for value in row] for row in frame[kept].itertuples(index=False, name=None)],
    }  # fmt: skip


def _cell(value: Any) -> str:
    if value is None or pd.isna(value):
        return "–"
    if isinstance(value, bool) or (hasattr(value, "dtype") and value.dtype.kind == "b"):
        return "yes" if value else "no"
    number = isinstance(value, float) or (hasattr(value, "dtype") and value.dtype.kind == "f")
    return f"{value:.4g}" if number else str(value)
