"""Records that a sink could not take, as they are kept: position, reason, original bytes. Pure.

A record is kept once per sink and position, so keeping it again after a crash changes nothing.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import orjson

from cdc.errors import TooManyRefused

# Below this many changes a ratio says nothing: the first row of a table may well be a bad one.
RATIO_FROM = 1_000
_WINDOW = 100_000  # changes after which old ones begin to be forgotten


@dataclass(frozen=True, slots=True)
class Kept:
    """*key* and *value* are the record as it came; *reason* has codes and columns, no value."""

    sink: str
    topic: str
    topic_id: str
    generation: int
    partition: int
    offset: int
    table: str
    reason: str
    kept_us: int
    key: bytes | None
    value: bytes | None

    @property
    def id(self) -> str:
        return f"{self.sink}/{self.topic}/{self.generation}/{self.partition}/{self.offset}"

    @property
    def kept_at(self) -> str:
        return datetime.fromtimestamp(self.kept_us / 1e6, UTC).isoformat(timespec="seconds")

    def described(self) -> dict[str, str | int]:
        """All but the record itself."""
        return {
            "id": self.id,
            "sink": self.sink,
            "table": self.table,
            "topic": self.topic,
            "generation": self.generation,
            "partition": self.partition,
            "offset": self.offset,
            "kept_at": self.kept_at,
            "reason": self.reason,
        }


def encode(kept: Kept) -> tuple[bytes, bytes]:
    """Key and value of the record that keeps *kept*."""
    body = asdict(kept) | {"key": _text(kept.key), "value": _text(kept.value)}
    return kept.id.encode(), orjson.dumps(body)


def decode(value: bytes) -> Kept:
    body = orjson.loads(value)
    return Kept(**{**body, "key": _bytes(body["key"]), "value": _bytes(body["value"])})


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else b64encode(raw).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text)


def longest_run(order: Sequence[int], refused: Collection[int]) -> int:
    """The most offsets of *order*, one after the other, that are all in *refused*."""
    longest = run = 0
    for offset in order:
        run = run + 1 if offset in refused else 0
        longest = max(longest, run)
    return longest


@dataclass(slots=True)
class Tolerance:
    """Knows when refusals are no longer single rows, but a mistake in the mapping or in cdc.

    *run* counts refused changes with nothing taken in between.
    """

    sink: str
    max_run: int
    max_ratio: float
    run: int = 0
    taken: int = 0
    refused: int = 0

    def note(self, taken: int, refused: int) -> None:
        """Count a batch. Raises TooManyRefused past a limit."""
        self.run = 0 if taken else self.run + refused
        self.taken += taken
        self.refused += refused
        seen = self.taken + self.refused
        if self.run > self.max_run:
            raise too_many(self.sink, f"the last {self.run} changes, one after the other")
        if seen >= RATIO_FROM and self.refused > self.max_ratio * seen:
            raise too_many(self.sink, f"{self.refused} of the last {seen} changes")
        if seen > _WINDOW:
            self.taken //= 2
            self.refused //= 2


def too_many(sink: str, what: str) -> TooManyRefused:
    return TooManyRefused(
        f"{sink}: {what} could not be taken",
        hint="that is no single bad row: cdc quarantine list shows the reasons; mend the mapping or"
        " the source, start again, then cdc quarantine replay",
    )
