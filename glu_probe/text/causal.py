"""What breaking a symmetry costs: coefficients of one MLP, or of several, are replaced while the model reads text.

Fits and gauges come from calibration text, costs from other text. The stream that enters each layer is recorded once; an
intervention in layer L computes the layers from L on only. Every target starts with the identity, which must cost nothing
to the last bit. Differences are paired token by token; their standard errors are over sequences.

Two things would dominate unseen. The first position of a sequence holds a massive activation in many models, so it is left
alone unless asked for. And single neurons can carry most of a layer's cost, so every result names the neurons whose
coefficient changes most, and is repeated with the first of them spared.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ..arguments import whole_number
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.sites import Site
from ..errors import BadOption, TextTooShort
from ..identity import text_software, weights_sha256
from ..parts import Parts
from ..phrases import counted
from ..probing import probe
from ..selection import select_layers
from .activations import opened, refuse_few, text_model
from .interventions import INTERVENTIONS, Calibration, Fitted, change
from .language_model import LanguageModel
from .runs import BATCH_TOKENS, Case, Cost, Runs
from .targets import PerNeuron, Target, ranking, refuse_unknown_measure, targets_of, with_subsets
from .tokens import Tokens

DEFAULT = tuple(name for name in INTERVENTIONS if name != "identity")
_RANKING_TOKENS = 1024  # enough to tell which neurons change most
_NAMED = 8  # neurons that a row names

Progress = Callable[[Iterable[Any]], Iterable[Any]]


def causal(
    model: str | os.PathLike | Checkpoint | torch.nn.Module,
    text: Any = None,
    *,
    layers: Iterable[int] | str | None = None,
    interventions: Sequence[str] = DEFAULT,
    together: bool = False,
    tokens: int = 2048,
    calibration: int = 4096,
    length: int = 256,
    spare: int = 1,
    subset: tuple[str, float] | tuple[str, float, pd.DataFrame] | None = None,
    first_position: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    module: torch.nn.Module | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    parts: str | os.PathLike | None = None,
    progress: Progress = iter,
    estimate: Callable[[float], object] | None = None,
    **options: Any,
) -> pd.DataFrame:
    """The causal cost of interventions in the gated MLPs of a language model.

    Args:
        model: a reference as `open_checkpoint` takes it, an opened checkpoint, or a model in memory; see `probe_text`.
        text: what `read_texts` takes; None for the sample that comes with the package.
        layers: which layers; all by default.
        interventions: their names; `glu-probe ls interventions` says what there is. All but the identity by default.
        together: edit all chosen layers at once, not one at a time.
        tokens, calibration: at most so many tokens for the costs and for gauges and fits; never the same sequences.
        length: tokens of a sequence.
        spare: how many neurons, by the energy of their change on the calibration text, are left alone in the second
            run of each intervention; 0 for no second run.
        subset: (measure, share) or (measure, share, neuron frame): edit the share of each MLP's neurons that is
            highest by that column, and as a control as many random others of the same output energy. Without a frame
            that of the weight report is made; measures on text need the frame of `probe_text`.
        first_position: edit the first position of each sequence too.
        device, dtype, module, tokenizer: as in `probe_text`.
        seed: of the random controls.
        parts: a directory in which rows are kept as they come. The same call again goes on where it was interrupted;
            a call with other options, text or model is refused.
        progress: wraps the iteration over targets and batches.
        estimate: called before the first run with the seconds that all will take, about.
        **options: of `open_checkpoint`, if `model` is no opened checkpoint.

    Returns:
        A row per target and intervention. model, layers ("7", "0-7"), expert, neurons ("all", or which subset),
        energy_share and other_energy_share (of the MLPs' output energy, the part of the neurons edited and that of the
        subset they are compared with), intervention, gauge; delta_loss and kl, nats a token, with standard errors
        `_se`: change of the next-token loss, and KL(clean || changed) over all positions; output_gap: energy of
        the change of the MLPs' output over that of the output, on every eighth position; the same columns with
        suffix `_spared`, missing where nothing is spared; spared (how many neurons), top_neurons (those whose change has the
        most energy), n_tokens (with a loss) and n_sequences. `attrs` says what was run: "text", "calibration",
        "clean_loss" in nats a token, "options" and "versions".

    Raises:
        NotRunnable: the model cannot be run or replayed, or nothing in these layers can be listened to.
        FactorsDisagree: what the factors compute is not what the model computes, or the identity changes anything.
        ModelTooLarge, NoTokenizer, TextTooShort, TextUnreadable, BadOption: and other subclasses of GluProbeError.
    """
    interventions = _known(interventions)
    least = {"tokens": 2, "calibration": 2, "spare": 0, "seed": 0}
    given = {"tokens": tokens, "calibration": calibration, "spare": spare, "seed": seed}
    tokens, calibration, spare, seed = (whole_number(name, given[name], low) for name, low in least.items())
    if subset is not None and len(subset) == 2:
        _refuse_measure(str(subset[0]))
    checkpoint, module = opened(model, module, options)
    runner, corpus = text_model(
        checkpoint, text, tokens=tokens + calibration, length=length, device=device, dtype=dtype, module=module,
        tokenizer=tokenizer, suits=lambda found: refuse_few(_split(found, tokens, calibration)[0], first_position, "the calibration text"),
    )  # fmt: skip
    try:
        fitting, evaluation = _split(corpus, tokens, calibration)
        present = sorted({layer for layers in checkpoint.layers_present.values() for layer in layers})
        sites = runner.heard(select_layers(layers, present))
        runner.check(evaluation.sequences[0][None], sites)
        subset = _with_frame(subset, checkpoint, sites)
        facts = {
            "interventions": list(interventions), "together": together, "spare": spare, "seed": seed,
            "first_position": first_position, "device": str(runner.device), "dtype": str(runner.dtype).removeprefix("torch."),
            "subset": None if subset is None else [*subset[:2], _frame_sha256(subset[2], subset[0])],
        }  # fmt: skip
        attrs = {
            "text": evaluation.words(), "calibration": fitting.words(), "options": facts, "versions": text_software(),
        }  # fmt: skip
        job = _Job(runner, fitting, evaluation, sites, interventions, 0 if first_position else 1)
        with nullcontext() if parts is None else Parts(parts, _fingerprint(checkpoint, module, attrs)) as kept:
            rows = job.rows(together, subset, spare, seed, kept, progress, estimate)
        frame = pd.DataFrame([{"model": checkpoint.name, **row} for row in rows])
        frame["expert"] = frame["expert"].astype("string")
        frame.attrs = attrs | {"clean_loss": job.clean_loss}
        return frame
    finally:
        runner.release()


def _known(interventions: Sequence[str]) -> tuple[str, ...]:
    names = (interventions,) if isinstance(interventions, str) else tuple(dict.fromkeys(interventions))
    unknown = [name for name in names if name not in INTERVENTIONS]
    if unknown or not names:
        raise BadOption(
            f"there is no intervention {unknown[0]!r}" if unknown else "no intervention is asked for",
            hint=f"There are {', '.join(INTERVENTIONS)}",
        )
    return names


def _split(corpus: Tokens, tokens: int, calibration: int) -> tuple[Tokens, Tokens]:
    """Calibration and evaluation text, of which no sequence is in both."""
    if len(corpus.sequences) < 4:
        raise TextTooShort(
            f"the text makes {counted(len(corpus.sequences), 'sequence')}, and calibration and evaluation need two each at least",
            hint="Give more text, more tokens, or a smaller length",
        )
    count = len(corpus.sequences)
    return corpus.split(min(max(calibration / (tokens + calibration), 2 / count), 1 - 2 / count))


def _refuse_measure(name: str) -> None:
    """Make sure, before anything is run, that the weight report has the measure of a subset."""
    refuse_unknown_measure(name)
    if name.endswith("_text"):
        raise BadOption(f"{name} is a measure on text", hint="Give (measure, share, probe_text(...).neurons)")


def _with_frame(
    subset: tuple | None, checkpoint: Checkpoint, sites: Sequence[Site]
) -> tuple[str, float, pd.DataFrame] | None:
    if subset is None or len(subset) == 3:
        return subset
    measure, share = subset
    return measure, share, probe(checkpoint, layers=sorted({site.layer for site in sites})).neurons


def _frame_sha256(frame: pd.DataFrame, measure: str) -> str:
    columns = [name for name in ("tower", "layer", "expert", measure) if name in frame]
    return hashlib.sha256(frame[columns].to_csv(index=False).encode()).hexdigest()


def _fingerprint(checkpoint: Checkpoint, module: Any, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that decides about the rows of a target, by name; which other targets there are does not."""
    facts: dict[str, Any] = {"model": checkpoint.provenance() | {"notes": None}}
    if module is not None:
        facts["weights"] = weights_sha256(module)
    return facts | {name: attrs[name] for name in ("text", "calibration", "versions")} | attrs["options"]


