"""The processes of one stack: which run, starting one, stopping one, their logs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from deploy.stack import process
from deploy.stack.fetch import unpacked_root
from deploy.stack.process import Process
from deploy.stack.server import Place, Server
from deploy.stack.settings import STOP_TIMEOUT_S, StackError

LOG_TAIL_LINES = 15
LOG_LINE_WIDTH = 300


class ServerFailed(StackError):
    """A server did not come up; the message shows the end of its log."""


class Members:
    """Finds the processes that belong to the stack in *directory*, whoever started them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def log(self, server: Server) -> Path:
        return self.directory / "log" / f"{server.name}.log"

    def main(self, server: Server) -> Process | None:
        """The process that was started as *server*, if it still runs."""
        return process.recorded(self._record(server))

    def all(self, server: Server) -> list[Process]:
        """The recorded process, its helpers and its children, also those that lost their parent."""
        main = self.main(server)
        found = [
            *([main] if main else []),
            *process.marked(server.name, self.directory),
            *process.working_in(self.directory / "data" / server.name, unpacked_root()),
        ]
        return list(dict.fromkeys(found))

    def launch(self, server: Server, place: Place) -> Process:
        started = self._start(server, server.command(place), place)
        process.record(self._record(server), started)
        return started

    def run_tool(self, server: Server, command: list[str], place: Place, timeout_s: float) -> None:
        """Run a helper of *server* to its end; it carries the mark, so `down` finds it too."""
        tool = self._start(server, command, place)
        if process.wait_exit(tool, timeout_s) != 0:
            raise self.failure(server, f"{server.title} could not be prepared")

    def stop(self, server: Server) -> bool:
        """End every process of *server*, the main one first; say whether there was any."""
        found = self.all(server)
        if found:
            main = self.main(server)
            process.stop([main] if main else found, server.stop_signal, STOP_TIMEOUT_S)
            process.stop(self.all(server), server.stop_signal, STOP_TIMEOUT_S)
        self._record(server).unlink(missing_ok=True)
        return bool(found)

    def turn_log(self, server: Server) -> None:
        """Begin an empty log and keep the previous one."""
        log = self.log(server)
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
        log.touch()

    def failure(self, server: Server, message: str) -> ServerFailed:
        """An error that shows the end of the server's log."""
        log = self.log(server)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "".join(f"\n    {line[:LOG_LINE_WIDTH]}" for line in lines[-LOG_TAIL_LINES:])
        return ServerFailed(f"{message}; its log ends with:{tail}", hint=f"The whole log is {log}.")

    def _start(self, server: Server, command: list[str], place: Place) -> Process:
        return process.start(
            command,
            name=server.name,
            directory=self.directory,
            log=self.log(server),
            environ={**self._environ(), **server.environ(place)},
            user=place.user if server.refuses_root else None,
        )

    def _environ(self) -> Mapping[str, str]:
        """A short environment: what a shell happens to export must not change a server."""
        kept = {name: os.environ[name] for name in ("PATH", "TZ") if name in os.environ}
        return {"HOME": str(self.directory), "LC_ALL": "C.UTF-8", **kept}

    def _record(self, server: Server) -> Path:
        return self.directory / "run" / f"{server.name}.json"
