"""How many threads the libraries below may use: as many as do not change a bit, and no more than there are cores.

torch's own threads divide work so that results do not depend on their number. Those of numpy's linear algebra do not: a
product that two threads compute differs in its last bit from that of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let numpy's linear algebra use one thread, in all threads of this process."""
    import numpy  # noqa: F401  limits hold for what is loaded
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, user_api="blas"):
        yield


def cores() -> int:
    """How many cores this process may use."""
    import loky

    return loky.cpu_count()


def share_of_cores(workers: int) -> int:
    """How many threads each of so many workers may use, so that together they use no more than there are cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, cores() // workers)
    return min(share, int(given)) if given.isdigit() and int(given) else share
