"""Reports that are killed, and disks that are full: real processes, real signals."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from .support import write_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX"),
]
ROOT = Path(__file__).parents[1]
LAYERS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("interruption") / "deep", layers=LAYERS, d_mlp=300, d_model=64)


def start(model, place, *more, **options) -> subprocess.Popen:
    """`glu-probe report` in a process group of its own; it writes to `out` below `place`."""
    place.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "glu_probe", "report", str(model), "-o", "out", *more],
        cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def finish(running) -> tuple[int, str]:
    """Exit code and standard error."""
    said = running.communicate(timeout=300)[1]
    return running.returncode, said


def files_below(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """Every file of a run that was left in peace."""
    place = tmp_path_factory.mktemp("whole")
    assert finish(start(model, place)) == (0, "")
    return files_below(place / "out")


def refuse_half_files(out: Path) -> None:
    """Every file under a final name must be whole."""
    for path in out.rglob("*"):
        if not path.is_file() or path.name.endswith(".part"):
            continue
        body = path.read_bytes()
        if path.suffix == ".result":
            head, _, rest = body.partition(b"\n")
            assert head == hashlib.sha256(rest).hexdigest().encode(), path
        elif path.suffix == ".json":
            json.loads(body)
        elif path.suffix == ".parquet":
            pd.read_parquet(path)
        elif path.suffix == ".csv":
            assert body.endswith(b"\n")
        elif path.suffix == ".png":
            assert body.endswith(b"IEND\xaeB`\x82"), path
        elif path.suffix in (".html", ".svg"):
            assert body.rstrip().endswith(f"</{path.suffix[1:]}>".encode()), path


def wait_for(condition, running) -> None:
    deadline = time.monotonic() + 120
    while not condition() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


@pytest.mark.parametrize("backend", [(), ("--backend", "processes", "--workers", "2")])
def test_a_report_that_is_killed_again_and_again(model, whole, tmp_path, backend):
    rng, out, kills = random.Random(7), tmp_path / "out", 0
    seen = [0]

    def parts() -> int:
        return len(list((out / "parts").glob("*.result")))

    for _ in range(4):
        running = start(model, tmp_path, *backend)
        target = parts() + rng.randint(1, 6)
        wait_for(lambda target=target: parts() >= target, running)
        time.sleep(rng.uniform(0, 0.05))
        running.kill()
        finish(running)
        kills += running.returncode == -signal.SIGKILL
        refuse_half_files(out)
        if (out / "parts").exists():
            seen.append(parts())
    assert kills >= 3
    assert seen == sorted(seen)  # nothing that was finished is lost
    assert seen[-1] >= 4
    # and while what was measured is written
    for name in ("parts/neurons.parquet", "layers.csv", "figures/class_bars.png"):
        running = start(model, tmp_path, *backend)
        wait_for((out / name).exists, running)
        time.sleep(rng.uniform(0, 0.02))
        running.kill()
        finish(running)
        refuse_half_files(out)
    assert finish(start(model, tmp_path)) == (0, "")  # on the serial backend: parts are the same everywhere
    found = files_below(out)
    assert {name for name in {**whole, **found} if whole.get(name) != found.get(name)} == set()


def test_ctrl_c_says_what_is_kept(model, whole, tmp_path):
    for backend in (("--backend", "processes", "--workers", "2"), ("--backend", "threads", "--workers", "2"), ()):
        running = start(model, tmp_path, *backend)
        before = len(list((tmp_path / "out/parts").glob("*.result")))
        wait_for(lambda n=before: len(list((tmp_path / "out/parts").glob("*.result"))) >= n + 2, running)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does it: to the workers too
        code, said = finish(running)
        assert code == 130, said
        kept = len(list((tmp_path / "out/parts").glob("*.result")))
        assert said == f"interrupted: {kept} finished in out/parts: the same command goes on from there\n"
        assert kept > before
    assert finish(start(model, tmp_path)) == (0, "")
    assert files_below(tmp_path / "out") == whole


def limited(size: int):
    """Files may not become larger than so many bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_files_that_cannot_grow(model, whole, tmp_path):
    """As on a disk that is full: what was finished stays, and the same command goes on when there is room."""
    code, said = finish(start(model, tmp_path, preexec_fn=limited(20_000)))
    assert code == 2
    assert "error: CannotWrite" in said
    assert not list((tmp_path / "out").rglob("*.result"))
    code, said = finish(start(model, tmp_path, preexec_fn=limited(200_000)))
    assert code == 2
    assert "error: CannotWrite" in said
    assert f"note: {LAYERS} finished are kept in out/parts" in said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"parts"}
    assert not list((tmp_path / "out").rglob("*.part"))
    assert finish(start(model, tmp_path)) == (0, "")
    assert files_below(tmp_path / "out") == whole


def test_a_full_disk(model, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no small file system can be mounted here")
    try:
        code, said = finish(start(model, disk))
        assert code == 2
        assert "error: CannotWrite" in said
        assert "No space left" in said
        refuse_half_files(disk / "out")
        kept = list((disk / "out/parts").glob("*.result"))
        assert f"note: {len(kept)} finished are kept in out/parts" in said
        assert 0 < len(kept) < LAYERS
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert finish(start(model, disk)) == (0, "")
        assert not (disk / "out/parts").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
