"""What a user types: paths, repositories and what can be neither."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import glu_probe as gp
from glu_probe.checkpoint.ref import parse_ref
from glu_probe.errors import NotSafetensors, NoWeights, PathNotFound, Unreadable

from ..support import write_llama
from .writers import assert_same_table, command_line, table


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("/no/such/dir", "/no/such/dir"),
        ("./nope", "{cwd}/nope"),
        ("../nope", "{cwd}/../nope"),
        ("nope/", "{cwd}/nope"),
        ("org\\name", "{cwd}/org\\name"),
        ("C:\\models\\llama", "{cwd}/C:\\models\\llama"),
        ("org/name/sub", "{cwd}/org/name/sub"),
        ("org/name@", "{cwd}/org/name@"),
        ("org/name\n", "{cwd}/org/name"),
        ("org/na me", "{cwd}/org/na me"),
        ("org/näme", "{cwd}/org/näme"),
        ("nope.safetensors", "{cwd}/nope.safetensors"),
        ("org/nope.gguf", "{cwd}/org/nope.gguf"),
        ("~no_such_user_here/model", "{cwd}/~no_such_user_here/model"),
        # names that the hub's own client refuses with an error of its own
        ("org/na--me", "{cwd}/org/na--me"),
        ("org/na..me", "{cwd}/org/na..me"),
        ("org/name.git", "{cwd}/org/name.git"),
        ("org/name-", "{cwd}/org/name-"),
        ("-org/name", "{cwd}/-org/name"),
        ("org/" + "x" * 97, "{cwd}/org/xxx"),
        ("x" * 5000, "{cwd}/xxx"),
        ("a\0b", "{cwd}/a"),
        ("", "''"),
    ],
)
def test_what_does_not_exist_and_cannot_be_a_repository(tmp_path, monkeypatch, typed, shown):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PathNotFound) as caught:
        gp.open_checkpoint(typed)
    assert shown.format(cwd=tmp_path) in str(caught.value)
    assert "there is no such file or directory" in str(caught.value)
    assert "Give an existing path, or a hub repository" in caught.value.hint


def test_a_path_object_is_never_a_repository():
    with pytest.raises(PathNotFound, match="there is no such file or directory"):
        gp.open_checkpoint(Path("org/name"))


def test_a_missing_path_ends_the_command_with_2(capsys):
    code, out, err = command_line(capsys, "inspect", "/no/such/dir")
    assert (code, out) == (2, "")
    assert err.startswith("error: PathNotFound: /no/such/dir: ")
    assert "\nhint: " in err


@pytest.mark.parametrize(
    ("typed", "repo", "revision"),
    [
        ("org/name", "org/name", None),
        ("gpt2", "gpt2", None),
        ("Org-1/na_me.v2@main", "Org-1/na_me.v2", "main"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
        ("org/name@5d4f9b0", "org/name", "5d4f9b0"),
    ],
)
def test_repositories(tmp_path, monkeypatch, typed, repo, revision):
    monkeypatch.chdir(tmp_path)
    ref = parse_ref(typed)
    assert (ref.kind, ref.repo, ref.revision, ref.path, ref.note) == ("hub", repo, revision, None, None)
    assert ref.name == typed


def test_a_directory_wins_over_a_repository_and_says_so(tmp_path, monkeypatch, capsys):
    write_llama(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    note = "org/name is a directory here and could be a hub repository: the directory was read"
    checkpoint = gp.open_checkpoint("org/name")
    assert checkpoint.notes == [note]
    assert checkpoint.provenance()["path"] == "org/name"
    code, _, err = command_line(capsys, "inspect", "org/name")
    assert (code, err) == (0, f"note: {note}\n")


@pytest.mark.parametrize("typed", ["./org/name", "org/name/", "org/name/model.safetensors", "{cwd}/org/name"])
def test_what_can_only_be_a_path_needs_no_note(tmp_path, monkeypatch, typed):
    write_llama(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert gp.open_checkpoint(typed.format(cwd=tmp_path)).notes == []


def test_a_file_named_like_a_repository_is_not_called_a_directory(tmp_path, monkeypatch):
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").write_text("no weights")
    monkeypatch.chdir(tmp_path)
    assert parse_ref("org/name").note is None
    with pytest.raises(NoWeights, match="not a weight file by its ending"):
        gp.open_checkpoint("org/name")


def test_spaces_and_letters_beyond_ascii(llama, tmp_path):
    expected = table(llama)
    odd = tmp_path / "mein größtes Modell 模型 🙂"
    shutil.copytree(llama, odd)
    assert_same_table(odd, expected)
    assert_same_table(str(odd / "model.safetensors"), expected)
    (odd / "model.safetensors").rename(odd / "Gewichte übrig.safetensors")
    assert_same_table(odd, expected)
    assert gp.open_checkpoint(odd).name == odd.name


def test_home_and_the_current_directory(llama, monkeypatch):
    monkeypatch.setenv("HOME", str(llama.parent))
    assert gp.open_checkpoint("~/llama").name == "llama"
    monkeypatch.chdir(llama)
    assert gp.open_checkpoint(".").name == "llama"
    assert gp.open_checkpoint("model.safetensors").name == "model"


def test_links_are_followed_and_loops_are_not(llama, tmp_path):
    (tmp_path / "link").symlink_to(llama)
    assert len(gp.open_checkpoint(tmp_path / "link").sites) == 12
    for name in ("here", "there"):
        (tmp_path / name).symlink_to(tmp_path / {"here": "there", "there": "here"}[name])
    with pytest.raises(PathNotFound):
        gp.open_checkpoint(tmp_path / "here")


def test_a_path_that_may_not_be_looked_at_is_not_called_absent(llama, monkeypatch):
    def refuse(self, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(Unreadable, match="the path cannot be looked at: Permission denied"):
        gp.open_checkpoint(str(llama))


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    for ref in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(NotSafetensors, match="this is a device or pipe"):
            gp.open_checkpoint(ref)
