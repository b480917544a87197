"""Whether two neuron frames are of the same neurons, where there are no weights to ask."""

from __future__ import annotations

import numpy as np
import pandas as pd

_NORMS = ("query_norm", "value_gain")
_COSINES = ("abs_cos_qk", "cos_kv", "abs_cos_qv")
_NEAR = 0.1  # of the usual distance between two neurons of one layer: the same neuron


def same_by_fingerprint(base: pd.DataFrame, other: pd.DataFrame) -> tuple[str, np.ndarray, float]:
    """Compare the neurons of two frames of one layer by five measures that no choice of coordinates changes.

    The measures are |q|, |k||v| (logarithms), |cos(q, k)|, cos(k, v) and |cos(q, v)|, each over its standard deviation in the
    base. Of every neuron the nearest one in the other frame is looked for.

    Returns:
        "index" if for at least half that is the one at the same index; "permuted" if for most it is at another index and a
        tenth as far away as two neurons of the layer usually are, each with one of its own; else "unknown". Then the order
        ([d_mlp] index in `other`) and the share at the same index.
    """
    from scipy.spatial import KDTree

    points = [_points(frame) for frame in (base, other)]
    known = np.isfinite(points[0]).all(1) & np.isfinite(points[1]).all(1)
    order = np.arange(len(base))
    either = [np.flatnonzero(np.isfinite(each).all(1)) for each in points]
    if known.sum() < 2 or min(map(len, either)) < 2:
        return "unknown", order, np.nan
    spread = points[0][either[0]].std(0)
    one, two = (each[rows] / np.where(spread > 0, spread, 1.0) for each, rows in zip(points, either, strict=True))
    distance, nearest = KDTree(two).query(one)
    at_home = np.full(len(one), np.inf)
    usable = known[either[0]]
    scaled = [each / np.where(spread > 0, spread, 1.0) for each in points]
    rows = either[0][usable]
    at_home[usable] = np.linalg.norm(scaled[0][rows] - scaled[1][rows], axis=1)
    own = float((at_home <= distance + 1e-9).mean())
    if own >= 0.5:
        return "index", order, own
    usual = np.median(KDTree(one).query(one, k=2)[0][:, 1])
    targets = either[1][nearest]
    if np.median(distance) < _NEAR * usual and len({*targets.tolist()}) == len(one) == len(two):
        order = order.copy()
        order[either[0]] = targets
        rest = [
            np.setdiff1d(order_range, used)
            for order_range, used in ((np.arange(len(base)), either[0]), (np.arange(len(base)), targets))
        ]
        order[rest[0]] = rest[1]
        return "permuted", order, own
    return "unknown", order, own


def _points(frame: pd.DataFrame) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        norms = [np.log(frame[name].to_numpy(dtype=float)) for name in _NORMS]
    return np.stack([*norms, *(frame[name].to_numpy(dtype=float) for name in _COSINES)], axis=1)
