"""The main job on small checkpoints: rows, statistics, odd neurons, options, determinism."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

import glu_probe as gp
from glu_probe.errors import BadOption, NonFinite
from glu_probe.measures.registry import NEURON_MEASURES, STATISTICS

from .support import LAYERS, llama_config, llama_tensors, write_checkpoint, write_llama


@pytest.fixture
def report(llama):
    return gp.probe(llama)


def test_frames_have_their_columns_and_order(report):
    assert report.layers["layer"].tolist() == list(range(LAYERS))
    assert report.neurons["layer"].tolist() == np.repeat(range(LAYERS), 24).tolist()
    assert report.neurons["neuron"].tolist() == list(range(24)) * LAYERS
    assert list(report.neurons.columns[:5]) == ["model", "tower", "layer", "expert", "neuron"]
    assert {*NEURON_MEASURES, "io_class", "flag"} <= {*report.neurons.columns}
    for name in NEURON_MEASURES:
        assert {f"{name}_{statistic}" for statistic in STATISTICS} <= {*report.layers.columns}
        assert report.neurons[name].dtype == np.float32
    assert report.layers["n_neurons"].eq(24).all()
    assert report.neurons["model"].unique().tolist() == ["llama"]


def test_layer_statistics_are_those_of_the_neuron_frame(report):
    for layer, neurons in report.neurons.groupby("layer"):
        row = report.layers.loc[layer]
        for name in NEURON_MEASURES:
            values = neurons[name].astype(float)
            weights = neurons["output_energy"].astype(float)
            expected = {
                "mean": values.mean(),
                "median": values.median(),
                "q05": values.quantile(0.05),
                "q95": values.quantile(0.95),
                "weighted": (values * weights).sum() / weights.sum(),
            }
            for statistic, value in expected.items():
                assert row[f"{name}_{statistic}"] == pytest.approx(value, rel=1e-5, abs=1e-7), (name, statistic)
        fractions = neurons["io_class"].value_counts(normalize=True)
        for name, fraction in fractions.items():
            assert row[f"io_class_{name.replace(' ', '_')}"] == pytest.approx(fraction)


def test_effect_size_and_nulls(report):
    for name in ("abs_cos_qk", "cos_kv", "abs_cos_qv", "cos_qv", "exchange_asymmetry"):
        mean, null, std = (report.layers[f"{name}_{part}"] for part in ("mean", "null_mean", "null_std"))
        np.testing.assert_allclose(report.layers[f"{name}_effect"], (mean - null) / std, rtol=1e-4)
    assert report.layers["cos_kv_null_isotropic_std"].iloc[0] == pytest.approx(0.25)


def test_class_sweep_sums_to_one(report):
    sums = report.classes.groupby(["layer", "threshold"])["fraction"].sum()
    np.testing.assert_allclose(sums, 1.0)
    assert report.classes["threshold"].nunique() > 3


def test_norm_is_folded_unless_told_otherwise(llama):
    from safetensors.torch import load_file

    tensors = load_file(llama / "model.safetensors")
    gate = tensors["model.layers.3.mlp.gate_proj.weight"]
    norm = tensors["model.layers.3.post_attention_layernorm.weight"]
    folded, raw = gp.open_checkpoint(llama).layer(3), gp.open_checkpoint(llama, fold_norm=False).layer(3)
    torch.testing.assert_close(folded.query, gate * norm)
    torch.testing.assert_close(raw.query, gate)
    assert folded.sources["norm"] == "model.layers.3.post_attention_layernorm.weight"
    plain = gp.probe(llama, fold_norm=False)
    assert plain.provenance["options"]["fold_norm"] is False
    assert "not folded" in plain.provenance["towers"]["text"]["norm"]


@pytest.mark.parametrize(("layers", "expected"), [
    (range(2, 5), [2, 3, 4]),
    ([7, 1], [1, 7]),
    ("0:3", [0, 1, 2]),
    ("10:", [10, 11]),
    ("10:12", [10, 11]),
    ("0,4:6,11", [0, 4, 5, 11]),
])  # fmt: skip
def test_choice_of_layers_changes_no_number(llama, report, layers, expected):
    some = gp.probe(llama, layers=layers)
    assert some.layers["layer"].tolist() == expected
    whole = report.layers[report.layers["layer"].isin(expected)].reset_index(drop=True)
    pd.testing.assert_frame_equal(some.layers, whole, check_exact=True)


def test_bad_options_are_refused(llama):
    for layers, words in (
        ([99], "no layer 99"),
        ("0,99", "no layer 99"),
        (5, "sequence"),
        ("3-5", "Write"),
        ("50:60", "name no layer"),
        ("0:99", "'0:99' end beyond the last layer. There are layers 0 to 11; \"0:\" is all of them"),
        ("5:13", '"5:" is all of them from 5 on'),
        ("3,0:2,12:", "'12:' name no layer"),
        ("0:2,3:3", "'3:3' name no layer"),
    ):
        with pytest.raises(BadOption, match=words):
            gp.probe(llama, layers=layers)
    with pytest.raises(BadOption, match="samples is 1"):
        gp.probe(llama, samples=1)
    with pytest.raises(BadOption, match="no tower 'audio'"):
        gp.probe(llama, towers=["audio"])
    with pytest.raises(BadOption, match="already open"):
        gp.probe(gp.open_checkpoint(llama), fold_norm=False)
    with pytest.raises(BadOption, match="layers 0-11"):
        gp.open_checkpoint(llama).layer(40)


def odd_checkpoint(tmp_path, change) -> object:
    tensors = llama_tensors(layers=2)
    change({role: tensors[f"model.layers.0.mlp.{role}_proj.weight"] for role in ("gate", "up", "down")})
    return write_checkpoint(tmp_path / "odd", tensors, llama_config(num_hidden_layers=2))


def test_zero_gate_row_is_left_out_of_means(tmp_path):
    def change(parts):
        parts["gate"][3] = 0

    report = gp.probe(odd_checkpoint(tmp_path, change))
    here = report.neurons[report.neurons["layer"] == 0]
    assert here["flag"].tolist()[3] == "zero_gate"
    assert np.isnan(here["abs_cos_qk"].iloc[3])
    others = here["abs_cos_qk"].drop(index=3).mean()
    assert report.layers["abs_cos_qk_mean"].iloc[0] == pytest.approx(others, rel=1e-6)
    assert report.layers["n_dead"].tolist() == [1, 0]


def test_padding_is_counted_and_changes_nothing_else(tmp_path):
    def change(parts):
        parts["gate"][20:], parts["up"][20:], parts["down"][:, 20:] = 0, 0, 0

    row = gp.probe(odd_checkpoint(tmp_path, change)).layers.iloc[0]
    assert row["n_padded"] == 4
    trimmed = {
        name: tensor[:, :20] if "down" in name else tensor[:20] if "mlp" in name else tensor
        for name, tensor in llama_tensors(layers=1).items()
    }
    clean = gp.probe(
        write_checkpoint(tmp_path / "trimmed", trimmed, llama_config(num_hidden_layers=1, intermediate_size=20))
    )
    for column in ("query_norm_mean", "cos_kv_q05", "exchange_asymmetry_weighted", "gate_stable_rank"):
        assert row[column] == pytest.approx(clean.layers[column].iloc[0], rel=1e-6), column


def test_non_finite_rows_are_counted_and_named(tmp_path):
    def change(parts):
        parts["up"][2, 1], parts["down"][0, 9] = torch.nan, -torch.inf

    directory = odd_checkpoint(tmp_path, change)
    report = gp.probe(directory)
    row = report.layers.iloc[0]
    assert row["n_non_finite"] == 2
    means = [name for name in report.layers.columns if name.endswith(("_mean", "_weighted", "_output", "_rank"))]
    assert np.isfinite(report.layers[means].to_numpy(dtype=float)).all()
    (note,) = (note for note in report.provenance["notes"] if "NaN" in note)
    assert "2, 9" in note
    assert "model.layers.0.mlp.up_proj.weight" in note
    assert "model.layers.0.mlp.down_proj.weight" in note
    with pytest.raises(NonFinite, match="layer 0"):
        gp.probe(directory, strict=True)


def test_a_layer_of_zeros_is_missing_throughout(tmp_path):
    def change(parts):
        for part in parts.values():
            part[:] = 0

    row = gp.probe(odd_checkpoint(tmp_path, change)).layers.iloc[0]
    assert row["n_padded"] == 24
    assert np.isnan(row["abs_cos_qk_mean"])
    assert np.isnan(row["exchange_asymmetry_output"])


def test_values_that_float32_cannot_hold_are_kept(tmp_path):
    def change(parts):
        for part in parts.values():
            part *= 1e30

    neurons = gp.probe(odd_checkpoint(tmp_path, change)).neurons
    assert np.isfinite(neurons["outlier_risk"]).all()
    assert neurons["outlier_risk"].max() > 1e80
    assert neurons["abs_cos_qk"].dtype == np.float32


def test_experts_have_rows_of_their_own(tmp_path):
    """Routed and shared experts stored one by one: a row per group, an index per expert."""
    tensors, plain = {}, llama_tensors(layers=1)
    for name, tensor in plain.items():
        if ".mlp." not in name:
            tensors[name] = tensor
            continue
        for expert in range(3):
            tensors[name.replace(".mlp.", f".mlp.experts.{expert}.")] = tensor * (expert + 1)
        tensors[name.replace(".mlp.", ".mlp.shared_experts.")] = tensor
    report = gp.probe(write_checkpoint(tmp_path / "moe", tensors, llama_config(num_hidden_layers=1, num_experts=3)))
    assert report.layers["group"].tolist() == ["routed", "shared"]
    assert report.layers["n_experts"].tolist() == [3, 0]
    assert report.layers["n_neurons"].tolist() == [72, 24]
    assert report.neurons["expert"].unique().tolist() == ["0", "1", "2", "shared"]
    by_expert = report.neurons.groupby("expert")["query_norm"].mean()
    assert by_expert["2"] == pytest.approx(3 * by_expert["0"], rel=1e-5)
    assert by_expert["shared"] == pytest.approx(by_expert["0"], rel=1e-6)


PROBE = """
import hashlib, json, sys
import torch
torch.set_num_threads(int(sys.argv[2]))
import glu_probe as gp
report = gp.probe(sys.argv[1])
frames = (report.layers, report.neurons, report.classes)
print(json.dumps([hashlib.sha256(frame.to_csv(index=False).encode()).hexdigest() for frame in frames]))
"""


def run_probe(path, threads: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(path), str(threads)], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": str(threads)},
    )  # fmt: skip
    return json.loads(done.stdout)


def test_same_bytes_whatever_the_number_of_threads(tmp_path):
    path = write_llama(tmp_path / "wide", layers=2, d_mlp=700, d_model=96)
    first = run_probe(path, 1)
    assert first == run_probe(path, 1) == run_probe(path, 2) == run_probe(path, 3)


LARGE = """
import hashlib, json, sys
import torch
torch.set_num_threads(int(sys.argv[2]))
import glu_probe as gp
from glu_probe.checkpoint import memory
from glu_probe.measures import arithmetic, sampling, spectra, tensor
sampling._SINGLE = spectra.EXACT_FLOPS = tensor._EXACT_FLOPS = 0
memory._LEAST = 1
if sys.argv[3] == "float32":
    arithmetic.native_bfloat16 = lambda: False
