"""Repositories on the hub, against a loopback server that answers as the hub does and counts what it sends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

import glu_probe as gp
from glu_probe.errors import (
    AmbiguousFiles,
    CorruptHeader,
    GatedRepo,
    HubUnavailable,
    LFSPointer,
    MissingShard,
    NeedsDownload,
    NotCached,
    NotGGUF,
    NotSafetensors,
    RepoNotFound,
    RevisionNotFound,
    TrailingBytes,
    Truncated,
)

from ..support import llama_tensors, write_llama
from .servers import COMMIT, OLDER, FakeHub
from .test_files import PARTS, write_shards
from .writers import (
    HTML,
    LFS_POINTER,
    LFS_SIZE,
    assert_same_table,
    command_line,
    gguf_tensors,
    header_of,
    pack_header,
    table,
    write_gguf,
)

TOKEN = "hf_thisIsTheSecretOfTheseTests"
WIDE = {"d_mlp": 512, "d_model": 256, "layers": 3}  # 4.7 MB, so that headers are little of it


def go_offline(hub: FakeHub, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.forget()


# -- what moves ---------------------------------------------------------------------------------


def test_opening_and_describing_moves_headers_only(hub, tmp_path):
    directory = write_llama(tmp_path / "local", **WIDE)
    size = (directory / "model.safetensors").stat().st_size
    assert size > 4_000_000
    hub.add("org/name", directory)
    frame = gp.open_checkpoint("org/name").describe()
    assert hub.asked_for() == {"config.json", "model.safetensors"}
    assert hub.sent_of("model.safetensors") <= 100_000
    assert all(wanted for method, path, wanted, _ in hub.requests if path.endswith("/model.safetensors"))
    local = gp.open_checkpoint(directory).describe()
    assert frame.drop(columns="model").equals(local.drop(columns="model"))
    assert set(frame["model"]) == {"org/name"}
    assert sorted(path.name for path in (tmp_path / "hf").rglob("*") if path.is_symlink()) == ["config.json"]


def test_a_header_longer_than_the_first_look_is_read_whole(hub, tmp_path):
    directory = write_llama(tmp_path / "local", **WIDE)
    path = directory / "model.safetensors"
    header, data = header_of(path)
    path.write_bytes(pack_header({"__metadata__": {"long": "x" * 300_000}} | header, data))
    hub.add("org/name", directory)
    assert len(gp.open_checkpoint("org/name").describe()) == 3
    assert 300_000 < hub.sent_of("model.safetensors") < 310_000
    assert hub.sent_of("model.safetensors") == 8 + len(json.dumps({"__metadata__": {"long": "x" * 300_000}} | header))


def test_a_download_is_of_the_files_that_are_needed(hub, tmp_path):
    directory = write_llama(tmp_path / "local")
    expected = table(directory)
    write_shards(directory, index=True)
    # Layers 6 to 11 into a fourth file, which a run on layers 0 and 1 has no use for.
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    late = {name for name in index["weight_map"] if re.search(r"layers\.([6-9]|1\d)\.", name)}
    tensors = llama_tensors()
    save_file({name: tensors[name] for name in late}, directory / "late.safetensors")
    for part in PARTS:
        here = [name for name, owner in index["weight_map"].items() if owner == part and name not in late]
        save_file({name: tensors[name] for name in here}, directory / part)
    index["weight_map"] |= dict.fromkeys(late, "late.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "pytorch_model.bin").write_bytes(b"never asked for")
    hub.add("org/name", directory)
    assert_same_table("org/name", expected, download=True)
    assert hub.asked_for() == {"config.json", "model.safetensors.index.json", *PARTS, "late.safetensors"}
    cached = {path.name for path in (tmp_path / "hf").rglob("*") if path.is_symlink()}
    assert cached == {"config.json", "model.safetensors.index.json", *PARTS}
    hub.forget()
    assert_same_table("org/name", expected)  # from the cache
    assert hub.asked_for() == {"config.json", "late.safetensors"}
    assert hub.sent_of("config.json") == 0  # only asked whether it changed


def test_provenance_names_the_commit(hub, tmp_path):
    hub.add("org/name", write_llama(tmp_path / "new"), commit=COMMIT)
    hub.add("org/name", write_llama(tmp_path / "old", seed=1), ("v1", "feature/x"), commit=OLDER)
    for ref, commit, name in (
        ("org/name", COMMIT, "new"),
        ("org/name@main", COMMIT, "new"),
        ("org/name@v1", OLDER, "old"),
        ("org/name@feature/x", OLDER, "old"),
        (f"org/name@{OLDER}", OLDER, "old"),
    ):
        checkpoint = gp.open_checkpoint(ref)
        facts = checkpoint.provenance()
        assert (facts["repository"], facts["commit"], checkpoint.name) == ("org/name", commit, ref)
        size = (tmp_path / name / "model.safetensors").stat().st_size
        assert facts["files"][0]["name"] == "model.safetensors"
        assert facts["files"][0]["bytes"] == size
        assert torch.equal(checkpoint.layer(0).query, gp.open_checkpoint(tmp_path / name).layer(0).query)


def test_no_code_is_ever_asked_for(hub, tmp_path):
    directory = write_llama(tmp_path / "local", auto_map={"AutoConfig": "evil.EvilConfig"})
    for name in ("evil.py", "modeling_evil.py", "sub/evil.py"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("raise SystemExit(99)")
    hub.add("org/name", directory)
    gp.probe("org/name", layers=[0], samples=2)
    assert hub.asked_for() == {"config.json", "model.safetensors"}
    assert not list((tmp_path / "hf").rglob("*.py"))


def test_torch_files(hub, tmp_path):
    directory = write_llama(tmp_path / "local")
    expected = table(directory)
    (directory / "model.safetensors").unlink()
    torch.save(llama_tensors(), directory / "pytorch_model.bin")
    hub.add("org/name", directory)
    with pytest.raises(
        NeedsDownload, match=rf"org/name@{COMMIT}/pytorch_model.bin: a PyTorch file cannot be read in parts"
    ):
        gp.open_checkpoint("org/name")
    assert hub.sent_of("pytorch_model.bin") == 0
    assert_same_table("org/name", expected, download=True)
    assert_same_table("org/name", expected)  # from the cache


def test_gguf_headers_are_read_in_place(hub, tmp_path):
    directory = tmp_path / "local"
    directory.mkdir()
    write_gguf(directory / "m.gguf", gguf_tensors(**WIDE), **WIDE, vocabulary=20_000)
    size = (directory / "m.gguf").stat().st_size
    hub.add("org/name", directory)
    checkpoint = gp.open_checkpoint("org/name")
    frame = checkpoint.describe()
    assert 400_000 <= hub.sent_of("m.gguf") <= 1_700_000 < size  # the vocabulary alone takes 500 kB
    local = gp.open_checkpoint(directory / "m.gguf")
    assert frame.drop(columns="model").equals(local.describe().drop(columns="model"))
    assert torch.equal(checkpoint.layer(1).key, local.layer(1).key)
    assert not list((tmp_path / "hf").rglob("*.gguf"))
    downloaded = gp.open_checkpoint("org/name", download=True)
    assert downloaded.describe().equals(frame)
    assert not list((tmp_path / "hf").rglob("*.gguf"))
    assert torch.equal(downloaded.layer(1).key, local.layer(1).key)
    assert len(list((tmp_path / "hf").rglob("*.gguf"))) == 1


def test_split_gguf(hub, tmp_path):
    directory = tmp_path / "local"
    directory.mkdir()
    write_gguf(directory / "m.gguf", gguf_tensors(), split=3)
    hub.add("org/name", directory)
    local = next(iter(sorted(directory.iterdir())))
    for ours, theirs in zip(gp.open_checkpoint("org/name").layers(), gp.open_checkpoint(local).layers(), strict=True):
        assert torch.equal(ours.query, theirs.query)
    (directory / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(MissingShard, match=r"m-00002-of-00003\.gguf of 3 parts is absent"):
        gp.open_checkpoint("org/name")


def test_several_gguf_files_say_how_to_pick_one(hub, tmp_path):
    directory = tmp_path / "local"
    directory.mkdir()
    for kind in ("F16", "F32"):
        write_gguf(directory / f"m-{kind}.gguf", gguf_tensors(), kind)
    hub.add("org/name", directory)
    with pytest.raises(AmbiguousFiles, match=r"m-F16\.gguf, m-F32\.gguf") as caught:
        gp.open_checkpoint("org/name")
    assert "hf://org/name/FILE" in caught.value.hint
    one = gp.open_checkpoint("hf://org/name/m-F16.gguf")
    assert one.name == "org/name/m-F16.gguf"
    assert torch.equal(one.layer(3).key, gp.open_checkpoint(directory / "m-F16.gguf").layer(3).key)


# -- broken files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "kind", "said"),
    [
        ("model.safetensors", lambda raw: LFS_POINTER, LFSPointer, f"for a file of {LFS_SIZE} bytes"),
        ("model.safetensors", lambda raw: HTML, NotSafetensors, "this is an HTML page"),
        ("model.safetensors", lambda raw: b"", NotSafetensors, "this is an empty file"),
        ("model.safetensors", lambda raw: raw[:-8], Truncated, "first tensor affected"),
        ("model.safetensors", lambda raw: raw + b"12345", TrailingBytes, "5 bytes follow"),
        ("model.safetensors", lambda raw: b"\xff" * 8 + raw[8:], CorruptHeader, "beyond the format's limit"),
        ("model.safetensors", lambda raw: pack_header(b"{}\0"), CorruptHeader, "NUL"),
        ("m.gguf", lambda raw: LFS_POINTER, LFSPointer, f"for a file of {LFS_SIZE} bytes"),
        ("m.gguf", lambda raw: HTML, NotGGUF, "this is an HTML page"),
        ("m.gguf", lambda raw: b"", NotGGUF, "this is an empty file"),
        ("m.gguf", lambda raw: raw[:-2000], Truncated, "is affected"),
        ("m.gguf", lambda raw: raw[:100], Truncated, "ends inside its header"),
        ("m.gguf", lambda raw: raw[:8] + b"\xff" * 8 + raw[16:], CorruptHeader, "more than the file has bytes"),
    ],
)
def test_broken_files_are_told_from_their_beginning(hub, tmp_path, name, change, kind, said):
    directory = write_llama(tmp_path / "local")
    if name == "m.gguf":
        (directory / "model.safetensors").unlink()
        write_gguf(directory / name, gguf_tensors())
    (directory / name).write_bytes(change((directory / name).read_bytes()))
    hub.add("org/name", directory)
    with pytest.raises(kind, match=said) as caught:
        gp.open_checkpoint("org/name")
    assert f"org/name@{COMMIT}/{name}" in str(caught.value)
    assert caught.value.hint


def test_a_missing_shard_is_told_before_any_is_fetched(hub, tmp_path):
    directory = write_llama(tmp_path / "local")
    write_shards(directory)
    (directory / PARTS[1]).unlink()
    hub.add("org/name", directory)
    with pytest.raises(MissingShard, match=rf"org/name@{COMMIT}: {PARTS[1]} is absent, holding 12 tensors"):
        gp.open_checkpoint("org/name")
    assert hub.asked_for() == {"config.json", "model.safetensors.index.json"}


# -- refusals -----------------------------------------------------------------------------------


def test_a_gated_repository(hub, tmp_path, monkeypatch, capsys):
    """The hub lists a gated repository's files to everybody and refuses their content."""
    hub.add("org/name", write_llama(tmp_path / "local"))
    hub.file_errors["org/name"] = (403, "GatedRepo")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(GatedRepo) as caught:
        gp.open_checkpoint("org/name")
    assert f"{hub.url}/org/name" in caught.value.hint
    assert "Accept its terms" in caught.value.hint
    hub.errors["org/name"] = (403, "GatedRepo")
    code, out, err = command_line(capsys, "inspect", "org/name")
    assert (code, out) == (2, "")
    assert "error: GatedRepo: org/name: " in err
    assert TOKEN not in err


