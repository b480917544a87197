"""Running a model from the middle: layers below are not computed again but replaced by what they gave before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

Residual = Float[Tensor, "batch position d_model"]


class _Recorded(nn.Module):
    """Stands in the place of a layer and gives a residual stream that was recorded behind it, whatever comes in."""

    def __init__(self, layer: nn.Module, residual: Residual, as_tuple: bool) -> None:
        super().__init__()
        self._given = (residual,) if as_tuple else residual
        object.__setattr__(self, "_layer", layer)  # not as a submodule: it is somewhere else in the model

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._given

    def __getattr__(self, name: str) -> Any:
        # models ask their layers for what kind of attention they have
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_layer"), name)


class Replayer:
    """The stack of layers of a model that TransformerLens has wrapped."""

    def __init__(self, bridge: Any) -> None:
        """Find the list of layers that the model's own forward pass runs through.

        Raises:
            LookupError: there is none.
        """
        first = bridge.blocks[0]
        lists = [m for m in bridge.original_model.modules() if isinstance(m, nn.ModuleList) and len(m)]
        self._layers = next((m for m in lists if m[0] is first), None)
        if self._layers is None:
            raise LookupError("the model's layers do not stand in one list")
        self._tuples = False

    @contextlib.contextmanager
    def recording(self, layers: set[int]) -> Iterator[dict[int, Residual]]:
        """Within it, a forward pass leaves the residual stream that enters each of these layers in the mapping."""
        found: dict[int, Residual] = {}

        def record(index: int, _module: nn.Module, args: tuple, kwargs: dict) -> None:
            found[index] = (args[0] if args else kwargs["hidden_states"]).detach()

        def look(_module: nn.Module, _args: tuple, output: Any) -> None:
            self._tuples = isinstance(output, tuple)

        handles = [
            self._layers[index].register_forward_pre_hook(
                lambda m, a, k, index=index: record(index, m, a, k), with_kwargs=True
            )
            for index in layers
        ]
        handles.append(self._layers[0].register_forward_hook(look))
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def starting_at(self, layer: int, residual: Residual) -> Iterator[None]:
        """Within it, a forward pass of the same tokens computes the layers from this one on only.

        The lower ones give the recorded stream that enters it, so that whatever the model does besides, such as positions
        and masks, is done as always.
        """
        kept = list(self._layers[:layer])
        try:
            for index, original in enumerate(kept):
                self._layers[index] = _Recorded(original, residual, self._tuples)
            yield
        finally:
            for index, original in enumerate(kept):
                self._layers[index] = original


@torch.inference_mode()
def token_losses(logits: Float[Tensor, "batch position vocabulary"], ids: Tensor) -> Float[Tensor, "batch position-1"]:
    """Next-token cross entropy in nats."""
    batch = [
        torch.nn.functional.cross_entropy(one[:-1].float(), target[1:].to(one.device), reduction="none")
        for one, target in zip(logits, ids, strict=True)
    ]
    return torch.stack(batch).double().cpu()


@torch.inference_mode()
def divergences(
    clean: Float[Tensor, "batch position vocabulary"], changed: Float[Tensor, "batch position vocabulary"]
) -> Float[Tensor, "batch position"]:
    """KL(clean || changed) of the next token's distribution, in nats; a sequence at a time, for vocabularies are large."""
    batch = []
    for one, other in zip(clean, changed, strict=True):
        log_p, log_q = one.float().log_softmax(-1), other.float().log_softmax(-1)
        batch.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.stack(batch).double().cpu()
