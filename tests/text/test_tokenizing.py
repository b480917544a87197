"""From texts to sequences: what stands at the beginning, between documents and at the end."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from glu_probe.errors import (
    BadOption,
    NoTokenizer,
    TextTooShort,
)
from glu_probe.text.texts import read_texts
from glu_probe.text.tokenizing import tokenize

from .made_tokenizers import PLAIN, WITH_BOS, byte_tokenizer, docs, ids_of, text_of, word_tokenizer


def test_no_token_is_added_where_the_tokenizer_adds_none():
    """Though it has a BOS token by name."""
    tokens = tokenize(docs(text_of(*range(10))), PLAIN, length=4)
    assert ids_of(tokens) == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
    assert (tokens.has_bos, tokens.bos_token, tokens.bos_ids) == (False, None, ())
    assert (tokens.n_tokens, tokens.n_documents, tokens.left_out) == (10, 1, 0)
    assert all(ids.dtype == torch.int64 for ids in tokens.sequences)


def test_every_sequence_begins_as_the_tokenizer_would():
    tokens = tokenize(docs(text_of(*range(10))), WITH_BOS, length=4)
    assert ids_of(tokens) == [[1, 4, 5, 6], [1, 7, 8, 9], [1, 10, 11, 12]]
    assert (tokens.has_bos, tokens.bos_token, tokens.bos_ids) == (True, "<s>", (1,))
    assert (tokens.n_tokens, tokens.left_out) == (9, 1)


@pytest.mark.parametrize(
    ("template", "bos"), [("<g> <s> $A", [3, 1]), ("<s> $A </s>", [1]), ("$A </s>", []), ("<g> $A", [3])]
)
def test_what_a_tokenizer_puts_around_a_text(template, bos):
    """Two leading tokens are kept together; one at the end is not added."""
    tokens = tokenize(docs(text_of(0, 1, 2, 3)), word_tokenizer(template=template), length=len(bos) + 2)
    assert ids_of(tokens) == [[*bos, 4, 5], [*bos, 6, 7]]
    assert tokens.bos_token == ("".join({1: "<s>", 3: "<g>"}[i] for i in bos) or None)


def test_bos_of_a_tokenizer_that_cannot_read_english():
    inner = Tokenizer(models.BPE({"<s>": 0, "x": 1}, []))  # leaves out what it does not know
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")
    assert ids_of(tokenize(docs("nothing", "xxx"), tokenizer, pack=False)) == [[0, 1, 1, 1]]
    with pytest.raises(TextTooShort):
        tokenize(docs("nothing"), tokenizer)


def test_documents_are_joined_by_the_end_token():
    tokens = tokenize(docs(text_of(0, 1, 2), text_of(3), text_of(4, 5)), WITH_BOS, length=5)
    assert ids_of(tokens) == [[1, 4, 5, 6, 2], [1, 7, 2, 8, 9]]
    assert tokens.words()["between_documents"] == "</s>"
    assert tokens.n_documents == 3


def test_documents_are_joined_by_newlines_without_an_end_token():
    tokenizer = byte_tokenizer()
    tokens = tokenize(docs("The first.", "The second.", "Third."), tokenizer, length=7)
    stream = [i for ids in ids_of(tokens) for i in ids]
    assert tokenizer.decode(stream) == "The first.\n\nThe second.\n\nThird."[: len(tokenizer.decode(stream))]
    assert len(stream) + tokens.left_out == len(tokenizer("The first.\n\nThe second.\n\nThird.")["input_ids"])
    assert tokens.words()["between_documents"] == "two newlines"
    assert tokens.eos_token is None


def test_documents_apart():
    tokens = tokenize(docs(text_of(0, 1, 2), text_of(3), text_of(4, 5)), WITH_BOS, length=3, pack=False)
    assert ids_of(tokens) == [[1, 4, 5], [1, 8, 9]]
    assert tokens.left_out == 2
    assert tokens.words()["between_documents"] == "a new sequence"
    assert tokens.eos_token is None


@pytest.mark.parametrize("pack", [True, False])
def test_a_limit_of_tokens(pack):
    documents = docs(text_of(*range(6)), text_of(*range(10, 20)))
    whole = ids_of(tokenize(documents, WITH_BOS, length=5, pack=pack))
    limited = tokenize(documents, WITH_BOS, length=5, pack=pack, tokens=10)
    assert limited.n_tokens == 10
    assert ids_of(limited)[:2] == whole[:2]
    assert ids_of(limited)[2] == whole[2][: len(ids_of(limited)[2])]
    assert ids_of(tokenize(documents, WITH_BOS, length=5, pack=pack, tokens=1000)) == whole
    assert ids_of(tokenize(documents, WITH_BOS, length=5, pack=pack, tokens=2)) == [[1, 4, 5]]


def test_a_limit_does_not_change_the_tokens_of_a_long_text():
    """Only the beginning of the text is tokenized then."""
    tokenizer = byte_tokenizer()
    documents = docs(read_texts()[0].text * 3)
    whole = tokenize(documents, tokenizer, length=64)
    for limit in (2, 100, 1001, 20_000):
        limited = tokenize(documents, tokenizer, length=64, tokens=limit)
        assert limited.n_tokens in (limit, limit - 1)
        joined = torch.cat(limited.sequences)
        assert torch.equal(joined, torch.cat(whole.sequences)[: len(joined)])


def test_a_limit_where_tokens_are_long():
    tokens = tokenize(docs(" ".join(["w1" + " " * 200] * 3000)), PLAIN, length=8, tokens=1000)
    assert tokens.n_tokens == 1000


def test_truncation_and_padding_of_a_tokenizer_file_are_not_used():
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    assert ids_of(tokenize(docs(text_of(*range(6))), tokenizer, length=4)) == [[4, 5, 6, 7], [8, 9]]


def test_nothing_is_said_about_texts_longer_than_the_model(capsys, caplog):
    tokenize(docs(text_of(*range(30))), PLAIN, length=4)
    assert capsys.readouterr() == ("", "")
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1}, "^length is 1. Give a whole number of at least 2$"),
        ({"length": 2}, "^length is 2, which leaves 1 for text after the tokenizer's leading <s>. Give at least 3$"),
        ({"tokens": 0}, "^tokens is 0. Give a whole number of at least 2$"),
        ({"tokens": 1}, "^tokens is 1. Give a whole number of at least 2$"),
        (
            {"length": 9, "max_length": 8},
            r"^length is 9, but the model has only 8 positions\. Give a length of at most 8$",
        ),
    ],
)
def test_options_that_mean_nothing(options, message):
    with pytest.raises(BadOption, match=message):
        tokenize(docs("w1 w2 w3"), WITH_BOS, **options)
    assert tokenize(docs("w1 w2 w3"), WITH_BOS, length=8, max_length=8).n_tokens == 3


def test_too_little_text():
    for documents in (docs("w1"), docs("w1", "w2")):
        with pytest.raises(TextTooShort, match=r"^text 1(, text 2)?: the text is shorter than 2 tokens") as caught:
            tokenize(documents, WITH_BOS, pack=False)
        assert caught.value.exit_code == 2
    with pytest.raises(TextTooShort, match="there are no documents"):
        tokenize([], WITH_BOS)


def test_no_tokenizer():
    with pytest.raises(NoTokenizer, match=r"there is no tokenizer.*Looked for tokenizer.json, tokenizer.model"):
        tokenize(docs("a b"), None)
