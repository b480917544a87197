"""Reading legacy PyTorch checkpoints, never running what a pickle may carry."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CorruptHeader, NotTorchFile, QuantizedWeights, Truncated, UnsafePickle
from .safetensors import FLOATS, STORED
from .sniff import file_facts, looks_like, opened, refuse_lfs_pointer, what_to_do
from .source import TensorInfo

_NAMES = {dtype: name for name, dtype in FLOATS.items()}
_STORED = {dtype: name for name, dtype in STORED.items()}
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "params", "weights")
_DEEPEST = 4  # wrappers within wrappers; a pickle may also hold itself


class TorchFile:
    """One `.bin`, `.pt` or `.pth` file, loaded with `weights_only`; the data of zip files stays on disk until read.

    Raises:
        NotTorchFile, LFSPointer, Truncated, CorruptHeader, UnsafePickle: when opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        kind = looks_like(path)
        refuse_lfs_pointer(path)
        if kind.startswith("a zip"):
            mapped = _check_archive(path)
        elif kind.startswith("a Python pickle"):
            mapped = False
        else:
            raise NotTorchFile(f"this is {kind}, not a PyTorch checkpoint", where=path, hint=what_to_do(kind))
        self._tensors = _tensors(_load(path, mapped=mapped), path)
        self._infos = {
            name: TensorInfo(
                name,
                _STORED.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.").upper()),
                tuple(tensor.shape),
                tensor.numel() * tensor.element_size(),
                str(path),
            )
            for name, tensor in self._tensors.items()
        }

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._infos

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A copy of the tensor, or of a range of its rows, in its stored dtype."""
        return self._copy(name, rows, _NAMES)

    def stored(self, name: str, rows: slice | None = None) -> Tensor:
        """The same for integers and 8-bit floats too, which mean nothing without what stands beside them."""
        return self._copy(name, rows, _STORED)

    def _copy(self, name: str, rows: slice | None, dtypes: Mapping[torch.dtype, str]) -> Tensor:
        tensor = self._tensors[name]
        if tensor.dtype not in dtypes or tensor.layout != torch.strided or tensor.is_meta:
            kind = tensor.dtype if tensor.dtype not in dtypes else "metadata only" if tensor.is_meta else tensor.layout
            raise QuantizedWeights(
                f"tensor {name!r} is stored as {kind}", where=self.path, hint="Use a checkpoint in float or bfloat16"
            )
        if self._infos[name].nbytes > tensor.untyped_storage().nbytes():
            raise CorruptHeader(
                f"tensor {name!r} claims {self._infos[name].nbytes:,} bytes and has "
                f"{tensor.untyped_storage().nbytes():,}",
                where=self.path,
                hint="Download the file again",
            )
        return (tensor if rows is None else tensor[rows]).detach().clone()

    def provenance(self) -> dict[str, Any]:
        """The file's name, size and modification time."""
        return {"files": [file_facts(self.path)]}


def _check_archive(path: Path) -> bool:
    """Whether the data of a zip file can be mapped: not where somebody compressed it."""
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        raise Truncated(
            "the list of contents, which stands at the end of a zip archive, is missing or damaged",
            where=path,
            hint="The download stopped early: fetch the file again",
        ) from None
    names = {entry.filename.rpartition("/")[2] for entry in entries}
    if "data.pkl" not in names or "constants.pkl" in names:
        kind = "a TorchScript program" if "constants.pkl" in names else "a zip archive of something else"
        raise NotTorchFile(
            f"this is {kind}, not a PyTorch checkpoint",
            where=path,
            hint="Save the state dict, as safetensors if you can",
        )
    return all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)


def _load(path: Path, *, mapped: bool) -> Any:
    """What the file holds. The library's own texts stay out: they advise to switch the protection off."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise UnsafePickle(
            f"this pickle asks for more than tensors{f' ({wanted[1]})' if wanted else ''} and was not loaded: loading "
            "could run code",
            where=path,
            hint="Ask its author for a safetensors file, or convert it to safetensors on a machine that can be thrown away",
        ) from None
    except Exception as error:  # whatever a damaged pickle makes the library's own machine stumble over
        text = str(error)
        if "Invalid magic number" in text:
            raise NotTorchFile(
                "this is a Python pickle of something else, not a PyTorch checkpoint",
                where=path,
                hint="Save the state dict, as safetensors if you can",
            ) from None
        if isinstance(error, EOFError) or "unexpected EOF" in text:
            raise Truncated(
                "the file ends before its data", where=path, hint="The download stopped early: fetch the file again"
            ) from None
        raise CorruptHeader(
            f"the file is damaged: its tensors cannot be put together ({type(error).__name__})",
            where=path,
            hint="Download the file again",
        ) from None


def _tensors(loaded: Any, path: Path) -> dict[str, Tensor]:
    for _ in range(_DEEPEST):
        inner = loaded if isinstance(loaded, Mapping) else {}
        wrapper = next((key for key in _WRAPPERS if isinstance(inner.get(key), Mapping)), None)
        if wrapper is None:
            break
        loaded = inner[wrapper]
    hint = "A state dict (names to tensors) is expected, bare or under the key 'model' or 'state_dict'"
    if not isinstance(loaded, Mapping):
        raise NotTorchFile(f"the file holds a {type(loaded).__name__}, not named tensors", where=path, hint=hint)
    tensors = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
    if not tensors:
        raise NotTorchFile("the file holds no tensors by name", where=path, hint=hint)
    return tensors
