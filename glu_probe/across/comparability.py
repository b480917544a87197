"""What stands between two models' numbers: readings, methods and versions that differ, and measures that say nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..measures.registry import MEASURES, TEXT_MEASURES, Measure
from .members import Member

_OF_THE_RUN = ("device", "dtype", "largest_disagreement", "mlps")
_WRITING = (
    "value_gain", "cos_kv", "abs_cos_qv", "cos_qv", "output_energy", "outlier_risk", "io_class", "value_norm",
    "tensor_asymmetry", "exchange_asymmetry_output", "scaling_asymmetry_output", "output_energy_top_share",
)  # fmt: skip


@dataclass(frozen=True)
class Obstacle:
    """One difference in how two models were read or measured.

    Attributes:
        what: in a few words, for a table.
        sentence: for a list of notes.
        touches: which measures.
        forbids: whether their difference means nothing; else it is to be read with this in mind.
    """

    what: str
    sentence: str
    touches: tuple[str, ...]
    forbids: bool


def measure_of(name: str) -> Measure:
    """The registry's entry of a column."""
    return MEASURES[name] if name in MEASURES else TEXT_MEASURES[name]


def gauge_dependent(name: str) -> bool:
    """Whether a choice of coordinates changes the measure, so that a difference of two models says nothing."""
    return "gauge" not in measure_of(name).invariant


def obstacles(base: Member, other: Member) -> list[Obstacle]:
    """Everything that makes numbers of the two incomparable, or less than fully comparable."""
    pair = f"{base.name} and {other.name}"
    found = [
        *_readings(base, other, pair),
        *_methods(base.facts, other.facts, pair),
        *_versions(base.facts, other.facts, pair),
    ]
    return [*found, *_texts(base.facts, other.facts, pair)]


def _readings(base: Member, other: Member, pair: str) -> list[Obstacle]:
    out = []
    towers = [each.facts.get("towers", {}) for each in (base, other)]
    for tower in (tower for tower in towers[0] if tower in towers[1]):
        one, two = (facts[tower] for facts in towers)
        of = "" if tower == "text" else f" of {tower}"
        if one.get("activation") != two.get("activation"):
            names = f"{one.get('activation') or 'unknown'} and {two.get('activation') or 'unknown'}"
            function = tuple(name for name, measure in MEASURES.items() if measure.needs == "function")
            out.append(Obstacle(
                f"other activation ({names})",
                f"{pair}{of} have different activations ({names}): measures of a neuron's function compare functions, and gate "
                "scales are in units of different activations", (*function, "query_norm", "outlier_risk"), False,
            ))  # fmt: skip
        folded = [
            "folded" in str(facts.get("norm")) and "not folded" not in str(facts.get("norm")) for facts in (one, two)
        ]
        if folded[0] != folded[1]:
            without = pair.split(" and ")[folded.index(False)]
            every = tuple(name for name in MEASURES if not name.startswith("down_") and name != "value_norm")
            out.append(Obstacle(
                f"norm not folded in {without}",
                f"the norm in front of the MLP is folded into gate and up of one of {pair}{of} and not of the other ({one.get('norm')}; "
                f"{two.get('norm')}): their numbers cannot be compared", every, True,
            ))  # fmt: skip
        after = [str(facts.get("post_norm") or "") for facts in (one, two)]
        if ("not folded" in after[0]) != ("not folded" in after[1]) and all(after):
            writes = (*_WRITING, *(name for name in MEASURES if name.startswith("down_")))
            out.append(Obstacle(
                "norm behind the MLP folded in one only",
                f"the norm behind the MLP is folded into the value of one of {pair}{of} and not of the other: what concerns "
                "value cannot be compared", writes, True,
            ))  # fmt: skip
    return out


def _methods(one: dict[str, Any], two: dict[str, Any], pair: str) -> list[Obstacle]:
    out = []
    methods = [facts.get("methods", {}) for facts in (one, two)]
    spectra = tuple(name for name in MEASURES if name.startswith(("gate_", "up_", "down_", "branch_overlap")))
    for name, touched in (("spectra", spectra), ("tensor_asymmetry", ("tensor_asymmetry",))):
        ways = [", ".join(each.get(name, [])) for each in methods]
        if ways[0] != ways[1] and all(ways):
            out.append(Obstacle(
                f"{ways[0]} and {ways[1]}",
                f"{name.replace('_', ' ')} of {pair} were found in different ways ({ways[0]}; {ways[1]})", touched, False,
            ))  # fmt: skip
    drawn = [(facts.get("samples") or (), facts.get("seed")) for facts in (one, two)]
    if drawn[0] != drawn[1] and all(samples for samples, _ in drawn):
        words = " and ".join(f"{', '.join(map(str, samples))} (seed {seed})" for samples, seed in drawn)
        out.append(Obstacle(
            "other samples", f"output measures of {pair} come from different Gaussian samples: {words}",
            ("exchange_asymmetry_output", "scaling_asymmetry_output"), False,
        ))  # fmt: skip
    return out


def _versions(one: dict[str, Any], two: dict[str, Any], pair: str) -> list[Obstacle]:
    versions = [facts.get("software", {}).get("glu-probe") for facts in (one, two)]
    if versions[0] == versions[1]:
        return []
    words = " and ".join(str(version or "unknown") for version in versions)
    return [
        Obstacle(
            "other glu-probe version",
            f"{pair} were measured by different versions of glu-probe ({words})",
            tuple(MEASURES),
            False,
        )
    ]


def _texts(one: dict[str, Any], two: dict[str, Any], pair: str) -> list[Obstacle]:
    texts = [facts.get("text") or {} for facts in (one, two)]
    if not all(texts):
        return []
    said = [{key: value for key, value in text.items() if key not in _OF_THE_RUN} for text in texts]
    if said[0] == said[1]:
        return []
    return [
        Obstacle(
            "another text",
            f"{pair} were run on different texts, or cut it into different tokens",
            tuple(TEXT_MEASURES),
            False,
        )
    ]
