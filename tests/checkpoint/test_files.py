"""Which files are the model: shards and their index, stand-ins that a download left, and what lies beside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import glu_probe as gp
from glu_probe.errors import (
    AmbiguousFiles,
    BadConfig,
    IndexMismatch,
    LFSPointer,
    MissingShard,
    NotSafetensors,
    NoWeights,
    UnmergedAdapter,
    Unreadable,
    UnsafeShardName,
)

from ..support import llama_tensors, write_llama
from .writers import (
    HTML,
    LFS_POINTER,
    LFS_SIZE,
    assert_same_factors,
    assert_same_table,
    command_line,
    gguf_tensors,
    table,
    write_gguf,
)

PARTS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


def write_shards(directory: Path, *, index: bool = True) -> dict[str, str]:
    """Cut the plain fixture into three files so that gate, up and down of every layer stand apart; its weight_map."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for name in tensors:
        place = 1 if "up_proj" in name else 2 if "down_proj" in name or "layernorm" in name else 0
        weight_map[name] = PARTS[place]
    for part in PARTS:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == part}, directory / part)
    if index:
        write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


# -- shards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_one_model(llama, tmp_path, index):
    expected = table(llama)
    shards = shutil.copytree(llama, tmp_path / "shards")
    write_shards(shards, index=index)
    assert_same_table(shards, expected)
    assert_same_factors(shards, llama)
    assert [file["name"] for file in gp.open_checkpoint(shards).provenance()["files"]] == PARTS


def test_the_index_decides_between_two_copies_of_a_tensor(llama, tmp_path):
    shards = shutil.copytree(llama, tmp_path / "shards")
    weight_map = write_shards(shards)
    name = "model.layers.4.mlp.up_proj.weight"
    assert weight_map[name] == PARTS[1]
    stale = load_file(shards / PARTS[0]) | {name: torch.zeros(24, 16)}
    save_file(stale, shards / PARTS[0])
    assert_same_factors(shards, llama)
    (shards / INDEX).unlink()
    with pytest.raises(IndexMismatch, match=r"up_proj\.weight' is in .*00001-of-00003.* and in .*00002-of-00003"):
        gp.open_checkpoint(shards)


def test_tensors_that_the_index_forgets_are_not_lost(llama, tmp_path):
    """Whoever loads whole shards gets them, so a layer must not vanish from the table."""
    shards = shutil.copytree(llama, tmp_path / "shards")
    weight_map = write_shards(shards)
    write_index(shards, {name: part for name, part in weight_map.items() if ".layers.11." not in name})
    assert_same_factors(shards, llama)


def test_a_missing_shard_says_what_is_lost_and_nothing_is_written(llama, capsys):
    weight_map = write_shards(llama)
    (llama / PARTS[1]).unlink()
    with pytest.raises(MissingShard) as caught:
        gp.open_checkpoint(llama)
    assert f"{PARTS[1]} is absent, holding 12 tensors, 12 of them of MLPs" in str(caught.value)
    assert str(llama) in str(caught.value)
    (llama / PARTS[2]).unlink()
    held = sum(part != PARTS[0] for part in weight_map.values())
    with pytest.raises(MissingShard, match=f"{PARTS[1]}, {PARTS[2]} are absent, holding {held} tensors, 24 of them"):
        gp.open_checkpoint(llama)
    before = sorted(llama.parent.rglob("*"))
    code, out, err = command_line(capsys, "report", llama, "-o", llama.parent / "out")
    assert (code, out) == (2, "")
    assert "error: MissingShard" in err
    assert sorted(llama.parent.rglob("*")) == before


def test_a_missing_shard_is_noticed_without_an_index(llama):
    write_shards(llama, index=False)
    (llama / PARTS[2]).unlink()
    with pytest.raises(MissingShard, match="model: of 3 parts, number 3 is absent"):
        gp.open_checkpoint(llama)
    (llama / PARTS[0]).unlink()
    (llama / PARTS[1]).rename(llama / "model-00002-of-90000.safetensors")
    with pytest.raises(MissingShard) as caught:
        gp.open_checkpoint(llama)
    assert "number 1, 3, 4, 5, 6, 7, 8, 9 and 89991 more are absent" in str(caught.value)


def test_a_tensor_that_its_shard_lacks(llama):
    weight_map = write_shards(llama)
    write_index(llama, weight_map | {"model.layers.12.mlp.up_proj.weight": PARTS[1]})
    with pytest.raises(IndexMismatch) as caught:
        gp.open_checkpoint(llama)
    assert f"'model.layers.12.mlp.up_proj.weight' into {PARTS[1]}, which does not hold it" in str(caught.value)
    assert "download both again" in caught.value.hint
    write_index(llama, weight_map | {"model.layers.3.mlp.up_proj.weight": PARTS[0]})
    with pytest.raises(IndexMismatch, match=r"layers\.3\.mlp\.up_proj"):
        gp.open_checkpoint(llama)


