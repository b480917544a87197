"""What do libraries keep from the first time they are used? The constants of `glu_probe/footprint.py`.

Each of what a report calls is called once, small, in the order in which it would be; printed is what the process's memory
(VmRSS) grew by: mostly pages of the libraries' files, which are read when they are first executed. Imports come first
and count for themselves. Then the table of an activation; what measuring a layer leaves in memory when all that it freed is
given back, which is all of that and what is not seen singly; and a whole report, whose tables are written when no layer is
in memory any more.

    python analyses/bench/first_use.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import import_report, machine, report, table, write_checkpoint

from glu_probe.checkpoint.memory import give_back


def resident() -> float:
    """Memory of this process, in MB (Linux)."""
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) * 1024 / 1e6


def first_uses() -> dict[str, Callable[[], object]]:
    """What is called, by name."""
    import numpy as np
    import torch

    from glu_probe.measures.gaussian import gaussian_table

    def square(dtype: torch.dtype) -> Callable[[], object]:
        return lambda: torch.ones(300, 300, dtype=dtype) @ torch.ones(300, 300, dtype=dtype)

    small = torch.ones(64, 3, 300, dtype=torch.float64)
    return {
        "products in float64": square(torch.float64),
        "products in float32": square(torch.float32),
        "products in bfloat16": square(torch.bfloat16),
        "products of many small matrices": lambda: torch.bmm(small, small.transpose(1, 2)),
        "eigenvalues, torch": lambda: torch.linalg.eigvalsh(torch.eye(300, dtype=torch.float64)),
        "eigenvalues, numpy": lambda: np.linalg.eigh(np.eye(10)),
        "linear systems, numpy": lambda: np.linalg.solve(np.eye(100), np.eye(100)),
        "random numbers": lambda: np.random.default_rng(0).standard_normal(1000),
        "activation": lambda: torch.nn.functional.silu(torch.ones(1000)),
        "table of SiLU, and ReLU's at its end": lambda: gaussian_table("silu"),
    }


def measure(model: Path) -> None:
    """One layer, held in memory; what it frees is given back."""
    import glu_probe as gp
    from glu_probe.measuring import Settings, measure_site

    checkpoint = gp.open_checkpoint(model)
    measure_site(checkpoint, checkpoint.sites[0], Settings())
    give_back()


def main() -> None:
    """Print a line for each."""
    before = resident()
    import_report()
    rows = [("imports", f"{resident() - before:.1f}")]
    start = resident()
    for name, use in first_uses().items():
        before = resident()
        use()
        rows.append((name, f"{resident() - before:.1f}"))
    with TemporaryDirectory() as directory:
        model = write_checkpoint(Path(directory) / "model", layers=2, d_model=1024, d_mlp=4096)
        measure(model)
        rows.append(("all that, after measuring 1024 x 4096", f"{resident() - start:.1f}"))
        report(str(model))
        give_back()
        rows.append(("all that, after a report", f"{resident() - start:.1f}"))
    print(machine())
    print(table(("what", "MB"), rows))


if __name__ == "__main__":
    main()
