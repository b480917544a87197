"""Words that a page uses: where it is read, there may be no other file. docs/glossary.md has these, and more."""

from __future__ import annotations

from ..measures.io_classes import IO_CONDITIONS
from .html import Table

WORDS: dict[str, str] = {
    "energy": "Mean square over the input: of a neuron, that of its coefficient g = S(q·x) (k·x); of its output, that times |v|².",
    "isotropic": "Alike in all directions: isotropic Gaussian input has independent coordinates of variance 1, isotropic rows are "
    "random directions.",
    "anisotropy": "Rows of real layers favour some directions, so that two of them taken at random are more alike than isotropic ones.",
    "mismatched": "The gate row of one neuron with the up row of another one of the layer: what its anisotropy alone gives.",
    "effect": "How far the mean lies above that of mismatched rows, in their standard deviations.",
    "weighted": "Of a mean over neurons: by their output energy, so that it speaks of what the layer writes.",
    "robust standard deviation": "1.48 times the median distance from the median: of a normal distribution its standard deviation, and "
    "not moved by the few layers that stand apart.",
    "canonical gauge": "Scaling k up and v down, or flipping both signs, changes nothing that a neuron does. Exchange is taken where both "
    "branches have the same root mean square and E[(q·x)(k·x)] ≥ 0.",
    "stable rank": "(Frobenius norm / spectral norm)²: over how many directions a matrix spreads.",
    "flag": "What is odd about a neuron, so that its numbers are missing or doubtful: a row of zeros, padding, values that are not finite, "
    "or the same weights as another one.",
}


def class_table() -> Table:
    """The input-output classes: which cosines make them, and what they mean."""
    return Table(
        "classes",
        "Input-output classes of Gerstner & Schuetze (arXiv 2505.17936) at threshold ½, after k and v were flipped together so that "
        "cos(q, k) ≥ 0. The first row that fits is the class.",
        ("class", "cos(k, v)", "cos(q, v)", "cos(q, k)", "meaning"),
        [(name, *cells) for name, cells in IO_CONDITIONS.items()],
        words=True,
    )
