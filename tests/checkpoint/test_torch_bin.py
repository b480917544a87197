"""PyTorch's own files: read where they hold tensors, never run where they hold more."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

import glu_probe as gp
from glu_probe.checkpoint.torch_bin import TorchFile
from glu_probe.errors import CorruptHeader, NotTorchFile, QuantizedWeights, Truncated, UnsafePickle

from ..support import llama_tensors
from .writers import HTML, assert_same_factors, assert_same_table, cheap, command_line, gguf_tensors, table, write_gguf


@pytest.fixture
def as_bin(llama, tmp_path):
    """A function that writes the plain fixture's config beside what `torch.save` makes of an object."""

    def write(content: object, *, name: str = "pytorch_model.bin", zipped: bool = True) -> Path:
        directory = tmp_path / "as_bin"
        directory.mkdir(exist_ok=True)
        shutil.copy(llama / "config.json", directory)
        torch.save(content, directory / name, _use_new_zipfile_serialization=zipped)
        return directory

    return write


def _parameters(tensors: dict) -> dict:
    return {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}


def _transposed(tensors: dict) -> dict:
    """The same values, stored in another order."""
    return {name: tensor.T.contiguous().T if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensors: tensors,
        lambda tensors: {"model": tensors},
        lambda tensors: {"model": tensors, "epoch": 3, "learning_rate": torch.tensor(0.1), "optimizer": {"state": {}}},
        lambda tensors: {"state_dict": {"model": tensors}},
        lambda tensors: {"module": {f"module.{name}": tensor for name, tensor in tensors.items()}},
        _parameters,
        _transposed,
        lambda tensors: {"model": _parameters(tensors), "args": {"lr": 1e-3, "names": ["a", "b"]}},
    ],
    ids=["bare", "model", "training", "two deep", "module", "parameters", "transposed", "parameters in model"],
)
def test_state_dicts_in_every_wrapping(llama, as_bin, wrap, zipped):
    assert_same_factors(as_bin(wrap(llama_tensors()), zipped=zipped), llama)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "other.bin"])
def test_the_table_is_that_of_safetensors(llama, as_bin, name):
    directory = as_bin(llama_tensors(), name=name)
    assert_same_table(directory, table(llama))
    assert gp.open_checkpoint(directory).provenance()["format"] == "torch"


@pytest.mark.parametrize("name", ["x.bin", "x.pt", "x.pth"])
def test_a_file_by_its_path(llama, as_bin, name):
    assert_same_factors(as_bin(llama_tensors(), name=name) / name, llama)


