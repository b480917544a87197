"""Repositories on the Hugging Face hub, through huggingface_hub.

Headers of safetensors files are read by range requests; a file is downloaded, into huggingface_hub's own cache,
only when tensors in it are read. Endpoint, token, cache and offline mode are the library's: HF_ENDPOINT, HF_TOKEN,
HF_HOME, HF_HUB_OFFLINE. Nothing in a repository is ever run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import (
    CorruptHeader,
    GatedRepo,
    GluProbeError,
    HubUnavailable,
    NotCached,
    RepoNotFound,
    RevisionNotFound,
)
from .safetensors import SafetensorsFile
from .source import TensorInfo


class HubFiles:
    """The files of one repository at one commit."""

    def __init__(self, repo: str, revision: str | None) -> None:
        from huggingface_hub import HfApi

        self.repo, self.revision = repo, revision
        with translated(repo, revision):
            info = HfApi().model_info(repo, revision=revision)
        self.commit = info.sha
        self._names = sorted(sibling.rfilename for sibling in info.siblings or ())

    @property
    def location(self) -> str:
        """For messages."""
        return f"{self.repo}@{self.commit}"

    def names(self) -> list[str]:
        """Every file of the repository."""
        return self._names

    def path(self, name: str) -> Path:
        """The file on disk, downloaded if need be."""
        from huggingface_hub import hf_hub_download

        with translated(self.repo, self.revision):
            return Path(hf_hub_download(self.repo, name, revision=self.commit))

    def safetensors(self, name: str) -> SafetensorsFile | HubSafetensors:
        """The file from the cache, or its header from the hub."""
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.repo, name, revision=self.commit)
        return SafetensorsFile(Path(cached)) if isinstance(cached, str) else HubSafetensors(self, name)


class HubSafetensors:
    """One safetensors file of a repository: header by range request, data by download when first read."""

    def __init__(self, files: HubFiles, name: str) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import SafetensorsParsingError

        self._files, self._name, self._local = files, name, None
        try:
            with translated(files.repo, files.revision):
                metadata = HfApi().parse_safetensors_file_metadata(files.repo, name, revision=files.commit)
        except SafetensorsParsingError as error:
            raise CorruptHeader(f"the header cannot be read: {error}", where=f"{files.location}/{name}") from None
        self._infos = {
            key: TensorInfo(key, entry.dtype, tuple(entry.shape), entry.data_offsets[1] - entry.data_offsets[0], name)
            for key, entry in metadata.tensors.items()
        }

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._infos

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read from the downloaded file."""
        if self._local is None:
            self._local = SafetensorsFile(self._files.path(self._name))
        return self._local.read(name, rows)

    def provenance(self) -> dict[str, Any]:
        """The file's name; the commit identifies it."""
        return {"files": [{"name": self._name}]}


def cached_snapshot(repo: str, revision: str | None) -> Path:
    """The repository's directory in the local cache.

    Raises:
        NotCached: it is not there.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, FileNotFoundError):
        raise NotCached(
            "the hub is offline (HF_HUB_OFFLINE) and this repository is not in the local cache",
            where=_spelled(repo, revision),
            hint="Unset HF_HUB_OFFLINE, or download it first where there is a network",
        ) from None


def is_offline() -> bool:
    """Whether huggingface_hub was told not to use the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _spelled(repo: str, revision: str | None) -> str:
    return repo if revision is None else f"{repo}@{revision}"


@contextlib.contextmanager
def translated(repo: str, revision: str | None) -> Iterator[None]:
    """Turn the library's errors into ours. Texts of responses are not passed on: they can quote requests."""
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    where = _spelled(repo, revision)
    try:
        yield
    except GluProbeError:
        raise
    except hub.GatedRepoError:
        raise GatedRepo(
            "the repository is gated", where=where,
            hint=f"Accept its terms at {constants.ENDPOINT}/{repo}, then log in with `hf auth login`",
        ) from None  # fmt: skip
    except hub.RevisionNotFoundError:
        raise RevisionNotFound(
            f"there is no branch, tag or commit {revision!r}", where=repo, hint="See the repository's list of revisions"
        ) from None
    except (hub.RepositoryNotFoundError, hub.DisabledRepoError):
        raise RepoNotFound(
            "there is no such repository on the hub (nor such a path here), or it is private",
            where=where,
            hint="Check the spelling; for a private one log in with `hf auth login`",
        ) from None
    except (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError):
        raise NotCached(
            "a file is not in the local cache and the hub cannot be reached", where=where,
            hint="Unset HF_HUB_OFFLINE or restore the network, then run again",
        ) from None  # fmt: skip
    except (hub.SafetensorsParsingError, hub.NotASafetensorsRepoError):
        raise
    except hub.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", "no status")
        raise HubUnavailable(f"the hub answered with {status}", where=where, hint="Try again later") from None
    except Exception as error:
        if type(error).__module__.split(".")[0] not in (
            "httpx",
            "httpcore",
            "requests",
            "urllib3",
            "httpx2",
            "httpcore2",
        ):
            raise
        raise HubUnavailable(
            f"the hub at {constants.ENDPOINT} cannot be reached ({type(error).__name__})", where=where,
            hint="Check the network, or set HF_HUB_OFFLINE=1 to use what is in the cache",
        ) from None  # fmt: skip
