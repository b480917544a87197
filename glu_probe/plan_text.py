"""A plan in a few lines."""

from __future__ import annotations

import math

from .plan import Plan


def plan_text(plan: Plan) -> str:
    """The plan in a few lines."""
    moved, flops = plan.reading, plan.flops
    lines = []
    for kind in plan.kinds:
        again = "read again for each step of their spectra" if kind.shape.iterated_spectra else "read again in part"
        if kind.held:
            what = "held in memory, read once" + (", the next one meanwhile" if kind.ahead else "")
        elif kind.reading.written:
            what = f"unpacked into temporary files, these {again}"
        else:
            what = f"in their files, {again}"
        lines.append(
            f"  {kind.count:,} x {kind.group}, d_model {kind.shape.d_model}, d_mlp {kind.shape.d_mlp}, {kind.dtype}, "
            f"{_bytes(kind.held_bytes)} in memory: {what}"
        )
    lines.append(f"tensors     {_bytes(moved.once)} of MLPs and their norms")
    words = "over the wire" if plan.remote else "read"
    lines.append(
        f"reading     {_bytes(moved.read)} {words} at most"
        + (f", {moved.read / moved.once:.1f} times that" if moved.read > 1.01 * moved.once else "")
        + (f"; {_bytes(moved.written)} to temporary files, {_bytes(moved.again)} from them" if moved.written else "")
    )
    if moved.finer:
        lines.append(
            f"            {_bytes(moved.finer)} more for a finer pass, if neurons of every such MLP cancel each other"
        )
    if any(not kind.held for kind in plan.kinds):
        lines.append(
            f"            with --memory {math.ceil(plan.holds_all / 1e8) / 10:g}GB every MLP is held and read once"
        )
    total = sum(flops.values())
    shares = sorted(((value / total, name) for name, value in flops.items() if value), reverse=True)
    listed = ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.005)
    lines += [
        f"arithmetic  {total / 1e12:,.3g} TFLOP: {listed}",
        f"memory      about {_bytes(plan.memory)} a worker beyond the libraries, bound {_bytes(plan.bound)}",
        f"time        reading {_time(plan.reading_seconds)} at {_bytes(plan.bandwidth)}/s, computing "
        f"{_time(plan.computing_seconds)} at {plan.rate / 1e9:.3g} GFLOP/s ({plan.rate_source}) on "
        f"{plan.workers} worker{'s' * (plan.workers > 1)}: about {_time(plan.seconds)}, {'the longer of both' if plan.at_once else 'one after the other where no MLP is read ahead'}",
    ]
    return "\n".join(lines)


def _bytes(size: float) -> str:
    """Three digits.

    >>> _bytes(528482304), _bytes(2e9), _bytes(999)
    ('528 MB', '2 GB', '999 B')
    """
    power = max(0, min(5, int(math.log10(max(size, 1)) + 1e-9) // 3))
    value = size / 1000**power
    text = f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
    shorter = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{shorter} {' kMGTP'[power].strip()}B"


def _time(seconds: float) -> str:
    """In the unit that fits."""
    for limit, unit, size in ((100, "s", 1), (6000, "min", 60), (360_000, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.3g} days"
