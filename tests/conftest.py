"""Fixtures that tests share: commands, a socket that knows only loopback, and servers there that libraries take for the network."""

from __future__ import annotations

import socket
from functools import partial

import pytest

from .checkpoint.servers import FakeHub, WebServer
from .support import write_llama

_REAL_CONNECT = socket.socket.connect


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch):
    """A test that reaches for the network fails at once."""

    def connect(self, address):
        host = address[0] if isinstance(address, tuple) else address
        if isinstance(host, str) and not host.startswith(("127.", "::1", "localhost", "/", "\0")):
            raise AssertionError(f"a test tried to reach {host}")
        return _REAL_CONNECT(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture
def llama(tmp_path):
    """Directory of the plain LLaMA fixture: d_model 16, d_mlp 24, 12 layers, float32."""
    return write_llama(tmp_path / "llama")


@pytest.fixture
def run(capsys):
    """Run a command in this process; returns (exit code, stdout, stderr)."""
    from .checkpoint.writers import command_line

    return partial(command_line, capsys)


# -- servers ---------------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch):
    """Seconds that would have been waited between tries; nothing waits."""
    from glu_probe.checkpoint import retries

    waits: list[float] = []
    monkeypatch.setattr(retries, "sleep", waits.append)
    return waits


@pytest.fixture
def alone(tmp_path, monkeypatch, waits):
    """No proxy, no token, an empty cache, a directory of its own."""
    from huggingface_hub import constants

    home = tmp_path / "hf"
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("GLU_PROBE_CACHE", str(tmp_path / "cache"))
    # The library reads its environment once, when imported; a run in a process of its own is tested, too.
    for name, value in {
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_XET_CACHE": str(home / "xet"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)


@pytest.fixture
def hub(alone, monkeypatch):
    """A fake hub that huggingface_hub believes in."""
    from huggingface_hub import constants

    fake = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.url + "/{repo_id}/resolve/{revision}/{filename}")
    yield fake
    fake.stop()


@pytest.fixture
def web(alone):
    """A web server."""
    server = WebServer()
    yield server
    server.stop()
