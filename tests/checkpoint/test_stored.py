"""MLPs that are measured from what is stored, in memory or in their file: the same rows and numbers as from whole factors."""

from __future__ import annotations

import gc
import os
import resource
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import glu_probe as gp
from glu_probe import measuring
from glu_probe.checkpoint import memory, raw
from glu_probe.checkpoint.memory import in_bytes
from glu_probe.checkpoint.stored import StoredLayer
from glu_probe.errors import BadOption, CannotWrite, GluProbeError, Truncated
from glu_probe.frames import LayerResult
from glu_probe.layer_rows import ROLES
from glu_probe.measures import sampling, spectra, tensor
from glu_probe.testing import write_tiny_checkpoint

from ..support import llama_config, llama_tensors, write_checkpoint, write_llama
from .packing import packed_model
from .test_quantized import fp8
from .writers import gguf_tensors, write_gguf

needs_file_limits = pytest.mark.skipif(os.name != "posix", reason="limits of file sizes are POSIX")


def family(name: str, **options):
    """A form of file that `write_tiny_checkpoint` knows; other options are those of `open_checkpoint`."""
    opening = {key: options.pop(key) for key in ("fused_layout",) if key in options}

    def write(directory: Path) -> tuple[Path, dict]:
        write_tiny_checkpoint(name, directory, layers=2, **options)
        return directory, opening

    return write


