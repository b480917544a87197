"""Repositories on the Hugging Face hub, through huggingface_hub.

Headers of safetensors and GGUF files are read by range requests; a file is downloaded, into huggingface_hub's own
cache, only when tensors in it are read. Endpoint, token, cache and offline mode are the library's: HF_ENDPOINT,
HF_TOKEN, HF_HOME, HF_HUB_OFFLINE. Nothing in a repository is ever run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import GatedRepo, HubUnavailable, NotCached, RepoNotFound, RevisionNotFound
from . import gguf, safetensors
from .gguf import GGUFFile, GGUFSource
from .safetensors import SafetensorsFile
from .sniff import kind_of, refuse_lfs_text
from .source import TensorInfo, TensorSource

_FIRST = 100_000  # bytes of a first look, which hold nearly every header whole
_SMALL = 4096  # bytes of a tensor that is fetched without its file


class HubFiles:
    """The files of one repository at one commit."""

    def __init__(self, repo: str, revision: str | None) -> None:
        from huggingface_hub import HfApi

        self.repo, self.revision = repo, revision
        with translated(repo, revision):
            info = HfApi().model_info(repo, revision=revision)
            self._names = sorted(sibling.rfilename for sibling in info.siblings or ())
        self.commit = info.sha or revision or "main"
        self._revision_cached = False

    @property
    def location(self) -> str:
        """For messages."""
        return f"{self.repo}@{self.commit}"

    @property
    def how_to_pick(self) -> str:
        """For messages about several files of which one should be read."""
        return f"Fetch one with `hf download {self.repo} FILE` and give the path that it prints"

    def names(self) -> list[str]:
        """Every file of the repository."""
        return self._names

    def path(self, name: str) -> Path:
        """The file on disk, downloaded if need be."""
        from huggingface_hub import hf_hub_download

        with translated(self.repo, self.revision):
            if not self._revision_cached:
                # Asked for by branch or tag once, so that the cache learns which commit that is: offline runs need it.
                self._revision_cached = True
                path = Path(hf_hub_download(self.repo, name, revision=self.revision))
                if self.commit in path.parts:
                    return path
            return Path(hf_hub_download(self.repo, name, revision=self.commit))

    def safetensors(self, name: str) -> TensorSource:
        """The file from the cache, or its header from the hub."""
        cached = self._cached(name)
        return SafetensorsFile(cached) if cached else HubSafetensors(self, name)

    def gguf(self, name: str) -> GGUFSource:
        """The file from the cache, or its header from the hub."""
        cached = self._cached(name)
        return GGUFFile(cached) if cached else HubGGUF(self, name)

    def _cached(self, name: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, name, revision=self.commit)
        return Path(found) if isinstance(found, str) else None

    def read_range(self, name: str, start: int, stop: int) -> tuple[bytes, int]:
        """Bytes start to stop of a file, as far as it goes, and the size of the whole file."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        with translated(self.repo, self.revision):
            headers = build_hf_headers() | {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
            response = get_session().get(
                hf_hub_url(self.repo, name, revision=self.commit),
                headers=headers,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            )
            size = re.search(r"/(\d+)$", response.headers.get("Content-Range", ""))
            if response.status_code == 416:  # nothing there: the file is empty
                return b"", int(size[1]) if size else 0
            hf_raise_for_status(response)
            if response.status_code == 206 and size:
                return response.content, int(size[1])
            return response.content[start:stop], len(response.content)


class _HubFile:
    """One file of a repository: header by range request, data by download when first read."""

    def __init__(self, files: HubFiles, name: str, open_local: Callable[[Path], TensorSource]) -> None:
        self._files, self._name, self._open, self._local = files, name, open_local, None
        self.where = f"{files.location}/{name}"
        self.start, self.size = files.read_range(name, 0, _FIRST)
        refuse_lfs_text(self.start, self.where, "The repository itself lacks the file: tell its owner")
        self.kind = kind_of(self.start[:512])

    def need(self, stop: int) -> bytes:
        """The file up to that byte, or to its end."""
        stop = min(stop, self.size)
        if stop > len(self.start):
            self.start += self._files.read_range(self._name, len(self.start), stop)[0]
        if stop > len(self.start):
            raise HubUnavailable("the hub sent less than it was asked for", where=self.where, hint="Try again later")
        return self.start[:stop]

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._infos

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read from the downloaded file."""
        return self._local_file().read(name, rows)

    def stored(self, name: str, rows: slice | None = None) -> Tensor:
        """Read from the downloaded file."""
        return self._local_file().stored(name, rows)

    def _local_file(self) -> TensorSource:
        if self._local is None:
            self._local = self._open(self._files.path(self._name))
        return self._local

    def provenance(self) -> dict[str, Any]:
        """The file's name and size; the commit identifies it."""
        return {"files": [{"name": self._name, "bytes": self.size}]}


class HubSafetensors(_HubFile):
    """One safetensors file of a repository.

    Raises:
        NotSafetensors, LFSPointer, CorruptHeader, Truncated, TrailingBytes: when opened, before data is fetched.
    """

    def __init__(self, files: HubFiles, name: str) -> None:
        super().__init__(files, name, SafetensorsFile)
        safetensors.refuse_other_kinds(self.kind, self.size, self.where)
        length = safetensors.header_length(self.start, self.size, self.where)
        self._infos, self._starts = safetensors.parse_header(self.need(8 + length)[8:], self.size, self.where)
        self.start = b""

    def stored(self, name: str, rows: slice | None = None) -> Tensor:
        """What describes a packed weight (a shape, a scale) is fetched alone, so that looking downloads nothing else."""
        info = self._infos[name]
        if (
            self._local is not None
            or rows is not None
            or info.dtype not in safetensors.STORED
            or not 0 < info.nbytes <= _SMALL
        ):
            return super().stored(name, rows)
        start = self._starts[name]
        raw, _ = self._files.read_range(self._name, start, start + info.nbytes)
        if len(raw) < info.nbytes:
            raise HubUnavailable("the hub sent less than it was asked for", where=self.where, hint="Try again later")
        return torch.frombuffer(bytearray(raw), dtype=safetensors.STORED[info.dtype]).reshape(info.shape)


class HubGGUF(_HubFile):
    """One GGUF file of a repository.

    Raises:
        NotGGUF, LFSPointer, CorruptHeader, Truncated: when opened, before data is fetched.
    """

    def __init__(self, files: HubFiles, name: str) -> None:
        super().__init__(files, name, GGUFFile)
        gguf.refuse_other_kinds(self.kind, self.where)
        stop, header = _FIRST, None
        while header is None:  # how long the header is, only walking it tells
            try:
                header = gguf.parse_header(self.need(stop), self.size, self.where)
            except gguf.NeedsMore:
                stop *= 4
        self._infos, self.metadata, self.start = header.infos, header.metadata, b""

    def strings(self, key: str) -> list[str] | None:
        """A list of texts in the metadata, from the downloaded file."""
        return self._local_file().strings(key)


def cached_snapshot(repo: str, revision: str | None) -> Path:
    """The repository's directory in the local cache.

    Raises:
        NotCached: it is not there.
    """
    from huggingface_hub import snapshot_download

    with translated(repo, revision):
        return Path(snapshot_download(repo, revision=revision, local_files_only=True))


def not_cached(repo: str, revision: str | None, what: str) -> NotCached:
    """For what the cache lacks while the hub may not be asked."""
    return NotCached(
        f"the hub is offline (HF_HUB_OFFLINE) and {what}",
        where=_spelled(repo, revision),
        hint="Unset HF_HUB_OFFLINE, or download it first where there is a network",
    )


def is_offline() -> bool:
    """Whether huggingface_hub was told not to use the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _spelled(repo: str, revision: str | None) -> str:
    return repo if revision is None else f"{repo}@{revision}"


@contextlib.contextmanager
def translated(repo: str, revision: str | None) -> Iterator[None]:
    """Turn the library's errors into ours. Their texts are not passed on: they can quote requests, token and all."""
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    where = _spelled(repo, revision)
    try:
        yield
    except hub.GatedRepoError:
        raise GatedRepo(
            "the repository is gated", where=where,
            hint=f"Accept its terms at {constants.ENDPOINT}/{repo}, then log in with `hf auth login`",
        ) from None  # fmt: skip
    except hub.RevisionNotFoundError:
        raise RevisionNotFound(
            f"there is no branch, tag or commit {revision or 'main'!r}", where=repo,
            hint=f"See {constants.ENDPOINT}/{repo}/tree/main for those there are",
        ) from None  # fmt: skip
    except (hub.RepositoryNotFoundError, hub.DisabledRepoError):
        raise RepoNotFound(
            "there is no such repository on the hub (nor such a path here), or it is private",
            where=where,
            hint="Check the spelling; for a private one log in with `hf auth login`",
        ) from None
    except (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError):
        if is_offline():
            raise not_cached(repo, revision, "this repository is not in the local cache") from None
        raise HubUnavailable(
            "the hub does not give a file, and it is not in the local cache", where=where,
            hint="Check the network and whether you may read the repository, then run again",
        ) from None  # fmt: skip
    except hub.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", "no status")
        refused = status in (401, 403)
        raise HubUnavailable(
            f"the hub answered with {status}", where=where,
            hint="The token may be expired or wrong: log in with `hf auth login`, or unset HF_TOKEN"
            if refused else "Try again later",
        ) from None  # fmt: skip
    except Exception as error:
        # A network library's error, or whatever an answer that is not the hub's makes the client stumble over.
        raise HubUnavailable(
            f"there is no such path here, and the hub at {constants.ENDPOINT} cannot be reached or gave no usable answer "
            f"({type(error).__name__})",
            where=where,
            hint="Check the network, HF_ENDPOINT and HF_TOKEN, or set HF_HUB_OFFLINE=1 to use what is in the cache",
        ) from None
