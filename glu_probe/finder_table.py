"""What can be found: the finders of `glu_probe.find` by name, and what each asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finder:
    """What is said of a finder.

    Attributes:
        needs: "numbers" if a report is enough, "factors" if a model must be read.
        threshold: its default, None if it takes none.
        rule: what it finds, in words to which the threshold is the last.
    """

    needs: Literal["numbers", "factors"]
    threshold: float | None
    rule: str

    def meaning(self, threshold: float | None = None) -> str:
        """What it finds, with the threshold: its default, unless another one is given."""
        used = self.threshold if threshold is None else threshold
        return self.rule if used is None else f"{self.rule} {used:g}"


FINDERS: dict[str, Finder] = {
    "near_bilinear": Finder("numbers", 0.9, "gate in its linear range: bilinear_share at least"),
    "aligned_branches": Finder("numbers", 0.8, "quadratic amplifiers: |cos(q, k)| at least"),
    "strengthening": Finder(
        "numbers", 0.5, "the strengthening classes, which write along what the up branch reads: cos(k, v) above"
    ),
    "weakening": Finder(
        "numbers", 0.5, "the weakening classes, which write against what the up branch reads: -cos(k, v) above"
    ),
    "dead": Finder("numbers", 0.0, "write nothing: |q||k||v| over the layer's median at most"),
    "padded": Finder("numbers", None, "padding: all three rows zero"),
    "duplicates": Finder("factors", None, "pairs that act as one neuron: same gate, and same up branch up to a factor"),
    "near_duplicates": Finder("factors", 0.8, "pairs alike in q, k and v: cosine of each at least"),
    "exchange_partners": Finder(
        "factors", 0.5, "pairs whose gates read each other's up branch: both |cosines| at least"
    ),
}
