"""What breaking a symmetry costs: coefficients of one MLP, or of several, are replaced while the model reads text.

Fits and gauges come from calibration text, costs from other text. The stream that enters each layer is recorded once; an
intervention in layer L computes the layers from L on only. Every layer starts with the identity, whose loss must be that of
the untouched model to the last bit. Differences are paired token by token; their standard errors are over sequences.

Two things would dominate unseen. The first position of a sequence holds a massive activation in many models, so it is left
alone unless asked for. And single neurons can carry most of a layer's cost, so every result names the neurons whose
coefficient changes most, and is repeated with the first of them spared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..arguments import whole_number
from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.layout import Site
from ..errors import BadOption, FactorsDisagree, NotRunnable
from ..selection import select_layers
from .activations import text_model
from .corpus import Tokens
from .interventions import INTERVENTIONS, Calibration, Fitted, change
from .language_model import LanguageModel
from .replay import Replayer, divergences, token_losses

DEFAULT = tuple(name for name in INTERVENTIONS if name != "identity")
_BATCH_TOKENS = 1024
_NAMED = 8  # neurons that a row names

Progress = Callable[[Iterable[Any]], Iterable[Any]]
Mask = Float[Tensor, " d_mlp"]


@dataclass(frozen=True)
class Target:
    """What is edited at once: MLPs, and which of their neurons (1 edited, 0 left alone)."""

    label: str
    sites: tuple[Site, ...]
    neurons: str = "all"
    masks: Mapping[Site, Mask] | None = None

    @property
    def first(self) -> int:
        """The lowest layer."""
        return min(site.layer for site in self.sites)


@dataclass(frozen=True)
class Cost:
    """Change of the loss and divergence of one run, by sequence: [sequence] sums over its tokens, and their numbers."""

    loss: np.ndarray
    divergence: np.ndarray
    losses: np.ndarray
    positions: np.ndarray

    def row(self, suffix: str = "") -> dict[str, float]:
        """Means per token, with standard errors over sequences."""
        out = {}
        for name, sums, counts in (("delta_loss", self.loss, self.losses), ("kl", self.divergence, self.positions)):
            mean, count = sums.sum() / counts.sum(), len(sums)
            residual = (sums - mean * counts) / counts.mean()
            out[f"{name}{suffix}"] = float(mean)
            out[f"{name}{suffix}_se"] = float(residual.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
        return out


def causal(
    model: str | os.PathLike | Checkpoint,
    text: Any = None,
    *,
    layers: Iterable[int] | str | None = None,
    interventions: Sequence[str] = DEFAULT,
    together: bool = False,
    tokens: int = 2048,
    calibration: int = 4096,
    length: int = 256,
    spare: int = 1,
    subset: tuple[str, float, pd.DataFrame] | None = None,
    first_position: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
    module: Any = None,
    tokenizer: Any = None,
    seed: int = 0,
    progress: Progress = iter,
    **options: Any,
) -> pd.DataFrame:
    """The causal cost of interventions in the gated MLPs of a language model.

    Args:
        model: a reference as `open_checkpoint` takes it, or an opened checkpoint.
        text: what `read_texts` takes; None for the sample that comes with the package.
        layers: which layers; all by default.
        interventions: names of `INTERVENTIONS`.
        together: edit all chosen layers at once, not one at a time.
        tokens, calibration: at most so many tokens for the costs and for gauges and fits; never the same ones.
        length: tokens of a sequence.
        spare: how many neurons, by the energy of their change on the calibration text, are left alone in the second
            run of each intervention; 0 for no second run.
        subset: (measure, share, neuron frame): edit the share of neurons of each MLP with the largest values of that
            column only, and as a control as many random others of the same output energy.
        first_position: edit the first position of each sequence too.
        device, dtype, module, tokenizer: as in `probe_text`.
        seed: of the random control.
        progress: wraps the iteration over runs.
        **options: of `open_checkpoint`, if `model` is a reference.

    Returns:
        A row per target and intervention: model, layers, expert, neurons ("all", or which subset), intervention, gauge,
        delta_loss and kl (nats a token; KL(clean || changed) over all positions) with `_se`, the same with suffix
        `_spared`, spared (how many), top_neurons, n_tokens. An intervention that changes nothing costs exactly 0.

    Raises:
        GluProbeError: one of its subclasses.
    """
    _refuse_unknown(interventions)
    spare, seed = whole_number("spare", spare, 0), whole_number("seed", seed, 0)
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model, **options)
    runner, corpus = text_model(
        checkpoint, text, tokens=tokens + calibration, length=length, device=device, dtype=dtype, module=module,
        tokenizer=tokenizer,
    )  # fmt: skip
    fitting, evaluation = _parts(corpus, tokens, calibration)
    sites = runner.heard(select_layers(layers, checkpoint.layers_present["text"]))
    runner.check(evaluation.sequences[0][None], sites)
    first = 0 if first_position else 1
    fits = _fit(runner, sites, fitting, first)
    energies = _energies(runner, sites, fitting, fits, interventions, first)
    targets = _targets(sites, together, subset, seed)
    rows = []
    with _Runs(runner, evaluation, fits, first, {site.layer for site in sites}) as runs:
        steps = [(target, name) for target in targets for name in interventions]
        for target, name in progress(steps):
            ranking = _ranking(target, {site: energies[site][name] for site in target.sites})
            cost = runs.cost(target, name)
            row = {
                "model": checkpoint.name,
                "layers": target.label,
                "expert": _only({site.expert for site in target.sites}),
                "neurons": target.neurons,
                "intervention": name,
                "gauge": INTERVENTIONS[name].gauge,
                **cost.row(),
            }
            if spare:
                row |= runs.cost(target, name, spared=ranking[:spare]).row("_spared")
            row |= {
                "spared": spare,
                "top_neurons": ", ".join(_neuron_label(target, place) for place in ranking[:_NAMED]),
                "n_tokens": int(cost.losses.sum()),
            }
            rows.append(row)
    return pd.DataFrame(rows)


def _refuse_unknown(interventions: Sequence[str]) -> None:
    unknown = [name for name in interventions if name not in INTERVENTIONS]
    if unknown or not interventions:
        raise BadOption(
            f"there is no intervention {unknown[0]!r}" if unknown else "no intervention is asked for",
            hint=f"There are {', '.join(INTERVENTIONS)}",
        )


def _parts(corpus: Tokens, tokens: int, calibration: int) -> tuple[Tokens, Tokens]:
    """Calibration and evaluation text, of which no sequence is in both."""
    if len(corpus.sequences) < 4:
        raise BadOption(
            f"the text makes {len(corpus.sequences)} sequences, and calibration and evaluation need two each at least",
            hint="Give more text, or a smaller --length",
        )
    return corpus.split(calibration / (tokens + calibration))


def _only(values: set) -> Any:
    return next(iter(values)) if len(values) == 1 else None


def _neuron_label(target: Target, place: tuple[Site, int]) -> str:
    site, neuron = place
    return str(neuron) if len(target.sites) == 1 else f"{site.layer}:{neuron}"


def _flat(branch: Tensor, first: int) -> Tensor:
    return branch[:, first:].reshape(-1, branch.shape[-1]).float()


def _fit(runner: LanguageModel, sites: Sequence[Site], text: Tokens, first: int) -> dict[Site, Fitted]:
    """Gauges and fits of every MLP: two passes over the calibration text."""
    sums = {site: Calibration(runner.checkpoint.activation_of(site), site.d_mlp) for site in sites}
    for phase in ("first", "second"):
        for _, ids in text.batches(_BATCH_TOKENS):
            runner.listen(
                ids, sites, lambda site, a, b, phase=phase: getattr(sums[site], phase)(_flat(a, first), _flat(b, first))
            )
    return {site: one.fitted() for site, one in sums.items()}


def _energies(
    runner: LanguageModel, sites: Sequence[Site], text: Tokens, fits: Mapping[Site, Fitted], names: Sequence[str], first: int
) -> dict[Site, dict[str, Tensor]]:
    """E[(change of the coefficient)^2] |v|^2 of every neuron under every intervention, on the first calibration batch."""
    out: dict[Site, dict[str, Tensor]] = {}

    def add(site: Site, a: Tensor, b: Tensor) -> None:
        a, b = _flat(a, first), _flat(b, first)
        size = runner.value(site).float().square().sum(1)
        out[site] = {name: change(name, a, b, fits[site]).square().mean(0).cpu() * size.cpu() for name in names}

    _, ids = next(text.batches(_BATCH_TOKENS))
    runner.listen(ids, sites, add)
    return out


def _ranking(target: Target, energies: Mapping[Site, Tensor]) -> list[tuple[Site, int]]:
    """The target's neurons by falling energy of their change."""
    every = []
    for site in target.sites:
        energy = energies[site] if target.masks is None else energies[site] * target.masks[site]
        top = energy.topk(min(64, len(energy)))
        every += [(value, site, neuron) for value, neuron in zip(top.values.tolist(), top.indices.tolist(), strict=True)]
    every.sort(key=lambda one: -one[0])
    return [(site, neuron) for value, site, neuron in every if value > 0]