def test_shards_with_an_index(llama, as_bin):
    import json

    tensors = llama_tensors()
    names = list(tensors)
    halves = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for part, held in halves.items():
        directory = as_bin({name: tensors[name] for name in held}, name=part)
    assert_same_factors(directory, llama)
    index = {"weight_map": {name: part for part, held in halves.items() for name in held}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_same_factors(directory, llama)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_stored_dtypes_and_rows(tmp_path, dtype):
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.save({"a": tensor, "b": torch.arange(3), "c": torch.eye(2).to_sparse()}, tmp_path / "x.pt")
    file = TorchFile(tmp_path / "x.pt")
    assert (file.infos()["a"].shape, file.infos()["a"].nbytes) == ((7, 5), tensor.numel() * tensor.element_size())
    assert file.read("a").dtype == dtype
    assert torch.equal(file.read("a"), tensor)
    assert torch.equal(file.read("a", slice(2, 6)), tensor[2:6])
    with pytest.raises(QuantizedWeights, match=r"'b' is stored as torch\.int64"):
        file.read("b")
    with pytest.raises(QuantizedWeights, match=r"'c' is stored as torch\.sparse"):
        file.read("c")


def test_what_was_read_can_be_changed_without_changing_the_file(as_bin):
    directory = as_bin(llama_tensors())
    before = (directory / "pytorch_model.bin").read_bytes()
    file = TorchFile(directory / "pytorch_model.bin")
    name = "model.layers.0.mlp.up_proj.weight"
    file.read(name).zero_()
    assert torch.equal(file.read(name), llama_tensors()[name])
    assert (directory / "pytorch_model.bin").read_bytes() == before


def test_an_archive_that_somebody_compressed(llama, as_bin):
    directory = as_bin(llama_tensors())
    path = directory / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        contents = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    assert_same_factors(directory, llama)


# -- code ---------------------------------------------------------------------------------------


class RunsCode:
    """Unpickled by a reader that is not careful, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


class RunsText:
    """The same through `exec`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


@pytest.mark.parametrize("evil", [RunsCode, RunsText])
@pytest.mark.parametrize("place", ["bare", "beside", "in a wrapper", "as a key"])
@pytest.mark.parametrize("how", ["zip", "old", "pickle"])
def test_code_in_a_pickle_is_never_run(as_bin, tmp_path, capsys, evil, place, how):
    marker = tmp_path / "marker"
    content = {
        "bare": evil(marker),
        "beside": llama_tensors() | {"zzz": evil(marker)},
        "in a wrapper": {"model": llama_tensors(), "args": evil(marker)},
        "as a key": {evil(marker): 1},
    }[place]
    directory = as_bin(content, zipped=how == "zip")
    path = directory / "pytorch_model.bin"
    if how == "pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(UnsafePickle) as caught:
        gp.open_checkpoint(directory)
    assert str(path) in str(caught.value)
    assert "was not loaded" in str(caught.value)
    assert "safetensors" in caught.value.hint
    assert "weights_only" not in str(caught.value)
    code, out, err = command_line(capsys, "report", directory, "-o", tmp_path / "out")
    assert (code, out) == (2, "")
    assert "UnsafePickle" in err
    assert "weights_only" not in err
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_the_code_of_these_tests_would_run(tmp_path):
    """Or the test above would show nothing."""
    for evil in (RunsCode, RunsText):
        marker = tmp_path / evil.__name__
        pickle.loads(pickle.dumps(evil(marker)))
        assert marker.exists()


# -- something else, and damage -----------------------------------------------------------------


def _zip_of_texts(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no tensors")


def _torchscript(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x/data.pkl", "x/constants.pkl", "x/version"):
            archive.writestr(name, "3")


def _safetensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file(llama_tensors(), path)


def _gguf(path: Path) -> None:
    write_gguf(path.with_suffix(".gguf"), gguf_tensors()).rename(path)


@pytest.mark.parametrize(
    ("write", "named", "advice"),
    [
        (_safetensors, "a safetensors file", "let its name end in .safetensors"),
        (_gguf, "a GGUF file", "let its name end in .gguf"),
        (_zip_of_texts, "a zip archive of something else", "Save the state dict"),
        (_torchscript, "a TorchScript program", "Save the state dict"),
        (
            lambda path: path.write_bytes(pickle.dumps({"a": 1}, protocol=2)),
            "a Python pickle of something else",
            "Save",
        ),
        (lambda path: path.write_bytes(HTML), "an HTML page", "Download the file again"),
        (lambda path: path.write_bytes(b"\x1f\x8b\x08" + b"\x77" * 40), "a gzip archive", "Download the file again"),
        (lambda path: path.write_bytes(b""), "an empty file", "Download the file again"),
        (lambda path: path.write_bytes(b"PK"), "a file of 2 bytes", "Download the file again"),
        (lambda path: path.mkdir(), "a directory", "Give the directory of the model"),
    ],
)
def test_what_is_not_a_torch_file_is_called_what_it_is(tmp_path, write, named, advice):
    write(tmp_path / "pytorch_model.bin")
    with pytest.raises(NotTorchFile) as caught:
        gp.open_checkpoint(tmp_path)
    assert f"{tmp_path / 'pytorch_model.bin'}: this is {named}" in str(caught.value)
    assert advice in caught.value.hint


def _holds_itself() -> dict:
    content: dict = {"model": {}}
    content["model"]["model"] = content
    return content


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([torch.zeros(2)], "holds a list, not named tensors"),
        (torch.zeros(2), "holds a Tensor, not named tensors"),
        ({}, "holds no tensors by name"),
        ({"model": {"epoch": 3}}, "holds no tensors by name"),
        (_holds_itself(), "holds no tensors by name"),
    ],
    ids=["list", "tensor", "empty", "no tensors", "circle"],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_files_without_named_tensors(as_bin, content, found, zipped):
    with pytest.raises(NotTorchFile, match=found) as caught:
        gp.open_checkpoint(as_bin(content, zipped=zipped))
    assert "A state dict (names to tensors) is expected" in caught.value.hint


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_file_cut_short(as_bin, zipped, share):
    directory = as_bin(llama_tensors(), zipped=zipped)
    path = directory / "pytorch_model.bin"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(Truncated) as caught:
        gp.open_checkpoint(directory)
    assert str(path) in str(caught.value)
    assert "fetch the file again" in caught.value.hint
    assert "weights_only" not in str(caught.value)


def test_a_pickle_whose_inside_is_damaged(as_bin):
    directory = as_bin(llama_tensors())
    path = directory / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        contents = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            if not name.endswith("/data/5"):
                archive.writestr(name, content)
    with pytest.raises(CorruptHeader, match="the file is damaged") as caught:
        gp.open_checkpoint(directory)
    assert "weights_only" not in str(caught.value)


def test_a_tensor_that_claims_more_than_the_file_has(as_bin):
    directory = as_bin(llama_tensors() | {"model.layers.3.mlp.up_proj.weight": torch.zeros(1).expand(24, 16)})
    with pytest.raises(CorruptHeader, match=r"up_proj\.weight' claims 1,536 bytes and has 4"):
        gp.open_checkpoint(directory).layer(3)
    torch.save({"a": torch.zeros(1).expand(2**40)}, directory / "huge.pt")
    with cheap(), pytest.raises(CorruptHeader, match="claims 4,398,046,511,104 bytes"):
        TorchFile(directory / "huge.pt").read("a")
