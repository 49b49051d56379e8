"""`cdc run` as a process of its own, kept alive the way Kubernetes would do it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.chaos.rules import Violations
from tests.support.waiting import wait_until

PROC = Path("/proc")
STOP_S = 60.0
ORPHANS_S = 60.0  # a JVM whose driver died ends by itself
RESTART_S = 1.0
CALM = ('"progress"', '"batch applied"')  # events that tell of no trouble
TAKEN_OVER = "has taken over"


class Daemon:
    """One life of the daemon. Everything it starts is in a session of its own, and found by that.

    A driver that is killed leaves its JVM behind for a moment, which is part of the fault.
    """

    def __init__(self, config: Path, log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        self.opened_sinks: set[str] = set()
        self.was_killed = False
        self.refused = 0  # changes that went to the quarantine, which no change of the load should
        self.stopped_sinks: list[str] = []  # what their last lines say
        self._read_to = 0
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cdc", "run", "--config", str(config)],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def family(self) -> list[int]:
        """Every living process of this life: driver, JVM, Python workers."""
        return [pid for pid, _, session in _processes() if session == self.pid]

    def workers(self) -> list[int]:
        """Spark's Python workers, which a process of our own forks."""
        workers = [
            (pid, parent)
            for pid, parent, session in _processes()
            if session == self.pid and b"cdc.workers" in _command(pid)
        ]
        return [pid for pid, parent in workers if parent in dict(workers)]

    def kill(self) -> None:
        self.was_killed = True
        self._process.kill()
        self._process.wait(STOP_S)

    def signal_family(self, number: signal.Signals) -> None:
        for pid in self.family():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> int:
        """Ask for a clean stop; kill what does not follow."""
        self.was_killed = True
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        self.signal_family(signal.SIGKILL)
        return self._process.wait(STOP_S)

    def wait_gone(self) -> None:
        """Wait until nothing of a life that has ended runs any more."""
        wait_until(lambda: not self.family(), ORPHANS_S)

    def look(self) -> None:
        """Read what the log has got since the last look."""
        with self.log.open("rb") as log:
            log.seek(self._read_to)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read_to += len(line)
                with suppress(ValueError):
                    self._note(json.loads(line))

    def _note(self, line: Any) -> None:
        match line:
            case {"event": "sink opened", "sink": sink}:
                self.opened_sinks.add(sink)
            case {"event": "batch applied", "tables": tables}:
                self.refused += sum(numbers["refused"] for numbers in tables.values())
            case {"event": "sink stopped", "sink": sink, "error": error, "hint": hint}:
                self.stopped_sinks.append(f"{sink}: {error} ({hint})")

    def last_words(self) -> str:
        """The newest lines that tell of trouble, or simply the last ones."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if not any(event in line for event in CALM)]
        return " | ".join((told or lines)[-3:])


class Keeper:
    """Keeps one daemon running, and says when it ended for no reason that a fault explains."""

    def __init__(
        self, config: Path, directory: Path, env: Mapping[str, str], violations: Violations
    ) -> None:
        self._config = config
        self._directory = directory
        self._env = env
        self._violations = violations
        self._lock = threading.RLock()
        self._lives: list[Daemon] = []
        self._not_before = 0.0
        self.starts_failed = 0

    @property
    def daemon(self) -> Daemon:
        return self._lives[-1]

    @property
    def starts(self) -> int:
        return len(self._lives)

    def start(self) -> Daemon:
        """One more life; the one before is no longer kept."""
        with self._lock:
            log = self._directory / f"daemon-{len(self._lives) + 1:03}.log"
            self._lives.append(Daemon(self._config, log, self._env))
            return self.daemon

    def start_another(self) -> tuple[Daemon, Daemon]:
        """Start a second daemon beside the first, which is from now on nobody's care."""
        with self._lock:
            first = self.daemon
            return first, self.start()

    def look(self) -> None:
        """Start again what was killed. Tell what ended by itself, or gave a sink up."""
        with self._lock:
            daemon = self.daemon
            daemon.look()
            if daemon.refused:
                self._violations.add(f"{daemon.refused} changes were refused")
                daemon.refused = 0
            if daemon.stopped_sinks:
                for words in daemon.stopped_sinks:
                    self._violations.add(f"a sink needs a human: {words}")
                daemon.kill()
            if daemon.exit_code is None or time.monotonic() < self._not_before:
                return
            if not daemon.was_killed:
                self._not_before = time.monotonic() + RESTART_S
                if daemon.opened_sinks:
                    self._violations.add(
                        f"the daemon ended by itself with {daemon.exit_code}: {daemon.last_words()}"
                    )
                else:
                    self.starts_failed += 1
            self.start()

    def stop(self) -> None:
        """End every life, and what each left behind."""
        for life in self._lives:
            life.signal_family(signal.SIGCONT)
        if self._lives:
            self.daemon.stop()
        for life in self._lives:
            life.signal_family(signal.SIGKILL)
            if life.exit_code is None:
                life.kill()


def _processes() -> Iterator[tuple[int, int, int]]:
    """Pid, parent and session of everything that lives."""
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            state, parent, _, session = stat.rpartition(")")[2].split()[:4]
            if state not in "ZX":
                yield int(entry.name), int(parent), int(session)


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes()
    return b""
