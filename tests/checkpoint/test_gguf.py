"""GGUF files, against the gguf library that wrote them."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import glu_probe as gp
from glu_probe.checkpoint.gguf import GGUFFile
from glu_probe.errors import (
    AmbiguousFiles,
    GluProbeError,
    IndexMismatch,
    MissingShard,
    NotGGUF,
    QuantizedWeights,
    Truncated,
)

from ..support import write_llama
from .test_safetensors import damage, damaged
from .writers import (
    GGUF_NAMES,
    HTML,
    assert_corrupt,
    assert_same_factors,
    cheap,
    command_line,
    gguf_tensors,
    table,
    write_gguf,
)

WIDE = {"d_model": 256, "d_mlp": 512, "layers": 2}  # super-blocks of the K types are 256 wide
WRITABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]
READABLE = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]


@pytest.fixture(scope="module")
def wide() -> dict[str, np.ndarray]:
    return gguf_tensors(**WIDE)


def library_view(path: Path) -> dict:
    """Name to (type, shape, bytes, values) by the gguf library's own reader."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    views = {}
    for tensor in GGUFReader(path).tensors:
        shape = tuple(int(size) for size in tensor.shape[::-1])
        views[tensor.name] = (
            tensor.tensor_type.name,
            shape,
            int(tensor.n_bytes),
            dequantize(tensor.data, tensor.tensor_type).reshape(shape),
        )
    return views


@pytest.mark.parametrize("kind", WRITABLE)
def test_every_type_is_read_as_the_library_reads_it(tmp_path, wide, kind):
    path = write_gguf(tmp_path / "x.gguf", wide, kind, **WIDE, vocabulary=300)
    file, views = GGUFFile(path), library_view(path)
    assert {(info.dtype, info.shape, info.nbytes) for info in file.infos().values()} == {
        view[:3] for view in views.values()
    }
    assert list(file.infos()) == list(views)
    for name, (dtype, shape, nbytes, values) in views.items():
        info = file.infos()[name]
        assert (info.dtype, info.shape, info.nbytes, info.file) == (dtype, shape, nbytes, str(path))
        found = file.read(name)
        assert found.dtype == torch.float32
        assert torch.equal(found, torch.from_numpy(np.array(values, dtype=np.float32)))
        for rows in (slice(1, 5), slice(100, None), slice(3, 3), slice(7, 2)):
            assert torch.equal(file.read(name, rows), found[rows])


@pytest.mark.parametrize("kind", READABLE)
def test_types_that_only_llama_cpp_writes(tmp_path, kind):
    """The library cannot write these, so their blocks are random bytes whose scales are ordinary numbers."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    type_ = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(5)
    # Small bytes: as halves of a float16 they stay finite wherever a scale stands.
    raw = rng.integers(0, 60, (6, 512 // block * block_bytes), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "x.gguf")
    dtype, shape, nbytes, values = library_view(tmp_path / "x.gguf")["w"]
    assert (file.infos()["w"].dtype, file.infos()["w"].shape) == (dtype, shape) == (kind, (6, 512))
    assert file.infos()["w"].nbytes == nbytes
    assert np.abs(values).max() > 0
    assert torch.equal(file.read("w"), torch.from_numpy(values.copy()))
    assert torch.equal(file.read("w", slice(2, 4)), torch.from_numpy(values[2:4].copy()))


def test_the_table_is_that_of_safetensors(llama, tmp_path):
    """Same weights, same numbers; the description differs only in the tensors' names."""
    directory = tmp_path / "llama" / "gguf"
    directory.mkdir()
    path = write_gguf(directory / "x.gguf", gguf_tensors())
    for ref in (path, directory):
        assert_same_factors(ref, llama)
        for found, wanted in zip(table(ref), table(llama), strict=True):
            found, wanted = (
                frame.drop(columns=["gate", "up", "down", "norm_tensor"], errors="ignore") for frame in (found, wanted)
            )
            pd.testing.assert_frame_equal(found, wanted, check_exact=True)
    checkpoint = gp.open_checkpoint(path)
    assert checkpoint.notes == []
    assert checkpoint.layer(7).sources == {
        "gate": "blk.7.ffn_gate.weight",
        "up": "blk.7.ffn_up.weight",
        "down": "blk.7.ffn_down.weight",
        "norm": "blk.7.ffn_norm.weight",
    }
    assert checkpoint.provenance()["files"][0]["bytes"] == path.stat().st_size