def _rows(kept: Parts, target: Target) -> list[dict[str, Any]] | None:
    """What was kept of a target; None if it is not finished."""
    found = kept.get(_part(target))
    return None if found is None else json.loads(found)


def _flat(branch: Tensor, first: int) -> Tensor:
    return branch[:, first:].reshape(-1, branch.shape[-1]).float()


class _Job:
    """Targets, and their rows one after another."""

    def __init__(
        self,
        runner: LanguageModel,
        fitting: Tokens,
        evaluation: Tokens,
        sites: Sequence[Site],
        interventions: Sequence[str],
        first: int,
    ) -> None:
        self._runner, self._fitting, self._evaluation, self._sites = runner, fitting, evaluation, sites
        self._names, self._first = interventions, first
        self.clean_loss = math.nan

    def rows(
        self,
        together: bool,
        subset: tuple[str, float, pd.DataFrame] | None,
        spare: int,
        seed: int,
        kept: Parts | None,
        progress: Progress,
        estimate: Callable[[float], object] | None,
    ) -> list[dict[str, Any]]:
        fits = self._fits()
        changes = self._changes(fits)
        targets = targets_of(self._sites, together)
        if subset is not None:
            energies = {site: one["zero_ablation"] for site, one in changes.items()}
            targets = with_subsets(targets, energies, *subset, seed)
        before = {} if kept is None else {target: _rows(kept, target) for target in targets}
        found = {target: rows for target, rows in before.items() if rows is not None}
        waiting = [target for target in targets if target not in found]
        runs = Runs(self._runner, self._evaluation, fits, self._first, {target.first for target in waiting or targets})
        self.clean_loss = runs.clean_loss
        if waiting:
            runs.check_head()
            runs.check(max(waiting, key=lambda target: target.first), everywhere=True)
            if estimate is not None:
                estimate(runs.seconds(waiting, len(self._names) * (2 if spare else 1)))
        costs: list[list[Cost]] = []
        for target, index in progress([(target, index) for target in waiting for index in range(len(runs))]):
            ranks = {
                name: ranking(target, {site: changes[site][name] for site in target.sites}) for name in self._names
            }
            cases = [Case(name) for name in self._names]
            cases += [Case(name, tuple(ranks[name][:spare])) for name in self._names] if spare else []
            if index == 0:
                runs.check(target)
            costs.append(runs.costs(target, cases, index))
            if index == len(runs) - 1:
                joined = [Cost.joined(one) for one in zip(*costs, strict=True)]
                costs = []
                found[target] = [
                    _row(target, name, joined[n], joined[n + len(self._names)] if spare else None, ranks[name], spare)
                    for n, name in enumerate(self._names)
                ]
                if kept is not None:
                    kept.keep(_part(target), json.dumps(found[target], indent=1).encode())
        return [row for target in targets for row in found[target]]

    def _fits(self) -> dict[Site, Fitted]:
        """Gauges and fits of every MLP: two passes over the calibration text."""
        sums = {site: Calibration(self._runner.activation(site), site.d_mlp) for site in self._sites}
        for phase in ("first", "second"):

            def add(site: Site, a: Tensor, b: Tensor, phase: str = phase) -> None:
                getattr(sums[site], phase)(_flat(a, self._first), _flat(b, self._first))

            self._listen(self._fitting, add)
        return {site: one.fitted() for site, one in sums.items()}

    def _changes(self, fits: Mapping[Site, Fitted]) -> dict[Site, dict[str, PerNeuron]]:
        """E[(change of the coefficient)^2] |v|^2 of every neuron under every intervention, on some calibration text."""
        names = dict.fromkeys((*self._names, "zero_ablation"))
        sums = {site: {name: torch.zeros(site.d_mlp, dtype=torch.float64) for name in names} for site in self._sites}

        def add(site: Site, a: Tensor, b: Tensor) -> None:
            a, b = _flat(a, self._first), _flat(b, self._first)
            for name, total in sums[site].items():
                total += change(name, a, b, fits[site]).square().sum(0).cpu()

        count = self._listen(self._fitting, add, at_most=_RANKING_TOKENS)
        sizes = {site: self._runner.value(site).float().square().sum(1).cpu() / count for site in self._sites}
        return {site: {name: total * sizes[site] for name, total in one.items()} for site, one in sums.items()}

    @torch.no_grad()
    def _listen(self, text: Tokens, add: Callable[[Site, Tensor, Tensor], None], at_most: float = math.inf) -> int:
        """Hand over the branches of a text, or of a beginning of it; returns the number of positions that take part."""
        seen = count = 0
        for _, ids in text.batches(BATCH_TOKENS):
            if seen < at_most:
                self._runner.listen(ids, self._sites, add)
                seen, count = seen + ids.numel(), count + ids[:, self._first :].numel()
        return count


