"""What one neuron does to Gaussian input: the measures that need no data.

For isotropic input the pair (a, b) = (q.x, k.x) is jointly normal. In the canonical gauge both have the
same root mean square and E[ab] >= 0, so without biases everything follows from the activation S, the scale
s = |q| and the correlation rho = |cos(q, k)|. With g = S(a) b the neuron's coefficient:

* exchange_asymmetry = E[(g - g')^2] / (2 (E[g^2] + E[g'^2])), g' = S(b) a;
* scaling_asymmetry, the same with g' = S(2a) b / 2;
* linear_share, bilinear_share, residual_share: shares of E[g^2] along b, along what ab adds to it, and the rest.

Two roads lead to the same numbers. `gaussian_quadrature` integrates every neuron by itself and takes biases.
`GaussianTable` is its Chebyshev interpolant over (log s, arccos rho), exact to about 1e-9, for neurons without.

The definitions are this project's; the integrals use conditional moments of b given a, and for E[g g'] the
Hermite (Mehler) expansion E[h(a) h(b)] = sum_n rho^n c_n(a) c_n(b) with h(z) = z S(z).
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float

from ..activations import Activation, activation
from ..errors import BadOption
from ..thread_limits import one_blas_thread

if TYPE_CHECKING:
    import pandas as pd

GAUSSIAN_MEASURES = (
    "exchange_asymmetry",
    "scaling_asymmetry",
    "linear_share",
    "bilinear_share",
    "residual_share",
)
RESCALE = 2.0  # the c of scaling_asymmetry

_REACH = 10.0  # standard deviations covered; the rest weighs less than 1e-20
_PANELS, _NODES = 24, 16  # Gauss-Legendre panels on either side of z = 0
_ORDERS = 192  # terms of the Hermite expansion where rho is near 1
_CHUNK = 512  # neurons integrated with as many terms
_AT_ONCE = 64  # integrated at once: a dozen arrays of 0.4 MB
_TABLE_CHUNK = 1024  # neurons interpolated at once, about 1 MB of basis functions

# The table reaches far enough that the limits take over with an error below 1e-5 for every activation listed.
_LOG_SCALE = (math.log(1e-4), math.log(1e6))
_SCALE_NODES, _ANGLE_NODES = 144, 24

Array = Float[np.ndarray, " neuron"]


def _nodes(mean: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quadrature for E over u ~ N(0, 1) of functions of mean + scale * u: nodes and weights, [neuron, node].

    The panels grow like sinh away from z = 0, where activations bend on the scale 1 whatever `scale` is.
    """
    points, weights = np.polynomial.legendre.leggauss(_NODES)
    edges = np.arange(_PANELS)[:, None]
    unit = ((edges + (points + 1) / 2) / _PANELS).ravel()
    unit_weights = np.tile(weights / 2 / _PANELS, _PANELS)
    kink = np.clip(-mean / scale, -_REACH, _REACH)[:, None]
    grain = 1 / np.maximum(scale, 1e-12)[:, None]
    nodes, jacobians = [], []
    for sign in (-1.0, 1.0):
        # asinh(length / grain) and sinh lose nothing for the tiny arguments of small scales
        reach = np.arcsinh(np.maximum(_REACH - sign * kink, 0.0) / grain)
        nodes.append(kink + sign * grain * np.sinh(unit * reach))
        jacobians.append(grain * np.cosh(unit * reach) * reach * unit_weights)
    u = np.concatenate(nodes, axis=1)
    density = np.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
    return u, np.concatenate(jacobians, axis=1) * density


def _apply(act: Activation, z: np.ndarray) -> np.ndarray:
    return act(torch.from_numpy(np.ascontiguousarray(z))).numpy()


def _hermite(act: Activation, mean: np.ndarray, scale: np.ndarray, orders: int) -> np.ndarray:
    """Normalised Hermite coefficients of z S(z), z = mean + scale u: [neuron, orders]."""
    u, weights = _nodes(mean, scale)
    z = mean[:, None] + scale[:, None] * u
    values = z * _apply(act, z) * weights
    coefficients = np.empty((len(mean), orders))
    previous, current = np.zeros_like(u), np.ones_like(u)
    for n in range(orders):
        coefficients[:, n] = np.einsum("ij,ij->i", values, current)
        # recurrence of the orthonormal Hermite polynomials
        previous, current = current, (u * current - math.sqrt(n) * previous) / math.sqrt(n + 1)
    return coefficients


