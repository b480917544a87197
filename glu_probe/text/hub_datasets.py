"""Texts out of a dataset of the Hugging Face hub, through the library `datasets`."""

from __future__ import annotations

import re
from typing import Any

from ..arguments import whole_number
from ..errors import BadOption, MissingLibrary, TextTooShort, TextUnreadable
from .documents import Document, checked

_DATASET = re.compile(r"hf:(?P<name>[^:@#\s]+)(?::(?P<config>[^@#]+))?(?:@(?P<split>[^#]+))?(?:#(?P<column>.+))?")


def dataset_rows(source: str, characters: int) -> list[Document]:
    """The rows of "hf:NAME[:config][@split][#column]", streamed until there are so many characters; see `read_texts`."""
    match = _DATASET.fullmatch(source)
    if match is None:
        raise BadOption(
            f"{source!r} does not name a dataset",
            hint="Write hf:NAME[:config][@split][#column], as in hf:Salesforce/wikitext:wikitext-2-raw-v1@test#text",
        )
    whole_number("dataset_characters", characters, 1)
    name, config, split = match["name"], match["config"], match["split"] or "train"
    try:
        import datasets
    except ImportError:
        raise MissingLibrary(
            "reading a dataset of the hub needs the library `datasets`, which is not installed",
            where=source, hint='Run `pip install "glu-probe[datasets]"`, or give a text file',
        ) from None  # fmt: skip
    documents, column, read = [], match["column"], 0
    try:
        for number, row in enumerate(datasets.load_dataset(name, config, split=split, streaming=True)):
            column = column if column in row else _text_column(row, column, source)
            text = row[column]
            if not isinstance(text, str | None):
                raise TextUnreadable(
                    f"column {column!r} holds a {type(text).__name__} in row {number}, not text", where=source,
                    hint=f"Name another with #column; there are {', '.join(map(repr, row))}",
                )  # fmt: skip
            if text and text.strip():
                documents.append(checked(f"{name} row {number}", text, f"{source} row {number}"))
                read += len(text)
            if read >= characters:
                break
    except TextUnreadable:
        raise
    except Exception as error:
        # What these say of configs and splits helps; messages of network libraries can quote requests, token and all.
        said = (str(error).strip().splitlines() or [""])[0].rstrip(".") if isinstance(error, ValueError) else ""
        raise TextUnreadable(
            f"the dataset cannot be read ({type(error).__name__}{f': {said}' if said else ''})", where=source,
            hint="Check the spelling of name, config and split, the network, and whether you may read it",
        ) from None  # fmt: skip
    if not documents:
        raise TextTooShort(
            "there is no text in it", where=source, hint="Name another split or column: hf:NAME:config@split#column"
        )
    return documents


def _text_column(row: dict[str, Any], asked: str | None, source: str) -> str:
    strings = [name for name, value in row.items() if isinstance(value, str)]
    if asked is None and ("text" in strings or len(strings) == 1):
        return "text" if "text" in strings else strings[0]
    raise TextUnreadable(
        f"there is no column {asked!r}" if asked else f"{len(strings)} columns hold strings and none is called 'text'",
        where=source, hint=f"Name one with #column; there are {', '.join(map(repr, row))}",
    )  # fmt: skip
