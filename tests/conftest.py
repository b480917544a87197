"""Fixtures every test shares, and a socket that knows only loopback."""

from __future__ import annotations

import socket

import pytest

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
