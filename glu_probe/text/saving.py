"""The frame of `causal` on its way to disk, with its pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..page.pictures import Picture, draw, save
from ..report import cause, prepare_directory, refusals, write_atomically, write_text
from ..saved_results import no_results


def save_costs(
    costs: pd.DataFrame,
    directory: str | os.PathLike,
    *,
    facts: dict[str, Any] | None = None,
    command: Sequence[str] | None = None,
    figures: bool = True,
) -> list[str]:
    """Write causal.parquet, causal.csv and provenance.json into a directory, then figures/causal_*.png and .svg.

    Every file appears whole or not at all. A figure that cannot be drawn does not keep the rest from being written.

    Args:
        costs: the frame of `causal`, whose `attrs` go into provenance.json.
        directory: made if need be.
        facts: of the model, for provenance.json too; see `Checkpoint.provenance`.
        command: what was typed.
        figures: draw them.

    Returns:
        What went wrong with figures, one sentence each.

    Raises:
        CannotWrite: the directory or a file in it cannot be written.
    """
    directory = prepare_directory(directory)
    provenance = {**(facts or {}), **costs.attrs, **({} if command is None else {"command": list(command)})}
    with refusals(directory):
        write_atomically(directory / "causal.parquet", costs.to_parquet)
        write_atomically(directory / "causal.csv", lambda path: costs.to_csv(path, index=False))
        write_text(directory / "provenance.json", json.dumps(provenance, indent=2, allow_nan=False) + "\n")
    return draw_costs(costs, directory) if figures else []


def draw_costs(costs: pd.DataFrame, directory: str | os.PathLike) -> list[str]:
    """Write figures/causal_*.png and .svg alone; see `save_costs`."""
    directory = prepare_directory(directory)
    with refusals(directory):
        drawn = draw(_pictures(costs))[0]
        if any(one.png for one in drawn):
            (directory / "figures").mkdir(exist_ok=True)
            save(drawn, directory / "figures")
    return [f"{one.picture.name}: {one.reason}" for one in drawn if one.reason]


def load_costs(directory: str | os.PathLike) -> pd.DataFrame:
    """The frame that `save_costs` wrote.

    Raises:
        NoReport: it is absent or cannot be read, or something else is saved here.
    """
    directory = Path(directory).expanduser()
    try:
        return pd.read_parquet(directory / "causal.parquet")
    except (OSError, ValueError) as error:
        raise no_results(directory, "costs", cause(error)) from None


def _pictures(costs: pd.DataFrame) -> list[Picture]:
    from .. import figures as f

    rows, columns = len(costs[["intervention", "neurons"]].drop_duplicates()), costs["layers"].nunique()
    # which neurons are edited stands in the labels
    words = 0.08 * costs["neurons"].str.len().max() if costs["neurons"].nunique() > 1 else 0.0
    grid, line = f.causal_grid_size(rows, columns), (max(8.4, 5.0 + 0.11 * columns) + words, 3.8)
    grid, title = (grid[0] + words, grid[1]), "Cost of each intervention"
    out = [Picture("causal_heatmap", title, "", grid, lambda ax: f.causal_heatmap(costs, ax=ax))]
    if columns > 1 and (costs["intervention"] != "identity").any():
        out.append(Picture("causal_profile", title, "", line, lambda ax: f.causal_profile(costs, ax=ax)))
    if costs["kl_spared"].notna().any():
        spared = f"{title}, one neuron spared"
        out.append(
            Picture(
                "causal_heatmap_spared", spared, "", grid, lambda ax: f.causal_heatmap(costs, value="kl_spared", ax=ax)
            )
        )
    return out
