"""Bringing servers up side by side, each after those it needs; all or nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from cdc.jars import Progress
from deploy.stack.members import Members
from deploy.stack.process import Process
from deploy.stack.server import NotReady, Place, Server
from deploy.stack.settings import StackError

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Event:
    """Something a person who waits would like to see."""

    server: str  # empty: about the stack as a whole
    state: str  # waiting fetching preparing starting ready failed stopping stopped
    detail: str = ""
    progress: Progress | None = None


OnEvent = Callable[[Event], None]


class _Halted(Exception):  # another server failed: not an error of this one
    pass


@dataclass(frozen=True, slots=True)
class Start:
    """One start of some servers. Those that run already are only waited for."""

    members: Members
    place: Place
    tell: OnEvent
    timeout_s: float
    halt: threading.Event = field(default_factory=threading.Event)

    def run(self, servers: Sequence[Server]) -> None:
        """Return when all are ready; on a failure stop those that were started here."""
        absent = [server for server in servers if not self.members.main(server)]
        jobs: dict[str, Future[None]] = {}
        with ThreadPoolExecutor(max(len(servers), 1)) as pool:
            try:
                for server in servers:
                    needs = [jobs[name] for name in server.needs]
                    jobs[server.name] = pool.submit(self._bring_up, server, needs)
                wait(jobs.values(), return_when=FIRST_EXCEPTION)
                _raise_first(list(jobs.values()))
            except BaseException:
                self.halt.set()
                pool.shutdown()
                for server in reversed(absent):
                    if self.members.stop(server):
                        self.tell(Event(server.name, "stopped"))
                raise

    def _bring_up(self, server: Server, needs: Sequence[Future[None]]) -> None:
        self.tell(Event(server.name, "waiting"))
        wait(needs)
        if self.halt.is_set() or any(need.exception() for need in needs):
            raise _Halted
        began = time.monotonic()
        try:
            self._await_ready(server, self.members.main(server) or self._launch(server))
        except StackError:
            self.tell(Event(server.name, "failed"))
            raise
        except OSError as error:
            self.tell(Event(server.name, "failed"))
            raise StackError(
                f"{server.title} cannot be started: {error}",
                hint=f"Its files are under {self.members.directory}.",
            ) from error
        self.tell(Event(server.name, "ready", f"{time.monotonic() - began:.1f} s"))

    def _launch(self, server: Server) -> Process:
        self.tell(Event(server.name, "preparing"))
        self.members.turn_log(server)
        server.prepare(
            self.place,
            lambda tool: self.members.run_tool(server, tool, self.place, self.timeout_s),
        )
        if self.halt.is_set():
            raise _Halted
        started = self.members.launch(server, self.place)
        self.tell(Event(server.name, "starting"))
        return started

    def _await_ready(self, server: Server, running: Process) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                server.check(self.place)
                # Something else may answer on the port of a server that could not have it.
                if running.is_alive:
                    return
                last = "it has stopped"
            except NotReady as reason:
                last = str(reason)
            if not running.is_alive:
                raise self.members.failure(server, f"{server.title} stopped while it was starting")
            if time.monotonic() > deadline:
                message = f"{server.title} was not ready after {self.timeout_s:g} s ({last})"
                raise self.members.failure(server, message)
            if self.halt.wait(POLL_S):
                raise _Halted


def _raise_first(jobs: Sequence[Future[None]]) -> None:
    for job in jobs:
        error = job.exception() if job.done() else None
        if error and not isinstance(error, _Halted):
            raise error
