"""Where jobs can run: threads or processes of this machine, or a cluster of Dask or Ray that is there already.

Each is a pool that takes jobs and gives futures of `concurrent.futures`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Protocol

from .errors import BadOption, MissingLibrary, WorkersLost
from .jobs import Job, Outcome, run
from .thread_limits import cores, share_of_cores

_PATIENCE = 30  # seconds for a cluster to answer
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Pool(Protocol):
    """Workers.

    Attributes:
        slots: how many jobs run at once.
        threads: how many threads of torch each may use.
        lost: exceptions of a future that mean that its worker died.
    """

    slots: int
    threads: int
    lost: tuple[type[BaseException], ...]

    def submit(self, job: Job) -> Future[Outcome]:
        """Begin a job as soon as a worker is free."""
        ...

    def renew(self) -> None:
        """Replace workers that died."""
        ...

    def close(self) -> None:
        """Let go of the workers, whatever they do at the moment."""
        ...


class Threads:
    """Threads of this process. What they do is a function of the job's own choice, as they can share a checkpoint."""

    lost: tuple[type[BaseException], ...] = ()

    def __init__(self, workers: int | None, work: Callable[[Job], Outcome]) -> None:
        import torch

        self.slots = workers or cores()
        self.threads, self._before = share_of_cores(self.slots), torch.get_num_threads()
        self._work, self._executor = work, ThreadPoolExecutor(self.slots, "glu-probe")

    def submit(self, job: Job) -> Future[Outcome]:
        """Begin a job."""
        return self._executor.submit(self._work, job)

    def renew(self) -> None:
        """Threads do not die."""

    def close(self) -> None:
        """Wait for the jobs that run; a thread cannot be stopped."""
        import torch

        self._executor.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(self._before)


class Processes:
    """Processes of this machine. They end with this one, even if it is killed."""

    def __init__(self, workers: int | None) -> None:
        from loky.process_executor import BrokenProcessPool, ShutdownExecutorError

        self.slots = workers or cores()
        self.threads = share_of_cores(self.slots)
        self.lost: tuple[type[BaseException], ...] = (BrokenProcessPool, ShutdownExecutorError, CancelledError)
        self._executor: Any = None

    def submit(self, job: Job) -> Future[Outcome]:
        """Begin a job."""
        import loky

        if self._executor is None:
            # a worker that meets a larger MLP than before needs more memory, which is no leak
            limits = dict.fromkeys(_THREAD_LIMITS, str(self.threads)) | {"LOKY_MAX_MEMORY_LEAK_SIZE": "1e15"}
            self._executor = loky.ProcessPoolExecutor(
                self.slots, env=limits, initializer=begin_worker, initargs=(os.getpid(),)
            )
        try:
            return self._executor.submit(run, job)
        except self.lost as error:  # the pool broke since it was last looked at
            future: Future[Outcome] = Future()
            future.set_exception(error)
            return future

    def renew(self) -> None:
        """Begin with new processes: where one died, all were stopped."""
        self.close()

    def close(self) -> None:
        """Kill the workers."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, kill_workers=True)
            self._executor = None


def begin_worker(parent: int) -> None:
    """Make a process a worker, which ends soon after its parent did."""
    import signal

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers
    if os.name == "posix":
        threading.Thread(target=watch, daemon=True).start()


class DaskCluster:
    """Workers of a Dask cluster. Dask runs the jobs of a worker that died again by itself, up to its own limit."""

    threads = 1  # a slot of a worker is meant to be a core

    def __init__(self, address: str | None, workers: int | None) -> None:
        try:
            import distributed
        except ImportError:
            raise missing("dask") from None
        if address is None:
            raise BadOption("the Dask backend needs the address of a scheduler", hint="Give --address tcp://HOST:8786")
        self.lost: tuple[type[BaseException], ...] = (
            distributed.scheduler.KilledWorker,
            CancelledError,
            distributed.CancelledError,
        )
        try:
            self._client = distributed.Client(address, set_as_default=False, timeout=_PATIENCE)
        except (OSError, ValueError, TimeoutError) as error:
            raise unreachable("Dask", address, error) from None
        try:
            self._client.wait_for_workers(1, timeout=_PATIENCE)
        except TimeoutError:
            self._client.close()
            raise WorkersLost("the Dask cluster has no workers", where=address, hint="Start some") from None
        slots = sum(self._client.ncores().values())
        self.slots = min(workers or slots, slots)
        self._executor = self._client.get_executor(pure=False)

    def submit(self, job: Job) -> Future[Outcome]:
        """Begin a job."""
        return self._executor.submit(run, job)

    def renew(self) -> None:
        """That is for the cluster to do."""

    def close(self) -> None:
        """Take back what has not begun, and part from the cluster."""
        with contextlib.suppress(CancelledError):
            self._executor.shutdown(wait=False)
        self._client.close()


class RayCluster:
    """Workers of a Ray cluster: the one this process is connected to, or that at an address."""

    threads = 1  # a task is given one core
    _RETRIES = 2  # by Ray itself, of tasks whose worker died

    def __init__(self, address: str | None, workers: int | None) -> None:
        try:
            import ray
        except ImportError:
            raise missing("ray") from None
        self._ray, self._own = ray, not ray.is_initialized()
        if self._own:
            try:
                ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError, OSError) as error:
                raise unreachable("Ray", address or "this machine", error) from None
        elif address not in (None, "auto", ray.get_runtime_context().gcs_address):
            raise BadOption(
                f"this process is connected to the Ray cluster at {ray.get_runtime_context().gcs_address} already",
                where=address, hint="Leave the address out, or call ray.shutdown() before",
            )  # fmt: skip
        self.lost: tuple[type[BaseException], ...] = (ray.exceptions.RayError, CancelledError)
        slots = int(ray.cluster_resources().get("CPU", 0))
        if not slots:
            self.close()
            raise WorkersLost("the Ray cluster has no cores to give", where=address, hint="Start some workers")
        self.slots = min(workers or slots, slots)
        self._task = ray.remote(max_retries=self._RETRIES, num_cpus=1)(run)
        self._running: set[Any] = set()

    def submit(self, job: Job) -> Future[Outcome]:
        """Begin a job."""
        ref = self._task.remote(job)
        self._running.add(ref)
        future = ref.future()
        future.add_done_callback(lambda _: self._running.discard(ref))
        return future

    def renew(self) -> None:
        """That is for the cluster to do."""

    def close(self) -> None:
        """Stop what runs, and part from the cluster unless the connection was there before."""
        if self._own:
            self._ray.shutdown()
            return
        for ref in tuple(self._running):
            self._ray.cancel(ref, force=True)


def missing(extra: str) -> MissingLibrary:
    """For a backend whose library is not installed."""
    return MissingLibrary(
        f"the backend {extra} needs a library that is not installed", hint=f'pip install "glu-probe[{extra}]"'
    )


def unreachable(name: str, address: str, error: BaseException) -> WorkersLost:
    """For a cluster that does not answer."""
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return WorkersLost(f"no {name} cluster answers ({why})", where=address, hint="Start one, or check the address")
