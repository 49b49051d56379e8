"""The reference sink: what the contract means, in a dictionary. For tests, never for data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from cdc.change import Change, Key, Row, Slice, Table, version_of
from cdc.errors import SinkFenced
from cdc.sink import Claim, Entry, Refusal, Written


class MemorySink:
    """*refuses* says of which changes this sink shall never take."""

    def __init__(
        self, name: str = "memory", refuses: Callable[[Change], bool] = lambda _: False
    ) -> None:
        self.name = name
        self._refuses = refuses
        self._tables: dict[str, Table] = {}  # by topic
        self._held: dict[str, dict[Key, Change]] = {}  # deletes stay, as changes without a row
        self._entries: dict[str, Entry] = {}
        self._token = 0

    def prepare(self, tables: Mapping[str, Table]) -> None:
        self._tables.update(tables)
        for table in tables.values():
            self._held.setdefault(table.full_name, {})

    def claim(self) -> Claim:
        self._token += 1
        return Claim(self._token, {**self._lost(), **self._entries})

    def assign(self, token: int, entries: Mapping[str, Entry]) -> None:
        self._check(token)
        self._entries = dict(entries)

    def write(self, token: int, piece: Slice) -> Written:
        self._check(token)
        entry = self._entries[piece.topic]
        reached = entry.offsets.get(piece.partition, 0)
        floor = version_of(entry.generation, reached)
        fresh = [change for change in piece.changes if change.version >= floor]
        sent = self._apply(piece, fresh)
        if not sent.refused:
            offsets = {**entry.offsets, piece.partition: max(piece.next_offset, reached)}
            self._entries[piece.topic] = replace(entry, offsets=offsets)
        return sent._replace(stale=sent.stale + len(piece.changes) - len(fresh))

    def repair(self, piece: Slice) -> Written | None:
        entry = self._entries.get(piece.topic)
        if entry is None or entry.offsets.get(piece.partition, 0) > piece.next_offset:
            return None
        if any(change.generation != entry.generation for change in piece.changes):
            return None
        passed = piece.before(entry.offsets.get(piece.partition, 0))
        done = self._apply(piece, passed)
        return done._replace(stale=done.stale + len(piece.changes) - len(passed))

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

    def _apply(self, piece: Slice, changes: Sequence[Change]) -> Written:
        held = self._held[piece.table.full_name]
        applied, refused = 0, []
        for change in changes:
            before = held.get(change.key)
            if self._refuses(change):
                refused.append(Refusal(piece.partition, change.offset, "refused on purpose"))
            elif before is None or before.version < change.version:
                held[change.key] = change
                applied += 1
        return Written(applied, len(changes) - applied - len(refused), tuple(refused))

    def _lost(self) -> dict[str, Entry]:
        """Rows without a ledger: no topic has this id, so the next generation is opened."""
        held = {topic: self._held[table.full_name] for topic, table in self._tables.items()}
        return {
            topic: Entry("", max(change.generation for change in changes.values()), 0)
            for topic, changes in held.items()
            if changes
        }

    def _check(self, token: int) -> None:
        if token != self._token:
            raise SinkFenced(f"{self.name}: token {token} is old, {self._token} has taken over")
