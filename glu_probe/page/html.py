"""Templates and tables: what every page is made of.

A page's template extends `base.html.jinja`, which brings style and script, and draws with the macros `sortable(table)` and
`figures(drawn)` of `macros.html.jinja`.
"""

from __future__ import annotations

import importlib.metadata
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """A table that sorts.

    Attributes:
        name: its id in the page.
        caption: what it is.
        columns: the heads.
        rows: the cells, as they are; `cell` writes them.
        meanings: of columns, shown while the pointer rests on them.
        words: whether it holds prose, which wraps.
    """

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    meanings: Mapping[str, str] = field(default_factory=dict)
    words: bool = False

    @classmethod
    def of(cls, name: str, caption: str, frame: pd.DataFrame, meanings: Mapping[str, str] | None = None) -> Table:
        """The whole of a frame."""
        rows = list(zip(*(frame[column].tolist() for column in frame), strict=True))
        return cls(name, caption, [str(column) for column in frame], rows, meanings or {})

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, and are set to the right."""
        columns = zip(*self.rows, strict=True) if self.rows else ([] for _ in self.columns)
        return [all(_is_missing(value) or _is_number(value) for value in column) for column in columns]


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or value != value


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) and not isinstance(value, bool)


def cell(value: Any) -> str:
    """A cell as text: four significant digits of what is not whole.

    >>> cell(0.123456), cell(12), cell(float("nan")), cell("silu")
    ('0.1235', '12', '–', 'silu')
    """
    if _is_missing(value):
        return MISSING
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def render_page(template: str, **context: Any) -> str:
    """A page from one of the templates beside this file.

    Args:
        template: its name.
        context: what it names; a name that is missing is an error.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("glu_probe.page", "."), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["cell"] = cell
    environment.filters["kept_together"] = lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%")
    return environment.get_template(template).render(version=importlib.metadata.version("glu-probe"), **context)
