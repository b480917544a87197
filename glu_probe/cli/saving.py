"""The directory a command writes to: made before the work, and not left behind empty when the work fails."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..checkpoint.ref import public
from ..errors import BadOption
from ..saved_results import WORDS, Kind, kind_of_results, provenance_in
from . import application
from .printing import notes

if TYPE_CHECKING:
    from ..report import Report


def command_line() -> list[str]:
    """What was typed, for provenance; without what is secret in URLs."""
    return ["glu-probe", *map(public, application.typed)]


# Options, and how many words follow them, that change no number, only where it is made and what is written of it.
_INDIFFERENT = {
    "--json": 0, "--figures": 0, "--no-figures": 0, "--fresh": 0, "--download": 0,
    "-o": 1, "--out": 1, "--backend": 1, "--workers": 1, "--address": 1, "--memory": 1,
}  # fmt: skip


def _deciding(command: Sequence[str]) -> list[str]:
    """The words of a command that decide about its results."""
    kept, words = [], iter(command)
    for word in words:
        name = "-o" if word.startswith("-o") else word.partition("=")[0]
        if name not in _INDIFFERENT:
            kept.append(word)
        elif word == name:
            for _ in range(_INDIFFERENT[name]):
                next(words, None)
    return kept


def refuse_other_results(out: Path, kind: Kind, *, fresh: bool = False) -> None:
    """Make sure that no finished results of another run would be replaced unasked, nor mixed with those of another kind.

    Args:
        out: where results are to go.
        kind: what they will be.
        fresh: replace what another run left.

    Raises:
        BadOption: the directory holds such results. It is as it was.
    """
    held, found = kind_of_results(out), provenance_in(out)
    if held is None or found is None:
        return
    if held != kind:
        raise BadOption(
            f"this directory holds {WORDS[held]}, and its files would be mixed with those of {WORDS[kind]}",
            where=out, hint="Choose another directory with -o",
        )  # fmt: skip
    made = [str(word) for word in found.get("command") or ()]
    if fresh or _deciding(made) == _deciding(command_line()):
        return
    by = f"`{shlex.join(made)}`" if made else f"a run in Python on {found.get('model') or found.get('base')}"
    raise BadOption(
        f"this directory holds {WORDS[held]} of another run: {by}",
        where=out, hint="Choose another directory with -o, or replace it: --fresh",
    )  # fmt: skip


@contextmanager
def output_directory(
    out: Path | None, kind: Kind, *, fresh: bool = False, after_failure: Callable[[], str]
) -> Iterator[None]:
    """Have `out` ready, if anything is to be written, while the body makes what goes there.

    If the body fails, a directory that was made for it and is empty is removed.

    Args:
        out: the directory, or None.
        kind: what will be written.
        fresh: replace the results of another run; see `refuse_other_results`.
        after_failure: clean up and say what is left, for the line that an interrupted run ends with.

    Raises:
        BadOption: `out` holds results of another run.
        CannotWrite: `out` is a file, or may not be written.
        typer.Exit: with code 130 after an interrupt. Other errors of the body pass through.
    """
    from ..report import prepare_directory

    directory = None if out is None else out.expanduser()
    made = None if directory is None or directory.exists() else directory
    if directory is not None:
        refuse_other_results(directory, kind, fresh=fresh)
        prepare_directory(directory)  # before the work, not after it
    try:
        yield
    except BaseException as error:
        left = after_failure()
        if made is not None and not any(made.iterdir()):
            made.rmdir()
        if isinstance(error, KeyboardInterrupt):
            typer.echo(f"interrupted: {left}", err=True)
            raise typer.Exit(130) from None
        raise


@contextmanager
def parts_directory(out: Path, kind: Kind, *, fresh: bool = False) -> Iterator[Path]:
    """The directory of parts of a run whose results go to `out`, while the body makes and writes them.

    Parts are there until all is written. No other run may have them at the same time.

    Args:
        out, kind: as for `output_directory`.
        fresh: replace the results of another run, and remove the parts of an earlier one first.

    Raises:
        AlreadyRunning: another run has them.
    """
    from ..errors import AlreadyRunning, GluProbeError
    from ..parts import discard, exclusive, kept_parts, remove_parts, remove_unfinished
    from ..report import prepare_directory

    parts = out.expanduser() / "parts"

    def finished() -> str:
        count = kept_parts(parts)
        return f"{count} finished in {parts}: the same command goes on from there" if count else "nothing was finished"

    with output_directory(out, kind, fresh=fresh, after_failure=finished):
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


def save_report(out: Path | None, figures: bool, make: Callable[[], Report], *, fresh: bool = False) -> Report:
    """Make a report and write it, if anywhere; its notes are printed."""

    def nothing() -> str:
        return f"nothing was written{f' to {out}' if out else ''}"

    with output_directory(out, "report", fresh=fresh, after_failure=nothing):
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
