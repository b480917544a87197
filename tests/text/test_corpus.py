"""Texts, tokenizers built on the spot, and the sequences made of them. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from glu_probe.checkpoint.ref import parse_ref
from glu_probe.errors import (
    BadOption,
    GatedRepo,
    GluProbeError,
    LFSPointer,
    MissingLibrary,
    NotCached,
    NoTokenizer,
    PathNotFound,
    RepoNotFound,
    TextTooShort,
    TextUnreadable,
    Unreadable,
)
from glu_probe.text.corpus import Document, load_tokenizer, read_texts, tokenize

WORDS = [f"w{i}" for i in range(40)]


def word_tokenizer(*, template: str | None = None, eos: bool = True) -> PreTrainedTokenizerFast:
    """One token a word: <unk> 0, <s> 1, </s> 2, <g> 3, w0 4, w1 5, ...; `template` is what goes around a text."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "<g>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        special = [(word, vocabulary[word]) for word in ("<s>", "</s>", "<g>")]
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    ends = {"eos_token": "</s>"} if eos else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", unk_token="<unk>", additional_special_tokens=["<g>"],
        model_max_length=8, **ends,
    )  # fmt: skip


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 300 tokens, no special ones."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator([read_texts()[0].text[:4000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner)


PLAIN, WITH_BOS = word_tokenizer(), word_tokenizer(template="<s> $A")


def text_of(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def docs(*texts: str) -> list[Document]:
    return read_texts(list(texts))


def ids_of(tokens) -> list[list[int]]:
    return [ids.tolist() for ids in tokens.sequences]


# -- texts --------------------------------------------------------------------------------------


def test_the_bundled_sample():
    [sample] = read_texts()
    assert sample.name == "sample"
    assert 3000 <= len(sample.text.split()) <= 3500
    assert sample.text.isascii()
    paragraphs = sample.text.rstrip("\n").split("\n\n")
    assert len(paragraphs) > 40
    assert not any("\n" in paragraph for paragraph in paragraphs)
    assert len(set(paragraphs)) == len(paragraphs)


@pytest.mark.parametrize("typed", [str, lambda path: path])
def test_a_file(tmp_path, typed):
    path = tmp_path / "any.name"
    path.write_bytes(b"\xef\xbb\xbfGr\xc3\xbc\xc3\x9fe\r\nund\rmehr\n")
    assert read_texts(typed(path)) == [Document("any.name", "Grüße\nund\nmehr\n")]


def test_a_file_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("one")
    assert read_texts("~/a.txt")[0].text == "one"


def test_a_directory_in_natural_order(tmp_path):
    for name in ("part10.txt", "part2.txt", "part1.MD", "b/3.txt", "b/20.md", "x.json", ".hidden.txt", ".git/a.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "blank.txt").write_text(" \n")
    found = read_texts(tmp_path)
    assert [document.name for document in found] == ["b/3.txt", "b/20.md", "part1.MD", "part2.txt", "part10.txt"]
    assert [document.text for document in found] == [document.name for document in found]


def test_a_list_of_strings():
    assert read_texts(["one", "two "]) == [Document("text 1", "one"), Document("text 2", "two ")]
    assert read_texts(("one",)) == [Document("text 1", "one")]


class NoBuffer(io.StringIO):
    """Like the standard input of some notebooks."""


@pytest.mark.parametrize("stream", [io.TextIOWrapper(io.BytesIO("a\r\nß".encode()), "ascii"), NoBuffer("a\nß")])
def test_standard_input(monkeypatch, stream):
    monkeypatch.setattr(sys, "stdin", stream)
    assert read_texts("-") == [Document("standard input", "a\nß")]


@pytest.mark.parametrize("raw", [b"", b" \n "])
def test_empty_standard_input(monkeypatch, raw):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    with pytest.raises(TextTooShort, match=r"^standard input: there is no text in it$"):
        read_texts("-")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(TextTooShort):
        read_texts("-")


@pytest.mark.parametrize("typed", ["nope.txt", "no/such", "~no_such_user_here/x", "x" * 5000, "a\0b", "Some text.\n"])
def test_a_path_that_does_not_exist(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PathNotFound, match=r"a text itself goes into a list: \[text\]") as caught:
        read_texts(typed)
    assert str(tmp_path / typed) in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_empty_path():
    with pytest.raises(PathNotFound, match=r"^'': there is no such file or directory"):
        read_texts("")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"Gr\xfc\xdfe", r"this is not UTF-8: byte 0xfc at offset 2\. Save it as UTF-8"),
        (b"\xef\xbb\xbfab\xff", "byte 0xff at offset 5"),
        (b"ab\xc3", "byte 0xc3 at offset 2"),
        ("text".encode("utf-16"), "this is UTF-16 text, or not text at all"),
        (b"text \0 text", "this is a binary file, not text. Give a plain text file in UTF-8"),
        (b"GGUF\3\0\0\0", "this is a GGUF file, not text"),
        (b"%PDF-1.7\n", "this is a PDF file, not text"),
        (b"PK\3\4....", "this is a zip archive"),
        (b"\x1f\x8b\x08....", "this is a gzip archive"),
        (b"\x08\0\0\0\0\0\0\0{}      ", "this is a safetensors file"),
    ],
)
def test_what_is_not_text(tmp_path, raw, message):
    path = tmp_path / "a.txt"
    path.write_bytes(raw)
    for source in (path, tmp_path):
        with pytest.raises(TextUnreadable, match=f"^{re.escape(str(path))}: .*{message}") as caught:
            read_texts(source)
        assert caught.value.exit_code == 2