def post_norm(directory: Path) -> tuple[Path, dict]:
    """Gemma 2, with the norm behind the MLP in value."""
    write_tiny_checkpoint("gemma2", directory, layers=1)
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if "pre_feedforward" in name).replace("pre_", "post_")
    config = {
        "model_type": "gemma2",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    return write_checkpoint(directory, tensors | {name: torch.linspace(-0.5, 2, 16)}, config), {"fold_post_norm": True}


def falcon_h1(directory: Path) -> tuple[Path, dict]:
    """Gate and down are multiplied with numbers of the config."""
    tensors = {
        name.replace(".mlp.", ".feed_forward.").replace("post_attention_layernorm", "pre_ff_layernorm"): t
        for name, t in llama_tensors(layers=1).items()
    }
    config = llama_config(model_type="falcon_h1", num_hidden_layers=1, mlp_multipliers=[0.37, 1.9])
    return write_checkpoint(directory, tensors, config), {}


def of_dtype(dtype: torch.dtype, **changes):
    def write(directory: Path) -> tuple[Path, dict]:
        tensors = {n: t.to(changes.get(n.split(".")[-2], dtype)) for n, t in llama_tensors(layers=2).items()}
        return write_checkpoint(directory, tensors, llama_config(num_hidden_layers=2)), {}

    return write


def gguf(kind: str):
    def write(directory: Path) -> tuple[Path, dict]:
        sizes = {"d_model": 32, "d_mlp": 64, "layers": 1}
        return write_gguf(directory.with_suffix(".gguf"), gguf_tensors(**sizes), kind, **sizes), {}

    return write


def torch_bin(directory: Path) -> tuple[Path, dict]:
    write_checkpoint(directory, {"unused": torch.zeros(1)}, llama_config(num_hidden_layers=1))
    (directory / "model.safetensors").unlink()
    torch.save(llama_tensors(layers=1), directory / "pytorch_model.bin")
    return directory, {}


FORMS = {
    "separate": family("llama"),
    "gate first": family("phi3"),
    "up first": family("llama", order="up-first", fused_layout="up-first"),
    "interleaved": family("llama", order="interleaved", fused_layout="interleaved"),
    "conv1d, biases, LayerNorm": family("jais"),
    "up first, biases": family("moonshine"),
    "experts one by one": family("mixtral"),
    "experts stacked": family("qwen3_moe", order="gate-first", storage="stacked"),
    "experts stacked as columns": family("gpt_oss"),
    "experts below each other": family("dbrx"),
    "1 + w": family("gemma"),
    "post norm": post_norm,
    "multipliers": falcon_h1,
    "bfloat16": of_dtype(torch.bfloat16),
    "float64": of_dtype(torch.float64),
    "mixed dtypes": of_dtype(torch.float16, gate_proj=torch.float64, down_proj=torch.bfloat16),
    "GGUF F16": gguf("F16"),
    "GGUF Q8_0": gguf("Q8_0"),
    "pickle": torch_bin,
    "FP8 beside plain": lambda directory: (packed_model(directory, fp8(32, 32), None)[0], {}),
}


@pytest.fixture(params=FORMS)
def checkpoint(request, tmp_path, monkeypatch):
    """A checkpoint of every form, read in pieces of few values."""
    monkeypatch.setattr(memory, "_CHUNK", 100)
    monkeypatch.setattr(raw, "STRIPE", 700)
    place, options = FORMS[request.param](tmp_path / "model")
    return gp.open_checkpoint(place, **options)


def assert_same_result(found: LayerResult, expected: LayerResult, *, rtol: float = 0.0) -> None:
    for name in ("neurons", "flags", "nulls", "scalars"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            np.testing.assert_allclose(ours[key], value, rtol=rtol, atol=0, err_msg=key)
    assert (found.methods, found.samples, found.note) == (expected.methods, expected.samples, expected.note)


def three_ways(checkpoint: gp.Checkpoint) -> list[tuple[StoredLayer, StoredLayer, gp.GatedLayer]]:
    """Every MLP: what is stored held, left in the file, and whole."""
    return [
        (checkpoint.stored(site), checkpoint.stored(site, limit=0), checkpoint.load(site)) for site in checkpoint.sites
    ]


def picks(d_mlp: int) -> list[slice | Tensor]:
    """Ranges of rows and single ones, in an order of their own and more than once."""
    return [
        slice(None), slice(0, 1), slice(d_mlp - 3, d_mlp), slice(5, 17), slice(4, 4), slice(7, d_mlp + 9),
        torch.tensor([3]), torch.tensor([d_mlp - 1, 0, 5, 5, 6]), torch.tensor([], dtype=torch.long),
    ]  # fmt: skip


def test_rows_are_the_same_bit_for_bit(checkpoint):
    ways = three_ways(checkpoint)
    assert ways
    for held, filed, whole in ways:
        assert held.held
        assert filed.held == (checkpoint.sites[0].slabs["gate"].expert is not None)
        for role in ROLES:
            for which in picks(whole.d_mlp):
                expected = getattr(whole, role)[which]
                assert len(expected) < 2 or expected.std() > 0.01  # the fixture must not be trivial
                for layer in (held, filed):
                    found = layer.rows(role, which)
                    assert found.dtype == expected.dtype
                    assert torch.equal(found, expected), (role, which)
            read, fold = filed.unfolded(role)
            vectors = torch.randn(whole.d_model, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            matrix = getattr(whole, role).double()
            image = read(slice(None)).double() @ fold.inward(vectors)
            torch.testing.assert_close(image, matrix @ vectors, rtol=1e-5, atol=1e-5)
            back = fold.outward(read(slice(None)).double().T @ image)
            torch.testing.assert_close(back, matrix.T @ (matrix @ vectors), rtol=1e-5, atol=1e-5)
        for bias in ("query_bias", "key_bias", "output_bias"):
            for layer in (held, filed):
                found, expected = getattr(layer, bias), getattr(whole, bias)
                assert (found is None) == (expected is None)
                assert found is None or torch.equal(found, expected)


def test_numbers_are_the_same_bit_for_bit(checkpoint):
    for held, filed, whole in three_ways(checkpoint):
        expected = gp.measure_layer(whole)
        assert_same_result(gp.measure_layer(held), expected)
        assert_same_result(gp.measure_layer(filed), expected)


def large(monkeypatch) -> None:
    """Let small layers take the ways of large ones."""
    monkeypatch.setattr(spectra, "EXACT_FLOPS", 0)
    monkeypatch.setattr(tensor, "_EXACT_FLOPS", 0)
    monkeypatch.setattr(sampling, "_SINGLE", 0)


def test_numbers_of_large_layers_are_the_same_bit_for_bit(checkpoint, monkeypatch):
    """From whole factors, iterated spectra differ by roundings: a norm is not folded into rows but into vectors."""
    large(monkeypatch)
    for held, filed, whole in three_ways(checkpoint)[:1]:
        expected = gp.measure_layer(held)
        assert "random pairs" in expected.methods["tensor_asymmetry"]
        assert "Lanczos" in expected.methods["spectra"]
        assert_same_result(gp.measure_layer(filed), expected)
        other = gp.measure_layer(whole)
        assert_same_result_but_spectra(other, expected)


def assert_same_result_but_spectra(found: LayerResult, expected: LayerResult) -> None:
    for key, value in expected.scalars.items():
        rtol = 0 if "asymmetry" in key else 0.02
        if key not in ("spectral_residual", "spectral_sampling_error", "branch_overlap_se"):
            np.testing.assert_allclose(found.scalars[key], value, rtol=rtol, err_msg=key)


@pytest.mark.parametrize("name", ["llama", "jais", "phi3"])
def test_several_blocks(name, tmp_path, monkeypatch):
    """More neurons than a block has, and stripes that end inside one."""
    write_tiny_checkpoint(name, tmp_path, layers=1, d_mlp=600)
    monkeypatch.setattr(raw, "STRIPE", 16 * 4 * 100)
    large(monkeypatch)
    checkpoint = gp.open_checkpoint(tmp_path)
    ((held, filed, whole),) = three_ways(checkpoint)
    assert_same_result(gp.measure_layer(filed), gp.measure_layer(held))
    assert all(torch.equal(filed.rows(role, slice(None)), getattr(whole, role)) for role in ROLES)


@pytest.mark.parametrize("shape", [(1, 16), (2, 5), (3, 1), (7, 40), (1, 1)])
def test_layers_of_few_neurons_or_little_width(shape, tmp_path, monkeypatch):
    d_mlp, d_model = shape
    place = write_llama(tmp_path / "few", layers=1, d_mlp=d_mlp, d_model=d_model)
    for ways in ("exact", "large"):
        if ways == "large":
            large(monkeypatch)
        ((held, filed, whole),) = three_ways(gp.open_checkpoint(place, family="llama"))
        expected = gp.measure_layer(held)
        assert np.isfinite(expected.neurons["query_norm"]).all()
        assert np.isfinite(expected.scalars["gate_frobenius"])
        assert_same_result(gp.measure_layer(filed), expected)
        assert_same_result_but_spectra(gp.measure_layer(whole), expected)


def test_frames_do_not_depend_on_the_memory(tmp_path, monkeypatch):
    place = write_llama(tmp_path / "wide", layers=2, d_mlp=600)
    held, seen = [], measuring.measure_layer
    monkeypatch.setattr(
        measuring, "measure_layer", lambda layer, **options: (held.append(layer.held), seen(layer, **options))[1]
    )
    expected = gp.probe(place)
    monkeypatch.setattr(memory, "_LEAST", 1)
    found = gp.probe(place, memory=1000)
    assert held == [True, True, False, False]
    for frame in ("layers", "neurons", "classes"):
        pd.testing.assert_frame_equal(getattr(found, frame), getattr(expected, frame), check_exact=True)
    assert found.provenance["methods"] == expected.provenance["methods"]


def test_a_layer_is_held_where_half_of_the_memory_holds_it(tmp_path):
    checkpoint = gp.open_checkpoint(of_dtype(torch.bfloat16)(tmp_path / "model")[0])
    site, size = checkpoint.sites[0], 3 * 24 * 16 * 2
    assert checkpoint.stored(site, limit=size).held
    assert not checkpoint.stored(site, limit=size - 1).held


@pytest.mark.parametrize(("first", "step"), [(0, 1), (7, 1), (0, 2), (1, 2)])
def test_columns_of_a_fused_matrix(first, step, tmp_path, monkeypatch):
    """Both halves of one matrix whose neurons are its columns, in stripes that do not divide their number."""
    matrix = torch.randn(5, 17, generator=torch.Generator().manual_seed(0))
    (tmp_path / "raw").write_bytes(b"before" + matrix.numpy().tobytes())
    monkeypatch.setattr(raw, "STRIPE", 5 * 4 * step * 3)
    stored = raw.RawMatrix(tmp_path / "raw", 6, (5, 17), torch.float32)
    count = (17 - first + step - 1) // step
    found, expected = raw.FileColumns(stored, count, first, step), matrix.T[first::step]
    for which in (slice(None), slice(2, 4), slice(1, count), torch.tensor([count - 1, 0, 2, 2])):
        assert torch.equal(found(which), expected[which])
    rows = raw.FileRows(raw.RawMatrix(tmp_path / "raw", 6, (17, 5), torch.float32), count, first, step)
    expected = matrix.view(17, 5)[first::step]
    for which in (slice(None), slice(2, 4), slice(3, 3), torch.tensor([count - 1, 0, 2, 2])):
        assert torch.equal(rows(which), expected[which])


# -- files that are not to be relied on ----------------------------------------------------------


def test_a_file_that_shrinks_while_it_is_measured(tmp_path):
    place = write_llama(tmp_path / "shrinking", layers=2)
    checkpoint = gp.open_checkpoint(place)
    layer = checkpoint.stored(checkpoint.sites[1], limit=0)
    os.truncate(place / "model.safetensors", (place / "model.safetensors").stat().st_size - 4000)
    with pytest.raises(Truncated, match="it changed while it was read"):
        gp.measure_layer(layer)
    (place / "model.safetensors").unlink()
    with pytest.raises(GluProbeError, match="no such file"):
        layer.rows("query", slice(0, 2))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A directory of its own for temporary files."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def open_files() -> set[str]:
    """What this process has open below /tmp."""
    gc.collect()
    names = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            names.add(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
        except OSError:
            continue
    return names


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="lists open files as Linux does")
def test_temporary_files_vanish_with_the_layer(temporary, tmp_path):
    before = open_files()
    checkpoint = gp.open_checkpoint(gguf("F16")(tmp_path / "model")[0])
    layer = checkpoint.stored(checkpoint.sites[0], limit=0)
    gp.measure_layer(layer)
    assert len(open_files() - before) == 3
    assert not list(temporary.iterdir())
    del layer  # a file that is left to the collector would warn, and warnings are errors
    assert open_files() == before


def no_room(*_args, **_options):
    raise OSError(28, "No space left on device")


def assert_refused(temporary: Path, words: str, ref: Path) -> None:
    checkpoint = gp.open_checkpoint(ref)
    before = open_files()
    with pytest.raises(CannotWrite, match=words) as caught:
        checkpoint.stored(checkpoint.sites[0], limit=0)
    assert "blk.0.ffn_gate.weight" in str(caught.value)
    assert "--memory" in caught.value.hint
    assert "TMPDIR" in caught.value.hint
    assert not list(temporary.iterdir())
    assert open_files() == before


def test_no_temporary_file_can_be_made(temporary, tmp_path, monkeypatch):
    ref = gguf("F16")(tmp_path / "model")[0]
    monkeypatch.setattr(tempfile, "TemporaryFile", no_room)
    assert_refused(temporary, "No space left", ref)
    monkeypatch.undo()
    for name in ("tempdir", "_get_default_tempdir"):  # not even a directory for them
        value = None if name == "tempdir" else lambda *_: no_room()
        monkeypatch.setattr(tempfile, name, value)
    assert_refused(temporary, "No space left", ref)


@needs_file_limits
def test_no_room_in_the_midst_of_a_temporary_file(temporary, tmp_path, monkeypatch):
    ref = gguf("F16")(tmp_path / "model")[0]
    monkeypatch.setattr(memory, "_CHUNK", 500)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        assert_refused(temporary, "too large", ref)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_a_source_raises_is_not_blamed_on_the_temporary_file(temporary):
    def read(_rows):
        raise OSError(5, "Input/output error")

    before = open_files()
    with pytest.raises(OSError, match="Input/output"):
        raw.spooled(read, (3, 4), "x")
    assert open_files() == before


# -- the bound on memory -------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "expected"), [
    ("1GB", 10**9), ("512MiB", 512 * 2**20), ("1.5 gb", 1_500_000_000), (" 200mb ", 2 * 10**8), ("0.5g", 5 * 10**8),
    (10**8, 10**8), (3 * 10**9, 3 * 10**9), ("2000000000", 2 * 10**9), ("1TiB", 2**40), (np.int64(10**9), 10**9),
    (2e9, 2 * 10**9),
])  # fmt: skip
def test_sizes_of_memory(size, expected):
    assert in_bytes(size) == expected


@pytest.mark.parametrize("size", [
    "", "GB", "lots", "-1GB", "1 G B", "1PB", "1e9 GB", "99MB", 0, -5, 99_999_999, True, None, float("nan"), float("inf"),
    "1GB 2GB", "1.2.3GB", b"1GB", [10**9], "١GB",
])  # fmt: skip
def test_what_is_no_size_is_refused(size):
    with pytest.raises(BadOption, match="memory is") as caught:
        in_bytes(size)
    assert "512MiB" in caught.value.hint
