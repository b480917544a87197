"""Texts out of datasets, by a library that is made up."""

from __future__ import annotations

import sys
import types

import pytest

from glu_probe.errors import (
    BadOption,
    MissingLibrary,
    TextTooShort,
    TextUnreadable,
)
from glu_probe.text.texts import read_texts


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
    with pytest.raises(BadOption, match=r"dataset_characters is 0\. Give a whole number of at least 1"):
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
