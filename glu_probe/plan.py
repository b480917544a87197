"""What a report of a checkpoint will take, from headers alone: bytes to read, arithmetic, memory and time.

from glu_probe.plan import plan

plan(gp.open_checkpoint(model), bandwidth="2GB/s", workers=8).facts()
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from .arguments import whole_number
from .calibration import measured_rate
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.memory import DEFAULT, bound_to_hold, held_limit, in_bytes
from .costs import Reader, Reading, Shape
from .errors import BadOption
from .footprint import cores, peak_memory
from .thread_limits import share_of_cores

BANDWIDTH = 2e9  # bytes a second: of an SSD; also what temporary files are taken to have where the model is remote
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


# -- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """MLPs that cost the same.

    Attributes:
        group, dtype, shape: what they are.
        count: how many there are.
        held: whether one is held in memory while it is measured; its factors take `held_bytes` there.
        ahead: whether there is room for the next one, which is read meanwhile.
        reading: of one.
        memory: peak, in bytes beyond the imports.
    """

    group: str
    dtype: str
    shape: Shape
    count: int
    held: bool
    ahead: bool
    held_bytes: int
    reading: Reading
    memory: int

    @cached_property
    def flops(self) -> dict[str, float]:
        """Of one, by what they are for."""
        return self.shape.flops()


@dataclass(frozen=True)
class Plan:
    """What a report will take.

    Attributes:
        kinds: of MLPs.
        remote: whether the files are on a server.
        bandwidth: bytes a second that come from the files.
        workers: how many MLPs are measured at once.
        rate: floating point operations a second of one worker.
        rate_source: "measured" or "given".
        bound: the memory bound of a worker.
    """

    kinds: tuple[Kind, ...]
    remote: bool
    bandwidth: float
    workers: int
    rate: float
    rate_source: str
    bound: int

    @property
    def reading(self) -> Reading:
        """Bytes of all MLPs."""
        return sum((kind.reading.times(kind.count) for kind in self.kinds), Reading())

    @property
    def flops(self) -> dict[str, float]:
        """Of all MLPs, by what they are for."""
        out: dict[str, float] = {}
        for kind in self.kinds:
            for name, value in kind.flops.items():
                out[name] = out.get(name, 0.0) + value * kind.count
        return out

    @property
    def memory(self) -> int:
        """Peak of one worker, bytes beyond the imports."""
        return max(kind.memory for kind in self.kinds)

    @property
    def holds_all(self) -> int:
        """The memory bound with which every MLP would be held and read once."""
        return bound_to_hold(max(kind.held_bytes for kind in self.kinds))

    @property
    def reading_seconds(self) -> float:
        """Of all bytes, from files and temporary files; the latter are on this machine's disk."""
        return sum(map(self._reading_seconds, self.kinds))

    @property
    def computing_seconds(self) -> float:
        """Of all arithmetic, on all workers."""
        return sum(map(self._computing_seconds, self.kinds))

    def _reading_seconds(self, kind: Kind) -> float:
        moved, disk = kind.reading.times(kind.count), BANDWIDTH if self.remote else self.bandwidth
        return moved.read / self.bandwidth + (moved.written + moved.again) / disk

    def _computing_seconds(self, kind: Kind) -> float:
        most = sum(kind.count for kind in self.kinds)
        return kind.count * sum(kind.flops.values()) / self.rate / min(self.workers, most)

    @property
    def at_once(self) -> bool:
        """Whether there is always something that is read while something else is measured."""
        return self.workers > 1 or all(kind.ahead for kind in self.kinds)

    @property
    def seconds(self) -> float:
        """Estimated: the longer of reading and computing, and both where nothing can be read ahead."""
        ahead = [kind for kind in self.kinds if kind.ahead or self.workers > 1]
        alone = [kind for kind in self.kinds if kind not in ahead]
        together = max(sum(map(self._reading_seconds, ahead)), sum(map(self._computing_seconds, ahead)))
        return together + sum(map(self._reading_seconds, alone)) + sum(map(self._computing_seconds, alone))

    def facts(self) -> dict[str, object]:
        """All of it, JSON-ready; sizes in bytes, times in seconds."""
        moved = self.reading
        return {
            "mlps": sum(kind.count for kind in self.kinds),
            "neurons": sum(kind.count * kind.shape.d_mlp for kind in self.kinds),
            "remote": self.remote,
            "bytes_once": moved.once,
            "bytes_read_at_most": moved.read,
            "bytes_over_the_wire": moved.read if self.remote else 0,
            "bytes_to_temporary_files": moved.written,
            "bytes_read_again_at_most": moved.again,
            "bytes_of_a_finer_pass_where_neurons_cancel": moved.finer,
            "flops": self.flops,
            "memory_bound": self.bound,
            "memory_bound_to_read_once": self.holds_all,
            "memory_of_a_worker": self.memory,
            "workers": self.workers,
            "bandwidth": self.bandwidth,
            "flops_per_second_of_a_worker": self.rate,
            "flops_per_second_source": self.rate_source,
            "seconds_reading": self.reading_seconds,
            "seconds_computing": self.computing_seconds,
            "seconds": self.seconds,
            "kinds": [
                {
                    "group": kind.group, "dtype": kind.dtype, "count": kind.count,
                    "d_model": kind.shape.d_model, "d_mlp": kind.shape.d_mlp, "held": kind.held, "read_ahead": kind.ahead,
                    "held_bytes": kind.held_bytes, "bytes_once": kind.reading.once,
                    "bytes_read_at_most": kind.reading.read, "bytes_to_temporary_files": kind.reading.written,
                    "bytes_read_again_at_most": kind.reading.again,
                    "bytes_of_a_finer_pass_where_neurons_cancel": kind.reading.finer, "flops": kind.flops,
                    "memory_of_a_worker": kind.memory,
                }
                for kind in self.kinds
            ],
        }  # fmt: skip


