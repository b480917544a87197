"""Loopback servers that count what they send and can fail in every way a network does: of plain files, and a hub."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT, OLDER = "1" * 40, "2" * 40


class Fault:
    """What goes wrong with the content of one answer.

    Attributes:
        drop: the connection is closed after that many bytes.
        status, headers: instead of the file.
        stall: nothing comes for so long, after half of it.
        pieces: it comes in pieces of that many bytes, with a pause after each.
        declared: changes the header of the answer.
        surplus: bytes that are sent after the body.
    """

    def __init__(self, **kinds: Any) -> None:
        self.__dict__.update({"drop": None, "status": None, "headers": {}, "stall": 0, "pieces": 0})
        self.__dict__.update({"surplus": b""})
        self.__dict__.update({"declared": lambda headers: headers, **kinds})


class WebServer:
    """The files of directories.

    Attributes:
        roots: first part of a path to the directory that it means.
        faults: taken from the front, one by each request for content that `faulty` matches; None for no fault.
        faulty: regular expression for paths.
        requests: (method, path, range or None, authorization or None), in order.
        sent: path to bytes of content sent.
        ignore_ranges, versions: what it does not do: send ranges, name versions of files.
    """

    def __init__(self) -> None:
        self.roots: dict[str, Path] = {}
        self.faults: list[Fault | None] = []
        self.faulty = r"\.(safetensors|gguf)$"
        self.requests: list[tuple[str, str, str | None, str | None]] = []
        self.sent: dict[str, int] = {}
        self.ignore_ranges, self.versions = False, True
        self.queries: set[str] = set()
        self.connections = 0
        self._lock = threading.Lock()
        self.ports: list[ThreadingHTTPServer] = []
        self.url = self.listen()

    def listen(self) -> str:
        """Answer on one more port, and return its address."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                with owner._lock:
                    owner.connections += 1
                super().setup()

            def log_message(self, *arguments):
                """Say nothing."""

            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                try:
                    owner.take(self)
                except (BrokenPipeError, ConnectionResetError):  # who asked has seen enough
                    self.close_connection = True

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        server.thread.start()
        self.ports.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    def stop(self) -> None:
        for server in self.ports:
            server.shutdown()
            server.server_close()
            server.thread.join()
        self.ports.clear()

    def forget(self) -> None:
        self.requests.clear()
        self.sent.clear()

    def sent_of(self, name: str) -> int:
        """Bytes sent of the files of that name."""
        return sum(count for path, count in self.sent.items() if path.endswith(f"/{name}"))

    def asked_of(self, name: str) -> int:
        """Requests for content of the files of that name."""
        return sum(path.endswith(f"/{name}") and bool(range_) for _, path, range_, _ in self.requests)

    # -- answers ---------------------------------------------------------------------------------

    def take(self, request: BaseHTTPRequestHandler) -> None:
        path, _, query = request.path.partition("?")
        headers = request.headers
        with self._lock:
            self.requests.append((request.command, path, headers.get("Range"), headers.get("Authorization")))
            self.queries.add(query)
        self.answer(request, unquote(path))

    def answer(self, request: BaseHTTPRequestHandler, path: str) -> None:
        root, _, name = path.lstrip("/").partition("/")
        file = self.roots.get(root, Path("/nowhere")) / name
        if not file.is_file():
            return self.send(request, 404, b"Not found")
        return self.content(request, file, {})

    def content(self, request: BaseHTTPRequestHandler, file: Path, facts: dict[str, str]) -> None:
        raw = file.read_bytes()
        if self.versions:
            facts = {"ETag": f'"{hashlib.sha256(raw).hexdigest()}"'} | facts
        with self._lock:
            fault = (
                self.faults.pop(0) if self.faults and re.search(self.faulty, request.path.partition("?")[0]) else None
            )
        fault = fault or Fault()
        if fault.status:
            return self.send(request, fault.status, b"no", fault.headers)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if wanted is None or self.ignore_ranges:
            return self.send(request, 200, raw, facts, fault)
        start, stop = int(wanted[1]), int(wanted[2] or len(raw)) + 1
        if start >= len(raw):
            return self.send(request, 416, b"", facts | {"Content-Range": f"bytes */{len(raw)}"})
        facts["Content-Range"] = f"bytes {start}-{min(stop, len(raw)) - 1}/{len(raw)}"
        return self.send(request, 206, raw[start:stop], facts, fault)

    def send(self, request, status: int, body: bytes, headers: dict | None = None, fault: Fault | None = None) -> None:
        fault = fault or Fault()
        request.send_response(status)
        for key, value in fault.declared({"Content-Length": str(len(body))} | (headers or {})).items():
            request.send_header(key, value)
        request.end_headers()
        if request.command != "GET":
            return
        whole, body = body, body if fault.drop is None else body[: fault.drop]
        piece = fault.pieces or (len(whole) // 2 if fault.stall else len(body)) or 1
        for at in range(0, len(body), piece):
            part = body[at : at + piece]
            path = request.path.partition("?")[0]
            with self._lock:
                self.sent[path] = self.sent.get(path, 0) + len(part)
            request.wfile.write(part)
            request.wfile.flush()
            time.sleep(fault.stall or (0.001 if fault.pieces else 0))
        request.wfile.write(fault.surplus)
        if fault.drop is not None:
            request.close_connection = True


class FakeHub(WebServer):
    """A hub with a few repositories; large files stand on a second port, where redirects lead.

    Attributes:
        repos: name to its files at the commits that its revisions point to.
        errors: name to (status, error code): what is answered for the repository.
        file_errors: the same for its files alone.
        busy: number of requests for repositories that are answered with 503 before any other answer.
        garbage: if set, the content of every answer, with status 200.
        linked_names: whether the hub says what it calls the files that stand elsewhere.
        signed: redirects lead to addresses that hold for so many requests; None for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.repos: dict[str, dict[str, Path]] = {}
        self.errors: dict[str, tuple[int, str]] = {}
        self.file_errors: dict[str, tuple[int, str]] = {}
        self.busy = 0
        self.garbage: bytes | None = None
        self.linked_names = True
        self.signed: int | None = None
        self._uses: dict[str, int] = {}
        self.cdn = self.listen()

    def add(self, name: str, directory: Path, revisions: tuple[str, ...] = ("main",), commit: str = COMMIT) -> None:
        for revision in (*revisions, commit):
            self.repos.setdefault(name, {})[revision] = directory

    def asked_for(self) -> set[str]:
        """Names of the repository files that were asked for."""
        return {path.rpartition("/")[2] for _, path, _, _ in self.requests if "/resolve/" in path or "/cdn/" in path}

    def answer(self, request: BaseHTTPRequestHandler, path: str) -> None:
        path = request.path.partition("?")[0]
        if self.garbage is not None:
            return self.send(request, 200, self.garbage)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        cdn = re.fullmatch(r"/cdn/([^/]+/[^/]+)/([^/]+)/(.+)", path)
        if api:
            return self.model_info(request, api[1], (api[2] or "main").replace("%2F", "/"))
        if cdn:
            return self.stored(request, cdn[1], cdn[2], cdn[3], through_cdn=True)
        if file:
            return self.stored(request, file[1], file[2].replace("%2F", "/"), file[3], through_cdn=False)
        return self.send(request, 404, b"Not found")

    def refuse(self, request, status: int, code: str) -> None:
        # As the hub does, quote the request: an error that passed the answer on would leak the token.
        quoted = f"{code}: {request.headers.get('Authorization')}"
        self.send(request, status, quoted.encode(), {"X-Error-Code": code, "X-Error-Message": quoted})

    def model_info(self, request, name: str, revision: str) -> None:
        if self.busy:
            self.busy -= 1
            return self.send(request, 503, b"busy", {"Retry-After": "0"})
        if name in self.errors:
            return self.refuse(request, *self.errors[name])
        if name not in self.repos:
            return self.refuse(request, 401, "RepoNotFound")
        if revision not in self.repos[name]:
            return self.refuse(request, 404, "RevisionNotFound")
        directory = self.repos[name][revision]
        files = [str(path.relative_to(directory)) for path in sorted(directory.rglob("*")) if path.is_file()]
        body = {"id": name, "modelId": name, "sha": self.commit(name, revision), "private": False, "tags": []}
        body["siblings"] = [{"rfilename": file} for file in files]
        return self.send(request, 200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def commit(self, name: str, revision: str) -> str:
        directory = self.repos[name][revision]
        return next(key for key in (COMMIT, OLDER) if self.repos[name].get(key) == directory)

    def stored(self, request, name: str, revision: str, file: str, *, through_cdn: bool) -> None:
        if name in self.file_errors:
            return self.refuse(request, *self.file_errors[name])
        path = self.repos.get(name, {}).get(revision, Path("/nowhere")) / file
        if not path.is_file():
            return self.refuse(request, 404, "EntryNotFound")
        facts = {"X-Repo-Commit": self.commit(name, revision)}
        if through_cdn:
            uses = self._uses[request.path] = self._uses.get(request.path, 0) + 1
            if self.signed is not None and uses > self.signed:
                return self.send(request, 403, b"expired")
            # what a file is called there need not be what the hub calls it
            return self.content(request, path, facts | {"ETag": f'"{path.name}-{uses}"'})
        if path.suffix != ".json":  # large files stand elsewhere
            raw = path.read_bytes()
            facts |= {"X-Linked-Size": str(len(raw))}
            if self.linked_names:
                facts |= {"X-Linked-Etag": f'"{hashlib.sha256(raw).hexdigest()}"'}
            facts["Location"] = f"{self.cdn}/cdn/{name}/{revision}/{file}?signature={len(self.requests)}"
            return self.send(request, 302, b"", facts)
        return self.content(request, path, facts)
