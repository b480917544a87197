"""A report as Markdown: for a README or a model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from .headlines import headlines
from .layer_groups import groups_of

ROWS_AT_MOST = 20
# column of the table, column of the layer frame, how it is written
_COLUMNS = (
    ("relative to ReLU", "exchange_asymmetry_relu_ratio", ".0%"),
    ("exchange asymmetry", "exchange_asymmetry_mean", ".3f"),
    ("the same on text", "exchange_asymmetry_text_mean", ".3f"),
    ("gate scale", "query_norm_median", "#.3g"),
    ("gate scale on text", "gate_std_text_median", "#.3g"),
    ("\\|cos(q, k)\\|", "abs_cos_qk_mean", ".3f"),
    ("mismatched", "abs_cos_qk_null_mean", ".3f"),
    ("cos(k, v)", "cos_kv_mean", "+.3f"),
)


def report_markdown(layers: pd.DataFrame, neurons: pd.DataFrame, provenance: Mapping[str, Any]) -> str:
    """Headlines, a compact table, and where the numbers come from.

    Args:
        layers, neurons, provenance: of a report.
    """
    import importlib.metadata

    from .page.assumptions import provenance_line
    from .page.provenance import without_places

    width = bin_width(layers)
    rows = binned(layers, width)
    said = "" if width == 1 else " Rows of several layers are means over their neurons."
    provenance = without_places(provenance)
    source = provenance_line(provenance, importlib.metadata.version("glu-probe"))
    notes = "".join(f" Note: {note}." for note in provenance.get("notes", []))
    bullets = "\n".join(f"- {_escaped(sentence)}" for sentence in headlines(layers, neurons))
    return f"{bullets}\n\n{_table(rows)}\n\n*{_escaped(source + said + notes)}*\n"


def bin_width(layers: pd.DataFrame, at_most: int = ROWS_AT_MOST) -> int:
    """How many layers to put into one row, so that there are at most so many rows, if that can be had."""
    counts = layers.groupby([layers["tower"].astype(str), groups_of(layers).rename("group")]).size()
    widths = range(1, int(counts.max()) + 1)
    return next(
        (width for width in widths if sum(len(_edges(count, width)) for count in counts) <= at_most), widths[-1]
    )


def _edges(count: int, width: int) -> list[tuple[int, int]]:
    """Where rows begin and end: the first and the last layer stand alone, as they often are unlike the others."""
    if width == 1 or count < 3:
        return [(start, start + 1) for start in range(count)]
    inner = [(start, min(start + width, count - 1)) for start in range(1, count - 1, width)]
    return [(0, 1), *inner, (count - 1, count)]


def binned(layers: pd.DataFrame, width: int) -> pd.DataFrame:
    """The table: up to `width` neighbouring layers of one stack and expert group in a row; missing where all of them are."""
    rows = []
    for (tower, group), part in layers.assign(group=groups_of(layers)).groupby(["tower", "group"], sort=False):
        for start, end in _edges(len(part), width):
            here = part.iloc[start:end]
            first, last = here["layer"].iloc[0], here["layer"].iloc[-1]
            row = {"stack": tower, "layers": f"{first}" if first == last else f"{first}–{last}", "group": group}
            row["neurons"] = f"{int(here['n_neurons'].sum()):,}"
            for title, column, form in _COLUMNS:
                row[title] = _mean(here, column, form) if column in here else ""
            rows.append(row)
    frame = pd.DataFrame(rows)
    single = [name for name in ("stack", "group") if frame[name].nunique() == 1]
    empty = [title for title, _, _ in _COLUMNS if (frame[title] == "").all()]
    return frame.drop(columns=[*single, *empty])


def _mean(part: pd.DataFrame, column: str, form: str) -> str:
    known = part[part[column].notna() & (part["n_neurons"] > 0)]
    if known.empty:
        return ""
    mean = np.average(known[column].astype(float), weights=known["n_neurons"])
    text = f"{mean:{form}}"
    return (text if text.strip("+-0.%") else f"{0.0:{form}}").replace("%", " %")  # no minus before zero


def _table(frame: pd.DataFrame) -> str:
    numbers = [name for name in frame if name not in ("stack", "layers", "group")]
    head = " | ".join(frame.columns)
    rule = " | ".join("---:" if name in numbers else "---" for name in frame)
    body = "\n".join("| " + " | ".join(value or "–" for value in row) + " |" for row in frame.itertuples(index=False))
    return f"| {head} |\n| {rule} |\n{body}"


def _escaped(text: str) -> str:
    """Text in which Markdown finds no marks of its own."""
    for mark in "\\*_`<|[]":
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())
