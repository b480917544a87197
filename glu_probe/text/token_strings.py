"""What tokens look like, one by one: exactly, with their leading spaces and their bytes, which decoding would lose."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.ref import parse_ref
from ..errors import NoTokenizer
from .tokenizers import load_tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # "▁", a space in vocabularies of SentencePiece
_BYTE_SPACE = "\u0120"  # "Ġ", a space in byte-level vocabularies


@dataclass(frozen=True)
class TokenStrings:
    """A vocabulary as strings.

    Attributes:
        pieces: each token as its tokenizer spells it, by id; None for ids that are no token.
        spelling: "bytes" if a letter stands for a byte each (as in GPT-2's), "spaces" if ▁ stands for a space, else "plain".
    """

    pieces: Sequence[str | None]
    spelling: Literal["bytes", "spaces", "plain"]

    @classmethod
    def of(cls, pieces: Sequence[str | None]) -> TokenStrings:
        """From pieces; how they are spelt follows from them."""
        # a vocabulary of many languages can hold the other sign as a letter, so the more frequent one decides
        spaces, letters = (
            sum(piece is not None and piece.startswith(s) for piece in pieces) for s in (_SPACE, _BYTE_SPACE)
        )
        return cls(pieces, "plain" if not spaces and not letters else "spaces" if spaces >= letters else "bytes")

    def __len__(self) -> int:
        return len(self.pieces)

    def quoted(self, token: int) -> str:
        """The token as a Python literal: ' the', or b'\\xe2\\x80' where it is not a whole character."""
        piece = self.pieces[token]
        assert piece is not None  # only tokens are quoted
        if self.spelling == "bytes" and all(letter in _letters() for letter in piece):
            raw = bytes(_letters()[letter] for letter in piece)
        elif self.spelling == "spaces":
            match = _BYTE.fullmatch(piece)
            raw = bytes([int(match[1], 16)]) if match else piece.replace(_SPACE, " ").encode()
        else:
            raw = piece.encode()
        try:
            return repr(raw.decode())
        except UnicodeDecodeError:
            return repr(raw)


def token_strings(checkpoint: Checkpoint, tokenizer: Any = None) -> TokenStrings:
    """The vocabulary of a model.

    Args:
        checkpoint: whose GGUF metadata or tokenizer files are read.
        tokenizer: a transformers tokenizer to use instead.

    Raises:
        NoTokenizer: there is none, or it cannot be loaded.
        GluProbeError: another of its subclasses, where the hub does not give it.
    """
    if tokenizer is None:
        pieces = checkpoint.token_pieces()
        if pieces is not None:
            return TokenStrings.of(pieces)
        if not checkpoint.in_files:
            raise NoTokenizer("a model in memory comes without its tokenizer", hint="Give it with tokenizer=")
        ref = parse_ref(checkpoint.ref)
        if ref.is_gguf:  # which transformers would fetch whole, to find no more in it
            raise NoTokenizer("the GGUF file holds no tokens", where=ref.name, hint="Give a tokenizer with tokenizer=")
        tokenizer = load_tokenizer(ref)
    known = tokenizer.get_vocab()
    named: list[str | None] = [None] * (max(known.values(), default=-1) + 1)
    for piece, token in known.items():
        named[token] = piece.decode(errors="backslashreplace") if isinstance(piece, bytes) else piece
    return TokenStrings.of(named)


@functools.cache
def _letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: itself if it is printable, else counted from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
