"""Repositories on the Hugging Face hub, through huggingface_hub.

Headers and tensors of safetensors and GGUF files are read by byte ranges; files that are in huggingface_hub's own cache
are read from there, and downloaded into it where that is asked for. Endpoint, token, cache and offline mode are the
library's: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE. Nothing in a repository is ever run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..errors import GatedRepo, HubUnavailable, NotCached, RepoNotFound, RevisionNotFound
from .gguf import GGUFFile, GGUFSource
from .remote import RemoteFile
from .remote_tensors import Place, refuse_torch, remote_gguf, remote_safetensors
from .retries import patiently
from .safetensors import SafetensorsFile
from .sniff import load_json
from .source import StoredSource
from .torch_bin import TorchFile


class HubFiles:
    """The files of one repository at one commit.

    Args:
        repo, revision: "org/name", and a branch, tag or commit; None for the default branch.
        download: fetch a file into the library's cache when its first tensor is read.
    """

    at_once = 8

    def __init__(self, repo: str, revision: str | None, *, download: bool = False) -> None:
        from huggingface_hub import HfApi

        self.repo, self.revision, self.download = repo, revision, download
        with translated(repo, revision):
            info = patiently(lambda: HfApi().model_info(repo, revision=revision))
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
        return f"Name one as hf://{_spelled(self.repo, self.revision)}/FILE"

    def names(self) -> list[str]:
        """Every file of the repository."""
        return self._names

    def exists(self, name: str) -> bool:
        """Whether the repository has the file."""
        return name in self._names

    def where(self, name: str) -> str:
        """For messages about a file."""
        return f"{self.location}/{name}"

    def json(self, name: str) -> dict[str, Any]:
        """A small file that holds a JSON object; the library's cache keeps it."""
        return load_json(self.path(name))

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

    def safetensors(self, name: str) -> StoredSource:
        """The file from the cache, or in place."""
        cached = self._cached(name)
        return SafetensorsFile(cached) if cached else remote_safetensors(self._remote(name))

    def gguf(self, name: str) -> GGUFSource:
        """The file from the cache, or in place."""
        cached = self._cached(name)
        return GGUFFile(cached) if cached else remote_gguf(self._remote(name))

    def torch(self, name: str) -> StoredSource:
        """The file from the cache; downloaded if it is not there and that was asked for."""
        path = self._cached(name) or (self.path(name) if self.download else None)
        if path is None:
            raise refuse_torch(self.where(name))
        return TorchFile(path)

    def _cached(self, name: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, name, revision=self.commit)
        return Path(found) if isinstance(found, str) else None

    def _remote(self, name: str) -> Place:
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.repo, name, revision=self.commit)
        # Another library may have put it into the cache meanwhile: one that runs the model, say.
        copy = partial(self.path if self.download else self._cached, name)
        return Place(partial(HubFile, self, name, url), {"name": name, "url": url}, copy, self.download)


class HubFile(RemoteFile):
    """One file of a repository, at the repository's commit."""

    server = "the hub"
    unavailable = HubUnavailable

    def __init__(self, files: HubFiles, name: str, url: str) -> None:
        self._files = files
        super().__init__(url, files.where(name))

    def _headers(self) -> Mapping[str, str]:
        from huggingface_hub.utils import build_hf_headers

        return build_hf_headers()

    def _refuse(self, response: Any) -> NoReturn:
        from huggingface_hub.utils import hf_raise_for_status

        with translated(self._files.repo, self._files.revision, self.where):
            hf_raise_for_status(response)
        super()._refuse(response)

    def _fail(self, error: Exception) -> NoReturn:
        with translated(self._files.repo, self._files.revision, self.where):
            raise error

    def _version(self, response: Any) -> tuple[str, str] | None:
        """What the hub itself calls the file. Where large files are kept, they may be called something else."""
        linked = (answer.headers.get("X-Linked-Etag") for answer in (*response.history, response))
        own = None if response.history or self._direct else response.headers.get("ETag")
        named = (next(filter(None, linked), own) or "").removeprefix("W/").strip('"')
        return ("sha256" if re.fullmatch("[0-9a-f]{64}", named) else "etag", named) if named else None


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
        hint=f"{_spelling(repo)}. If the repository is meant, unset HF_HUB_OFFLINE, or download it first where there is a "
        "network",
    )


def _spelling(repo: str) -> str:
    """What to look at first: a path that is not there looks like a repository."""
    return f"Check the spelling, and write ./{repo} for a path on this machine"


def is_offline() -> bool:
    """Whether huggingface_hub was told not to use the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _spelled(repo: str, revision: str | None) -> str:
    return repo if revision is None else f"{repo}@{revision}"


@contextlib.contextmanager
def translated(repo: str, revision: str | None, where: str | None = None) -> Iterator[None]:
    """Turn the library's errors into ours. Their texts are not passed on: they can quote requests, token and all.

    Args:
        repo, revision: what is asked about.
        where: for messages, if that is not what the repository is.
    """
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    where = where or _spelled(repo, revision)
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
            hint=f"{_spelling(repo)}; for a private one log in with `hf auth login`",
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
            hint=f"{_spelling(repo)}. If the repository is meant, check the network, HF_ENDPOINT and HF_TOKEN, or set "
            "HF_HUB_OFFLINE=1 to use what is in the cache",
        ) from None
