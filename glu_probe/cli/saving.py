"""The directory a command writes to: made before the work, and not left behind empty when the work fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..checkpoint.ref import public
from . import application
from .printing import notes

if TYPE_CHECKING:
    from ..report import Report


def command_line() -> list[str]:
    """What was typed, for provenance; without what is secret in URLs."""
    return ["glu-probe", *map(public, application.typed)]


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


@contextmanager
def parts_directory(out: Path, *, fresh: bool = False) -> Iterator[Path]:
    """The directory of parts of a run whose results go to `out`, while the body makes and writes them.

    Parts are there until all is written. No other run may have them at the same time.

    Args:
        out: the directory, as for `output_directory`.
        fresh: remove the parts of an earlier run first.

    Raises:
        AlreadyRunning: another run has them.
    """
    from ..errors import AlreadyRunning, BadOption, GluProbeError
    from ..parts import discard, exclusive, kept_parts, remove_parts, remove_unfinished
    from ..report import prepare_directory

    parts = out.expanduser() / "parts"

    def finished() -> str:
        count = kept_parts(parts)
        return f"{count} finished in {parts}: the same command goes on from there" if count else "nothing was finished"

    with output_directory(out, after_failure=finished):
        prepare_directory(parts)
        with exclusive(parts):
            for place in (parts.parent, parts.parent / "figures"):
                if place.is_dir():
                    remove_unfinished(place)
            if fresh:
                discard(parts)
            try:
                yield parts
            except BaseException as error:
                if not kept_parts(parts):
                    remove_parts(parts)
                elif isinstance(error, GluProbeError) and not isinstance(error, (BadOption, AlreadyRunning)):
                    notes([f"{kept_parts(parts)} finished are kept in {parts}"])
                raise
            remove_parts(parts)


def save_report(out: Path | None, figures: bool, make: Callable[[], Report]) -> Report:
    """Make a report and write it, if anywhere; its notes are printed."""
    with output_directory(out, after_failure=lambda: f"nothing was written{f' to {out}' if out else ''}"):
        result = make()
    save(result, out, figures)
    return result


def save(result: Report, out: Path | None, figures: bool) -> None:
    """Write a report, if anywhere; its notes are printed."""
    result.provenance["command"] = command_line()
    notes(result.provenance["notes"])
    if out is not None:
        notes(result.save(out, figures=figures))


def written(out: Path, figures: bool) -> str:
    """The last line of a command that wrote a report."""
    return f"\nwrote {out / 'report.html' if figures else f'{out}: layers, neurons, classes, provenance'}"
