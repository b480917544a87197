"""A text and its name, and what is refused as one: what is binary, in another encoding, or empty."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoint.sniff import kind_of, refuse_lfs_text
from ..errors import TextTooShort, TextUnreadable

_BINARY = ("a safetensors", "a GGUF", "a zip", "a Python pickle", "a gzip")


@dataclass(frozen=True)
class Document:
    """A text and what to call it in messages."""

    name: str
    text: str


def decoded(name: str, raw: bytes, where: object, *, blank_is_fine: bool = False) -> Document:
    """The text that these bytes are, if they are text."""
    head = raw[:512]
    refuse_lfs_text(head, where, "Fetch it with `git lfs pull`")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        hint = "Save it as UTF-8: `iconv -f UTF-16 -t UTF-8 FILE`"
        raise TextUnreadable("this is UTF-16 text, or not text at all", where=where, hint=hint)
    kind = "a PDF file" if raw.startswith(b"%PDF-") else kind_of(head)
    if kind == "a PDF file" or kind.startswith(_BINARY) or b"\0" in raw:
        kind = kind if kind.startswith(("a PDF", *_BINARY)) else "a binary file"
        raise TextUnreadable(f"this is {kind}, not text", where=where, hint="Give a plain text file in UTF-8")
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise TextUnreadable(
            f"this is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}",
            where=where,
            hint="Save it as UTF-8, for instance `iconv -f LATIN1 -t UTF-8 FILE` if it is Latin-1",
        ) from None
    return checked(name, text.replace("\r\n", "\n").replace("\r", "\n"), where, blank_is_fine=blank_is_fine)


def checked(name: str, text: str, where: object, *, blank_is_fine: bool = False) -> Document:
    """The document, if its text has something in it and can be written as UTF-8."""
    if not blank_is_fine and not text.strip():
        raise TextTooShort("there is no text in it", where=where, hint="Give a text with words in it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextUnreadable(
            f"character {error.start} is half of a surrogate pair, which is no character", where=where,
            hint='Decode the text properly, or replace such characters: text.encode("utf-8", "replace").decode()',
        ) from None  # fmt: skip
    return Document(name, text)
