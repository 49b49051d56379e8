"""Unit tests open no sockets: what they check is pure."""

import socket

import pytest
from hypothesis import settings

# The whole folder is the inner loop: many properties, a few dozen examples each.
settings.register_profile("unit", max_examples=30, deadline=None)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a unit test must not open a socket")

    monkeypatch.setattr(socket.socket, "connect", refuse)
