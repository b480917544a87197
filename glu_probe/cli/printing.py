"""What the commands print: results on standard output, notes, estimates and progress on standard error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import pandas as pd


def echo(text: str) -> None:
    """A result, as text."""
    typer.echo(text)


def print_json(value: Any) -> None:
    """A result, for machines; NaN and infinity are refused, since JSON has neither."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def notes(lines: Iterable[str]) -> None:
    """What the reader should know of the result."""
    for line in lines:
        typer.echo(f"note: {line}", err=True)


def estimate(what: str) -> Callable[[float], None]:
    """A function of seconds that says how long something takes, as "the runs take"."""
    return lambda seconds: typer.echo(f"{what} about {duration(seconds)}", err=True)


def progress(description: str, unit: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """A function that shows a bar while its steps are gone through, if standard error is a terminal."""

    def bar(steps: Iterable[Any]) -> Iterable[Any]:
        from tqdm import tqdm

        return tqdm(steps, desc=description, unit=f" {unit}", disable=None)

    return bar


def records(frame: pd.DataFrame, *, decimals: int = 10) -> list[dict[str, Any]]:
    """The rows of a frame for `print_json`: NaN is null. Floats keep 0 to 15 decimals."""
    return json.loads(frame.to_json(orient="records", double_precision=decimals))


def number(value: float) -> str:
    """Four digits; a dash for NaN."""
    return "-" if value != value else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Seconds below 100, minutes beyond."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
