"""What a file is, whatever it is called: the first look before any format library sees it."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

from ..errors import BadConfig, LFSPointer, PathNotFound

_LFS = b"version https://git-lfs"


def head(path: Path, size: int = 512) -> bytes:
    """The first bytes of a file."""
    try:
        with path.open("rb") as file:
            return file.read(size)
    except FileNotFoundError:
        raise PathNotFound("there is no such file", where=path) from None


def looks_like(path: Path) -> str:
    """What the file looks like, as a noun phrase for an error message."""
    if path.is_dir():
        return "a directory"
    start = head(path)
    text = start.lstrip().lower()
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
    ):
        if found:
            return name
    return "a file of an unknown kind"


def refuse_lfs_pointer(path: Path) -> None:
    """Raise LFSPointer if the file is a stand-in that Git left where the real one should be."""
    if not path.is_file():
        return
    start = head(path)
    if start.startswith(_LFS):
        size = re.search(rb"^size (\d+)", start, re.MULTILINE)
        bytes_ = f" for {int(size[1]):,} bytes" if size else ""
        raise LFSPointer(
            f"this is a Git LFS pointer{bytes_}, not the file itself",
            where=path,
            hint=f"Fetch it with `git lfs pull --include {path.name}` in {path.parent}, or download the model again",
        )


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        LFSPointer, BadConfig, PathNotFound.
    """
    refuse_lfs_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PathNotFound("there is no such file", where=path) from None
    except (ValueError, RecursionError) as error:
        raise BadConfig(
            f"this is not JSON but {looks_like(path)} ({error})", where=path, hint="Download the file again"
        ) from None
    except OSError as error:
        raise BadConfig(f"the file cannot be read: {error.strerror}", where=path) from None
    if not isinstance(value, dict):
        raise BadConfig(f"a JSON object is expected, found a {type(value).__name__}", where=path)
    return value


def file_facts(path: Path) -> dict[str, Any]:
    """Name, size and modification time of a file, for provenance."""
    stat = path.stat()
    when = datetime.datetime.fromtimestamp(stat.st_mtime, datetime.timezone.utc)
    return {"name": path.name, "bytes": stat.st_size, "modified": when.isoformat(timespec="seconds")}
