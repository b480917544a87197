"""Which rows of a layer frame belong together: those of one stack and expert group."""

from __future__ import annotations

import pandas as pd


def groups_of(layers: pd.DataFrame) -> pd.Series:
    """The expert group of every row; a layer without an MLP is counted among its neighbours.

    It gets the first group of the layer before it in its stack, of the one behind it if there is none before, and "none" if
    no layer of its stack has an MLP.
    """
    group = layers["group"].astype(object).where(layers["group"] != "none")
    first = group.where(~layers.duplicated(["tower", "layer"]))
    near = first.groupby(layers["tower"].astype(str), sort=False).transform(lambda one: one.ffill().bfill())
    return group.fillna(near).fillna("none").astype(str)
