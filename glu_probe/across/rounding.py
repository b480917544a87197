"""What rounding in storage does to an MLP: the step of every stored weight, and the MLP with such errors drawn anew.

A weight that was rounded to a grid of step D is off by an error of standard deviation D / sqrt(12), if errors are uniform
in a cell. The step follows from the stored type and from the stored values themselves: no original is needed.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.sites import Site
from ..neurons import GatedLayer

ROLES = {"query": "gate", "key": "up", "value": "down"}

# Explicit bits of the mantissa and the exponent of the smallest normal number.
_FLOATS = {
    "F64": (52, -1022), "F32": (23, -126), "F16": (10, -14), "BF16": (7, -126), "F8_E4M3": (3, -6), "F8_E5M2": (2, -14),
}  # fmt: skip
_LONG_NAMES = {"FLOAT8_E4M3FN": "F8_E4M3", "F8_E4M3FN": "F8_E4M3", "FLOAT8_E5M2": "F8_E5M2"}
# GGUF: values of a block along the last axis, steps from end to end of what it spans (from 0 to its largest magnitude
# where the grid is symmetric), and how many of its values lie on the grid by construction.
_SPAN = {"Q4_1": (32, 15, 2), "Q5_1": (32, 31, 2), "Q2_K": (16, 3, 0), "Q4_K": (32, 15, 0), "Q5_K": (32, 31, 0)}
_MAGNITUDE = {"Q4_0": (32, 8, 1), "Q5_0": (32, 16, 1), "Q8_0": (32, 127, 1), "Q8_K": (256, 127, 1), "Q3_K": (16, 4, 0),
              "Q6_K": (16, 32, 0)}  # fmt: skip
_GROUPED = re.compile(r"(?:GPTQ |AWQ )?(?:INT|I)\d+ x (?:1x(?P<group>\d+)|(?P<row>row))")
_SCALED_FLOAT = re.compile(r"(?P<kind>F8_E4M3|F8_E5M2)\w* x ")
# Levels of bitsandbytes' NF4 as shares of the largest magnitude of a block of 64.
_NF4 = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105004, 0.0, 0.0795803, 0.1609302,
        0.2461123, 0.3379152, 0.4407098, 0.562617, 0.7229568, 1.0)  # fmt: skip
_NF4_BLOCK = 64


def rounding_steps(values: Float[Tensor, "rows columns"], dtype: str) -> Float[Tensor, "rows columns"] | None:
    """Step of the grid that each value lies on, as the type rounds it.

    Args:
        values: a matrix as it stands in the file, decoded; blocks of quantised types lie along its columns.
        dtype: how it is stored, in the words of `Checkpoint.describe`.

    Returns:
        Steps >= 0, an error's standard deviation being step / sqrt(12); None for types whose grid is not known here.

    >>> rounding_steps(torch.tensor([[1.0, 1.5, 3.0, 0.0]]), "BF16") * 128
    tensor([[1., 1., 2., 0.]])
    """
    dtype = _LONG_NAMES.get(dtype, dtype)
    if dtype in _FLOATS:
        return _float_steps(values, *_FLOATS[dtype])
    if scaled := _SCALED_FLOAT.match(dtype):
        # Where in its binade a value lies is not known without the scale: the mean over a binade, log-uniform.
        return values.abs() * 2.0 ** -_FLOATS[scaled["kind"]][0] * math.sqrt(3 / (8 * math.log(2)))
    if dtype in _SPAN or dtype in _MAGNITUDE:
        size, levels, on_grid = (_SPAN if dtype in _SPAN else _MAGNITUDE)[dtype]
        blocks = _in_blocks(values, size)
        span = blocks.amax(-1) - blocks.amin(-1) if dtype in _SPAN else blocks.abs().amax(-1)
        return _spread(span / levels * math.sqrt(1 - on_grid / size), size, values)
    if dtype == "bitsandbytes INT8":
        return (values.abs().amax(1, keepdim=True) / 127).expand_as(values)
    if dtype == "bitsandbytes NF4":
        return _nf4_steps(values)
    if grouped := _GROUPED.match(dtype):
        size = int(grouped["group"]) if grouped["group"] else values.shape[1]
        return _spread(_smallest_gaps(_in_blocks(values, size)), size, values)
    return None


def _float_steps(values: Tensor, bits: int, smallest: int) -> Tensor:
    exponent = torch.frexp(values.abs()).exponent - 1
    steps = torch.ldexp(torch.ones_like(values), exponent.clamp(min=smallest) - bits)
    return torch.where(values == 0, 0.0, steps)


def _in_blocks(values: Tensor, size: int) -> Tensor:
    """[rows, blocks, size]; a last block that is cut short repeats its last value."""
    short = -values.shape[1] % size
    if short:
        values = torch.cat([values, values[:, -1:].expand(-1, short)], dim=1)
    return values.reshape(len(values), -1, size)


def _spread(steps: Tensor, size: int, values: Tensor) -> Tensor:
    return steps.repeat_interleave(size, dim=1)[:, : values.shape[1]]


def _smallest_gaps(blocks: Tensor) -> Tensor:
    """Distance of neighbouring levels in each block: the mean of those gaps that are about the smallest."""
    gaps = blocks.sort(-1).values.diff(dim=-1)
    gaps = torch.where(gaps > 0, gaps, torch.inf)
    single = gaps < 1.5 * gaps.amin(-1, keepdim=True)
    mean = torch.where(single, gaps, 0.0).sum(-1) / single.sum(-1)
    return torch.nan_to_num(mean, nan=0.0)


def _nf4_steps(values: Tensor) -> Tensor | None:
    """Widths of the levels' cells; None if the values are not on that grid, as with another size of block."""
    if values.shape[1] % _NF4_BLOCK:
        return None
    levels = torch.tensor(_NF4, dtype=values.dtype)
    blocks = _in_blocks(values, _NF4_BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    shares = torch.where(largest > 0, blocks / largest, 0.0).reshape(-1)
    middles = (levels[1:] + levels[:-1]) / 2
    nearest = torch.bucketize(shares, middles)
    if (levels[nearest] - shares).abs().max() > 0.01:  # half precision leaves 0.004
        return None
    edges = torch.cat([levels[:1], middles, levels[-1:]])
    widths = edges.diff()
    return (widths[nearest].reshape(blocks.shape) * largest).reshape(values.shape)


class StorageRounding:
    """The rounding of one checkpoint's MLPs, one MLP at a time.

    Args:
        checkpoint: the model; its norm may be folded in, the steps are then those of the folded factors.

    Attributes:
        unknown: types met whose grid is not known.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stored = checkpoint.with_options(fold_norm=False, fold_post_norm=False)
        self._places = {_place(site): site for site in self._stored.sites}
        self.unknown: set[str] = set()

    @property
    def exact(self) -> bool:
        """Nothing is stored with fewer bits than it is computed with here."""
        return all({*map(self._dtype, [site] * 3, ROLES)} <= {"F32", "F64"} for site in self._checkpoint.sites)

    def dtypes(self, site: Site) -> dict[str, str]:
        """Factor to how its matrix is stored."""
        return {role: self._dtype(site, role) for role in ROLES}

    def _dtype(self, site: Site, role: str) -> str:
        return self._checkpoint.source.infos()[site.tensors[ROLES[role]]].dtype

    def steps(self, site: Site, layer: GatedLayer) -> dict[str, Float[Tensor, "d_mlp d_model"] | None]:
        """Step of every weight of the factors `layer`, which were loaded from `site`; None where it is not known."""
        stored = self._stored.load(self._places[_place(site)])
        out: dict[str, Tensor | None] = {}
        for role, name in ROLES.items():
            dtype, slab, matrix = self._dtype(site, role), site.slabs[name], getattr(stored, role)
            whole = slab.step == 1 and (slab.first == 0 or not slab.columns or dtype in _FLOATS)
            steps = None
            if whole or dtype in _FLOATS:
                steps = rounding_steps(matrix.T if slab.columns else matrix, dtype)
            if steps is None:
                self.unknown.add(dtype)
                out[role] = None
                continue
            steps = steps.T if slab.columns else steps
            # the norm's gain multiplies errors as it multiplies weights
            out[role] = steps * _gain(matrix, getattr(layer, role))
        return out


def relative_errors(
    layer: GatedLayer, steps: dict[str, Float[Tensor, "d_mlp d_model"] | None]
) -> dict[str, Float[np.ndarray, " d_mlp"]]:
    """Root mean square of each row's rounding error over the row's norm: sqrt(sum step^2 / 12) / |row|.

    Small ones are, in radians, the angle by which rounding turns the row. Missing where steps are not known or the row is 0.
    """
    out = {}
    for role, step in steps.items():
        if step is None:
            out[role] = np.full(layer.d_mlp, np.nan)
            continue
        error = (torch.linalg.vector_norm(step, dim=1, dtype=torch.float64) / math.sqrt(12)).numpy()
        norm = torch.linalg.vector_norm(getattr(layer, role), dim=1, dtype=torch.float64).numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = error / norm
        out[role] = np.where(np.isfinite(ratio), ratio, np.nan)
    return out


def rounded_anew(
    layer: GatedLayer, steps: dict[str, Float[Tensor, "d_mlp d_model"]], generator: torch.Generator
) -> GatedLayer:
    """The layer with one more error of rounding in every weight, uniform over a step."""
    changed: dict[str, Any] = {}
    for role, step in steps.items():
        factor = getattr(layer, role)
        error = torch.rand(factor.shape, generator=generator, dtype=factor.dtype).sub_(0.5)
        changed[role] = error.mul_(step).add_(factor)
    return replace(layer, **changed)


def _gain(stored: Tensor, folded: Tensor) -> Float[Tensor, " d_model"]:
    """What folding multiplied each column by."""
    before, after = (torch.linalg.vector_norm(part, dim=0, dtype=torch.float64) for part in (stored, folded))
    gain = torch.nan_to_num(after / before, nan=0.0, posinf=0.0, neginf=0.0)
    return gain.to(folded.dtype)


def _place(site: Site) -> tuple:
    return site.tower, site.layer, site.expert
