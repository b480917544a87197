"""How much does a report cost, against the plainest loop that reads the same weights?

The loop reads gate, up and down in chunks of rows, converts them to float32 and takes three norms and three inner
products. The report computes every default measure. Both run on a synthetic checkpoint of 8B-shaped layers
(d_model 4096, d_mlp 14336, bfloat16) in the page cache; the ratio is of times measured in one run.

    python analyses/bench_report.py --layers 4
    python analyses/bench_report.py --layers 2 4 8     # does peak memory grow with depth?
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def write_checkpoint(directory: Path, layers: int, d_model: int, d_mlp: int) -> None:
    """A LLaMA-shaped checkpoint of random weights, a shard a layer."""
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes = {
            "mlp.gate_proj.weight": (d_mlp, d_model),
            "mlp.up_proj.weight": (d_mlp, d_model),
            "mlp.down_proj.weight": (d_model, d_mlp),
        }
        tensors = {
            prefix + name: torch.randn(shape, generator=generator).mul_(d_model**-0.5).bfloat16()
            for name, shape in shapes.items()
        }
        tensors[prefix + "post_attention_layernorm.weight"] = torch.ones(d_model, dtype=torch.bfloat16)
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"model_type": "llama", "hidden_size": d_model, "intermediate_size": d_mlp, "hidden_act": "silu"}
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))


def plain_loop(directory: Path, rows: int) -> float:
    """Seconds of the plain loop."""
    started = time.perf_counter()
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            names = {name.split(".")[-2]: name for name in handle.keys() if "mlp" in name}  # noqa: SIM118
            gate, up, down = (handle.get_slice(names[n]) for n in ("gate_proj", "up_proj", "down_proj"))
            for start in range(0, gate.get_shape()[0], rows):
                stop = start + rows
                q, k = gate[start:stop].float(), up[start:stop].float()
                v = down[:, start:stop].float().T
                q.norm(dim=1), k.norm(dim=1), v.norm(dim=1)
                (q * k).sum(1), (q * v).sum(1), (k * v).sum(1)
    return time.perf_counter() - started


def read_only(directory: Path) -> float:
    """Seconds of reading the same bytes and nothing else."""
    buffer = bytearray(1 << 24)
    started = time.perf_counter()
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass
    return time.perf_counter() - started


_REPORT = """
import sys, time
import glu_probe as gp
gp.probe, gp.Report
import pandas, torch

def peak():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024

before, start = peak(), time.perf_counter()
gp.probe(sys.argv[1])
print(time.perf_counter() - start, peak() - before)
"""


def report_once(directory: Path) -> tuple[float, float]:
    """Seconds of the whole report and peak memory in MB beyond the imports, in a process of its own (Linux)."""
    done = subprocess.run([sys.executable, "-c", _REPORT, str(directory)], capture_output=True, text=True, check=True)
    seconds, memory = map(float, done.stdout.split())
    return seconds, memory


def main() -> None:
    """Print one line per depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4])
    parser.add_argument("--d-model", type=int, default=4096)
    parser.add_argument("--d-mlp", type=int, default=14336)
    parser.add_argument("--rows", type=int, default=1024, help="rows of a chunk of the plain loop")
    parser.add_argument("--scratch", type=Path, default=None, help="where to write the synthetic checkpoint")
    options = parser.parse_args()
    print(
        f"{torch.get_num_threads()} threads, {options.d_model} x {options.d_mlp} bfloat16, chunks of {options.rows} rows"
    )
    for layers in options.layers:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            directory = Path(scratch)
            write_checkpoint(directory, layers, options.d_model, options.d_mlp)
            read_only(directory)  # into the page cache
            plain, read = min(plain_loop(directory, options.rows) for _ in range(2)), read_only(directory)
            seconds, memory = min(report_once(directory) for _ in range(2))
        print(
            f"{layers:3d} layers: read {read:.2f} s, plain loop {plain:.2f} s, report {seconds:.2f} s "
            f"= {seconds / plain:.2f} x plain; peak memory beyond imports {memory:,.0f} MB"
        )


if __name__ == "__main__":
    main()
