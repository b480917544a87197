"""What measuring one MLP costs, from its shape and where it lies: arithmetic and bytes to read.

The numbers of passes, products and samples are those of the code that makes them, and its constants are taken from there:
`measuring` (one pass over all factors, then the spectra), `measures.gram` (a read of the matrix for each step of the
iteration and one for the probes), `measures.sampling`, `measures.nulls`, and `checkpoint.factors` and `checkpoint.raw`
(what stays in its file, and how it is read there). Where the weights decide, the most that it can be is given: all steps of
an iteration, all stripes of columns. Two things that few weights ask for are not in it: one more pass in float32 where
neurons cancel each other (`Reading.finer`), and rows of neurons that may repeat another.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from operator import add

from .checkpoint import raw
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.memory import chunks
from .checkpoint.sites import Site
from .checkpoint.slabs import Slab
from .checkpoint.source import TensorInfo
from .layer_rows import BLOCK, LayerRows
from .measures import arithmetic, gaussian, gram, nulls, output, sampling, spectra, tensor

ROLES = ("gate", "up", "down")

# -- arithmetic ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Sizes of an MLP, and what they and its function decide about how it is measured.

    Attributes:
        d_mlp, d_model: its sizes.
        function: whether its activation and the scale of its input are known, so that its output is sampled.
        homogeneous: whether S(cz) = c^n S(z), so that the Gaussian measures do not depend on the scale.
        group: "dense", "routed" or "shared".
    """

    d_mlp: int
    d_model: int
    function: bool = True
    homogeneous: bool = False
    group: str = "dense"

    @classmethod
    def of(cls, layer: LayerRows) -> Shape:
        """That of a layer."""
        known = layer.functional_note() is None
        homogeneous = known and layer.activation is not None and layer.activation.degree is not None
        return cls(layer.d_mlp, layer.d_model, known, homogeneous, layer.group)

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
    def compiled(self) -> bool:
        """Whether the compiled loops go over it, where there is a compiler."""
        return self.weights >= arithmetic.WORTH_COMPILING

    @property
    def ways(self) -> tuple[bool, ...]:
        """Those five: with them, cost is in proportion to the number of neurons."""
        return self.exact_spectra, self.iterated_spectra, self.exact_tensor, self.single, self.compiled

    @property
    def samples(self) -> int:
        """Gaussian inputs."""
        return output.default_samples(self)

    @property
    def drawn(self) -> tuple[int, int, int]:
        """Inputs that are drawn, those at which outputs are taken, and pairs of them."""
        return self.drawn_of(self.samples)

    def drawn_of(self, samples: int) -> tuple[int, int, int]:
        """The same for another number of Gaussian inputs."""
        pairs = 0 if self.exact_tensor else max(samples // 2, 2)
        return max(samples, 2 * pairs), samples if self.function else 0, pairs

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
        inputs, outputs, pairs = self.drawn_of(self.samples if samples is None else samples)
        out = {
            "inner products": 18.0 * weights,
            "Gaussian measures": (n + nulls.NULL_PAIRS) * self._interpolation if self.function else 0.0,
            "nulls": 18.0 * d * min(n, nulls.NULL_PAIRS),
            "sampled outputs": weights * (4.0 * inputs + 6.0 * outputs + 4.0 * pairs),
        }
        small = min(n, d)
        if self.exact_spectra:
            # two Gram matrices of each factor; of unit rows that are fewer than columns, one between gate and up too
            out["spectra"] = (6 + (n < d)) * 2.0 * weights * small
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
        finer: that one more pass would read, of an MLP whose outputs are sampled in bfloat16 and whose neurons cancel each
            other; in none of the others.
    """

    once: int = 0
    read: int = 0
    written: int = 0
    again: int = 0
    finer: int = 0

    def __add__(self, other: Reading) -> Reading:
        return Reading(*map(add, astuple(self), astuple(other)))

    def times(self, count: int) -> Reading:
        """Of so many MLPs."""
        return Reading(*(size * count for size in astuple(self)))


class Reader:
    """Counts what measuring one MLP reads.

    Args:
        checkpoint, site: the MLP.
        shape: its sizes.
        once: bytes of its tensors.
        limit: bytes of what is held of it.
        remote: whether they are on a server.
    """

    def __init__(
        self, checkpoint: Checkpoint, site: Site, shape: Shape, once: int, *, limit: int, remote: bool
    ) -> None:
        self._infos, self._source = checkpoint.source.infos(), checkpoint.source
        self._site, self._shape, self._once, self._remote = site, shape, once, remote
        self._stripe = raw.stripe_bytes(limit, sum(site.slabs[role].columns for role in ROLES))
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
        read = written = again = finer = 0
        spooled: set[str] = set()
        find = getattr(self._source, "raw", None)
        for role in ROLES:
            slab = self._site.slabs[role]
            info = self._infos[slab.name]
            place = find(slab.name) if find is not None else None
            width = place.dtype.itemsize if place is not None else _width(info)
            count, once_more = self._passes(role, slab, width)
            finer += once_more
            if place is not None:
                read += count
                continue
            again += count
            if slab.name not in spooled:
                spooled.add(slab.name)
                read += info.nbytes
                written += math.prod(info.shape) * width
        return Reading(self._once, read + self._beside(), written, again, finer if self._shape.single else 0)

    def stripes(self) -> list[int]:
        """Bytes of columns that are held at a time, of each matrix that lies in columns, if it stays in its file."""
        slabs = [self._site.slabs[role] for role in ROLES if self._site.slabs[role].columns]
        pitches = [(self._shape.d_model * _width(self._infos[slab.name]), slab.step) for slab in slabs]
        return [pitch * min(self._wide(pitch * step), self._shape.d_mlp) for pitch, step in pitches]

    def _wide(self, per_neuron: int) -> int:
        """Neurons of a stripe; as `raw.FileColumns` has it."""
        return max(1, self._stripe // per_neuron)

    def _beside(self) -> int:
        """Norms and biases, each role's for itself."""
        infos = self._infos
        biases = (slab for role, slab in self._site.slabs.items() if role not in ROLES)
        sizes = (infos[b.name].nbytes // (1 if b.expert is None else infos[b.name].shape[0]) for b in biases)
        return sum(sizes) + sum(infos[name].nbytes for name in self._norms.values())

    def _passes(self, role: str, slab: Slab, width: int) -> tuple[int, int]:
        """All reads of a matrix in a file: the first pass, the spectra, the tensor and the mismatched pairs; one pass more."""
        shape = self._shape
        pitch, n, step = shape.d_model * width, shape.d_mlp, slab.step
        pairs = min(n, nulls.NULL_PAIRS)
        spans = [BLOCK]  # neurons of a read, for each pass
        if shape.exact_spectra:
            spans += [n if n < shape.d_model else spectra._ROWS]
        elif shape.iterated_spectra:
            spans += [BLOCK] * (gram._STEPS + 1)
        if "norm_bias" in self._norms and role != "down":
            spans += [next(stop for _, stop in chunks(n, shape.d_model))]
        if not slab.columns:
            singly = (n if shape.exact_tensor else 0) + pairs
            rows = sum(_spanned(n, span, step) for span in spans) + singly
            return rows * pitch, _spanned(n, BLOCK, step) * pitch
        wide = self._wide(pitch * step)
        one = _spanned(n, wide, step) * pitch
        if wide >= n:  # it is kept
            return one, 0
        # a block of pairs lies anywhere, and takes every stripe that one of them is in
        scattered = (min(BLOCK, pairs - start) * _spanned(wide, wide, step) * pitch for start in range(0, pairs, BLOCK))
        return (len(spans) + shape.exact_tensor) * one + sum(min(one, part) for part in scattered), one


def _spanned(count: int, span: int, step: int) -> int:
    """Rows or columns of a matrix that are read for so many neurons, a span of them at a time, with what is between them."""
    return sum((min(span, count - start) - 1) * step + 1 for start in range(0, count, span))


def _width(info: TensorInfo) -> int:
    """Bytes of a value in memory, in the dtype that it is read in; as `Site.held_bytes` has it."""
    return {"F64": 8, "BF16": 2, "F16": 2}.get("" if info.decoded else info.dtype, 4)