@pytest.mark.parametrize(("status", "code"), [(401, "RepoNotFound"), (404, "RepoNotFound")])
def test_a_missing_or_private_repository(hub, capsys, status, code):
    hub.errors["org/nope"] = (status, code)
    with pytest.raises(RepoNotFound, match="no such repository on the hub") as caught:
        gp.open_checkpoint("org/nope")
    assert "hf auth login" in caught.value.hint
    assert command_line(capsys, "inspect", "org/nope")[0] == 2


def test_a_revision_that_does_not_exist(hub, tmp_path, capsys):
    hub.add("org/name", write_llama(tmp_path / "local"))
    with pytest.raises(RevisionNotFound, match="org/name: there is no branch, tag or commit 'v9'") as caught:
        gp.open_checkpoint("org/name@v9")
    assert f"{hub.url}/org/name" in caught.value.hint
    assert command_line(capsys, "inspect", "org/name@v9")[0] == 2


@pytest.mark.parametrize(("status", "advice"), [(500, "Try again later"), (403, "token"), (429, "Try again later")])
def test_other_refusals(hub, status, advice):
    hub.errors["org/name"] = (status, "Other")
    with pytest.raises(HubUnavailable, match=f"the hub answered with {status}") as caught:
        gp.open_checkpoint("org/name")
    assert advice in caught.value.hint