report = gp.probe(sys.argv[1], samples=100, memory=int(sys.argv[4]))
assert "Lanczos" in report.provenance["methods"]["spectra"][0]
assert "random pairs" in report.provenance["methods"]["tensor_asymmetry"][0]
frames = (report.layers, report.neurons, report.classes)
print(json.dumps([hashlib.sha256(frame.to_csv(index=False).encode()).hexdigest() for frame in frames]))
"""


def start_large(path, threads: int, precision: str, memory: int) -> subprocess.Popen:
    limits = {"OMP_NUM_THREADS": str(threads), "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(
        [sys.executable, "-c", LARGE, str(path), str(threads), precision, str(memory)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, **limits, "PYTHONHASHSEED": str(threads)},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "native"])
def test_large_layers_give_the_same_bytes_for_any_number_of_threads_and_memory(precision, tmp_path):
    """The sampled, single precision and iterated ways; shapes that do not divide by the number of threads."""
    path, found = write_llama(tmp_path / "large", layers=1, d_mlp=600, d_model=5120), []
    for threads, memory in ((1, 10**9), (2, 10**9), (3, 2 * 10**7), (4, 10**9)):
        with start_large(path, threads, precision, memory) as run:
            found.append(json.loads(run.stdout.read()))
    assert found[0] == found[1] == found[2] == found[3]


PEAK = """
import sys
import glu_probe as gp
from glu_probe.checkpoint import memory
from glu_probe.measures.arithmetic import compiled_loops
memory._LEAST = 1

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

