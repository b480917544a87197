"""The tokenizer of a model: from its directory, its GGUF file, the hub; and what is said where there is none."""

from __future__ import annotations

import json

import pytest

from glu_probe.checkpoint.ref import parse_ref
from glu_probe.errors import (
    GatedRepo,
    GluProbeError,
    NotCached,
    NoTokenizer,
    PathNotFound,
    RepoNotFound,
)
from glu_probe.text.tokenizers import load_tokenizer
from glu_probe.text.tokenizing import tokenize

from .made_tokenizers import WITH_BOS, docs, gguf_with_tokenizer, ids_of


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
