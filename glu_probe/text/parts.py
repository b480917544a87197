"""Results of a long run kept as they come, so that an interrupted one can go on."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import BadOption
from ..report import prepare_directory, software_versions, write_text

_RUN = "run.json"
_SHOWN = 3  # differences to another run


class Parts:
    """A directory with a file of rows for every finished target, all of one run.

    Files appear whole or not at all. What the run is, run.json says.
    """

    def __init__(self, directory: str | os.PathLike, facts: Mapping[str, Any]) -> None:
        """Open the directory, made if need be.

        Args:
            directory: where.
            facts: everything that decides about the rows; JSON-ready.

        Raises:
            BadOption: it holds parts of another run; the message says what differs.
            CannotWrite: it cannot be written.
        """
        self._directory = prepare_directory(directory)
        facts = json.loads(json.dumps(facts))
        known = _read(self._directory / _RUN)
        if known is None:
            stray = sorted(path.name for path in self._directory.iterdir())
            if stray:
                raise BadOption(
                    f"there are other files here, such as {stray[0]}",
                    where=self._directory, hint="Give an empty directory for the parts of a run",
                )  # fmt: skip
            write_text(self._directory / _RUN, json.dumps(facts, indent=2) + "\n")
        elif known != facts:
            before, now = _leaves(known), _leaves(facts)
            words = [
                _difference(n, before.get(n), now.get(n)) for n in {**now, **before} if before.get(n) != now.get(n)
            ]
            raise BadOption(
                f"these are parts of another run: {', '.join(words[:_SHOWN])}",
                where=self._directory,
                hint="Go on with the options of that run, give another directory, or remove this one",
            )

    def rows(self, name: str) -> list[dict[str, Any]] | None:
        """Rows of a finished target; None if it is not finished."""
        return _read(self._file(name))

    def keep(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Write the rows of a target."""
        write_text(self._file(name), json.dumps(rows, indent=1) + "\n")

    def _file(self, name: str) -> Path:
        return self._directory / f"rows {name}.json"


def kept_parts(directory: str | os.PathLike) -> int:
    """How many targets of a run are finished in a directory."""
    return len(list(Path(directory).glob("rows *.json")))


def remove_parts(directory: str | os.PathLike) -> None:
    """Remove what was kept of a run, and the directory if nothing else is in it."""
    directory = Path(directory)
    for path in (*directory.glob("rows *.json"), directory / _RUN):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise BadOption("this is no file of a run", where=path, hint="Remove it") from None


def _leaves(facts: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested facts by names of several words."""
    out = {}
    for name, value in facts.items():
        out |= _leaves(value, f"{above}{name} ") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return out


def _difference(name: str, before: Any, now: Any) -> str:
    if any(isinstance(value, list) or len(str(value)) > 40 for value in (before, now)):
        return f"{name} differs"
    return f"{name} was {before!r} and is {now!r}"


def running_versions() -> dict[str, str]:
    """Versions of everything that could change a number of a run on text."""
    names = ("transformers", "transformer-lens")
    return software_versions() | {name: importlib.metadata.version(name) for name in names}


def weights_sha256(module: torch.nn.Module) -> str:
    """Hash of all parameters of a model in memory."""
    found = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters(), key=lambda item: item[0]):
        found.update(f"{name.replace('_original_component.', '')} {parameter.dtype}\n".encode())
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()
