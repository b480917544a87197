"""The command that searches a model or a report for neurons of a kind: `find`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import BadOption
from ..finder_table import FINDERS
from .application import app
from .options import AsJson, Folding, Layers, spread
from .printing import echo, notes, number, print_json, progress, records

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 20


@app.command(epilog="Example: glu-probe find HuggingFaceTB/SmolLM2-135M exchange_partners --layers 0:8")
@spread
def find(
    source: Annotated[str, typer.Argument(metavar="MODEL|REPORT", help="A model, or the directory of a saved report.")],
    what: Annotated[str, typer.Argument(metavar="WHAT", help=f"One of {', '.join(FINDERS)}.")],
    *,
    layers: Layers = None,
    threshold: Annotated[
        float | None, typer.Option(help="What counts; `glu-probe ls finders` has the defaults.")
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help=f"Print so many; by default {_SHOWN}, and all of them with --json.")
    ] = None,
    opening: Folding,
    as_json: AsJson = False,
) -> None:
    """Find neurons of a kind, or pairs of them, the clearest first.

    duplicates, near_duplicates and exchange_partners compare every pair of neurons within an MLP and need the model;
    the others are quicker on a report. "null" is the best score that isotropic directions would give.
    """
    from .. import find as finders
    from ..checkpoint.checkpoint import Checkpoint
    from ..neuron_sources import opened
    from ..report import is_saved_report

    name = what.replace("-", "_")
    if name not in FINDERS:
        raise BadOption(f"there is nothing called {what!r} to find", hint=f"There are {', '.join(FINDERS)}")
    if threshold is not None and FINDERS[name].threshold is None:
        raise BadOption(f"{name} takes no threshold", hint="Leave out --threshold")
    if is_saved_report(source) and opening != Folding():
        raise BadOption(
            "options of how a model is read do not apply to a report",
            where=source,
            hint="Leave them out, or give the model",
        )
    within = opened(source) if is_saved_report(source) else opening.open(source)
    options = {} if threshold is None else {"threshold": threshold}
    label = within.name if isinstance(within, Checkpoint) else source
    found = getattr(finders, name)(within, layers=layers, progress=progress(label, unit="MLPs"), **options)
    used = FINDERS[name].threshold if threshold is None else threshold
    if as_json:
        rows = records(found if top is None else found.head(top), decimals=15)
        print_json({"source": source, "what": name, "threshold": used, "found": len(found), "neurons": rows})
        return
    if isinstance(within, Checkpoint):
        notes(within.notes)
    echo(f"{len(found)} found ({FINDERS[name].meaning(threshold)})")
    if len(found):
        echo(_table(found.head(top or _SHOWN)))
        if len(found) > (top or _SHOWN):
            echo(f"and {len(found) - (top or _SHOWN)} more: --top {len(found)} or --json for all")


def _table(found: pd.DataFrame) -> str:
    """The frame without columns that say nothing: one model, one tower, what is missing everywhere."""
    same = [name for name in ("model", "tower") if found[name].nunique() <= 1]
    empty = [name for name in ("expert", "null") if found[name].isna().all()]
    shown = found.drop(columns=[*same, *empty])
    return shown.to_string(index=False, na_rep="-", float_format=number)