@pytest.mark.parametrize(
    "name",
    ["../x", "../model.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x", "..", ".", "", "./x", "x/", "C:\\x"],
)
def test_an_index_may_only_name_its_neighbours(llama, name):
    shutil.copy(llama / "model.safetensors", llama.parent / "model.safetensors")
    weight_map = write_shards(llama)
    write_index(llama, weight_map | {"model.layers.3.mlp.up_proj.weight": name})
    with pytest.raises(UnsafeShardName) as caught:
        gp.open_checkpoint(llama)
    assert f"points to {name!r}, which is not a plain file name" in str(caught.value)
    assert str(llama / INDEX) in str(caught.value)
    assert "do not use this checkpoint" in caught.value.hint


@pytest.mark.parametrize(
    "index", ["{}", "[]", "3", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "{", "", "\xff"]
)
def test_an_index_that_is_none(llama, index):
    write_shards(llama)
    (llama / INDEX).write_bytes(index.encode("latin-1"))
    with pytest.raises(BadConfig) as caught:
        gp.open_checkpoint(llama)
    assert str(llama / INDEX) in str(caught.value)
    assert "again" in caught.value.hint


def test_shards_of_two_models(llama):
    write_shards(llama, index=False)
    save_file({"a": torch.zeros(2)}, llama / "other-00001-of-00001.safetensors")
    with pytest.raises(AmbiguousFiles, match="shards of 2 different checkpoints and no index"):
        gp.open_checkpoint(llama)


# -- Git LFS ------------------------------------------------------------------------------------


def _shard(directory: Path) -> Path:
    write_shards(directory)
    return directory / PARTS[1]


def _index(directory: Path) -> Path:
    write_shards(directory)
    return directory / INDEX


def _without(directory: Path, name: str) -> Path:
    (directory / "model.safetensors").unlink()
    return directory / name


def _gguf_part(directory: Path) -> Path:
    (directory / "model.safetensors").unlink()
    write_gguf(directory / "m.gguf", gguf_tensors(), split=3)
    return directory / "m-00002-of-00003.gguf"


@pytest.mark.parametrize(
    "target",
    [
        lambda directory: directory / "model.safetensors",
        _shard,
        _index,
        lambda directory: directory / "config.json",
        lambda directory: _without(directory, "pytorch_model.bin"),
        lambda directory: _without(directory, "pytorch_model.bin.index.json"),
        lambda directory: _without(directory, "x.gguf"),
        _gguf_part,
    ],
    ids=["model", "shard", "index", "config", "bin", "bin index", "gguf", "gguf part"],
)
def test_a_pointer_in_the_place_of_a_file(llama, capsys, target):
    path = target(llama)
    path.write_bytes(LFS_POINTER)
    refs = [llama] if path.suffix == ".json" else [llama, path]
    for ref in refs:
        with pytest.raises(LFSPointer) as caught:
            gp.open_checkpoint(ref)
        message = str(caught.value)
        assert message.startswith(f"{path}: this is a Git LFS pointer for a file of {LFS_SIZE} bytes (4.98 GB)")
        assert f"`git lfs pull --include {path.name}` in {llama}" in caught.value.hint
        for words in ("weights_only", "header", "Error", "JSON", "pickle"):
            assert words not in message
    code, out, err = command_line(capsys, "inspect", llama)
    assert (code, out) == (2, "")
    assert err.startswith("error: LFSPointer: ")


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.bin"])
def test_a_pointer_given_by_its_path(tmp_path, name):
    (tmp_path / name).write_bytes(LFS_POINTER)
    with pytest.raises(LFSPointer, match=str(LFS_SIZE)):
        gp.open_checkpoint(tmp_path / name)


def test_the_command_for_a_name_with_spaces_can_be_pasted(tmp_path):
    (tmp_path / "my model.safetensors").write_bytes(LFS_POINTER.split(b"size")[0])
    with pytest.raises(LFSPointer, match="this is a Git LFS pointer, not the file itself") as caught:
        gp.open_checkpoint(tmp_path)
    assert "git lfs pull --include 'my model.safetensors'" in caught.value.hint


# -- what lies in a directory -------------------------------------------------------------------


@pytest.mark.parametrize("inside", [[], ["config.json"]])
def test_a_directory_called_like_a_file(llama, tmp_path, inside):
    directory = tmp_path / "x.safetensors"
    directory.mkdir()
    for name in inside:
        shutil.copy(llama / name, directory)
    with pytest.raises(NotSafetensors, match=r"x\.safetensors: this is a directory, not a safetensors file"):
        gp.open_checkpoint(directory)


def test_a_directory_called_like_a_file_that_holds_a_model(llama, tmp_path):
    llama.rename(tmp_path / "x.safetensors")
    assert len(gp.open_checkpoint(tmp_path / "x.safetensors").sites) == 12


@pytest.mark.parametrize(
    ("names", "found"),
    [([], "nothing"), (["config.json"], "config.json"), (["model.h5", "flax_model.msgpack"], "flax_model.msgpack")],
)
def test_a_directory_without_weights(tmp_path, names, found):
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(NoWeights, match=rf"no \.safetensors, \.bin or \.gguf file \(found: {found}") as caught:
        gp.open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "Give a model directory" in caught.value.hint


