"""Which files of a directory or repository are the model, and one tensor source over them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import (
    AmbiguousFiles,
    BadConfig,
    MissingShard,
    NotSafetensors,
    NoWeights,
    PathNotFound,
    UnmergedAdapter,
    UnsafeShardName,
)
from ..saved_results import provenance_in
from .file_sets import FileSet, LocalFiles
from .gguf import first_part, open_gguf
from .hub import HubFiles, cached_snapshot, is_offline, not_cached
from .quantized.parts import scheme_of
from .quantized.source import dequantised
from .ref import ModelRef
from .sniff import refuse_lfs_pointer
from .source import StoredShards, StoredSource, TensorSource
from .web import WebFiles, split

_NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<ending>safetensors|bin)$")
_GGUF_PART = re.compile(r"-\d{5}(?=-of-\d{5}\.gguf$)")
# Weight-like files that are never the model's weights.
_OTHER = re.compile(
    r"(^|/)(optimizer|scheduler|training_args|rng_state|adapter_model|scaler|random_states|mmproj|imatrix)"
)
# What says "MLP" in a tensor's name; used only to say how much a missing shard takes away.
_MLP = re.compile(r"\.(mlp|feed_forward|ffn|block_sparse_moe|mlp_block)\.|\.ffn_")


@dataclass
class OpenedFiles:
    """A tensor source, the model's configuration, and where both came from.

    `remote` says that reading the source costs transfers, `download` that remote files were to be fetched whole; `strings`
    reads a long list of the metadata.
    """

    source: TensorSource
    config: dict[str, Any]
    format: str
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    remote: bool = False
    download: bool = False
    strings: Callable[[str], list[str] | None] = lambda key: None


def open_files(ref: ModelRef, *, download: bool = False) -> OpenedFiles:
    """Open what the reference points to; headers are read, tensor data is not.

    Args:
        ref: the reference.
        download: fetch remote files whole, into a cache, once tensors of them are read.
    """
    if ref.kind == "file":
        refuse_lfs_pointer(ref.local)
        opened = _open_one(LocalFiles(ref.local.parent), ref.local.name)
        place = {"path": str(ref.local)}
    elif ref.kind == "directory":
        opened, place = _open_set(LocalFiles(ref.local)), {"path": str(ref.local)}
    elif ref.kind == "web":
        directory, name = split(ref.address) if ref.is_web_file else (ref.address, None)
        web = WebFiles(directory, download=download)
        opened = _open_one(web, name) if name else _open_set(web)
        place = {"url": web.where(name) if name else web.location}
    elif is_offline():
        opened, place = _open_cached(ref)
    else:
        hub = HubFiles(ref.repository, ref.revision, download=download)
        opened = _open_of_repository(hub, ref.file) if ref.file else _open_set(hub)
        place = {"repository": ref.repository, "commit": hub.commit}
    opened.remote, opened.download = not download and ref.kind in ("hub", "web"), download
    opened.provenance = {**place, **opened.source.provenance()}
    opened.notes = ([ref.note] if ref.note else []) + opened.notes
    return opened


def _open_cached(ref: ModelRef) -> tuple[OpenedFiles, dict[str, Any]]:
    """A repository, or a file of one, from the library's cache alone."""
    repository = ref.repository
    directory = cached_snapshot(repository, ref.revision)
    try:
        if ref.file and not (directory / ref.file).exists():
            raise not_cached(repository, ref.revision, f"{ref.file} is not in the local cache")
        opened = _open_of_repository(LocalFiles(directory), ref.file) if ref.file else _open_set(LocalFiles(directory))
    except (NoWeights, MissingShard) as error:
        raise not_cached(repository, ref.revision, f"its copy in the local cache is not whole: {error.what}") from None
    return opened, {"path": str(directory), "repository": repository, "commit": directory.name}


def _open_of_repository(files: FileSet, name: str) -> OpenedFiles:
    if not files.exists(name):
        weights = [other for other in files.names() if other.endswith((".safetensors", ".gguf", ".bin"))]
        raise PathNotFound(
            f"the repository has no file {name!r}", where=files.location,
            hint=f"There are {_listed(weights)}" if weights else "It holds no weights at all",
        )  # fmt: skip
    return _open_one(files, name)


