"""Reports of models of every size, for the tests of pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

import glu_probe as gp
from glu_probe.testing import write_tiny_checkpoint


def deep(directory: Path) -> gp.Report:
    """80 layers, enough neurons for a density; layers 10 and 11 measured as if they had no MLP."""
    write_tiny_checkpoint("llama", directory, layers=80, d_model=16, d_mlp=260)
    report = gp.probe(directory, samples=4)
    layers = report.layers.copy()
    layers.loc[[10, 11], layers.select_dtypes("floating").columns] = np.nan
    layers.loc[[10, 11], ["no_mlp", "group", "n_neurons"]] = [True, "none", 0]
    return gp.Report(layers, report.neurons[~report.neurons["layer"].isin([10, 11])], report.classes, report.provenance)


def mixture(directory: Path) -> gp.Report:
    """A dense layer, then 4 of 64 routed experts and a shared one."""
    write_tiny_checkpoint("deepseek_v3", directory, layers=5, d_model=16, d_mlp=24, experts=64)
    return gp.probe(directory, samples=4)


def with_contexts(report: gp.Report) -> gp.Report:
    """With a table that is hard to sort: missing and infinite values, powers of ten, names with numbers, equal cells."""
    contexts = pd.DataFrame(
        {
            "value": [2.0, 10.0, np.nan, -1.5e-7, np.inf, 2.0, 3e10],
            "name": ["b10", "b2", "A", "<i>", None, "ä", "b2"],
            "same": [1] * 7,
        }
    )
    return gp.Report(report.layers, report.neurons, report.classes, report.provenance, contexts)
