"""What an error means for a sink: retry, reopen or stop. The only place that decides."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from cdc.errors import (
    CdcError,
    QueryLost,
    SchemaMoved,
    SinkFenced,
    SinkUnavailable,
    SourceUnavailable,
)

FIRST_DELAY_S = 0.5


@dataclass(frozen=True, slots=True)
class Retry:
    """Open the query again from the ledger, after *delay_s*."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave this sink alone until a person has acted on *hint*."""

    hint: str


FENCED_HINT = "another cdc run writes to this sink: stop one of the two"
UNKNOWN_HINT = "this is not an error cdc knows how to survive: mend the cause and start again"
# Reopening reads catalogue, topics and ledger anew: if that does not help soon, it never will.
MAX_REOPENINGS = 5
# A run to the end of the log has somebody waiting for it, so it does not retry for ever.
ONCE_PATIENCE_S = 10.0


def decide(
    error: CdcError, attempt: int, longest_s: float, jitter: Callable[[], float] = random.random
) -> Retry | Stop:
    """*attempt* counts failures of this kind since the last progress. Unknown means stop."""
    match error:
        case SinkUnavailable() | SourceUnavailable():
            return Retry(backoff(attempt, longest_s, jitter))
        case SchemaMoved() | QueryLost() if attempt <= MAX_REOPENINGS:
            return Retry(backoff(attempt, longest_s, jitter))
        case SinkFenced():
            return Stop(error.hint or FENCED_HINT)
        case _:
            return Stop(error.hint or UNKNOWN_HINT)


def backoff(attempt: int, longest_s: float, jitter: Callable[[], float] = random.random) -> float:
    """Full jitter: anything up to the doubled delay, so that restarts do not march in step."""
    ceiling: float = min(longest_s, FIRST_DELAY_S * 2.0 ** min(attempt - 1, 16))
    return ceiling * (0.5 + 0.5 * jitter())