def _orders_for(rho: float) -> int:
    """Terms after which rho^n has fallen below 1e-9."""
    if rho <= 0.0:
        return 2
    return min(_ORDERS, 2 + math.ceil(math.log(1e-9) / math.log(rho))) if rho < 1 else _ORDERS


def _one_sided(
    act: Activation, mean_a: np.ndarray, scale_a: np.ndarray, mean_b: np.ndarray, scale_b: np.ndarray, rho: np.ndarray
) -> dict[str, np.ndarray]:
    """Every expectation that depends on b only through its first two moments given a."""
    u, w = _nodes(mean_a, scale_a)
    a = mean_a[:, None] + scale_a[:, None] * u
    b1 = mean_b[:, None] + (rho * scale_b)[:, None] * u  # E[b | a]
    b2 = b1 * b1 + (scale_b**2 * (1 - rho) * (1 + rho))[:, None]  # E[b^2 | a]
    s, s_c = _apply(act, a), _apply(act, RESCALE * a)

    def expect(f: np.ndarray) -> np.ndarray:
        return np.einsum("ij,ij->i", f, w)

    return {
        "gg": expect(s * s * b2),
        "gb": expect(s * b2),
        "g_ab": expect(s * a * b2),
        "ab_b": expect(a * b2),
        "ab_ab": expect(a * a * b2),
        "bb": expect(b2),
        "cc": expect(s_c * s_c * b2) / RESCALE**2,
        "gc": expect(s * s_c * b2) / RESCALE,
        "hh": expect((a * s) ** 2),
    }


def _mehler(c_a: np.ndarray, c_b: np.ndarray, rho: np.ndarray, hh_a: np.ndarray, hh_b: np.ndarray) -> np.ndarray:
    """E[h(a) h(b)] from the branches' Hermite coefficients [neuron, order] and E[h^2].

    The truncated rest is bounded by the energy left over, with equality at rho = 1 in a symmetric neuron.
    """
    orders = c_a.shape[1]
    total = np.einsum("ij,ij,ij->i", rho[:, None] ** np.arange(orders), c_a, c_b)
    left = [np.maximum(hh - np.einsum("ij,ij->i", c, c), 0.0) for hh, c in ((hh_a, c_a), (hh_b, c_b))]
    return total + np.where(rho > 0, np.abs(rho) ** orders, 0.0) * np.sqrt(left[0] * left[1])


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, numerator / denominator, np.nan)


def _assemble(m: dict, gg_exchanged: np.ndarray, g_exchanged: np.ndarray) -> dict[str, np.ndarray]:
    """The measures from their expectations."""
    exchange_energy = m["gg"] + gg_exchanged
    scaling_energy = m["gg"] + m["cc"]
    linear = _ratio(m["gb"] ** 2, m["bb"] * m["gg"])
    cross, beyond = _beyond_linear(m)
    adds = beyond > 1e-12 * m["ab_ab"]  # with a constant a nothing is left of ab, and the product adds nothing
    bilinear = np.where(adds, _ratio(cross**2, np.where(adds, beyond, 1.0) * m["gg"]), 0.0 * linear)
    linear = np.clip(linear, 0.0, 1.0)
    bilinear = np.clip(bilinear, 0.0, 1.0 - linear)
    return {
        "exchange_asymmetry": np.clip(_ratio(exchange_energy - 2 * g_exchanged, 2 * exchange_energy), 0.0, 1.0),
        "scaling_asymmetry": np.clip(_ratio(scaling_energy - 2 * m["gc"], 2 * scaling_energy), 0.0, 1.0),
        "linear_share": linear,
        "bilinear_share": bilinear,
        "residual_share": 1.0 - linear - bilinear,
        "energy": m["gg"],
    }


def _per_neuron(*parts: Array | float) -> list[Array]:
    """The arguments, broadcast, as copies of one axis."""
    return [np.array(part, dtype=float).ravel() for part in np.broadcast_arrays(*parts)]


