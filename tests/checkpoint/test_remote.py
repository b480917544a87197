"""Reading tensors of a hub by byte ranges: which bytes move, and what becomes of every way an answer can fail."""

from __future__ import annotations

import hashlib
import json
import math
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import glu_probe as gp
from glu_probe.checkpoint import known_families, remote, remote_tensors, retries
from glu_probe.checkpoint.hub import HubFiles
from glu_probe.errors import FileChanged, HubUnavailable, NeedsDownload

from ..support import llama_tensors, write_checkpoint, write_llama
from .packing import assert_factors, packed_model
from .servers import COMMIT, Fault
from .test_quantized import FP8, fp8
from .writers import gguf_tensors, write_gguf

TOKEN = "hf_thisIsTheSecretOfTheseTests"
WIDE = {"d_mlp": 512, "d_model": 256, "layers": 3}  # 0.5 MB a matrix
MODEL = "model.safetensors"
WHERE = f"org/name@{COMMIT}/{MODEL}"


@pytest.fixture
def wide(hub, tmp_path):
    """A model on the hub; gives the directory it was made in."""
    directory = write_llama(tmp_path / "local", **WIDE)
    hub.add("org/name", directory)
    return directory


def top_heavy(directory: Path) -> Path:
    """A sharded model whose MLPs are a tenth of it; attention and embeddings are the rest."""
    tensors = llama_tensors(**WIDE)
    tensors["model.embed_tokens.weight"] = torch.zeros(8192, 256)
    for layer in range(3):
        for part in ("q_proj", "k_proj", "v_proj"):
            tensors[f"model.layers.{layer}.self_attn.{part}.weight"] = torch.zeros(3072, 256)
    write_checkpoint(directory, tensors, json.loads((write_llama(directory, **WIDE) / "config.json").read_text()))
    tensors = load_file(directory / MODEL)
    (directory / MODEL).unlink()
    parts = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for part in set(parts.values()):
        save_file({name: tensors[name] for name in tensors if parts[name] == part}, directory / part)
    (directory / f"{MODEL}.index.json").write_text(json.dumps({"weight_map": parts}))
    return directory


def kept_files(tmp_path: Path) -> set[str]:
    """Names of the repository's files that lie in the library's cache."""
    return {path.name for path in (tmp_path / "hf").rglob("*") if path.is_symlink()}


def assert_same(ref: str, directory: Path, **options: object) -> None:
    """Assert that a remote model has bit for bit the factors of a local one."""
    ours, theirs = gp.open_checkpoint(ref, **options), gp.open_checkpoint(directory, **options)
    for a, b in zip(ours.layers(), theirs.layers(), strict=True):
        assert torch.equal(a.query, b.query)
        assert torch.equal(a.key, b.key)
        assert torch.equal(a.value, b.value)


# -- what moves ---------------------------------------------------------------------------------


def test_a_report_moves_the_bytes_it_needs_and_no_others(hub, tmp_path):
    directory = top_heavy(tmp_path / "local")
    hub.add("org/name", directory)
    opened = gp.open_checkpoint("org/name")
    needed = int(opened.describe()["bytes"].sum())
    whole = sum(path.stat().st_size for path in directory.glob("part-*"))
    assert needed < 0.15 * whole
    heads = hub.sent_of("part-0.safetensors") + hub.sent_of("part-1.safetensors")
    assert heads == 200_000
    hub.forget()
    remote_report = gp.probe(opened, samples=2)
    moved = hub.sent_of("part-0.safetensors") + hub.sent_of("part-1.safetensors")
    assert needed <= moved <= 1.01 * needed
    local = gp.probe(directory, samples=2)
    for frame in ("layers", "neurons", "classes"):
        found, expected = getattr(remote_report, frame), getattr(local, frame)
        pd.testing.assert_frame_equal(found.drop(columns="model"), expected.drop(columns="model"), check_exact=True)
    assert kept_files(tmp_path) == {"config.json", f"{MODEL}.index.json"}
    assert sum(path.stat().st_size for path in (tmp_path / "hf").rglob("*") if path.is_file()) < 50_000


