"""What every weight file looks like from above: named tensors whose facts are known before their data is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from ..errors import GluProbeError, IndexMismatch
from .raw import RawMatrix

IN_MEMORY = "memory"  # in place of the file, for tensors of a model that is loaded


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its header describes it.

    Attributes:
        name: as in the file.
        dtype: storage type in the format's own spelling ("BF16", "F8_E4M3", "Q4_K", ...).
        shape: sizes, outermost first.
        nbytes: stored bytes.
        file: the file that holds it, for messages and provenance.
        decoded: whether it is stored packed and unpacked when it is read; `dtype` then names the scheme, and `nbytes`
            are those of all its parts.
        rows_first: for the experts of a layer in one tensor [E, ...]: True if each is [out, in] as a linear layer's
            weight, False if [in, out], None if the format does not settle it. Where it does, go by it: shapes cannot
            tell where d_model and d_mlp are equal.
        fault: why the packed values that begin with this tensor cannot be read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    decoded: bool = False
    rows_first: bool | None = None
    fault: GluProbeError | None = None


class TensorSource(Protocol):
    """Named tensors. `infos` reads headers only; `read` reads one tensor, or a range of its rows."""

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        ...

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor's values in a floating dtype, or those of a contiguous range of its first dimension."""
        ...

    def provenance(self) -> dict[str, Any]:
        """What identifies the files: names, sizes, modification times, revision."""
        ...


class StoredSource(TensorSource, Protocol):
    """A source whose tensors may be the parts of packed ones."""

    def stored(self, name: str, rows: slice | None = None) -> Tensor:
        """As `read`, but as it stands in the file, packed integers too: for who unpacks them."""
        ...


Part = TypeVar("Part", bound=TensorSource)


class Shards(Generic[Part]):
    """Several sources as one. Where a tensor is in two of them, `weight_map` (name to part) decides.

    Tensors that the map does not name count too, as they do for whoever loads whole files.

    Raises:
        IndexMismatch: map and parts disagree about where a tensor is.
    """

    def __init__(self, parts: Mapping[str, Part], weight_map: Mapping[str, str] | None = None) -> None:
        self._parts = dict(parts)
        self._owner: dict[str, Part] = {}
        self._infos: dict[str, TensorInfo] = {}
        for part, source in self._parts.items():
            for name, info in source.infos().items():
                if weight_map is not None and weight_map.get(name, part) != part:
                    continue
                if name in self._infos:
                    raise IndexMismatch(
                        f"tensor {name!r} is in {self._infos[name].file} and in {info.file}",
                        hint="Remove the copy, or add the index file that says which one counts",
                    )
                self._owner[name], self._infos[name] = source, info
        for name, part in (weight_map or {}).items():
            if name not in self._infos:
                raise IndexMismatch(
                    f"the index puts tensor {name!r} into {part}, which does not hold it",
                    hint="Index and shards are of different versions: download both again",
                )

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor of every part."""
        return self._infos

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read from the part that owns the tensor."""
        return self._owner[name].read(name, rows)

    def raw(self, name: str) -> RawMatrix | None:
        """Where in a local file a matrix lies as it is read; None if it does not."""
        find = getattr(self._owner[name], "raw", None)
        return None if find is None else find(name)

    def provenance(self) -> dict[str, Any]:
        """The files of all parts."""
        return {"files": [file for part in self._parts.values() for file in part.provenance()["files"]]}


class StoredShards(Shards[StoredSource]):
    """Several sources as one, whose tensors may be the parts of packed ones."""

    def stored(self, name: str, rows: slice | None = None) -> Tensor:
        """Read from the part that owns the tensor."""
        return self._owner[name].stored(name, rows)