@pytest.mark.parametrize(("kind", "allowed"), [("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 2e-2), ("Q4_0", 0.2)])
def test_a_quantised_model_comes_near_the_one_it_was_made_of(tmp_path, wide, kind, allowed):
    path = write_gguf(tmp_path / "x.gguf", wide, kind, **WIDE)
    exact = gp.open_checkpoint(write_llama(tmp_path / "exact", **WIDE))
    for layer in gp.open_checkpoint(path).layers():
        plain = exact.layer(layer.layer)
        for ours, theirs in ((layer.query, plain.query), (layer.key, plain.key), (layer.value, plain.value)):
            assert 0 < ((ours - theirs).norm() / theirs.norm()).item() < allowed
    assert set(gp.open_checkpoint(path).describe()["dtype"]) == {kind}


def test_float64_keeps_its_width(tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 6))
    file = GGUFFile(write_gguf(tmp_path / "x.gguf", {"w": values, "v": values[0].copy()}))
    assert file.infos()["w"].dtype == "F64"
    assert torch.equal(file.read("w"), torch.from_numpy(values))
    assert torch.equal(file.read("w", slice(1, 3)), torch.from_numpy(values[1:3]))
    assert torch.equal(file.read("v"), torch.from_numpy(values[0]))


def test_stacks_of_matrices_are_cut_by_their_first_dimension(tmp_path):
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize, quantize

    values = np.random.default_rng(0).normal(size=(3, 8, 64)).astype(np.float32)
    packed = quantize(values, GGMLQuantizationType.Q8_0)
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("stack", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = torch.from_numpy(dequantize(packed, GGMLQuantizationType.Q8_0))
    file = GGUFFile(tmp_path / "x.gguf")
    assert torch.equal(file.read("stack"), expected)
    assert torch.equal(file.read("stack", slice(1, 2)), expected[1:2])


def test_integers_are_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", {"w": np.ones((2, 3), dtype=np.int32)})
    with pytest.raises(QuantizedWeights, match="tensor 'w' is quantised as I32") as caught:
        GGUFFile(path).read("w")
    assert "Q8_0 or F16" in caught.value.hint


def test_a_large_vocabulary_is_stepped_over(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", gguf_tensors(layers=1), layers=1, vocabulary=30_000)
    with cheap(megabytes=5):
        file = GGUFFile(path)
    assert file.metadata["tokenizer.ggml.tokens"] is None
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.embedding_length"] == 16
    assert len(gp.open_checkpoint(path).sites) == 1


# -- several files ------------------------------------------------------------------------------


def test_split_files_are_one_model_whichever_part_is_named(llama, tmp_path):
    directory = tmp_path / "split"
    directory.mkdir()
    first = write_gguf(directory / "m.gguf", gguf_tensors(), split=3)
    parts = sorted(directory.iterdir())
    assert [part.name for part in parts] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert parts[0] == first
    for ref in (directory, *parts):
        assert_same_factors(ref, llama)
    files = gp.open_checkpoint(parts[2]).provenance()["files"]
    assert [file["name"] for file in files] == [part.name for part in parts]


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_missing_part(tmp_path, capsys, lost):
    write_gguf(tmp_path / "m.gguf", gguf_tensors(), split=3)
    (tmp_path / f"m-0000{lost}-of-00003.gguf").unlink()
    kept = next(tmp_path.glob("m-*.gguf"))
    with pytest.raises(MissingShard, match=rf"m-0000{lost}-of-00003\.gguf of 3 parts is absent") as caught:
        gp.open_checkpoint(kept)
    assert str(tmp_path) in str(caught.value)
    code, _, err = command_line(capsys, "report", kept, "-o", tmp_path / "out")
    assert code == 2
    assert "MissingShard" in err
    assert not (tmp_path / "out").exists()


def test_a_directory_that_lacks_the_first_part_says_so(tmp_path):
    write_gguf(tmp_path / "m.gguf", gguf_tensors(), split=3)
    (tmp_path / "m-00001-of-00003.gguf").unlink()
    with pytest.raises(MissingShard, match=r"m-00001-of-00003\.gguf of 3 parts is absent"):
        gp.open_checkpoint(tmp_path)


def test_a_part_that_lost_its_name(tmp_path):
    first = write_gguf(tmp_path / "m.gguf", gguf_tensors(), split=3)
    renamed = first.rename(tmp_path / "mine.gguf")
    with pytest.raises(MissingShard, match=r"mine\.gguf is one of 3 parts, but its name does not say which"):
        gp.open_checkpoint(renamed)


def test_parts_of_two_models(tmp_path):
    write_gguf(tmp_path / "m.gguf", gguf_tensors(), split=2)
    first, second = sorted(tmp_path.glob("m-*.gguf"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(IndexMismatch, match=r"is in .*m-00001-of-00002.* and in .*m-00002-of-00002"):
        gp.open_checkpoint(tmp_path)


def test_several_models_in_one_directory(tmp_path):
    for kind in ("F16", "BF16"):
        write_gguf(tmp_path / f"m-{kind}.gguf", gguf_tensors(), kind)
    with pytest.raises(AmbiguousFiles, match=r"2 GGUF files: m-BF16\.gguf, m-F16\.gguf") as caught:
        gp.open_checkpoint(tmp_path)
    assert caught.value.hint == "Give the path of the one to read"
    (tmp_path / "m-BF16.gguf").rename(tmp_path / "mmproj-BF16.gguf")  # a vision projector goes with the model
    assert len(gp.open_checkpoint(tmp_path).sites) == 12


# -- something else, and damage -----------------------------------------------------------------


def _safetensors(path: Path) -> None:
    (write_llama(path.parent / "other") / "model.safetensors").rename(path)


@pytest.mark.parametrize(
    ("write", "named", "advice"),
    [
        (_safetensors, "a safetensors file", "let its name end in .safetensors"),
        (lambda path: torch.save({}, path), "a zip archive", "let its name end in .bin"),
        (lambda path: path.write_bytes(HTML), "an HTML page", "Download the file again"),
        (lambda path: path.write_bytes(b"GGUX" + bytes(60)), "a file of an unknown kind", "Download the file again"),
        (lambda path: path.write_bytes(b"ggjt" + bytes(60)), "a file of an unknown kind", "Download the file again"),
        (lambda path: path.write_bytes(b""), "an empty file", "Download the file again"),
        (lambda path: path.write_bytes(b"GGU"), "a file of 3 bytes", "Download the file again"),
    ],
)
def test_what_is_not_gguf_is_called_what_it_is(tmp_path, write, named, advice):
    path = tmp_path / "x.gguf"
    write(path)
    for ref in (path, tmp_path):
        with pytest.raises(NotGGUF) as caught:
            gp.open_checkpoint(ref)
        assert f"{path}: this is {named}" in str(caught.value)
        assert advice in caught.value.hint


def test_a_directory_in_the_place_of_a_file(tmp_path):
    (tmp_path / "x.gguf").mkdir()
    with pytest.raises(NotGGUF, match=r"x\.gguf: this is a directory, not a GGUF file"):
        gp.open_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, bytes, int]:
    """A small file: its path, its bytes, and where its data begins."""
    path = tmp_path_factory.mktemp("fuzz") / "small.gguf"
    shape = {"layers": 2, "d_mlp": 3, "d_model": 2}
    write_gguf(path, gguf_tensors(**shape), **shape, vocabulary=80)
    return path, path.read_bytes(), min(GGUFFile(path)._header.starts.values())


def test_a_file_cut_anywhere_is_truncated(small, tmp_path):
    _, raw, data_start = small
    path = tmp_path / "cut.gguf"
    from gguf import GGUFReader

    last = max(GGUFReader(small[0]).tensors, key=lambda tensor: tensor.data_offset)
    end = int(last.data_offset + last.n_bytes)
    assert data_start < end <= len(raw)
    for size in [*range(4, end - 1, 11), end - 8, end - 1]:
        path.write_bytes(raw[:size])
        with pytest.raises(Truncated) as caught:
            gp.open_checkpoint(path)
        assert f"found {size:,}" in str(caught.value)
        assert "fetch the file again" in caught.value.hint
        assert ("is affected" in str(caught.value)) == (size >= data_start)
    path.write_bytes(raw[: end - 1])
    with pytest.raises(Truncated, match=rf"tensor '{last.name}' is affected"):
        gp.open_checkpoint(path)
    path.write_bytes(raw[:end])
    assert len(gp.open_checkpoint(path).sites) == 2


def test_a_file_that_shrinks_after_it_was_opened(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", gguf_tensors())
    checkpoint = gp.open_checkpoint(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(Truncated, match="it changed while it was read"):
        list(checkpoint.layers())


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(*, version: int = 3, tensors: int = 0, pairs: int = 0, body: bytes = b"", tail: bytes = bytes(64)) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + body + tail


def tensor(name: str = "w", shape: tuple = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(inner: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", inner, count) + values


HOSTILE = {
    "version 1": (header(version=1), "format version 1 is not 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "big-endian files are not read"),
    "2^60 tensors": (header(tensors=2**60), "more than the file has bytes"),
    "2^64-1 pairs": (header(pairs=2**64 - 1), "more than the file has bytes"),
    "long key": (header(pairs=1, body=struct.pack("<Q", 2**63)), "asks for 9,223,372,036,854,775,808 bytes"),
    "long text": (header(pairs=1, body=pair("k", 8, struct.pack("<Q", 10**6))), "asks for 1,000,000 bytes"),
    "long array": (header(pairs=1, body=pair("k", 9, array(5, 2**62))), "values is longer than the file"),
    "array beyond the end": (header(pairs=1, body=pair("k", 9, array(10, 90))), "asks for 720 bytes"),
    "deep arrays": (header(pairs=1, body=pair("k", 9, array(9, 1) * 5000)), "deep in one another"),
    "many arrays": (header(pairs=1, body=pair("k", 9, array(9, 65) + bytes(900))), "an array of 65 values of type 9"),
    "value type": (header(pairs=1, body=pair("k", 99, b"")), "value type 99 does not exist"),
    "duplicate key": (header(pairs=2, body=pair("k", 0, b"1") * 2), "the key 'k' stands in it twice"),
    "not UTF-8": (header(pairs=1, body=struct.pack("<Q", 2) + b"\xff\xfe"), "a text in it is not UTF-8"),
    "architecture": (
        header(pairs=1, body=pair("general.architecture", 4, struct.pack("<I", 7))),
        "general.architecture is 7",
    ),
    "alignment 0": (header(pairs=1, body=pair("general.alignment", 4, bytes(4))), "general.alignment is 0"),
    "alignment text": (header(pairs=1, body=pair("general.alignment", 8, text("x"))), "general.alignment is 'x'"),
    "split text": (header(pairs=1, body=pair("split.count", 8, text("x"))), "split.count is 'x'"),
    "dimensions": (header(tensors=1, body=tensor(shape=(1,) * 9)), "tensor 'w' has 9 dimensions"),
    "shape overflows": (header(tensors=1, body=tensor(shape=(2**62, 2**62))), "a shape that overflows"),
    "duplicate tensor": (header(tensors=2, body=tensor() * 2), "tensor 'w' stands in it twice"),
    "type": (header(tensors=1, body=tensor(kind=4_000)), "tensor 'w' has type 4000"),
    "ragged blocks": (header(tensors=1, body=tensor(shape=(33, 2), kind=8)), "rows of 33, not a multiple of 32"),
    "far offset": (header(tensors=1, body=tensor(offset=2**63)), "'w' begins at byte 9,223,372,036,854,775,808"),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_headers_are_refused_with_their_reason(tmp_path, fault):
    raw, reason = HOSTILE[fault]
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    assert_corrupt(path, reason)


def test_a_corrupt_header_ends_the_command_with_2(tmp_path, capsys):
    (tmp_path / "x.gguf").write_bytes(HOSTILE["2^60 tensors"][0])
    code, out, err = command_line(capsys, "inspect", tmp_path)
    assert (code, out) == (2, "")
    assert "error: CorruptHeader: " in err


@settings(
    max_examples=250, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data())
def test_damage_ends_in_an_error_of_ours_or_in_an_opened_file(small, tmp_path_factory, data):
    _, raw, data_start = small
    how = data.draw(st.one_of(damage(data_start), damage(len(raw))))
    changed = damaged(raw, how if how[1] != data_start else (how[0], len(raw)))
    path = small[0].with_name("changed.gguf")
    path.write_bytes(changed)
    with cheap(), contextlib.suppress(GluProbeError):
        assert list(gp.open_checkpoint(path).layers())


def test_names_of_these_tests_are_the_library_s_own():
    """The table that the writer of these tests uses agrees with the one of the gguf library."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 3)
    for theirs, ours in GGUF_NAMES.items():
        assert names.get_name(f"model.layers.2.{theirs}") == f"blk.2.{ours}"
