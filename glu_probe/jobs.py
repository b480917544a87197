"""A job: one MLP of a checkpoint to be read and measured, here or by a worker. It carries names and numbers, no tensors.

A worker opens the checkpoint itself, once, and makes sure that it is the same one, read in the same way by the same
software. What goes wrong comes back as it was: the class, the fields and the traceback.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from .checkpoint.checkpoint import Checkpoint, open_checkpoint
from .checkpoint.known_families import enter, registered_families
from .checkpoint.memory import Workspace
from .checkpoint.ref import parse_ref
from .checkpoint.rules import Options
from .checkpoint.sites import Site
from .errors import ChangedFiles, GluProbeError
from .frames import LayerResult
from .identity import WatchedFiles, identity, running_software
from .measuring import Settings, measure_site
from .thread_limits import one_blas_thread


@dataclass(frozen=True)
class Ticket:
    """What a worker needs to open a checkpoint that is open here.

    Attributes:
        ref: what `open_checkpoint` takes, wherever the worker's working directory is and wherever a branch points by then.
        options: of `open_checkpoint`.
        families: families that were registered in this process, pickled.
        facts: what must be the same there, as JSON.
        download: whether remote files are fetched whole; a worker finds them in the cache if another has fetched them.
    """

    ref: str
    options: tuple[tuple[str, Any], ...]
    families: bytes
    facts: str
    download: bool = False

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Ticket:
        """For a checkpoint that lies in files."""
        facts = checkpoint.provenance()
        if "repository" in facts:
            file = parse_ref(checkpoint.ref).file
            ref = f"hf://{facts['repository']}@{facts['commit']}" + (f"/{file}" if file else "")
        else:
            ref = os.path.abspath(facts["path"]) if "path" in facts else checkpoint.ref
        options = tuple((name, getattr(checkpoint.options, name)) for name in Options.__dataclass_fields__)
        same = json.dumps(_facts(checkpoint), sort_keys=True)
        return cls(ref, options, _families(), same, checkpoint.download)


def _families() -> bytes:
    import cloudpickle  # they may hold functions that were typed in a notebook

    families = registered_families()
    return cloudpickle.dumps(families) if families else b""


@dataclass(frozen=True)
class Job:
    """One MLP to measure.

    Attributes:
        ticket: of the checkpoint.
        number: of the MLP among its `sites`.
        settings: how to measure.
        threads: of torch, in a worker.
    """

    ticket: Ticket
    number: int
    settings: Settings
    threads: int


@dataclass(frozen=True)
class Outcome:
    """What came of a job: a result, or an error as bytes and where it came from as text."""

    result: LayerResult | None = None
    error: bytes = b""
    trace: str = ""

    @classmethod
    def failed(cls, error: Exception) -> Outcome:
        """The outcome of a job that raised."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(error=_pickled(error), trace=f"in process {os.getpid()} on {socket.gethostname()}:\n{trace}")

    def get(self) -> LayerResult:
        """The result.

        Raises:
            Exception: what the job raised; its cause has the traceback as text.
        """
        if self.result is None:
            raise pickle.loads(self.error) from _InWorker(f"\n{self.trace}")
        return self.result


class _InWorker(Exception):
    """The traceback of an error that was raised elsewhere."""


def _pickled(error: Exception) -> bytes:
    try:
        body = pickle.dumps(error)
        if type(pickle.loads(body)) is type(error):
            return body
    except Exception:  # whatever a foreign class does when it is pickled
        pass
    return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


_held = threading.local()  # what a worker keeps between jobs; its threads share nothing


def run(job: Job) -> Outcome:
    """Do a job in a worker. Nothing is raised: what goes wrong is an outcome too."""
    try:
        import torch

        torch.set_num_threads(job.threads)
        with one_blas_thread():
            checkpoint = _opened(job.ticket)
            site = checkpoint.sites[job.number]
            measure = partial(measure_site, checkpoint, site, job.settings, _held.workspace)
            return Outcome(measured(checkpoint, site, _held.files, measure))
    except Exception as error:
        return Outcome.failed(error)


def _opened(ticket: Ticket) -> Checkpoint:
    if getattr(_held, "ticket", None) != ticket:
        _held.ticket = _held.checkpoint = None
        for family in pickle.loads(ticket.families) if ticket.families else ():
            enter(family)
        checkpoint = open_checkpoint(ticket.ref, download=ticket.download, **dict(ticket.options))
        there, here = json.loads(ticket.facts), _facts(checkpoint)
        if there != here:
            differing = [
                _difference(name, there, here) for name in {**there, **here} if there.get(name) != here.get(name)
            ]
            raise ChangedFiles(
                f"the worker {os.getpid()} on {socket.gethostname()} finds another checkpoint or has other software than the "
                f"run was begun with: {', '.join(differing)}",
                where=ticket.ref,
                hint="Begin again when nothing writes to it; all workers need the same versions and the same kind of processor",
            )
        _held.checkpoint, _held.workspace, _held.files = checkpoint, Workspace(), WatchedFiles(checkpoint)
        _held.ticket = ticket
    return _held.checkpoint


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    return identity(checkpoint) | {"software": running_software()}


def _difference(name: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    before, now = there.get(name), here.get(name)
    if isinstance(before, dict) and isinstance(now, dict):
        return ", ".join(_difference(key, before, now) for key in {**before, **now} if before.get(key) != now.get(key))
    return f"{name} ({before!r} there, {now!r} here)" if len(f"{before}{now}") < 100 else name


def measured(
    checkpoint: Checkpoint, site: Site, files: WatchedFiles, measure: Callable[[], LayerResult]
) -> LayerResult:
    """What `measure` gives for an MLP, with errors that name it, of files that are still as they were when this is done.

    Raises:
        ChangedFiles: one of them is not.
    """
    try:
        result = measure()
    except GluProbeError as error:
        files.refuse_changed()
        error.within(site.where)
        raise
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"while {checkpoint.name}, {site.where} was measured")
        raise
    files.refuse_changed()
    return result
