"""Sequences in batches and parts: every token once, in order, and in words for provenance."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glu_probe.errors import (
    BadOption,
    TextTooShort,
)
from glu_probe.text.tokenizing import tokenize

from .made_tokenizers import PLAIN, WITH_BOS, docs, ids_of, text_of

STREAMS = st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=30), min_size=1, max_size=4)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    streams=STREAMS,
    length=st.integers(3, 12),
    limit=st.none() | st.integers(2, 60),
    bos=st.booleans(),
    max_tokens=st.integers(1, 40),
    seed=st.integers(0, 5),
    share=st.floats(0.05, 0.95),
    k=st.integers(2, 4),
)
def test_sequences_are_the_stream_and_batches_and_parts_are_the_sequences(
    streams, length, limit, bos, max_tokens, seed, share, k
):
    expected = [i + 4 for number, stream in enumerate(streams) for i in [*([-2] if number else []), *stream]][:limit]
    documents = docs(*(text_of(*stream) for stream in streams))
    if len(expected) < 2:
        with pytest.raises(TextTooShort):
            tokenize(documents, WITH_BOS if bos else PLAIN, length=length, tokens=limit)
        return
    tokens = tokenize(documents, WITH_BOS if bos else PLAIN, length=length, tokens=limit)
    assert not bos or all(ids[0] == 1 for ids in tokens.sequences)
    joined = [i for ids in ids_of(tokens) for i in ids[bos:]]
    assert joined == expected[: len(joined)]
    assert len(joined) == tokens.n_tokens == len(expected) - tokens.left_out
    assert tokens.left_out <= 1
    assert all(len(ids) == length for ids in tokens.sequences[:-1])
    assert 2 <= len(tokens.sequences[-1]) - bos <= length - bos

    batches = list(tokens.batches(max_tokens))
    assert sorted(i for indices, _ in batches for i in indices) == list(range(len(tokens.sequences)))
    for indices, ids in batches:
        assert ids.tolist() == [tokens.sequences[i].tolist() for i in indices]
        assert indices == sorted(indices)
        assert ids.numel() <= max_tokens or len(indices) == 1
    assert [ids.shape[1] for _, ids in batches] == sorted((ids.shape[1] for _, ids in batches), reverse=True)

    for how, needed in ((lambda: tokens.split(share, seed), 2), (lambda: tokens.split_every(k), k)):
        if len(tokens.sequences) < needed:
            with pytest.raises(TextTooShort, match="too few to be split like this"):
                how()
            continue
        parts = how()
        places = [[next(i for i, s in enumerate(tokens.sequences) if s is ids) for ids in p.sequences] for p in parts]
        assert sorted(places[0] + places[1]) == list(range(len(tokens.sequences)))
        assert all(place == sorted(place) != [] for place in places)
        assert [ids_of(part) for part in how()] == [ids_of(part) for part in parts]


def test_the_size_and_the_names_of_parts():
    tokens = tokenize(docs(text_of(*range(40))), PLAIN, length=4)
    first, second = tokens.split(0.7, seed=3)
    assert (len(first.sequences), len(second.sequences)) == (7, 3)
    assert first.part == "split with share 0.7 and seed 3, first part"
    assert ids_of(tokens.split(0.7, seed=4)[0]) != ids_of(first)
    rest, every = tokens.split_every(4)
    assert ids_of(every) == [ids_of(tokens)[3], ids_of(tokens)[7]]
    assert every.words()["part"] == "split at every sequence of 4, second part"
    assert rest.split(0.5)[1].part.startswith("split at every sequence of 4, first part; split with share 0.5")
    assert rest.words()["ids_sha256"] != tokens.words()["ids_sha256"]
    assert rest.text_sha256 == tokens.text_sha256
    for how, message in (
        (lambda: tokens.split(0), "share is 0; it must lie between 0 and 1"),
        (lambda: tokens.split(1.5), "share is 1.5"),
        (lambda: tokens.split_every(1), "k is 1. Give a whole number of at least 2"),
        (lambda: tokens.batches(0), "max_tokens is 0. Give a whole number of at least 1"),
    ):
        with pytest.raises(BadOption, match=message):
            how()


def test_words_for_provenance():
    text = text_of(*range(10))
    tokens = tokenize(docs(text), WITH_BOS, length=6)
    words = tokens.words()
    assert json.loads(json.dumps(words)) == words
    assert words["text_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert words | {"tokens": 10, "sequences": 2, "sequence_length": 6, "documents": 1, "vocabulary": 44} == words
    assert words["bos"] == "before every sequence, as this tokenizer adds it"
    assert (words["bos_token"], words["part"], words["tokens_left_out"]) == ("<s>", "all", 0)
    assert words == tokenize(docs(text), WITH_BOS, length=6).words()
    assert tokenize(docs(text), PLAIN).words()["bos"] == "none: this tokenizer adds none"
    assert tokenize(docs(text), PLAIN).words()["between_documents"] is None
    many = tokenize(docs(*["w1"] * 30), PLAIN).words()
    assert many["documents"] == 30
    assert len(many["document_names"]) == 20
