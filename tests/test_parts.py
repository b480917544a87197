"""Runs that stop and go on: the directory of parts, and what a report makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import glu_probe as gp
from glu_probe import frames, measuring, probing
from glu_probe.errors import AlreadyRunning, BadOption, CannotWrite, NonFinite, NoReport
from glu_probe.identity import identity
from glu_probe.neuron_file import NeuronFile
from glu_probe.parts import Parts, kept_parts, remove_parts
from glu_probe.results import decode, encode

from .support import LAYERS, llama_config, llama_tensors, write_checkpoint, write_llama
from .test_execute import files_of, write_odd


def stopping_after(count: int):
    def progress(sites):
        for number, site in enumerate(sites):
            if number == count:
                raise KeyboardInterrupt
            yield site

    return progress


@pytest.fixture
def measured(monkeypatch):
    """The layers that were measured, in order."""
    seen = []

    def spy(checkpoint, site, files, measure):
        seen.append(site.layer)
        return real(checkpoint, site, files, measure)

    from glu_probe import execute

    real = execute.measured
    monkeypatch.setattr(execute, "measured", spy)
    return seen


# -- the directory -----------------------------------------------------------------------------------


def test_what_is_kept_comes_back_until_it_is_damaged(tmp_path):
    with Parts(tmp_path, {"a": 1}) as parts:
        assert parts.get("layer 3") is None
        parts.keep("layer 3", b"\n\0bytes")
        assert parts.get("layer 3") == b"\n\0bytes"
        assert parts.get("layer 4") is None
    (path,) = tmp_path.glob("*.result")
    whole = path.read_bytes()
    with Parts(tmp_path, {"a": 1}) as parts:
        for damaged in (whole[:-1], whole[:10], b"", whole[:-1] + b"x", whole + b"x"):
            path.write_bytes(damaged)
            assert parts.get("layer 3") is None
        path.write_bytes(whole)
        assert parts.get("layer 3") == b"\n\0bytes"
    assert kept_parts(tmp_path) == 1
    remove_parts(tmp_path)
    assert not tmp_path.exists()


def test_names_that_differ_are_files_that_differ(tmp_path):
    with Parts(tmp_path, {}) as parts:
        names = ["0,4", "0 4", "0-4", "audio.tower layer 1 expert shared.0", "0.4"]
        for name in names:
            parts.keep(name, name.encode())
        assert [parts.get(name).decode() for name in names] == names


def test_a_second_run_is_refused_and_told_who_is_there(tmp_path):
    with Parts(tmp_path, {}):
        code = (
            "import sys; from glu_probe.parts import Parts\n"
            "try: Parts(sys.argv[1], {})\nexcept Exception as error: print(type(error).__name__, error)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
        )  # fmt: skip
        assert done.stdout.startswith("AlreadyRunning")
        assert f"process {os.getpid()} on" in done.stdout
    with Parts(tmp_path, {}):
        pass


def test_what_a_killed_writer_left_is_removed(tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = tmp_path / f".layer 3.result.{int(dead.stdout)}.part"
    left.write_text("half")
    alive, other = tmp_path / f".layer 4.result.{os.getppid()}.part", tmp_path / ".notes.1.part"
    alive.write_text("half")
    other.write_text("mine")
    with pytest.raises(BadOption, match="other files here"):
        Parts(tmp_path, {})
    assert [path.exists() for path in (left, alive, other)] == [False, True, True]


# -- results as bytes --------------------------------------------------------------------------------


def test_every_bit_of_a_result_survives(tmp_path):
    checkpoint = gp.open_checkpoint(write_odd(tmp_path / "odd"))
    for site in checkpoint.sites:
        result = measuring.measure_site(checkpoint, site, measuring.Settings())
        again = decode(encode(result))
        for kind in ("neurons", "flags", "nulls"):
            before, after = getattr(result, kind), getattr(again, kind)
            assert list(before) == list(after)
            for name, values in before.items():
                assert (after[name].dtype, after[name].tobytes()) == (values.dtype, values.tobytes())
        assert list(again.scalars) == list(result.scalars)
        np.testing.assert_array_equal(list(again.scalars.values()), list(result.scalars.values()))
        facts = ("tower", "layer", "expert", "group", "d_model", "d_mlp", "activation", "methods", "note", "samples")
        assert [getattr(again, name) for name in (*facts, "oddities")] == [
            getattr(result, name) for name in (*facts, "oddities")
        ]
        pd.testing.assert_frame_equal(
            frames.neuron_frame("m", again), frames.neuron_frame("m", result), check_exact=True
        )


# -- reports -----------------------------------------------------------------------------------------


def test_an_interrupted_report_goes_on_and_redoes_nothing(tmp_path, measured):
    model = write_odd(tmp_path / "odd")
    whole = files_of(gp.probe(model), tmp_path / "whole")
    del measured[:]
    for count in (1, 0, 3):
        with pytest.raises(KeyboardInterrupt):
            gp.probe(model, parts=tmp_path / "parts", progress=stopping_after(count))
    assert measured == [0, 2, 2, 2]
    report = gp.probe(model, parts=tmp_path / "parts", progress=iter)
    assert measured == [0, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert files_of(report, tmp_path / "again") == whole


def test_a_damaged_part_is_made_again(llama, tmp_path, measured):
    whole = files_of(gp.probe(llama, parts=tmp_path / "parts"), tmp_path / "whole")
    del measured[:]
    parts = sorted((tmp_path / "parts").glob("*.result"))
    parts[5].write_bytes(parts[5].read_bytes()[:-100])
    parts[7].unlink()
    body = bytearray(parts[9].read_bytes())
    body[len(body) // 2] ^= 1
    parts[9].write_bytes(body)
    assert files_of(gp.probe(llama, parts=tmp_path / "parts"), tmp_path / "again") == whole
    assert measured == [5, 7, 9]


def test_parts_serve_a_run_over_other_layers(llama, tmp_path, measured):
    gp.probe(llama, layers="2:4", parts=tmp_path / "parts")
    some = gp.probe(llama, layers=[1, 2], parts=tmp_path / "parts")
    assert measured == [2, 3, 1]
    assert some.layers["layer"].tolist() == [1, 2]
    assert some.neurons["layer"].unique().tolist() == [1, 2]


@pytest.mark.parametrize(("changes", "said"), [
    ({"seed": 3}, "seed was 0 and is 3"),
    ({"samples": 4}, "samples was None and is 4"),
    ({"exact": True}, "exact was False and is True"),
    ({"fold_norm": False}, "model options fold_norm was True and is False"),
    ({"activation": "relu"}, "model options activation was None and is 'relu'"),
])  # fmt: skip
def test_parts_of_another_run_are_refused_and_left_alone(llama, tmp_path, changes, said):
    gp.probe(llama, layers=[0], parts=tmp_path / "parts")
    before = {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()}
    with pytest.raises(BadOption, match=f"parts of another run: .*{said}.*--fresh"):
        gp.probe(llama, layers=[0], parts=tmp_path / "parts", **changes)
    assert {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()} == before


def test_parts_of_other_files_are_refused(tmp_path, monkeypatch):
    model = write_llama(tmp_path / "llama", layers=2)
    gp.probe(model, parts=tmp_path / "parts")
    os.utime(model / "model.safetensors", ns=(1, 1))  # the same size, written at another time
    with pytest.raises(BadOption, match=r"parts of another run: .*files model\.safetensors"):
        gp.probe(model, parts=tmp_path / "parts")
    model = write_llama(tmp_path / "other", layers=2)
    gp.probe(model, parts=tmp_path / "more")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 3}))
    with pytest.raises(BadOption, match="model config differs"):
        gp.probe(model, parts=tmp_path / "more")
    real = probing.running_software()
    monkeypatch.setattr(probing, "running_software", lambda: real | {"torch": "1.0"})
    with pytest.raises(BadOption, match="software torch was"):
        gp.probe(write_llama(tmp_path / "third", layers=2), parts=tmp_path / "more")


def test_files_of_a_server_are_known_by_what_it_says_of_them():
    def known_as(etag, commit=None):
        facts = {"model": "m", "ref": "https://host/m.safetensors", "url": "https://host/m.safetensors", "towers": {}}
        facts["files"] = [{"name": "m.safetensors", "bytes": 4, "etag": etag}]
        if commit:
            facts |= {"repository": "org/m", "commit": commit}
        return identity(SimpleNamespace(provenance=lambda: facts, sites=[], config={}))

    assert known_as("a") == known_as("a")
    assert known_as("a") != known_as("b")
    assert known_as("a", "c1") == known_as("b", "c1") != known_as("a", "c2")


def test_another_spelling_of_the_same_model_goes_on(llama, tmp_path, monkeypatch, measured):
    gp.probe(llama, layers=[0, 1], parts=tmp_path / "parts")
    monkeypatch.chdir(llama.parent)
    gp.probe("./llama", layers=[0, 1], parts=tmp_path / "parts")
    assert measured == [0, 1]


def test_strict_holds_for_kept_parts_too(tmp_path):
    model = write_odd(tmp_path / "odd")
    gp.probe(model, parts=tmp_path / "parts")
    with pytest.raises(NonFinite, match="layer 4"):
        gp.probe(model, parts=tmp_path / "parts", strict=True)


# -- the neuron frame in its file --------------------------------------------------------------------


def test_neurons_are_a_row_group_a_layer_however_they_are_saved(llama, tmp_path):
    memory, kept = gp.probe(llama), gp.probe(llama, parts=tmp_path / "parts")
    memory.save(tmp_path / "a", figures=False)
    kept.save(tmp_path / "b", figures=False)
    for place in ("a", "b"):
        file = pq.ParquetFile(tmp_path / place / "neurons.parquet")
        assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [24] * LAYERS
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / place / "neurons.parquet"), memory.neurons)


def test_neurons_stay_in_their_file_until_they_are_used(llama, tmp_path, monkeypatch):
    report, real = gp.probe(llama, parts=tmp_path / "parts"), NeuronFile.read

    def some(self, columns=None):
        assert columns is not None, "the whole frame was read"
        return real(self, columns)

    with monkeypatch.context() as patch:
        patch.setattr(NeuronFile, "read", some)
        assert "288 neurons" in repr(report)
        assert report.findings
        report.save(tmp_path / "out")
        remove_parts(tmp_path / "parts")  # where they are now is where they were saved
        assert gp.load_report(tmp_path / "out").findings == report.findings
    assert len(report.neurons) == 288
    assert report.neurons is report.neurons
    changed = gp.load_report(tmp_path / "out")
    gp.probe(llama, seed=1).save(tmp_path / "out", figures=False)
    with pytest.raises(NoReport, match="written anew"):
        changed.neurons  # noqa: B018


def test_a_loaded_report_can_be_saved_where_it_lies_and_elsewhere(llama, tmp_path):
    gp.probe(llama).save(tmp_path / "a", figures=False)
    loaded = gp.load_report(tmp_path / "a")
    before = (tmp_path / "a/neurons.parquet").read_bytes()
    loaded.save(tmp_path / "a", figures=False)
    loaded.save(tmp_path / "b", figures=False)
    assert (tmp_path / "a/neurons.parquet").read_bytes() == (tmp_path / "b/neurons.parquet").read_bytes() == before
    loaded.neurons["query_norm"] = 0.0
    loaded.save(tmp_path / "a", figures=False)
    assert gp.load_report(tmp_path / "a").neurons["query_norm"].eq(0).all()


def test_one_layer_of_neurons_is_in_memory_at_a_time(tmp_path, monkeypatch):
    """Joining is where neurons of several MLPs come together: never those of more than a layer."""
    model, largest = write_llama(tmp_path / "deep", layers=9), []
    real = frames.join

    def spy(some):
        largest.append(sum(map(len, some)))
        return real(some)

    monkeypatch.setattr("glu_probe.assembly.join", spy)
    report = gp.probe(model, parts=tmp_path / "parts")
    neurons = [count for count in largest if count != len(report.classes)]
    assert neurons == [24] * 9


# -- the command line --------------------------------------------------------------------------------


def test_an_interrupted_command_says_what_is_kept_and_goes_on(run, llama, tmp_path, monkeypatch, measured):
    from glu_probe.cli import reports

    monkeypatch.setattr(reports, "progress", lambda *_, **__: stopping_after(5))
    code, _, said = run("report", llama, "-o", tmp_path / "out", "--no-figures")
    assert code == 130
    assert f"interrupted: 5 finished in {tmp_path / 'out' / 'parts'}: the same command goes on from there" in said
    monkeypatch.undo()
    assert run("report", llama, "-o", tmp_path / "out", "--no-figures", "--seed", 1)[0] == 2
    assert kept_parts(tmp_path / "out/parts") == 5
    code, _, said = run("report", llama, "-o", tmp_path / "out", "--no-figures", "--seed", 1, "--fresh")
    assert (code, said) == (0, "")
    assert json.loads((tmp_path / "out/provenance.json").read_text())["seed"] == 1
    assert not (tmp_path / "out/parts").exists()


def test_nothing_finished_leaves_nothing_behind(run, llama, tmp_path, monkeypatch):
    from glu_probe.cli import reports

    monkeypatch.setattr(reports, "progress", lambda *_, **__: stopping_after(0))
    assert run("report", llama, "-o", tmp_path / "out") == (130, "", "interrupted: nothing was finished\n")
    assert not (tmp_path / "out").exists()


def test_two_commands_in_one_directory(run, llama, tmp_path):
    with Parts(tmp_path / "out/parts", {"another": "run"}):
        pass
    code = f"""
