"""What a run took for granted, in words: what was read, as what, and how exactly it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..phrases import counted

_METHODS = {"spectra": "Spectra", "tensor_asymmetry": "Tensor asymmetry"}
_GIVEN = ("family", "fused_layout", "activation", "expert_layout")


def assumptions(provenance: Mapping[str, Any], *, functional: bool = True) -> list[tuple[str, str]]:
    """Terms and what is to be said of them.

    Args:
        provenance: of a report.
        functional: whether measures of the neurons' function are there.
    """
    towers = provenance.get("towers", {})
    found = [("Read from", _source(provenance))]
    for tower, facts in towers.items():
        found += [(term if len(towers) == 1 else f"{term}, {tower}", words) for term, words in _stack(facts)]
    found += [(_METHODS.get(name, name), "; ".join(ways)) for name, ways in provenance.get("methods", {}).items()]
    found += [*(_sampled(provenance) if functional else ()), *_text(provenance)]
    given = {name: value for name, value in provenance.get("options", {}).items() if value and name in _GIVEN}
    if given:
        found.append(("Given as options", ", ".join(f"{name} = {value}" for name, value in given.items())))
    return [(term, words) for term, words in found if words]


def _source(provenance: Mapping[str, Any]) -> str:
    files = provenance.get("files", [])
    size = sum(file.get("bytes", 0) for file in files)
    named = [files[0]["name"] if len(files) == 1 else f"{len(files)} files", f"{size / 1e6:,.1f} MB"] if files else []
    found = [provenance.get("format"), *named]
    for key in ("revision", "commit"):
        if provenance.get(key):
            found.append(f"{key} {provenance[key]}")
    return ", ".join(filter(None, found))


def _stack(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    layout = f", gate and up {', '.join(facts['layout'])}" if facts.get("layout") else ""
    dtypes = f", stored as {', '.join(facts['dtypes'])}" if facts.get("dtypes") else ""
    yield (
        "Layout",
        f"{facts['gated_mlps']:,} gated MLPs, family {facts['family'] or 'not in the table'}{layout}{dtypes}",
    )
    yield "Activation", f"{facts['activation'] or 'unknown'} ({facts['activation_source']})"
    yield "Norm before the MLP", facts["norm"]
    yield "Norm behind the MLP", facts.get("post_norm") or ""


def _sampled(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield (
        "Measures of neurons",
        "on isotropic Gaussian input of the scale that the norm gives, by integrals, not by samples",
    )
    samples = provenance.get("samples", [])
    if samples:
        counts = f"{min(samples):,}" + (f" to {max(samples):,}" if max(samples) > min(samples) else "")
        yield "Measures of outputs", f"sampled: {counts} Gaussian inputs a layer, seed {provenance.get('seed')}"


def _text(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    text = provenance.get("text")
    if text:
        first = "with" if text.get("first_position") else "without"
        yield (
            "Text",
            f"{text['tokens']:,} tokens of {', '.join(text['document_names'][:3])}"
            f"{' and others' if len(text['document_names']) > 3 else ''} in {counted(text['sequences'], 'sequence')} of "
            f"{text['sequence_length']}, {first} the first position, in {text['dtype']}",
        )


def provenance_line(provenance: Mapping[str, Any], version: str) -> str:
    """Where numbers come from, in one line."""
    terms = dict(assumptions(provenance))
    kept = [name for name in terms if name.startswith(("Read from", "Activation", "Norm before", *_METHODS.values()))]
    parts = [f"{name[0].lower()}{name[1:]}: {terms[name]}" for name in kept]
    return "; ".join([f"{provenance.get('model', 'a model')}, by glu-probe {version}", *parts]) + "."
