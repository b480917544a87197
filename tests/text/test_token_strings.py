"""Tokens as strings: leading spaces and single bytes survive, whatever the vocabulary's spelling."""

from __future__ import annotations

import pytest

import glu_probe as gp
from glu_probe.errors import NoTokenizer
from glu_probe.text.token_strings import TokenStrings, token_strings

from . import tiny_models
from .made_tokenizers import byte_tokenizer, gguf_with_tokenizer


def quoted(pieces: list) -> list[str]:
    strings = TokenStrings.of(pieces)
    return [strings.quoted(token) for token in range(len(strings))]


def test_byte_level():
    pieces = ["the", "Ġthe", "Ċ", "Ã©", "âĢ", "<|im_start|>", "<｜begin▁of▁sentence｜>", "ĠG", "ĠĊ"]
    assert quoted(pieces) == [
        "'the'", "' the'", r"'\n'", "'é'", r"b'\xe2\x80'", "'<|im_start|>'", "'<｜begin▁of▁sentence｜>'", "' G'", r"' \n'",
    ]  # fmt: skip


def test_sentencepiece():
    pieces = ["▁the", "the", "<0x0A>", "<0xE2>", "▁", "▁▁", "Ġ", "Ġi", "<s>"]  # Ġ is a letter of Maltese
    assert quoted(pieces) == ["' the'", "'the'", r"'\n'", r"b'\xe2'", "' '", "'  '", "'Ġ'", "'Ġi'", "'<s>'"]


def test_plain_words():
    assert quoted(["the", "##ing", "it's"]) == ["'the'", "'##ing'", '"it\'s"']


def test_every_byte_of_a_byte_level_vocabulary():
    tokenizer = byte_tokenizer()
    strings = token_strings(None, tokenizer)
    assert strings.spelling == "bytes"
    single = {piece: token for token, piece in enumerate(strings.pieces) if len(piece) == 1}
    assert {eval(strings.quoted(token)) for token in single.values()} == {
        bytes([byte]).decode() if byte < 128 else bytes([byte]) for byte in range(256)
    }
    for text in (" harbour", "é", "\n"):  # what the tokenizer itself makes of them
        pieces = [eval(strings.quoted(token)) for token in tokenizer.encode(text, add_special_tokens=False)]
        assert b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces) == text.encode()


def test_from_the_files_of_a_model(tmp_path):
    directory = tiny_models.save(tmp_path / "tiny", "llama")
    strings = token_strings(gp.open_checkpoint(directory))
    known = tiny_models.tokens().get_vocab()
    assert [strings.pieces[token] for token in known.values()] == list(known)
    gguf = token_strings(_GGUF(gguf_with_tokenizer(tmp_path / "tiny.gguf")))
    assert gguf.pieces[-2:] == ["<bos>", "<eos>"]
    assert len(gguf) == len(known) + 2
    assert (gguf.spelling, gguf.quoted(gguf.pieces.index("Ġt"))) == ("bytes", "' t'")


class _GGUF:
    """A checkpoint as far as it is asked."""

    def __init__(self, path):
        from glu_probe.checkpoint.gguf import GGUFFile

        self.token_pieces = lambda: GGUFFile(path).strings("tokenizer.ggml.tokens")


def test_a_model_without_a_tokenizer(llama):
    with pytest.raises(NoTokenizer, match="no tokenizer files in this directory"):
        token_strings(gp.open_checkpoint(llama))
