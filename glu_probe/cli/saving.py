"""The directory a command writes to: made before the work, and not left behind empty when the work fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .printing import notes

if TYPE_CHECKING:
    from ..report import Report


def command_line() -> list[str]:
    """What was typed, for provenance."""
    return ["glu-probe", *sys.argv[1:]]


@contextmanager
def output_directory(out: Path | None, *, after_failure: Callable[[], str]) -> Iterator[None]:
    """Have `out` ready, if anything is to be written, while the body makes what goes there.

    If the body fails, a directory that was made for it and is empty is removed.

    Args:
        out: the directory, or None.
        after_failure: clean up and say what is left, for the line that an interrupted run ends with.

    Raises:
        CannotWrite: `out` is a file, or may not be written.
        typer.Exit: with code 130 after an interrupt. Other errors of the body pass through.
    """
    from ..report import prepare_directory

    directory = None if out is None else out.expanduser()
    made = directory is not None and not directory.exists()
    if directory is not None:
        prepare_directory(directory)  # before the work, not after it
    try:
        yield
    except BaseException as error:
        left = after_failure()
        if made and not any(directory.iterdir()):
            directory.rmdir()
        if isinstance(error, KeyboardInterrupt):
            typer.echo(f"interrupted: {left}", err=True)
            raise typer.Exit(130) from None
        raise


def save_report(out: Path | None, figures: bool, make: Callable[[], Report]) -> Report:
    """Make a report and write it, if anywhere; its notes are printed."""
    with output_directory(out, after_failure=lambda: f"nothing was written{f' to {out}' if out else ''}"):
        result = make()
    result.provenance["command"] = command_line()
    notes(result.provenance["notes"])
    if out is not None:
        notes(result.save(out, figures=figures))
    return result


def written(out: Path, figures: bool) -> str:
    """The last line of a command that wrote a report."""
    return f"\nwrote {out / 'report.html' if figures else f'{out}: layers, neurons, classes, provenance'}"
