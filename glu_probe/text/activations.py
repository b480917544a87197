"""The measures of the weight report on real activations: one run over a text, joined to the report's frames.

A first pass over a part of the text (every fourth sequence) finds the canonical gauge of the sample for each neuron; the main pass
sums over all of it. So exchange is the operation in the gauge that this text calls for, not in that of isotropic input: on
text the sign of E[ab] is often not that of the cosine between the weights.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.layout import Site
from ..errors import BadOption
from ..frames import as_stored, statistics
from ..neurons import expert_group
from ..probing import probe
from ..report import Report
from ..selection import select_layers
from .corpus import Tokens, load_tokenizer, read_texts, tokenize
from .language_model import LanguageModel
from .moments import GROUPS, GaugeMoments, NeuronMoments, OutputMoments

# Neuron measures that the weight report has too: beside each stands its difference to the Gaussian value.
SHARED = ("exchange_asymmetry", "scaling_asymmetry", "linear_share", "bilinear_share", "residual_share")
OWN = (
    "gate_mean", "gate_std", "gate_active", "branch_correlation",
    "quadrant_plus_plus", "quadrant_plus_minus", "quadrant_minus_plus", "quadrant_minus_minus",
)  # fmt: skip
_GAUGE_SHARE = 4
_OUTPUT_TOKENS = 4096  # outputs are whole vectors: this many tokens leave an error of about a hundredth
_BATCH_TOKENS = 1024

Progress = Callable[[Iterable[Any]], Iterable[Any]]


def probe_text(
    model: str | os.PathLike | Checkpoint,
    text: Any = None,
    *,
    layers: Iterable[int] | str | None = None,
    tokens: int | None = 16_384,
    length: int = 256,
    first_position: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
    module: Any = None,
    tokenizer: Any = None,
    report: Report | None = None,
    progress: Progress = iter,
    **options: Any,
) -> Report:
    """Measure the gated MLPs of a language model on a text, beside their measures on Gaussian input.

    Args:
        model: a reference as `open_checkpoint` takes it, or an opened checkpoint.
        text: what `read_texts` takes: a file, a directory, a list of texts, "-" for standard input, None for the
            sample that comes with the package.
        layers: which layers; all by default.
        tokens: at most so many; None for all.
        length: tokens of a sequence.
        first_position: let the first position of every sequence take part. Models park a massive activation there,
            which would be most of many neurons' energy.
        device, dtype: where and in which precision the model runs ("float32" or "bfloat16").
        module: the model in memory, a TransformerBridge or a transformers model; else it is loaded.
        tokenizer: a transformers tokenizer; else the model's own.
        report: the weight report of the same layers, if there is one; else it is made.
        progress: wraps the iteration over batches of sequences.
        **options: of `open_checkpoint`, if `model` is a reference.

    Returns:
        The report with further columns. In the neuron frame `X_text`, its standard error `X_text_se` and its difference
        `X_text_minus_gaussian` for the five measures of Gaussian input, `output_energy_text`, and gate_mean, gate_std, gate_active,
        branch_correlation and the frequencies of the four sign quadrants, all with suffix `_text`. In the layer frame
        their means (`X_text_mean`, and `X_text_weighted` by output energy on the text), and the asymmetries of the
        output with standard errors (`X_output_text`, `X_output_text_se`). MLPs that cannot be listened to have them missing.

    Raises:
        GluProbeError: one of its subclasses.
    """
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model, **options)
    if options and checkpoint is model:
        raise BadOption(f"{', '.join(sorted(options))} given for a checkpoint that is already open")
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(checkpoint.ref)
    sequences = tokenize(read_texts(text), tokenizer, length=length, tokens=tokens)
    runner = (
        LanguageModel.load(checkpoint, device=device, dtype=dtype, tokenizer=tokenizer)
        if module is None
        else LanguageModel.wrap(module, checkpoint, tokenizer=tokenizer, device=device)
    )
    chosen = select_layers(layers, checkpoint.layers_present["text"])
    sites = runner.heard(chosen)
    agreement = runner.check(sequences.sequences[0][None], sites)
    report = probe(checkpoint, layers=layers) if report is None else report
    measured = _measure(runner, sites, sequences, first_position=first_position, progress=progress)
    provenance = report.provenance | {
        "text": {
            **sequences.words(),
            "first_position": first_position,
            "device": device,
            "dtype": str(runner.dtype).removeprefix("torch."),
            "gauge": f"canonical of the sample, from every {_GAUGE_SHARE}th sequence",
            "largest_disagreement": max(agreement.values()),
            "left_out": runner.skipped,
        }
    }
    neurons = _join_neurons(report.neurons, measured)
    return dataclasses.replace(
        report, neurons=neurons, layers=_join_layers(report.layers, neurons, measured), provenance=provenance
    )


@dataclasses.dataclass(frozen=True)
class _Measured:
    """What the text said about one MLP."""

    neurons: NeuronMoments
    outputs: OutputMoments


def _measure(
    runner: LanguageModel, sites: Sequence[Site], tokens: Tokens, *, first_position: bool, progress: Progress
) -> dict[Site, _Measured]:
    first = 0 if first_position else 1
    gauges = {site: GaugeMoments(site.d_mlp) for site in sites}

    def find_gauge(site: Site, a: torch.Tensor, b: torch.Tensor) -> None:
        gauges[site].update(_flat(a, first), _flat(b, first))

    some, count = (
        tokens.split_every(_GAUGE_SHARE)[1] if len(tokens.sequences) >= _GAUGE_SHARE else tokens,
        len(tokens.sequences),
    )
    steps = [("gauge", batch) for batch in some.batches(_BATCH_TOKENS)]
    steps += [("sums", batch) for batch in tokens.batches(_BATCH_TOKENS)]
    output_every = max(1, round(tokens.n_tokens / _OUTPUT_TOKENS))
    moments: dict[Site, _Measured] = {}
    for phase, (indices, ids) in progress(steps):
        if phase == "gauge":
            runner.listen(ids, sites, find_gauge)
            continue
        if not moments:
            for site in sites:
                act, gauge = runner.checkpoint.activation_of(site), gauges[site].gauge()
                moments[site] = _Measured(
                    NeuronMoments(act, gauge), OutputMoments(act, gauge, runner.value(site).float())
                )

        def add(site: Site, a: torch.Tensor, b: torch.Tensor, indices: list[int] = indices) -> None:
            for row, index in enumerate(indices):
                # contiguous groups: neighbouring sequences are of one document, and depend on each other
                group = index * GROUPS // count
                one = _flat(a[row : row + 1], first), _flat(b[row : row + 1], first)
                moments[site].neurons.update(*one, group)
                if index % output_every == 0:
                    moments[site].outputs.update(*one, group)

        runner.listen(ids, sites, add)
    return moments


def _flat(branch: torch.Tensor, first: int) -> torch.Tensor:
    """[batch, position, d_mlp] without leading positions, as tokens, in at least float32."""
    return branch[:, first:].reshape(-1, branch.shape[-1]).float()


def _place(site: Site) -> tuple[str, int, str]:
    return site.tower, site.layer, "" if site.expert is None else str(site.expert)


def _join_neurons(frame: pd.DataFrame, measured: dict[Site, _Measured]) -> pd.DataFrame:
    places = list(zip(frame["tower"].astype(str), frame["layer"], frame["expert"].fillna("").astype(str), strict=True))
    rows: dict[tuple, list[int]] = {}
    for row, place in enumerate(places):
        rows.setdefault(place, []).append(row)
    columns: dict[str, np.ndarray] = {}

    def put(name: str, where: list[int], values: np.ndarray) -> None:
        columns.setdefault(name, np.full(len(frame), np.nan))[where] = values

    for site, moments in measured.items():
        where = rows[_place(site)]
        values, errors = moments.neurons.estimates()
        for name in SHARED:
            put(f"{name}_text", where, values[name])
            put(f"{name}_text_se", where, errors[name])
            put(f"{name}_text_minus_gaussian", where, values[name] - frame[name].to_numpy(dtype=float)[where])
        for name in OWN:
            put(f"{name}_text", where, values[name])
        put("output_energy_text", where, values["energy"] * frame["value_norm"].to_numpy(dtype=float)[where] ** 2)
    return pd.concat(
        [frame, pd.DataFrame({name: as_stored(v) for name, v in columns.items()}, index=frame.index)], axis=1
    )


def _join_layers(layers: pd.DataFrame, neurons: pd.DataFrame, measured: dict[Site, _Measured]) -> pd.DataFrame:
    """Means over the neurons of each row's MLPs, and the asymmetries of their outputs."""
    by_row: dict[tuple, list[Site]] = {}
    for site in measured:
        by_row.setdefault((site.tower, site.layer, site.group), []).append(site)
    names = [f"{name}_text" for name in (*SHARED, *OWN)]
    placed = neurons.assign(group=[expert_group(_expert(e)) for e in neurons["expert"]])
    groups = placed.groupby(["tower", "layer", "group"], observed=True, sort=False)
    columns: dict[str, list[float]] = {}
    for row, (tower, layer, group) in enumerate(zip(layers["tower"], layers["layer"], layers["group"], strict=True)):
        found: dict[str, float] = {}
        if (tower, layer, group) in by_row:
            part = groups.get_group((tower, layer, group))
            weights = part["output_energy_text"].to_numpy(dtype=float)
            for name in names:
                values = statistics(part[name].to_numpy(dtype=float), weights)
                found[f"{name}_mean"], found[f"{name}_weighted"] = values["mean"], values["weighted"]
            outputs = [measured[site].outputs.estimates() for site in by_row[tower, layer, group]]
            for name in outputs[0][0]:
                found[f"{name}_text"] = float(np.mean([values[name] for values, _ in outputs]))
                errors = np.array([errors[name] for _, errors in outputs])
                found[f"{name}_text_se"] = float(np.sqrt((errors**2).sum()) / len(errors))
        for name, value in found.items():
            columns.setdefault(name, [np.nan] * len(layers))[row] = value
    added = pd.DataFrame({name: as_stored(np.array(values)) for name, values in columns.items()}, index=layers.index)
    return pd.concat([layers, added], axis=1)


def _expert(text: Any) -> int | str | None:
    """The expert of a neuron frame's row as `expert_group` takes it."""
    if pd.isna(text):
        return None
    return int(text) if str(text).isdigit() else str(text)
