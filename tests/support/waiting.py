"""Wait for what should become true, and say what was seen last when it did not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.1


def wait_until(look: Callable[[], T], within_s: float = 90.0) -> T:
    """Call *look* until it gives something true; fail with the last thing it gave."""
    deadline = time.monotonic() + within_s
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s; seen last: {seen!r}")
        time.sleep(POLL_S)