def test_every_connection_is_used_again(hub, wide):
    hub.connections = 0
    gp.probe("org/name", samples=2)
    assert len(hub.requests) > 10
    assert hub.connections <= 2  # one to the hub, one to where it keeps large files


def test_the_hub_is_asked_once_for_where_a_file_is(hub, wide):
    assert_same("org/name", wide)
    assert sum(f"/resolve/{COMMIT}/{MODEL}" in path for _, path, _, _ in hub.requests) == 1


def test_an_address_that_expired_is_asked_for_again(hub, wide, waits):
    hub.signed = 3
    assert_same("org/name", wide)
    asked = sum(f"/resolve/{COMMIT}/{MODEL}" in path for _, path, _, _ in hub.requests)
    assert asked == math.ceil((1 + 3 * 4) / 3)  # the header, and three matrices and a norm of each of three layers
    assert set(waits) <= {0.0}


def test_rows_are_fetched_alone(hub, wide):
    source, local = gp.open_checkpoint("org/name").source, gp.open_checkpoint(wide).source
    for name, rows, count in (
        ("model.layers.1.mlp.up_proj.weight", slice(100, 300), 200 * 256 * 4),
        ("model.layers.1.mlp.up_proj.weight", slice(510, None), 2 * 256 * 4),
        ("model.layers.1.mlp.up_proj.weight", slice(7, 7), 0),
        ("model.layers.1.post_attention_layernorm.weight", slice(3, 5), 256 * 4),  # small ones whole, and once
        ("model.layers.1.post_attention_layernorm.weight", slice(5, 9), 0),
    ):
        hub.forget()
        assert torch.equal(source.read(name, rows), local.read(name, rows))
        assert hub.sent_of(MODEL) == count


def test_small_tensors_are_not_kept_without_end(hub, wide, monkeypatch):
    monkeypatch.setattr(remote_tensors, "_KEPT", 2 * 1024)
    source = gp.open_checkpoint("org/name").source
    norms = [f"model.layers.{layer}.post_attention_layernorm.weight" for layer in range(3)]
    for name in (*norms, *norms):
        source.read(name)
    hub.forget()
    source.read(norms[2])
    assert hub.sent_of(MODEL) == 0
    source.read(norms[0])
    assert hub.sent_of(MODEL) == 1024


def test_a_large_tensor_comes_in_pieces(hub, wide, monkeypatch):
    monkeypatch.setattr(remote, "_PIECE", 100_000)
    checkpoint = gp.open_checkpoint("org/name")
    hub.forget()
    read = checkpoint.source.read("model.layers.0.mlp.gate_proj.weight")
    assert torch.equal(read, gp.open_checkpoint(wide).source.read("model.layers.0.mlp.gate_proj.weight"))
    assert hub.asked_of(MODEL) == 6
    assert hub.sent_of(MODEL) == read.nbytes


