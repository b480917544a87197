"""Which files of a directory or repository are the model, and one tensor source over them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..errors import (
    AmbiguousFiles,
    BadConfig,
    MissingShard,
    NotSafetensors,
    NoWeights,
    UnmergedAdapter,
    Unreadable,
    UnsafeShardName,
)
from .gguf import GGUFFile, GGUFSource, first_part, open_gguf
from .hub import HubFiles, cached_snapshot, is_offline, not_cached
from .quantized.parts import scheme_of
from .quantized.source import dequantised
from .ref import ModelRef
from .safetensors import SafetensorsFile
from .sniff import load_json, refuse_lfs_pointer
from .source import Shards, TensorSource
from .torch_bin import TorchFile

_NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<ending>safetensors|bin)$")
_GGUF_PART = re.compile(r"-\d{5}(?=-of-\d{5}\.gguf$)")
# Weight-like files that are never the model's weights.
_OTHER = re.compile(
    r"(^|/)(optimizer|scheduler|training_args|rng_state|adapter_model|scaler|random_states|mmproj|imatrix)"
)
# What says "MLP" in a tensor's name; used only to say how much a missing shard takes away.
_MLP = re.compile(r"\.(mlp|feed_forward|ffn|block_sparse_moe|mlp_block)\.|\.ffn_")


class FileSet(Protocol):
    """Named files, some of which may have to be fetched first."""

    location: str
    how_to_pick: str

    def names(self) -> list[str]:
        """All names."""
        ...

    def path(self, name: str) -> Path:
        """The file on disk."""
        ...

    def safetensors(self, name: str) -> TensorSource:
        """Its tensors."""
        ...

    def gguf(self, name: str) -> GGUFSource:
        """Its tensors."""
        ...


class LocalFiles:
    """The files of a directory."""

    how_to_pick = "Give the path of the one to read"

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

    def path(self, name: str) -> Path:
        """The file."""
        return self.directory / name

    def safetensors(self, name: str) -> TensorSource:
        """Its tensors."""
        return SafetensorsFile(self.directory / name)

    def gguf(self, name: str) -> GGUFSource:
        """Its tensors."""
        return GGUFFile(self.directory / name)


@dataclass
class OpenedFiles:
    """A tensor source, the model's configuration, and where both came from; `strings` reads a long list of the metadata."""

    source: TensorSource
    config: dict[str, Any]
    format: str
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    strings: Callable[[str], list[str] | None] = lambda key: None


def open_files(ref: ModelRef) -> OpenedFiles:
    """Open what the reference points to; headers are read, tensor data is not."""
    notes = [ref.note] if ref.note else []
    if ref.kind == "file":
        opened = _open_one(ref.path)
        opened.provenance = {"path": str(ref.path), **opened.source.provenance()}
    elif ref.kind == "directory" or is_offline():
        directory = ref.path or cached_snapshot(ref.repo, ref.revision)
        try:
            opened = _open_set(LocalFiles(directory))
        except (NoWeights, MissingShard) as error:
            if ref.kind == "directory":
                raise
            raise not_cached(
                ref.repo, ref.revision, f"its copy in the local cache is not whole: {error.what}"
            ) from None
        opened.provenance = {"path": str(directory), **opened.source.provenance()}
        if ref.kind == "hub":
            opened.provenance |= {"repository": ref.repo, "commit": directory.name}
    else:
        files = HubFiles(ref.repo, ref.revision)
        opened = _open_set(files)
        opened.provenance = {"repository": ref.repo, "commit": files.commit, **opened.source.provenance()}
    opened.notes = notes + opened.notes
    if opened.format != "gguf":  # whose tensors say themselves how they are quantised
        opened.source = dequantised(opened.source, scheme_of(opened.config))
    return opened


def _open_one(path: Path) -> OpenedFiles:
    refuse_lfs_pointer(path)
    ending = path.suffix.lower()
    if ending == ".gguf":
        return _gguf(LocalFiles(path.parent), path.name, lambda name: path.with_name(name).exists())
    config_file = path.with_name("config.json")
    config = load_json(config_file) if config_file.exists() else {}
    notes = [] if config else [f"no config.json beside {path.name}: family, activation and norm are not known"]
    if ending == ".safetensors":
        return OpenedFiles(SafetensorsFile(path), config, "safetensors", notes=notes)
    if ending in (".bin", ".pt", ".pth"):
        return OpenedFiles(TorchFile(path), config, "torch", notes=notes)
    raise NoWeights(
        "this is not a weight file by its ending", where=path,
        hint="Give a directory with config.json, or a .safetensors, .gguf or .bin file",
    )  # fmt: skip


def _gguf(files: FileSet, name: str, exists: Callable[[str], bool]) -> OpenedFiles:
    source, metadata = open_gguf(name, files.gguf, exists, files.location)
    first = first_part(name, metadata)
    return OpenedFiles(source, dict(metadata), "gguf", strings=lambda key: files.gguf(first).strings(key))


