"""What measuring one MLP takes of memory: an estimate from its shape, and on how many cores there is room for it.

The parts are those of the code that takes them: `measures.sampling` (sums of the lanes, inputs, products of a block),
`lanes` (blocks in flight), `measures.spectra` and `measures.tensor` (what is exact).
"""

from __future__ import annotations

from .costs import Shape
from .lanes import LANES
from .layer_rows import BLOCK
from .measures import gaussian, sampling, spectra
from .measures.arithmetic import native_bfloat16

# What libraries keep from their first use on, mostly pages of their files: left after a layer was measured, of which 18 MB
# are products of matrices and eigenvalue problems. And the table of an activation. By analyses/bench/first_use.py.
_LIBRARIES = 38e6
_TABLE = 4e6
_PER_NEURON = 2500  # while Gaussian measures are interpolated, for so many neurons at a time
_PER_ROW = 400  # of a neuron in frames, while those of a layer are put together


def first_pass(shape: Shape, cores: int, samples: int | None = None) -> tuple[float, float]:
    """Bytes that the pass over all factors takes beyond them: of each block in flight, and of everything else."""
    inputs, outputs, pairs = shape.drawn_of(samples or shape.samples)
    rows, width = 3 * outputs + 2 * pairs, 4 if shape.single else 8
    narrowed = 2 if shape.single and native_bfloat16() else 8 if not shape.single else 0
    sums = rows * shape.d_model * width
    # pre-activations, coefficients, and what these are made of
    block = BLOCK * shape.d_model * 3 * (2 + 4 + narrowed) + BLOCK * width * (2 * inputs + rows + 6 * outputs)
    block += rows * shape.d_model * narrowed if narrowed == 2 else 0
    beside = inputs * shape.d_model * 12 + sampling.lanes_of(sums) * sums
    waiting = BLOCK * shape.d_model * 3 * 2 if cores > 1 else 0
    return block, beside + waiting


def cores(shape: Shape, memory: int, held: int, samples: int | None = None) -> int:
    """On how many cores the pass over all factors stays within the memory, where it is not more than one already.

    Args:
        memory: the bound.
        held: bytes of factors that are in memory meanwhile.
        samples: Gaussian inputs, if not as many as a fixed cost buys.
    """
    block, beside = first_pass(shape, LANES, samples)
    return min(max(int((memory - _LIBRARIES - held - beside) // block), 1), LANES)


def peak_memory(
    shape: Shape, held: int, in_file: bool, stripes: list[int], expert: int, neurons: int, cores: int = 1
) -> int:
    """Bytes that measuring an MLP takes at most, beyond the imports; an estimate.

    Args:
        shape: its sizes.
        held: bytes of its factors in memory, if they are held.
        in_file: whether they are not.
        stripes: bytes of columns that are held at a time, of each matrix that lies in columns, for one in a file.
        expert: bytes of an expert's matrices while they are copied from a stack.
        neurons: of its layer, whose frame is put together.
        cores: how many work on it.
    """
    _inputs, outputs, pairs = shape.drawn
    block, beside = first_pass(shape, cores)
    lanes = sampling.lanes_of((3 * outputs + 2 * pairs) * shape.d_model * (4 if shape.single else 8))
    table = _TABLE if shape.function and not shape.homogeneous else 0.0
    interpolated = _PER_NEURON * min(shape.d_mlp, gaussian._TABLE_CHUNK)
    small = min(shape.d_mlp, shape.d_model)
    exact = 0.0
    if shape.exact_spectra:  # Gram matrices of three factors, an eigenvalue problem, and a block of rows
        wide, step = (3, small) if shape.d_mlp < shape.d_model else (0, spectra._ROWS)
        exact = 8.0 * (8 * small**2 + 4 * step * shape.d_model + wide * shape.weights)
    if shape.exact_tensor:  # unit rows of three factors while the last is made, and products of a block with all
        exact = max(exact, 8.0 * (5 * shape.weights + 6 * BLOCK * shape.d_mlp))
    factors = sum(stripes) if in_file else held
    working = max(interpolated, beside + block * min(cores, lanes), exact, expert, _PER_ROW * neurons)
    return int(_LIBRARIES + table + factors + working)
