"""The reference sink: what the contract means, in a dictionary. For tests, never for data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from cdc.change import Change, Key, Row, Slice, Table
from cdc.errors import SinkFenced
from cdc.sink import Claim, Entry, Written


class MemorySink:
    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self._held: dict[str, dict[Key, Change]] = {}  # deletes stay, as changes without a row
        self._entries: dict[str, Entry] = {}
        self._token = 0

    def prepare(self, tables: Mapping[str, Table]) -> None:
        for table in tables.values():
            self._held.setdefault(table.full_name, {})

    def claim(self) -> Claim:
        self._token += 1
        return Claim(self._token, dict(self._entries))

    def assign(self, token: int, entries: Mapping[str, Entry]) -> None:
        self._check(token)
        self._entries = dict(entries)

    def write(self, token: int, piece: Slice) -> Written:
        self._check(token)
        applied = self._apply(piece)
        entry = self._entries[piece.topic]
        reached = max(piece.next_offset, entry.offsets.get(piece.partition, 0))
        offsets = {**entry.offsets, piece.partition: reached}
        self._entries[piece.topic] = replace(entry, offsets=offsets)
        return Written(applied, len(piece.changes) - applied)

    def repair(self, piece: Slice) -> Written | None:
        entry = self._entries.get(piece.topic)
        if entry is None or entry.offsets.get(piece.partition, 0) > piece.next_offset:
            return None
        if any(change.generation != entry.generation for change in piece.changes):
            return None
        applied = self._apply(piece)
        return Written(applied, len(piece.changes) - applied)

    def sweep(self, token: int, topic: str, table: Table) -> int:
        self._check(token)
        entry = self._entries[topic]
        held = self._held[table.full_name]
        old = [key for key, it in held.items() if it.generation < entry.generation]
        swept = sum(held.pop(key).row is not None for key in old)
        self._entries[topic] = replace(entry, unswept=False)
        return swept

    def rows(self, table: Table) -> Iterator[tuple[Row, int | None]]:
        for change in self._held[table.full_name].values():
            if change.row is not None:
                yield change.row, change.version

    def close(self) -> None:
        pass

    def _apply(self, piece: Slice) -> int:
        held = self._held[piece.table.full_name]
        applied = 0
        for change in piece.changes:
            before = held.get(change.key)
            if before is None or before.version < change.version:
                held[change.key] = change
                applied += 1
        return applied

    def _check(self, token: int) -> None:
        if token != self._token:
            raise SinkFenced(f"{self.name}: token {token} is old, {self._token} has taken over")