gp.probe(sys.argv[1])  # what libraries and the tables of the activation take, whatever is measured
compiled_loops(10**9)  # and so does importing them
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = peak()
gp.probe(sys.argv[2], memory=sys.argv[3], samples=32)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="asks Linux for the peak of a process")
@pytest.mark.parametrize("way", ["exact", "iterated"])
def test_peak_memory_stays_within_the_bound(way, tmp_path):
    """Layers of 24 MB, two of them at a time, in the least bound that is allowed: as much for 2 layers as for 12."""
    d_mlp, d_model = (7000, 575) if way == "exact" else (3200, 1250)
    small, bound = write_llama(tmp_path / "small", layers=1), 100_000_000
    for layers in (2, 12) if way == "iterated" else (2,):
        tensors = {name: t.bfloat16() for name, t in llama_tensors(layers=2, d_mlp=d_mlp, d_model=d_model).items()}
        tensors |= {
            name.replace("layers.1.", f"layers.{layer}."): t.clone()
            for name, t in tensors.items() for layer in range(2, layers) if "layers.1." in name
        }  # fmt: skip
        config = llama_config(num_hidden_layers=layers, hidden_size=d_model, intermediate_size=d_mlp)
        large = write_checkpoint(tmp_path / str(layers), tensors, config)
        del tensors
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(small), str(large), str(bound)], capture_output=True, text=True, check=True
        )
        assert int(done.stdout) < 1.2 * bound, (layers, int(done.stdout))


