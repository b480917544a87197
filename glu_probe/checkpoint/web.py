"""Files behind plain URLs: a weight file, or what stands beside each other below one address.

A web server lists nothing, so what there is, is found by asking for the names that models' files have. No token goes
to such a server; what a URL itself carries, a name and password or a signature, is sent and never shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ..errors import CannotWrite, GluProbeError, NeedsDownload, NotCached, PathNotFound, ServerUnavailable
from ..sample_models import cache_directory
from .gguf import GGUFSource
from .hub import is_offline
from .ref import public
from .remote import RemoteFile, version_of
from .remote_tensors import Place, refuse_torch, remote_gguf, remote_safetensors
from .retries import AGAIN, Broken, Retries, asked_to_wait, may_pass
from .sniff import parse_json, refuse_lfs_text
from .source import StoredSource
from .torch_bin import TorchFile

_TEXT = 1 << 26  # bytes of a JSON file that are accepted
_ABSENT = frozenset((401, 403, 404, 410))  # what servers say of a file that is not there; some forbid to ask
_INDEX = "model.safetensors.index.json"


class WebFiles:
    """The files that stand beside each other on a web server.

    Args:
        url: of the directory they stand in; a query is sent along for every file.
        download: fetch a file into the cache of glu-probe when its first tensor is read.
    """

    at_once = 8
    how_to_pick = "Give the URL of one"

    def __init__(self, url: str, *, download: bool = False) -> None:
        self._parts, self.download = urlsplit(url), download
        self.location = public(url)
        self._there: dict[str, bool] = {}
        self._opened: dict[str, RemoteFile] = {}  # by looking whether they are there
        if is_offline():
            raise NotCached(
                "the network may not be used (HF_HUB_OFFLINE)", where=self.location,
                hint="Unset HF_HUB_OFFLINE, or give the path of a copy",
            )  # fmt: skip

    def names(self) -> list[str]:
        """Those files of a model that are there: its config, and its weights under the standard names."""
        names = [name for name in ("config.json", _INDEX) if self.exists(name)]
        if _INDEX in names:
            parts = self.json(_INDEX).get("weight_map")
            return [*names, *sorted({str(part) for part in parts.values()} if isinstance(parts, Mapping) else ())]
        return [*names, *(name for name in ("model.safetensors", "pytorch_model.bin") if self.exists(name))]

    def exists(self, name: str) -> bool:
        """Whether the server has the file, and gives it."""
        if name not in self._there:
            try:
                self._opened[name], self._there[name] = self._file(name), True
            except (PathNotFound, NeedsDownload) as refused:
                self._there[name] = isinstance(refused, NeedsDownload)
        return self._there[name]

    def where(self, name: str) -> str:
        """For messages about a file: its address without what is secret in it."""
        return public(self._url(name))

    def json(self, name: str) -> dict[str, Any]:
        """A small file that holds a JSON object."""
        file = self._take(name)
        refuse_lfs_text(file.beginning, file.where, "The server itself lacks the file: tell who put it there")
        return parse_json(file.need(file.size), file.where)

    def path(self, name: str) -> Path:
        """The file on disk, in the cache of glu-probe."""
        return fetch_whole(self._url(name), self.where(name))

    def safetensors(self, name: str) -> StoredSource:
        """The file in place."""
        return remote_safetensors(self._remote(name))

    def gguf(self, name: str) -> GGUFSource:
        """The file in place."""
        return remote_gguf(self._remote(name))

    def torch(self, name: str) -> StoredSource:
        """The file, downloaded if that was asked for."""
        if not self.download:
            raise refuse_torch(self.where(name))
        return TorchFile(self.path(name))

    def _remote(self, name: str) -> Place:
        facts = {"name": name, "url": self.where(name)}
        copy = partial(self.path, name) if self.download else lambda: None
        return Place(partial(self._take, name), facts, copy, self.download)

    def _take(self, name: str) -> RemoteFile:
        return self._opened.pop(name, None) or self._file(name)

    def _file(self, name: str) -> RemoteFile:
        return WebFile(self._url(name), self.where(name), **({"whole": _TEXT} if name.endswith(".json") else {}))

    def _url(self, name: str) -> str:
        scheme, place, path, query, _ = self._parts
        return urlunsplit((scheme, place, f"{path.rstrip('/')}/{quote(name, safe='')}", query, ""))


class WebFile(RemoteFile):
    """One file on a web server."""

    def _refuse(self, response: Any) -> NoReturn:
        raise refusal(response.status_code, self.where)

    def _fail(self, error: Exception) -> NoReturn:
        raise _unusable(error, self.where) from None


def split(url: str) -> tuple[str, str]:
    """URL of the directory that a file stands in, and the file's name."""
    scheme, place, path, query, _ = urlsplit(url)
    directory, _, name = path.rpartition("/")
    return urlunsplit((scheme, place, directory + "/", query, "")), unquote(name)


