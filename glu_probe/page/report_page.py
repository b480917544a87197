"""The page of one report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from ..findings import COLUMNS, details
from ..headlines import headlines
from ..layer_groups import groups_of
from ..measures.registry import MEASURES, TEXT_MEASURES, TEXT_SUFFIXES
from ..report import Report
from .assumptions import assumptions
from .html import Table, render_page
from .meanings import hints, measure_table
from .page import Page
from .pictures import Drawn
from .provenance import without_places
from .report_pictures import report_pictures
from .words import WORDS, class_table

LAYER_COLUMNS = (
    "tower", "layer", "group", "n_neurons", "exchange_asymmetry_relu_ratio", "query_norm_median", "gate_std_text_median",
    "exchange_asymmetry_mean", "exchange_asymmetry_text_mean", "exchange_asymmetry_text_mean_se",
    "exchange_asymmetry_text_minus_gaussian_mean", "abs_cos_qk_mean", "abs_cos_qk_null_mean", "cos_kv_mean",
    "bilinear_share_mean", "bilinear_share_text_mean", "exchange_asymmetry_output", "exchange_asymmetry_output_se",
    "exchange_asymmetry_output_text", "exchange_asymmetry_output_text_se", "scaling_asymmetry_output",
    "output_energy_top_share", "gate_stable_rank_unit", "up_stable_rank_unit", "down_stable_rank_unit", "branch_overlap",
    "tensor_asymmetry",
)  # fmt: skip
_NEURON_COLUMNS = (
    "tower", "layer", "expert", "neuron", "why", "query_norm", "value_gain", "abs_cos_qk", "cos_kv", "exchange_asymmetry",
    "exchange_asymmetry_text", "bilinear_share", "io_class",
)  # fmt: skip
_FLAGGED_AT_MOST = 40
_CONTEXTS_AT_MOST = 200


def report_page(report: Report) -> Page:
    """The page of this report."""
    return Page("report.html", report_pictures(report), lambda drawn: _markup(report, drawn))


def _markup(report: Report, drawn: Sequence[Drawn]) -> str:
    provenance, neurons = without_places(report.provenance), report.neuron_columns(*COLUMNS)
    return render_page(
        "report.html.jinja", model=str(provenance.get("model", "")), tokens=provenance.get("text", {}).get("tokens"),
        headlines=headlines(report.layers, neurons), details=details(report.layers, neurons),
        assumptions=assumptions(provenance, functional=report.layers["exchange_asymmetry_mean"].notna().any()),
        notes=provenance.get("notes", []), pictures=drawn, tables=[*_tables(report)],
        words=WORDS, meanings=_meanings("text" in provenance), provenance=provenance,
    )  # fmt: skip


def _tables(report: Report) -> Iterator[Table]:
    layers = _layers(report.layers)
    yield Table.of("layers", "Layers: the columns that matter most; layers.csv has all.", layers, hints(layers))
    standing_out = _standing_out(report.neuron_columns(*_NEURON_COLUMNS, "output_energy", "outlier_risk", "flag"))
    if len(standing_out):
        caption = (
            "Neurons that stand out: those that do most in their layer, by output energy or |q||k||v| on the same direction, "
            f"and up to {_FLAGGED_AT_MOST} that are flagged."
        )
        yield Table.of("neurons", caption, standing_out, hints(standing_out))
    if report.contexts is not None and len(report.contexts):
        shown = report.contexts.head(_CONTEXTS_AT_MOST).dropna(axis="columns", how="all")
        shown = shown.drop(columns=[name for name in ("model",) if name in shown])
        rest = "" if len(shown) == len(report.contexts) else f", the first {len(shown)} of {len(report.contexts)}"
        yield Table.of("contexts", f"Where in the text neurons do most{rest}.", shown)


def _layers(layers: pd.DataFrame) -> pd.DataFrame:
    columns = [name for name in LAYER_COLUMNS if name in layers]
    single = {"tower": layers["tower"].nunique() == 1, "group": groups_of(layers).nunique() == 1}
    return layers[[name for name in columns if not single.get(name)]]


def _standing_out(neurons: pd.DataFrame) -> pd.DataFrame:
    """The neuron with most output energy of every layer, and flagged ones."""
    strength = "output_energy" if neurons["output_energy"].notna().any() else "outlier_risk"
    known = neurons.loc[np.isfinite(neurons[strength].to_numpy(dtype=float)), ["tower", "layer", strength]]
    most = known.groupby(["tower", "layer"], observed=True, sort=False)[strength].idxmax()
    flag = neurons["flag"].fillna("") if "flag" in neurons else pd.Series("", index=neurons.index)
    flagged = neurons.index[flag != ""][:_FLAGGED_AT_MOST]
    why = pd.concat([
        pd.Series(f"most {'output energy' if strength == 'output_energy' else 'outlier risk'}", index=[*most]),
        flag[flagged].str.replace("_", " "),
    ])  # fmt: skip
    chosen = neurons.loc[why.index].assign(why=why.to_numpy())
    kept = [name for name in _NEURON_COLUMNS if name in chosen and chosen[name].notna().any()]
    return chosen[[name for name in kept if name != "tower" or neurons["tower"].nunique() > 1]]


def _meanings(on_text: bool) -> list[Table]:
    tables = [measure_table([*MEASURES.values(), *(TEXT_MEASURES.values() if on_text else ())])]
    if on_text:
        endings = "Columns of measures on text end so"
        tables.append(Table("suffixes", endings, ("ending", "meaning"), [*TEXT_SUFFIXES.items()], words=True))
    return [*tables, class_table()]