def _part(target: Target) -> str:
    """A name for the target, fit for a file."""
    which = {"all": ""}.get(target.neurons, " control" if target.neurons.startswith("random") else " top")
    expert = "" if target.expert is None else f" {target.expert}"
    words = target.layers if len(target.layers) < 100 else hashlib.sha256(target.layers.encode()).hexdigest()
    return f"{words}{expert}{which}"


def _row(
    target: Target, name: str, cost: Cost, alone: Cost | None, ranks: Sequence[tuple[Site, int]], spare: int
) -> dict[str, Any]:
    names = ("delta_loss_spared", "delta_loss_spared_se", "kl_spared", "kl_spared_se", "output_gap_spared")
    spared = dict.fromkeys(names, math.nan) if alone is None else alone.row("_spared")
    return {
        "layers": target.layers, "expert": target.expert, "neurons": target.neurons,
        "energy_share": target.energy_share, "other_energy_share": target.other_energy_share,
        "intervention": name, "gauge": INTERVENTIONS[name].gauge,
        **cost.row(), **spared,
        "spared": len(ranks[:spare]), "top_neurons": ", ".join(target.label(place) for place in ranks[:_NAMED]),
        "n_tokens": int(cost.losses.sum()), "n_sequences": len(cost.loss),
    }  # fmt: skip