def gaussian_quadrature(
    act: Activation | str,
    query_scale: Array,
    key_scale: Array,
    rho: Array,
    query_mean: Array | float = 0.0,
    key_mean: Array | float = 0.0,
) -> dict[str, Array]:
    """The Gaussian measures by numerical integration, neuron by neuron, with biases.

    Args:
        act: the gate.
        query_scale, key_scale: standard deviations |q|, |k| of a and b, >= 0; with scale 0 a mean must not be 0.
        rho: their correlation cos(q, k), in [-1, 1]; the canonical gauge is taken here.
        query_mean, key_mean: their means, i.e. the biases.

    Returns:
        The measures of `GAUSSIAN_MEASURES`, each [neuron], and `energy` = E[(S(a) b)^2] for b as given
        (before the gauge). Absolute error below 1e-6, for exchange with biases and |rho| beyond 0.99 below 1e-5
        (tanh and sigmoid 3e-5), where the remainder of the series is bounded and not computed; float64.
    """
    act = activation(act)
    scale_a, scale_b, rho, mean_a, mean_b = _per_neuron(query_scale, key_scale, rho, query_mean, key_mean)
    rms_a, rms_b = np.hypot(mean_a, scale_a), np.hypot(mean_b, scale_b)
    # a branch that is constant is one that hardly varies
    scale_a, scale_b = np.maximum(scale_a, 1e-9 * rms_a), np.maximum(scale_b, 1e-9 * rms_b)
    gauge = rms_a / rms_b * np.where(rho * scale_a * scale_b + mean_a * mean_b < 0, -1.0, 1.0)
    signed_rho, mean_b, scale_b = rho * np.sign(gauge), mean_b * gauge, scale_b * np.abs(gauge)
    # A negative correlation is left when the means decide the sign: the series alternates, nothing else changes.
    order = np.argsort(np.abs(signed_rho), kind="stable")
    out: dict[str, np.ndarray] = {name: np.empty(len(rho)) for name in (*GAUSSIAN_MEASURES, "energy")}
    for start in range(0, len(order), _AT_ONCE):
        pick, chunk = order[start : start + _AT_ONCE], start // _CHUNK * _CHUNK
        a, b, r = (mean_a[pick], scale_a[pick]), (mean_b[pick], scale_b[pick]), signed_rho[pick]
        forward, backward = _one_sided(act, *a, *b, r), _one_sided(act, *b, *a, r)
        orders = _orders_for(float(np.abs(signed_rho[order[chunk : chunk + _CHUNK]]).max()))
        c_a, c_b = _hermite(act, *a, orders), _hermite(act, *b, orders)
        product = _mehler(c_a, c_b, r, forward["hh"], backward["hh"])
        for name, values in _assemble(forward, backward["gg"], product).items():
            out[name][pick] = values
    out["energy"] = out["energy"] / gauge**2
    return out


def bilinear_coefficient(
    act: Activation | str,
    query_scale: Array,
    key_scale: Array,
    rho: Array,
    query_mean: Array | float = 0.0,
    key_mean: Array | float = 0.0,
) -> Array:
    """The coefficient of ab in the projection of S(a) b on b and then ab: arguments as in `gaussian_quadrature`.

    E[S(a) b p] / E[p^2] with p = ab less its part along b. It does not depend on the scale or sign of b.

    Returns:
        [neuron] float64; 0 where ab adds nothing (a branch is zero, or a is constant), NaN where an argument is or is
        beyond 1e60, where the fourth moments leave float64.
    """
    act = activation(act)
    scale_a, scale_b, rho, mean_a, mean_b = _per_neuron(query_scale, key_scale, rho, query_mean, key_mean)
    rms_a, rms_b = np.hypot(mean_a, scale_a), np.hypot(mean_b, scale_b)
    out = np.where((rms_a < 1e60) & np.isfinite(rms_b + rho), 0.0, np.nan)
    live = np.flatnonzero((out == 0) & (scale_a > 1e-60) & (rms_b > 0))
    for start in range(0, len(live), _AT_ONCE):
        pick = live[start : start + _AT_ONCE]
        unit = rms_b[pick]
        m = _one_sided(act, mean_a[pick], scale_a[pick], mean_b[pick] / unit, scale_b[pick] / unit, rho[pick])
        cross, beyond = _beyond_linear(m)
        adds = beyond > 1e-12 * m["ab_ab"]
        out[pick] = np.where(adds, cross / np.where(adds, beyond, 1.0), 0.0)
    return out


