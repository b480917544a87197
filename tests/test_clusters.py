"""Reports on clusters that run on this machine: Dask with two worker processes, and Ray."""

from __future__ import annotations

import os
import signal

import pytest

import glu_probe as gp
from glu_probe.errors import BadOption, UnknownActivation, WorkersLost

from . import workers
from .support import write_llama
from .test_execute import files_of, mischief, write_odd  # noqa: F401  a fixture

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dask():
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", host="127.0.0.1"
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    yield ray
    ray.shutdown()


def test_dask_gives_the_same_bytes(dask, tmp_path):
    model, cluster = write_odd(tmp_path / "model"), {"backend": "dask", "address": dask.scheduler_address}
    serial = files_of(gp.probe(model, seed=3), tmp_path / "serial")
    assert files_of(gp.probe(model, seed=3, **cluster), tmp_path / "dask") == serial
    kept = gp.probe(model, seed=3, **cluster, workers=1, parts=tmp_path / "parts")
    assert files_of(kept, tmp_path / "kept") == serial


def test_dask_runs_the_jobs_of_a_killed_worker_again(dask, tmp_path):
    model = write_llama(tmp_path / "wide", layers=8, d_mlp=1500, d_model=256)

    def progress(sites):
        for number, site in enumerate(sites):
            if number == 2:
                os.kill(next(iter(dask.workers.values())).pid, signal.SIGKILL)
            yield site

    report = gp.probe(model, backend="dask", address=dask.scheduler_address, progress=progress)
    assert files_of(report, tmp_path / "dask") == files_of(gp.probe(model), tmp_path / "serial")


def test_dask_names_the_layer_of_an_error(dask, mischief):  # noqa: F811
    with pytest.raises(UnknownActivation) as caught:
        gp.probe(mischief(workers.raise_own), backend="dask", address=dask.scheduler_address)
    assert caught.value.where == "layer 3, mlp: config.json"


def test_dask_names_the_layer_that_kills_workers(dask, mischief):  # noqa: F811
    with pytest.raises(WorkersLost, match=r"layer 3, mlp: .* died"):
        gp.probe(mischief(workers.die), backend="dask", address=dask.scheduler_address)


def test_ray_gives_the_same_bytes(ray, tmp_path):
    model = write_odd(tmp_path / "model")
    serial = files_of(gp.probe(model, seed=3), tmp_path / "serial")
    assert files_of(gp.probe(model, seed=3, backend="ray"), tmp_path / "ray") == serial
    kept = gp.probe(model, seed=3, backend="ray", workers=1, parts=tmp_path / "parts")
    assert files_of(kept, tmp_path / "kept") == serial
    assert ray.is_initialized()  # it was before


def test_ray_runs_the_job_of_a_killed_worker_again(ray, mischief, tmp_path):  # noqa: F811
    workers_marker = tmp_path / "died"
    model = mischief(workers.dying_once_at(workers_marker))
    report = gp.probe(model, backend="ray")
    assert workers_marker.exists()
    assert files_of(report, tmp_path / "ray") == files_of(gp.probe(model), tmp_path / "serial")


def test_ray_names_the_layer_of_an_error(ray, mischief):  # noqa: F811
    with pytest.raises(UnknownActivation) as caught:
        gp.probe(mischief(workers.raise_own), backend="ray")
    assert caught.value.where == "layer 3, mlp: config.json"
    with pytest.raises(BadOption, match="connected to the Ray cluster"):
        gp.probe(mischief(None), backend="ray", address="127.0.0.1:1")


def test_a_cluster_that_does_not_answer(llama, monkeypatch):
    monkeypatch.setattr("glu_probe.pools._PATIENCE", 1)
    with pytest.raises(WorkersLost, match="no Dask cluster answers"):
        gp.probe(llama, backend="dask", address="tcp://127.0.0.1:9")
