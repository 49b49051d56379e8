"""The proxy that the tests of lost connections rely on, in front of a server that echoes."""

from __future__ import annotations

import socket
import socketserver
import threading
import time

import pytest

from tests.support.proxy import Proxy
from tests.support.waiting import wait_until


class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.server.heard.append(line)
            self.wfile.write(line)


@pytest.fixture
def server():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as echo:
        echo.daemon_threads = True
        echo.heard = []
        threading.Thread(target=echo.serve_forever, args=(0.02,), daemon=True).start()
        yield echo
        echo.shutdown()


@pytest.fixture
def proxy(server):
    with Proxy(*server.server_address) as made:
        yield made


@pytest.fixture
def connect(proxy):
    opened = []

    def one():
        client = socket.create_connection((proxy.host, proxy.port), timeout=20)
        opened.append(client)
        return client

    yield one
    for client in opened:
        client.close()


def say(client, line):
    """What comes back for *line*; nothing if the connection is closed instead."""
    try:
        client.sendall(line)
        return client.recv(100)
    except ConnectionError:
        return b""


def test_pass_forwards_both_ways(connect):
    """Several connections at once each get their own answers."""
    one, other = connect(), connect()
    assert say(one, b"a\n") == b"a\n"
    assert say(other, b"b\n") == b"b\n"
    assert say(one, b"c\n") == b"c\n"


def test_cut_closes_what_is_open_and_what_comes(proxy, connect):
    """Nothing passes a cut; after it, new connections do."""
    before = connect()
    assert say(before, b"a\n") == b"a\n"
    proxy.mode = "cut"
    assert say(before, b"b\n") == b""
    assert say(connect(), b"c\n") == b""
    proxy.mode = "pass"
    assert say(before, b"d\n") == b""
    assert say(connect(), b"e\n") == b"e\n"


def test_deaf_swallows(server, proxy, connect):
    """A deaf peer takes what is said and never answers; what it took is lost for good."""
    before = connect()
    assert say(before, b"a\n") == b"a\n"
    proxy.mode = "deaf"
    before.settimeout(0.2)
    with pytest.raises(TimeoutError):
        say(before, b"b\n")
    proxy.mode = "pass"
    before.settimeout(20)
    assert say(before, b"c\n") == b""
    assert say(connect(), b"d\n") == b"d\n"
    assert server.heard == [b"a\n", b"d\n"]


def test_slow_delays(proxy, connect):
    """Both directions wait, and what waits goes on when the mode changes."""
    client = connect()
    proxy.delay_s = 0.05
    proxy.mode = "slow"
    started = time.monotonic()
    assert say(client, b"a\n") == b"a\n"
    assert time.monotonic() - started >= 0.1
    proxy.delay_s = 3600.0
    client.sendall(b"b\n")
    proxy.mode = "pass"
    assert client.recv(100) == b"b\n"


def test_lose_answers_lets_the_request_through(server, proxy, connect):
    """The server has done what was asked, and the client is left without knowing."""
    client = connect()
    proxy.spared = 1
    proxy.mode = "lose_answers"
    assert say(client, b"a\n") == b"a\n"
    assert say(client, b"b\n") == b""
    assert server.heard == [b"a\n", b"b\n"]


def test_server_that_is_down_closes_the_connection():
    """Who cannot be reached through the proxy is seen at once."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening
        with (
            Proxy(*held.getsockname()) as proxy,
            socket.create_connection((proxy.host, proxy.port), timeout=20) as client,
        ):
            assert say(client, b"a\n") == b""


def test_closed_connections_are_forgotten(proxy, connect):
    """A proxy that runs for long does not collect what is over."""
    client = connect()
    assert say(client, b"a\n") == b"a\n"
    assert proxy.connections == 1
    client.close()
    wait_until(lambda: proxy.connections == 0, within_s=20)