import sys, time
from pathlib import Path
from glu_probe.parts import exclusive
with exclusive(Path({str(tmp_path / "out/parts")!r})):
    print("in", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout.readline() == "in\n"
        code, _, said = run("report", llama, "-o", tmp_path / "out", "--fresh")
        assert code == 2
        assert f"AlreadyRunning: {tmp_path / 'out/parts'}: another run is writing here (process {other.pid} on" in said
        assert (tmp_path / "out/parts/run.json").exists()
        other.stdin.close()
    assert run("report", llama, "-o", tmp_path / "out", "--fresh", "--no-figures")[0] == 0


def test_backends_on_the_command_line(run, llama, tmp_path):
    assert run("report", llama, "-o", tmp_path / "a", "--no-figures", "--backend", "threads", "--workers", 2)[0] == 0
    assert run("report", llama, "-o", tmp_path / "b", "--no-figures")[0] == 0
    for name in ("neurons.parquet", "layers.parquet", "classes.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    code, _, said = run("report", llama, "-o", tmp_path / "c", "--workers", 2)
    assert (code, "serial backend" in said) == (2, True)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("place", ["file", "parts"])
def test_a_file_in_the_way(run, llama, tmp_path, place):
    target = tmp_path / "out" if place == "file" else tmp_path / "out/parts"
    target.parent.mkdir(exist_ok=True)
    target.write_text("mine")
    code, _, said = run("report", llama, "-o", tmp_path / "out")
    assert (code, "CannotWrite" in said) == (2, True)
    assert target.read_text() == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="a file system that refuses even root")
def test_a_directory_that_may_not_be_written(run, llama):
    code, _, said = run("report", llama, "-o", "/sys/glu-probe")
    assert (code, "CannotWrite: /sys/glu-probe" in said) == (2, True)
    with pytest.raises(CannotWrite):
        gp.probe(llama, parts="/sys/glu-probe")


def test_two_threads_of_one_process_do_not_share_parts(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with Parts(tmp_path / "parts", {}), ThreadPoolExecutor(1) as pool:
        with pytest.raises(AlreadyRunning):
            pool.submit(Parts, tmp_path / "parts", {}).result()


def test_checkpoint_of_one_file_without_config(tmp_path):
    write_checkpoint(tmp_path / "m", llama_tensors(layers=2), llama_config(num_hidden_layers=2))
    path = tmp_path / "m/model.safetensors"
    whole = files_of(gp.probe(path), tmp_path / "a")
    assert files_of(gp.probe(path, parts=tmp_path / "parts"), tmp_path / "b") == whole