# -- targets -------------------------------------------------------------------------------------


def _targets(
    sites: Sequence[Site], together: bool, subset: tuple[str, float, pd.DataFrame] | None, seed: int
) -> list[Target]:
    layers = sorted({site.layer for site in sites})
    span = str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
    groups = [(span, tuple(sites))] if together else [(str(site.layer), (site,)) for site in sites]
    if subset is None:
        return [Target(label, group) for label, group in groups]
    measure, share, frame = subset
    rng = np.random.default_rng(seed)
    chosen = {site: _top_and_control(site, measure, share, frame, rng) for site in sites}
    words = (f"top {share:.0%} by {measure}".replace("%", " %"), "random of equal energy")
    return [
        Target(label, group, words[which], {site: chosen[site][which] for site in group})
        for label, group in groups
        for which in (0, 1)
    ]


def _top_and_control(
    site: Site, measure: str, share: float, frame: pd.DataFrame, rng: np.random.Generator
) -> tuple[Mask, Mask]:
    """The neurons with the largest values, and for each of them a random other one of nearly its output energy."""
    energy_column = "output_energy_text" if "output_energy_text" in frame else "output_energy"
    absent = [name for name in (measure, energy_column) if name not in frame]
    if absent:
        raise BadOption(f"the neuron frame has no column {absent[0]!r}", hint="Give the frame of a report")
    expert = frame["expert"].fillna("").astype(str)
    rows = frame[(frame["tower"] == site.tower) & (frame["layer"] == site.layer) & (expert == str(site.expert or ""))]
    values, energy = (rows[name].to_numpy(dtype=float) for name in (measure, energy_column))
    count = max(1, round(share * len(rows)))
    if len(rows) != site.d_mlp or not 0 < share <= 0.5 or np.isfinite(values).sum() < 2 * count:
        raise BadOption(
            f"{share!r} of the neurons of {site.where} cannot be chosen by {measure} with as many others left",
            hint="Give a share up to 0.5, and the frame of the same layers",
        )
    top = np.argsort(-np.where(np.isfinite(values), values, -np.inf), kind="stable")[:count]
    left = sorted(set(range(site.d_mlp)) - set(top.tolist()), key=lambda neuron: energy[neuron])
    control = []
    for neuron in rng.permutation(top):
        at = int(np.searchsorted([energy[other] for other in left], energy[neuron]))
        control.append(left.pop(min(max(at + int(rng.integers(-2, 3)), 0), len(left) - 1)))
    masks = torch.zeros(2, site.d_mlp)
    masks[0, torch.from_numpy(top.copy())] = 1
    masks[1, torch.tensor(control)] = 1
    return masks[0], masks[1]


