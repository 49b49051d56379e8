"""What must never be seen, in the log and in a store. Pure: the witnesses bring what they saw."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

# What a server shows is not always on its disk yet: Elasticsearch answers a realtime GET with a
# write that it has not acknowledged, and Redis with `appendfsync everysec` holds back up to two
# seconds of what it has answered. Whoever kills a server may take that much away.
NOT_DURABLE_S = 2.0


class Violations:
    """Everything that must not have happened, as sentences; witnesses of all threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[str] = []

    def add(self, sentence: str) -> None:
        with self._lock:
            self._found.append(f"{time.strftime('%H:%M:%S')} {sentence}")

    def all(self) -> list[str]:
        with self._lock:
            return list(self._found)


@dataclass(slots=True)
class _Row:
    version: int = -1
    n: int = -1
    fresh: list[tuple[float, int, int]] = field(default_factory=list)  # when, version, n

    def settle(self, until: float) -> None:
        """Take what was seen up to *until* for durable."""
        while self.fresh and self.fresh[0][0] <= until:
            _, self.version, self.n = self.fresh.pop(0)

    def newest(self) -> tuple[int, int]:
        return self.fresh[-1][1:] if self.fresh else (self.version, self.n)


class Store:
    """What one store has shown of its rows: versions and counters only grow, the dead stay dead."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sightings = 0
        self._rows: dict[Hashable, _Row] = {}
        self._buried: dict[Hashable, float] = {}  # by key, since when
        self._crashed = float("-inf")
        self._lock = threading.Lock()

    def is_buried(self, key: Hashable) -> bool:
        """Whether this row must be absent from now on. Ask before looking into the store."""
        with self._lock:
            return key in self._buried

    def bury(self, keys: Iterable[Hashable], at: float) -> None:
        """These were deleted at the source for good, and the store has passed the deletes."""
        with self._lock:
            for key in keys:
                self._buried.setdefault(key, at)

    def see(
        self, key: Hashable, held: tuple[int, int] | None, at: float, *, buried: bool
    ) -> str | None:
        """Note that the store held version and counter of a row, or nothing; say what is wrong.

        *at* is when the look began: one that a crash came across counts for nothing.
        """
        with self._lock:
            if at <= self._crashed:
                return None
            self.sightings += 1
            if held is None:
                return None
            if buried:
                return f"{self.name}: {key} was deleted for good and is back as version {held[0]}"
            row = self._rows.setdefault(key, _Row())
            row.settle(at - NOT_DURABLE_S)
            wrong = _step_back(row.newest(), held)
            if wrong:
                return f"{self.name}: {key} {wrong}"
            if held[0] > row.newest()[0]:
                row.fresh.append((at, *held))
            return None

    def crash(self, began: float, over: float) -> None:
        """The server died between *began* and *over*.

        What it showed just before need not have been on disk.
        """
        with self._lock:
            self._crashed = over
            for row in self._rows.values():
                row.settle(began - NOT_DURABLE_S)
                row.fresh.clear()
            self._buried = {
                key: since for key, since in self._buried.items() if since <= began - NOT_DURABLE_S
            }


def _step_back(was: tuple[int, int], now: tuple[int, int]) -> str:
    if now[0] < was[0]:
        return f"went from version {was[0]} back to {now[0]}"
    if now[1] < was[1]:
        return f"went from counter {was[1]} back to {now[1]}"
    if now[0] == was[0] and now[1] != was[1]:
        return f"had counter {was[1]} as version {was[0]}, now {now[1]}"
    return ""


class Topic:
    """One life of one topic, record by record: a row's counter only grows, nothing comes twice."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.records = 0
        self._counters: dict[str, int] = {}
        self._seen: set[tuple[Hashable, ...]] = set()

    def read(self, key: str, op: str, n: int, place: tuple[int | None, int | None]) -> str | None:
        """*place* is LSN and transaction; of a delete *n* is what the row had at last."""
        self.records += 1
        change = (key, op, *place)
        if change in self._seen:
            return f"{self.name}: the log repeats {op} of {key} at LSN {place[0]}"
        self._seen.add(change)
        was = self._counters.get(key, -1)
        if n < was or (n == was and op != "d"):
            return f"{self.name}: the counter of {key} goes from {was} to {n} in the log"
        self._counters[key] = n
        return None
