"""Sequences of token ids: in batches, in parts, and in words for provenance."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..arguments import whole_number
from ..errors import BadOption, TextTooShort
from ..phrases import counted

_NAMES_SHOWN = 20


@dataclass(frozen=True, eq=False)
class Tokens:
    """Sequences of token ids, ready for a model.

    Attributes:
        sequences: each [position] int64, in the order of the text, with the tokenizer's leading token where it has one.
        length: tokens of a full sequence, the leading one included.
        bos_ids: what the tokenizer puts before a text by itself, nearly always one token; empty if nothing.
        bos_token: the same, spelled out; None if nothing.
        eos_token: what stands between documents in one sequence; None for two newlines, or where documents are apart.
        packed: whether a sequence may hold the end of one document and the beginning of the next.
        tokenizer: its name.
        vocabulary: number of its tokens.
        documents: names of the documents.
        text_sha256: hash of the UTF-8 text, documents joined by a NUL.
        left_out: tokens at ends of documents that were too few for a sequence of their own.
        part: how this part was taken from all sequences; None for all.
    """

    sequences: list[Int[Tensor, " position"]]
    length: int
    bos_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    packed: bool
    tokenizer: str
    vocabulary: int
    documents: tuple[str, ...]
    text_sha256: str
    left_out: int = 0
    part: str | None = None

    @property
    def has_bos(self) -> bool:
        """Whether every sequence begins with a token that is not of the text."""
        return bool(self.bos_ids)

    @property
    def n_tokens(self) -> int:
        """Tokens of the text, without those at the beginning of each sequence."""
        return sum(len(ids) - len(self.bos_ids) for ids in self.sequences)

    def n_positions(self, first: int) -> int:
        """Positions of all sequences, without the first `first` of each."""
        return sum(max(len(ids) - first, 0) for ids in self.sequences)

    @property
    def n_documents(self) -> int:
        """Number of documents that were given."""
        return len(self.documents)

    def batches(self, max_tokens: int) -> Iterator[tuple[list[int], Int[Tensor, "batch position"]]]:
        """Sequences of equal length together, the longest first, each length in the order of the text.

        Args:
            max_tokens: at most so many in a batch, leading ones included; a longer sequence is a batch of its own.

        Yields:
            Indices into `sequences`, and their ids as one tensor. Every sequence comes exactly once.

        Raises:
            BadOption: max_tokens is below 1.
        """
        whole_number("max_tokens", max_tokens, 1)
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(self.sequences):
            by_length.setdefault(len(ids), []).append(index)
        return (
            (indices[start : start + size], torch.stack([self.sequences[i] for i in indices[start : start + size]]))
            for length, indices in sorted(by_length.items(), reverse=True)
            for size in [max(1, max_tokens // length)]
            for start in range(0, len(indices), size)
        )

    def split(self, share: float = 0.5, seed: int = 0) -> tuple[Tokens, Tokens]:
        """Two parts that share no sequence, drawn at random, each in the order of the text.

        Args:
            share: of the sequences, for the first part, between 0 and 1; each part gets at least one.
            seed: same seed, same parts.

        Raises:
            BadOption: share is not between 0 and 1.
            TextTooShort: there is only one sequence.
        """
        if not 0 < share < 1:
            raise BadOption(f"share is {share}; it must lie between 0 and 1", hint="Give a share such as 0.5")
        count = len(self.sequences)
        size = min(max(round(share * count), 1), count - 1)
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].tolist()
        return self._parts(set(drawn), f"split with share {share} and seed {seed}")

    def split_every(self, k: int) -> tuple[Tokens, Tokens]:
        """Two parts that share no sequence: all but every k-th, and every k-th.

        Raises:
            BadOption: k is below 2.
            TextTooShort: there are fewer than k sequences.
        """
        whole_number("k", k, 2)
        return self._parts({i for i in range(len(self.sequences)) if (i + 1) % k}, f"split at every sequence of {k}")

    def _parts(self, first: set[int], how: str) -> tuple[Tokens, Tokens]:
        if not 0 < len(first) < len(self.sequences):
            raise TextTooShort(
                f"{counted(len(self.sequences), 'sequence')} of {self.length} tokens are too few to be split like this",
                hint="Give more text, or a shorter length",
            )
        how = how if self.part is None else f"{self.part}; {how}"

        def part(wanted: bool) -> Tokens:
            sequences = [sequence for i, sequence in enumerate(self.sequences) if (i in first) is wanted]
            return dataclasses.replace(self, sequences=sequences, part=f"{how}, {'first' if wanted else 'second'} part")

        return part(True), part(False)

    def words(self) -> dict[str, Any]:
        """What was run, for provenance: only numbers, strings and lists of them."""
        ids = hashlib.sha256()
        for sequence in self.sequences:
            ids.update((",".join(map(str, sequence.tolist())) + "\n").encode())
        between = (self.eos_token or "two newlines") if self.packed else "a new sequence"
        return {
            "documents": self.n_documents,
            "document_names": list(self.documents[:_NAMES_SHOWN]),
            "text_sha256": self.text_sha256,
            "tokenizer": self.tokenizer,
            "vocabulary": self.vocabulary,
            "tokens": self.n_tokens,
            "tokens_left_out": self.left_out,
            "sequences": len(self.sequences),
            "sequence_length": self.length,
            "bos": "before every sequence, as this tokenizer adds it"
            if self.has_bos
            else "none: this tokenizer adds none",
            "bos_token": self.bos_token,
            "between_documents": between if self.n_documents > 1 else None,
            "part": self.part or "all",
            "ids_sha256": ids.hexdigest(),
        }
