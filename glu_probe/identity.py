"""What makes two runs the same: the weights, how they are read, and the software that computes with them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report import software_versions

if TYPE_CHECKING:
    import torch

    from .checkpoint.checkpoint import Checkpoint

_NOT_IDENTITY = ("model", "ref", "path", "notes", "files", "towers")


def identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """What decides about a checkpoint's factors, however it was named when it was opened; JSON-ready.

    A repository is known by its commit, files by their place, sizes and modification times.
    """
    facts = checkpoint.provenance()
    out = {name: value for name, value in facts.items() if name not in _NOT_IDENTITY}
    if "repository" in facts:
        out["files"] = {file["name"]: file["bytes"] for file in facts["files"]}
    else:
        out["path"] = os.path.abspath(facts["path"]) if "path" in facts else facts["ref"]
        out["files"] = file_stamps(checkpoint)
    out["reading"] = {
        tower: {name: value for name, value in read.items() if name != "dtypes"}
        for tower, read in facts["towers"].items()
    }
    mlps = [
        [site.tower, site.layer, str(site.expert), site.d_mlp, site.d_model, site.layout, sorted(site.tensors.items())]
        for site in checkpoint.sites
    ]
    out["mlps"] = _sha256(mlps)
    out["config"] = _sha256(checkpoint.config)
    return json.loads(json.dumps(out))


def file_stamps(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Size in bytes and modification time in ns of every local file as they are now, by name; nothing of a repository.

    A commit does not change, and a model in memory has no files.
    """
    facts = checkpoint.provenance()
    if "repository" in facts or "path" not in facts:
        return {}
    place = Path(facts["path"])
    stamps = {}
    for file in facts["files"]:
        path = place / file["name"] if place.is_dir() else place.with_name(file["name"])
        try:
            found = path.stat()
            stamps[file["name"]] = [found.st_size, found.st_mtime_ns]
        except OSError:
            stamps[file["name"]] = [0, 0]  # no longer there: like no file that ever was
    return stamps


def running_software() -> dict[str, str]:
    """Versions, and the instruction set, that could change a bit of a weight report."""
    import torch

    names = ("glu-probe", "torch", "numpy", "scipy", "gguf")
    versions = {name: importlib.metadata.version(name) for name in names}
    return versions | {"instructions": torch.backends.cpu.get_cpu_capability()}


def text_software() -> dict[str, str]:
    """Versions of everything that could change a number of a run on text."""
    names = ("transformers", "transformer-lens")
    return software_versions() | {name: importlib.metadata.version(name) for name in names}


def weights_sha256(module: torch.nn.Module) -> str:
    """Hash of all parameters of a model in memory."""
    import torch

    found = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters(), key=lambda item: item[0]):
        found.update(f"{name.replace('_original_component.', '')} {parameter.dtype}\n".encode())
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
