"""How fast this machine does the arithmetic of a report: some neurons are measured, and the clock is read."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from .activations import activation
from .checkpoint.stored import StoredFactor, StoredLayer
from .costs import Shape
from .layer_rows import ROLES, Fold, HeldRows
from .measures.gaussian import gaussian_table
from .measuring import measure_layer
from .thread_limits import cores, one_blas_thread, share_of_cores

_NEURONS, _ROUNDS = 1024, 2


def measured_rate(whole: Shape, workers: int = 1) -> float:
    """Floating point operations a second of one worker, from measuring some random neurons of such MLPs.

    It is the work itself that is timed, so that conversions and everything else that is no product of matrices is in
    the rate. As many threads are used as each of so many workers would have here.
    """
    part, generator = _some_neurons(whole), torch.Generator().manual_seed(0)
    size, gain = (part.d_mlp, part.d_model), Fold(torch.ones(part.d_model))
    factors = {
        role: StoredFactor(
            HeldRows(torch.randn(size, generator=generator).mul_(part.d_model**-0.5).bfloat16()), size, torch.float32,
            fold=Fold() if role == "value" else gain,
        )
        for role in ROLES
    }  # fmt: skip
    act = activation("relu" if part.homogeneous else "silu") if part.function else None
    if act is not None:
        gaussian_table(act)  # made once a process
    experts: dict[str, int | str] = {"routed": 0, "shared": "shared"}
    layer = StoredLayer(factors, act, expert=experts.get(part.group))
    before, spent = torch.get_num_threads(), []
    torch.set_num_threads(share_of_cores(min(workers, cores())))
    try:
        with one_blas_thread():
            for _ in range(_ROUNDS):
                started = time.perf_counter()
                measure_layer(layer, samples=whole.samples)
                spent.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return sum(part.flops(samples=whole.samples).values()) / min(spent)


def _some_neurons(shape: Shape) -> Shape:
    """So many neurons that they are measured in the same way as all of them."""
    part = replace(shape, d_mlp=min(shape.d_mlp, _NEURONS))
    while part.ways != shape.ways:
        part = replace(part, d_mlp=min(shape.d_mlp, part.d_mlp + _NEURONS // 4))
    return part