def _open_set(files: FileSet) -> OpenedFiles:
    names = [name for name in files.names() if "/" not in name and not _OTHER.search(name)]
    config = load_json(files.path("config.json")) if "config.json" in names else {}
    notes = [] if config else ["no config.json: family, activation and norm are not known"]
    for ending, format_, opener in (
        ("safetensors", "safetensors", files.safetensors),
        ("bin", "torch", lambda name: TorchFile(files.path(name))),
    ):
        source = _open_format(files, names, ending, opener)
        if source is not None:
            return OpenedFiles(source, config, format_, notes=notes)
    models: dict[str, str] = {}  # a split file counts once, by the first part there is
    for name in names:
        if name.endswith(".gguf"):
            models.setdefault(_GGUF_PART.sub("", name), name)
    if len(models) == 1:
        return _gguf(files, next(iter(models.values())), names.__contains__)
    if models:
        raise AmbiguousFiles(
            f"there are {len(models)} GGUF files: {_listed(list(models.values()))}",
            where=files.location,
            hint=files.how_to_pick,
        )
    adapters = [name for name in files.names() if name.startswith("adapter_model.")]
    if adapters:
        raise UnmergedAdapter(
            f"{adapters[0]} holds low-rank updates, and the model that they belong to is not here",
            where=files.location,
            hint="Merge the adapter into the model (PEFT: merge_and_unload) and save that",
        )
    path = Path(files.location)
    if path.suffix == ".safetensors":
        raise NotSafetensors(
            "this is a directory, not a safetensors file",
            where=path,
            hint="Give the directory of the model, or a file",
        )
    raise NoWeights(
        f"there is no .safetensors, .bin or .gguf file (found: {', '.join(names[:8]) or 'nothing'})",
        where=files.location,
        hint="Give a model directory, a weight file or a hub repository",
    )


def _open_format(
    files: FileSet, names: list[str], ending: str, opener: Callable[[str], TensorSource]
) -> TensorSource | None:
    """The model's weights in one format: by index, by the standard name, by numbered names, or the only file."""
    stem = {"safetensors": "model", "bin": "pytorch_model"}[ending]
    index = f"{stem}.{ending}.index.json"
    if index in names:
        return _open_index(files, index, names, opener)
    if f"{stem}.{ending}" in names:
        return opener(f"{stem}.{ending}")
    weights = [name for name in names if name.endswith(f".{ending}")]
    numbered = [match for name in weights if (match := _NUMBERED.match(name)) and match["ending"] == ending]
    if numbered:
        return _open_numbered(files, numbered, opener)
    if len(weights) > 1:
        raise AmbiguousFiles(
            f"several files could be the model: {', '.join(weights[:8])}", where=files.location,
            hint=f"{files.how_to_pick}, or add the index file that joins them",
        )  # fmt: skip
    return opener(weights[0]) if weights else None


def _open_index(files: FileSet, index: str, names: list[str], opener: Callable[[str], TensorSource]) -> Shards:
    path = files.path(index)
    weight_map = load_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(p, str) for p in weight_map.values()):
        raise BadConfig("the index has no weight_map from tensor to file", where=path, hint="Download it again")
    parts = sorted(set(weight_map.values()))
    for part in parts:
        if part != Path(part).name or "\\" in part or part in ("", ".", ".."):
            raise UnsafeShardName(
                f"the index points to {part!r}, which is not a plain file name", where=path,
                hint="An index may name only files of its own directory; do not use this checkpoint",
            )  # fmt: skip
    absent = [part for part in parts if part not in names]
    if absent:
        lost = [name for name, part in weight_map.items() if part in absent]
        raise MissingShard(
            f"{_listed(absent)} {'is' if len(absent) == 1 else 'are'} absent, holding {len(lost)} tensors, "
            f"{sum(bool(_MLP.search(name)) for name in lost)} of them of MLPs",
            where=files.location,
            hint="Download what is missing",
        )
    return Shards({part: opener(part) for part in parts}, weight_map)


def _open_numbered(files: FileSet, numbered: list[re.Match], opener: Callable[[str], TensorSource]) -> Shards:
    families = {(match["stem"], match["count"]) for match in numbered}
    if len(families) > 1:
        raise AmbiguousFiles(
            f"there are shards of {len(families)} different checkpoints and no index", where=files.location,
            hint="Add the index file, or keep one set of shards",
        )  # fmt: skip
    ((stem, count),) = families
    present = {int(match["number"]) for match in numbered}
    absent = sorted(set(range(1, int(count) + 1)) - present)
    if absent:
        raise MissingShard(
            f"{stem}: of {int(count)} parts, number {_listed(absent)} {'is' if len(absent) == 1 else 'are'} absent",
            where=files.location, hint="Download what is missing",
        )  # fmt: skip
    return Shards({match.string: opener(match.string) for match in numbered})


def _listed(things: list) -> str:
    return ", ".join(map(str, things[:8])) + (f" and {len(things) - 8} more" if len(things) > 8 else "")
