"""Pictures of the frames: a frame goes in, matplotlib Axes come out.

Nothing here opens a window, changes a style or keeps a figure: with `ax` given, only that is drawn on; without, a new
figure is made the way seaborn makes one. What is missing in a frame is drawn as missing. Those of a comparison (`model_profiles` to
`movement_scatter`) take its frames.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .axes import figure_axes, label_positions, layer_labels
from .causal import causal_grid_size, causal_heatmap, causal_profile
from .heatmaps import HEATMAP_MEASURES, expert_grid_size, expert_heatmap, layer_heatmap
from .neurons import neuron_scatter, text_scatter
from .phase import phase_diagram
from .profiles import class_bars, layer_lines, layer_profile

if TYPE_CHECKING:
    from ..across.figures import (
        angle_histogram,
        angle_profile,
        angle_trajectory,
        difference_heatmap,
        model_profiles,
        movement_scatter,
        trajectory,
    )

# They build on the figures here, so they are loaded when first used.
_OF_COMPARISONS = (
    "angle_histogram",
    "angle_profile",
    "angle_trajectory",
    "difference_heatmap",
    "model_profiles",
    "movement_scatter",
    "trajectory",
)

__all__ = [
    "HEATMAP_MEASURES",
    "angle_histogram",
    "angle_profile",
    "angle_trajectory",
    "causal_grid_size",
    "causal_heatmap",
    "causal_profile",
    "class_bars",
    "difference_heatmap",
    "expert_grid_size",
    "expert_heatmap",
    "figure_axes",
    "label_positions",
    "layer_heatmap",
    "layer_labels",
    "layer_lines",
    "layer_profile",
    "model_profiles",
    "movement_scatter",
    "neuron_scatter",
    "phase_diagram",
    "text_scatter",
    "trajectory",
]


def __getattr__(name: str):
    if name not in _OF_COMPARISONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("..across.figures", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
