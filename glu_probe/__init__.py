"""glu-probe: how asymmetric are the two branches of gated MLPs?

    import glu_probe as gp

    report = gp.probe("path/to/model")      # a directory, a .safetensors, a .gguf, or a hub repository
    report.layers                           # a row per layer
    report.neurons                          # a row per neuron
    gp.figures.phase_diagram(report.layers)
    report.save("out/")

This file is the index of the public names. They are loaded when first used: importing the package loads neither torch
nor pandas nor matplotlib.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "open_checkpoint": "checkpoint.checkpoint",
    "Checkpoint": "checkpoint.checkpoint",
    "register_family": "checkpoint.registration",
    "GatedLayer": "neurons",
    "Activation": "activations",
    "activation": "activations",
    "check": "checking",
    "probe": "probing",
    "measure_layer": "measuring",
    "neuron_card": "card",
    "probe_text": "text.activations",
    "causal": "text.causal",
    "compare": "across.comparing",
    "Report": "report",
    "gaussian_measures": "measures.gaussian",
    "GluProbeError": "errors",
}
_MODULES = ("conversions", "errors", "figures", "find", "forms", "measures", "sample_models", "symmetries", "testing")

__all__ = sorted([*_PUBLIC, *_MODULES, "load_report"])

if TYPE_CHECKING:
    import os

    from . import conversions, errors, figures, find, forms, measures, sample_models, symmetries, testing
    from .across.comparing import compare
    from .activations import Activation, activation
    from .card import neuron_card
    from .checking import check
    from .checkpoint.checkpoint import Checkpoint, open_checkpoint
    from .checkpoint.registration import register_family
    from .errors import GluProbeError
    from .measures.gaussian import gaussian_measures
    from .measuring import measure_layer
    from .neurons import GatedLayer
    from .probing import probe
    from .report import Report
    from .text.activations import probe_text
    from .text.causal import causal


def load_report(directory: str | os.PathLike[str]) -> Report:
    """A saved report; see `Report.load`."""
    from .report import Report

    return Report.load(directory)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    elif name in _MODULES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
