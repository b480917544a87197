"""Pictures of the frames: a frame goes in, matplotlib Axes come out.

Nothing here opens a window, changes a style or keeps a figure: with `ax` given, only that is drawn on; without, a new
figure is made the way seaborn makes one. What is missing in a frame is drawn as missing.
"""

from .angles import angle_histogram, angle_profile, angle_trajectory
from .axes import figure_axes, label_positions, layer_labels
from .causal import causal_grid_size, causal_heatmap, causal_profile
from .effects import EFFECT_MEASURES, difference_heatmap, effect_grid_size, effect_limit
from .heatmaps import HEATMAP_MEASURES, expert_grid_size, expert_heatmap, layer_heatmap
from .models import FEW_MODELS, model_profiles, model_trajectory
from .neurons import movement_scatter, neuron_scatter, text_scatter
from .phase import phase_diagram
from .profiles import class_bars, layer_lines, layer_profile

__all__ = [
    "EFFECT_MEASURES",
    "FEW_MODELS",
    "HEATMAP_MEASURES",
    "angle_histogram",
    "angle_profile",
    "angle_trajectory",
    "causal_grid_size",
    "causal_heatmap",
    "causal_profile",
    "class_bars",
    "difference_heatmap",
    "effect_grid_size",
    "effect_limit",
    "expert_grid_size",
    "expert_heatmap",
    "figure_axes",
    "label_positions",
    "layer_heatmap",
    "layer_labels",
    "layer_lines",
    "layer_profile",
    "model_profiles",
    "model_trajectory",
    "movement_scatter",
    "neuron_scatter",
    "phase_diagram",
    "text_scatter",
]
