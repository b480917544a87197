"""Plans: bytes against what is really read, arithmetic against counted products, memory against the process's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import glu_probe as gp
from glu_probe import calibration, cli
from glu_probe.checkpoint import memory, raw
from glu_probe.costs import Reading, Shape
from glu_probe.errors import BadOption
from glu_probe.measures import gram, sampling, spectra, tensor
from glu_probe.measuring import Settings, measure_layer, measure_site
from glu_probe.plan import in_bytes_per_second, plan
from glu_probe.plan_text import plan_text
from glu_probe.testing import write_tiny_checkpoint

from .support import llama_config, llama_tensors, random_layer, write_checkpoint, write_llama

NOT_PRODUCTS = ("Gaussian measures", "eigenvalues")


def _product(_total, left, right, out_shape=None, **_others) -> int:
    """Operations of a matrix [rows, inner] with one [inner, columns]."""
    return 2 * left[0] * left[1] * right[1]


def _products(_total, left, right, out_shape=None, **_others) -> int:
    """Operations of so many matrices [rows, inner] with as many [inner, columns]."""
    return 2 * left[0] * left[1] * left[2] * right[2]


# -- bytes ---------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """Bytes that are read from files: of whole tensors or rows, and of matrices that stay there."""
    from glu_probe.checkpoint.safetensors import SafetensorsFile

    count: Counter[str] = Counter()
    stored, fill = SafetensorsFile.stored, raw.RawMatrix._fill

    def counting_stored(self, name, rows=None):
        out = stored(self, name, rows)
        count["read"] += out.nbytes
        return out

    def counting_fill(self, out, file, offset):
        count["read" if self.file is None else "again"] += out.nbytes
        return fill(self, out, file, offset)

    monkeypatch.setattr(SafetensorsFile, "stored", counting_stored)
    monkeypatch.setattr(raw.RawMatrix, "_fill", counting_fill)
    return count


def measured(checkpoint, limit: int) -> None:
    """Measure every MLP with a bound far below the least that the options allow."""
    for site in checkpoint.sites:
        measure_site(checkpoint, site, Settings(memory=limit))


def planned(checkpoint, monkeypatch, limit: int):
    monkeypatch.setattr(memory, "_LEAST", 1)
    return plan(checkpoint, memory=limit, gflops=1)


@pytest.mark.parametrize(
    "family", ["llama", "phi3", "mixtral", "gpt_oss", "llama4_text", "deepseek_v3", "dbrx", "stablelm", "jais"]
)
def test_bytes_of_mlps_in_memory_are_those_that_are_read(family, tmp_path, counted):
    write_tiny_checkpoint(family, tmp_path / family)
    checkpoint = gp.open_checkpoint(tmp_path / family)
    found = plan(checkpoint, gflops=1)
    counted.clear()
    measured(checkpoint, memory.DEFAULT)
    assert found.reading.read == counted["read"] > 0
    assert found.reading.once == checkpoint.describe()["bytes"].sum()
    assert found.reading.written == found.reading.again == 0


def test_a_plan_reads_no_weights(llama, counted):
    plan(gp.open_checkpoint(llama), gflops=1)
    assert not counted


@pytest.fixture
def no_shortcuts(monkeypatch):
    """Every small layer is measured as a large one is, in blocks and stripes of a few neurons."""
    monkeypatch.setattr(spectra, "EXACT_FLOPS", 0)
    monkeypatch.setattr(tensor, "_EXACT_FLOPS", 0)


@pytest.fixture
def all_steps(monkeypatch):
    """No iteration ends before its last step."""
    monkeypatch.setattr(gram, "_TOLERANCE", -1.0)


@pytest.mark.parametrize("family", ["llama", "phi3", "stablelm", "glm", "molmo2_text"])
@pytest.mark.parametrize(("stripe", "limit"), [(raw.STRIPE, 1000), (3 * 2**14, 300_000)])
def test_bytes_of_mlps_in_their_files_are_those_that_are_read(
    family, stripe, limit, tmp_path, counted, monkeypatch, no_shortcuts, all_steps
):
    write_tiny_checkpoint(family, tmp_path / family, d_model=48, d_mlp=600)
    monkeypatch.setattr(raw, "STRIPE", stripe)
    checkpoint = gp.open_checkpoint(tmp_path / family)
    found = planned(checkpoint, monkeypatch, limit)
    counted.clear()
    measured(checkpoint, limit)
    assert not any(kind.held for kind in found.kinds)
    assert counted["read"] > 5 * found.reading.once
    # stripes of columns are of one neuron, or so wide that some of each block of mismatched pairs lie in all of them
    assert found.reading.read == counted["read"]


def test_an_iteration_that_ends_early_reads_less(tmp_path, counted, monkeypatch, no_shortcuts):
    tensors = llama_tensors(layers=1, d_model=48, d_mlp=600)
    for name in tensors:
        if ".mlp." in name:  # one strong direction: found in a few steps
            tensors[name] = tensors[name] + 3 * torch.ones_like(tensors[name])
    checkpoint = gp.open_checkpoint(
        write_checkpoint(
            tmp_path / "m", tensors, llama_config(hidden_size=48, intermediate_size=600, num_hidden_layers=1)
        )
    )
    found = planned(checkpoint, monkeypatch, 1000)
    counted.clear()
    measured(checkpoint, 1000)
    assert found.reading.once < counted["read"] < found.reading.read


@pytest.mark.parametrize(("family", "d_mlp"), [("llama", 600), ("llama", 40), ("glm", 1100), ("molmo2_text", 1100)])
@pytest.mark.parametrize("stripe", [raw.STRIPE, 3 * 2**14])
def test_exact_spectra_and_tensor_of_an_mlp_in_its_file(family, d_mlp, stripe, tmp_path, counted, monkeypatch):
    write_tiny_checkpoint(family, tmp_path / "m", d_model=48, d_mlp=d_mlp)
    monkeypatch.setattr(raw, "STRIPE", stripe)
    checkpoint, limit = gp.open_checkpoint(tmp_path / "m"), 3 * 48 * d_mlp * 4
    found = planned(checkpoint, monkeypatch, limit)
    assert not found.kinds[0].held
    assert found.kinds[0].shape.exact_spectra
    assert found.kinds[0].shape.exact_tensor
    counted.clear()
    measured(checkpoint, limit)
    assert found.reading.read == counted["read"]


def test_columns_that_are_one_stripe_are_read_once(tmp_path, counted, monkeypatch, no_shortcuts, all_steps):
    tensors = llama_tensors(layers=1, d_model=48, d_mlp=600)
    narrow = {name: value.bfloat16() if "down_proj" in name else value for name, value in tensors.items()}
    config = llama_config(hidden_size=48, intermediate_size=600, num_hidden_layers=1)
    checkpoint = gp.open_checkpoint(write_checkpoint(tmp_path / "m", narrow, config))
    held = 48 * 600 * (4 + 4 + 2)
    found = planned(checkpoint, monkeypatch, int(1.6 * held))
    assert not found.kinds[0].held
    counted.clear()
    measured(checkpoint, int(1.6 * held))
    passes = 1 + gram._STEPS + 1 + 1  # and the mismatched pairs, of which there are as many as neurons
    assert found.reading.read == counted["read"] == 48 * 600 * (passes * (4 + 4) + 2) + 48 * 4


@pytest.mark.parametrize("family", ["llama", "glm"])
def test_a_finer_pass_where_neurons_cancel(family, tmp_path, counted, monkeypatch, no_shortcuts, all_steps):
    write_tiny_checkpoint(family, tmp_path / family, d_model=48, d_mlp=600)
    monkeypatch.setattr(sampling, "_SINGLE", 0)
    rounded = property(lambda self: self._narrowed is sampling.coarse)
    monkeypatch.setattr(sampling.SampledLayer, "too_coarse", rounded)
    checkpoint = gp.open_checkpoint(tmp_path / family)
    found = planned(checkpoint, monkeypatch, 1000)
    counted.clear()
    measured(checkpoint, 1000)
    assert found.reading.finer > 0
    assert found.reading.read + found.reading.finer == counted["read"]
    assert "finer pass" in plan_text(found)


def test_no_finer_pass_of_what_is_held_or_sampled_in_float64(llama, monkeypatch):
    assert planned(gp.open_checkpoint(llama), monkeypatch, 1000).reading.finer == 0
    monkeypatch.setattr(sampling, "_SINGLE", 0)
    assert planned(gp.open_checkpoint(llama), monkeypatch, memory.DEFAULT).reading.finer == 0
    assert planned(gp.open_checkpoint(llama), monkeypatch, 1000).reading.finer > 0


def test_what_is_too_large_to_be_gone_over_again_is_read_once(tmp_path, counted, monkeypatch, no_shortcuts):
    write_llama(tmp_path / "m", d_model=48, d_mlp=600, layers=2)
    monkeypatch.setattr(spectra, "_ITERATED", 0)
    checkpoint = gp.open_checkpoint(tmp_path / "m")
    found = planned(checkpoint, monkeypatch, 1000)
    assert "spectra" not in found.flops
    counted.clear()
    measured(checkpoint, 1000)
    assert found.reading.read == counted["read"] < 3 * found.reading.once


def fp8_checkpoint(directory, d_model: int = 256, d_mlp: int = 384, layers: int = 2):
    """Weights in FP8 with a scale for each block of 128 x 128."""
    tensors = {}
    for name, value in llama_tensors(layers=layers, d_model=d_model, d_mlp=d_mlp).items():
        if ".mlp." in name:
            tensors[name] = value.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(-(-value.shape[0] // 128), -(-value.shape[1] // 128))
        else:
            tensors[name] = value
    config = llama_config(hidden_size=d_model, intermediate_size=d_mlp, num_hidden_layers=layers)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return write_checkpoint(directory, tensors, config)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the files are closed as they vanish
def test_packed_weights_that_do_not_fit_go_to_temporary_files(tmp_path, counted, monkeypatch, no_shortcuts, all_steps):
    checkpoint = gp.open_checkpoint(fp8_checkpoint(tmp_path / "fp8"))
    found = planned(checkpoint, monkeypatch, 1000)
    counted.clear()
    measured(checkpoint, 1000)
    assert found.reading.once == found.reading.read == counted["read"]
    assert found.reading.again == counted["again"]
    assert found.reading.written == 2 * 3 * 256 * 384 * 4
    assert "temporary files" in plan_text(found)


# -- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("exact_spectra", "exact_tensor", "activation", "d_mlp"), [
    (True, True, "silu", 1024), (True, True, "silu", 128), (True, False, "relu", 1024), (False, True, "silu", 1024),
    (False, False, "silu", 1024), (False, False, None, 1024),
])  # fmt: skip
def test_products_are_those_that_are_counted(exact_spectra, exact_tensor, activation, d_mlp, monkeypatch, all_steps):
    monkeypatch.setattr(spectra, "EXACT_FLOPS", 1e30 if exact_spectra else 0)
    monkeypatch.setattr(tensor, "_EXACT_FLOPS", 1e30 if exact_tensor else 0)
    drawn = random_layer(d_mlp=d_mlp, d_model=192)
    act = None if activation is None else gp.activation(activation)
    layer = gp.GatedLayer(drawn.query, drawn.key, drawn.value, act)
    in_place = {torch.ops.aten.baddbmm_: _products, torch.ops.aten.addmm_: _product}  # which the counter does not know
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # it counts what its own thread does
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        measure_layer(layer, samples=40)
    shape = Shape(d_mlp, 192, activation is not None, activation == "relu")
    products = {name: value for name, value in shape.flops(samples=40).items() if name not in NOT_PRODUCTS}
    # what remains are products with a basis of ten vectors
    assert sum(products.values()) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_the_gaussian_tables_are_as_large_as_is_said():
    from glu_probe.measures.gaussian import gaussian_table

    for name, homogeneous in (("silu", False), ("relu", True)):
        tables = gaussian_table(name)._coefficients
        operations = sum(2 * np.prod(table.shape) + 2 * table.shape[1] for table in tables.values())
        assert Shape(1, 8, True, homogeneous)._interpolation == operations


@pytest.mark.parametrize("size", [(14336, 4096), (8192, 2048), (1536, 576), (53248, 16384), (2048, 7168), (4096, 1024)])
def test_a_part_is_measured_in_the_ways_of_the_whole(size):
    whole = Shape(*size)
    part = calibration._some_neurons(whole)
    assert part.ways == whole.ways
    assert part.d_mlp <= max(whole.d_mlp, 1024)


def test_the_rate_is_measured(monkeypatch):
    ticks = iter([0.0, 2.0, 10.0, 11.0])
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: next(ticks))
    shape = Shape(64, 32)
    assert calibration.measured_rate(shape) == sum(shape.flops().values())  # the faster of both took a second


# -- time and the rest ---------------------------------------------------------------------------


def test_time_is_the_longer_of_reading_and_computing(llama):
    checkpoint = gp.open_checkpoint(llama)
    slow_disk = plan(checkpoint, bandwidth=1000, gflops=1000)
    assert slow_disk.seconds == slow_disk.reading_seconds == slow_disk.reading.read / 1000
    slow_processor = plan(checkpoint, bandwidth="1TB/s", gflops=1e-6)
    flops = sum(slow_processor.flops.values())
    assert slow_processor.seconds == slow_processor.computing_seconds == pytest.approx(flops / 1000)
    assert plan(checkpoint, workers=4, gflops=1e-6).computing_seconds == pytest.approx(flops / 4000)
    assert plan(checkpoint, workers=40, gflops=1e-6).computing_seconds == pytest.approx(
        flops / 12_000
    )  # there are 12 MLPs


def test_without_room_for_two_mlps_reading_and_computing_take_turns(llama, monkeypatch):
    checkpoint, size = gp.open_checkpoint(llama), 3 * 24 * 16 * 4
    roomy, tight = (planned(checkpoint, monkeypatch, limit) for limit in (4 * size, 2 * size))
    assert (roomy.kinds[0].held, roomy.kinds[0].ahead) == (True, True)
    assert (tight.kinds[0].held, tight.kinds[0].ahead) == (True, False)
    assert roomy.seconds == max(roomy.reading_seconds, roomy.computing_seconds)
    assert tight.seconds == pytest.approx(tight.reading_seconds + tight.computing_seconds)
    assert roomy.memory - tight.memory == size
    assert plan(checkpoint, workers=2, memory=2 * size, gflops=1).at_once  # another worker computes meanwhile


@pytest.mark.parametrize(
    ("text", "value"), [("2GB/s", 2e9), ("400 MB/s", 4e8), (1e6, 1e6), ("1.5e3", 1500.0), ("1GiB", 2.0**30)]
)
def test_bandwidths(text, value):
    assert in_bytes_per_second(text) == value


@pytest.mark.parametrize("text", ["fast", "0", "-1GB/s", "", True, None, "2GB/h"])
def test_what_is_no_bandwidth_is_refused(text):
    with pytest.raises(BadOption, match="bandwidth is"):
        in_bytes_per_second(text)


@pytest.mark.parametrize(("given", "words"), [
    ({"gflops": 0}, "gflops is 0"), ({"gflops": float("nan")}, "gflops is nan"), ({"workers": 0}, "workers is 0"),
    ({"memory": "1MB"}, "memory is '1MB'"),
])  # fmt: skip
def test_what_cannot_be_planned_with_is_refused(llama, given, words):
    with pytest.raises(BadOption, match=words):
        plan(gp.open_checkpoint(llama), **({"gflops": 1} | given))


def called(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert not stop.value.code


def test_json_is_the_plan(llama, capsys):
    called(["inspect", str(llama), "--plan", "--gflops", "50", "--bandwidth", "1MB/s", "--workers", "2", "--json"])
    facts = json.loads(capsys.readouterr().out)
    found = plan(gp.open_checkpoint(llama), gflops=50, bandwidth=1e6, workers=2)
    assert facts["plan"] == json.loads(json.dumps(found.facts()))
    assert facts["plan"]["bytes_once"] == sum(mlp["bytes"] for mlp in facts["mlps"]) == 12 * (3 * 16 * 24 + 16) * 4
    assert facts["plan"]["neurons"] == 12 * 24


def test_plan_as_text(llama, capsys):
    called(["inspect", str(llama), "--plan", "--bandwidth", "1MB/s"])
    out = capsys.readouterr().out
    assert (
        "12 x dense, d_model 16, d_mlp 24, F32, 4.61 kB in memory: held in memory, read once, the next one meanwhile"
        in out
    )
    assert "tensors     56.1 kB of MLPs and their norms" in out
    assert "reading 0.0561 s at 1 MB/s" in out
    assert "(measured) on 1 worker" in out


def test_options_of_a_plan_without_one_are_refused(llama, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", str(llama), "--workers", "2"])
    assert stop.value.code == 2
    assert "--workers without --plan" in capsys.readouterr().err


# -- models that are too large to be here ----------------------------------------------------------

_HEADER_ONLY = Path(__file__).parents[1] / "analyses" / "bench" / "header_only.py"


def written(name: str, directory: Path):
    """A checkpoint of headers and holes, opened; it must not take room on the disk."""
    done = subprocess.run(
        [sys.executable, str(_HEADER_ONLY), name, str(directory)], capture_output=True, text=True, check=True
    )
    assert "GB as listed" in done.stdout
    files = list(directory.iterdir())
    assert sum(file.stat().st_size for file in files) > 6e11
    assert sum(file.stat().st_blocks * 512 for file in files) < 1e8
    return gp.open_checkpoint(directory)


def test_a_dense_model_of_405_billion_parameters(tmp_path, counted):
    checkpoint = written("llama-405b", tmp_path / "m")
    once = 126 * (3 * 16384 * 53248 + 16384) * 2
    held, small = plan(checkpoint, memory="11GB", gflops=1), plan(checkpoint, gflops=1)
    assert held.reading == Reading(once, once)
    assert small.reading.once == once
    assert small.reading.read > 2 * once
    assert small.memory < 1e9 < held.memory
    assert not counted


@pytest.mark.slow
def test_an_fp8_model_of_671_billion_parameters(tmp_path):
    checkpoint = written("deepseek-671b", tmp_path / "m")
    found = plan(checkpoint, memory="4GB", gflops=1)

    def mlp(d_mlp: int) -> int:
        return 3 * (7168 * d_mlp + 4 * (7168 // 128) * (d_mlp // 128)) + 7168 * 2

    once = 3 * mlp(18432) + 58 * 257 * mlp(2048)
    assert found.reading == Reading(once, once)
    assert [(kind.group, kind.count) for kind in found.kinds] == [("dense", 3), ("routed", 58 * 256), ("shared", 58)]


# -- memory --------------------------------------------------------------------------------------

_PEAK = """
import sys, tempfile
import glu_probe.execute, glu_probe.probing
from glu_probe.measures.arithmetic import compiled_loops