def test_what_arrives_goes_straight_where_it_belongs(hub, tmp_path):
    directory = write_checkpoint(tmp_path / "local", {"model.embed_tokens.weight": torch.ones(40_000, 256)}, None)
    hub.add("org/name", directory)
    source = HubFiles("org/name", None).safetensors(MODEL)
    hub.faults = [Fault(pieces=1 << 20)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    read = source.read("model.embed_tokens.weight")  # torch's own memory is not traced
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert bool((read == 1).all())
    assert read.nbytes > 40_000_000
    served = (directory / MODEL).stat().st_size + remote._PIECE  # what the server, in this process, holds
    assert served < peak < served + 4_000_000


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("phi3", {"order": "interleaved"}),
        ("jais", {}),
        ("conv1d", {"storage": "conv1d"}),
        ("mixtral", {"storage": "stacked"}),
        ("gpt_oss", {}),
    ],
)
def test_rows_that_two_factors_share_are_fetched_once(hub, tmp_path, monkeypatch, family, options):
    layout = {"fused_layout": options["order"]} if "order" in options else {}
    directory = tmp_path / "local"
    if family == "conv1d":  # none in the table has gate and up in one matrix that is [in, out]
        for table in ("_REGISTERED", "_BY_NAME", "_BY_ARCHITECTURE"):
            monkeypatch.setattr(known_families, table, dict(getattr(known_families, table)))
        names = {"projections": ("gate_up_proj", "down_proj"), "order": "gate-first", "stored": "columns"}
        gp.register_family("conv1d", **names, act="silu", norm="post_attention_layernorm")
        layout = {"family": "conv1d"}
    gp.testing.write_tiny_checkpoint("phi3" if family == "conv1d" else family, directory, **options)
    hub.add("org/name", directory)
    monkeypatch.setattr(remote_tensors, "_SMALL", 64)  # tiny as they are, the matrices shall not count as small
    monkeypatch.setattr("glu_probe.checkpoint.memory._CHUNK", 128)  # and be read in several ranges
    checkpoint = gp.open_checkpoint("org/name", **layout)
    hub.forget()
    used = {name for site in checkpoint.sites for name in site.tensors.values()}
    list(checkpoint.layers())
    matrices = sum(checkpoint.source.infos()[name].nbytes for name in used if "bias" not in name)
    assert hub.sent_of(MODEL) < 1.25 * matrices  # the rest are norms and biases, which are no small part here
    assert_same("org/name", directory, **layout)


def test_packed_weights_and_their_scales_move_once(hub, tmp_path):
    sizes = {"d_model": 512, "d_mlp": 1024}
    model, expected = packed_model(tmp_path / "local", fp8(128, 128), FP8, **sizes)
    hub.add("org/name", model)
    checkpoint = gp.open_checkpoint("org/name", fold_norm=False)
    hub.forget()
    checkpoint.layer(0)
    needed = int(checkpoint.describe()["bytes"][0])
    assert needed <= hub.sent_of(MODEL) <= 1.01 * needed
    assert_factors("org/name", expected, **sizes)


def test_gguf_moves_its_mlps_alone(hub, tmp_path):
    (directory := tmp_path / "local").mkdir()
    write_gguf(directory / "m.gguf", gguf_tensors(**WIDE), "Q8_0", **WIDE)
    hub.add("org/name", directory)
    checkpoint = gp.open_checkpoint("org/name")
    hub.forget()
    layers = list(checkpoint.layers())
    needed = int(checkpoint.describe()["bytes"].sum())
    assert needed <= hub.sent_of("m.gguf") <= 1.01 * needed
    for ours, theirs in zip(layers, gp.open_checkpoint(directory / "m.gguf").layers(), strict=True):
        assert torch.equal(ours.key, theirs.key)


def test_what_another_library_downloads_meanwhile_is_read_from_there(hub, wide):
    from huggingface_hub import hf_hub_download

    checkpoint = gp.open_checkpoint("org/name")
    checkpoint.layer(0)
    hf_hub_download("org/name", MODEL)
    hub.forget()
    assert torch.equal(checkpoint.layer(1).key, gp.open_checkpoint(wide).layer(1).key)
    assert hub.requests == []


def test_shards_are_opened_together_and_read_by_many_threads(hub, tmp_path):
    directory = top_heavy(tmp_path / "local")
    hub.add("org/name", directory)
    source, local = gp.open_checkpoint("org/name").source, gp.open_checkpoint(directory).source
    jobs = [(name, slice(at, at + 64)) for name in local.infos() if ".mlp." in name for at in range(0, 512, 64)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda job: source.read(*job), jobs))
    assert all(torch.equal(read, local.read(*job)) for read, job in zip(found, jobs, strict=True))


