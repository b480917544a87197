"""One file on a server, read by byte ranges: exactly the bytes that are asked for, and all of one version of the file.

Requests go through huggingface_hub's session, which keeps connections open and may be used from several threads. Its
file system would read blocks ahead or hold a whole range twice; here the answer is written into the memory it is for.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

from ..errors import FileChanged, GluProbeError, NeedsDownload, ServerUnavailable
from .retries import AGAIN, Broken, Retries, asked_to_wait, may_pass

FIRST = 100_000  # bytes of a first look, which hold nearly every header whole
_PIECE = 1 << 25  # bytes of one request; they are written in place as they come, so this costs no memory
_WHOLE = 1 << 20  # bytes of a file that is accepted whole from a server that knows no ranges
_EXPIRED = frozenset(
    (400, 401, 403, 404, 410)
)  # what a server of content says to an address that was signed for a time


class RemoteFile:
    """A file behind a URL.

    Opening it makes one request, for its size and its first bytes. Reads may come from several threads.

    Attributes:
        url, where: its address, and what it is called in messages.
        size: bytes of the whole file; every later answer must be of a file of that size.
        beginning: the first bytes; see `need`.
        version: what the server names this version of the file by, and how: ("etag", ...), ("last_modified", ...);
            None if it does not.

    Raises:
        GluProbeError: the server has no such file, does not know ranges, or gave no usable answer.
    """

    server = "the server"
    unavailable: type[GluProbeError] = ServerUnavailable

    def __init__(self, url: str, where: str, *, whole: int = _WHOLE) -> None:
        self.url, self.where = url, where
        self._size: int | None = None
        self.version: tuple[str, str] | None = None
        self.beginning = b""
        self._most = whole
        self._content: bytes | None = None
        self._direct: str | None = None  # where redirects led
        self._growing = threading.Lock()
        first = bytearray(FIRST)
        count = self._fill(memoryview(first), 0, "its beginning")
        self.beginning = bytes(first[:count])

    # -- what reads it ---------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes of the whole file; the first answer said how many."""
        assert self._size is not None
        return self._size

    def need(self, stop: int) -> bytes:
        """The file up to that byte, or to its end; kept."""
        with self._growing:
            have, stop = len(self.beginning), min(stop, self.size)
            if stop > have:
                more = bytearray(stop - have)
                self.read_into(memoryview(more), have, "its header")
                self.beginning += more
            return self.beginning[:stop]

    def forget_beginning(self) -> None:
        """Let go of what `need` keeps, once the header is known."""
        with self._growing:
            self.beginning = b""

    def read_into(self, out: memoryview, start: int, what: str) -> None:
        """Fill memory with the bytes from `start` on.

        Args:
            out: as many bytes as are wanted; the file must have them.
            start: offset in the file.
            what: that these bytes are, for messages.

        Raises:
            FileChanged: the file is not the one that was opened.
            GluProbeError: the server failed too often, or its answers contradict themselves.
        """
        if start + len(out) > self.size:
            raise ValueError(f"bytes {start} to {start + len(out)} of a file of {self.size}")
        for at in range(0, len(out), _PIECE):
            self._fill(out[at : at + _PIECE], start + at, what)

    def facts(self) -> dict[str, Any]:
        """Size and version, for provenance."""
        return {"bytes": self.size, **dict([self.version] if self.version else [])}

    # -- who keeps it ----------------------------------------------------------------------------

    def _headers(self) -> Mapping[str, str]:
        """What goes to the server that was named, and to no other."""
        return {}

    def _refuse(self, response: Any) -> NoReturn:
        """Raise what an answer that is not the file means."""
        raise self._fault(f"{self.server} answered with {response.status_code}", "Try again later")

    def _fail(self, error: Exception) -> NoReturn:
        """Raise what an error of the client means that will not pass."""
        raise self._fault(
            f"{self.server} gave no usable answer ({type(error).__name__})", "Check the address"
        ) from None

    def _version(self, response: Any) -> tuple[str, str] | None:
        """The version that an answer is of."""
        return version_of(response)

    # -- requests --------------------------------------------------------------------------------

    def _fill(self, out: memoryview, start: int, what: str) -> int:
        """Ask until the memory is full or the file at its end; a broken answer is continued where it broke off."""
        done, retries = 0, Retries()
        while done < self._within(len(out), start):
            try:
                done += self._ask(start + done, out[done:])
            except Broken as broken:
                done += broken.arrived
                self._direct = None  # where it led before may be what is broken
                if done < self._within(len(out), start) and not retries.again(broken):
                    asked = f"; it asks to wait for {broken.wait:,.0f} s" if broken.wait else ""
                    raise self._fault(
                        f"{self.server} failed {retries.failures} time{'s' * (retries.failures > 1)} "
                        f"({broken.reason}) at bytes {start:,} to {start + len(out):,}, which are {what}: {done:,} of "
                        f"{len(out):,} arrived{asked}",
                        "Check the network and run again, or fetch whole files first with --download (download=True)",
                    ) from None
        return done

    def _within(self, count: int, start: int) -> int:
        return count if self._size is None else min(count, self._size - start)

    def _ask(self, start: int, out: memoryview) -> int:
        """One request. The number of bytes that were written, all that the file has of them."""
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session

        if self._content is not None:
            out[:] = self._content[start : start + len(out)]
            return len(out)
        direct = self._direct
        headers = {"Range": f"bytes={start}-{start + len(out) - 1}", "Accept-Encoding": "identity"}
        arrived = 0
        try:
            with get_session().stream(
                "GET",
                direct or self.url,
                headers=headers if direct else {**self._headers(), **headers},
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                follow_redirects=True,
            ) as response:
                status = response.status_code
                if direct and status in _EXPIRED:
                    raise Broken(f"a redirect that answered with {status}", wait=0)
                if status in AGAIN:
                    raise Broken(f"status {status}", wait=asked_to_wait(response.headers))
                if status == 416:
                    return self._is_empty(response)
                if status not in (200, 206):
                    self._refuse(response)
                self._keep_to(self._version(response))
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise self._contradiction("sends the file compressed, which nobody asked for")
                if status == 200:
                    content = self._take_whole(response)
                    count = self._within(len(out), start)
                    out[:count] = content[start : start + count]
                    return count
                expected = self._checked(response, start, len(out))
                for block in response.iter_raw():
                    if arrived + len(block) > expected:
                        raise self._contradiction(f"sent more than the {expected:,} bytes from {start:,} on")
                    out[arrived : arrived + len(block)] = block
                    arrived += len(block)
                if arrived < expected:
                    raise Broken("the answer ended early", arrived)
                self._remember(response)
                return arrived
        except (Broken, GluProbeError):
            raise
        except Exception as error:
            if not may_pass(error):
                self._fail(error)
            raise Broken(type(error).__name__, arrived) from None

    def _is_empty(self, response: Any) -> int:
        """Nothing stands where the request looked: right for a file of no bytes, wrong for any other."""
        size = re.fullmatch(r"bytes \*/(\d+)", response.headers.get("Content-Range", ""))
        self._keep_to_size(int(size[1]) if size else 0)
        if self.size:
            raise self._contradiction(f"says that there is nothing at bytes that a file of {self.size:,} has")
        return 0

    def _checked(self, response: Any, start: int, count: int) -> int:
        """The number of bytes that the answer is going to have: those that were asked for, as far as the file goes."""
        said = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", said)
        if match is None:
            raise self._contradiction(f"does not say which bytes of how many it sends (Content-Range {said[:80]!r})")
        first, last, size = map(int, match.groups())
        self._keep_to_size(size)
        if (first, last) != (start, min(start + count, size) - 1):
            raise self._contradiction(
                f"sent bytes {first:,} to {last:,} when asked for {start:,} to {start + count - 1:,}"
            )
        length = response.headers.get("Content-Length", "")
        if length and length != str(last + 1 - first):
            raise self._contradiction(f"sent {length[:20]} bytes and called them {first:,} to {last:,}")
        return last + 1 - first

    def _take_whole(self, response: Any) -> bytes:
        """The server does not know ranges: a small file is accepted whole, and kept, a large one refused before it is read."""
        said = response.headers.get("Content-Length", "")
        length = int(said) if said.isdigit() else None
        if length is None or length <= self._most:
            content = bytearray()
            for block in response.iter_raw():
                content += block
                if len(content) > self._most:
                    break
            else:
                if length is not None and len(content) < length:
                    raise Broken("the answer ended early")
                self._keep_to_size(len(content))
                self._content = bytes(content)
                return self._content
        size = f" of {length / 1e9:.3g} GB" if length else ""
        raise NeedsDownload(
            f"{self.server} does not send parts of files, and this one{size} would have to be fetched whole",
            where=self.where,
            hint="Fetch it into the cache with --download (download=True)",
        )

    def _keep_to(self, version: tuple[str, str] | None) -> None:
        if self.version is None:
            self.version = version
        elif version is not None and version[0] == self.version[0] and version[1] != self.version[1]:
            raise self._changed(f"it was {self.version[1][:80]!r} and is {version[1][:80]!r}")

    def _keep_to_size(self, size: int) -> None:
        if self._size is None:
            self._size = size
        elif size != self._size:
            raise self._changed(f"it had {self._size:,} bytes and has {size:,}")

    def _remember(self, response: Any) -> None:
        """Go straight where redirects led to, so that the server that was named is asked once a file, not once a read."""
        last = response.url
        if response.history and _origin(last) != _origin(response.history[0].url):
            self._direct = str(last)

    def _changed(self, how: str) -> FileChanged:
        return FileChanged(
            f"the file on {self.server} changed while it was read: {how}",
            where=self.where,
            hint="Run again when nothing writes to it",
        )

    def _contradiction(self, what: str) -> GluProbeError:
        return self._fault(
            f"{self.server} {what}",
            "It or something on the way does not serve ranges rightly: fetch the file with --download (download=True)",
        )

    def _fault(self, what: str, hint: str) -> GluProbeError:
        return self.unavailable(what, where=self.where, hint=hint)


def version_of(response: Any) -> tuple[str, str] | None:
    """What an answer says of the version of its file: ("etag", ...) or ("last_modified", ...)."""
    for kind, name in (("etag", "ETag"), ("last_modified", "Last-Modified")):
        if said := response.headers.get(name):
            return kind, said.removeprefix("W/").strip('"')
    return None


def _origin(url: Any) -> tuple:
    return url.scheme, url.host, url.port