@pytest.mark.parametrize("name", ["config.json", "notes.txt", INDEX, "model"])
def test_a_file_that_cannot_be_weights(llama, name):
    (llama / name).write_text("{}")
    with pytest.raises(NoWeights, match="not a weight file by its ending"):
        gp.open_checkpoint(llama / name)


def test_only_an_adapter(llama):
    (llama / "model.safetensors").rename(llama / "adapter_model.safetensors")
    with pytest.raises(UnmergedAdapter, match=r"adapter_model\.safetensors holds low-rank updates") as caught:
        gp.open_checkpoint(llama)
    assert "merge_and_unload" in caught.value.hint


def test_what_lies_beside_the_weights_is_left_alone(llama, tmp_path):
    expected = table(llama)
    directory = shutil.copytree(llama, tmp_path / "full")
    for name in ("optimizer.bin", "scheduler.bin", "training_args.bin", "adapter_model.bin", "x.gguf", "a.safetensors"):
        (directory / name).write_bytes(HTML)
    (directory / "pytorch_model.bin").write_bytes(LFS_POINTER)
    (directory / "original").mkdir()
    (directory / "original" / "model.safetensors").write_bytes(HTML)
    assert_same_table(directory, expected)


def test_one_file_of_another_name_is_the_model_and_two_are_not(llama):
    (llama / "model.safetensors").rename(llama / "weights.safetensors")
    assert len(gp.open_checkpoint(llama).sites) == 12
    shutil.copy(llama / "weights.safetensors", llama / "copy.safetensors")
    with pytest.raises(AmbiguousFiles, match=r"copy\.safetensors, weights\.safetensors") as caught:
        gp.open_checkpoint(llama)
    assert "Give the path of the one to read" in caught.value.hint


def test_a_directory_that_may_not_be_listed(llama, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(Unreadable, match="llama: the directory cannot be listed: Permission denied"):
        gp.open_checkpoint(llama)


# -- config -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (b"", "not JSON but an empty file"),
        (HTML, "not JSON but an HTML page"),
        (b'{"model_type": ', "damaged JSON"),
        (b"[" * 200_000, "damaged JSON"),
        (b"\xff\xfe{\x00}\x00", "not JSON but"),
        (b"[1]", "a JSON object is expected, found a list"),
        (b"null", "a JSON object is expected, found a NoneType"),
    ],
)
def test_a_config_that_is_none(llama, capsys, config, found):
    (llama / "config.json").write_bytes(config)
    with pytest.raises(BadConfig, match=found) as caught:
        gp.open_checkpoint(llama)
    assert str(llama / "config.json") in str(caught.value)
    assert caught.value.hint == "Download the file again"
    code, _, err = command_line(capsys, "inspect", llama)
    assert code == 2
    assert "error: BadConfig" in err


def test_a_directory_in_the_place_of_the_config(llama):
    (llama / "config.json").unlink()
    (llama / "config.json").mkdir()
    with pytest.raises(BadConfig, match=r"config\.json: this is a directory"):
        gp.open_checkpoint(llama)


def test_a_config_with_a_byte_order_mark(llama, tmp_path):
    marked = shutil.copytree(llama, tmp_path / "marked")
    (marked / "config.json").write_bytes(b"\xef\xbb\xbf" + (llama / "config.json").read_bytes())
    assert_same_factors(marked, llama)


def test_without_a_config_the_run_goes_on_with_a_note(llama, capsys):
    (llama / "config.json").unlink()
    for ref, beside in ((llama, ""), (llama / "model.safetensors", " beside model.safetensors")):
        notes = gp.open_checkpoint(ref).notes
        assert notes[0] == f"no config.json{beside}: family, activation and norm are not known"
    code, _, err = command_line(capsys, "inspect", llama)
    assert code == 0
    assert "note: no config.json" in err


@pytest.mark.parametrize("weights", ["safetensors", "bin"])
def test_code_of_a_repository_is_never_run(tmp_path, capsys, weights):
    marker = tmp_path / "marker"
    directory = write_llama(
        tmp_path / "model",
        auto_map={"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"},
        architectures=["EvilModel"],
    )
    if weights == "bin":
        (directory / "model.safetensors").unlink()
        torch.save(llama_tensors(), directory / "pytorch_model.bin")
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass EvilConfig: pass\nclass EvilModel: pass\n"
    for name in ("evil.py", "__init__.py", "configuration_evil.py", "modeling_evil.py", "sitecustomize.py"):
        (directory / name).write_text(code)
    exit_code, _, _ = command_line(
        capsys, "report", directory, "-o", tmp_path / "out", "--layers", "0", "--samples", "2", "--no-figures"
    )
    assert exit_code == 0
    assert (tmp_path / "out" / "layers.csv").exists()
    assert not marker.exists()
    exec(compile(code, "evil.py", "exec"), {})
    assert marker.exists()  # or the test would show nothing
