"""Unit tests open no sockets: what they check is pure."""

import socket

import pytest


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a unit test must not open a socket")

    monkeypatch.setattr(socket.socket, "connect", refuse)
