"""The one seam to parallel and distributed execution: MLPs in, results out as they come, the same bytes wherever they ran.

A worker that dies takes its jobs with it; they are run again, one at a time, so that a job that kills its worker again is
known by name and costs no other job its result.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from .arguments import whole_number
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.memory import Workspace
from .checkpoint.sites import Site
from .checkpoint.stored import StoredLayer
from .errors import BadOption, WorkersLost
from .frames import LayerResult
from .identity import WatchedFiles
from .jobs import Job, Outcome, Ticket, measured
from .measuring import Settings, measure_site, measure_stored, stored_layers
from .pools import DaskCluster, Pool, Processes, RayCluster, Threads

BackendName = Literal["serial", "threads", "processes", "dask", "ray"]
_LOSSES = 3  # of the worker of one job, until it is given up


@dataclass(frozen=True)
class Backend:
    """Where to run.

    Attributes:
        name: "serial", here and one after another; "threads" or "processes" of this machine; "dask" or "ray" for a cluster
            that runs already.
        workers: how many jobs at once at most; None for as many as there are cores, or as the cluster has.
        address: of the cluster; for Ray None is one on this machine or the one this process is connected to.

    Raises:
        BadOption: they do not fit each other.
    """

    name: str = "serial"
    workers: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(BackendName):
            raise BadOption(f"backend is {self.name!r}", hint=f"Use one of {', '.join(get_args(BackendName))}")
        if self.workers is not None:
            whole_number("workers", self.workers, 1)
        if self.name == "serial" and self.workers not in (None, 1):
            raise BadOption(f"{self.workers} workers for the serial backend", hint="Say which: processes, threads, ...")
        if self.address is not None and self.name not in ("dask", "ray"):
            raise BadOption(f"an address for the backend {self.name}", hint="It is for the backends dask and ray")


def measure_sites(
    checkpoint: Checkpoint, sites: Sequence[Site], settings: Settings, backend: Backend
) -> Generator[tuple[Site, LayerResult], None, None]:
    """Measure MLPs, and give each result as it comes: in their order on the serial backend, in any order on others.

    Close the iterator to stop the workers.

    Raises:
        BadOption: a model in memory for workers that do not share it.
        ChangedFiles: a file is not what it was when the run began, or a worker finds another.
        WorkersLost: a job's worker died each time, or the cluster cannot be reached.
        MissingLibrary: the backend's library is not installed.
        GluProbeError: what a job raised, naming its layer.
    """
    if not checkpoint.in_files and backend.name not in ("serial", "threads"):
        raise BadOption(
            f"the backend {backend.name} for a model in memory, which other processes do not have",
            where=checkpoint.name, hint="Use the backend threads, or save the model and give its directory",
        )  # fmt: skip
    files = WatchedFiles(checkpoint)
    if backend.name == "serial":
        with closing(stored_layers(checkpoint, sites, settings.memory)) as layers:
            for site in sites:
                yield site, measured(checkpoint, site, files, partial(_next_measured, layers, site, settings))
        return
    if not sites:
        return
    numbers = {id(site): number for number, site in enumerate(checkpoint.sites)}
    pool = _pool(backend, checkpoint, files)
    try:
        ticket = Ticket.of(checkpoint) if checkpoint.in_files else Ticket("", (), b"", "")
        files.refuse_changed()
        jobs = [Job(ticket, numbers[id(site)], settings, pool.threads) for site in sites]
        for job, outcome in _outcomes(pool, jobs, checkpoint):
            yield checkpoint.sites[job.number], outcome.get()
    finally:
        pool.close()


def _next_measured(layers: Iterator[StoredLayer], site: Site, settings: Settings) -> LayerResult:
    return measure_stored(next(layers), site, settings)


def _pool(backend: Backend, checkpoint: Checkpoint, files: WatchedFiles) -> Pool:
    if backend.name == "dask":
        return DaskCluster(backend.address, backend.workers)
    if backend.name == "ray":
        return RayCluster(backend.address, backend.workers)
    if backend.name == "processes":
        return Processes(backend.workers)
    return Threads(backend.workers, _Shared(checkpoint, files))


class _Shared:
    """The work of a thread: on the checkpoint that all share, in memory of its own."""

    def __init__(self, checkpoint: Checkpoint, files: WatchedFiles) -> None:
        import threading

        self._checkpoint, self._files, self._own = checkpoint, files, threading.local()

    def __call__(self, job: Job) -> Outcome:
        """Do a job."""
        import torch

        torch.set_num_threads(job.threads)
        if not hasattr(self._own, "workspace"):
            self._own.workspace = Workspace()
        site = self._checkpoint.sites[job.number]
        measure = partial(measure_site, self._checkpoint, site, job.settings, self._own.workspace)
        return Outcome(measured(self._checkpoint, site, self._files, measure))


def _outcomes(pool: Pool, jobs: Sequence[Job], checkpoint: Checkpoint) -> Iterator[tuple[Job, Outcome]]:
    waiting, suspects = deque(jobs), deque[Job]()
    running: dict[Future[Outcome], Job] = {}
    losses: Counter[int] = Counter()
    ahead = pool.slots + (pool.slots + 1) // 2  # so that no worker waits for this process
    broken = False
    while waiting or suspects or running:
        if suspects:  # alone, when those that run are done
            if not running:
                job = suspects.popleft()
                running[pool.submit(job)] = job
        else:
            while waiting and len(running) < ahead:
                job = waiting.popleft()
                running[pool.submit(job)] = job
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job = running.pop(future)
            try:
                outcome = future.result()
            except pool.lost as error:
                losses[job.number] += 1
                if losses[job.number] >= _LOSSES:
                    raise _lost(job, checkpoint, error) from None
                suspects.append(job)
                broken = True
            except Exception as error:
                if not pool.lost:  # the job's own, from a thread
                    raise
                raise WorkersLost(
                    f"a worker cannot run jobs ({type(error).__name__}: {error})", where=checkpoint.name,
                    hint="Every worker needs the same version of glu-probe installed",
                ) from error  # fmt: skip
            else:
                yield job, outcome
        if broken and not running:
            pool.renew()
            broken = False


def _lost(job: Job, checkpoint: Checkpoint, error: BaseException) -> WorkersLost:
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return WorkersLost(
        f"the worker that measured it died {_LOSSES} times ({why})",
        where=f"{checkpoint.name}, {checkpoint.sites[job.number].where}",
        hint="Look for what kills processes; if it is want of memory, use fewer workers",
    )
