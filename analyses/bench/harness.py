"""What the benchmarks share: synthetic checkpoints, processes of their own, peak memory, and tables.

Everything that is compared runs in a process of its own, so that neither meets memory or caches that the other has
warmed, and the figures of one run stand beside each other: only their ratios mean anything on another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

MLP = ("gate_proj", "up_proj", "down_proj")
_LEFT_OVER = 2 * 10**9  # bytes of a disk that a benchmark leaves free

# -- synthetic checkpoints -----------------------------------------------------------------------


def write_checkpoint(
    directory: Path, *, layers: int, d_model: int, d_mlp: int, experts: int = 0, vocabulary: int = 0
) -> Path:
    """A checkpoint of random weights in bfloat16, a shard a layer: LLaMA's names, or Mixtral's with stacked experts.

    Every layer has the same weights: what a layer costs depends on them only through the steps of an iteration, and
    those are as many for one random matrix as for another.

    Args:
        experts: of each layer, in one tensor each for gate and up and for down; 0 for a dense MLP.
        vocabulary: 0 for MLPs and their norms alone, else a whole model that transformers can load.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(d_model**-0.5).bfloat16()

    ones = torch.ones(d_model, dtype=torch.bfloat16)
    if experts:
        part = {
            "mlp.experts.gate_up_proj": draw(1, 2 * d_mlp, d_model).expand(experts, -1, -1).contiguous(),
            "mlp.experts.down_proj": draw(1, d_model, d_mlp).expand(experts, -1, -1).contiguous(),
        }
    else:
        shapes = ((d_mlp, d_model), (d_mlp, d_model), (d_model, d_mlp))
        part = {f"mlp.{name}.weight": draw(*shape) for name, shape in zip(MLP, shapes, strict=True)}
    part["post_attention_layernorm.weight"] = ones
    config: dict[str, Any] = {
        "model_type": "mixtral" if experts else "llama", "hidden_size": d_model, "intermediate_size": d_mlp,
        "hidden_act": "silu", "num_hidden_layers": layers,
    }  # fmt: skip
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": 2}
    ends: dict[str, torch.Tensor] = {}
    if vocabulary:
        heads, groups = d_model // 64, max(1, d_model // 256)
        part |= {
            "input_layernorm.weight": ones.clone(), "self_attn.q_proj.weight": draw(d_model, d_model),
            "self_attn.k_proj.weight": draw(64 * groups, d_model),
            "self_attn.v_proj.weight": draw(64 * groups, d_model), "self_attn.o_proj.weight": draw(d_model, d_model),
        }  # fmt: skip
        ends = {
            "model.embed_tokens.weight": draw(vocabulary, d_model), "model.norm.weight": ones.clone(),
            "lm_head.weight": draw(vocabulary, d_model),
        }  # fmt: skip
        config |= {
            "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "num_attention_heads": heads,
            "num_key_value_heads": groups, "head_dim": 64, "dtype": "bfloat16", "tie_word_embeddings": False,
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        }  # fmt: skip
    needed = layers * sum(tensor.nbytes for tensor in part.values()) + sum(tensor.nbytes for tensor in ends.values())
    _refuse_full(directory, needed)
    directory.mkdir(parents=True, exist_ok=True)
    shards = [{f"model.layers.{layer}.{name}": tensor for name, tensor in part.items()} for layer in range(layers)]
    shards += [ends] if ends else []
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": needed}, "weight_map": weight_map})
    )
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _refuse_full(directory: Path, needed: int) -> None:
    import shutil

    there = next(parent for parent in (directory, *directory.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if needed + _LEFT_OVER > free:
        sys.exit(
            f"the synthetic checkpoint takes {needed / 1e9:.1f} GB and {there} has {free / 1e9:.1f} GB free: "
            "give --scratch, or ask for fewer layers"
        )


@contextmanager
def synthetic(scratch: Path | None, **shape: int) -> Iterator[Path]:
    """A synthetic checkpoint in a temporary directory, in the page cache if it fits there."""
    with TemporaryDirectory(dir=scratch, prefix="glu-probe-bench-") as directory:
        model = write_checkpoint(Path(directory) / "model", **shape)
        read_into_one_buffer(model)
        yield model


def read_into_one_buffer(directory: Path) -> None:
    """Read every weight file, 4 MiB at a time into memory that stays in the cache: moving the bytes and no more."""
    buffer = bytearray(1 << 22)
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


# -- processes of their own ------------------------------------------------------------------------


def peak() -> float:
    """Largest memory that this process has had so far, in MB (Linux)."""
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6


@dataclass(frozen=True)
class Run:
    """Wall time in seconds, peak memory in MB (beyond what was there before, or of the whole process), and what was found."""

    seconds: float
    memory: float
    found: str = ""


def _timed(prepare: Callable[[], None], work: Callable[..., object], arguments: dict[str, Any]) -> Run:
    prepare()
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak begins anew: imports may have had a higher one
    before, started = peak(), time.perf_counter()
    work(**arguments)
    return Run(time.perf_counter() - started, peak() - before)


def in_own_process(prepare: Callable[[], None], work: Callable[..., object], **arguments: Any) -> Run:
    """Do the work in a new process, imports (what `prepare` does) excluded from time and memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_timed, prepare, work, arguments).result()


_REPORT_PEAK = """
with open("/proc/self/status") as _status:
    print("VmHWM", next(line for line in _status if line.startswith("VmHWM")).split()[1])
"""


def whole_process(program: str, *arguments: object) -> Run:
    """Run a program text in an interpreter of its own: start, imports and all. What it prints is what it found."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program + _REPORT_PEAK, *map(str, arguments)],
        capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"the process failed:\n{done.stderr[-4000:]}")
    found, _, kilobytes = done.stdout.rpartition("VmHWM ")
    return Run(seconds, int(kilobytes) * 1024 / 1e6, found.strip())


def fastest(runs: Iterable[Run]) -> Run:
    """The shortest time, and the largest memory."""
    runs = list(runs)
    return Run(min(run.seconds for run in runs), max(run.memory for run in runs), runs[0].found)


def import_report() -> None:
    """Import what a report needs."""
    import glu_probe.execute
    import glu_probe.probing
    from glu_probe.measures.arithmetic import compiled_loops

    assert glu_probe.probing
    compiled_loops(10**9)


def report(directory: str, **options: Any) -> None:
    """All default measures of every layer, the neuron frame in a file as `glu-probe report` has it."""
    from glu_probe import probe

    with TemporaryDirectory() as parts:
        probe(directory, parts=Path(parts) / "parts", **options)


# -- what is printed -----------------------------------------------------------------------------


def machine() -> str:
    """What it ran on."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{name}, {os.cpu_count()} cores{load}; torch {torch.__version__}, {torch.get_num_threads()} threads"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns in line, numbers to the right, in the form that Markdown takes."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *rest = (
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |" for row in lines
    )
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([first, rule, *rest])


def parser(doc: str | None, *, rounds: int = 3) -> argparse.ArgumentParser:
    """Options that all of them have."""
    out = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--rounds", type=int, default=rounds, help="how often each is run; the fastest counts")
    out.add_argument("--scratch", type=Path, default=None, help="where to write the synthetic checkpoint")
    return out