@pytest.mark.parametrize("garbage", [b"<html>sign in to this network</html>", b"[]", b"{}", b"null", b""])
def test_an_answer_that_is_not_the_hub_s(hub, garbage):
    hub.garbage = garbage
    with pytest.raises(HubUnavailable, match="cannot be reached or gave no usable answer") as caught:
        gp.open_checkpoint("org/name")
    assert "check the network, HF_ENDPOINT and HF_TOKEN" in caught.value.hint


def test_nobody_answers(hub, monkeypatch, capsys):
    hub.stop()
    with pytest.raises(HubUnavailable, match=r"cannot be reached .*\(ConnectError\)") as caught:
        gp.open_checkpoint("org/name")
    assert caught.value.hint.startswith("Check the spelling, and write ./org/name for a path on this machine. If the")
    assert "HF_HUB_OFFLINE=1" in caught.value.hint
    assert command_line(capsys, "inspect", "org/name")[0] == 2
    monkeypatch.setattr(hub, "stop", lambda: None)


def test_the_hub_goes_away_between_header_and_data(hub, tmp_path):
    hub.add("org/name", write_llama(tmp_path / "local", **WIDE))
    checkpoint = gp.open_checkpoint("org/name")
    hub.file_errors["org/name"] = (404, "EntryNotFound")
    with pytest.raises(HubUnavailable, match=rf"^org/name@{COMMIT}/model.safetensors: the hub answered with 404"):
        checkpoint.layer(0)
    hub.file_errors["org/name"] = (403, "Other")
    with pytest.raises(HubUnavailable, match=r"model\.safetensors: the hub answered with 403"):
        checkpoint.layer(0)
    hub.file_errors["org/name"] = (403, "GatedRepo")
    with pytest.raises(GatedRepo):
        checkpoint.layer(0)
    hub.file_errors.clear()
    checkpoint = gp.open_checkpoint("org/name", download=True)
    hub.file_errors["org/name"] = (403, "Other")
    with pytest.raises(HubUnavailable, match="the hub does not give a file"):
        checkpoint.layer(0)


