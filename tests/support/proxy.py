"""A TCP proxy that fails on demand: what a network does to a client, at a moment of our choosing.

    with Proxy("127.0.0.1", 6379) as proxy:
        client = connect(proxy.host, proxy.port)
        proxy.mode = "lose_answers"

A connection that was cut, or that has lost bytes, never carries any again: its two ends no longer
agree on what was said. It is closed, at the latest when the mode changes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Self, get_args

Mode = Literal["pass", "cut", "deaf", "slow", "lose_answers"]
CHUNK_BYTES = 65_536
JOIN_S = 10.0


class Proxy:
    """Listens on a free port of loopback and forwards to the target, as *mode* says.

    - `pass`: everything, as it comes;
    - `cut`: connections are closed, those that are open and those that come;
    - `deaf`: connections are taken and read, and nothing is forwarded either way;
    - `slow`: every chunk waits for *delay_s*;
    - `lose_answers`: requests arrive, and the first answer closes its connection instead of being
      forwarded. As many chunks of answers as *spared* says are forwarded before that, of all
      connections together; set it before the mode.
    """

    def __init__(self, target_host: str, target_port: int, *, delay_s: float = 0.2) -> None:
        self.delay_s = delay_s
        self.spared = 0
        self._target = target_host, target_port
        self._mode: Mode = "pass"
        self._changed = threading.Event()  # a new one with every mode; set when the mode is over
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._threads: list[threading.Thread] = []
        self._is_open = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()

    def __enter__(self) -> Self:
        self._start(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self.mode = "cut"
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept, which close does not
        self._listener.close()
        for thread in self._threads:
            thread.join(JOIN_S)

    @property
    def mode(self) -> Mode:
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"no such mode: {mode}")
        with self._lock:
            self._mode = mode
            self._changed.set()
            self._changed = threading.Event()
            for link in self._links:
                if mode == "cut" or link.has_lost:
                    link.cut()

    @property
    def connections(self) -> int:
        """How many are open now."""
        with self._lock:
            return len(self._links)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads = [thread, *(t for t in self._threads if t.is_alive())]
        thread.start()

    def _listen(self) -> None:
        while self._is_open:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        """One connection, from its beginning to its end."""
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        link = _Link(client, server)
        with self._lock:
            self._links.add(link)
            if self._mode == "cut" or not self._is_open:
                link.cut()
        answers = threading.Thread(target=self._pump, args=(link, server, client), daemon=True)
        answers.start()
        self._pump(link, client, server)
        answers.join()
        with self._lock:
            self._links.discard(link)
        client.close()
        server.close()

    def _pump(self, link: _Link, source: socket.socket, target: socket.socket) -> None:
        """Forward until *source* has nothing more to say, or the connection is cut."""
        try:
            while chunk := source.recv(CHUNK_BYTES):
                if self._lets_through(link, is_answer=source is link.server):
                    target.sendall(chunk)
            if not link.has_lost:
                target.shutdown(socket.SHUT_WR)
        except OSError:
            link.cut()

    def _lets_through(self, link: _Link, *, is_answer: bool) -> bool:
        with self._lock:
            mode, changed = self._mode, self._changed
            if link.has_lost:
                return False
            if mode == "lose_answers" and is_answer:
                self.spared -= 1
                if self.spared < 0:
                    link.has_lost = True
                    link.cut()
                    return False
            if mode == "deaf":
                link.has_lost = True
                return False
        if mode == "slow":
            changed.wait(self.delay_s)
        return True


class _Link:
    """The two sockets of one connection."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.has_lost = False

    def cut(self) -> None:
        """End both, also for threads that wait on them; whoever serves the link closes it."""
        for end in (self.client, self.server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