def _beyond_linear(m: dict) -> tuple[np.ndarray, np.ndarray]:
    """E[g p] and E[p^2] of p, what ab has besides its part along b."""
    bb = np.maximum(m["bb"], np.finfo(float).tiny)
    return m["g_ab"] - m["gb"] * m["ab_b"] / bb, m["ab_ab"] - m["ab_b"] ** 2 / bb


def _chebyshev_nodes(low: float, high: float, count: int) -> np.ndarray:
    return (low + high) / 2 + (high - low) / 2 * np.cos(np.pi * (np.arange(count) + 0.5) / count)


def _chebyshev_basis(x: np.ndarray, low: float, high: float, count: int) -> np.ndarray:
    """Chebyshev polynomials of the first kind on [low, high]: [len(x), count]."""
    return np.polynomial.chebyshev.chebvander((2 * x - low - high) / (high - low), count - 1)


class GaussianTable:
    """The Gaussian measures of one activation as a function of (scale, rho), by interpolation.

    Positively homogeneous activations do not depend on the scale: their table has one row. For the others,
    scales beyond the table take the activation's own limits (see `Activation.small` and `.large`).
    """

    def __init__(self, act: Activation) -> None:
        self.activation = act
        log_scale = np.zeros(1) if act.degree is not None else _chebyshev_nodes(*_LOG_SCALE, _SCALE_NODES)
        angle = _chebyshev_nodes(0.0, math.pi / 2, _ANGLE_NODES)
        self._scale_count = len(log_scale)
        step = _AT_ONCE // len(angle)
        parts = [self._values(log_scale[start : start + step], angle) for start in range(0, len(log_scale), step)]
        values = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        with one_blas_thread():
            self._coefficients = {name: self._fit(grid, log_scale, angle) for name, grid in values.items()}

    def _values(self, log_scale: np.ndarray, angle: np.ndarray) -> dict[str, np.ndarray]:
        """What is interpolated, at all angles of the first scale, then of the next."""
        act = self.activation
        scale, rho = (grid.ravel() for grid in np.meshgrid(np.exp(log_scale), np.cos(angle), indexing="ij"))
        zero = np.zeros_like(scale)
        moments = _one_sided(act, zero, scale, zero, scale, rho)
        # h's coefficients depend on the scale alone: once per scale, then shared by all angles
        coefficients = _hermite(act, np.zeros(len(log_scale)), np.exp(log_scale), _ORDERS).repeat(len(angle), axis=0)
        product = _mehler(coefficients, coefficients, rho, moments["hh"], moments["hh"])
        values = _assemble(moments, moments["gg"], product)
        values["energy"] = np.log(values["energy"] / scale**2)  # of S(a) times a key of unit rms: never 0
        return values

    def _fit(self, values: np.ndarray, log_scale: np.ndarray, angle: np.ndarray) -> np.ndarray:
        grid = values.reshape(len(log_scale), len(angle))
        by_angle = np.linalg.solve(_chebyshev_basis(angle, 0.0, math.pi / 2, len(angle)), grid.T).T
        return np.linalg.solve(_chebyshev_basis(log_scale, *_LOG_SCALE, len(log_scale)), by_angle)

    def __call__(self, scale: Array, rho: Array) -> dict[str, Array]:
        """The measures, and `energy` = E[(S(a) w)^2], w standard normal with correlation rho to a.

        Args:
            scale: |q| >= 0, infinity allowed. Missing stays missing.
            rho: |cos(q, k)| in [0, 1].
        """
        act = self.activation
        scale, rho = np.asarray(scale, dtype=float), np.asarray(rho, dtype=float)
        with one_blas_thread():
            out = self._interpolate(scale, rho)
        if act.degree is None:
            low, high = (math.exp(end) for end in _LOG_SCALE)
            for end, beyond in ((act.small, scale < low), (act.large, scale > high)):
                if end is not None and beyond.any():
                    limit = gaussian_table(end.activation)(scale[beyond], rho[beyond])
                    limit["energy"] = limit["energy"] * end.coefficient**2
                    for name, values in limit.items():
                        out[name][beyond] = values
        return out

    def _interpolate(self, scale: np.ndarray, rho: np.ndarray) -> dict[str, np.ndarray]:
        act = self.activation
        with np.errstate(divide="ignore"):
            log_scale = np.log(scale)
        inside = np.zeros_like(scale) if act.degree is not None else np.clip(log_scale, *_LOG_SCALE)
        out = {name: np.empty_like(scale) for name in self._coefficients}
        for start in range(0, len(scale), _TABLE_CHUNK):
            part = slice(start, start + _TABLE_CHUNK)
            scales = _chebyshev_basis(inside[part], *_LOG_SCALE, self._scale_count)
            angles = _chebyshev_basis(np.arccos(rho[part]), 0.0, math.pi / 2, _ANGLE_NODES)
            for name, table in self._coefficients.items():
                out[name][part] = np.einsum("ij,ij->i", scales @ table, angles)
        with np.errstate(over="ignore", invalid="ignore"):
            growth = 0.0 if act.degree in (None, 0.0) else 2 * act.degree * log_scale
            out["energy"] = np.exp(out["energy"] + growth)
        for name in GAUSSIAN_MEASURES:
            out[name] = np.clip(out[name], 0.0, 1.0)
        out["exchange_asymmetry"][rho == 1] = 0.0  # both branches are the same
        if act.linear:  # the bilinear neuron itself, exactly
            out |= {name: np.where(np.isnan(rho), np.nan, 0.0) for name in GAUSSIAN_MEASURES}
            out["bilinear_share"] = out["bilinear_share"] + 1.0
        elif act.degree == 1:  # inverse scaling is an exact symmetry
            out["scaling_asymmetry"] = out["scaling_asymmetry"] * 0.0
        missing = np.isnan(scale)
        for values in out.values():
            values[missing] = np.nan
        return out


