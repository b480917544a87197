"""Servers on loopback that the libraries believe to be the network."""

from __future__ import annotations

import pytest

from .servers import FakeHub, WebServer


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