# -- runs ----------------------------------------------------------------------------------------


class _Runs:
    """Evaluation text whose clean run is recorded, and reruns of it with edits."""

    def __init__(
        self, runner: LanguageModel, text: Tokens, fits: Mapping[Site, Fitted], first: int, layers: set[int]
    ) -> None:
        self._runner, self._fits, self._first = runner, fits, first
        try:
            self._replayer = Replayer(runner.bridge)
        except LookupError as error:
            raise NotRunnable(str(error), where=runner.checkpoint.name) from None
        self._batches = [ids for _, ids in text.batches(_BATCH_TOKENS)]
        self._residuals: list[dict[int, Tensor]] = []
        self._losses: list[Tensor] = []
        self._clean: tuple[int, list[Tensor]] | None = None
        self._layers = layers

    def __enter__(self) -> _Runs:
        for ids in self._batches:
            with self._replayer.recording(self._layers) as residuals:
                logits = self._logits(ids, {})
            self._residuals.append(dict(residuals))
            self._losses.append(token_losses(logits, ids))
        return self

    def __exit__(self, *_: Any) -> None:
        self._residuals.clear()

    def _logits(self, ids: Tensor, edits: Mapping[Site, Callable[[Tensor, Tensor], Tensor]]) -> Tensor:
        """[batch, position, vocabulary], with the change that an edit makes of a and b added to S(a) b."""
        held: dict[str, Tensor] = {}

        def keep(tensor: Tensor, hook: Any, *, name: str) -> None:
            held[name] = tensor

        def replace(tensor: Tensor, hook: Any, *, site: Site) -> Tensor:
            listener = self._runner.listeners[site]
            return tensor + edits[site](held.pop(listener.gate), held.pop(listener.up)).to(tensor)

        hooks = []
        for site in edits:
            listener = self._runner.listeners[site]
            hooks += [(name, partial(keep, name=name)) for name in (listener.gate, listener.up)]
            hooks.append((listener.product, partial(replace, site=site)))
        return self._runner.logits(ids, hooks)

    def _edit(self, name: str, site: Site, mask: Mask | None) -> Callable[[Tensor, Tensor], Tensor]:
        def edit(a: Tensor, b: Tensor) -> Tensor:
            delta = change(name, a.float(), b.float(), self._fits[site])
            if mask is not None:
                delta = delta * mask.to(delta)
            delta[:, : self._first] = 0
            return delta

        return edit

    def cost(self, target: Target, name: str, *, spared: Sequence[tuple[Site, int]] = ()) -> Cost:
        """Of one intervention on a target, some neurons left alone."""
        parts = []
        for index, ids in enumerate(self._batches):
            edits = {}
            for site in target.sites:
                mask = None if target.masks is None else target.masks[site].clone()
                alone = [neuron for where, neuron in spared if where is site]
                if alone:
                    mask = torch.ones(site.d_mlp) if mask is None else mask
                    mask[alone] = 0
                edits[site] = self._edit(name, site, mask)
            clean = self._clean_logits(target, index, ids)
            with self._replayer.starting_at(target.first, self._residuals[index][target.first]):
                logits = self._logits(ids, edits)
            losses = token_losses(logits, ids) - self._losses[index]
            kl = divergences(clean, logits)
            parts.append(
                (losses.sum(1).numpy(), kl.sum(1).numpy(), np.full(len(ids), losses.shape[1]), np.full(len(ids), kl.shape[1]))
            )
        return Cost(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _clean_logits(self, target: Target, index: int, ids: Tensor) -> Tensor:
        """Logits of the identity in this target's layers, which must be those of the untouched model."""
        if self._clean is None or self._clean[0] != target.first:
            self._clean = (target.first, [])
        if index == len(self._clean[1]):
            edits = {site: self._edit("identity", site, None) for site in target.sites}
            with self._replayer.starting_at(target.first, self._residuals[index][target.first]):
                logits = self._logits(ids, edits)
            if not torch.equal(token_losses(logits, ids), self._losses[index]):
                raise FactorsDisagree(
                    "the identity changes the model's loss: layers cannot be replayed here",
                    where=f"{self._runner.checkpoint.name}, layer {target.first}",
                )
            self._clean[1].append(logits)
        return self._clean[1][index]
