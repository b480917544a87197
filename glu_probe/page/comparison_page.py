"""The page of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from ..across.findings import place
from ..errors import BadOption
from ..measures.registry import MEASURES, TEXT_MEASURES
from .comparison_pictures import comparison_pictures
from .html import Table, render_page
from .meanings import measure_table
from .page import Page
from .pictures import Drawn
from .provenance import without_places

if TYPE_CHECKING:
    from ..across.comparison import Comparison

_NEURON_COLUMNS = (
    "model", "tower", "layer", "expert", "neuron", "counterpart", "movement", "rounding", "moved", "angle_q", "angle_k",
    "angle_v", "query_norm_relative", "value_gain_relative", "exchange_asymmetry_change", "io_class_changed",
)  # fmt: skip
_MLP_COLUMNS = (
    "model", "tower", "layer", "expert", "identity", "own_index_share", "n_elsewhere", "angle_q", "rounding_angle_q",
    "angle_k", "rounding_angle_k", "angle_v", "rounding_angle_v", "movement", "rounding", "beyond_rounding_share", "note",
)  # fmt: skip
_MOVED_AT_MOST, _MLPS_AT_MOST = 20, 200

# what columns mean
_CHANGES = {
    "effect": "over the places, the median",
    "effect_kind": "d: Cohen's d over neurons; z: over the standard error of sampling",
    "rounding": "what one more rounding of the weights would change, mean",
    "beyond_rounding": "in how many places rounding does not explain the difference",
}
_PAIRED = {
    "counterpart": "index of the same neuron in the other model",
    "movement": "|T' - T| / |T| of the neuron's tensor T = q (x) k (x) v",
    "rounding": "movement by rounding of the weights alone",
    "moved": "what rounding leaves unexplained of the movement",
    "own_index_share": "of the neurons, how many are still at their own index",
    "n_elsewhere": "how many neurons were found at another index",
    "beyond_rounding_share": "of the neurons, how many moved by more than 1.5 times what rounding explains",
    **{
        f"{prefix}angle_{letter}": f"by how many degrees {words} {verb}"
        for prefix, verb in (("", "turned"), ("rounding_", "would turn by rounding alone"))
        for letter, words in (("q", "gate rows"), ("k", "up rows"), ("v", "down columns"))
    },
}


def comparison_page(comparison: Comparison) -> Page:
    """The page of this comparison."""
    return Page("compare.html", comparison_pictures(comparison), lambda drawn: _markup(comparison, drawn))


def _markup(comparison: Comparison, drawn: Sequence[Drawn]) -> str:
    shown = {*comparison.differences["measure"]}
    measures = [one for name, one in (MEASURES | TEXT_MEASURES).items() if name in shown]
    provenance = without_places(comparison.provenance)
    return render_page(
        "compare.html.jinja", models=comparison.models, base=comparison.base, findings=comparison.findings,
        notes=provenance["notes"], provenance=provenance, pictures=drawn,
        tables=[*_tables(comparison)], meanings=[measure_table(measures)],
    )  # fmt: skip


def _tables(comparison: Comparison) -> Iterator[Table]:
    yield _measures(comparison.differences)
    try:
        moved = comparison.moved(_MOVED_AT_MOST)
    except BadOption:  # no neuron was followed
        pass
    else:
        yield Table.of(
            "moved",
            "Neurons that moved most, by movement that rounding does not explain; neurons.parquet has all. Angles in degrees.",
            _told_apart(moved, _NEURON_COLUMNS), _PAIRED,
        )  # fmt: skip
    mlps = comparison.mlps
    if len(mlps):
        rest = f" The first {_MLPS_AT_MOST} of {len(mlps):,}." if len(mlps) > _MLPS_AT_MOST else ""
        yield Table.of(
            "mlps",
            "Which neurons are which. index: neurons keep theirs; permuted: some are found at another index; unrelated: other "
            f"neurons. Angles in degrees, medians of neurons; beside each, what rounding alone explains.{rest}",
            _told_apart(mlps.head(_MLPS_AT_MOST), _MLP_COLUMNS), _PAIRED,
        )  # fmt: skip


def _measures(differences: pd.DataFrame) -> Table:
    """A row per measure of each model."""
    rows = []
    for (model, measure), here in differences.groupby(["model", "measure"], sort=False):
        if here["difference"].isna().all():
            continue
        most = here.loc[here["difference"].abs().idxmax()]
        judged = here["beyond_rounding"].dropna()
        rows.append({
            "model": model, "measure": measure, "base_value": here["base_value"].mean(), "value": here["value"].mean(),
            "difference": here["difference"].mean(), "effect": here["effect"].dropna().median(),
            "effect_kind": next(iter(here["effect_kind"].dropna()), None), "largest_difference": most["difference"],
            "at": place(most), "rounding": here["rounding"].mean(),
            "beyond_rounding": f"{int(judged.sum())} of {len(judged)}" if len(judged) else None,
            "note": most["note"],
        })  # fmt: skip
    frame = pd.DataFrame(rows)
    return Table.of(
        "changes",
        "Every measure: means over layers or bins, the median effect, and the largest difference with its place; "
        "differences.csv has every place. Measures that depend on a choice of coordinates have no effect size and say nothing.",
        _told_apart(frame, list(frame)), _CHANGES,
    )  # fmt: skip


def _told_apart(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """These columns, without what is wholly missing, and without model and tower where there is one only."""
    known = [name for name in columns if name in frame and frame[name].notna().any()]
    return frame[[name for name in known if name not in ("model", "tower") or frame[name].nunique() > 1]]