def test_seed_changes_samples_only(llama, report):
    other = gp.probe(llama, seed=1)
    pd.testing.assert_frame_equal(report.neurons, other.neurons, check_exact=True)
    assert not report.layers["exchange_asymmetry_output"].equals(other.layers["exchange_asymmetry_output"])
    difference = report.layers["exchange_asymmetry_output"] - other.layers["exchange_asymmetry_output"]
    error = np.hypot(report.layers["exchange_asymmetry_output_se"], other.layers["exchange_asymmetry_output_se"])
    assert (difference.abs() < 5 * error).all()


def test_float64_and_half_precision_files(tmp_path):
    tables = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        tensors = {name: tensor.to(torch.float16).to(dtype) for name, tensor in llama_tensors(layers=2).items()}
        tables[dtype] = gp.probe(
            write_checkpoint(tmp_path / str(dtype), tensors, llama_config(num_hidden_layers=2))
        ).layers
    for dtype, table in tables.items():
        rtol = 2e-2 if dtype == torch.bfloat16 else 1e-5
        for column in ("query_norm_mean", "exchange_asymmetry_mean", "gate_stable_rank"):
            np.testing.assert_allclose(table[column], tables[torch.float64][column], rtol=rtol, err_msg=column)


def test_coinciding_branches_get_no_ratio(tmp_path):
    """At rho = 1 both asymmetries are 0: their ratio would be noise, and a finding from it false."""

    def change(parts):
        parts["gate"][:] = parts["up"]

    report = gp.probe(odd_checkpoint(tmp_path, change), layers=[0])
    assert report.layers["exchange_asymmetry_mean"].iloc[0] == pytest.approx(0, abs=1e-9)
    assert np.isnan(report.layers["exchange_asymmetry_relu_ratio"].iloc[0])
    assert "ReGLU" not in report.findings[0]


def test_relu_ratio_runs_from_bilinear_to_relu(tmp_path):
    ratios = {}
    for scale in (1e-3, 1.0, 1e3):
        tensors = {n: t * scale if "gate_proj" in n else t for n, t in llama_tensors(layers=1).items()}
        layers = gp.probe(write_checkpoint(tmp_path / str(scale), tensors, llama_config(num_hidden_layers=1))).layers
        ratios[scale] = layers["exchange_asymmetry_relu_ratio"].iloc[0]
    assert ratios[1e-3] < 1e-4 < 0.1 < ratios[1.0] < 0.95
    assert ratios[1e3] == pytest.approx(1, abs=1e-3)


