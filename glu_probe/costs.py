"""What measuring one MLP costs, from its shape and where it lies: arithmetic, bytes to read, memory.

The numbers of passes, products and samples are those of the code that makes them, and its constants are taken from there:
`measuring` (one pass over all factors, then the spectra), `measures.gram` (a read of the matrix for each step of the
iteration and one for the probes), `measures.sampling`, `measures.nulls`, and `checkpoint.factors` and `checkpoint.raw`
(what stays in its file, and how it is read there). Where the weights decide, the most that it can be is given: all steps of
an iteration, all stripes of columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .checkpoint import raw
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.sites import Site
from .checkpoint.slabs import Slab
from .checkpoint.source import TensorInfo
from .layer_rows import BLOCK
from .measures import gaussian, gram, nulls, output, sampling, spectra, tensor

ROLES = ("gate", "up", "down")

# -- arithmetic ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Sizes of an MLP, and what they and its function decide about how it is measured.

    Attributes:
        d_mlp, d_model: its sizes.
        function: whether its activation and the scale of its input are known, so that its output is sampled.
        homogeneous: whether S(cz) = c^n S(z), so that the Gaussian measures do not depend on the scale.
    """

    d_mlp: int
    d_model: int
    function: bool = True
    homogeneous: bool = False

    @property
    def weights(self) -> int:
        """Of one of its matrices."""
        return self.d_mlp * self.d_model

    @property
    def exact_spectra(self) -> bool:
        """Whether all singular values are computed."""
        return spectra.is_cheap(self)

    @property
    def iterated_spectra(self) -> bool:
        """Whether, if not, the largest and sums of them are."""
        return not self.exact_spectra and self.weights <= spectra._ITERATED

    @property
    def exact_tensor(self) -> bool:
        """Whether the tensor asymmetry is computed, and not sampled."""
        return tensor.is_cheap(self)

    @property
    def single(self) -> bool:
        """Whether outputs are sampled in float32 or less."""
        return self.weights > sampling._SINGLE

    @property
    def ways(self) -> tuple[bool, ...]:
        """Those four: with them, cost is in proportion to the number of neurons."""
        return self.exact_spectra, self.iterated_spectra, self.exact_tensor, self.single

    @property
    def samples(self) -> int:
        """Gaussian inputs."""
        return output.default_samples(self)

    @property
    def drawn(self) -> tuple[int, int, int]:
        """Inputs that are drawn, those at which outputs are taken, and pairs of them."""
        pairs = 0 if self.exact_tensor else max(self.samples // 2, 2)
        return max(self.samples, 2 * pairs), self.samples if self.function else 0, pairs

    def flops(self, *, samples: int | None = None, steps: int = gram._STEPS) -> dict[str, float]:
        """Floating point operations by what they are for.

        Products of matrices, in whatever precision; beside them eigenvalue problems, 4/3 n^3 each, and the
        interpolation of the Gaussian measures. What is done value by value is left out, and the rate that they are
        divided by is measured with it.

        Args:
            samples: Gaussian inputs, if not as many as a fixed cost buys.
            steps: of each Lanczos iteration.
        """
        n, d, weights = self.d_mlp, self.d_model, self.weights
        inputs, outputs, pairs = self.drawn
        if samples is not None:
            pairs = 0 if self.exact_tensor else max(samples // 2, 2)
            inputs, outputs = max(samples, 2 * pairs), samples if self.function else 0
        out = {
            "inner products": 18.0 * weights,
            "Gaussian measures": (n + nulls.NULL_PAIRS) * self._interpolation if self.function else 0.0,
            "nulls": 18.0 * d * min(n, nulls.NULL_PAIRS),
            "sampled outputs": weights * (4.0 * inputs + 6.0 * outputs + 4.0 * pairs),
        }
        small = min(n, d)
        if self.exact_spectra:
            out["spectra"] = (6 + 2) * 2.0 * weights * small
            out["eigenvalues"] = 6 * 4 / 3 * small**3
        elif self.iterated_spectra:
            iterated = 3 * steps * 2 * 4.0 * weights
            probed = sum(2.0 * weights * (3 * gram._PROBES + 2 * more) for more in (0, steps + gram._PROBES, 0))
            out["spectra"] = iterated + probed
        if self.exact_tensor:
            out["tensor"] = sum(10.0 * min(BLOCK, n - start) * (n - start) * d for start in range(0, n, BLOCK))
        return out

    @property
    def _interpolation(self) -> float:
        """Of a neuron: a row of one basis times a table times a row of the other, for five measures and the energy."""
        scales = 1 if self.homogeneous else gaussian._SCALE_NODES
        return 6.0 * 2 * gaussian._ANGLE_NODES * (scales + 1)


# -- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Bytes that are moved for one MLP.

    Attributes:
        once: of its tensors, norms and biases, each read once: what has to come over a network.
        read: that are read from its files, all passes together.
        written: to temporary files, of what can only be read in order.
        again: that are read from those.
    """

    once: int = 0
    read: int = 0
    written: int = 0
    again: int = 0

    def __add__(self, other: Reading) -> Reading:
        return Reading(
            self.once + other.once, self.read + other.read, self.written + other.written, self.again + other.again
        )

    def times(self, count: int) -> Reading:
        """Of so many MLPs."""
        return Reading(self.once * count, self.read * count, self.written * count, self.again * count)


class Reader:
    """Counts what measuring one MLP reads.

    Args:
        checkpoint, site: the MLP.
        shape: its sizes.
        once: bytes of its tensors.
        remote: whether they are on a server.
        steps: of each Lanczos iteration.
    """

    def __init__(
        self, checkpoint: Checkpoint, site: Site, shape: Shape, once: int, *, remote: bool, steps: int = gram._STEPS
    ) -> None:
        self._infos, self._source = checkpoint.source.infos(), checkpoint.source
        self._site, self._shape, self._once, self._remote, self._steps = site, shape, once, remote, steps
        self._norms = checkpoint.norms_of(site)

    def held(self) -> Reading:
        """Of an MLP that is read into memory."""
        if self._remote:  # where norms and biases are kept, too
            return Reading(self._once, self._once)
        matrices: dict[str, int] = {}
        for role in ROLES:  # rows that two of them are part of are read once
            slab = self._site.slabs[role]
            whole = slab.expert is not None or slab.columns or slab.step > 1
            matrices[slab.name if whole else role] = slab.nbytes(self._infos[slab.name])
        return Reading(self._once, self._beside() + sum(matrices.values()))

    def in_files(self) -> Reading:
        """Of an MLP that stays in its files, or goes to temporary ones."""
        read = written = again = 0
        spooled: set[str] = set()
        find = getattr(self._source, "raw", None)
        for role in ROLES:
            slab = self._site.slabs[role]
            info = self._infos[slab.name]
            place = find(slab.name) if find is not None else None
            width = place.dtype.itemsize if place is not None else _width(info)
            count = self._passes(role, slab, width)
            if place is not None:
                read += count
                continue
            again += count
            if slab.name not in spooled:
                spooled.add(slab.name)
                read += info.nbytes
                written += math.prod(info.shape) * width
        return Reading(self._once, read + self._beside(), written, again)

    def stripe(self) -> int:
        """Bytes of columns that are held at a time, if it stays in its file and its down matrix lies in columns."""
        slab = self._site.slabs["down"]
        if not slab.columns:
            return 0
        info = self._infos[slab.name]
        return min(raw.STRIPE, math.prod(info.shape) * _width(info))

    def _beside(self) -> int:
        """Norms and biases, each role's for itself."""
        infos = self._infos
        biases = (slab for role, slab in self._site.slabs.items() if role not in ROLES)
        sizes = (infos[b.name].nbytes // (1 if b.expert is None else infos[b.name].shape[0]) for b in biases)
        return sum(sizes) + sum(infos[name].nbytes for name in self._norms.values())

    def _passes(self, role: str, slab: Slab, width: int) -> int:
        """All reads of a matrix in a file: the first pass, the spectra, the tensor and the mismatched pairs."""
        shape = self._shape
        pitch, n = shape.d_model * width, shape.d_mlp
        passes = 1 + (1 if shape.exact_spectra else self._steps + 1 if shape.iterated_spectra else 0)
        if "norm_bias" in self._norms and role != "down":
            passes += 1
        pairs, exact = min(n, nulls.NULL_PAIRS), int(shape.exact_tensor)
        if not slab.columns:
            spans = [(start, min(start + BLOCK, n)) for start in range(0, n, BLOCK)]
            one = sum((stop - start - 1) * slab.step + 1 for start, stop in spans) * pitch
            return passes * one + exact * n * pitch + pairs * pitch
        wide = max(1, raw.STRIPE // (pitch * slab.step))
        stripes = [(start, min(start + wide, n)) for start in range(0, n, wide)]
        one = sum((stop - start - 1) * slab.step + 1 for start, stop in stripes) * pitch
        if len(stripes) == 1:  # it is kept
            return one
        # a block of pairs lies anywhere, and takes every stripe that one of them is in
        scattered = sum(min(1.0, min(BLOCK, pairs - start) / len(stripes)) for start in range(0, pairs, BLOCK))
        return (passes + exact) * one + math.ceil(scattered * one)


def _width(info: TensorInfo) -> int:
    """Bytes of a value in memory, in the dtype that it is read in; as `Site.held_bytes` has it."""
    return {"F64": 8, "BF16": 2, "F16": 2}.get("" if info.decoded else info.dtype, 4)


# -- memory --------------------------------------------------------------------------------------

_LIBRARIES = 45e6  # what they take when they are first used, beyond their imports
_TABLE = 175e6  # while the table of an activation that is not homogeneous is made
_PER_NEURON = 2500  # while Gaussian measures are interpolated, for so many neurons at a time
_AT_A_TIME = 16_384
_PER_ROW = 400  # of a neuron in frames, while those of a layer are put together


def peak_memory(shape: Shape, held: int, in_file: bool, stripe: int, expert: int, neurons: int) -> int:
    """Bytes that measuring an MLP takes at most, beyond the imports; an estimate.

    Args:
        shape: its sizes.
        held: bytes of its factors in memory, if they are held.
        in_file: whether they are not.
        stripe: bytes of columns of the down matrix that are held at a time, for one in a file.
        expert: bytes of an expert's matrices while they are copied from a stack.
        neurons: of its layer, whose frame is put together.
    """
    inputs, outputs, pairs = shape.drawn
    rows = (3 * outputs + 2 * pairs + inputs) * shape.d_model
    sampled = 12 * rows
    blocks = 2 * BLOCK * shape.d_model * 30 + (0 if shape.single else 24 * rows)
    table = _TABLE if shape.function and not shape.homogeneous else 0.0
    table += _PER_NEURON * min(shape.d_mlp, _AT_A_TIME)
    exact = 0.0
    if shape.exact_spectra or shape.exact_tensor:
        exact = 8.0 * shape.weights * 8
    factors = 0 if in_file else held
    working = max(table + stripe, blocks + 2 * stripe, exact, expert, _PER_ROW * neurons)
    return int(_LIBRARIES + factors + sampled + working)