def plan(
    checkpoint: Checkpoint,
    *,
    bandwidth: float | str = BANDWIDTH,
    workers: int = 1,
    memory: int | str = DEFAULT,
    gflops: float | None = None,
) -> Plan:
    """What a report of all gated MLPs of a checkpoint will take. Reads headers only.

    Args:
        checkpoint: the model.
        bandwidth: at which its files can be read, in bytes a second or as "2GB/s".
        workers: how many MLPs are measured at once, each with memory of its own; they share the bandwidth.
        memory: bound of each of them, as `probe` takes it.
        gflops: what one of them computes a second, in 1e9 operations; None to measure that here, which takes seconds.

    Raises:
        BadOption: an argument is no such number, or there is nothing to measure.
    """
    per_second, bound = in_bytes_per_second(bandwidth), in_bytes(memory)
    workers = whole_number("workers", workers, 1)
    if gflops is not None and not (isinstance(gflops, (int, float)) and math.isfinite(gflops) and gflops > 0):
        raise BadOption(f"gflops is {gflops!r}", hint="Give a number above 0: 1e9 floating point operations a second")
    kinds, remote = _kinds(checkpoint, bound, workers)
    if gflops is None:
        dearest = max(kinds, key=lambda kind: kind.count * sum(kind.flops.values()))
        rate = measured_rate(dearest.shape, workers)
    else:
        rate = gflops * 1e9
    return Plan(kinds, remote, per_second, workers, rate, "measured" if gflops is None else "given", bound)


def in_bytes_per_second(bandwidth: float | str) -> float:
    """A bandwidth such as "2GB/s", "400 MB/s" or 2e9 as bytes a second.

    >>> in_bytes_per_second("1.5GB/s"), in_bytes_per_second("100MiB")
    (1500000000.0, 104857600.0)

    Raises:
        BadOption: it is none, or not above 0.
    """
    pattern = r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]i?|)b?\s*(?:/\s*s)?\s*"
    match = None if isinstance(bandwidth, bool) else re.fullmatch(pattern, str(bandwidth), re.IGNORECASE)
    value = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 0 < value < math.inf:
        raise BadOption(f"bandwidth is {bandwidth!r}", hint="Give bytes a second, as 2GB/s, 400MB/s or 2000000000")
    return value


def _kinds(checkpoint: Checkpoint, bound: int, workers: int) -> tuple[tuple[Kind, ...], bool]:
    """MLPs that cost the same, in the order in which the first of each comes; and whether the model is remote."""
    if not checkpoint.in_files:
        raise BadOption("a plan for a model in memory", where=checkpoint.name, hint="It is measured without reading")
    infos = checkpoint.source.infos()
    facts = checkpoint.provenance()
    remote = "path" not in facts
    sizes = checkpoint.describe()["bytes"].tolist()
    layers: Counter[tuple[str, int]] = Counter()
    for site in checkpoint.sites:
        layers[site.tower, site.layer] += site.d_mlp
    counts: Counter[Kind] = Counter()
    for site, once in zip(checkpoint.sites, sizes, strict=True):
        rules = checkpoint.rules_of(site)
        act = rules.activation
        functional = act if act is not None and act.up is None and rules.note is None else None
        homogeneous = functional is not None and functional.degree is not None
        shape = Shape(site.d_mlp, site.d_model, functional is not None, homogeneous, site.group)
        held_bytes = site.held_bytes(infos)
        stacked = site.slabs["gate"].expert is not None
        held = held_bytes <= held_limit(bound) or stacked
        reader = Reader(checkpoint, site, shape, once, limit=held_limit(bound), remote=remote)
        reading = reader.held() if held else reader.in_files()
        expert = held_bytes if stacked else 0
        # a worker of its own reads no MLP ahead, and there is none beside the only one
        ahead = held and workers == 1 and len(checkpoint.sites) > 1 and 2 * held_bytes <= held_limit(bound)
        stripes, factors = reader.stripes(), (2 if ahead else 1) * held_bytes
        most = min(cores(shape, bound, factors if held else sum(stripes)), share_of_cores(workers))
        memory = peak_memory(shape, factors, not held, stripes, expert, layers[site.tower, site.layer], most)
        dtype = infos[site.tensors["gate"]].dtype
        counts[Kind(site.group, dtype, shape, 0, held, ahead, held_bytes, reading, memory)] += 1
    return tuple(replace(kind, count=count) for kind, count in counts.items()), remote
