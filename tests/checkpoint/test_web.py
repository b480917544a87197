"""Models behind plain URLs, on a loopback server that lists nothing and answers 404 to what it does not have."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest
import torch
from huggingface_hub import constants

import glu_probe as gp
from glu_probe.checkpoint import web as web_module
from glu_probe.checkpoint.ref import parse_ref, public
from glu_probe.errors import (
    BadConfig,
    CannotWrite,
    FileChanged,
    LFSPointer,
    MissingShard,
    NeedsDownload,
    NotCached,
    NoTokenizer,
    NotRunnable,
    NotSafetensors,
    NoWeights,
    PathNotFound,
    ServerUnavailable,
    Truncated,
    UnsafeShardName,
)

from ..support import llama_tensors, write_llama
from .servers import COMMIT, Fault
from .test_files import INDEX, PARTS, write_index, write_shards
from .writers import (
    HTML,
    LFS_POINTER,
    assert_same_factors,
    assert_same_table,
    command_line,
    gguf_tensors,
    table,
    write_gguf,
)

TOKEN = "hf_thisIsTheSecretOfTheseTests"
SECRET = "thisIsTheSecretOfAUrl"
WIDE = {"d_mlp": 512, "d_model": 256, "layers": 3}
MODEL = "model.safetensors"


@pytest.fixture
def model(web, tmp_path):
    """A model on the server below /m; gives the directory it was made in."""
    web.roots["m"] = directory = write_llama(tmp_path / "local")
    return directory


@pytest.fixture
def wide(web, tmp_path):
    """The same, too large to be taken whole."""
    web.roots["m"] = directory = write_llama(tmp_path / "local", **WIDE)
    return directory


# -- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{url}/m/model.safetensors", "{url}/m", "{url}/m/"])
def test_one_file_and_its_directory(web, wide, form):
    ref = form.format(url=web.url)
    checkpoint = gp.open_checkpoint(ref)
    assert checkpoint.name == ("model" if ref.endswith(MODEL) else "m")
    needed = int(checkpoint.describe()["bytes"].sum())
    assert web.sent_of(MODEL) == 100_000
    web.forget()
    report, local = gp.probe(checkpoint, samples=2), gp.probe(wide, samples=2)
    assert needed <= web.sent_of(MODEL) <= 1.01 * needed
    for frame in ("layers", "neurons", "classes"):
        found, expected = getattr(report, frame), getattr(local, frame)
        pd.testing.assert_frame_equal(found.drop(columns="model"), expected.drop(columns="model"), check_exact=True)
    assert not list((wide.parent / "hf").rglob("*"))
    assert not list((wide.parent / "cache").rglob("*"))


def test_shards_beside_each_other(web, model):
    expected = table(model)
    write_shards(model)
    assert_same_table(f"{web.url}/m", expected)
    (model / PARTS[1]).unlink()
    with pytest.raises(PathNotFound, match=rf"^{web.url}/m/{PARTS[1]}: the server has no such file \(status 404\)"):
        gp.open_checkpoint(f"{web.url}/m")
    write_index(model, {"model.x": "../../secret.safetensors"})
    with pytest.raises(UnsafeShardName):
        gp.open_checkpoint(f"{web.url}/m")
    write_index(model, [])
    with pytest.raises(BadConfig, match=rf"{web.url}/m/{INDEX}: the index has no weight_map"):
        gp.open_checkpoint(f"{web.url}/m")


def test_names_that_need_quoting(web, model):
    odd = model.parent / "Gewichte übrig & mehr"
    model.rename(odd)
    web.roots["m"] = odd.parent
    (odd / MODEL).rename(odd / "a b+ü.safetensors")
    checkpoint = gp.open_checkpoint(f"{web.url}/m/Gewichte%20%C3%BCbrig%20%26%20mehr/a%20b%2B%C3%BC.safetensors")
    assert checkpoint.name == "a b+ü"
    assert_same_factors(checkpoint.ref, odd / "a b+ü.safetensors")


def test_gguf_and_its_parts(web, tmp_path):
    directory = web.roots["m"] = tmp_path / "local"
    directory.mkdir()
    write_gguf(directory / "one.gguf", gguf_tensors())
    assert_same_factors(f"{web.url}/m/one.gguf", directory / "one.gguf")
    write_gguf(directory / "m.gguf", gguf_tensors(), split=3)
    assert_same_factors(f"{web.url}/m/m-00002-of-00003.gguf", directory / "m-00001-of-00003.gguf")
    (directory / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(MissingShard, match=r"m-00003-of-00003\.gguf of 3 parts is absent"):
        gp.open_checkpoint(f"{web.url}/m/m-00001-of-00003.gguf")


@pytest.mark.parametrize("status", [403, 404])
def test_a_file_without_a_config(web, model, status):
    """Public storage often forbids to ask for what it does not have."""
    (model / "config.json").unlink()
    web.faulty = "config.json"
    if status == 403:
        (model / "config.json").write_text("{}")
        web.faults = [Fault(status=403)]
    checkpoint = gp.open_checkpoint(f"{web.url}/m/{MODEL}")
    assert "no config.json beside model.safetensors: family, activation and norm are not known" in checkpoint.notes


def test_what_is_not_there(web, model):
    with pytest.raises(NoWeights, match=rf"^{web.url}/nothing: there is no .safetensors"):
        gp.open_checkpoint(f"{web.url}/nothing")
    with pytest.raises(PathNotFound, match=rf"^{web.url}/m/other\.safetensors: the server has no such file"):
        gp.open_checkpoint(f"{web.url}/m/other.safetensors")
    web.stop()
    with pytest.raises(ServerUnavailable, match=r"the server failed 6 times \(ConnectError\)"):
        gp.open_checkpoint(f"{web.url}/m/{MODEL}")


@pytest.mark.parametrize(
    ("content", "kind"),
    [(HTML, NotSafetensors), (LFS_POINTER, LFSPointer), (b"", NotSafetensors)],
)
def test_what_is_something_else(web, model, content, kind):
    (model / MODEL).write_bytes(content)
    with pytest.raises(kind, match=rf"^{web.url}/m/{MODEL}: "):
        gp.open_checkpoint(f"{web.url}/m/{MODEL}")


def test_a_file_that_was_not_uploaded_whole(web, model):
    (model / MODEL).write_bytes((model / MODEL).read_bytes()[:-8])
    with pytest.raises(Truncated):
        gp.open_checkpoint(f"{web.url}/m")


def test_a_page_where_the_config_should_be(web, model):
    (model / "config.json").write_bytes(HTML)
    with pytest.raises(BadConfig, match=rf"^{web.url}/m/config\.json: this is not JSON but an HTML page"):
        gp.open_checkpoint(f"{web.url}/m")


# -- versions -----------------------------------------------------------------------------------


def test_a_file_that_changes_is_noticed(web, wide):
    checkpoint = gp.open_checkpoint(f"{web.url}/m/{MODEL}")
    write_llama(wide, **WIDE, seed=1)
    with pytest.raises(FileChanged, match=rf"^{web.url}/m/{MODEL}: the file on the server changed while it was read"):
        checkpoint.layer(0)


def test_a_file_of_another_size_is_noticed_without_versions(web, wide):
    web.versions = False
    checkpoint = gp.open_checkpoint(f"{web.url}/m/{MODEL}")
    assert set(checkpoint.provenance()["files"][0]) == {"name", "url", "bytes"}
    (wide / MODEL).write_bytes((wide / MODEL).read_bytes() + b"\0" * 8)
    with pytest.raises(FileChanged, match=r"it had [\d,]+ bytes and has [\d,]+"):
        checkpoint.layer(0)


def test_dates_serve_where_there_is_no_etag(web, wide):
    def dated(day: int) -> Fault:
        date = {"Last-Modified": f"Mon, 0{day} Jan 2024 00:00:00 GMT"}
        return Fault(declared=lambda headers: {k: v for k, v in headers.items() if k != "ETag"} | date)

    web.faults = [dated(1), dated(1), dated(2)]
    checkpoint = gp.open_checkpoint(f"{web.url}/m/{MODEL}")
    assert checkpoint.provenance()["files"][0]["last_modified"] == "Mon, 01 Jan 2024 00:00:00 GMT"
    with pytest.raises(FileChanged, match=r"it was 'Mon, 01 Jan .*' and is 'Mon, 02 Jan"):
        checkpoint.layer(0)
    assert not web.faults


# -- secrets ------------------------------------------------------------------------------------


def test_no_token_goes_to_a_server_that_is_not_the_hub(web, model, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    gp.probe(f"{web.url}/m", layers=[0], samples=2)
    assert web.requests
    assert {authorization for *_, authorization in web.requests} == {None}


def test_what_a_url_carries_is_sent_and_not_shown(web, model, capsys, tmp_path):
    ref = f"{web.url.replace('//', f'//user:{SECRET}@')}/m/{MODEL}?signature={SECRET}#{SECRET}"
    checkpoint = gp.open_checkpoint(ref)
    assert checkpoint.provenance()["ref"] == checkpoint.provenance()["url"] == f"{web.url}/m/{MODEL}"
    assert web.queries == {f"signature={SECRET}"}
    assert all(authorization.startswith("Basic ") for *_, authorization in web.requests)
    assert torch.equal(checkpoint.layer(0).key, gp.open_checkpoint(model).layer(0).key)
    out = tmp_path / "out"
    code, *said = command_line(
        capsys, "report", ref, "-o", out, "--layers", "0", "--samples", "2", "--no-figures", "--json"
    )
    assert code == 0
    assert SECRET not in "".join(said)
    for path in out.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()
    (model / MODEL).unlink()
    code, *said = command_line(capsys, "inspect", ref)
    assert code == 2
    assert "PathNotFound" in said[1]
    assert SECRET not in "".join(said)


def test_the_command_line_of_a_report_does_not_keep_secrets(monkeypatch):
    from glu_probe.cli import application, saving

    typed = ["inspect", f"https://u:{SECRET}@host/x.gguf?key={SECRET}", "-o", "x?y"]
    monkeypatch.setattr(application, "typed", typed)
    assert saving.command_line() == ["glu-probe", "inspect", "https://host/x.gguf", "-o", "x?y"]


# -- references ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "repo", "revision", "file"),
    [
        ("hf://org/name", "org/name", None, None),
        ("hf://org/name/", "org/name", None, None),
        ("hf://models/org/name", "org/name", None, None),
        ("HF://gpt2", "gpt2", None, None),
        ("hf://org/name@main", "org/name", "main", None),
        ("hf://org/name@feature/x", "org/name", "feature/x", None),
        ("hf://org/name@feature%2Fx/m.gguf", "org/name", "feature/x", "m.gguf"),
        ("hf://org/name@refs/pr/3", "org/name", "refs/pr/3", None),
        ("hf://org/name@refs/pr/3/sub/m.gguf", "org/name", "refs/pr/3", "sub/m.gguf"),
        ("hf://org/name@v1/model.safetensors", "org/name", "v1", "model.safetensors"),
        ("hf://org/name/sub/model.safetensors", "org/name", None, "sub/model.safetensors"),
        ("hf://gpt2/model.safetensors", "gpt2", None, "model.safetensors"),
        ("{hub}/org/name", "org/name", None, None),
        ("{hub}/org/name/tree/main", "org/name", "main", None),
        ("{hub}/org/name/tree/refs%2Fpr%2F3", "org/name", "refs/pr/3", None),
        ("{hub}/org/name/blob/v1/sub/m.gguf", "org/name", "v1", "sub/m.gguf"),
        ("{hub}/org/name/resolve/main/model.safetensors?download=true", "org/name", "main", "model.safetensors"),
        ("{hub}/gpt2/resolve/main/model.safetensors", "gpt2", "main", "model.safetensors"),
    ],
)
def test_references_to_the_hub(hub, typed, repo, revision, file):
    ref = parse_ref(typed.format(hub=hub.url))
    assert (ref.kind, ref.repo, ref.revision, ref.file) == ("hub", repo, revision, file)


@pytest.mark.parametrize(
    "typed",
    [
        "hf://", "hf://org/name/sub", "hf://datasets/org/name", "hf://spaces/name", "hf://org/name@", "hf://org/na..me",
        "hf://org/name/config.json", "{hub}/datasets/org/name", "{hub}/org/name/discussions/3", "{hub}/",
        "{hub}/org/name/blob/main/config.json", "https://", "https:///path", "http://host:99999/x", "https://ho st/x.gguf",
    ],
)  # fmt: skip
def test_references_that_mean_nothing(hub, typed):
    with pytest.raises(PathNotFound) as caught:
        gp.open_checkpoint(typed.format(hub=hub.url))
    assert caught.value.hint
    assert hub.requests == []


def test_a_url_of_the_hub_is_read_as_the_hub_s(hub, model, monkeypatch):
    hub.add("org/name", model)
    (model / "sub").mkdir()
    (model / MODEL).rename(model / "sub" / MODEL)
    (model / "config.json").rename(model / "sub" / "config.json")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    checkpoint = gp.open_checkpoint(f"{hub.url}/org/name/resolve/main/sub/{MODEL}")
    assert checkpoint.name == f"org/name@main/sub/{MODEL}"
    assert (checkpoint.provenance()["repository"], checkpoint.provenance()["commit"]) == ("org/name", COMMIT)
    assert checkpoint.model_type == "llama"
    assert torch.equal(checkpoint.layer(5).key, gp.open_checkpoint(model / "sub").layer(5).key)
    with pytest.raises(PathNotFound, match=r"the repository has no file 'other\.gguf'") as caught:
        gp.open_checkpoint("hf://org/name/other.gguf")
    assert f"sub/{MODEL}" in caught.value.hint


def test_public_forms():
    assert public("org/name@v1") == "org/name@v1"
    assert public("/a/path?b") == "/a/path?b"
    assert public("https://user:pw@host:8/x?y=z#w") == "https://host:8/x"
    assert public("https://[broken") == "a URL"


# -- downloads ----------------------------------------------------------------------------------


def cached(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_download_is_kept_and_found_again(web, wide, tmp_path):
    ref = f"{web.url}/m/{MODEL}"
    checkpoint = gp.open_checkpoint(ref, download=True)
    assert len(checkpoint.describe()) == 3
    assert cached(tmp_path) == []
    layer = checkpoint.layer(1)
    assert torch.equal(layer.key, gp.open_checkpoint(wide).layer(1).key)
    (path,) = cached(tmp_path)
    assert path.name == MODEL
    web.forget()
    checkpoint.layer(2)
    assert web.requests == []
    write_llama(wide, **WIDE, seed=1)  # another version: not that copy
    fresh = gp.open_checkpoint(ref, download=True).layer(1)
    assert torch.equal(fresh.key, gp.open_checkpoint(wide).layer(1).key)
    assert len(cached(tmp_path)) == 2


def test_a_copy_of_no_version_is_not_believed(web, wide, tmp_path):
    web.versions = False
    for seed in (0, 1):  # files of the same size
        write_llama(wide, **WIDE, seed=seed)
        layer = gp.open_checkpoint(f"{web.url}/m/{MODEL}", download=True).layer(1)
        assert torch.equal(layer.key, gp.open_checkpoint(wide).layer(1).key)
    assert len(cached(tmp_path)) == 1


def test_a_server_without_ranges(web, wide, tmp_path, capsys):
    web.ignore_ranges = True
    for ref in (f"{web.url}/m", f"{web.url}/m/{MODEL}"):
        with pytest.raises(NeedsDownload, match="the server does not send parts of files") as caught:
            gp.open_checkpoint(ref)
        assert "--download" in caught.value.hint
    assert cached(tmp_path) == []
    assert command_line(capsys, "inspect", f"{web.url}/m")[0] == 2
    code, out, _ = command_line(capsys, "inspect", f"{web.url}/m", "--download")
    assert code == 0
    assert "512" in out
    assert_same_table(f"{web.url}/m", table(wide), download=True)


def test_torch_files_are_downloaded_or_refused(web, model, tmp_path):
    expected = table(model)
    (model / MODEL).unlink()
    torch.save(llama_tensors(), model / "pytorch_model.bin")
    for ref in (f"{web.url}/m", f"{web.url}/m/pytorch_model.bin"):
        with pytest.raises(NeedsDownload, match="a PyTorch file cannot be read in parts"):
            gp.open_checkpoint(ref)
        assert_same_table(ref, expected, download=True)


def test_a_broken_download_leaves_nothing(web, wide, tmp_path, waits, monkeypatch):
    checkpoint = gp.open_checkpoint(f"{web.url}/m/{MODEL}", download=True)
    web.faults = [Fault(drop=1_000_000)] * 6
    with pytest.raises(ServerUnavailable, match=r"the server failed 6 times \(.*\); 1,000,000 bytes arrived"):
        checkpoint.layer(0)
    assert cached(tmp_path) == []
    web.faults = [Fault(drop=1_000_000), Fault(status=503)]
    checkpoint.layer(0)
    assert len(cached(tmp_path)) == 1

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(web_module.os, "replace", full)
    web.versions = False
    with pytest.raises(CannotWrite, match="No space left on device") as caught:
        gp.open_checkpoint(f"{web.url}/m/{MODEL}", download=True).layer(0)
    assert "GLU_PROBE_CACHE" in caught.value.hint
    assert len(cached(tmp_path)) == 1


def test_two_who_want_a_file_at_once_fetch_it_once(web, wide, tmp_path, monkeypatch):
    written = []
    write = web_module._write
    monkeypatch.setattr(web_module, "_write", lambda target, blocks: written.append(target) or write(target, blocks))
    web.faults = [Fault(stall=0.2)]
    url = f"{web.url}/m/{MODEL}"
    with ThreadPoolExecutor(2) as both:
        paths = list(both.map(lambda _: web_module.fetch_whole(url, url), range(2)))
    assert written == [paths[0]]
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == (wide / MODEL).read_bytes()


def test_a_cache_that_cannot_be_written(web, wide, tmp_path):
    (tmp_path / "cache").write_text("a file in its place")
    with pytest.raises(CannotWrite, match="the file cannot be kept") as caught:
        gp.open_checkpoint(f"{web.url}/m/{MODEL}", download=True).layer(0)
    assert "GLU_PROBE_CACHE" in caught.value.hint


def test_without_a_network(web, model, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotCached, match=r"the network may not be used \(HF_HUB_OFFLINE\)"):
        gp.open_checkpoint(f"{web.url}/m/{MODEL}")
    assert web.requests == []


def test_a_url_is_no_model_to_run(web, model):
    with pytest.raises((NotRunnable, NoTokenizer), match="this is a URL"):
        gp.probe_text(f"{web.url}/m", "a b c d e f", layers=[0])
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama"


def test_one_gguf_file_of_a_repository_is_run_as_such(hub, tmp_path, monkeypatch):
    import transformers

    from glu_probe.text import loading

    directory = tmp_path / "local"
    directory.mkdir()
    write_gguf(directory / "m.gguf", gguf_tensors())
    hub.add("org/name", directory)
    asked = []

    def from_pretrained(place, **options):
        asked.append((place, options["revision"], options["gguf_file"]))
        raise ValueError("seen")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(NotRunnable, match="seen"):
        loading._from_transformers(gp.open_checkpoint("hf://org/name@main/m.gguf"), torch.float32)
    assert asked == [("org/name", "main", "m.gguf")]
    web = gp.open_checkpoint(f"{hub.cdn.replace('127.0.0.1', 'localhost')}/cdn/org/name/main/m.gguf")
    with pytest.raises(NotRunnable, match="this is a URL"):
        loading._from_transformers(web, torch.float32)
