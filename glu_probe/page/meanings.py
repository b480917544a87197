"""What measures mean, for the tables and heads of a page."""

from __future__ import annotations

from collections.abc import Iterable

from ..measures.registry import MEASURES, TEXT_MEASURES, Measure
from .html import Table


def hints(columns: Iterable[str]) -> dict[str, str]:
    """Meanings of columns: of a layer's statistics, those of their measures."""
    known = MEASURES | TEXT_MEASURES
    out = {}
    for name in columns:
        stem = next((stem for stem in (name, name.rpartition("_")[0]) if stem in known), None)
        if stem:
            out[name] = known[stem].meaning
    return out


def measure_table(measures: Iterable[Measure]) -> Table:
    """Name, range, meaning and definition of measures."""
    rows = [
        (one.name, one.range, one.meaning + ("" if "gauge" in one.invariant else " (not gauge-invariant)"), one.reference)
        for one in measures
    ]  # fmt: skip
    return Table("measures", "Measures", ("measure", "range", "meaning", "definition"), rows, words=True)
