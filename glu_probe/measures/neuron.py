"""Measures of single neurons that need no data: directions, sizes and the Gaussian picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..layer_rows import BLOCK, LayerRows
from .gaussian import GAUSSIAN_MEASURES, gaussian_quadrature, gaussian_table
from .io_classes import io_class
from .products import RowProducts, cosine, row_products

Array = Float[np.ndarray, " neuron"]

DIRECTION_MEASURES = (
    "query_norm",
    "key_norm",
    "value_norm",
    "norm_ratio",
    "value_gain",
    "abs_cos_qk",
    "cos_kv",
    "abs_cos_qv",
    "cos_qv",
    "outlier_risk",
)


def neuron_measures(layer: LayerRows, products: RowProducts) -> dict[str, Array]:
    """Every neuron measure of a layer, [d_mlp] float64 each, and `io_class` as an index.

    Missing (NaN) where undefined: cosines of a zero row, everything of a neuron whose rows are all zero
    (padding) or not finite, and the functional measures where `layer.functional_note()` says why.
    """
    out = directions(products)
    out |= functional(layer, np.sqrt(products.qq), np.sqrt(products.kk), signed_cosine(products))
    out["output_energy"] = out.pop("energy") * products.vv
    out["io_class"] = io_class(out["abs_cos_qk"], out["cos_kv"], out["cos_qv"])
    absent = padded(products) | non_finite(layer, products)
    for name, values in out.items():
        if name != "io_class":
            values[absent] = np.nan
    return out


def signed_cosine(products: RowProducts) -> Array:
    """cos(q, k) with its gauge-dependent sign."""
    return cosine(products.qk, products.qq, products.kk)


def cosines(layer: LayerRows) -> dict[str, Array]:
    """Norms, gains and cosines of every neuron and nothing else, as the neuron frame has them; [d_mlp] float64 each.

    For who wants cos(q, k), cos(k, v) and cos(q, v) alone: one pass over the factors, a small part of a report.
    """
    return directions(row_products(layer.detach()))


def directions(products: RowProducts) -> dict[str, Array]:
    """Norms, gains and cosines; which of them are gauge-invariant, the registry says."""
    cos_qk = signed_cosine(products)
    cos_qv = cosine(products.qv, products.qq, products.vv)
    query, key, value = (np.sqrt(square) for square in (products.qq, products.kk, products.vv))
    sign = np.where(cos_qk < 0, -1.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return {
            "query_norm": query,
            "key_norm": key,
            "value_norm": value,
            "norm_ratio": np.where(key > 0, query / key, np.nan),
            "value_gain": key * value,
            "abs_cos_qk": np.abs(cos_qk),
            "cos_kv": cosine(products.kv, products.kk, products.vv),
            "abs_cos_qv": np.abs(cos_qv),
            "cos_qv": np.where(np.isnan(cos_qk), np.nan, sign * cos_qv),
            "outlier_risk": np.where(np.isnan(cos_qk), np.nan, np.abs(products.qk) * value),
        }


def functional(
    layer: LayerRows,
    query_norm: Array,
    key_norm: Array,
    cos_qk: Array,
    which: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[str, Array]:
    """The Gaussian measures and `energy` = E[(S(a) b)^2] of neurons with these norms and cosines.

    Neurons without biases come from the activation's table, those with are integrated one by one.

    Args:
        which: numbers of the neurons whose gate and up biases are meant; None for all in order.
    """
    out = {name: np.full_like(query_norm, np.nan) for name in (*GAUSSIAN_MEASURES, "energy")}
    biased = layer.query_bias is not None or layer.key_bias is not None
    bias_q, bias_k = (bias.numpy() for bias in layer.biases())
    if which is not None:
        bias_q, bias_k = bias_q[which[0]], bias_k[which[1]]
    # a row of zeros with a bias is a constant branch, and as such has a function
    defined = np.isfinite(query_norm + key_norm + bias_q + bias_k)
    defined &= (np.abs(query_norm) + np.abs(bias_q) > 0) & (np.abs(key_norm) + np.abs(bias_k) > 0)
    act = layer.activation
    if act is None or layer.functional_note() is not None or not defined.any():
        return out
    q, k, rho = query_norm[defined], key_norm[defined], np.nan_to_num(cos_qk[defined])
    if biased:
        values = gaussian_quadrature(act, q, k, rho, bias_q[defined], bias_k[defined])
    else:
        values = gaussian_table(act)(q, np.abs(rho))
        values["energy"] = values["energy"] * k * k
    for name, array in out.items():
        array[defined] = values[name]
    return out


# -- neurons that are not quite neurons ----------------------------------------------------------


def padded(products: RowProducts) -> np.ndarray:
    """Neurons whose three rows are all zero: padding of the matrix, not neurons. [d_mlp] bool."""
    return (products.qq == 0) & (products.kk == 0) & (products.vv == 0)


def non_finite(layer: LayerRows, products: RowProducts, which: slice = slice(None)) -> np.ndarray:
    """Neurons, of all or of those whose products are given, with a NaN or an infinity in a row or a bias."""
    finite = np.isfinite(products.qq) & np.isfinite(products.kk) & np.isfinite(products.vv)
    for bias in (layer.query_bias, layer.key_bias):
        if bias is not None:
            finite &= bias[which].isfinite().numpy()
    return ~finite


def duplicated(layer: LayerRows, products: RowProducts) -> np.ndarray:
    """Neurons whose gate and up rows (and biases) another neuron of the layer has exactly: both act as one. [d_mlp] bool.

    Equal rows have equal inner products: candidates are found by those, and a hash of the rows tells.
    """
    out = np.zeros(layer.d_mlp, dtype=bool)
    dead = padded(products) | non_finite(layer, products)
    _, inverse, alike = np.unique(products.qq, return_inverse=True, return_counts=True)
    candidates = np.flatnonzero((alike[inverse.ravel()] > 1) & ~dead)
    for members in _equal_rows(candidates, products.qq, products.kk, products.qk):
        hashes = [digest for part in torch.from_numpy(members).split(BLOCK) for digest in _hashes(layer, part)]
        counts = Counter(hashes)
        out[members] = [counts[digest] > 1 for digest in hashes]
    return out


def _hashes(layer: LayerRows, which: Tensor) -> Iterator[bytes]:
    """Of the gate and up rows and biases of each of these neurons; 16 bytes, so that other rows have other ones."""
    biases = [bias[which, None] for bias in (layer.query_bias, layer.key_bias) if bias is not None]
    rows = torch.cat([layer.rows("query", which), layer.rows("key", which), *biases], dim=1)
    for row in rows.numpy() + 0.0:  # -0 is 0
        yield blake2b(row, digest_size=16).digest()


def _equal_rows(candidates: np.ndarray, *columns: Array) -> Iterator[np.ndarray]:
    """Those of the candidates that agree in all columns, group by group."""
    keys = np.stack([column[candidates] for column in columns], axis=1)
    _, inverse, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    for group in np.flatnonzero(counts > 1):
        yield candidates[inverse.ravel() == group]


def flags(layer: LayerRows, products: RowProducts) -> dict[str, np.ndarray]:
    """What is odd about each neuron: flag name to [d_mlp] bool. A padded neuron carries no other flag."""
    padding = padded(products)
    return {
        "zero_gate": (products.qq == 0) & ~padding,
        "zero_up": (products.kk == 0) & ~padding,
        "zero_down": (products.vv == 0) & ~padding,
        "padded": padding,
        "non_finite": non_finite(layer, products),
        "duplicated": duplicated(layer, products),
    }
