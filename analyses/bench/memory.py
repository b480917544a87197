"""Does peak memory grow with depth or width? It should stay within the given bound, whatever the model.

A report of synthetic checkpoints of growing depth, and then of growing width, each in a process of its own: the largest
memory it has had (VmHWM), less what it had after the imports. The bound is `--memory`; MLPs larger than half of it stay in
their files. The same with a lower bound says whether the bound is what decides. Frames of neurons are spilled a layer at
a time, as `glu-probe report` does.

    python analyses/bench/memory.py                             # 3 GB on disk for 128 layers of 1024 x 4096
    python analyses/bench/memory.py --depths 4 32 --widths 1024 4096 --memory 100MB 1GB
"""

from __future__ import annotations

from functools import partial

from harness import fastest, import_report, in_own_process, machine, parser, report, synthetic, table

from glu_probe.checkpoint.memory import in_bytes


def main() -> None:
    """Print a line for every shape and bound."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--depths", type=int, nargs="*", default=[4, 32, 128])
    options.add_argument("--d-model", type=int, default=1024, help="of the models of growing depth")
    options.add_argument(
        "--widths", type=int, nargs="*", default=[1024, 2048, 4096, 8192], help="d_mlp is 4 times that"
    )
    options.add_argument("--layers", type=int, default=2, help="of the models of growing width")
    options.add_argument("--memory", nargs="+", default=["100MB", "1GB"], help="bounds")
    given = options.parse_args()
    shapes = [(layers, given.d_model) for layers in given.depths] + [(given.layers, width) for width in given.widths]
    rows = []
    for layers, width in dict.fromkeys(shapes):
        with synthetic(given.scratch, layers=layers, d_model=width, d_mlp=4 * width) as model:
            for bound in given.memory:
                run = fastest(
                    in_own_process(import_report, partial(report, str(model), memory=bound))
                    for _ in range(given.rounds)
                )
                mlp = 3 * 4 * width * width * 2 / 1e6
                share = run.memory * 1e6 / in_bytes(bound)
                cells = (layers, f"{width} x {4 * width}", f"{mlp:,.0f}", bound, f"{run.memory:,.0f}", f"{share:.2f}")
                rows.append((*cells, f"{run.seconds:.1f}"))
    print(machine())
    print(table(("layers", "MLP", "MB of an MLP", "bound", "MB beyond imports", "of the bound", "seconds"), rows))


if __name__ == "__main__":
    main()