# -- tokens -------------------------------------------------------------------------------------


def test_the_token_goes_to_the_hub_alone(hub, tmp_path, monkeypatch):
    hub.add("org/name", write_llama(tmp_path / "local"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    report = gp.probe("org/name", layers=[0], samples=2)
    to_hub = [auth for _, path, _, auth in hub.requests if "/cdn/" not in path and "org/name" in path]
    to_cdn = [auth for _, path, _, auth in hub.requests if "/cdn/" in path]
    assert set(to_hub) == {f"Bearer {TOKEN}"}
    assert len(to_cdn) >= 2
    assert set(to_cdn) == {None}
    report.save(tmp_path / "out", figures=False)
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes()


@pytest.mark.parametrize("status", [401, 403, 404, 500])
@pytest.mark.parametrize("code", ["RepoNotFound", "GatedRepo", "RevisionNotFound", "Other"])
@pytest.mark.parametrize("debug", [True, False])
def test_no_refusal_repeats_the_token(hub, monkeypatch, capsys, status, code, debug):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.errors["org/name"] = (status, code)
    if debug:
        import traceback

        with pytest.raises(gp.GluProbeError) as caught:
            gp.open_checkpoint("org/name")
        said = "".join(traceback.format_exception(caught.value))
    else:
        exit_code, out, said = command_line(capsys, "inspect", "org/name")
        assert (exit_code, out) == (2, "")
    assert any(auth == f"Bearer {TOKEN}" for *_, auth in hub.requests)
    assert TOKEN not in said
    assert "Bearer" not in said


def test_a_token_that_no_header_can_hold(hub, tmp_path, monkeypatch):
    hub.add("org/name", write_llama(tmp_path / "local"))
    monkeypatch.setenv("HF_TOKEN", "hf_sécret")
    with pytest.raises(HubUnavailable) as caught:
        gp.open_checkpoint("org/name")
    assert "HF_TOKEN" in caught.value.hint
    assert "cret" not in str(caught.value)


# -- offline ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ref", ["org/name", "org/name@main", "org/name@v1", f"org/name@{COMMIT}"])
@pytest.mark.parametrize("sharded", [True, False])
def test_what_was_read_once_is_read_offline(hub, tmp_path, monkeypatch, ref, sharded):
    directory = write_llama(tmp_path / "local")
    if sharded:
        write_shards(directory)
    hub.add("org/name", directory, ("main", "v1"))
    expected = table(ref, download=True)
    go_offline(hub, monkeypatch)
    assert_same_table(ref, expected)
    facts = gp.open_checkpoint(ref).provenance()
    assert (facts["repository"], facts["commit"]) == ("org/name", COMMIT)
    assert hub.requests == []


def test_gguf_offline(hub, tmp_path, monkeypatch):
    directory = tmp_path / "local"
    directory.mkdir()
    write_gguf(directory / "m.gguf", gguf_tensors())
    hub.add("org/name", directory)
    expected = table("hf://org/name/m.gguf", download=True)
    go_offline(hub, monkeypatch)
    assert_same_table("org/name", expected)
    assert_same_table("hf://org/name/m.gguf", expected)
    with pytest.raises(NotCached, match=r"other\.gguf is not in the local cache"):
        gp.open_checkpoint("hf://org/name/other.gguf")


def test_offline_and_never_read(hub, tmp_path, monkeypatch, capsys):
    hub.add("org/name", write_llama(tmp_path / "local"))
    go_offline(hub, monkeypatch)
    for ref in ("org/name", "org/name@v1", f"org/name@{COMMIT}"):
        with pytest.raises(NotCached, match=rf"{ref}: the hub is offline \(HF_HUB_OFFLINE\)") as caught:
            gp.open_checkpoint(ref)
        assert caught.value.hint.startswith(
            "Check the spelling, and write ./org/name for a path on this machine. If the"
        )
        assert "unset HF_HUB_OFFLINE" in caught.value.hint
    assert command_line(capsys, "inspect", "org/name")[0] == 2
    assert hub.requests == []


@pytest.mark.parametrize("sharded", [True, False])
def test_offline_and_only_described_before(hub, tmp_path, monkeypatch, sharded):
    """The cache then holds the config and no weights: that is no model without weights."""
    directory = write_llama(tmp_path / "local")
    if sharded:
        write_shards(directory)
    hub.add("org/name", directory)
    gp.open_checkpoint("org/name").describe()
    go_offline(hub, monkeypatch)
    with pytest.raises(NotCached, match="its copy in the local cache is not whole"):
        gp.open_checkpoint("org/name")


def test_another_revision_is_not_taken_for_the_one_asked_for(hub, tmp_path, monkeypatch):
    hub.add("org/name", write_llama(tmp_path / "local"))
    gp.probe("org/name", layers=[0], samples=2)
    go_offline(hub, monkeypatch)
    with pytest.raises(NotCached):
        gp.open_checkpoint("org/name@v1")


def test_a_branch_that_moves_during_a_run_does_not_mix_commits(hub, tmp_path):
    old, new = write_llama(tmp_path / "old", seed=1), write_llama(tmp_path / "new")
    for directory in (old, new):
        (directory / "config.json").unlink()  # so that the weights are the first file to be downloaded
    hub.add("org/name", old, commit=OLDER)
    checkpoint = gp.open_checkpoint("org/name")
    hub.add("org/name", new, commit=COMMIT)
    assert torch.equal(checkpoint.layer(0).query, gp.open_checkpoint(old).layer(0).query)
    assert torch.equal(gp.open_checkpoint("org/name").layer(0).query, gp.open_checkpoint(new).layer(0).query)


def test_a_directory_wins_over_the_hub(hub, tmp_path):
    hub.add("org/name", write_llama(tmp_path / "remote", seed=1))
    write_llama(tmp_path / "org" / "name")
    checkpoint = gp.open_checkpoint("org/name")
    assert "the directory was read" in checkpoint.notes[0]
    assert hub.requests == []


# -- the environment ----------------------------------------------------------------------------


def test_the_environment_of_huggingface_hub_is_honoured(hub, tmp_path):
    """In a process of its own, as a user runs it: endpoint, cache, token and offline mode from the environment."""
    directory = write_llama(tmp_path / "local")
    hub.add("org/name", directory)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))} | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": TOKEN,
        "PYTHONPATH": str(Path(gp.__file__).parents[1]),
    }
    code = "from glu_probe.cli import main; import sys; main(sys.argv[1:])"

    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment | changes,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    report = ["report", "org/name", "-o", str(tmp_path / "out"), "--layers", "0", "--samples", "2", "--no-figures"]
    report.append("--download")  # so that there is something to read offline
    online = run(*report)
    assert (online.returncode, online.stderr) == (0, "")
    assert set(auth for _, path, _, auth in hub.requests if "/api/models/" in path) == {f"Bearer {TOKEN}"}
    assert list((tmp_path / "home" / "hub").iterdir())
    first = (tmp_path / "out" / "layers.csv").read_bytes()
    shutil.rmtree(tmp_path / "out")
    hub.forget()
    offline = run(*report, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0
    assert (tmp_path / "out" / "layers.csv").read_bytes() == first
    absent = run("inspect", "org/other", HF_HUB_OFFLINE="1")
    assert (absent.returncode, absent.stdout) == (2, "")
    assert "error: NotCached: org/other" in absent.stderr
    assert hub.requests == []
    for result in (online, offline, absent):
        assert TOKEN not in result.stdout + result.stderr
