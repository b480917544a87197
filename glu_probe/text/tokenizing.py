"""From documents to sequences of token ids.

The tokenizer decides about a token at the beginning: where it prepends one by itself, every sequence gets it, because a
model trained so reads the rest wrongly without it; where it does not, none is added. There is no padding: sequences of
equal length are batched, so no position is ever a made-up one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..arguments import whole_number
from ..errors import BadOption, NoTokenizer, TextTooShort
from .documents import Document
from .tokenizers import looked_for
from .tokens import Tokens


def tokenize(
    documents: Sequence[Document],
    tokenizer: Any,
    *,
    length: int = 256,
    tokens: int | None = None,
    pack: bool = True,
    max_length: int | None = None,
) -> Tokens:
    """Cut texts into sequences of token ids.

    The documents follow each other in order. What is left at the end is a shorter sequence if it has at least 2 tokens of
    the text. Tokens that a tokenizer would put at the end of a text are not added. A special token that is spelled out
    in the text becomes that token, as the tokenizer has it.

    Args:
        documents: from `read_texts`.
        tokenizer: a transformers tokenizer, used as it is; see `load_tokenizer`.
        length: tokens of a sequence, with the leading one of tokenizers that have it.
        tokens: at most so many tokens of the text are used; the last sequence is cut. None for all.
        pack: join the documents, with the tokenizer's end-of-text token between two of them, or two newlines if it has
            none; so a sequence can hold parts of several. If False, every document begins a sequence of its own.
        max_length: positions the model has, if that is known.

    Raises:
        NoTokenizer: `tokenizer` is None.
        BadOption: `length` or `tokens` is too small, or `length` beyond `max_length`.
        TextTooShort: there are not even 2 tokens.
    """
    if tokenizer is None:
        raise NoTokenizer("there is no tokenizer to turn text into tokens", hint=looked_for())
    if tokens is not None:
        whole_number("tokens", tokens, 2)
    whole_number("length", length, 2)
    if max_length is not None and length > max_length:
        raise BadOption(
            f"length is {length}, but the model has only {max_length} positions",
            hint=f"Give a length of at most {max_length}",
        )
    if not documents:
        raise TextTooShort("there are no documents", hint="Give at least one text")
    bos = _leading(tokenizer, documents)
    if length - len(bos) < 2:
        raise BadOption(
            f"length is {length}, which leaves {length - len(bos)} for text after the tokenizer's leading {_spelled(tokenizer, bos)}",
            hint=f"Give at least {len(bos) + 2}",
        )
    eos = tokenizer.eos_token_id if pack and len(documents) > 1 else None
    sequences, left_out = [], 0
    for stream in _streams(documents, tokenizer, eos, tokens, pack):
        for start in range(0, len(stream), length - len(bos)):
            piece = stream[start : start + length - len(bos)]
            if len(piece) < 2:
                left_out += len(piece)
            else:
                sequences.append(torch.tensor(bos + piece, dtype=torch.int64))
    if not sequences:
        raise TextTooShort(
            "the text is shorter than 2 tokens", where=", ".join(d.name for d in documents[:3]), hint="Give more text"
        )
    return Tokens(
        sequences=sequences,
        length=length,
        bos_ids=tuple(bos),
        bos_token=_spelled(tokenizer, bos) if bos else None,
        eos_token=None if eos is None else tokenizer.convert_ids_to_tokens(eos),
        packed=pack and len(documents) > 1,
        tokenizer=str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__),
        vocabulary=len(tokenizer),
        documents=tuple(document.name for document in documents),
        text_sha256=hashlib.sha256("\0".join(d.text for d in documents).encode("utf-8", "surrogatepass")).hexdigest(),
        left_out=left_out,
    )


def _streams(
    documents: Sequence[Document], tokenizer: Any, eos: int | None, tokens: int | None, pack: bool
) -> Iterator[list[int]]:
    """Ids that are to be cut into sequences, `tokens` at most in all of them together."""
    left = sys.maxsize if tokens is None else tokens
    if pack and eos is None:
        yield _ids(tokenizer, "\n\n".join(document.text for document in documents), left)[:left]
        return
    joined: list[int] = []
    for number, document in enumerate(documents):
        ids = ([eos] if pack and number and eos is not None else []) + _ids(tokenizer, document.text, left)
        if pack:
            joined += ids[:left]
        else:
            yield ids[:left]
        left -= len(ids[:left])
        if left == 0:
            break
    if pack:
        yield joined


def _ids(tokenizer: Any, text: str, enough: int) -> list[int]:
    """Ids of a text, or of a beginning of it that has more than enough of them: tokenizers are slow on large texts."""
    size = min(len(text), 16 * enough + 4096)
    while True:
        ids = _encoded(tokenizer, text[:size], special=False)
        if size == len(text) or len(ids) > enough + 256:  # the cut disturbs only the last few
            return ids
        size = min(len(text), 4 * size)


def _encoded(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    encoded = tokenizer(text, add_special_tokens=special, padding=False, truncation=False, verbose=False)
    return list(encoded["input_ids"])


def _leading(tokenizer: Any, documents: Sequence[Document]) -> list[int]:
    """What this tokenizer puts before a text by itself."""
    for text in ("The", *(document.text[:1000] for document in documents)):
        alone, whole = (_encoded(tokenizer, text, special=special) for special in (False, True))
        if alone:
            starts = range(len(whole) - len(alone) + 1)
            return next((whole[:start] for start in starts if whole[start : start + len(alone)] == alone), [])
    return []


def _spelled(tokenizer: Any, ids: Sequence[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(list(ids)))
