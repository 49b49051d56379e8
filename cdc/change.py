"""The values that flow: tables, changes, slices of the log. Immutable, and free of I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

# Elasticsearch takes a signed 64-bit version: 15 bits of generation over 48 bits of offset.
OFFSET_BITS = 48
MAX_GENERATION = (1 << 15) - 1

Key = tuple[Any, ...]  # primary-key values as JSON values, in key-column order
Row = Mapping[str, Any]  # column name -> JSON value, as Debezium writes it


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the source. *type* is PostgreSQL's format_type(), e.g. 'numeric(12,2)'."""

    name: str
    type: str
    nullable: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """A source table as the catalogue described it when the query was opened.

    *as_of_us* is the source's clock just before the catalogue was read: a column that a record
    carries and *columns* lacks was dropped since if the record is older, and is new if it is not.
    """

    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    as_of_us: int = 0

    @property
    def full_name(self) -> str:
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class Change:
    """The newest state of one row: *row* is None when the row is gone."""

    key: Key
    row: Row | None
    version: int
    committed_us: int | None = None  # commit time at the source; None when the record has none

    @property
    def generation(self) -> int:
        return self.version >> OFFSET_BITS

    @property
    def offset(self) -> int:
        return self.version & ((1 << OFFSET_BITS) - 1)


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of one partition, collapsed: at most one change per key, in offset order.

    When all of it is durable, the ledger may say *next_offset* for this partition.
    """

    table: Table
    topic: str
    partition: int
    next_offset: int
    changes: tuple[Change, ...]

    def before(self, offset: int) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.offset < offset)


def version_of(generation: int, offset: int) -> int:
    """One number that orders changes of a key across lives of a topic."""
    if not 0 < generation <= MAX_GENERATION or not 0 <= offset < 1 << OFFSET_BITS:
        raise ValueError(f"generation {generation} or offset {offset} is out of range")
    return (generation << OFFSET_BITS) | offset


def key_text(key: Key) -> str:
    """An injective, readable text for a key: `42`, or a JSON array for everything else.

    A lone integer is its own digits. Every other key is its compact JSON array, so that
    ("a-b", "c") and ("a", "b-c") never meet, and neither do 1 and "1".
    """
    if len(key) == 1 and type(key[0]) is int:
        return str(key[0])
    return orjson.dumps(key).decode()
