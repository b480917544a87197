"""Reading legacy PyTorch checkpoints, never running what a pickle may carry."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import NotTorchFile, QuantizedWeights, Truncated, UnsafePickle
from .sniff import file_facts, looks_like, refuse_lfs_pointer
from .source import TensorInfo

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "params", "weights")


class TorchFile:
    """One `.bin`, `.pt` or `.pth` file, loaded with `weights_only`; the data of zip files stays on disk until read.

    Raises:
        NotTorchFile, LFSPointer, Truncated, UnsafePickle: when opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_lfs_pointer(path)
        kind = looks_like(path)
        if path.is_dir() or not ("zip archive" in kind or "pickle" in kind):
            raise NotTorchFile(f"this is {kind}, not a PyTorch checkpoint", where=path, hint="Download the file again")
        self._tensors = _tensors(_load(path, mapped="zip" in kind), path)

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return {
            name: TensorInfo(
                name,
                _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.").upper()),
                tuple(tensor.shape),
                tensor.numel() * tensor.element_size(),
                str(self.path),
            )
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A copy of the tensor, or of a range of its rows, in its stored dtype."""
        tensor = self._tensors[name]
        if not tensor.is_floating_point() or tensor.dtype not in _NAMES:
            raise QuantizedWeights(
                f"tensor {name!r} is stored as {tensor.dtype}",
                where=self.path,
                hint="Use a checkpoint in float or bfloat16",
            )
        return (tensor if rows is None else tensor[rows]).detach().clone()

    def provenance(self) -> dict[str, Any]:
        """The file's name, size and modification time."""
        return {"files": [file_facts(self.path)]}


def _load(path: Path, *, mapped: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        # The library's own text advises to switch the protection off; ours must not.
        raise UnsafePickle(
            "this pickle asks for more than tensors and was not loaded: loading could run code",
            where=path,
            hint="Ask its author for a safetensors file, or convert it to one on a machine that can be thrown away",
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Truncated(
            f"PyTorch cannot read the file to its end ({first_line})", where=path, hint="Download the file again"
        ) from None


def _tensors(loaded: Any, path: Path) -> dict[str, Tensor]:
    while isinstance(loaded, Mapping) and not any(isinstance(value, Tensor) for value in loaded.values()):
        inner = next((loaded[key] for key in _WRAPPERS if isinstance(loaded.get(key), Mapping)), None)
        if inner is None:
            break
        loaded = inner
    if not isinstance(loaded, Mapping):
        raise NotTorchFile(f"the file holds a {type(loaded).__name__}, not named tensors", where=path)
    tensors = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
    if not tensors:
        raise NotTorchFile("the file holds no tensors", where=path)
    return tensors
