"""What do the backends gain or cost, with as many workers as there are cores?

The same report on each, in a process of its own, imports excluded and the start of workers included, since a run pays for
it: processes have to import everything again. Dask and Ray run as clusters on this machine if they are installed; their
start is not counted, as a cluster is there already. That all give the same bytes is tested elsewhere.

    python analyses/bench/backends.py
    python analyses/bench/backends.py --layers 4 --workers 2 --only serial threads
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from harness import Run, fastest, import_report, in_own_process, machine, parser, report, synthetic, table

BACKENDS = ("serial", "threads", "processes", "dask", "ray")


@contextmanager
def dask_cluster(workers: int) -> Iterator[str]:
    """A scheduler with workers in processes of their own; its address."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


@contextmanager
def ray_cluster(workers: int) -> Iterator[str]:
    """A cluster of one node; its address."""
    import ray

    context = ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


def run_on(backend: str, model: Path, workers: int) -> Run:
    """A report on one backend."""
    work = partial(report, str(model), backend=backend)
    if backend == "serial":
        return in_own_process(import_report, work)
    if backend in ("dask", "ray"):
        with {"dask": dask_cluster, "ray": ray_cluster}[backend](workers) as address:
            return in_own_process(import_report, partial(work, address=address))
    return in_own_process(import_report, partial(work, workers=workers))


def main() -> None:
    """Print a line for each backend."""
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--d-model", type=int, default=2048)
    options.add_argument("--d-mlp", type=int, default=8192)
    options.add_argument("--workers", type=int, default=os.cpu_count())
    options.add_argument("--only", nargs="+", choices=BACKENDS, default=BACKENDS)
    given = options.parse_args()
    there = {"dask": "distributed", "ray": "ray"}
    absent = [name for name in given.only if importlib.util.find_spec(there.get(name, "torch")) is None]
    backends = [name for name in given.only if name not in absent]
    with synthetic(given.scratch, layers=given.layers, d_model=given.d_model, d_mlp=given.d_mlp) as model:
        runs = [{name: run_on(name, model, given.workers) for name in backends} for _ in range(given.rounds)]
    best = {name: fastest(one[name] for one in runs) for name in backends}
    first = best[backends[0]].seconds
    print(machine())
    print(
        f"{given.layers} layers of {given.d_model} x {given.d_mlp} in bfloat16, {given.workers} workers; "
        f"fastest of {given.rounds}"
    )
    rows = [(name, f"{run.seconds:.2f}", f"{first / run.seconds:.2f}") for name, run in best.items()]
    print(table(("", "seconds", f"times as fast as {backends[0]}"), rows))
    for name in absent:
        print(f'{name} is not installed: pip install "glu-probe[{name}]"')


if __name__ == "__main__":
    main()
