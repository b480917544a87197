"""What a user calls text: files, directories, lists, standard input; and what is refused."""

from __future__ import annotations

import io
import os
import re
import sys

import pytest

from glu_probe.errors import (
    LFSPointer,
    PathNotFound,
    TextTooShort,
    TextUnreadable,
    Unreadable,
)
from glu_probe.text.documents import Document
from glu_probe.text.texts import read_texts


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
    with pytest.raises(TextTooShort, match=r"^standard input: there is no text in it\. Give a text with words in it$"):
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
