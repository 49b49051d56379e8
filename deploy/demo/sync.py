"""The daemon as a child process, and what its log lines tell."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RATE_WINDOW_S = 5.0


@dataclass(slots=True)
class Pair:
    """One table in one sink, as the daemon reports it."""

    applied: int = 0
    lag: int | None = None
    latency_s: float | None = None
    recent: deque[tuple[float, int]] = field(default_factory=deque)

    def rate(self) -> float:
        """Changes a second over the last seconds."""
        since = time.monotonic() - RATE_WINDOW_S
        while self.recent and self.recent[0][0] < since:
            self.recent.popleft()
        return sum(count for _, count in self.recent) / RATE_WINDOW_S


class Sync:
    """`cdc run`, watched through its log."""

    def __init__(self, config: Path, log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        self.pairs: defaultdict[tuple[str, str], Pair] = defaultdict(Pair)  # (sink, table)
        self.trouble: dict[str, str] = {}  # by sink
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cdc", "run", "--config", str(config)],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the demo, which then stops the daemon itself
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self, within_s: float = 60.0) -> int:
        """Ask for a clean stop; the exit code."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join(5)
        return code

    def last_lines(self, count: int = 5) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8").splitlines()[-count:])

    def _read(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        with self.log.open("w", encoding="utf-8") as log, stream:
            for line in stream:
                log.write(line)
                log.flush()
                with contextlib.suppress(ValueError):
                    self._note(json.loads(line))

    def _note(self, line: dict[str, Any]) -> None:
        sink = line.get("sink", "")
        match line.get("event"):
            case "batch applied":
                for table, numbers in line["tables"].items():
                    pair = self.pairs[sink, table]
                    pair.applied += numbers["applied"]
                    pair.recent.append((time.monotonic(), numbers["applied"]))
                    pair.latency_s = numbers["commit_to_applied_s"]
            case "progress":
                for table, lag in line["lag"].items():
                    self.pairs[sink, table].lag = lag
            case "sink opened":
                self.trouble.pop(sink, None)
            case "retrying" | "sink stopped":
                self.trouble[sink] = line["error"]
