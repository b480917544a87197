"""The command that lists what there is: `ls`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from .application import app
from .options import AsJson
from .printing import echo, print_json


class Listing(str, Enum):
    """What `ls` can list."""

    measures = "measures"
    families = "families"
    interventions = "interventions"
    finders = "finders"
    samples = "samples"


@app.command(epilog="Example: glu-probe ls measures")
def ls(what: Annotated[Listing, typer.Argument(help="What to list.")], as_json: AsJson = False) -> None:
    """List the measures, the families, the interventions of `causal`, what `find` finds, or the models of `demo`."""
    rows, text = {
        Listing.measures: (_measures, _measures_text),
        Listing.families: (_families, _families_text),
        Listing.interventions: (_interventions, _interventions_text),
        Listing.finders: (_finders, _finders_text),
        Listing.samples: (_samples, _samples_text),
    }[what]
    if as_json:
        print_json(rows())
    else:
        echo(text(rows()))


def _interventions() -> list[dict[str, Any]]:
    from ..text.interventions import INTERVENTIONS

    return [{"name": name, "gauge": one.gauge, "meaning": one.meaning} for name, one in INTERVENTIONS.items()]


def _interventions_text(rows: list[dict[str, Any]]) -> str:
    return _columns((row["name"], row["gauge"], row["meaning"]) for row in rows)


def _samples() -> list[dict[str, Any]]:
    from ..sample_models import SAMPLES, cache_directory, is_cached

    return [
        {"name": name, "model": one.name, "megabytes": one.megabytes,
         "path": str(cache_directory() / one.file) if is_cached(one) else None}
        for name, one in SAMPLES.items()
    ]  # fmt: skip


def _samples_text(rows: list[dict[str, Any]]) -> str:
    return _columns(
        (row["name"], row["model"], f"{row['megabytes']} MB",
         row["path"] or f"not fetched: `glu-probe demo --model {row['name']}` does")
        for row in rows
    )  # fmt: skip


def _finders() -> list[dict[str, Any]]:
    from ..finder_table import FINDERS

    return [
        {"name": name, "needs": finder.needs, "threshold": finder.threshold, "meaning": finder.meaning()}
        for name, finder in FINDERS.items()
    ]


def _finders_text(rows: list[dict[str, Any]]) -> str:
    return _columns((row["name"], row["needs"], row["meaning"]) for row in rows)


def _measures() -> list[dict[str, Any]]:
    from ..measures.registry import MEASURES, TEXT_MEASURES

    return [
        {"name": m.name, "level": m.level, "range": m.range, "invariant": list(m.invariant), "needs": m.needs,
         "meaning": m.meaning, "reference": m.reference}
        for m in (*MEASURES.values(), *TEXT_MEASURES.values())
    ]  # fmt: skip


def _measures_text(rows: list[dict[str, Any]]) -> str:
    from ..measures.registry import TEXT_SUFFIXES

    gauge = {True: "", False: "  (not gauge-invariant)"}
    table = _columns((row["name"], row["range"], row["meaning"] + gauge["gauge" in row["invariant"]]) for row in rows)
    return f"{table}\n\nColumns of `glu-probe activations` end so:\n{_columns(TEXT_SUFFIXES.items())}"


def _columns(rows: Iterable[Sequence[str]]) -> str:
    """Lines of cells below each other, all but the last as wide as the widest."""
    rows = list(rows)
    widths = [max(map(len, cells)) for cells in list(zip(*rows, strict=True))[:-1]]
    return "\n".join(
        " ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


def _families() -> list[dict[str, Any]]:
    from ..checkpoint.families import FAMILIES

    return [
        {"names": list(f.names), "gguf": list(f.gguf),
         "layout": ", ".join(dict.fromkeys(p.fused or "separate" for p in f.layouts)),
         "tensors": list(dict.fromkeys(name for p in f.layouts for name in p.names)),
         "activation": list(f.activation.keys), "norm": f.norm.words if f.norm else "none in front"}
        for f in FAMILIES
    ]  # fmt: skip


def _families_text(rows: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"{', '.join(row['names'])}\n    {row['layout']}: {', '.join(row['tensors'])}; {row['norm']}" for row in rows
    )