def refusal(status: int, where: str) -> GluProbeError:
    """What a status means that no file came with."""
    if status in _ABSENT:
        forbidden = status in (401, 403)
        return PathNotFound(
            f"the server {'does not give' if forbidden else 'has no'} such file (status {status})", where=where,
            hint="Check the address and whether it may be read by anyone who knows it; no token is sent to it"
            if forbidden else "Check the address",
        )  # fmt: skip
    return ServerUnavailable(f"the server answered with {status}", where=where, hint="Check the address, or try later")


def _unusable(error: Exception, where: str) -> GluProbeError:
    return ServerUnavailable(
        f"the server gave no usable answer ({type(error).__name__})", where=where, hint="Check the address"
    )


def fetch_whole(url: str, where: str) -> Path:
    """Fetch a whole file into the cache of glu-probe, or find it there.

    It is found again if the server still names the same version of it; a server that names none is believed no copy.

    Raises:
        PathNotFound, ServerUnavailable, CannotWrite.
    """
    retries = Retries()
    while True:
        try:
            with _alone(where):
                return _attempt(url, where)
        except Broken as broken:
            if not retries.again(broken):
                raise ServerUnavailable(
                    f"the server failed {retries.failures} times ({broken.reason}); {broken.arrived:,} bytes arrived",
                    where=where,
                    hint="Check the network and run again",
                ) from None


@contextlib.contextmanager
def _alone(where: str) -> Iterator[None]:
    """While no other process fetches that file: the next will find it in the cache."""
    from huggingface_hub.utils import WeakFileLock

    lock = cache_directory() / "web" / ".locks" / f"{hashlib.sha256(where.encode()).hexdigest()[:32]}.lock"
    with contextlib.ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(WeakFileLock(lock))
        except OSError as error:
            raise _not_kept(error, lock.parent) from None
        yield


def _attempt(url: str, where: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    arrived = 0
    try:
        with get_session().stream(
            "GET", url, headers={"Accept-Encoding": "identity"},
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True,
        ) as response:  # fmt: skip
            if response.status_code in AGAIN:
                raise Broken(f"status {response.status_code}", wait=asked_to_wait(response.headers))
            if response.status_code != 200:
                raise refusal(response.status_code, where)
            said = response.headers.get("Content-Length", "")
            length, version = int(said) if said.isdigit() else None, version_of(response)
            key = hashlib.sha256("\n".join(map(str, (where, version, length))).encode()).hexdigest()[:32]
            target = cache_directory() / "web" / key / re.sub(r"[^\w.-]", "_", split(url)[1])
            if version and target.exists():
                return target

            def blocks() -> Any:
                nonlocal arrived
                for block in response.iter_raw():
                    arrived += len(block)
                    yield block
                if length is not None and arrived < length:
                    raise Broken("the answer ended early", arrived)

            _write(target, blocks)
            return target
    except (Broken, GluProbeError):
        raise
    except Exception as error:
        if may_pass(error):
            raise Broken(type(error).__name__, arrived) from None
        raise _unusable(error, where) from None


def _write(target: Path, blocks: Callable[[], Any]) -> None:
    """Write all of it, or nothing under that name."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".fetch-", delete=False) as scratch:
            try:
                for block in blocks():
                    scratch.write(block)
                scratch.close()
                os.replace(scratch.name, target)
            except BaseException:
                scratch.close()
                os.unlink(scratch.name)
                raise
    except OSError as error:
        raise _not_kept(error, target.parent) from None


def _not_kept(error: OSError, where: Path) -> CannotWrite:
    return CannotWrite(
        f"the file cannot be kept: {error.strerror or error}", where=where,
        hint="Free some space, or set GLU_PROBE_CACHE to a directory that has it",
    )  # fmt: skip
