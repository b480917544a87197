"""Arguments that many functions take: one clear error each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glu_probe.arguments import share, vector, whole_number
from glu_probe.errors import BadOption, ShapeMismatch


@pytest.mark.parametrize("value", [0, 5, True, 1.5, "3", None, float("nan")])
def test_numbers_out_of_range_or_of_another_kind(value):
    with pytest.raises(BadOption, match=r"^count is .*from 1 to 4: why not"):
        whole_number("count", value, 1, 4, why="why not")


def test_whole_numbers_of_every_kind():
    for value in (3, np.int64(3), np.uint8(3)):
        found = whole_number("count", value, 1, 4)
        assert found == 3
        assert type(found) is int


@pytest.mark.parametrize("value", [-0.1, 1.1, True, "0.5", None, float("nan"), float("inf")])
def test_shares_out_of_range(value):
    with pytest.raises(BadOption, match=r"^threshold is .*from 0 to 1"):
        share("threshold", value)


def test_shares_of_every_kind():
    assert [share("t", value) for value in (0, 1, 0.5, np.float32(0.5))] == [0, 1, 0.5, 0.5]


@pytest.mark.parametrize(
    "value", [[1, 2], np.array([1.0, 2.0]), torch.tensor([1, 2]), torch.ones(2).half().requires_grad_()]
)
def test_vectors_of_every_kind(value):
    found = vector("x", value, 2)
    assert found.dtype == torch.float64
    assert not found.requires_grad


def test_vectors_that_are_none():
    with pytest.raises(ShapeMismatch, match=r"x is \[2, 1\], expected \[2\]"):
        vector("x", torch.ones(2, 1), 2)
    with pytest.raises(BadOption, match="complex"):
        vector("x", [1j, 2], 2)
    for value in ("ab", None, object()):
        with pytest.raises(BadOption, match="not numbers"):
            vector("x", value, 2)
