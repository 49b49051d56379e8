"""The newest record per key of one partition, cut by count and bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Record(NamedTuple):
    """A Kafka record as it came. *value* is None for a tombstone."""

    offset: int
    key: bytes | None
    value: bytes | None


class Stretch(NamedTuple):
    """The newest record of each key, in offset order, and where reading goes on."""

    records: list[Record]
    next_offset: int


def stretches(records: Iterable[Record], max_changes: int, max_bytes: int) -> Iterator[Stretch]:
    """Collapse *records* (one partition, in offset order); never hold more than the limits.

    A key may come again in a later stretch; within one it stands once, at its newest offset.
    """
    newest: dict[bytes | int, Record] = {}
    size = 0
    next_offset = 0
    for record in records:
        # A record without a key is none that Debezium writes: each goes its own way.
        key = record.offset if record.key is None else record.key
        before = newest.pop(key, None)  # popped, so that the dictionary keeps offset order
        if before is not None:
            size -= _size(before)
        newest[key] = record
        size += _size(record)
        next_offset = record.offset + 1
        if len(newest) >= max_changes or size >= max_bytes:
            yield Stretch(list(newest.values()), next_offset)
            newest, size = {}, 0
    if newest:
        yield Stretch(list(newest.values()), next_offset)


def _size(record: Record) -> int:
    return len(record.key or b"") + len(record.value or b"")
