"""How many threads the libraries below may use: as many as do not change a bit, and no more than there are cores.

torch's own threads divide work so that results do not depend on their number. Those of numpy's linear algebra do not: a
product that two threads compute differs in its last bit from that of one.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_entered = 0  # how often the limit was asked for and not yet let go of
_lock = threading.Lock()
_limits: Any = None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let numpy's linear algebra use one thread, in all threads of this process, until the last who asked is done."""
    global _entered, _limits
    import numpy  # noqa: F401  limits hold for what is loaded
    from threadpoolctl import threadpool_limits

    with _lock:
        _entered += 1
        if _entered == 1:
            _limits = threadpool_limits(1, user_api="blas")
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered:
                _limits.restore_original_limits()


def torch_cores(count: int) -> Any:
    """Let torch use so many cores in the thread that calls this, whatever it may use in others.

    Returns:
        A context manager that gives the thread back what it had, for who wants it back.
    """
    import torch

    torch.get_num_threads()  # takes over what is set for all threads, which it would do later otherwise
    return _libraries().limit(limits=count, user_api="openmp")


@functools.cache
def _libraries() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def cores() -> int:
    """How many cores this process may use."""
    import loky

    return loky.cpu_count()


def share_of_cores(workers: int) -> int:
    """How many threads each of so many workers may use, so that together they use no more than there are cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, cores() // workers)
    return min(share, int(given)) if given.isdigit() and int(given) else share
