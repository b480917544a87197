"""Threads and processes: the same bytes, the same errors, and workers that die."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

import glu_probe as gp
from glu_probe import errors, jobs
from glu_probe.errors import BadOption, ChangedFiles, GluProbeError, MissingLibrary, UnknownActivation, WorkersLost
from glu_probe.execute import Backend
from glu_probe.jobs import Job, Outcome, Ticket, run
from glu_probe.probing import Settings

from . import workers
from .checkpoint.servers import COMMIT
from .checkpoint.writers import gguf_tensors, write_gguf
from .support import llama_config, llama_tensors, write_checkpoint, write_llama


@pytest.fixture
def mischief(tmp_path):
    """A checkpoint of a family that is registered here alone; give it something to do."""

    def make(does):
        workers.register(does)
        return write_llama(tmp_path / "mischief", layers=6, model_type="mischief")

    yield make
    workers.forget()


def files_of(report, directory) -> dict[str, bytes]:
    """Everything that is saved of a report, figures aside."""
    report.save(directory, figures=False)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def write_odd(directory):
    """A layer without an MLP, a dense one, two of routed and shared experts, and values that a float32 cannot hold.

    They are in one layer alone, so that a column's dtype is not known from the first.
    """
    plain, tensors = llama_tensors(layers=5), {}
    for name, tensor in plain.items():
        layer = name.split(".")[2] if ".layers." in name else ""
        if ".mlp." not in name or layer == "0":
            tensors[name] = tensor
        elif layer in ("2", "3"):
            for expert in range(3):
                tensors[name.replace(".mlp.", f".mlp.experts.{expert}.")] = tensor * (expert + 1)
            tensors[name.replace(".mlp.", ".mlp.shared_experts.")] = tensor
        elif layer == "4":
            tensors[name] = tensor * 1e30
    tensors["model.layers.4.mlp.up_proj.weight"][4] = torch.nan
    return write_checkpoint(directory, tensors, llama_config(num_hidden_layers=5, num_experts=3))


def test_every_backend_gives_the_same_bytes(tmp_path):
    model = write_odd(tmp_path / "model")
    report = gp.probe(model, seed=3)
    assert report.neurons["outlier_risk"].dtype == "float64"
    assert report.layers["no_mlp"].tolist() == [False, True, False, False, False, False, False]
    serial = files_of(report, tmp_path / "serial")
    for number, backend in enumerate((
        {"backend": "threads", "workers": 1}, {"backend": "threads", "workers": 3}, {"backend": "processes", "workers": 2},
    )):  # fmt: skip
        assert files_of(gp.probe(model, seed=3, **backend), tmp_path / f"{number}") == serial
        kept = gp.probe(model, seed=3, **backend, parts=tmp_path / f"parts {number}")
        assert files_of(kept, tmp_path / f"kept {number}") == serial
        pd.testing.assert_frame_equal(kept.neurons, report.neurons, check_exact=True)


def test_not_a_bit_depends_on_the_threads_of_the_libraries(llama, tmp_path):
    """In parts, which hold float64: rounding to float32 would hide the last bits."""
    kept = []
    for threads in ("1", "2"):
        code = "import sys, glu_probe as gp; gp.probe(sys.argv[1], parts=sys.argv[2], layers=[0, 5])"
        limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)
        subprocess.run(
            [sys.executable, "-c", code, str(llama), str(tmp_path / threads)], check=True, env={**os.environ, **limits}
        )
        kept.append([path.read_bytes() for path in sorted((tmp_path / threads).glob("*.result"))])
    assert len(kept[0]) == 2
    assert kept[0] == kept[1]


def test_threads_of_torch_are_as_before(llama):
    before = torch.get_num_threads()
    gp.probe(llama, backend="threads", workers=2)
    assert torch.get_num_threads() == before


def test_options_and_registered_families_reach_the_workers(mischief, tmp_path):
    model = mischief(None)
    options = {"fold_norm": False, "activation": "relu", "samples": 4, "exact": True}
    here, there = gp.probe(model, **options), gp.probe(model, **options, backend="processes", workers=2)
    assert here.provenance["towers"]["text"]["family"] == "mischief"
    assert files_of(here, tmp_path / "here") == files_of(there, tmp_path / "there")


def test_the_working_directory_does_not_matter(llama, tmp_path, monkeypatch):
    monkeypatch.chdir(llama.parent)
    ticket = Ticket.of(gp.open_checkpoint("llama"))
    assert ticket.ref == str(llama)
    assert len(pickle.dumps(ticket)) < 10_000


# -- files on servers --------------------------------------------------------------------------------

WIDE = {"d_mlp": 512, "d_model": 256, "layers": 3}  # so that a file is much larger than the first look at its header
MODEL = "model.safetensors"


def whole_and_in_parts(server) -> tuple[int, int]:
    """How often the weights were asked for whole, and how often for a part behind the first look."""
    asked = [part for method, path, part, _ in server.requests if method == "GET" and path.endswith(f"/{MODEL}")]
    return asked.count(None), sum(part is not None and not part.startswith("bytes=0-") for part in asked)


@pytest.fixture
def as_a_worker():
    """Do the jobs of a checkpoint as a worker would, which has opened nothing yet."""

    def work(checkpoint):
        checkpoint = pickle.loads(pickle.dumps(Ticket.of(checkpoint)))
        threads = torch.get_num_threads()
        return [run(Job(checkpoint, number, Settings(samples=2), threads)).get() for number in range(3)]

    jobs._held.ticket = None
    yield work
    jobs._held.ticket = None


@pytest.mark.parametrize("download", [True, False])
@pytest.mark.parametrize("server", ["hub", "web"])
def test_a_worker_downloads_where_that_was_asked_for(server, download, request, tmp_path, as_a_worker):
    served, directory = request.getfixturevalue(server), write_llama(tmp_path / "local", **WIDE)
    if server == "hub":
        served.add("org/name", directory)
    else:
        served.roots["m"] = directory
    checkpoint = gp.open_checkpoint("org/name" if server == "hub" else f"{served.url}/m/{MODEL}", download=download)
    assert checkpoint.download is checkpoint.with_options(fold_norm=False).download is download
    served.forget()
    found = as_a_worker(checkpoint)
    local = gp.open_checkpoint(directory)
    for result, expected in zip(found, as_a_worker(local), strict=True):
        for name, values in expected.neurons.items():
            np.testing.assert_array_equal(result.neurons[name], values)
    whole, parts = whole_and_in_parts(served)
    assert (whole, parts) == (1, 0) if download else (whole == 0 and parts >= 3 * 4)


def test_processes_download_a_file_once_and_read_the_copy(web, tmp_path):
    directory = write_llama(tmp_path / "local", **WIDE)
    web.roots["m"] = directory
    report = gp.probe(f"{web.url}/m/{MODEL}", backend="processes", workers=2, samples=2, download=True)
    whole, parts = whole_and_in_parts(web)
    assert 1 <= whole <= 2  # of a second the answer is left unread, once it says that it is the same file
    assert parts == 0
    (kept,) = (tmp_path / "cache").rglob(MODEL)
    assert kept.read_bytes() == (directory / MODEL).read_bytes()
    pd.testing.assert_frame_equal(report.neurons, gp.probe(directory / MODEL, samples=2).neurons)


def test_a_torch_file_of_a_server_reaches_the_workers(web, tmp_path, as_a_worker):
    directory = write_llama(tmp_path / "local", layers=3)
    torch.save(llama_tensors(layers=3), directory / "pytorch_model.bin")
    (directory / MODEL).unlink()
    web.roots["m"] = directory
    assert len(as_a_worker(gp.open_checkpoint(f"{web.url}/m", download=True))) == 3


def test_one_file_of_a_repository_is_the_one_that_a_worker_opens(hub, tmp_path, as_a_worker):
    """Not its neighbour, and not what a directory of the same name holds."""
    directory = tmp_path / "local"
    for name, seed in (("a.gguf", 0), ("b.gguf", 1)):
        directory.mkdir(exist_ok=True)
        write_gguf(directory / name, gguf_tensors(layers=3, seed=seed), layers=3)
    hub.add("org/name", directory)
    write_llama(tmp_path / "org" / "name", layers=3, seed=2)
    ticket = Ticket.of(gp.open_checkpoint("hf://org/name/b.gguf"))
    assert ticket.ref == f"hf://org/name@{COMMIT}/b.gguf"
    found = as_a_worker(gp.open_checkpoint("hf://org/name/b.gguf"))
    expected = as_a_worker(gp.open_checkpoint(directory / "b.gguf"))
    np.testing.assert_array_equal(found[1].neurons["query_norm"], expected[1].neurons["query_norm"])


# -- what goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "said"), [
    ({"backend": "cloud"}, "backend is 'cloud'"),
    ({"backend": "processes", "workers": 0}, "workers is 0"),
    ({"workers": 2}, "2 workers for the serial backend"),
    ({"backend": "threads", "address": "tcp://127.0.0.1:1"}, "an address for the backend threads"),
    ({"backend": "dask"}, "needs the address of a scheduler"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(llama, options, said):
    with pytest.raises(BadOption, match=said):
        gp.probe(llama, **options)
    assert Backend().name == "serial"


@pytest.mark.parametrize(("extra", "module"), [("dask", "distributed"), ("ray", "ray")])
def test_a_library_that_is_absent_is_named_with_its_extra(llama, monkeypatch, extra, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingLibrary, match=rf'pip install "glu-probe\[{extra}\]"'):
        gp.probe(llama, backend=extra, address="tcp://127.0.0.1:1")


def test_a_model_in_memory_stays_in_its_process(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from glu_probe.checkpoint.in_memory import checkpoint_in_memory

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
    ))  # fmt: skip
    checkpoint = checkpoint_in_memory(model)
    for backend in ("processes", "dask", "ray"):
        with pytest.raises(BadOption, match="model in memory"):
            gp.probe(checkpoint, backend=backend, address=None if backend == "processes" else "tcp://127.0.0.1:1")
    with pytest.raises(BadOption, match="parts for a model in memory"):
        gp.probe(checkpoint, parts=tmp_path / "parts")
    here = files_of(gp.probe(checkpoint), tmp_path / "serial")
    assert files_of(gp.probe(checkpoint, backend="threads", workers=2), tmp_path / "threads") == here


def error_classes() -> list[type[GluProbeError]]:
    return [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, GluProbeError)]


@pytest.mark.parametrize("kind", error_classes())
def test_every_error_crosses_processes_whole(kind):
    for error in (kind("what", where="where", hint="hint"), kind("what"), kind("what", where="w").within("layer 3")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert (again.what, again.where, again.hint, str(again)) == (error.what, error.where, error.hint, str(error))
        assert again.exit_code == kind.exit_code


def test_an_error_says_its_layer_once():
    error = UnknownActivation("strange", where="model.safetensors", hint="Look").within("layer 3, mlp")
    assert str(error.within("layer 3, mlp")) == "layer 3, mlp: model.safetensors: strange. Look"


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

    def __reduce__(self):
        raise TypeError("never")


def test_an_error_that_cannot_be_pickled_is_told_in_words():
    with pytest.raises(RuntimeError, match="Unpicklable: a and b"):
        Outcome.failed(Unpicklable("a", "b")).get()


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_an_error_of_a_job_names_its_layer(mischief, backend, monkeypatch):
    model = mischief(workers.raise_own)
    if backend == "threads":
        monkeypatch.setattr(workers, "in_a_job", _reading)
    with pytest.raises(UnknownActivation) as caught:
        gp.probe(model, backend=backend, workers=2)
    error = caught.value
    assert (error.what, error.hint, error.exit_code) == ("the activation is strange", "Look at it", 3)
    assert error.where == "layer 3, mlp: config.json"


def _reading() -> bool:
    return any(frame.function == "measure_site" for frame in inspect.stack())


def test_an_error_that_nobody_expects_keeps_its_traceback_and_names_its_layer(mischief):
    with pytest.raises(ZeroDivisionError, match="one over nothing") as caught:
        gp.probe(mischief(workers.raise_other), backend="processes", workers=2)
    told = str(caught.value.__cause__)
    assert "in raise_other" in told
    assert f"in process {os.getpid()} " not in told
    if sys.version_info >= (3, 11):
        assert "mischief, layer 3" in told


@pytest.mark.slow
def test_a_worker_that_dies_costs_nothing(mischief, tmp_path):
    model = mischief(workers.dying_once_at(tmp_path / "died"))
    report = gp.probe(model, backend="processes", workers=2)
    assert (tmp_path / "died").exists()
    assert files_of(report, tmp_path / "a") == files_of(gp.probe(model), tmp_path / "b")


@pytest.mark.slow
def test_a_job_that_kills_its_workers_is_named_and_the_others_are_kept(mischief, tmp_path):
    model = mischief(workers.die)
    with pytest.raises(WorkersLost, match=r"layer 3, .*died 3 times") as caught:
        gp.probe(model, backend="processes", workers=2, parts=tmp_path / "parts")
    assert "mischief" in caught.value.where
    kept = {path.name[:5] for path in (tmp_path / "parts").glob("*.result")}
    assert "00003" not in kept
    assert kept >= {"00000", "00001"}
    # in this process nobody dies
    assert len(gp.probe(model, parts=tmp_path / "parts").layers) == 6


@pytest.mark.slow
def test_a_worker_killed_from_outside_in_the_middle_of_a_job(tmp_path):
    model = write_llama(tmp_path / "wide", layers=8, d_mlp=1500, d_model=256)
    killed = []

    def progress(sites):
        for number, site in enumerate(sites):
            if number == 2:
                busy = [p for p in psutil.Process().children(recursive=True) if "LokyProcess" in " ".join(p.cmdline())]
                killed.append(busy[0].pid)
                os.kill(busy[0].pid, signal.SIGKILL)
            yield site

    report = gp.probe(model, backend="processes", workers=2, progress=progress)
    assert len(killed) == 1
    assert files_of(report, tmp_path / "a") == files_of(gp.probe(model), tmp_path / "b")


@pytest.mark.parametrize("backend", [{}, {"backend": "threads", "workers": 2}, {"backend": "processes", "workers": 2}])
def test_a_file_that_changes_during_the_run_is_refused(tmp_path, backend):
    model = write_llama(tmp_path / "model", layers=8)

    def progress(sites):
        for number, site in enumerate(sites):
            if number == 1:
                write_llama(tmp_path / "model", layers=8, seed=5)
            yield site

    with pytest.raises(ChangedFiles, match=r"model\.safetensors"):
        gp.probe(model, progress=progress, **backend)


def test_a_file_that_changed_since_it_was_opened_is_refused(tmp_path):
    checkpoint = gp.open_checkpoint(write_llama(tmp_path / "model", layers=2))
    write_llama(tmp_path / "model", layers=2, d_mlp=28)
    for backend in ({}, {"backend": "processes", "workers": 1}):
        with pytest.raises(ChangedFiles):
            gp.probe(checkpoint, **backend)


def test_a_worker_that_finds_something_else_refuses(tmp_path):
    """Other files, or other software, than where the run was begun."""
    model = write_llama(tmp_path / "model", layers=2)
    ticket, threads = Ticket.of(gp.open_checkpoint(model)), torch.get_num_threads()

    def outcome(ticket):
        return run(Job(ticket, 1, Settings(), threads)).get()

    assert outcome(ticket).layer == 1
    facts = json.loads(ticket.facts)
    facts["software"]["torch"] = "1.0"
    with pytest.raises(ChangedFiles, match=r"torch \('1\.0' there, "):
        outcome(replace(ticket, facts=json.dumps(facts)))
    write_llama(tmp_path / "model", layers=2, seed=5)
    os.utime(model / "model.safetensors", ns=(1, 1))
    with pytest.raises(ChangedFiles, match=r"another checkpoint .*model\.safetensors"):
        outcome(ticket)


ENDLESS = """
import sys
import glu_probe as gp

def progress(sites):
    for site in sites:
        print("one", flush=True)
        yield site

if __name__ == "__main__":
    gp.probe(sys.argv[1], backend="processes", workers=2, progress=progress)
"""


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    model = write_llama(tmp_path / "wide", layers=60, d_mlp=1500, d_model=256)
    (tmp_path / "endless.py").write_text(ENDLESS)
    running = subprocess.Popen(
        [sys.executable, str(tmp_path / "endless.py"), str(model)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    with running:
        assert running.stdout.readline() == "one\n"
        running.stdout.readline()
        children = psutil.Process(running.pid).children(recursive=True)
        assert len(children) >= 2
        running.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []


def test_nothing_is_left_running_after_an_error(mischief):
    with pytest.raises(UnknownActivation):
        gp.probe(mischief(workers.raise_own), backend="processes", workers=2)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [p for p in psutil.Process().children(recursive=True) if "LokyProcess" in " ".join(p.cmdline())]
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(left)
