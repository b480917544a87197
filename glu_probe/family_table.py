"""The table of families for people, written from the table itself.

`python -m glu_probe.family_table README.md` renews it there; a test fails where it is not current.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from .checkpoint.families import FAMILIES
from .checkpoint.family import FUSED_GATE_UP, SEPARATE, ActivationRule, Family, Norm, Projections
from .checkpoint.known_families import PLAIN

COMMAND = "python -m glu_probe.family_table README.md"
START, END = f"<!-- families: written by `{COMMAND}` -->", "<!-- /families -->"
_HEADER = ("model types", "GGUF", "tensors", "activation", "norm that the MLP reads", "what is missing, and why")


def markdown() -> str:
    """The table, a row a family, and what is known not to be gated."""
    rows = [
        (
            ", ".join(family.names),
            _gguf(family),
            "; ".join(_tensors(projections) for projections in family.layouts),
            _activation(family.activation),
            _norm(family),
            "; ".join(_missing(family)) or "-",
        )
        for family in FAMILIES
    ]
    lines = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in (_HEADER, ("---",) * len(_HEADER), *rows)
    ]
    return "\n".join(
        [
            "Tensors are given in the order gate, up, down. "
            f"*separate*: `{'`, `'.join(SEPARATE.names)}`. *fused*: `{FUSED_GATE_UP.gate}` ({_order(FUSED_GATE_UP)}), "
            f"`{FUSED_GATE_UP.down}`. Gain of a norm: the stored w unless it says 1 + w. A norm behind the MLP is folded "
            "into value only on request.",
            "",
            *lines,
            "",
            f"Known not to be gated, and refused as such: {', '.join(sorted(PLAIN))}.",
        ]
    )


def renewed(text: str) -> str:
    """A text with the table between its two marks.

    Raises:
        ValueError: the marks are not there.
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"the text has no {START} ... {END}")
    return f"{before}{START}\n{markdown()}\n{END}{after}"


def _gguf(family: Family) -> str:
    if not family.gguf:
        return "-"
    order = f" (`ffn_up` holds both, {family.gguf_fused.replace('-', ' ')})" if family.gguf_fused else ""
    return ", ".join(family.gguf) + order


def _tensors(projections: Projections) -> str:
    named = {SEPARATE.names: "separate", FUSED_GATE_UP.names: "fused"}.get(projections.names)
    parts = [_order(projections)] if projections.fused and (named is None or projections.fused != "gate-first") else []
    stored = {
        "columns": "stored [in, out]",
        "either": "stored either way round",
        "row-stacked": "experts below each other",
    }
    parts += [stored[projections.stored]] if projections.stored in stored else []
    words = named or ", ".join(f"`{name}`" for name in dict.fromkeys(projections.names))
    return f"{words} ({', '.join(parts)})" if parts else words


def _order(projections: Projections) -> str:
    orders = {"gate-first": "gate first", "up-first": "up first", "interleaved": "gate and up take turns"}
    return "" if projections.fused is None else orders[projections.fused]


def _activation(rule: ActivationRule) -> str:
    words = ", else ".join(f"`{key}`" for key in rule.keys)
    if rule.default is not None:
        default = rule.default if isinstance(rule.default, str) else rule.default.name
        words = f"{words}, else {default}" if words else f"{default}, whatever the config says"
    words += "".join(f"; {old} means {new}" for old, new in rule.renamed.items() if old.removeprefix("gated-") != new)
    return words + (f"; then {_sentence(rule.adjust)}" if rule.adjust else "")


def _norm(family: Family) -> str:
    words = _one_norm(family.norm) if family.norm else "none: it reads the residual stream"
    if family.norm_if_parallel:
        words += f"; with `{family.norm_if_parallel[0]}`, {_one_norm(family.norm_if_parallel[1])}"
    for place, there in family.places.items():
        words += f"; {place}: {_one_norm(there.norm) if there.norm else 'none'}"
    return words + (f"; behind: {_paths(family.post_norm)}" if family.post_norm else "")


def _one_norm(norm: Norm) -> str:
    kind = {"rms": "RMS", "layer": "LN"}[norm.kind]
    gain = {"plain": "", "offset": ", 1 + w", "none": ", no gain"}[norm.weight]
    bias = f", bias if `{norm.bias}`" if isinstance(norm.bias, str) else ", bias" if norm.bias else ""
    return f"{_paths(norm)} ({kind}{gain}{bias})"


def _paths(norm: Norm) -> str:
    return " or ".join(f"`{path.replace('{0}', 'N')}`" for path in norm.tensor.split("|"))


def _missing(family: Family) -> Iterator[str]:
    """Why measures of the neurons' function are missing, in whole or where the config says so."""
    if family.norm is None:
        yield "the scale of the input: no norm stands in front"
    if family.activation.adjust is not None:
        yield "measures of the function where the up branch is limited or shifted"
    if family.missing is None:
        return
    if inspect.getdoc(family.missing):
        yield _sentence(family.missing)
        return
    reasons = {group: family.missing({}, 0, group) for group in ("dense", "routed", "shared")}
    for reason in dict.fromkeys(filter(None, reasons.values())):
        groups = [group for group, why in reasons.items() if why == reason]
        yield reason if len(groups) == len(reasons) else f"{' and '.join(groups)}: {reason}"


def _sentence(function: Callable) -> str:
    """What a function's description says, as part of a sentence."""
    return (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")


def main() -> None:
    """Renew the table in the file that is named, or print it."""
    if len(sys.argv) < 2:
        print(markdown())
        return
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