def test_a_git_lfs_pointer(tmp_path):
    (tmp_path / "a.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(LFSPointer):
        read_texts(tmp_path / "a.txt")


def test_nothing_to_read(tmp_path):
    with pytest.raises(TextTooShort, match=f"^{tmp_path}: there is no .txt or .md file in this directory or below it"):
        read_texts(tmp_path)
    (tmp_path / "a.txt").write_text("\n")
    with pytest.raises(TextTooShort, match=f"^{tmp_path}: all 1 text files are empty"):
        read_texts(tmp_path)
    with pytest.raises(TextTooShort, match=f"^{tmp_path}/a.txt: there is no text in it"):
        read_texts(tmp_path / "a.txt")
    with pytest.raises(TextTooShort, match="the list of texts is empty"):
        read_texts([])
    with pytest.raises(TextTooShort, match="text 2 of the list: there is no text in it"):
        read_texts(["a", " "])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (["a", 3], "text 2 of the list: a string is expected, found a int"),
        (["ab\ud800"], "text 1 of the list: character 2 is half of a surrogate pair"),
        (b"text", "a text cannot be a bytes. Give a path, a list of strings"),
        (7, "a text cannot be a int"),
    ],
)
def test_what_cannot_be_a_text(source, message):
    with pytest.raises(TextUnreadable, match=message):
        read_texts(source)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a")
    path.chmod(0)
    with pytest.raises(Unreadable):
        read_texts(path)


def test_a_directory_that_cannot_be_listed(tmp_path, monkeypatch):
    def walk(top, onerror):
        onerror(PermissionError(13, "Permission denied", str(top)))
        yield from ()

    monkeypatch.setattr(os, "walk", walk)
    with pytest.raises(Unreadable, match=f"^{tmp_path}: the directory cannot be listed: Permission denied"):
        read_texts(tmp_path)


# -- datasets -----------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A `datasets` library whose only dataset is `hub.rows`; `hub.asked` is how it was asked for."""
    fake = types.ModuleType("datasets")
    fake.rows, fake.asked, fake.read = [{"text": "one"}, {"text": "  "}, {"text": None}, {"text": "two"}], None, 0

    def load_dataset(name, config, *, split, streaming):
        fake.asked = name, config, split, streaming
        if isinstance(fake.rows, Exception):
            raise fake.rows

        def rows():
            for row in fake.rows:
                fake.read += 1
                yield row

        return rows()

    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("hf:org/name", ("org/name", None, "train", True)),
        ("hf:name:config", ("name", "config", "train", True)),
        ("hf:org/name@test", ("org/name", None, "test", True)),
        ("hf:org/name:c-1.v@validation#text", ("org/name", "c-1.v", "validation", True)),
        ("hf:org/name#text", ("org/name", None, "train", True)),
    ],
)
def test_a_dataset(hub, typed, asked):
    found = read_texts(typed)
    assert hub.asked == asked
    assert [document.text for document in found] == ["one", "two"]
    assert [document.name for document in found] == [f"{asked[0]} row 0", f"{asked[0]} row 3"]