def gaussian_table(act: Activation | str) -> GaussianTable:
    """The table of an activation, built once a process (a fraction of a second)."""
    return _table(activation(act))


@functools.cache
def _table(act: Activation) -> GaussianTable:
    return GaussianTable(act)


def gaussian_measures(act: Activation | str, scale: object, rho: object) -> pd.DataFrame:
    """The Gaussian measures of neurons given by scale and correlation alone.

    Args:
        act: the gate, by any of its names.
        scale: s = |q|, the standard deviation of the gate's pre-activation; scalar or [neuron], 0 to infinity.
        rho: |cos(q, k)|; scalar or [neuron], in [0, 1]. Broadcast against `scale`.

    Returns:
        Frame with columns scale, rho and the measures of `GAUSSIAN_MEASURES`; absolute error below 1e-5.
        At scale 0 and infinity the exact limits: for SiLU and GELU the bilinear neuron and ReLU's.

    Raises:
        UnknownActivation, BadOption: a scale below 0 or a rho outside [0, 1].

    >>> gaussian_measures("silu", 1.0, 0.0).round(6).loc[0, "exchange_asymmetry"].item()
    0.148655
    """
    import pandas as pd

    act = activation(act)
    try:
        scale, rho = (part.ravel() for part in np.broadcast_arrays(_floats(scale), _floats(rho)))
    except (TypeError, ValueError) as error:
        raise BadOption(
            f"scale and rho must be numbers of shapes that go together ({error})",
            hint="Give numbers, or arrays that broadcast against each other",
        ) from None
    if (scale < 0).any():
        raise BadOption(f"scale is {np.nanmin(scale)}, but it is a standard deviation", hint="Give values >= 0")
    if ((rho < 0) | (rho > 1)).any():
        raise BadOption(
            "rho must lie in [0, 1]",
            hint="It is |cos(q, k)|: the sign is a choice of coordinates, fixed by the canonical gauge",
        )
    values = gaussian_table(act)(scale, rho)
    return pd.DataFrame({"scale": scale, "rho": rho} | {name: values[name] for name in GAUSSIAN_MEASURES})


def _floats(values: object) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().double().numpy()
    return np.array(values, dtype=float)
