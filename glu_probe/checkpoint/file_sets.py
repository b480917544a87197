"""Files that stand beside each other: what the choice of a model's files asks of them, wherever they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ..errors import Unreadable
from .gguf import GGUFFile, GGUFSource
from .safetensors import SafetensorsFile
from .sniff import load_json
from .source import StoredSource
from .torch_bin import TorchFile


class FileSet(Protocol):
    """Named files that stand beside each other."""

    @property
    def location(self) -> str:
        """For messages about them."""
        ...

    @property
    def how_to_pick(self) -> str:
        """For messages about several of which one should be read."""
        ...

    @property
    def at_once(self) -> int:
        """How many may be opened at the same time; opening waits for an answer where they are far away."""
        ...

    def names(self) -> list[str]:
        """All names, or those of a model's files where nothing lists what there is."""
        ...

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        ...

    def where(self, name: str) -> str:
        """For messages about a file."""
        ...

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        ...

    def safetensors(self, name: str) -> StoredSource:
        """Tensors of a safetensors file."""
        ...

    def gguf(self, name: str) -> GGUFSource:
        """Tensors of a GGUF file."""
        ...

    def torch(self, name: str) -> StoredSource:
        """Tensors of a PyTorch file."""
        ...


class LocalFiles:
    """The files of a directory."""

    how_to_pick = "Give the path of the one to read"
    at_once = 1

    def __init__(self, directory: Path) -> None:
        self.directory, self.location = directory, str(directory)

    def names(self) -> list[str]:
        """Names of files and, for messages about them, of directories that pose as weight files."""
        try:
            return sorted(entry.name for entry in self.directory.iterdir())
        except OSError as error:
            raise Unreadable(
                f"the directory cannot be listed: {error.strerror}", where=self.directory, hint="Check its permissions"
            ) from None

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.directory / name).exists()

    def where(self, name: str) -> str:
        """Its path."""
        return str(self.directory / name)

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        return load_json(self.directory / name)

    def safetensors(self, name: str) -> StoredSource:
        """Tensors of a safetensors file."""
        return SafetensorsFile(self.directory / name)

    def gguf(self, name: str) -> GGUFSource:
        """Tensors of a GGUF file."""
        return GGUFFile(self.directory / name)

    def torch(self, name: str) -> StoredSource:
        """Tensors of a PyTorch file."""
        return TorchFile(self.directory / name)