def test_non_finite_norms_and_biases_are_named(tmp_path):
    tensors = llama_tensors(layers=2)
    tensors["model.layers.0.post_attention_layernorm.weight"][2] = torch.nan
    for role, size in (("gate", 24), ("up", 24), ("down", 16)):
        tensors[f"model.layers.1.mlp.{role}_proj.bias"] = torch.zeros(size)
    tensors["model.layers.1.mlp.up_proj.bias"][5] = torch.inf
    tensors["model.layers.1.mlp.down_proj.bias"][5] = torch.inf
    directory = write_checkpoint(tmp_path / "odd", tensors, llama_config(num_hidden_layers=2))
    report = gp.probe(directory)
    assert report.layers["n_non_finite"].tolist() == [24, 1]
    norm, bias, output = (note for note in report.provenance["notes"] if "NaN or infinity" in note)
    assert "in model.layers.0.post_attention_layernorm.weight;" in norm
    assert "in model.layers.1.mlp.up_proj.bias;" in bias
    assert "model.layers.1.mlp.down_proj.bias" in output
    assert np.isfinite(report.layers["exchange_asymmetry_output"].iloc[1])
    with pytest.raises(NonFinite):
        gp.probe(directory, strict=True, layers=[1])


def test_matrices_of_different_dtypes_in_one_mlp(tmp_path):
    tensors = {n: t.double() if "gate_proj" in n else t for n, t in llama_tensors(layers=1).items()}
    report = gp.probe(write_checkpoint(tmp_path / "mixed", tensors, llama_config(num_hidden_layers=1)))
    plain = gp.probe(write_llama(tmp_path / "plain", layers=1))
    for name in ("query_norm_mean", "exchange_asymmetry_output", "gate_stable_rank"):
        assert report.layers[name].iloc[0] == pytest.approx(plain.layers[name].iloc[0], rel=1e-5)


def test_rows_that_layer_norm_cancels_are_zero(tmp_path):
    """A constant row reads nothing from a centred input; what rounding leaves of it has no direction."""
    tensors = llama_tensors(layers=1, d_model=17)
    tensors["model.layers.0.mlp.gate_proj.weight"][:] = torch.linspace(-3, 3, 24)[:, None]
    del tensors["model.layers.0.post_attention_layernorm.weight"]
    directory = write_checkpoint(
        tmp_path / "olmo", tensors, llama_config(model_type="olmo", hidden_size=17, num_hidden_layers=1)
    )
    report = gp.probe(directory)
    assert report.neurons["flag"].eq("zero_gate").all()
    assert report.neurons["abs_cos_qk"].isna().all()


def test_a_run_in_one_memory_equals_layers_of_their_own(tmp_path):
    """The layers of a run overwrite each other's memory; those a user holds do not."""
    tensors = llama_tensors(layers=3) | {
        name.replace("layers.0", "layers.3"): torch.cat([t, t.flip(0)], dim=1 if "down" in name else 0)
        for name, t in llama_tensors(layers=1, seed=5).items()
        if ".mlp." in name
    }
    tensors["model.layers.3.post_attention_layernorm.weight"] = torch.ones(16)
    checkpoint = gp.open_checkpoint(write_checkpoint(tmp_path / "widths", tensors, llama_config(num_hidden_layers=4)))
    report, held = gp.probe(checkpoint), list(checkpoint.layers())
    for layer in held:
        result = gp.measure_layer(layer)
        here = report.neurons[report.neurons["layer"] == layer.layer]
        np.testing.assert_array_equal(here["output_energy"], result.neurons["output_energy"].astype(np.float32))
        row = report.layers.iloc[layer.layer]
        assert row["exchange_asymmetry_output"] == np.float32(result.scalars["exchange_asymmetry_output"])
    assert len({part.data_ptr() for layer in held for part in (layer.query, layer.key, layer.value)}) == 12
