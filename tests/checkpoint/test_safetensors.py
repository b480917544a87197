"""Safetensors files, whole and broken in every way that a header can lie."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import glu_probe as gp
from glu_probe.checkpoint.safetensors import SafetensorsFile
from glu_probe.errors import (
    CorruptHeader,
    GluProbeError,
    NotSafetensors,
    QuantizedWeights,
    TrailingBytes,
    Truncated,
    Unreadable,
)

from ..support import llama_tensors, write_llama
from .writers import (
    HTML,
    assert_corrupt,
    assert_same_factors,
    assert_same_table,
    cheap,
    command_line,
    gguf_tensors,
    header_of,
    pack_header,
    table,
    write_gguf,
)

# -- whole files --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_float_is_read_exactly_by_rows_too(tmp_path, dtype):
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "matrix": torch.randn(7, 5, generator=generator).to(dtype),
        "stack": torch.randn(3, 4, 2, generator=generator).to(dtype),
        "vector": torch.randn(6, generator=generator).to(dtype),
        "number": torch.tensor(2.5, dtype=dtype),
        "nothing": torch.empty(0, 5, dtype=dtype),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.infos()) == set(tensors)
    for name, tensor in tensors.items():
        info, found = file.infos()[name], file.read(name)
        assert info.shape == tuple(tensor.shape)
        assert info.nbytes == tensor.numel() * tensor.element_size()
        assert found.dtype == dtype
        assert torch.equal(found, tensor)
        if tensor.ndim:
            for rows in (slice(0, 2), slice(2, 5), slice(4, None), slice(3, 3), slice(5, 2), slice(0, 99)):
                assert torch.equal(file.read(name, rows), tensor[rows])


def test_layers_come_in_natural_order(llama):
    names = [name for name in header_of(llama / "model.safetensors")[0] if name.endswith("mlp.gate_proj.weight")]
    in_file = [int(name.split(".")[2]) for name in names]
    assert in_file != sorted(in_file)  # or the test would show nothing
    assert gp.open_checkpoint(llama).describe()["layer"].tolist() == list(range(12))
    assert gp.probe(llama, samples=2).layers["layer"].tolist() == list(range(12))


def test_other_dtypes_elsewhere_do_no_harm_and_in_an_mlp_are_refused(tmp_path):
    tensors = llama_tensors() | {"model.ids": torch.arange(7), "model.mask": torch.tensor([True, False])}
    directory = write_llama(tmp_path / "whole")
    save_file(tensors, directory / "model.safetensors")
    assert len(gp.open_checkpoint(directory).sites) == 12
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.ones(24, 16, dtype=torch.int8)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(QuantizedWeights, match=r"model\.layers\.3\.mlp\.up_proj.*I8"):
        gp.open_checkpoint(directory).layer(3)
    file = SafetensorsFile(directory / "model.safetensors")
    with pytest.raises(QuantizedWeights, match=r"tensor 'model\.mask' is stored as BOOL.*Use a checkpoint in float"):
        file.read("model.mask")


# -- harmless headers ---------------------------------------------------------------------------


def _reordered(header: dict) -> dict:
    return dict(reversed(header.items()))


HARMLESS = {
    "trailing spaces": lambda header: json.dumps(header) + " " * 1000,
    "no metadata": lambda header: {key: value for key, value in header.items() if key != "__metadata__"},
    "empty metadata": lambda header: {"__metadata__": {}} | header,
    "null metadata": lambda header: {"__metadata__": None} | header,
    "metadata of text": lambda header: {"__metadata__": {"format": "pt", "日本": "語"}} | header,
    "another order": _reordered,
    "empty tensors": lambda header: (
        header
        | {
            "model.none": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
            "model.layers.3.none": {"dtype": "F32", "shape": [4, 0, 7], "data_offsets": [0, 0]},
            "model.layers.5.self_attn.none": {"dtype": "I64", "shape": [0, 3], "data_offsets": [2048, 2048]},
        }
    ),
    "a float type of tomorrow elsewhere": lambda header: (
        header | {"model.odd": {"dtype": "F6_E9M9", "shape": [7], "data_offsets": [0, 0]}}
    ),
    "unknown fields": lambda header: {
        key: value | {"comment": "?"} if "dtype" in value else value for key, value in header.items()
    },
    "indentation": lambda header: json.dumps(header, indent=1),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return table(write_llama(tmp_path_factory.mktemp("plain") / "llama"))


@pytest.mark.parametrize("change", HARMLESS)
def test_harmless_headers_give_the_same_table(llama, expected, change):
    path = llama / "model.safetensors"
    header, data = header_of(path)
    path.write_bytes(pack_header(HARMLESS[change](header), data))
    assert_same_table(llama, expected)


# -- something else -----------------------------------------------------------------------------


def _zip(directory: Path) -> None:
    torch.save(llama_tensors(), directory / "model.safetensors")


def _old_pickle(directory: Path) -> None:
    torch.save(llama_tensors(), directory / "model.safetensors", _use_new_zipfile_serialization=False)


def _gguf(directory: Path) -> None:
    write_gguf(directory / "x.gguf", gguf_tensors()).rename(directory / "model.safetensors")


def _directory(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()


def _bytes(raw: bytes):
    return lambda directory: (directory / "model.safetensors").write_bytes(raw)


@pytest.mark.parametrize(
    ("write", "named", "advice"),
    [
        (_zip, "a zip archive, as PyTorch's .bin files are", "let its name end in .bin"),
        (_old_pickle, "a Python pickle, as old .bin files are", "let its name end in .bin"),
        (_gguf, "a GGUF file", "let its name end in .gguf"),
        (_directory, "a directory", "Give the directory of the model, or a file"),
        (_bytes(HTML), "an HTML page", "Download the file again"),
        (_bytes(b"\xef\xbb\xbf\n\n  <html>" + HTML), "an HTML page", "Download the file again"),
        (_bytes(b"Entry not found"), "plain text", "Download the file again"),
        (_bytes(b'{"error":"Entry not found"}'), "JSON text", "Download the file again"),
        (_bytes(b"\x1f\x8b\x08" + b"\x77" * 40), "a gzip archive", "Download the file again"),
        (_bytes(b""), "an empty file", "Download the file again"),
        (_bytes(b"\x01\x02\x03\x04"), "a file of 4 bytes", "Download the file again"),
        (_bytes(b"\x80\x01\x00\x00\x00\x00\x00"), "a file of 7 bytes", "Download the file again"),
    ],
)
@pytest.mark.parametrize("by_file", [True, False])
def test_what_is_not_safetensors_is_called_what_it_is(llama, capsys, write, named, advice, by_file):
    path = llama / "model.safetensors"
    write(llama)
    ref = path if by_file else llama
    with pytest.raises(NotSafetensors) as caught:
        gp.open_checkpoint(ref)
    assert f"this is {named}" in str(caught.value)
    assert str(path) in str(caught.value)
    assert advice in caught.value.hint
    code, out, err = command_line(capsys, "inspect", ref)
    assert (code, out) == (2, "")
    assert "NotSafetensors" in err


# -- length -------------------------------------------------------------------------------------


def _last_tensor(path: Path) -> str:
    header, _ = header_of(path)
    return max((key for key in header if key != "__metadata__"), key=lambda key: header[key]["data_offsets"][1])


def test_a_file_cut_short_names_sizes_and_the_first_tensor_hit(llama):
    path = llama / "model.safetensors"
    _, data = header_of(path)
    raw, last = path.read_bytes(), _last_tensor(path)
    path.write_bytes(raw[:-8])
    with pytest.raises(Truncated) as caught:
        gp.open_checkpoint(llama)
    assert f"expected {len(data):,} bytes of data by the header, found {len(data) - 8:,}" in str(caught.value)
    assert f"the first tensor affected is {last!r}" in str(caught.value)
    assert "fetch the file again" in caught.value.hint
    path.write_bytes(raw[: -len(data) // 2])
    with pytest.raises(Truncated) as caught:
        gp.open_checkpoint(llama)
    header, _ = header_of(path)
    hit = str(caught.value).split("affected is ")[1].split("'")[1]
    begin, end = header[hit]["data_offsets"]
    assert begin <= len(data) - len(data) // 2 - 1 < end


def test_bytes_behind_the_last_tensor_are_another_error(llama, capsys):
    path = llama / "model.safetensors"
    _, data = header_of(path)
    path.write_bytes(path.read_bytes() + b"12345")
    with pytest.raises(TrailingBytes) as caught:
        gp.open_checkpoint(llama)
    assert "5 bytes follow the last tensor" in str(caught.value)
    assert f"expected {len(data):,} bytes of data by the header, found {len(data) + 5:,}" in str(caught.value)
    code, _, err = command_line(capsys, "report", llama, "-o", llama / "out")
    assert code == 2
    assert "TrailingBytes" in err
    assert not (llama / "out").exists()


def test_a_file_that_shrinks_after_it_was_opened(llama):
    path = llama / "model.safetensors"
    checkpoint = gp.open_checkpoint(llama)
    name = checkpoint.sites[5].tensors["up"]
    header, data = header_of(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - len(data) + header[name]["data_offsets"][0] + 10)
    with pytest.raises(Truncated, match="it changed while it was read"):
        for _ in checkpoint.layers():
            pass
    path.unlink()
    with pytest.raises(GluProbeError, match="there is no such file"):
        checkpoint.layer(0)


def test_a_file_that_the_system_refuses(llama, monkeypatch):
    real = Path.open

    def refuse(self, *args, **kwargs):
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(Unreadable, match=r"model\.safetensors: the file cannot be read: Permission denied"):
        gp.open_checkpoint(llama)


# -- hostile headers ----------------------------------------------------------------------------


def entry(shape: object, offsets: object, dtype: object = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "length 10^6": (
        struct.pack("<Q", 10**6) + b'{"a":1}',
        "its length of 1,000,000 bytes is beyond the file's end at 15",
    ),
    "length 200 MiB": (struct.pack("<Q", 200 << 20) + b"{}", "209,715,200 bytes is beyond the format's limit"),
    "length 2^64-1": (b"\xff" * 8 + b"{}", "18,446,744,073,709,551,615 bytes is beyond the format's limit"),
    "length 0": (bytes(8), "it is not JSON"),
    "only a length": (struct.pack("<Q", 10**6), "beyond the file's end at 8"),
    "duplicate tensor": (
        pack_header('{"a":%s,"a":%s}' % ((json.dumps(entry([1], [0, 4])),) * 2), bytes(4)),
        "the key 'a' stands in it twice",
    ),
    "duplicate field": (
        pack_header('{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "the key 'shape' stands in it twice",
    ),
    "overlap": (
        pack_header({"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, bytes(12)),
        "tensors 'a' and 'b' overlap",
    ),
    "the same bytes": (
        pack_header({"a": entry([2], [0, 8]), "b": entry([2], [0, 8])}, bytes(8)),
        "tensors 'a' and 'b' overlap",
    ),
    "hole": (
        pack_header({"a": entry([1], [0, 4]), "b": entry([1], [12, 16])}, bytes(16)),
        "a hole between bytes 4 and 12, before 'b'",
    ),
    "hole in front": (pack_header({"a": entry([1], [4, 8])}, bytes(8)), "a hole between bytes 0 and 4"),
    "shape overflows": (pack_header({"a": entry([2**32, 2**32], [0, 0])}), "'a' has a shape that overflows"),
    "shape overflows to 0": (pack_header({"a": entry([2**32, 2**32, 0], [0, 0])}), "'a' has a shape that overflows"),
    "shape of many numbers": (pack_header({"a": entry([10**4000] * 200, [0, 0])}), "'a' has a shape that overflows"),
    "shape needs more": (pack_header({"a": entry([3], [0, 8])}, bytes(8)), "'a' of F32 [3] needs 12 bytes"),
    "shape needs less": (pack_header({"a": entry([1, 1], [0, 8])}, bytes(8)), "'a' of F32 [1, 1] needs 4 bytes"),
    "negative dimension": (pack_header({"a": entry([-1, -2], [0, 8])}, bytes(8)), "'a' has a negative dimension"),
    "fractional dimension": (pack_header({"a": entry([2.0], [0, 8])}, bytes(8)), "not of whole numbers: [2.0]"),
    "true as dimension": (pack_header({"a": entry([True], [0, 4])}, bytes(4)), "not of whole numbers: [True]"),
    "text as dimension": (pack_header({"a": entry(["2"], [0, 8])}, bytes(8)), "not of whole numbers: ['2']"),
    "negative offset": (pack_header({"a": entry([1], [-4, 0])}, bytes(4)), "offsets that are not sizes: [-4, 0]"),
    "offsets reversed": (pack_header({"a": entry([1], [8, 4])}, bytes(8)), "'a' ends before it begins: [8, 4]"),
    "three offsets": (pack_header({"a": entry([1], [0, 4, 8])}, bytes(8)), "'a' lacks dtype, shape or data_offsets"),
    "no dtype": (pack_header({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "'a' lacks dtype"),
    "dtype not text": (pack_header({"a": entry([1], [0, 4], 7)}, bytes(4)), "'a' lacks dtype"),
    "tensor not an object": (pack_header({"a": [1, 2]}), "'a' lacks dtype"),
    "NUL padding": (pack_header(b"{}" + bytes(6)), "it is padded with NUL bytes"),
    "not an object": (pack_header(b"[1, 2]"), "it is not a JSON object"),
    "cut JSON": (pack_header(b'{"a":{"dtype":"F3'), "it is not JSON"),
    "not UTF-8": (pack_header(b'{"\xff\xfe":1}'), "it is not JSON"),
    "deep nesting": (pack_header(b'{"a":' + b"[" * 200_000), "it is not JSON"),
    "endless number": (pack_header(b'{"a":' + b"9" * 5000 + b"}"), "it is not JSON"),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_headers_are_refused_with_their_reason(tmp_path, fault):
    raw, reason = HOSTILE[fault]
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    assert_corrupt(path, reason)


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (200 << 20, "beyond the format's limit"),
        (90_000_000, "padded with NUL bytes"),
        (2**63, "beyond the format's limit"),
    ],
)
def test_a_large_file_does_not_make_a_hostile_length_dear(tmp_path, length, reason):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length) + b"{")
        file.truncate(300 << 20)  # a hole: takes no room on disk
    with cheap(), pytest.raises(CorruptHeader, match=reason):
        gp.open_checkpoint(path)


def test_a_corrupt_header_ends_the_command_with_2(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(HOSTILE["overlap"][0])
    code, out, err = command_line(capsys, "inspect", tmp_path)
    assert (code, out) == (2, "")
    assert "error: CorruptHeader: " in err
    assert "overlap" in err


# -- damage at random ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, bytes]:
    directory = write_llama(tmp_path_factory.mktemp("fuzz") / "small", layers=2, d_mlp=3, d_model=2)
    return directory, (directory / "model.safetensors").read_bytes()


def damage(size: int) -> st.SearchStrategy:
    """Bytes to put in the place of others, and where the file ends."""
    return st.tuples(
        st.lists(st.tuples(st.integers(0, size - 1), st.binary(min_size=1, max_size=8)), max_size=4),
        st.one_of(st.just(size), st.integers(0, size + 9)),
    )


def damaged(raw: bytes, how: tuple) -> bytes:
    edits, end = how
    out = bytearray(raw)
    for at, new in edits:
        out[at : at + len(new)] = new
    return bytes(out[:end].ljust(end, b"\0"))


@settings(
    max_examples=250, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data())
def test_damage_ends_in_an_error_of_ours_or_in_an_opened_file(small, data):
    directory, raw = small
    head = 8 + int.from_bytes(raw[:8], "little")
    how = data.draw(st.one_of(damage(head), damage(len(raw))))
    changed = damaged(raw, how if how[1] != head else (how[0], len(raw)))
    (directory / "model.safetensors").write_bytes(changed)
    with cheap(), contextlib.suppress(GluProbeError):
        assert list(gp.open_checkpoint(directory).layers())


def test_a_damaged_file_is_never_opened_as_if_whole_where_the_format_can_tell(small):
    """Every cut, at any byte, is noticed."""
    directory, raw = small
    for end in range(0, len(raw), 7):
        (directory / "model.safetensors").write_bytes(raw[:end])
        with pytest.raises((NotSafetensors, CorruptHeader, Truncated)):
            gp.open_checkpoint(directory)


def test_the_whole_file_of_these_tests_is_read(small):
    directory, raw = small
    (directory / "model.safetensors").write_bytes(raw)
    assert len(list(gp.open_checkpoint(directory).layers())) == 2


def test_two_copies_have_the_same_factors(llama, tmp_path):
    assert_same_factors(llama, write_llama(tmp_path / "again"))
