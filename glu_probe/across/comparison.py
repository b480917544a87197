"""The result of a comparison: frames, sentences, and their way to disk."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from ..arguments import whole_number
from ..errors import BadOption
from ..report import cause, prepare_directory, refusals, write_atomically, write_text
from ..saved_results import no_results

_SMALL = 20_000  # rows up to which a frame is written as csv too
_FRAMES = ("layers", "differences", "neurons", "mlps")


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Models beside each other; the first is the base.

    Attributes:
        layers: the layer frames of all, below each other: `model` is a short, unique name, `relative_depth` is 0 for a
            model's first layer and 1 for its last.
        differences: every model against the base, a row per place (tower, group, and layer or bin of depth) and measure:
            values, difference, effect size, and whether rounding explains it; see `difference_frame`.
        neurons: a row per neuron of the base and other model, where neurons are the same ones:
            angle_q, angle_k, angle_v: by how many degrees gate row, up row and down column turned, the sign of (k, v) fixed;
            rounding_angle_q, _k, _v: by how many rounding of the weights in both files would turn them, if their errors are
            independent; with _base and _model, rounding in one of the two;
            query_norm_relative, value_gain_relative: |q'|/|q| - 1 and |k'||v'|/(|k||v|) - 1;
            movement: |T' - T|/|T| of T = q (x) k (x) v, and rounding, its size by rounding alone;
            moved: sqrt(movement^2 - rounding^2), what rounding leaves unexplained, or movement where rounding is not known;
            beyond_rounding: movement > 1.5 rounding;
            X_change: change of every measure X that no choice of coordinates alters; io_class_changed;
            counterpart: index of the neuron in the other model, which is not `neuron` where neurons were reordered.
        mlps: a row per MLP of the base and other model of which both have the weights, or reports: `identity` is "index"
            (neurons keep theirs), "permuted" (some are found at another index, and were matched), "unrelated" (other neurons:
            not followed), "other shape", or for saved reports "unknown"; medians of the angles beside what rounding in either
            file explains.
        provenance: of every model, and how they were compared; `notes` is what stands between their numbers.
    """

    layers: pd.DataFrame
    differences: pd.DataFrame
    neurons: pd.DataFrame
    mlps: pd.DataFrame
    provenance: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.models)}: {len(self.differences)} differences, {len(self.neurons)} neurons)"

    @property
    def models(self) -> list[str]:
        """The names, base first."""
        return [model["name"] for model in self.provenance["models"]]

    @property
    def base(self) -> str:
        """Name of the first model."""
        return self.provenance["base"]

    @property
    def findings(self) -> list[str]:
        """The main results as sentences."""
        from .findings import findings

        return findings(self)

    def moved(self, n: int = 20, *, by: str = "moved", model: str | None = None) -> pd.DataFrame:
        """The n neurons that moved most.

        Args:
            n: how many.
            by: column of `neurons` to rank by, by its size; "moved" is movement that rounding does not explain.
            model: of this one; of all by default.

        Raises:
            BadOption: no such column or model, or no neuron has a value.
        """
        n = whole_number("n", n, 1)
        if model is not None and model not in self.models[1:]:
            raise BadOption(f"model is {model!r}", hint=f"Use one of {', '.join(self.models[1:])}")
        numbers = by in self.neurons and (self.neurons.empty or pd.api.types.is_numeric_dtype(self.neurons[by]))
        if not numbers:
            raise BadOption(
                f"the neuron frame has no column of numbers {by!r}", hint='Use "moved", "angle_q" or another'
            )
        rows = self.neurons if model is None else self.neurons[self.neurons["model"] == model]
        size = rows[by].astype(float).abs().dropna()
        if size.empty:
            raise BadOption(
                f"no neuron has a value of {by}",
                hint="Neurons are followed where both models are given by their weights, have the same shape and the same "
                "neurons; `mlps` says what was found",
            )
        ranked = rows.loc[size.index].assign(_size=size)
        # where rounding explains all, what it explains
        ranked = ranked.sort_values(["_size", "movement"], ascending=False, kind="stable").drop(columns="_size")
        return ranked.head(n).reset_index(drop=True)

    def save(self, directory: str | os.PathLike, *, figures: bool = True) -> list[str]:
        """Write everything into a directory, data first: layers, differences, neurons and mlps as .parquet, as .csv too up to
        20,000 rows, provenance.json; then figures/*.png and *.svg, and compare.html.

        Every file appears whole or not at all. A figure that cannot be drawn does not keep the rest from being written.

        Returns:
            What went wrong with figures, one sentence each.

        Raises:
            CannotWrite: the directory or a file in it cannot be written.
        """
        directory = prepare_directory(directory)
        with refusals(directory):
            for name in _FRAMES:
                frame = getattr(self, name)
                write_atomically(directory / f"{name}.parquet", frame.to_parquet)
                if len(frame) <= _SMALL:
                    write_atomically(directory / f"{name}.csv", partial(frame.to_csv, index=False))
                else:  # of another run that was saved here
                    (directory / f"{name}.csv").unlink(missing_ok=True)
            write_text(directory / "provenance.json", json.dumps(self.provenance, indent=2, allow_nan=False) + "\n")
        return self.draw(directory) if figures else []

    def draw(self, directory: str | os.PathLike) -> list[str]:
        """Write figures/*.png, figures/*.svg and compare.html alone; see `save`."""
        from ..page.comparison_page import comparison_page

        directory = prepare_directory(directory)
        with refusals(directory):
            return comparison_page(self).write(directory)

    def to_html(self) -> str:
        """The comparison as one self-contained page."""
        from ..page.comparison_page import comparison_page

        return comparison_page(self).html()

    @classmethod
    def load(cls, directory: str | os.PathLike) -> Comparison:
        """Read a saved comparison.

        Raises:
            NoReport: a file of it is absent or cannot be read, or something else is saved here.
        """
        directory = Path(directory).expanduser()
        try:
            frames = {name: pd.read_parquet(directory / f"{name}.parquet") for name in _FRAMES}
            provenance = json.loads((directory / "provenance.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise no_results(directory, "comparison", cause(error)) from None
        return cls(**frames, provenance=provenance)
