"""Running a model in pieces: its layers from the middle on, and its head a few positions at a time.

Layers below are not computed again but replaced by what they gave before. The head is most of a small model's arithmetic
and its output most of the memory: [position, vocabulary] of a whole batch never exists at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

Residual = Float[Tensor, "batch position d_model"]
_BLOCK = 16  # rows of logits that stay in a core's cache through all their sums


class Entry(NamedTuple):
    """What a layer begins with: the stream that enters it, and what its attention makes of that, if there is such a module."""

    residual: Residual
    attention: Any = None


class _Recorded(nn.Module):
    """Stands in the place of a module and gives what was recorded behind it, whatever comes in."""

    def __init__(self, layer: nn.Module, given: Any) -> None:
        super().__init__()
        self._given = given
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
    """The stack of layers of a model that TransformerLens has wrapped.

    Attributes:
        depth: number of layers.
    """

    def __init__(self, bridge: Any) -> None:
        """Find the list of layers that the model's own forward pass runs through.

        Raises:
            LookupError: there is none.
        """
        first = bridge.blocks[0]
        lists = [m for m in bridge.original_model.modules() if isinstance(m, nn.ModuleList) and len(m)]
        layers = next((m for m in lists if m[0] is first), None)
        if layers is None:
            raise LookupError("the model's layers do not stand in one list")
        self._layers = layers
        self.depth = len(self._layers)
        self._attention = [_attention_of(layer) for layer in self._layers]
        self._tuples = False

    @contextlib.contextmanager
    def recording(self, layers: set[int]) -> Iterator[dict[int, Entry]]:
        """Within it, a forward pass leaves in the mapping what each of these layers begins with."""
        found: dict[int, Entry] = {}

        def record(index: int, args: tuple, kwargs: dict) -> None:
            found[index] = Entry((args[0] if args else kwargs["hidden_states"]).detach())

        def record_attention(index: int, output: Any) -> None:
            # besides the stream it gives weights, which are large, and which a layer does not read
            output = (output[0].detach(), *[None] * (len(output) - 1)) if isinstance(output, tuple) else output.detach()
            found[index] = found[index]._replace(attention=output)

        handles = [self._layers[-1].register_forward_hook(lambda module, args, output: self._look(output))]
        for index in layers:
            handles.append(
                self._layers[index].register_forward_pre_hook(
                    lambda module, args, kwargs, index=index: record(index, args, kwargs), with_kwargs=True
                )
            )
            attention = self._attention[index]
            if attention is not None:
                handles.append(
                    attention.module.register_forward_hook(
                        lambda module, args, output, index=index: record_attention(index, output)
                    )
                )
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def _look(self, output: Any) -> None:
        self._tuples = isinstance(output, tuple)

    @contextlib.contextmanager
    def starting_at(self, layer: int, residual: Residual, attention: Any = None) -> Iterator[None]:
        """Within it, a forward pass of the same tokens computes the layers from this one on only.

        The lower ones give the recorded stream that enters it, so that whatever the model does besides, such as positions
        and masks, is done as always. With `depth` as the layer, only what follows the layers is computed.

        Args:
            layer: its index.
            residual: what enters it.
            attention: what its attention gives, as it was recorded; None to compute it.
        """
        given = (residual,) if self._tuples else residual
        places: list[tuple[nn.Module, str, Any]] = [(self._layers, str(index), given) for index in range(layer)]
        if attention is not None:
            own = self._attention[layer]
            assert own is not None  # or nothing was recorded of it
            places.append((own.parent, own.name, attention))
        kept = [parent.get_submodule(name) for parent, name, _ in places]
        try:
            for (parent, name, output), original in zip(places, kept, strict=True):
                parent._modules[name] = _Recorded(original, output)
            yield
        finally:
            for (parent, name, _), original in zip(places, kept, strict=True):
                parent._modules[name] = original

    @contextlib.contextmanager
    def without_head(self) -> Iterator[list[Residual]]:
        """Within it, a forward pass leaves the stream behind the last layer in the list, and its head sees one position."""
        found: list[Residual] = []

        def cut(_module: nn.Module, _args: tuple, output: Any) -> Any:
            self._look(output)
            stream = output[0] if self._tuples else output
            found.append(stream.detach())
            return (stream[:, :1], *output[1:]) if self._tuples else stream[:, :1]

        handle = self._layers[-1].register_forward_hook(cut)
        try:
            yield found
        finally:
            handle.remove()


class _Attention(NamedTuple):
    """The attention of a layer, and the name under which its parent calls it."""

    parent: nn.Module
    name: str
    module: nn.Module


def _attention_of(layer: nn.Module) -> _Attention | None:
    """The model's own layer within TransformerLens' wrapping, and the name under which it calls its attention."""
    inner, attention = layer._modules.get("_original_component"), getattr(layer, "attn", None)
    if inner is None or not attention:
        return None
    names = [name for name, child in inner._modules.items() if child is attention]
    return _Attention(inner, names[0], attention) if len(names) == 1 else None


@torch.inference_mode()
def probabilities(logits: Float[Tensor, "position vocabulary"]) -> Float[Tensor, "position vocabulary"]:
    """Softmax in float32."""
    return torch.cat([logits[start : start + _BLOCK].float().softmax(-1) for start in range(0, len(logits), _BLOCK)])


@torch.inference_mode()
def cross_entropies(
    probability: Float[Tensor, "position vocabulary"],
    logits: Float[Tensor, "position vocabulary"],
    following: Int[Tensor, " position"],
) -> tuple[Float[Tensor, " position"], Float[Tensor, " position"]]:
    """Cross entropy of these logits under a distribution, and under the token that follows, in nats; float64, on the cpu.

    With p the softmax of other logits, the first is KL(p || these) plus what the same function gives for the other logits
    themselves; for equal logits the difference is exactly 0.
    """
    under_p, under_text = [], []
    for start in range(0, len(logits), _BLOCK):
        rows = slice(start, start + _BLOCK)
        block = logits[rows].float()
        normaliser = block.logsumexp(-1)
        under_p.append(normaliser - torch.linalg.vecdot(probability[rows], block))
        under_text.append(normaliser - block.gather(1, following[rows, None])[:, 0])
    return torch.cat(under_p).cpu().double(), torch.cat(under_text).cpu().double()