def _open_one(files: FileSet, name: str) -> OpenedFiles:
    ending = Path(name).suffix.lower()
    if ending == ".gguf":
        return _gguf(files, name, files.exists)
    openers = {".safetensors": ("safetensors", files.safetensors)}
    openers |= dict.fromkeys((".bin", ".pt", ".pth"), ("torch", files.torch))
    if ending not in openers:
        raise NoWeights(
            "this is not a weight file by its ending", where=files.where(name),
            hint="Give a directory with config.json, or a .safetensors, .gguf or .bin file",
        )  # fmt: skip
    beside = f"{name.rpartition('/')[0]}/config.json".lstrip("/")
    config = files.json(beside) if files.exists(beside) else {}
    notes = [] if config else [f"no config.json beside {name}: family, activation and norm are not known"]
    format_, opener = openers[ending]
    return _plain(opener(name), config, format_, notes)


def _plain(source: StoredSource, config: dict[str, Any], format_: str, notes: list[str]) -> OpenedFiles:
    """What is not GGUF, whose tensors say themselves how they are quantised: unpacked as its config says."""
    return OpenedFiles(dequantised(source, scheme_of(config)), config, format_, notes=notes)


def _gguf(files: FileSet, name: str, exists: Callable[[str], bool]) -> OpenedFiles:
    part = functools.cache(files.gguf)  # on a server, opening one again would fetch its header again
    source, metadata = open_gguf(name, part, exists, files.location)
    first = first_part(name, metadata)
    return OpenedFiles(source, dict(metadata), "gguf", strings=lambda key: part(first).strings(key))


def _open_set(files: FileSet) -> OpenedFiles:
    names = [name for name in files.names() if "/" not in name and not _OTHER.search(name)]
    config = files.json("config.json") if "config.json" in names else {}
    notes = [] if config else ["no config.json: family, activation and norm are not known"]
    for ending, format_, opener in (
        ("safetensors", "safetensors", files.safetensors),
        ("bin", "torch", files.torch),
    ):
        source = _open_format(files, names, ending, opener)
        if source is not None:
            return _plain(source, config, format_, notes)
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
    results = provenance_in(path)
    if results is not None:
        of = [found["ref"] for found in (results, *results.get("models", ())) if "ref" in found]
        raise NoWeights(
            "these are results of glu-probe, not a model",
            where=files.location,
            hint=f"Give the model{f': {_listed(list(dict.fromkeys(of)))}' if of else ' that they are of'}",
        )
    raise NoWeights(
        f"there is no .safetensors, .bin or .gguf file (found: {', '.join(names[:8]) or 'nothing'})",
        where=files.location,
        hint="Give a model directory, a weight file or a hub repository",
    )


def _open_format(
    files: FileSet, names: list[str], ending: str, opener: Callable[[str], StoredSource]
) -> StoredSource | None:
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


def _open_index(files: FileSet, index: str, names: list[str], opener: Callable[[str], StoredSource]) -> StoredShards:
    path, weight_map = files.where(index), files.json(index).get("weight_map")
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
    return StoredShards(_open_all(files, parts, opener), weight_map)


def _open_numbered(files: FileSet, numbered: list[re.Match], opener: Callable[[str], StoredSource]) -> StoredShards:
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
    return StoredShards(_open_all(files, [match.string for match in numbered], opener))


def _open_all(files: FileSet, names: Iterable[str], opener: Callable[[str], StoredSource]) -> dict[str, StoredSource]:
    if files.at_once == 1:
        return {name: opener(name) for name in names}
    with ThreadPoolExecutor(files.at_once) as pool:
        return dict(zip(names, pool.map(opener, names), strict=True))


def _listed(things: list) -> str:
    return ", ".join(map(str, things[:8])) + (f" and {len(things) - 8} more" if len(things) > 8 else "")
