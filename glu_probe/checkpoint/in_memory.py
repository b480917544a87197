"""A checkpoint of a model that is in memory: its own tensors, under the names that its files would have.

So factors are those that the model computes with at the moment, edits since it was loaded included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import NotRunnable
from .checkpoint import Checkpoint
from .files import OpenedFiles
from .rules import Options
from .source import IN_MEMORY, TensorInfo

_INNER = "_original_component"  # where TransformerLens keeps the module that it builds a component around
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class TensorsInMemory:
    """Named tensors as a source."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return {
            name: TensorInfo(name, _DTYPES.get(t.dtype, str(t.dtype)), tuple(t.shape), t.nbytes, IN_MEMORY)
            for name, t in self._tensors.items()
        }

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor, or a range of its rows, in main memory; a copy where it is elsewhere."""
        tensor = self._tensors[name]
        return (tensor if rows is None else tensor[rows]).cpu()

    def provenance(self) -> dict[str, Any]:
        """That there are no files."""
        return {"files": []}


def checkpoint_in_memory(model: Any, **options: Any) -> Checkpoint:
    """The gated MLPs of a transformers model, or of a TransformerBridge around one.

    Args:
        model: with a `config` of transformers. Its tensors are not copied before they are read.
        **options: those of `open_checkpoint`.

    Raises:
        NotRunnable: it has no such config, or its parameters are packed or elsewhere.
        GluProbeError: another of its subclasses, as of `open_checkpoint`.
    """
    inner = getattr(model, "original_model", model)
    config = getattr(inner, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise NotRunnable(
            f"a {type(model).__name__} has no config of transformers, which says how its tensors are to be read",
            hint="Give a transformers model or a TransformerBridge",
        )
    tensors = dict(_tensors(inner))
    remote = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if remote is not None:
        raise NotRunnable(f"{remote!r} is not in memory", hint="Load the model without offloading")
    name = str(getattr(config, "_name_or_path", "") or type(inner).__name__)
    opened = OpenedFiles(
        TensorsInMemory(_as_saved(inner, tensors)),
        config.to_dict(),
        "in memory",
        provenance={"class": type(inner).__name__, "files": []},
    )
    return Checkpoint(name, name.rstrip("/").rpartition("/")[2], opened, Options(**options))


def _tensors(module: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Parameters by the names that they have without the components of TransformerLens."""
    while _INNER in module._modules:
        module = module._modules[_INNER]
    own = [*module._parameters.items(), *module._buffers.items()]
    yield from ((f"{prefix}{name}", tensor) for name, tensor in own if tensor is not None)
    for name, child in module.named_children():
        yield from _tensors(child, f"{prefix}{name}.")


def _as_saved(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as transformers would save them: it holds the experts of some families in other shapes than files do."""
    from transformers.core_model_loading import revert_weight_conversion

    if not any(".experts." in name for name in tensors):
        return tensors
    return revert_weight_conversion(model, tensors)
