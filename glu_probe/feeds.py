"""What the MLPs of a model read while it runs: seen without weights, and without memory for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_TOKENS, _SAMPLES = 4, 16_000


def feeds(model: nn.Module, paths: Iterable[str]) -> dict[str, str | None]:
    """What each of these MLPs reads while the model runs: the path of the module whose output it is.

    None where it is no module's output, as where the residual stream itself is read. MLPs that were not reached
    are left out. The model runs without numbers, so this costs no memory; the MLPs themselves are skipped.
    """
    producers: dict[int, str] = {}
    kept: list[Tensor] = []  # so that no two have one identity
    found: dict[str, str | None] = {}

    def remember(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            out = out[0] if isinstance(out, (tuple, list)) and out else out
            if isinstance(out, Tensor):
                kept.append(_root(out))
                producers.setdefault(id(kept[-1]), path)  # the innermost module comes first

        return hook

    def skip(path: str) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            if path in wanted:
                found.setdefault(path, producers.get(id(_root(x))))
                if len(found) == len(wanted):
                    raise _Seen
            return x

        return forward

    wanted = {*paths}
    kinds = {type(model.get_submodule(path)) for path in wanted}
    skipped, handles = [], []
    for path, module in model.named_modules():
        if path in wanted or type(module) in kinds or type(module).__name__.endswith("Experts"):
            module.forward = skip(path)
            skipped.append(module)
        else:
            handles.append(module.register_forward_hook(remember(path)))
    try:
        with torch.no_grad(), torch.device("meta"), _Nothing():
            model(**_inputs(model))
    except Exception:  # many models need numbers somewhere; what was seen until then counts
        pass
    finally:
        for handle in handles:
            handle.remove()
        for module in skipped:
            del module.forward
    return found


def _inputs(model: nn.Module) -> dict[str, Any]:
    """Something to run the model on: a few tokens, or for towers without text a picture or a sound."""
    config: Any = model.config
    main = str(model.main_input_name)
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": tokens}
    if main == "pixel_values":
        side = getattr(config, "image_size", 224)
        height, width = side if isinstance(side, (tuple, list)) else (side, side)
        inputs = {main: torch.zeros(1, getattr(config, "num_channels", 3), height, width, device="meta")}
    elif main == "input_values":
        inputs = {main: torch.zeros(1, _SAMPLES, device="meta")}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    return inputs


class _Seen(Exception):
    """All that was wanted was seen."""


class _Nothing(TorchFunctionMode):
    """What a model asks of the numbers that it does not have: the answer is 0, or no."""

    ANSWERS: ClassVar = {
        Tensor.item: 0,
        Tensor.__bool__: False,
        Tensor.__int__: 0,
        Tensor.__float__: 0.0,
        Tensor.__index__: 0,
    }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer, or do what was asked for."""
        if func in self.ANSWERS and args[0].is_meta:
            return self.ANSWERS[func]
        return func(*args, **(kwargs or {}))


def _root(tensor: Tensor) -> Tensor:
    while tensor._base is not None:
        tensor = tensor._base
    return tensor