def test_a_dataset_is_read_only_as_far_as_needed(hub):
    hub.rows = [{"text": "0123456789"}] * 100
    assert len(read_texts("hf:a", dataset_characters=25)) == 3
    assert hub.read == 3
    with pytest.raises(BadOption, match="dataset_characters is 0; at least 1 is needed"):
        read_texts("hf:a", dataset_characters=0)


def test_the_column_of_a_dataset(hub):
    hub.rows = [{"id": 1, "content": "only strings"}]
    assert read_texts("hf:a")[0].text == "only strings"
    hub.rows = [{"title": "t", "text": "the text", "n": 2}]
    assert read_texts("hf:a")[0].text == "the text"
    assert read_texts("hf:a#title")[0].text == "t"
    for typed, message in (
        ("hf:a#body", r"^hf:a#body: there is no column 'body'\. Name one with #column; there are 'title', 'text', 'n'"),
        ("hf:a#n", "column 'n' holds a int in row 0, not text. Name another with #column"),
    ):
        with pytest.raises(TextUnreadable, match=message):
            read_texts(typed)
    hub.rows = [{"question": "q", "answer": "a"}]
    with pytest.raises(TextUnreadable, match="2 columns hold strings and none is called 'text'"):
        read_texts("hf:a")


def test_what_goes_wrong_with_a_dataset(hub):
    with pytest.raises(
        BadOption, match=r"'hf:' does not name a dataset\. Write hf:NAME\[:config\]\[@split\]\[#column\]"
    ):
        read_texts("hf:")
    hub.rows = []
    with pytest.raises(TextTooShort, match="hf:a: there is no text in it"):
        read_texts("hf:a")
    hub.rows = ValueError('Bad split: x. Available splits: ["train"]\nmore')
    with pytest.raises(
        TextUnreadable, match=r'cannot be read \(ValueError: Bad split: x. Available splits: \["train"\]\)'
    ):
        read_texts("hf:a@x")
    hub.rows = ConnectionError("https://secret")
    with pytest.raises(
        TextUnreadable, match=r"^hf:a: the dataset cannot be read \(ConnectionError\)\. Check"
    ) as caught:
        read_texts("hf:a")
    assert "secret" not in str(caught.value)


def test_without_the_library_for_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        MissingLibrary, match=r'^hf:a: .*not installed. Run `pip install "glu-probe\[datasets\]"`'
    ) as caught:
        read_texts("hf:a")
    assert caught.value.exit_code == 3


# -- sequences ----------------------------------------------------------------------------------


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
        ({"length": 1}, "^length is 1; at least 2 is needed$"),
        ({"length": 2}, "^length is 2, which leaves 1 for text after the tokenizer's leading <s>. Give at least 3$"),
        ({"tokens": 0}, "^tokens is 0; at least 2 is needed$"),
        ({"tokens": 1}, "^tokens is 1; at least 2 is needed$"),
        ({"length": 9, "max_length": 8}, "^length is 9, but the model has only 8 positions$"),
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
        (lambda: tokens.split_every(1), "k is 1; at least 2 is needed"),
        (lambda: tokens.batches(0), "max_tokens is 0; at least 1 is needed"),
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


# -- tokenizers ---------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A directory with the files of WITH_BOS."""
    WITH_BOS.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_tokenizer_from_a_directory(saved):
    (saved / "model.safetensors").write_bytes(b"")
    for ref in (saved, str(saved), parse_ref(saved), saved / "tokenizer.json"):
        tokenizer = load_tokenizer(ref)
        assert ids_of(tokenize(docs("w0 w1"), tokenizer)) == [[1, 4, 5]]
    assert load_tokenizer(saved).name_or_path == "tiny"
    assert tokenize(docs("w0 w1"), load_tokenizer(saved / "model.safetensors")).tokenizer == "model"


def test_code_of_a_tokenizer_is_not_run(saved, monkeypatch):
    import transformers

    seen = []

    def from_pretrained(place, **options):
        seen.append(options)
        return WITH_BOS

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    load_tokenizer(saved)
    load_tokenizer("org/name@v1")
    (saved / "m.gguf").write_bytes(b"GGUF")
    load_tokenizer(saved / "m.gguf")
    assert [options.pop("trust_remote_code") for options in seen] == [False] * 3
    assert seen == [{}, {"revision": "v1"}, {"gguf_file": "m.gguf"}]


