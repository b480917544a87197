"""The compiled loops against what torch computes without them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import glu_probe as gp
from glu_probe.layer_rows import Fold, HeldRows
from glu_probe.measures import arithmetic, kernels
from glu_probe.measures.gram import GramOperator
from glu_probe.measures.products import GramMatrices

from ..support import random_layer

STORED = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def compiled(monkeypatch):
    """For matrices of any size."""
    monkeypatch.setattr(arithmetic, "WORTH_COMPILING", 0)


def matrix_of(dtype: torch.dtype, rows: int, width: int) -> torch.Tensor:
    """Rows of which some are very small or large for the dtype, so that float16 holds subnormal numbers."""
    generator = torch.Generator().manual_seed(rows)
    matrix = torch.randn(rows, width, generator=generator)
    matrix[::7] *= 1e-6
    matrix[3::7] *= 1e3
    matrix[0, 0] = -0.0
    return matrix.to(dtype)


def defined(matrix: torch.Tensor, vectors: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """sum_r squares[i, r] (r . vectors[i]) r in float64, without the rows that take no part."""
    wide = torch.where(squares.sum(0)[:, None] > 0, matrix.double(), 0.0)
    return torch.stack([wide.T @ (s * (wide @ v.double())) for v, s in zip(vectors, squares, strict=True)])


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("rows", [1, 31, 33, 256, 700])
@pytest.mark.parametrize("width", [1, 20, 131])
@pytest.mark.parametrize("count", [1, 2])
def test_images_are_their_definition(dtype, rows, width, count):
    matrix = matrix_of(dtype, rows, width)
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(count, width, generator=generator)
    # so that every row has its say
    size = matrix.double().square().sum(1)
    squares = torch.rand(count, rows, generator=generator, dtype=torch.float64) * torch.where(size > 0, 1 / size, 0.0)
    found = kernels.gram_images([(slice(0, rows), matrix)], vectors, squares)
    expected = defined(matrix, vectors, squares)
    assert found.dtype == torch.float64
    assert (found - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("dtype", STORED)
def test_every_stored_number_is_widened_to_itself(dtype):
    """All bit patterns of 16 bits that are finite numbers, through a row of one column each."""
    if dtype == torch.float32:
        every = torch.cat([torch.tensor([0.0, -0.0]), torch.logspace(-18, 18, 101), -torch.logspace(-18, 18, 101)])
    else:
        every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        every = every[every.isfinite() & (every.float().abs() < 1e18) & ((every == 0) | (every.float().abs() > 1e-18))]
    for number in every[:: max(1, len(every) // 400)]:
        row = number.reshape(1, 1)
        found = kernels.gram_images([(slice(0, 1), row)], torch.ones(1, 1), torch.ones(1, 1, dtype=torch.float64))
        assert found.item() == pytest.approx(number.double().item() ** 2, rel=1e-6, abs=1e-44)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_take_no_part_may_hold_anything(dtype, bad):
    matrix = matrix_of(dtype, 300, 20)
    squares = torch.rand(2, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    squares[:, [0, 17, 18, 299]] = 0
    matrix[[0, 17, 18, 299]] = bad
    vectors = torch.randn(2, 20, generator=torch.Generator().manual_seed(2))
    found = kernels.gram_images([(slice(0, 300), matrix)], vectors, squares)
    expected = defined(matrix, vectors, squares)
    assert (found - expected).norm() < 1e-6 * expected.norm()


def test_neither_blocks_nor_cores_change_a_bit():
    matrix, size = matrix_of(torch.bfloat16, 2000, 64), kernels.LANES * 32
    squares = torch.rand(2, 2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    vectors = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    whole = kernels.gram_images([(slice(0, 2000), matrix)], vectors, squares)
    for step in (size, 3 * size):
        spans = [slice(start, min(start + step, 2000)) for start in range(0, 2000, step)]
        assert torch.equal(kernels.gram_images([(each, matrix[each]) for each in spans], vectors, squares), whole)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(kernels.gram_images([(slice(0, 2000), matrix)], vectors, squares), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 32, 100])
def test_grams_of_rows_are_their_definition(dtype, count):
    generator = torch.Generator().manual_seed(count)
    # 1e25 squared is beyond float32, and so is the inverse
    rows = torch.randn(3, count, 37, generator=generator, dtype=dtype) * torch.logspace(-25, 25, count)[:, None]
    rows = rows.to(dtype)
    wide = rows.transpose(0, 1).double()
    found = kernels.row_grams(*rows)
    torch.testing.assert_close(found, wide @ wide.mT, rtol=1e-12, atol=0)
    # seen from the side, as the rows of a turned matrix are
    turned = [part.T.contiguous().T for part in rows]
    assert torch.equal(kernels.row_grams(*turned), found)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_grams_of_rows_that_are_not_finite_are_not(bad):
    rows = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0))
    rows[1, 2, 39] = bad
    found = kernels.row_grams(*rows)
    assert found.isfinite().all(dim=(1, 2)).tolist() == [True, True, False, True, True]
    assert not found[2, 1, 1].isfinite()
    assert found[2, 0, 2].isfinite()


def test_gram_matrices_are_the_same_with_and_without(monkeypatch):
    layer = random_layer(d_mlp=300, d_model=50)
    factors = (layer.query, layer.key, layer.value)
    plain = GramMatrices(300, 50)(*factors)
    monkeypatch.setattr(arithmetic, "WORTH_COMPILING", 0)
    monkeypatch.setattr(kernels, "row_grams", counted(kernels.row_grams))
    torch.testing.assert_close(GramMatrices(300, 50)(*factors), plain, rtol=1e-13, atol=1e-13)
    assert kernels.row_grams.calls == 1


@pytest.mark.parametrize("dtype", [*STORED, torch.float64])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.usefixtures("compiled")
def test_gram_operator_with_compiled_loops(dtype, held, centred, monkeypatch):
    """Of a folded matrix, in memory or read; float64 is left to torch by itself or taken as float32."""
    monkeypatch.setattr(kernels, "gram_images", counted(kernels.gram_images))
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(700, 20, generator=generator).to(dtype)
    fold = Fold(torch.randn(20, generator=generator).exp(), centred, 0.3)
    factor = stored.double() * fold.gain * 0.3
    factor = factor - factor.mean(1, keepdim=True) if centred else factor
    square = factor.square().sum(1)
    square[5:9], stored[5:9], factor[5:9] = 0, torch.nan, 0
    operator = GramOperator(HeldRows(stored) if held else stored.__getitem__, 20, square, fold)
    raw, unit = torch.randn(2, 20, 1, generator=generator, dtype=torch.float64)
    normed = factor * torch.where(square > 0, square.rsqrt(), 0.0)[:, None]
    for vectors in ((raw, unit), (raw, unit[:, :0]), (raw[:, :0], unit)):
        for found, matrix, each in zip(
            operator(*vectors), (factor / operator.scale**0.5, normed), vectors, strict=True
        ):
            expected = matrix.T @ (matrix @ each)
            assert found.shape == expected.shape
            assert (found - expected).norm() <= 1e-6 * expected.norm()
    assert kernels.gram_images.calls == 3


@pytest.mark.parametrize("exact", [False, True])
def test_a_layer_measures_the_same_with_and_without(exact, monkeypatch):
    """Iterated spectra start from the same vectors, so that they agree to rounding too."""
    from glu_probe.measures import spectra

    monkeypatch.setattr(spectra, "EXACT_FLOPS", 0)
    layer = random_layer(d_mlp=600, d_model=80)
    plain = gp.measure_layer(layer, exact=exact)
    monkeypatch.setattr(arithmetic, "WORTH_COMPILING", 0)
    found = gp.measure_layer(layer, exact=exact)
    for name, value in plain.scalars.items():
        np.testing.assert_allclose(found.scalars[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    for name, values in plain.neurons.items():
        np.testing.assert_allclose(found.neurons[name], values, rtol=1e-6, atol=1e-9, err_msg=name)


def test_extremes_are_left_to_float64(compiled):
    """Rows of 1e200 have squares that no float32 holds, nor their products."""
    matrix = torch.randn(40, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    small = GramOperator(HeldRows(matrix), 10, matrix.square().sum(1))
    large = GramOperator(HeldRows(matrix * 1e100), 10, (matrix * 1e100).square().sum(1))
    vector = torch.ones(10, 1, dtype=torch.float64)
    torch.testing.assert_close(large(vector, vector), small(vector, vector), rtol=1e-6, atol=1e-6)


def test_without_a_compiler_torch_does_it(monkeypatch):
    monkeypatch.setattr(arithmetic, "WORTH_COMPILING", 0)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    arithmetic._kernels.cache_clear()
    try:
        assert arithmetic.compiled_loops(10**9) is None
        assert gp.measure_layer(random_layer(d_mlp=20, d_model=6)).scalars
    finally:
        arithmetic._kernels.cache_clear()


def test_a_compiler_that_cannot_be_loaded_is_said_and_done_without(monkeypatch):
    monkeypatch.setitem(sys.modules, "glu_probe.measures.kernels", None)
    monkeypatch.delattr("glu_probe.measures.kernels")
    arithmetic._kernels.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="numba cannot be imported"):
            assert arithmetic.compiled_loops(10**9) is None
    finally:
        arithmetic._kernels.cache_clear()


def test_small_models_do_not_load_the_compiler():
    """It takes as long to load as they take to measure."""
    code = (
        "import sys, torch, glu_probe as gp; rows = torch.randn(3, 64, 16);"
        "gp.measure_layer(gp.GatedLayer(*rows, 'silu')); assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def counted(function):
    """The function, which counts its calls."""

    def calling(*args):
        calling.calls += 1
        return function(*args)

    calling.calls = 0
    return calling
