"""Reruns of a text with edited coefficients, against its clean run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.sites import Site
from ..errors import FactorsDisagree, NotRunnable
from .interventions import Fitted, change
from .language_model import LanguageModel
from .loading import available_memory, first_line
from .replay import Entry, Replayer, Residual, cross_entropies, probabilities
from .targets import Place, Target
from .tokens import Tokens

BATCH_TOKENS = 1024
_CHECKED = 16  # tokens on which every target's identity is checked
_EVERY = 8  # one position in so many is enough for the energies of outputs
_LOGITS = 1 << 25  # numbers of logits at once
_HEAD_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.1, torch.float16: 2e-2}


@dataclass(frozen=True)
class Case:
    """An intervention, and neurons that it leaves alone."""

    intervention: str
    spared: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Cost:
    """What one case costs.

    Attributes:
        loss, divergence: [sequence] sums over its tokens, nats.
        losses, positions: [sequence] numbers of tokens that have them.
        gap, output: energies of the change of the MLPs' outputs, and of those outputs, on every
            eighth position that is edited.
    """

    loss: np.ndarray
    divergence: np.ndarray
    losses: np.ndarray
    positions: np.ndarray
    gap: float
    output: float

    @classmethod
    def joined(cls, parts: Sequence[Cost]) -> Cost:
        """Of all batches."""
        loss, divergence, losses, positions = (
            np.concatenate([getattr(p, n) for p in parts]) for n in ("loss", "divergence", "losses", "positions")
        )
        return cls(loss, divergence, losses, positions, sum(p.gap for p in parts), sum(p.output for p in parts))

    def row(self, suffix: str = "") -> dict[str, float]:
        """Means per token, with standard errors over sequences."""
        out: dict[str, float] = {}
        for name, sums, counts in (("delta_loss", self.loss, self.losses), ("kl", self.divergence, self.positions)):
            mean, count = sums.sum() / counts.sum(), len(sums)
            residual = (sums - mean * counts) / counts.mean()
            error = float(residual.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
            out |= {f"{name}{suffix}": float(mean), f"{name}{suffix}_se": error}
        return out | {f"output_gap{suffix}": self.gap / self.output if self.output else math.nan}


@dataclass(frozen=True)
class _Clean:
    """A batch, and what the untouched model makes of it."""

    ids: Tensor
    entries: Mapping[int, Entry]
    final: Residual
    entropy: Tensor  # [token]
    loss: Tensor  # [token]
    probability: Tensor | None  # [token, vocabulary], where memory allows


# From a and b to the change of the coefficient.
Edit = Callable[[Tensor, Tensor], Tensor]


class Runs:
    """An evaluation text whose clean run is recorded, and its reruns.

    Attributes:
        clean_loss: nats a token.
    """

    def __init__(
        self, runner: LanguageModel, text: Tokens, fits: Mapping[Site, Fitted], first: int, layers: set[int]
    ) -> None:
        """Record the clean run.

        Args:
            runner: the model.
            text: to evaluate on.
            fits: of the MLPs that will be edited.
            first: position from which on they are edited.
            layers: where targets begin.

        Raises:
            NotRunnable: the model's layers cannot be replayed.
        """
        self._runner, self._fits, self._first = runner, fits, first
        try:
            self._replayer = Replayer(runner.bridge)
        except LookupError as error:
            raise NotRunnable(
                str(error),
                where=runner.checkpoint.name,
                hint="Costs need a model of layers one after another; `glu-probe activations` may still run it",
            ) from None
        self._room = _room(runner)
        self._vocabulary = runner.bridge.original_model.config.get_text_config().vocab_size
        self._values: dict[Site, Tensor] = {}
        self._batches = [self._recorded(ids, layers) for _, ids in text.batches(BATCH_TOKENS)]
        # apart: another shape of the batch is computed in another order
        self._piece = self._recorded(text.sequences[0][None, :_CHECKED], layers)
        losses = torch.cat([b.loss.reshape(b.ids.shape)[:, :-1].flatten() for b in self._batches])
        self.clean_loss = float(losses.mean())

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._batches)

    def tokens(self, index: int) -> int:
        """Tokens of a batch."""
        return self._batches[index].ids.numel()

    # -- pieces of a run ---------------------------------------------------------------------------

    @torch.inference_mode()
    def _recorded(self, ids: Tensor, layers: set[int]) -> _Clean:
        ids = ids.to(self._runner.device)
        with self._replayer.recording(layers) as entries, self._replayer.without_head() as final:
            self._runner.logits(ids)
        room = ids.numel() * self._vocabulary * 4
        keep = room <= self._room
        self._room -= room if keep else 0
        entropies, losses, kept = [], [], []
        for rows in self._rows(ids):
            logits = self._head(final[0], ids, rows)
            p = probabilities(logits)
            entropy, loss = cross_entropies(p, logits, _following(ids)[rows])
            entropies.append(entropy)
            losses.append(loss)
            kept += [p] if keep else []
        return _Clean(
            ids, dict(entries), final[0], torch.cat(entropies), torch.cat(losses), torch.cat(kept) if keep else None
        )

    def _rows(self, ids: Tensor) -> Iterator[slice]:
        """A few tokens of a batch at a time."""
        step = 1 << max(6, (_LOGITS // self._vocabulary).bit_length() - 1)  # batches are often powers of 2 too
        return (slice(start, start + step) for start in range(0, ids.numel(), step))

    def _head(self, stream: Residual, ids: Tensor, rows: slice) -> Tensor:
        """Logits [token, vocabulary] of these tokens of a batch: what follows the layers knows no neighbours."""
        stream, ids = stream.flatten(0, 1)[rows, None], ids.flatten()[rows, None]
        with self._replayer.starting_at(self._replayer.depth, stream):
            return self._runner.logits(ids)[:, 0]

    def _stream(self, clean: _Clean, start: int, edits: Mapping[Site, Edit]) -> tuple[Residual, list[float]]:
        """The stream behind the last layer, layers from `start` on computed, and energies of the edits (see `Cost`)."""
        held: dict[str, Tensor] = {}
        energies = [0.0, 0.0]

        def keep(tensor: Tensor, hook: Any, *, name: str) -> None:
            held[name] = tensor

        def replace(tensor: Tensor, hook: Any, *, site: Site) -> Tensor:
            listener, shape = self._runner.listeners[site], (*clean.ids.shape, -1)
            on_a, on_b, _ = listener.multipliers
            a, b = held.pop(listener.gate).reshape(shape) * on_a, held.pop(listener.up).reshape(shape) * on_b
            delta = edits[site](a.float(), b.float()).div_(on_b)
            delta[:, : self._first] = 0
            product = tensor.reshape(shape).float()
            for place, coefficients in enumerate((delta, product)):
                some = coefficients[:, self._first :: _EVERY] @ self._value(site)
                energies[place] += some.double().square().sum().item()
            return (product + delta).to(tensor).reshape(tensor.shape)

        hooks: list[tuple[str, Callable[..., Any]]] = []
        for site in edits:
            listener = self._runner.listeners[site]
            hooks += [(name, partial(keep, name=name)) for name in (listener.gate, listener.up)]
            hooks.append((listener.product, partial(replace, site=site)))
        with self._replayer.starting_at(start, *clean.entries[start]), self._replayer.without_head() as final:
            self._runner.logits(clean.ids, hooks)
        return final[0], energies

    def _value(self, site: Site) -> Tensor:
        if site not in self._values:
            self._values = {site: self._runner.value(site).float()}
        return self._values[site]

    def _edits(self, target: Target, case: Case) -> dict[Site, Edit]:
        edits: dict[Site, Edit] = {}
        for site in target.sites:
            mask = torch.ones(site.d_mlp) if target.masks is None else target.masks[site].clone()
            for where, neuron in case.spared:
                if where == site:
                    mask[neuron] = 0
            edits[site] = partial(_edit, case.intervention, self._fits[site], mask.to(self._runner.device))
        return edits

    # -- costs -------------------------------------------------------------------------------------

    def costs(self, target: Target, cases: Sequence[Case], index: int) -> list[Cost]:
        """Of every case, on one batch."""
        return self._costs(self._batches[index], target, cases)

    @torch.inference_mode()
    def _costs(self, clean: _Clean, target: Target, cases: Sequence[Case]) -> list[Cost]:
        ids, following = clean.ids, _following(clean.ids)
        runs = [self._stream(clean, target.first, self._edits(target, case)) for case in cases]
        under_p, under_text = (torch.zeros(len(cases), ids.numel(), dtype=torch.float64) for _ in range(2))
        for rows in self._rows(ids):
            kept = clean.probability
            p = probabilities(self._head(clean.final, ids, rows)) if kept is None else kept[rows]
            for number, (stream, _) in enumerate(runs):
                found = cross_entropies(p, self._head(stream, ids, rows), following[rows])
                under_p[number, rows], under_text[number, rows] = found
        costs = []
        for number, (_, energies) in enumerate(runs):
            kl = (under_p[number] - clean.entropy).reshape(ids.shape)
            loss = (under_text[number] - clean.loss).reshape(ids.shape)[:, :-1]
            counts = (np.full(len(ids), loss.shape[1]), np.full(len(ids), kl.shape[1]))
            costs.append(Cost(loss.sum(1).numpy(), kl.sum(1).numpy(), *counts, *energies))
        return costs

    # -- checks ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def check_head(self) -> None:
        """That logits computed a few positions at a time are those of the whole model.

        Raises:
            FactorsDisagree: they are not.
        """
        piece = self._piece
        whole = self._runner.logits(piece.ids)[0].float()
        found = torch.cat([self._head(piece.final, piece.ids, rows) for rows in self._rows(piece.ids)]).float()
        difference = ((found - whole).abs().max() / whole.square().mean().sqrt()).item()
        if not difference < _HEAD_TOLERANCE[self._runner.dtype]:
            raise self._cannot(f"logits of single positions differ from the model's by {difference:.1e} of their size")

    def check(self, target: Target, *, everywhere: bool = False) -> None:
        """That the identity in this target costs exactly 0.

        Args:
            target: what the identity is put into.
            everywhere: on the whole text, not on its first few tokens.

        Raises:
            FactorsDisagree: it does not.
            NotRunnable: the model does not run without the layers below.
        """
        for clean in self._batches if everywhere else [self._piece]:
            try:
                (cost,) = self._costs(clean, target, [Case("identity")])
            except (TypeError, KeyError, IndexError, AttributeError, ValueError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise NotRunnable(
                    f"its layers do not run without those below: {first_line(error)}",
                    where=f"{self._runner.checkpoint.name}, layers {target.layers}",
                    hint="Costs need a model of layers one after another; `glu-probe activations` may still run it",
                ) from error
            if cost.loss.any() or cost.divergence.any():
                raise self._cannot(
                    f"the identity in layers {target.layers} changes the loss by {cost.loss.sum() / cost.losses.sum():.1e} "
                    "nats a token, and must change nothing"
                )

    def _cannot(self, what: str) -> FactorsDisagree:
        return FactorsDisagree(
            what,
            where=self._runner.checkpoint.name,
            hint="Layers of this model cannot be replayed; no cost would be right",
        )

    def seconds(self, targets: Iterable[Target], cases: int) -> float:
        """About how long the costs of all targets will take: one run from the lowest layer and one from the highest are timed."""
        targets = sorted(targets, key=lambda target: target.first)
        spent = []
        for target in (targets[0], targets[-1]):
            started = time.perf_counter()
            self.costs(target, [Case("identity")], 0)
            spent.append((time.perf_counter() - started) / self.tokens(0))
        low, high = targets[0].first, targets[-1].first
        slope = (spent[1] - spent[0]) / max(high - low, 1)
        return (
            sum(spent[0] + slope * (t.first - low) for t in targets) * cases * sum(map(self.tokens, range(len(self))))
        )


def _edit(name: str, fits: Fitted, mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return change(name, a, b, fits).mul_(mask)


def _following(ids: Tensor) -> Tensor:
    """[token]: the one that comes next in its sequence; at its end, which has none, its first."""
    return ids.roll(-1, dims=1).flatten()


def _room(runner: LanguageModel) -> int:
    """Bytes that the clean run's probabilities may take; what does not fit is computed again."""
    if runner.device.type == "cuda":
        return torch.cuda.mem_get_info(runner.device)[0] // 4
    return (available_memory() or 0) // 4
