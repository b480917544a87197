"""What makes two runs the same: the weights, how they are read, and the software that computes with them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint.sniff import file_facts
from .errors import ChangedFiles
from .report import software_versions

if TYPE_CHECKING:
    import torch

    from .checkpoint.checkpoint import Checkpoint

_NOT_IDENTITY = ("model", "ref", "path", "notes", "files", "towers")


def identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """What decides about a checkpoint's factors, however it was named when it was opened; JSON-ready.

    A repository is known by its commit, local files by their place, sizes and modification times, others by what their
    server says of them.
    """
    facts = checkpoint.provenance()
    out = {name: value for name, value in facts.items() if name not in _NOT_IDENTITY}
    if "repository" in facts:
        out["files"] = {file["name"]: file["bytes"] for file in facts["files"]}
    elif "path" in facts:
        out["path"] = os.path.abspath(facts["path"])
        out["files"] = WatchedFiles(checkpoint).stamps
    else:
        out["ref"] = facts["ref"]
        out["files"] = {file["name"]: file for file in facts["files"]}
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


class WatchedFiles:
    """The local files of a checkpoint, which should stay what they are while it is measured.

    A commit of a repository does not change, and a model in memory has no files: of these nothing is watched.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Look at the files.

        Raises:
            ChangedFiles: one is not what it was when the checkpoint was opened.
        """
        facts = checkpoint.provenance()
        local = "repository" not in facts and "path" in facts
        place = Path(facts["path"]) if local else Path()
        self._ref = checkpoint.ref
        self._paths = {
            file["name"]: place / file["name"] if place.is_dir() else place.with_name(file["name"])
            for file in (facts["files"] if local else ())
        }
        for file in facts["files"] if local else ():
            try:
                same = file_facts(self._paths[file["name"]]) == file
            except OSError:
                same = False
            if not same:
                raise self._changed(file["name"], "since it was opened")
        self.stamps = {name: _stamp(path) for name, path in self._paths.items()}

    def refuse_changed(self) -> None:
        """Make sure that they are what they were.

        Raises:
            ChangedFiles: one of them is not.
        """
        for name, path in self._paths.items():
            if _stamp(path) != self.stamps[name]:
                raise self._changed(name, "while it was measured")

    def _changed(self, name: str, when: str) -> ChangedFiles:
        return ChangedFiles(f"{name} changed {when}", where=self._ref, hint="Begin again when nothing writes to it")


def _stamp(path: Path) -> list[int]:
    """Size in bytes and modification time in ns; nothing of a file that is gone."""
    try:
        stat = path.stat()
    except OSError:
        return []
    return [stat.st_size, stat.st_mtime_ns]


def running_software() -> dict[str, str]:
    """Versions, and the instruction set, that could change a bit of a weight report."""
    import torch

    from .measures.arithmetic import compiler, native_bfloat16

    names = ("glu-probe", "torch", "numpy", "scipy", "gguf")
    versions = {name: importlib.metadata.version(name) for name in names}
    instructions = torch.backends.cpu.get_cpu_capability() + (", bfloat16" if native_bfloat16() else "")
    return versions | {"instructions": instructions, "numba": compiler() or "not used"}


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
