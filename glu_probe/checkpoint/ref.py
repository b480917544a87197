"""What the user typed, as a place: a directory, a file, or a hub repository at a revision."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import PathNotFound, Unreadable

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_PART = r"\w(?:[\w.-]{0,94}\w)?"
_REPO = re.compile(rf"(?P<repo>(?:{_PART}/)?{_PART})(?:@(?P<revision>[^@\s\\]+))?", re.ASCII)
_NEVER_IN_A_REPO = re.compile(r"--|\.\.|\.git\Z")  # the hub refuses these names before it looks


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
        Unreadable: the system does not say whether it exists.
    """
    text = os.fspath(ref)
    path = _expanded(text)
    match = _REPO.fullmatch(text) if isinstance(ref, str) else None
    if match and _NEVER_IN_A_REPO.search(match["repo"]):
        match = None
    if text and _exists(path):
        is_directory = path.is_dir()
        note = None
        if match and "/" in match["repo"] and is_directory:
            note = f"{text} is a directory here and could be a hub repository: the directory was read"
        return ModelRef("directory" if is_directory else "file", path=path, note=note)
    if match is None or text.lower().endswith(WEIGHT_SUFFIXES):
        raise PathNotFound(
            "there is no such file or directory",
            where=path.absolute() if text else "''",
            hint="Give an existing path, or a hub repository as org/name or org/name@revision",
        )
    return ModelRef("hub", repo=match["repo"], revision=match["revision"])


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~name of a user that does not exist
        return Path(text)


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except PermissionError as error:
        raise Unreadable(
            f"the path cannot be looked at: {error.strerror}", where=path.absolute(), hint="Check its permissions"
        ) from None
    except (OSError, ValueError):  # absent, a loop of links, a name too long or with a NUL
        return False
    return True
