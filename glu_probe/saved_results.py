"""Directories that hold results: of which kind they are, what made them, and what is said of one that is not what was asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from .errors import NoReport

Kind = Literal["report", "comparison", "costs"]
WORDS: dict[Kind, str] = {"report": "a report", "comparison": "a comparison", "costs": "costs of interventions"}
_MAKE: dict[Kind, str] = {
    "report": "`glu-probe report MODEL -o DIR`",
    "comparison": "`glu-probe compare MODEL MODEL -o DIR`",
    "costs": "`glu-probe causal MODEL -o DIR`",
}


def provenance_in(directory: str | os.PathLike) -> dict[str, Any] | None:
    """The provenance.json of a directory; None if there is none that can be read."""
    try:
        found = json.loads(Path(directory).expanduser().joinpath("provenance.json").read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def kind_of_results(directory: str | os.PathLike) -> Kind | None:
    """What the provenance in this directory is that of; None if nothing is saved here, or not to its end."""
    found = provenance_in(directory)
    if found is None:
        return None
    if {"base", "models"} <= {*found}:
        return "comparison"
    return "costs" if "clean_loss" in found else "report"


def no_results(directory: str | os.PathLike, wanted: Kind, cause: str) -> NoReport:
    """That results of a kind are not here.

    Args:
        directory: where they were looked for.
        wanted: the kind.
        cause: what is absent or cannot be read, if the directory is one of this kind.
    """
    path, hint = Path(directory).expanduser(), f"Make one with {_MAKE[wanted]}"
    if not path.exists():
        return NoReport("there is no such directory", where=path, hint=f"Check the spelling. {hint}")
    if not path.is_dir():
        return NoReport(
            f"this is a file, not the directory of {WORDS[wanted]}",
            where=path,
            hint="Give the DIR of the -o that made it",
        )
    found = kind_of_results(path)
    if found not in (None, wanted):
        return NoReport(f"this directory holds {WORDS[found]}, not {WORDS[wanted]}", where=path, hint=hint)
    return NoReport(f"there is no complete {WORDS[wanted].removeprefix('a ')} here ({cause})", where=path, hint=hint)