def test_a_tokenizer_from_a_gguf_file(tmp_path):
    path = gguf_with_tokenizer(tmp_path / "tiny.gguf")
    for ref in (path, tmp_path):
        tokenizer = load_tokenizer(ref)
        text = "The harbour town"
        assert tokenizer.decode(tokenize(docs(text), tokenizer).sequences[0][1:]) == text
        assert tokenize(docs(text), tokenizer).bos_token == "<bos>"
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(NoTokenizer, match=r"no tokenizer files in this directory, and which of 2 \.gguf files"):
        load_tokenizer(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(NoTokenizer, match=r"other.gguf: the tokenizer cannot be loaded .* Download the file again"):
        load_tokenizer(tmp_path / "other.gguf")


def gguf_with_tokenizer(path):
    """A GGUF file with a byte-level BPE vocabulary and one tensor."""
    import gguf
    import numpy as np

    inner = json.loads(byte_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = [*inner["vocab"], "<bos>", "<eos>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 2) + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges([" ".join(pair) for pair in inner["merges"]])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(True)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_model_without_a_tokenizer(tmp_path, llama):
    for directory in (tmp_path, llama):
        with pytest.raises(
            NoTokenizer, match=f"^{directory}: there are no tokenizer files in this directory. Looked for"
        ) as caught:
            load_tokenizer(directory)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("model_type", ["qwen2", "gemma3_text", "t5", "llama"])
def test_an_empty_tokenizer_is_refused(tmp_path, model_type):
    """transformers makes one without a word for some families whose vocabulary is absent."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(NoTokenizer, match=r"the tokenizer (has no vocabulary|cannot be loaded)"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer(saved):
    (saved / "tokenizer.json").write_text("{")
    with pytest.raises(NoTokenizer, match=f"^{saved}: the tokenizer cannot be loaded"):
        load_tokenizer(saved)


def hub_error(kind):
    import httpx
    from huggingface_hub import errors

    request = httpx.Request("GET", "https://hub/secret")
    return getattr(errors, kind)("secret", response=httpx.Response(403, request=request))


@pytest.mark.parametrize(
    ("cause", "wanted"), [("GatedRepoError", GatedRepo), ("RepositoryNotFoundError", RepoNotFound), (None, NoTokenizer)]
)
def test_a_repository_that_gives_no_tokenizer(monkeypatch, cause, wanted):
    import transformers

    def from_pretrained(place, **options):
        if cause is None:
            raise OSError("it does not appear to have a file named tokenizer.json") from hub_error(
                "RemoteEntryNotFoundError"
            )
        raise OSError("secret") from hub_error(cause)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(GluProbeError, match=r"^org/name: ") as caught:
        load_tokenizer("org/name")
    assert type(caught.value) is wanted
    assert "secret" not in str(caught.value)


def test_a_repository_that_is_not_in_the_cache(monkeypatch, tmp_path):
    import transformers
    from huggingface_hub import constants, errors

    def from_pretrained(place, **options):
        raise OSError("We couldn't connect") from errors.LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(NotCached, match=r"^org/name: the hub is offline"):
        load_tokenizer("org/name")


def test_a_reference_that_is_no_path_and_no_repository():
    with pytest.raises(PathNotFound):
        load_tokenizer("no/such/dir")


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("hf://org/name@v1/model.safetensors", {"revision": "v1"}),
        ("hf://org/name/m-Q4.gguf", {"revision": "main", "gguf_file": "m-Q4.gguf"}),
    ],
)
def test_the_tokenizer_of_one_file_of_a_repository(monkeypatch, typed, asked):
    import transformers

    asked_for = []

    def from_pretrained(place, **options):
        asked_for.append((place, options))
        raise ValueError("seen")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(NoTokenizer):
        load_tokenizer(typed)
    assert asked_for == [("org/name", {"trust_remote_code": False, **asked})]


def test_a_url_has_no_tokenizer():
    with pytest.raises(
        NoTokenizer, match="a tokenizer is read from a directory or a hub repository, and this is a URL"
    ):
        load_tokenizer("https://host/m/model.safetensors?key=secret")
