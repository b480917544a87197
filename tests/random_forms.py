"""Random forms and inputs, float64, for the tests of forms, conversions and symmetries."""

from __future__ import annotations

import torch

import glu_probe as gp
from glu_probe.forms import MLPForm

D_MODEL, D_MLP, RANK = 6, 10, 3  # all different, so that no transpose can pass


def random_form(
    kind: type[MLPForm],
    activation: gp.Activation | str = "silu",
    *,
    d_model: int = D_MODEL,
    d_mlp: int = D_MLP,
    rank: int = RANK,
    bias: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> MLPForm:
    """A form whose factors and biases are all random: fresh biases are 0 and would hide a form that drops them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"d_model": d_model, "d_mlp": d_mlp, "rank": rank}
    factors = {
        name: torch.randn([sizes[axis] for axis in axes], generator=generator, dtype=torch.float64)
        * (1.0 if name.endswith("_bias") else sizes[axes[-1]] ** -0.5)
        for name, axes in kind.axes.items()
        if bias or not name.endswith("_bias")
    }
    return kind.from_factors(activation, **factors).to(dtype)


def inputs(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def numbers(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
