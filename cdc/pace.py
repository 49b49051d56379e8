"""How much a sink takes at once: halved when it says that it is busy, grown back by success."""

from __future__ import annotations

import time
from collections.abc import Callable

from cdc.change import Slice
from cdc.errors import SinkBusy
from cdc.policy import backoff

LONGEST_WAIT_S = 5.0
# About 15 s of waiting in place; then the query ends, and the supervisor waits for longer.
MAX_WAITS = 6
_GROWTH = 16  # successes from nothing to the limit


class Pace:
    def __init__(self, limit: int, sleep: Callable[[float], None] = time.sleep) -> None:
        self.size = limit
        self._limit = limit
        self._sleep = sleep
        self._waits = 0

    def slower(self, sent: int, error: SinkBusy) -> None:
        """Take half of what was *sent*, and wait. Raises *error* when waiting has not helped."""
        self.size = max(1, sent // 2)
        self._waits += 1
        if self._waits > MAX_WAITS:
            self._waits = 0
            raise error
        self._sleep(backoff(self._waits, LONGEST_WAIT_S))

    def faster(self) -> None:
        self._waits = 0
        self.size = min(self._limit, self.size + max(1, self._limit // _GROWTH))


def part(piece: Slice, first: int, count: int) -> Slice:
    """*count* changes of *piece* from the one at *first*, as a slice of their own.

    What was collapsed away before the cut is newer behind it, so the ledger may stand at the cut.
    """
    changes = piece.changes[first : first + count]
    is_last = first + count >= len(piece.changes)
    end = piece.next_offset if is_last else changes[-1].offset + 1
    return Slice(piece.table, piece.topic, piece.partition, end, changes)
