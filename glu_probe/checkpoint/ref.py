"""What the user typed, as a place: a directory, a file, a hub repository at a revision, or a URL."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from ..errors import PathNotFound, Unreadable

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_PART = r"\w(?:[\w.-]{0,94}\w)?"
_REPO = re.compile(rf"(?P<repo>(?:{_PART}/)?{_PART})(?:@(?P<revision>[^@\s\\]+))?", re.ASCII)
_NEVER_IN_A_REPO = re.compile(r"--|\.\.|\.git\Z")  # the hub refuses these names before it looks
_URL = re.compile(r"(hf|https?)://", re.IGNORECASE)
# What the hub's own pages call a revision and a file: .../tree/main, .../blob/main/model.safetensors
_PAGE = re.compile(
    r"/(?P<repo>[^/]+(?:/[^/]+)?)(?:/(?:tree|blob|resolve|raw)/(?P<revision>[^/]+)(?:/(?P<file>.+))?)?/?"
)
_NOT_MODELS = ("datasets", "spaces", "buckets", "api", "docs", "collections", "papers")


@dataclass(frozen=True)
class ModelRef:
    """A parsed model reference.

    Attributes:
        kind: "directory", "file", "hub" or "web".
        path: where it is, for the local kinds.
        repo, revision: "org/name" and branch, tag or commit, for the hub; revision None is the default branch.
        file: the one file of the repository that is meant, None for the repository.
        url: for "web", with all that was typed.
        note: something the user should know about how the reference was read.
    """

    kind: Literal["directory", "file", "hub", "web"]
    path: Path | None = None
    repo: str | None = None
    revision: str | None = None
    file: str | None = None
    url: str | None = None
    note: str | None = None

    @property
    def local(self) -> Path:
        """The path of a local reference."""
        if self.path is None:
            raise TypeError(f"a reference of kind {self.kind!r} has no path")
        return self.path

    @property
    def repository(self) -> str:
        """The repository of a reference to the hub."""
        if self.repo is None:
            raise TypeError(f"a reference of kind {self.kind!r} has no repository")
        return self.repo

    @property
    def address(self) -> str:
        """The URL of a reference to the web, with all that was typed."""
        if self.url is None:
            raise TypeError(f"a reference of kind {self.kind!r} has no URL")
        return self.url

    @property
    def name(self) -> str:
        """Short name for the model column: repository, directory name or file name without its ending."""
        if self.kind == "hub":
            at = "" if self.revision is None else f"@{self.revision}"
            return f"{self.repo}{at}" + (f"/{self.file}" if self.file else "")
        if self.kind == "web":
            parts = urlsplit(self.address)
            last = unquote(parts.path).rstrip("/").rpartition("/")[2]
            return (Path(last).stem if self.is_web_file else last) or parts.hostname or "web"
        path = self.local.resolve()
        return path.stem if self.kind == "file" else path.name

    @property
    def is_web_file(self) -> bool:
        """Whether the URL is a weight file's, by its ending; otherwise it is a directory's."""
        return self.kind == "web" and unquote(urlsplit(self.address).path).lower().endswith(WEIGHT_SUFFIXES)

    @property
    def is_gguf(self) -> bool:
        """Whether one GGUF file is meant, by its ending."""
        names = {
            "file": self.path and self.path.name,
            "hub": self.file,
            "web": self.url and unquote(urlsplit(self.url).path),
        }
        return (names.get(self.kind) or "").lower().endswith(".gguf")


def parse_ref(ref: str | os.PathLike) -> ModelRef:
    """Parse `org/name`, `org/name@revision`, `hf://org/name[@revision][/file]`, an http(s) URL, or a path.

    An existing path wins over the hub.

    Raises:
        PathNotFound: it does not exist and cannot be a repository's name.
        Unreadable: the system does not say whether it exists.
    """
    text = os.fspath(ref)
    if isinstance(ref, str) and (scheme := _URL.match(text)):
        return _in_hub(text[scheme.end() :], text) if scheme[1].lower() == "hf" else _parse_url(text)
    path = _expanded(text)
    match = _matched(text) if isinstance(ref, str) else None
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
            hint="Give an existing path, or a hub repository as org/name or org/name@revision, or a URL",
        )
    return ModelRef("hub", repo=match["repo"], revision=match["revision"])


def public(ref: str) -> str:
    """A reference without what may be secret in it: user, password, query and fragment of a URL. Others as they are."""
    if not re.match("https?://", ref, re.IGNORECASE):
        return ref
    try:
        parts = urlsplit(ref)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    except ValueError:
        return "a URL"


def _matched(text: str) -> re.Match | None:
    match = _REPO.fullmatch(text)
    return match if match and not _NEVER_IN_A_REPO.search(match["repo"]) else None


def _in_hub(text: str, typed: str) -> ModelRef:
    """`org/name[@revision][/file]`. A revision may have slashes, as they stand or as %2F; what ends as weights do is a file."""
    text = text.rstrip("/").removeprefix("models/")
    at = text.find("@")
    repo, file = (text[:at], None) if at >= 0 else (text, None)
    revision = text[at + 1 :] if at >= 0 else None
    if text.lower().endswith(WEIGHT_SUFFIXES):
        if revision is not None:
            # refs/pr/7 and refs/convert/x are the only revisions of the hub's own that have slashes
            cut = re.match(r"(refs/[^/]+/[^/]+|[^/]+)/(.+)", revision)
            revision, file = (cut[1], cut[2]) if cut else (revision, None)
        else:
            parts = repo.split("/")
            depth = 1 if len(parts) == 2 else 2
            repo, file = "/".join(parts[:depth]), "/".join(parts[depth:])
    match = _matched(repo)
    if match is None or match["revision"] or repo.split("/")[0] in _NOT_MODELS or revision == "" or file == "":
        raise PathNotFound(
            "this names no repository of models, nor a weight file of one",
            where=typed,
            hint="Write hf://org/name, hf://org/name@revision or hf://org/name@revision/model.safetensors",
        )
    return ModelRef("hub", repo=repo, revision=None if revision is None else unquote(revision), file=file)


def _parse_url(text: str) -> ModelRef:
    """A page or a file of the hub is the hub's, with its commits and tokens; any other URL is the web's."""
    from huggingface_hub import constants

    try:
        parts = urlsplit(text)
        usable = bool(parts.hostname) and (parts.port or 1) > 0 and not re.search(r"\s", text)
    except ValueError:
        usable = False
    if not usable:
        raise PathNotFound(
            "this is not a usable URL", where=public(text), hint="Write https://host/path/model.safetensors"
        )
    endpoint = urlsplit(constants.ENDPOINT)
    same = (parts.scheme.lower(), parts.hostname, parts.port) == (endpoint.scheme, endpoint.hostname, endpoint.port)
    below = parts.path.removeprefix(endpoint.path.rstrip("/"))
    page = _PAGE.fullmatch(below) if same else None
    repo = _matched(page["repo"]) if page else None
    if page and repo and not repo["revision"] and repo["repo"].split("/")[0] not in _NOT_MODELS:
        revision, file = (part and unquote(part) for part in (page["revision"], page["file"]))
        if file is None or file.lower().endswith(WEIGHT_SUFFIXES):
            return ModelRef("hub", repo=repo["repo"], revision=revision, file=file)
    if same:
        raise PathNotFound(
            "this page of the hub is no repository of models, nor a weight file of one",
            where=public(text),
            hint=f"Give {constants.ENDPOINT}/org/name, or .../resolve/REVISION/FILE of a weight file",
        )
    return ModelRef("web", url=text)


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
