"""What is measured. `MEASURES` in `registry` describes every column of the frames; `probe` computes them.

The functions that take a layer and answer one question about it are listed here, and loaded when first used:

    import glu_probe as gp

    layer = gp.open_checkpoint(model).layer(12)
    gp.measures.neuron_groups(layer)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "MEASURES": "registry",
    "IO_CLASSES": "io_classes",
    "io_class": "io_classes",
    "cosines": "neuron",
    "principal_angles": "spectra",
    "effective_rank": "spectra",
    "tensor_asymmetry": "tensor",
    "bilinear_coefficients": "interaction",
    "interaction_matrix": "interaction",
    "interaction_features": "interaction",
    "Interaction": "interaction",
    "output_directions": "interaction",
    "neuron_groups": "groups",
    "nearest_neighbours": "neighbours",
    "largest_cosine": "extremes",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from .extremes import largest_cosine
    from .groups import neuron_groups
    from .interaction import (
        Interaction,
        bilinear_coefficients,
        interaction_features,
        interaction_matrix,
        output_directions,
    )
    from .io_classes import IO_CLASSES, io_class
    from .neighbours import nearest_neighbours
    from .neuron import cosines
    from .registry import MEASURES
    from .spectra import effective_rank, principal_angles
    from .tensor import tensor_asymmetry


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