def test_provenance_says_where_and_which(hub, wide, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    facts = gp.open_checkpoint("org/name").provenance()
    (file,) = facts["files"]
    assert file == {
        "name": MODEL,
        "url": f"{hub.url}/org/name/resolve/{COMMIT}/{MODEL}",
        "bytes": (wide / MODEL).stat().st_size,
        "sha256": hashlib.sha256((wide / MODEL).read_bytes()).hexdigest(),
    }
    assert TOKEN not in json.dumps(facts)


# -- failures that pass -------------------------------------------------------------------------

PASSING = {
    "dropped at once": Fault(drop=0),
    "dropped in the middle": Fault(drop=200_001),
    "busy": Fault(status=503),
    "too many requests": Fault(status=429, headers={"Retry-After": "0"}),
    "broken inside": Fault(status=500),
    "stalled": Fault(stall=0.6),
    "slow": Fault(pieces=20_000),
}


@pytest.mark.parametrize("kind", PASSING)
def test_a_failure_that_passes_changes_nothing(hub, wide, monkeypatch, kind):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    source = gp.open_checkpoint("org/name").source
    hub.forget()
    hub.faults = [PASSING[kind]]
    name = "model.layers.0.mlp.gate_proj.weight"
    read = source.read(name)
    assert not hub.faults
    assert torch.equal(read, gp.open_checkpoint(wide).source.read(name))
    # what had arrived is not fetched again
    assert hub.sent_of(MODEL) - (kind == "stalled") * read.nbytes <= read.nbytes + 2


@pytest.mark.parametrize("fault", [Fault(drop=50), Fault(status=503), Fault(status=429)])
def test_a_failure_of_the_first_look_passes_too(hub, wide, fault):
    hub.faults = [fault]
    hub.busy = 2
    assert len(gp.open_checkpoint("org/name").describe()) == 3
    assert not hub.faults


def test_waits_grow_and_differ(hub, wide, waits, monkeypatch):
    source = gp.open_checkpoint("org/name").source
    hub.faults = [Fault(status=500)] * 5
    source.read("model.layers.0.mlp.gate_proj.weight")
    assert len(waits) == 5
    for number, wait in enumerate(waits):
        assert 0.25 * 2**number <= wait <= 0.5 * 2**number
    assert len({wait / 2**number for number, wait in enumerate(waits)}) == 5


@pytest.mark.parametrize(
    ("headers", "low", "high"),
    [
        ({"Retry-After": "7"}, 7, 7.7),
        ({"Retry-After": "Fri, 01 Jan 2100 00:00:00 GMT"}, None, None),
        ({"RateLimit": '"api";r=0;t=55'}, 55, 60.5),
        ({"RateLimit": '"api";r=12;t=55'}, 0.25, 0.5),
        ({"Retry-After": "soon"}, 0.25, 0.5),
    ],
)
def test_a_server_is_left_alone_for_as_long_as_it_asks(hub, wide, waits, headers, low, high):
    source = gp.open_checkpoint("org/name").source
    hub.forget()
    hub.faults = [Fault(status=429, headers=headers)]
    if low is None:  # for longer than anyone would wait
        with pytest.raises(HubUnavailable, match=r"failed 1 time \(status 429\).*it asks to wait for [\d,]+ s"):
            source.read("model.layers.0.mlp.gate_proj.weight")
        assert waits == []
        assert hub.asked_of(MODEL) == 1
        return
    source.read("model.layers.0.mlp.gate_proj.weight")
    (wait,) = waits
    assert low <= wait <= high


def test_a_failure_that_stays_is_told_with_file_tensor_bytes_and_what_arrived(hub, wide, waits):
    source = gp.open_checkpoint("org/name").source
    info = source.infos()["model.layers.0.mlp.gate_proj.weight"]
    hub.forget()
    hub.faults = [Fault(drop=10_000)] * 100
    with pytest.raises(HubUnavailable) as caught:
        source.read(info.name)
    said = str(caught.value)
    assert said.startswith(f"{WHERE}: the hub failed 6 times (")
    start = re.search(r"at bytes ([\d,]+) to ([\d,]+), which are tensor '(.*)': 60,000 of 524,288 arrived", said)
    assert start[3] == info.name
    header = 8 + int.from_bytes((wide / MODEL).read_bytes()[:8], "little")
    first, last = (int(number.replace(",", "")) - header for number in start.group(1, 2))
    assert (wide / MODEL).read_bytes()[header + first : header + last] == gp.open_checkpoint(wide).source.read(
        info.name
    ).numpy().tobytes()
    assert "--download" in caught.value.hint
    assert sum("/cdn/" in path for _, path, _, _ in hub.requests) == retries.TRIES
    assert len(waits) == retries.TRIES - 1


def test_a_busy_hub_is_given_up_after_a_while(hub, wide):
    hub.busy = 100
    with pytest.raises(HubUnavailable, match="the hub answered with 503"):
        gp.open_checkpoint("org/name")
    assert hub.busy == 97


# -- answers that are not believed --------------------------------------------------------------


def declare(**changes: object):
    """A fault that changes headers of the answer; None takes one away."""

    def declared(headers: dict) -> dict:
        headers = dict(headers)
        for name, change in changes.items():
            name = name.replace("_", "-")
            headers[name] = change(headers.get(name)) if callable(change) else change
        return {name: value for name, value in headers.items() if value is not None}

    return Fault(declared=declared)


def shifted(said: str) -> str:
    first, last, size = map(int, re.findall(r"\d+", said))
    return f"bytes {first + 8}-{last + 8}/{size}"


WRONG = {
    "other bytes": (declare(Content_Range=shifted), HubUnavailable, "sent bytes .* when asked for"),
    "more bytes": (
        declare(Content_Range=lambda said: re.sub(r"-(\d+)", lambda m: f"-{int(m[1]) + 1}", said)),
        HubUnavailable,
        "sent bytes .* when asked for",
    ),
    "no bytes named": (declare(Content_Range=None), HubUnavailable, "does not say which bytes of how many"),
    "size unknown": (declare(Content_Range=lambda said: said.partition("/")[0] + "/*"), HubUnavailable, "does not say"),
    "another size": (
        declare(Content_Range=lambda said: said + "0"),
        FileChanged,
        r"changed while it was read: it had 4,\d{3},\d{3} bytes and has 4\d,\d{3},\d{3}",
    ),
    "wrong length": (
        declare(Content_Length=lambda said: str(int(said) - 4)),
        HubUnavailable,
        "sent .* bytes and called",
    ),
    "compressed": (declare(Content_Encoding="gzip"), HubUnavailable, "sends the file compressed"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_answer_that_contradicts_itself_is_refused_at_once(hub, wide, waits, kind):
    fault, error, said = WRONG[kind]
    source = gp.open_checkpoint("org/name").source
    hub.forget()
    hub.faults = [fault]
    with pytest.raises(error, match=said) as caught:
        source.read("model.layers.0.mlp.gate_proj.weight")
    assert str(caught.value).startswith(f"{WHERE}: ")
    assert caught.value.hint
    assert waits == []
    assert hub.asked_of(MODEL) == 1


def test_an_answer_without_a_length_is_counted(hub, wide):
    """Its end is the connection's end; more than what the header named is refused, less is asked for again."""
    source, local = gp.open_checkpoint("org/name").source, gp.open_checkpoint(wide).source
    name = "model.layers.0.mlp.gate_proj.weight"
    unsized = declare(Content_Length=None, Connection="close").declared
    hub.faults = [Fault(declared=unsized, surplus=b"more")]
    with pytest.raises(HubUnavailable, match="sent more than the 524,288 bytes from"):
        source.read(name)
    hub.faults = [Fault(declared=unsized, drop=1000)]
    assert torch.equal(source.read(name), local.read(name))


def test_a_file_that_was_cut_meanwhile(hub, wide):
    source = gp.open_checkpoint("org/name").source
    (wide / MODEL).write_bytes((wide / MODEL).read_bytes()[:200_000])
    with pytest.raises(FileChanged, match=rf"^{WHERE}: the file on the hub changed while it was read"):
        source.read("model.layers.2.mlp.up_proj.weight")


def test_a_file_that_the_hub_calls_another_meanwhile(hub, wide):
    source = gp.open_checkpoint("org/name").source
    raw = (wide / MODEL).read_bytes()
    (wide / MODEL).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    hub.faults = [Fault(drop=0)]  # so that the hub itself is asked again
    with pytest.raises(FileChanged, match=r"it was '[0-9a-f]{64}' and is '[0-9a-f]{64}'"):
        source.read("model.layers.2.mlp.up_proj.weight")


def test_what_the_place_of_large_files_calls_them_does_not_matter(hub, wide):
    hub.linked_names = False  # the names that the other server gives differ from answer to answer
    assert set(gp.open_checkpoint("org/name").provenance()["files"][0]) == {"name", "url", "bytes"}
    assert_same("org/name", wide)


def test_a_large_file_is_not_taken_whole(hub, tmp_path):
    directory = top_heavy(tmp_path / "local")
    hub.add("org/name", directory)
    hub.ignore_ranges = True
    hub.faults = [Fault(pieces=65536)] * 2
    with pytest.raises(NeedsDownload, match=r"part-0\.safetensors: the hub does not send parts of files") as caught:
        gp.open_checkpoint("org/name")
    assert "0.0304 GB" in str(caught.value)
    assert hub.sent_of("part-0.safetensors") < 10_000_000  # what buffers on the way took
    assert "--download" in caught.value.hint
    assert_same_after_download(directory, tmp_path)


def assert_same_after_download(directory: Path, tmp_path: Path) -> None:
    assert_same("org/name", directory, download=True)
    assert {"part-0.safetensors", "part-1.safetensors"} <= kept_files(tmp_path)


def test_a_server_that_forgets_ranges_later_is_noticed(hub, wide, waits):
    checkpoint = gp.open_checkpoint("org/name")
    hub.ignore_ranges = True
    with pytest.raises(NeedsDownload, match=r"of 0\.00476 GB would have to be fetched whole"):
        checkpoint.layer(0)


def test_a_small_file_is_taken_whole_and_once(hub, tmp_path):
    directory = write_llama(tmp_path / "local")
    hub.add("org/name", directory)
    hub.ignore_ranges = True
    checkpoint = gp.open_checkpoint("org/name")
    assert torch.equal(checkpoint.layer(3).key, gp.open_checkpoint(directory).layer(3).key)
    assert hub.sent_of(MODEL) == (directory / MODEL).stat().st_size


# -- tokens -------------------------------------------------------------------------------------


def test_the_token_stays_with_the_hub(hub, wide, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.signed = 4
    hub.faults = [None, None, Fault(drop=10), None, Fault(status=503)]
    report = gp.probe("org/name", samples=2)
    away = [auth for _, path, _, auth in hub.requests if "/cdn/" in path]
    at_home = [auth for _, path, _, auth in hub.requests if "/resolve/" in path or "/api/models/" in path]
    assert len(away) > 10
    assert set(away) == {None}
    assert len(at_home) > 4
    assert set(at_home) == {f"Bearer {TOKEN}"}
    report.save(tmp_path / "out", figures=False)
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes()
    hub.faults = [Fault(status=500)] * 50
    with pytest.raises(HubUnavailable) as caught:
        gp.open_checkpoint("org/name").layer(0)
    assert TOKEN not in str(caught.value)
    assert TOKEN not in "".join(capsys.readouterr())
