"""Results of a long run kept as they come, so that an interrupted one can go on.

A directory with a file for everything that is finished, and run.json, which says what run they are of. Files appear whole
or not at all; each begins with the checksum of the rest, so that one that was damaged since is made again, not trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import AlreadyRunning, BadOption, Unreadable
from .report import prepare_directory, refusals, write_atomically, write_text

_RUN, _LOCK, _OWNER = "run.json", "lock", "owner.json"
NEURONS = "neurons.parquet"  # made from all results, by who has neurons
_ENDING = ".result"
_FORMAT = 1  # of the files of results
_SHOWN = 3  # differences to another run
_UNFIT = re.compile(r"[^\w., +-]")  # for a file's name
_UNFINISHED = re.compile(r"\..+\.(result|json|parquet|csv|html|png|svg)\.(?P<pid>\d+)\.part")


class Parts:
    """A directory with a file for every finished piece of work, all of one run.

    A context: while it is open, another run is refused.
    """

    def __init__(self, directory: str | os.PathLike, facts: Mapping[str, Any]) -> None:
        """Open the directory, made if need be.

        Args:
            directory: where.
            facts: everything that decides about the results; JSON-ready.

        Raises:
            BadOption: it holds parts of another run; the message says what differs.
            AlreadyRunning: another run writes into it.
            CannotWrite: it cannot be written.
        """
        self.directory = prepare_directory(directory)
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(exclusive(self.directory))
        try:
            self._begin(json.loads(json.dumps({**facts, "format of parts": _FORMAT})))
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Parts:
        """The parts, which are open already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let another run have them."""
        self._lock.close()

    def _begin(self, facts: Mapping[str, Any]) -> None:
        known = _read(self.directory / _RUN)
        if known is None:
            stray = sorted(path.name for path in self.directory.iterdir() if path.name not in (_LOCK, _OWNER))
            if stray:
                raise BadOption(
                    f"there are other files here, such as {stray[0]}",
                    where=self.directory, hint="Give an empty directory for the parts of a run",
                )  # fmt: skip
            with refusals(self.directory):
                write_text(self.directory / _RUN, json.dumps(facts, indent=2) + "\n")
        elif known != facts:
            before, now = _leaves(known), _leaves(facts)
            words = [
                _difference(n, before.get(n), now.get(n)) for n in {**now, **before} if before.get(n) != now.get(n)
            ]
            raise BadOption(
                f"these are parts of another run: {', '.join(words[:_SHOWN])}",
                where=self.directory,
                hint="Go on with the options of that run, give another directory, or remove this one (`--fresh` does)",
            )

    def get(self, name: str) -> bytes | None:
        """What was kept under a name; None if nothing was, or if it is damaged."""
        try:
            head, _, body = self._file(name).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unreadable(
                f"a part cannot be read: {error.strerror}",
                where=self._file(name),
                hint="Run the same command again: what is missing is measured anew",
            ) from None
        return body if head == _checksum(body) else None

    def keep(self, name: str, body: bytes) -> None:
        """Keep a result, on the disk when this returns.

        Raises:
            CannotWrite: it cannot be written; what was kept before is whole.
        """
        with refusals(self.directory):
            write_atomically(self._file(name), lambda path: path.write_bytes(_checksum(body) + b"\n" + body))

    def _file(self, name: str) -> Path:
        return self.directory / f"{_UNFIT.sub('_', name)}{_ENDING}"


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Keep other runs out of a directory of parts. May be nested; ends with the process, however that ends.

    Raises:
        AlreadyRunning: another one is in there.
    """
    import filelock

    lock = filelock.FileLock(directory / _LOCK, timeout=0, is_singleton=True)
    nested = lock.is_locked
    with refusals(directory):
        try:
            lock.acquire()
        except filelock.Timeout:  # an error of the system by its class
            raise AlreadyRunning(
                f"another run is writing here{_owner(directory)}", where=directory,
                hint="Wait until it is done, or choose another directory",
            ) from None  # fmt: skip
    try:
        if not nested:
            with refusals(directory):
                remove_unfinished(directory)
                write_text(directory / _OWNER, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        yield
    finally:
        if not nested:
            (directory / _OWNER).unlink(missing_ok=True)
        lock.release()


def _owner(directory: Path) -> str:
    """Who holds the lock, as far as it said so."""
    try:
        facts = json.loads((directory / _OWNER).read_text(encoding="utf-8"))
        return f" (process {facts['pid']} on {facts['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def remove_unfinished(directory: Path) -> None:
    """Remove what writers that were killed left unfinished under temporary names."""
    for path in directory.iterdir():
        match = _UNFINISHED.fullmatch(path.name)
        if match and not _alive(int(match["pid"])):
            path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    if os.name != "posix" or pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def kept_parts(directory: str | os.PathLike) -> int:
    """How many pieces of a run are finished in a directory."""
    return len(list(Path(directory).glob(f"*{_ENDING}")))


def remove_parts(directory: str | os.PathLike) -> None:
    """Remove what was kept of a run, and the directory if nothing else is in it.

    Raises:
        AlreadyRunning: a run is writing there.
        CannotWrite: something cannot be removed.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return
    with exclusive(directory):
        discard(directory)
        with contextlib.suppress(OSError):
            for name in (_OWNER, _LOCK):
                (directory / name).unlink(missing_ok=True)
            directory.rmdir()


def discard(directory: Path) -> None:
    """Remove what was kept of a run, so that another one can begin.

    Raises:
        CannotWrite: something cannot be removed.
    """
    with refusals(directory):
        # what run it is goes last: whatever is left at any moment, this is known of it
        for path in (*directory.glob(f"*{_ENDING}"), directory / NEURONS, directory / _RUN):
            path.unlink(missing_ok=True)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise BadOption("this is no file of a run", where=path, hint="Remove it") from None


def _leaves(facts: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested facts by names of several words."""
    out: dict[str, Any] = {}
    for name, value in facts.items():
        out |= _leaves(value, f"{above}{name} ") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return out


def _difference(name: str, before: Any, now: Any) -> str:
    if any(isinstance(value, list) or len(str(value)) > 40 for value in (before, now)):
        return f"{name} differs"
    return f"{name} was {before!r} and is {now!r}"
