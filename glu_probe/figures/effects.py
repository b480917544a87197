"""Where two models differ: effect sizes by layer and measure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ..errors import BadOption
from .axes import Across, axes_or_new, label_positions, mesh, set_labels
from .columns import of_model, require

_CAP = 4.0  # most that the colour scale of effects spans

# What the heatmap shows by default: one of each family of measures, gauge-invariant ones alone.
EFFECT_MEASURES = (
    "query_norm", "value_gain", "abs_cos_qk", "cos_kv", "abs_cos_qv", "cos_qv", "exchange_asymmetry", "scaling_asymmetry",
    "linear_share", "bilinear_share", "residual_share", "output_energy", "outlier_risk",
)  # fmt: skip


def difference_heatmap(
    differences: pd.DataFrame,
    *,
    model: str | None = None,
    measures: Sequence[str] | None = None,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Effect sizes of one model against the base: layers or bins of depth across, measures down, white where equal.

    Effects are Cohen's d, so all measures share one scale. A dot marks differences that rounding explains.

    Args:
        differences: the frame of a comparison.
        model: which, where there are several.
        measures: which, of those with an effect size d; `EFFECT_MEASURES` by default.
        limit: end of the colour scale; by default the largest effect, at most 4.
        ax: where to draw.

    Raises:
        BadOption: no effect is there to draw.
    """
    columns = ["model", "measure", "effect", "effect_kind", "tower", "group", "beyond_rounding"]
    require(differences, columns, whole="comparison.differences")
    rows, model = of_model(differences, model)
    rows = rows[rows["effect_kind"].eq("d").fillna(False)]
    names = [name for name in (measures or EFFECT_MEASURES) if name in {*rows["measure"]}]
    if not names:
        raise BadOption(
            f"no measure of {model} has an effect size d: there is nothing to draw",
            hint="Name measures whose effect_kind is d, or leave measures out",
        )
    rows = rows[rows["measure"].isin(names)]
    binned = "layer" not in rows
    rows = rows.rename(columns={"depth_bin": "layer"}) if binned else rows
    place = ["tower", "group", "layer"]
    across = Across.of(rows.drop_duplicates(place).sort_values(["tower", "layer"], kind="stable"))
    column = {key: index for index, key in enumerate(across.frame[place].itertuples(index=False, name=None))}
    values = np.full((len(names), len(column)), np.nan)
    explained = np.zeros(values.shape, dtype=bool)
    for row in rows.itertuples():
        where = names.index(row.measure), column[row.tower, row.group, row.layer]
        values[where] = row.effect
        explained[where] = row.beyond_rounding is not pd.NA and not row.beyond_rounding
    limit = limit or effect_limit(rows)
    ax = axes_or_new(ax, effect_grid_size(len(names), len(column)))
    over = np.nanmax(np.abs(values)) > limit * (1 + 1e-9)
    mesh(
        ax, values, label="Cohen's d against the base", bar={"extend": "both" if over else "neither"}, cmap="RdBu_r",
        vmin=-limit, vmax=limit,
    )  # fmt: skip
    ax.set_yticks(np.arange(len(names)) + 0.5, names, rotation=0)
    y, x = np.nonzero(explained)
    ax.plot(x + 0.5, y + 0.5, ".", color="0.25", ms=2.5)
    if not binned:
        across.label(ax, offset=0.5)
    else:
        shown, depth = label_positions(len(column)), across.values("relative_depth")
        set_labels(ax, shown, [f"{depth[index]:.2f}" for index in shown], offset=0.5)
        ax.set_xlabel("relative depth, middle of the bin")
    remarks = ["dot: rounding explains it"] if explained.any() else []
    ax.set_title(", ".join(filter(None, [*remarks, ax.get_title(loc="right")])), fontsize="small", loc="right")
    ax.set_title(model, fontsize="medium", loc="left")
    return ax


def effect_limit(differences: pd.DataFrame) -> float:
    """End of a colour scale for these effects, one for all models: the largest, at least 0.1 and at most 4."""
    sizes = differences.loc[differences["effect_kind"].eq("d").fillna(False), "effect"].abs()
    sizes = sizes[np.isfinite(sizes)]
    return float(min(_CAP, max(0.1, sizes.max()))) if len(sizes) else 0.1


def effect_grid_size(n_measures: int, n_places: int) -> tuple[float, float]:
    """Size of a figure of `difference_heatmap`, in inches."""
    return max(6.5, 3.6 + 0.11 * n_places), 1.3 + 0.26 * n_measures
