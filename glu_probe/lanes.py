"""Work on blocks of neurons, divided among the cores so that their number changes no bit of what is summed up.

Blocks go to eight lanes in turn. A lane takes its blocks in order and keeps a sum of its own, and the sums of the lanes
are added up last. Cores take blocks as they come free and wait for one another only at the end: one that is busy with
something else delays its block, where a product divided among all cores would have them all wait for it, each time.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from . import thread_limits

LANES = 8

Item = TypeVar("Item")


def in_lanes(work: Callable[[int, Item], None], items: Iterable[Item], lanes: int = LANES) -> None:
    """work(lane, item) for each item, on as many cores as torch may use; items are taken as there is a core for them.

    Within `work` torch uses one core.

    Args:
        work: what is done.
        items: to what.
        lanes: how many there are, and no more cores; fewer where what each sums up is large.

    Raises:
        What `work` raises, of the first item for which it does; no work goes on then.
    """
    threads = min(_own.most or torch.get_num_threads(), lanes)
    if threads < 2:
        for number, item in enumerate(items):
            work(number % lanes, item)
            del item  # before the next one is there
        return
    pool, waiting = _pool(threads), deque[Future[None]]()
    # fewer than there are lanes, so that a lane's last item is done when its next one begins; one beyond the cores, so
    # that none of these waits for this thread
    most = min(threads + 1, lanes) - 1
    try:
        for number, item in enumerate(items):
            waiting.append(pool.submit(work, number % lanes, item))
            del item
            if len(waiting) > most:
                waiting.popleft().result()
        while waiting:
            waiting.popleft().result()
    finally:
        for one in waiting:
            if not one.cancel():
                one.exception()


@contextmanager
def only_lanes(most: int | None = None) -> Iterator[None]:
    """Within, torch uses several cores in lanes alone, of all that this thread does.

    Args:
        most: how many at once, at least 1; None for all that torch may use. No result depends on it.
    """
    before = _own.cores, _own.most
    _own.cores = _own.cores or torch.get_num_threads()
    _own.most = min(_own.most or _own.cores, most or LANES)
    try:
        with thread_limits.torch_cores(1):
            yield
    finally:
        _own.cores, _own.most = before


@contextmanager
def every_core() -> Iterator[None]:
    """Within `only_lanes`, give torch back what it had: for large products and eigenvalue problems."""
    with thread_limits.torch_cores(_own.cores or torch.get_num_threads()):
        yield


class _Own(threading.local):
    """What a thread has for itself: its pools by number of cores, so that two who measure at once do not share them."""

    def __init__(self) -> None:
        self.pools: dict[int, ThreadPoolExecutor] = {}
        self.cores: int | None = None  # that torch had before `only_lanes`
        self.most: int | None = None  # of them, for lanes


_own = _Own()


def _pool(threads: int) -> ThreadPoolExecutor:
    pool = _own.pools.get(threads)
    if pool is None:
        pool = _own.pools[threads] = ThreadPoolExecutor(
            threads, "lanes", initializer=thread_limits.torch_cores, initargs=(1,)
        )
    return pool


def _forget() -> None:
    _own.pools.clear()


# a child has the pools but not their threads
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
