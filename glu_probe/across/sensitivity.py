"""What one more rounding would do to a model's measures: the yardstick beside every difference of two models."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import groupby

import numpy as np
import pandas as pd
import torch

from ..checkpoint.sites import Site
from ..frames import layer_row
from ..measures.registry import MEASURES, NEURON_MEASURES
from ..measuring import measure_layer
from ..probing import Progress
from .members import Member
from .rounding import StorageRounding, relative_errors, rounded_anew

LAYER_MEASURES = tuple(name for name, one in MEASURES.items() if one.level == "layer")
Errors = dict[str, np.ndarray]


def rounding_sensitivity(
    member: Member, sites: Iterable[Site], *, seed: int, samples: int | None, exact: bool, progress: Progress = iter
) -> tuple[pd.DataFrame, dict[tuple, Errors], StorageRounding]:
    """How much each layer's measures change if every weight is rounded once more by its stored type's step.

    Every MLP is measured again, with the same seed, after an error uniform over a step was added to each of its weights.
    A model that was made from another by rounding differs from it by about as much.

    Returns:
        A frame with tower, layer, group, measure and `rounding`, the size of the change: of a neuron measure's mean the root
        of the squared mean change and its squared standard error over neurons; of a layer measure the change itself, of one
        draw, or its median over the layers where that is larger. Missing where the grid of a type is not known, 0 where weights are stored in full precision. Then, for every
        MLP, the relative rounding errors of its factors; and the model's storage.
    """
    checkpoint = member.checkpoint
    assert checkpoint is not None  # of a saved report no weights can be rounded
    storage = StorageRounding(checkpoint)
    rows, errors = [], {}
    if storage.exact:
        for site in sites:
            errors[site.tower, site.layer, site.expert] = {
                role: np.zeros(site.d_mlp) for role in ("query", "key", "value")
            }
        kept = member.report.layers[["tower", "layer", "group"]]
        frames = [kept.assign(measure=name, rounding=0.0) for name in (*NEURON_MEASURES, *LAYER_MEASURES)]
        return pd.concat(frames, ignore_index=True), errors, storage
    before = member.report.layers.set_index(["tower", "layer", "group"])
    neurons = member.report.neurons.groupby(["tower", "layer"], observed=True, sort=False)
    for (tower, layer, group), members in groupby(
        progress(sites), key=lambda site: (site.tower, site.layer, site.group)
    ):
        results, kept = [], []
        for site in members:
            factors = checkpoint.load(site)
            steps = storage.steps(site, factors)
            errors[tower, layer, site.expert] = relative_errors(factors, steps)
            known = {role: step for role, step in steps.items() if step is not None}
            if len(known) < len(steps):
                continue
            place = np.random.SeedSequence([seed, layer, zlib.crc32(f"rounding/{tower}/{site.expert}".encode())])
            generator = torch.Generator().manual_seed(int(place.generate_state(1)[0]))
            noisy = rounded_anew(factors, known, generator)
            del factors, steps, known
            results.append(measure_layer(noisy, seed=seed, samples=samples, exact=exact))
            kept.append(None if site.expert is None else str(site.expert))
        if not results:
            continue
        after = layer_row(member.name, results)
        here = neurons.get_group((tower, layer))
        labels = here["expert"]
        old = pd.concat([here[labels.isna() if one is None else labels == one] for one in kept])
        for name in NEURON_MEASURES:
            change = np.concatenate([one.neurons[name] for one in results]) - old[name].to_numpy(dtype=float)
            rows.append((tower, layer, group, name, _size(change)))
        for name in LAYER_MEASURES:
            rows.append((tower, layer, group, name, abs(after[name] - float(before.loc[(tower, layer, group), name]))))
    frame = pd.DataFrame(rows, columns=["tower", "layer", "group", "measure", "rounding"])
    # one draw may change a layer measure by nothing, by chance
    usual = frame.groupby(["tower", "group", "measure"])["rounding"].transform("median")
    of_layer = frame["measure"].isin(LAYER_MEASURES)
    frame["rounding"] = frame["rounding"].where(~of_layer, np.fmax(frame["rounding"], usual))
    return frame, errors, storage


def _size(change: np.ndarray) -> float:
    known = change[np.isfinite(change)]
    if not known.size:
        return np.nan
    return float(np.hypot(known.mean(), known.std() / np.sqrt(known.size)))
