"""What the user typed, as a place: a directory, a file, or a hub repository at a revision."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import PathNotFound

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_REPO = re.compile(r"^(?P<repo>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@(?P<revision>[^@\s\\]+))?$")


@dataclass(frozen=True)
class ModelRef:
    """A parsed model reference.

    Attributes:
        kind: "directory", "file" or "hub".
        path: where it is, for the local kinds.
        repo, revision: "org/name" and branch, tag or commit, for the hub; revision None is the default branch.
        note: something the user should know about how the reference was read.
    """

    kind: Literal["directory", "file", "hub"]
    path: Path | None = None
    repo: str | None = None
    revision: str | None = None
    note: str | None = None

    @property
    def name(self) -> str:
        """Short name for the model column: repository, directory name or file name without its ending."""
        if self.kind == "hub":
            return self.repo if self.revision is None else f"{self.repo}@{self.revision}"
        path = self.path.resolve()
        return path.stem if self.kind == "file" else path.name


def parse_ref(ref: str | os.PathLike) -> ModelRef:
    """Parse `org/name`, `org/name@revision`, or a path. An existing path wins over the hub.

    Raises:
        PathNotFound: it does not exist and cannot be a repository's name.
    """
    text = os.fspath(ref)
    path = Path(text).expanduser()
    try:
        exists = bool(text) and path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        exists = False
    match = _REPO.match(text) if isinstance(ref, str) else None
    if exists:
        note = None
        if match and "/" in match["repo"]:
            note = f"{text} is a directory here and could be a hub repository: the directory was read"
        return ModelRef("directory" if path.is_dir() else "file", path=path, note=note)
    if match is None or text.lower().endswith(WEIGHT_SUFFIXES):
        raise PathNotFound(
            "there is no such file or directory",
            where=path.absolute() if text else "''",
            hint="Give an existing path, or a hub repository as org/name or org/name@revision",
        )
    return ModelRef("hub", repo=match["repo"], revision=match["revision"])
