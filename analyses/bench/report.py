"""What does a report cost, against the plainest loop over the same weights, and against merely reading them?

Four things are done with the same files, which are in the page cache, each in a process of its own and in turns:

* read, one buffer: the bytes go into 4 MiB of memory again and again, which stays in the processor's cache. Nothing that
  looks at the weights can be faster.
* read, fresh memory: every file into memory of its own, which has to be had from the system first. Nothing that loads
  the weights can be.
* plain loop: gate, up and down a chunk of rows at a time, as float32; three norms and three inner products. What one
  would write in a notebook. With chunks of 1024 rows, which leave the cache, and of 256, which do not.
* report: every default measure: the above in float64, exchange and scaling asymmetries, nulls, spectra, the tensor.

The ratio to the plain loop is fair in that both begin with the same bytes, in that both may use all cores that torch is
given, and in that imports are in neither. It is not in that the report answers more.

    python analyses/bench/report.py                        # layers of 4096 x 14336 in bfloat16, as in an 8B model
    python analyses/bench/report.py --layers 4 --rounds 5
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from harness import (
    fastest,
    import_report,
    in_own_process,
    machine,
    parser,
    read_into_one_buffer,
    report,
    synthetic,
    table,
)


def import_torch() -> None:
    """Import what the plain loop needs."""
    import safetensors.torch  # noqa: F401


def plain_loop(directory: Path, rows: int) -> None:
    """Three norms and three inner products of every neuron, a chunk of rows at a time."""
    from safetensors import safe_open

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


def read_into_fresh_memory(directory: Path) -> None:
    """Read every file whole, into memory that is new each time."""
    for file in sorted(directory.glob("*.safetensors")):
        file.read_bytes()


def main() -> None:
    """Print a line for each, and the ratios."""
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--d-model", type=int, default=4096)
    options.add_argument("--d-mlp", type=int, default=14336)
    options.add_argument("--rows", type=int, nargs="+", default=[1024, 256], help="rows of a chunk of the plain loop")
    options.add_argument("--memory", default="1GB", help="bound of the report")
    given = options.parse_args()
    with synthetic(given.scratch, layers=given.layers, d_model=given.d_model, d_mlp=given.d_mlp) as model:
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        work = {
            "read, one buffer": (import_torch, partial(read_into_one_buffer, model)),
            "read, fresh memory": (import_torch, partial(read_into_fresh_memory, model)),
            **{f"plain loop, {rows} rows": (import_torch, partial(plain_loop, model, rows)) for rows in given.rows},
            "report": (import_report, partial(report, str(model), memory=given.memory)),
        }
        rounds = [{name: in_own_process(*each) for name, each in work.items()} for _ in range(given.rounds)]
    best = {name: fastest(one[name] for one in rounds) for name in work}
    whole = best["report"].seconds
    print(machine())
    print(
        f"{given.layers} layers of {given.d_model} x {given.d_mlp} in bfloat16, {size / 1e9:.2f} GB in the page cache; "
        f"fastest of {given.rounds}"
    )
    rows = [
        (
            name,
            f"{run.seconds:.2f}",
            f"{size / 1e9 / run.seconds:.2f}",
            f"{run.memory:,.0f}",
            f"{whole / run.seconds:.2f}",
        )
        for name, run in best.items()
    ]
    print(table(("", "seconds", "GB/s", "MB beyond imports", "report takes times as long"), rows))


if __name__ == "__main__":
    main()
