"""Input-output classes of gated neurons after Gerstner & Schuetze (arXiv 2505.17936).

Whether a neuron writes back what it reads: from cos(k, v), cos(q, v) and cos(q, k), after the sign of k has been
chosen so that cos(q, k) >= 0. The definitions are theirs; threshold 0.5, strict, is their default.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

IO_CLASSES = (
    "strengthening",
    "atypical strengthening",
    "conditional strengthening",
    "atypical conditional strengthening",
    "proportional change",
    "atypical proportional change",
    "orthogonal output",
    "weakening",
    "atypical weakening",
    "conditional weakening",
    "atypical conditional weakening",
)
# What each takes of cos(k, v), cos(q, v) and cos(q, k), after the sign fix, and what it means. The first that fits is the class.
IO_CONDITIONS: dict[str, tuple[str, str, str, str]] = {
    "strengthening": ("> ½", "> ½", "> ½", "both branches read one direction, and it writes along it"),
    "atypical strengthening": ("> ½", "|·| > ½", "", "as strengthening by cos(k, v), but the three do not lie along one direction"),
    "conditional strengthening":
        ("> ½", "|·| ≤ ½", "≤ ½", "writes along what the up branch reads, on a condition that the gate reads elsewhere"),
    "atypical conditional strengthening": ("> ½", "|·| ≤ ½", "> ½", "the same, though gate and up read alike"),
    "proportional change":
        ("|·| ≤ ½", "|·| > ½", "≤ ½", "writes along or against what the gate reads, in proportion to what the up branch reads elsewhere"),
    "atypical proportional change": ("|·| ≤ ½", "|·| > ½", "> ½", "the same, though gate and up read alike"),
    "orthogonal output": ("|·| ≤ ½", "|·| ≤ ½", "", "writes something else than either branch reads"),
    "weakening": ("< −½", "< −½", "> ½", "both branches read one direction, and it writes against it"),
    "atypical weakening": ("< −½", "|·| > ½", "", "as weakening by cos(k, v), but the three do not lie along one direction"),
    "conditional weakening":
        ("< −½", "|·| ≤ ½", "≤ ½", "writes against what the up branch reads, on a condition that the gate reads elsewhere"),
    "atypical conditional weakening": ("< −½", "|·| ≤ ½", "> ½", "the same, though gate and up read alike"),
}  # fmt: skip
IO_THRESHOLD = 0.5
IO_SWEEP = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)

Array = Float[np.ndarray, " neuron"]


def io_class(abs_cos_qk: Array, cos_kv: Array, cos_qv: Array, threshold: float = IO_THRESHOLD) -> np.ndarray:
    """Class index into `IO_CLASSES` per neuron, -1 where a cosine is missing.

    Args:
        abs_cos_qk: |cos(q, k)|, i.e. cos(q, k) after the sign fix.
        cos_kv: cos(k, v). Its sign, too, is that after the fix: flipping k flips v.
        cos_qv: cos(q, v) after the sign fix, i.e. sign(cos(q, k)) cos(q, v).
        threshold: what counts as aligned, in (0, 1).
    """
    aligned = abs_cos_qk > threshold
    reads_gate = np.abs(cos_qv) > threshold
    conditions = {
        "strengthening": (cos_kv > threshold) & reads_gate & aligned & (cos_qv > threshold),
        "atypical strengthening": (cos_kv > threshold) & reads_gate,
        "conditional strengthening": (cos_kv > threshold) & ~aligned,
        "atypical conditional strengthening": cos_kv > threshold,
        "weakening": (cos_kv < -threshold) & reads_gate & aligned & (cos_qv < -threshold),
        "atypical weakening": (cos_kv < -threshold) & reads_gate,
        "conditional weakening": (cos_kv < -threshold) & ~aligned,
        "atypical conditional weakening": cos_kv < -threshold,
        "proportional change": reads_gate & ~aligned,
        "atypical proportional change": reads_gate,
        "orthogonal output": np.ones_like(aligned),
    }
    index = np.select(list(conditions.values()), [IO_CLASSES.index(name) for name in conditions])
    known = np.isfinite(abs_cos_qk) & np.isfinite(cos_kv) & np.isfinite(cos_qv)
    return np.where(known, index, -1)
