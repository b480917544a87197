"""One neuron among its neighbours: its numbers against the distribution of its layer."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .errors import BadOption
from .measures.io_classes import IO_CLASSES
from .measures.neuron import flags, neuron_measures
from .measures.products import row_products
from .measures.registry import MEASURES, NEURON_MEASURES
from .neurons import GatedLayer


def neuron_card(layer: GatedLayer, neuron: int) -> pd.DataFrame:
    """The measures of one neuron.

    Args:
        layer: the MLP it belongs to.
        neuron: its index, 0 <= neuron < d_mlp.

    Returns:
        Frame with a row per measure: measure, value, layer_median, percentile (of neurons in the layer that lie below,
        missing where the value is) and meaning. `attrs` has io_class, flags, and gauge_dependent: the measures
        that are a choice of coordinates.

    Raises:
        BadOption: there is no such neuron.
    """
    if not 0 <= neuron < layer.d_mlp:
        raise BadOption(
            f"there is no neuron {neuron}", where=f"layer {layer.layer}", hint=f"It has neurons 0 to {layer.d_mlp - 1}"
        )
    layer = layer.detach()
    products = row_products(layer)
    values = neuron_measures(layer, products)
    rows = []
    for name in NEURON_MEASURES:
        known = values[name][np.isfinite(values[name])]
        value = values[name][neuron]
        below = float((known < value).mean() * 100) if np.isfinite(value) else np.nan
        median = float(np.median(known)) if known.size else np.nan
        rows.append((name, float(value), median, below, MEASURES[name].meaning))
    card = pd.DataFrame(rows, columns=["measure", "value", "layer_median", "percentile", "meaning"])
    index = int(values["io_class"][neuron])
    card.attrs["io_class"] = IO_CLASSES[index] if index >= 0 else None
    card.attrs["gauge_dependent"] = [name for name in NEURON_MEASURES if "gauge" not in MEASURES[name].invariant]
    card.attrs["flags"] = [name for name, where in flags(layer, products).items() if where[neuron]]
    return card