compiled_loops(10**9)  # an import too

def memory(what):
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith(what)).split()[1]) * 1024

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak of what compiles is not that of what runs
before = memory("VmRSS")
with tempfile.TemporaryDirectory() as parts:
    glu_probe.probing.probe(sys.argv[1], memory=sys.argv[2], parts=parts + "/parts")
print(memory("VmHWM") - before)
"""


def peak(model: Path, bound: str, cores: int = 1) -> int:
    """Bytes that a report takes at most, beyond the imports, in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": str(cores)}
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(model), bound], capture_output=True, text=True, check=True, env=environment
    )
    return int(done.stdout)


@pytest.fixture
def written_model(tmp_path):
    """A checkpoint of so many layers of a shape, in bfloat16; they have the same weights."""

    def write(layers: int, d_model: int, d_mlp: int) -> Path:
        one = {name: t.bfloat16() for name, t in llama_tensors(layers=1, d_model=d_model, d_mlp=d_mlp).items()}
        tensors = {
            name.replace("layers.0.", f"layers.{layer}."): tensor.clone()
            for name, tensor in one.items() for layer in range(layers if "layers.0." in name else 1)
        }  # fmt: skip
        config = llama_config(hidden_size=d_model, intermediate_size=d_mlp, num_hidden_layers=layers)
        return write_checkpoint(tmp_path / "m", tensors, config)

    return write


on_linux = pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="asks Linux for the peak of a process"
)


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize(
    ("layers", "d_model", "d_mlp", "bound"),
    # Two layers where libraries weigh: what spectra load stays, and is there beside the next layer's first pass.
    [(2, 576, 1536, "1GB"), (1, 2048, 8192, "1GB"), (1, 4096, 14336, "1GB"), (1, 4096, 14336, "100MB")],
)
def test_peak_memory(written_model, monkeypatch, layers, d_model, d_mlp, bound):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = written_model(layers, d_model, d_mlp)
    found = plan(gp.open_checkpoint(model), memory=bound, gflops=1).memory
    assert found == pytest.approx(peak(model, bound), rel=0.25)


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("cores", [1, 8])
@pytest.mark.parametrize(
    ("layers", "d_model", "d_mlp", "bound"),
    [(1, 4096, 14336, 10**8), (4, 1024, 4096, 10**8), (4, 128, 256, 10**8), (32, 128, 256, 10**8)],
)
def test_the_bound_holds(written_model, layers, d_model, d_mlp, bound, cores):
    """What is larger is left in its file, and fewer cores than there are work at once."""
    assert peak(written_model(layers, d_model, d_mlp), str(bound), cores) <= 1.2 * bound
