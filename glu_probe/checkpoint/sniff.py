"""What a file is, whatever it is called: the first look before any format library sees it."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import BadConfig, LFSPointer, PathNotFound, Unreadable

_LFS = b"version https://git-lfs"
_BOM = b"\xef\xbb\xbf"


@contextlib.contextmanager
def opened(path: Path, *, buffered: bool = True) -> Iterator[io.BufferedReader | io.FileIO]:
    """A file for reading bytes; what the system refuses comes out as an error of ours.

    Raises:
        PathNotFound, Unreadable.
    """
    try:
        with path.open("rb") if buffered else path.open("rb", buffering=0) as file:
            yield file
    except FileNotFoundError:
        raise PathNotFound("there is no such file", where=path, hint="Was it moved or deleted meanwhile?") from None
    except OSError as error:
        raise Unreadable(
            f"the file cannot be read: {error.strerror or error}", where=path, hint="Check its permissions and the disk"
        ) from None


def head(path: Path, size: int = 512) -> bytes:
    """The first bytes of a file."""
    with opened(path) as file:
        return file.read(size)


def looks_like(path: Path) -> str:
    """What the path is, as a noun phrase for an error message."""
    if path.is_dir():
        return "a directory"
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        return "a device or pipe"
    return kind_of(head(path))


def kind_of(start: bytes) -> str:
    """What a file that starts like this is, as a noun phrase."""
    text = start.removeprefix(_BOM).lstrip().lower()
    for found, name in (
        (not start, "an empty file"),
        # before the magic numbers: a header's length can look like any of them
        (start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 2**32, "a safetensors file"),
        (start.startswith(_LFS), "a Git LFS pointer"),
        (start.startswith(b"GGUF"), "a GGUF file"),
        (start.startswith(b"PK\x03\x04"), "a zip archive, as PyTorch's .bin files are"),
        (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05", "a Python pickle, as old .bin files are"),
        (text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")), "an HTML page, as a failed download leaves"),
        (start.startswith(b"\x1f\x8b"), "a gzip archive"),
        (text[:1] in (b"{", b"["), "JSON text"),
        (len(start) < 8, f"a file of {len(start)} bytes"),
        (_is_text(start), "plain text, as a failed download leaves"),
    ):
        if found:
            return name
    return "a file of an unknown kind"


def _is_text(start: bytes) -> bool:
    return all(byte >= 32 or byte in b"\t\n\r" for byte in start) and start.isascii()


def what_to_do(kind: str) -> str:
    """Advice for a file that is of another kind than its name says."""
    endings = {"a safetensors": ".safetensors", "a GGUF": ".gguf", "a zip": ".bin", "a Python pickle": ".bin"}
    right = next((ending for start, ending in endings.items() if kind.startswith(start)), None)
    if right:
        return f"If that is what it should be, let its name end in {right}; otherwise download it again"
    if kind == "a directory":
        return "Give the directory of the model, or a file"
    return "Download the file again"


def refuse_lfs_pointer(path: Path) -> None:
    """Raise LFSPointer if the file is a stand-in that Git left where the real one should be."""
    if path.is_file():
        pull = f"git lfs pull --include {shlex.quote(path.name)}"
        refuse_lfs_text(head(path), path, f"Fetch it with `{pull}` in {path.parent}, or download the model again")


def refuse_lfs_text(start: bytes, where: object, hint: str) -> None:
    """Raise LFSPointer if a file that starts like this is such a stand-in."""
    if not start.startswith(_LFS):
        return
    size = re.search(rb"^size (\d{1,20})\s*$", start, re.MULTILINE)
    of = f" for a file of {int(size[1])} bytes ({int(size[1]) / 1e9:.3g} GB)" if size else ""
    raise LFSPointer(f"this is a Git LFS pointer{of}, not the file itself", where=where, hint=hint)


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        LFSPointer, BadConfig, PathNotFound, Unreadable.
    """
    if path.is_dir():
        raise BadConfig("this is a directory, not a JSON file", where=path, hint="Download the model again")
    refuse_lfs_pointer(path)
    with opened(path) as file:
        return parse_json(file.read(), path)


def parse_json(raw: bytes, where: object) -> dict[str, Any]:
    """A JSON object from the content of a file.

    Raises:
        BadConfig.
    """
    try:
        value = json.loads(raw.removeprefix(_BOM).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        kind = kind_of(raw[:512])
        found = "damaged JSON" if kind == "JSON text" else f"not JSON but {kind}"
        raise BadConfig(f"this is {found} ({error})", where=where, hint="Download the file again") from None
    if not isinstance(value, dict):
        raise BadConfig(
            f"a JSON object is expected, found a {type(value).__name__}", where=where, hint="Download the file again"
        )
    return value


def file_facts(path: Path) -> dict[str, Any]:
    """Name, size and modification time of a file, for provenance."""
    stat = path.stat()
    when = datetime.datetime.fromtimestamp(stat.st_mtime, datetime.timezone.utc)
    return {"name": path.name, "bytes": stat.st_size, "modified": when.isoformat(timespec="seconds")}
