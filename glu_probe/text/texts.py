"""From what a user calls text to documents: files, directories, lists, standard input, datasets of the hub."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from ..checkpoint.sniff import opened
from ..errors import PathNotFound, TextTooShort, TextUnreadable, Unreadable
from .documents import Document, checked, decoded
from .hub_datasets import dataset_rows

TEXT_SUFFIXES = (".txt", ".md")


def read_texts(
    source: str | os.PathLike | Sequence[str] | None = None, *, dataset_characters: int = 4_000_000
) -> list[Document]:
    """The texts of a source, in order. Line ends become newlines and a byte order mark is dropped; nothing else changes.

    Args:
        source: a file; a directory (all .txt and .md files below it, in natural order; hidden and blank ones are left
            out); a list of strings, which are the texts themselves; "-" for standard input;
            "hf:NAME[:config][@split][#column]" for a dataset of the Hugging Face hub (by default the split "train" and
            the column "text", or the only one with strings; blank rows are left out); None for the sample that comes
            with this package, 3,500 words of English prose.
        dataset_characters: rows of a dataset are read until there are so many characters. Datasets are streamed.

    Raises:
        PathNotFound, Unreadable: there is no such path, or the system does not let it be read.
        TextUnreadable: not text, not UTF-8, or no such dataset, split or column.
        TextTooShort: there is nothing in it.
        MissingLibrary: a dataset is asked for and `datasets` is not installed.
        LFSPointer: a file is a stand-in that Git left.
    """
    if source is None:
        sample = resources.files(__package__).joinpath("sample.txt").read_bytes()
        return [decoded("sample", sample, "the sample of glu-probe")]
    if isinstance(source, str) and source == "-":
        return [_standard_input()]
    if isinstance(source, str) and source.startswith("hf:"):
        return dataset_rows(source, dataset_characters)
    if isinstance(source, (str, os.PathLike)):
        return _from_path(source)
    if isinstance(source, Sequence) and not isinstance(source, (bytes, bytearray)):
        return _given(source)
    raise TextUnreadable(
        f"a text cannot be a {type(source).__name__}",
        hint='Give a path, a list of strings, "-", "hf:NAME", or None for the bundled sample',
    )


def _given(texts: Sequence[str]) -> list[Document]:
    if not texts:
        raise TextTooShort("the list of texts is empty", hint="Give at least one string")
    documents = []
    for number, text in enumerate(texts, 1):
        where = f"text {number} of the list"
        if not isinstance(text, str):
            raise TextUnreadable(
                f"a string is expected, found a {type(text).__name__}",
                where=where,
                hint="Give texts as strings; paths are given alone, not in a list",
            )
        documents.append(checked(f"text {number}", text, where))
    return documents


def _from_path(source: str | os.PathLike) -> list[Document]:
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # ~name of a user that does not exist
        path = Path(source)
    where = path.absolute()
    try:
        exists = os.fspath(source) != "" and path.exists()
        if exists and path.is_dir():
            return _directory(path)
    except PermissionError as error:
        raise Unreadable(
            f"the path cannot be looked at: {error.strerror}", where=where, hint="Check its permissions"
        ) from None
    except (OSError, ValueError):  # a name too long or with a NUL
        exists = False
    if not exists:
        raise PathNotFound(
            "there is no such file or directory",
            where=where if os.fspath(source) else "''",
            hint="Check the spelling and give an existing file or directory, - for standard input, or hf:NAME for a dataset; in Python "
            "a text itself goes into a list: [text]",
        )
    return [_file(path, path.name)]


def _directory(directory: Path) -> list[Document]:
    def refuse(error: OSError) -> None:
        raise Unreadable(
            f"the directory cannot be listed: {error.strerror}", where=error.filename, hint="Check its permissions"
        ) from None

    names = []
    for folder, below, files in os.walk(directory.absolute(), onerror=refuse):
        below[:] = [name for name in below if not name.startswith(".")]
        names += [
            Path(folder, name).relative_to(directory.absolute()).as_posix()
            for name in files
            if name.lower().endswith(TEXT_SUFFIXES) and not name.startswith(".")
        ]
    if not names:
        raise TextTooShort(
            f"there is no {' or '.join(TEXT_SUFFIXES)} file in this directory or below it",
            where=directory.absolute(), hint="Give another directory, or a file, which may have any name",
        )  # fmt: skip
    documents = [_file(directory / name, name, blank_is_fine=True) for name in sorted(names, key=_natural)]
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        raise TextTooShort(
            f"all {len(names)} text files are empty",
            where=directory.absolute(),
            hint="Give a directory with a text in it, or a file",
        )
    return documents


def _natural(name: str) -> tuple:
    """Sorts "part 2" before "part 10", and the files of a directory together."""
    pieces = [re.split(r"([0-9]+)", part) for part in name.split("/")]
    return tuple(tuple(int(p) if i % 2 else p.casefold() for i, p in enumerate(part)) for part in pieces), name


def _file(path: Path, name: str, *, blank_is_fine: bool = False) -> Document:
    with opened(path.absolute()) as file:
        raw = file.read()
    return decoded(name, raw, path.absolute(), blank_is_fine=blank_is_fine)


def _standard_input() -> Document:
    stream = getattr(sys.stdin, "buffer", sys.stdin)
    read = stream.read() if stream is not None else b""
    raw = read if isinstance(read, bytes) else read.encode("utf-8", "surrogateescape")
    return decoded("standard input", raw, "standard input")
