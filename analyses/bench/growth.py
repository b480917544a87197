"""How does the time of a report grow with depth, with width and with the number of experts?

Reports of synthetic checkpoints, each in a process of its own, imports excluded. The last column divides the time by the
number of weights, relative to the first line of the series: 1 all the way down is cost in proportion to what is read.
With depth it should be 1. With width it should fall where sampling has a fixed budget (the wider the layer, the fewer
Gaussian inputs), and jump where exact spectra end. With experts it is what many small MLPs cost more than a large one: the
layers of the series have the same number of weights, cut into more and more experts stacked in one tensor.

    python analyses/bench/growth.py
    python analyses/bench/growth.py --depths 2 4 --widths 512 1024 --experts 1 8
"""

from __future__ import annotations

from functools import partial

from harness import fastest, import_report, in_own_process, machine, parser, report, synthetic, table


def main() -> None:
    """Print a series for each."""
    options = parser(__doc__)
    options.add_argument("--depths", type=int, nargs="*", default=[2, 4, 8, 16])
    options.add_argument("--widths", type=int, nargs="*", default=[512, 1024, 2048, 4096], help="d_mlp is 4 times that")
    options.add_argument("--experts", type=int, nargs="*", default=[1, 4, 16, 64])
    options.add_argument(
        "--d-model", type=int, default=2048, help="of the models of growing depth and number of experts"
    )
    options.add_argument("--layers", type=int, default=2, help="of the models of growing width and number of experts")
    given = options.parse_args()
    series = {
        "depth": [(depth, {"layers": depth, "d_model": given.d_model, "d_mlp": 4 * given.d_model}) for depth in given.depths],
        "width": [(width, {"layers": given.layers, "d_model": width, "d_mlp": 4 * width}) for width in given.widths],
        "experts": [
            (count, {"layers": given.layers, "d_model": given.d_model, "d_mlp": 4 * given.d_model // count, "experts": count})
            for count in given.experts
        ],
    }  # fmt: skip
    rows = []
    for name, shapes in series.items():
        first = 0.0
        for value, shape in shapes:
            weights = 3 * shape["layers"] * shape["d_model"] * shape["d_mlp"] * shape.get("experts", 1)
            with synthetic(given.scratch, **shape) as model:
                work = partial(report, str(model))
                run = fastest(in_own_process(import_report, work) for _ in range(given.rounds))
            cost = run.seconds / weights * 1e9
            first = first or cost
            rows.append(
                (f"{name} {value}", f"{weights / 1e6:,.0f}", f"{run.seconds:.2f}", f"{cost:.2f}", f"{cost / first:.2f}")
            )
    print(machine())
    print(table(("", "million weights", "seconds", "ns a weight", "of the first"), rows))


if __name__ == "__main__":
    main()
