"""A source, its log, and one target that follows it through every mishap we can think of.

Every public method of World but `settle` and `close` is a step of a script. Beside the target
stands a model: the newest change per key that was ever handed over. Whenever something was done to
the target, the two are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest

from cdc.batch import Record, stretches
from cdc.change import Change, Column, Key, Row, Slice, Table, version_of
from cdc.envelope import decode
from cdc.errors import SinkFenced
from cdc.ledger import plan
from cdc.sink import Entry
from tests.contract.conftest import Harness, canonical_row, topic_of
from tests.property.copies import Restore, backup, lose_ledger
from tests.property.log import Log

NO_LIMIT = 1 << 30
_numbers = count(1)


@dataclass
class Writer:
    """A process that writes: its own sink, its token, and where it reads in each partition."""

    sink: Any
    token: int
    generation: int
    at: dict[int, int]


@dataclass
class Model:
    """What the target should hold. *left_out* are keys with a change that it could not take."""

    newest: dict[Key, Change] = field(default_factory=dict)  # deletes, too
    ledgers: list[Entry] = field(default_factory=list)  # from the first to the present one
    left_out: set[Key] = field(default_factory=set)

    @property
    def ledger(self) -> Entry | None:
        return self.ledgers[-1] if self.ledgers else None

    def take(self, changes: Iterable[Change]) -> None:
        for change in changes:
            held = self.newest.get(change.key)
            if held is None or held.version < change.version:
                self.newest[change.key] = change

    def write(self, partition: int, changes: Iterable[Change]) -> None:
        """Take what a writer brings; below the ledger all is stale, also what was left out."""
        reached = self.ledgers[-1].offsets.get(partition, 0)
        self.take(change for change in changes if change.offset >= reached)

    def move(self, partition: int, next_offset: int) -> None:
        ledger = self.ledgers[-1]
        reached = max(next_offset, ledger.offsets.get(partition, 0))
        self.ledgers.append(replace(ledger, offsets={**ledger.offsets, partition: reached}))

    def rows(self) -> dict[Key, Change]:
        return {key: change for key, change in self.newest.items() if change.row is not None}

    def copy(self) -> Model:
        return Model(dict(self.newest), list(self.ledgers), set(self.left_out))


class World:
    """*harness* may hold the targets of other worlds: each has a table of its own."""

    def __init__(self, harness: Harness) -> None:
        columns = (Column("a", "text", nullable=False), Column("b", "text", nullable=False))
        columns += (Column("n", "integer"),)
        self._table = Table("app", f"t{next(_numbers)}", columns, ("a", "b"))
        self._topic = topic_of(self._table)
        self._log = Log(self._table)
        self._harness = harness
        # Where rows and ledger move in one transaction, half a slice is never seen, and no ledger
        # is older than the rows; so such a target need not remember deletes.
        self._is_atomic = harness.kind == "postgres"
        self._model = Model()
        self._poison: set[int] = set()  # versions that the target cannot take
        self._found: list[Slice] = []  # what was left out, as a search in the log found it
        self._copies: list[tuple[Restore, Model]] = []
        self._seen: dict[Key, int] = {}  # versions, by an observer who only looks
        self._visible: set[Key] = set()
        self._old: Writer | None = None
        self._writer = self._opened()

    # The source.

    def put(self, key: Key, n: int | None) -> None:
        self._log.put(key, self._row(key, n))

    def delete(self, key: Key) -> None:
        self._log.delete(key)

    def skip(self, partition: int) -> None:
        """An offset without a record."""
        self._log.skip(partition)

    def compact(self, partition: int, before: int) -> None:
        """Below an offset, only the newest record of every key is kept."""
        self._log.compact(partition, before)

    def recreate(self, partitions: int, unseen: list[tuple[Key, int | None]]) -> None:
        """The topic is made anew. Meanwhile rows were put, or deleted where there is no number."""
        lost = [(key, None if n is None else self._row(key, n)) for key, n in unseen]
        self._log.recreate(partitions, lost)
        self.restart()

    # The sync.

    def restart(self) -> None:
        """Another process takes over: after a crash, or because an answer was lost."""
        self._bury()
        self._old = self._writer
        self._writer = self._opened()
        self._check()

    def read(
        self, partition: int, records: int, max_changes: int, max_bytes: int, cut: int
    ) -> None:
        """Write the next records; each slice in two calls, cut behind that many changes."""
        writer = self._writer
        partition %= len(writer.at)
        read = self._log.read(partition, writer.at[partition])[:records]
        for piece in self._slices(partition, read, max_changes, max_bytes):
            for part in _parts(piece, cut):
                written = self._harness.apply(writer.sink, writer.token, part)
                assert written.applied + written.stale == len(part.changes)
                self._model.write(partition, part.changes)
                self._model.move(partition, part.next_offset)
                self._check()
            writer.at[partition] = piece.next_offset

    def sweep(self) -> None:
        """When all of the snapshot is in the target, what is older than it goes."""
        ledger = self._model.ledgers[-1]
        ends = self._log.snapshot_ends
        if not ledger.unswept or any(ledger.offsets.get(p, 0) < end for p, end in ends.items()):
            return
        newest = self._model.newest
        oldest = version_of(ledger.generation, 0)
        old = {key: change for key, change in newest.items() if change.version < oldest}
        swept = self._writer.sink.sweep(self._writer.token, self._topic, self._table)
        assert swept == sum(change.row is not None for change in old.values())
        self._model.newest = {key: newest[key] for key in newest.keys() - old.keys()}
        self._model.ledgers.append(replace(ledger, unswept=False))
        self._check()

    def search(self) -> None:
        """For every key with a change left out: find its newest record in the log as it is now."""
        for key in sorted(self._model.left_out):
            partition, record, end = self._log.newest(key)
            change = self._decoded(record)
            self._found.append(Slice(self._table, self._topic, partition, end, (change,)))

    def repair(self) -> None:
        """Apply what a search has found, now or long ago, beside the writer.

        What the writer has not come to is left to it.
        """
        if not self._found:
            return
        piece = self._found.pop(0)
        ledger = self._model.ledgers[-1]
        reached = ledger.offsets.get(piece.partition, 0)
        is_late = reached > piece.next_offset
        is_other = piece.changes[0].generation != ledger.generation
        written = self._writer.sink.repair(piece)
        assert (written is None) == (is_late or is_other)
        if written is not None:
            self._model.take(piece.before(reached))
            self._model.left_out.discard(piece.changes[0].key)
        self._check()

    # The mishaps.

    def replay(self, partition: int, offset: int, *limits: int) -> None:
        """The writer reads again, from some earlier place, what it has written."""
        at = self._writer.at
        partition %= len(at)
        at[partition] = offset % (at[partition] + 1)
        self.read(partition, *limits)

    def crash(self, partition: int, records: int, which: int) -> None:
        """The process dies inside a write: some rows are there, any of them; the ledger is not."""
        writer = self._writer
        partition %= len(writer.at)
        read = self._log.read(partition, writer.at[partition])[:records]
        for piece in self._slices(partition, read, NO_LIMIT, NO_LIMIT):
            if not self._is_atomic:
                some = tuple(c for at, c in enumerate(piece.changes) if which >> at & 1)
                half = replace(piece, changes=some, next_offset=0)
                self._harness.apply(writer.sink, writer.token, half)
                self._model.write(partition, some)
        self.restart()

    def zombie(self, key: Key, n: int | None) -> None:
        """The process that was replaced was only asleep, and writes on: it must not."""
        if self._old is None:
            return
        at = max(self._old.at.values()) + 1000
        change = Change(key, self._row(key, n), version_of(self._old.generation, at))
        piece = Slice(self._table, self._topic, 0, at + 1, (change,))
        with pytest.raises(SinkFenced):
            self._harness.apply(self._old.sink, self._old.token, piece)
        self._check()

    def refuse(self, partition: int) -> None:
        """The target will not take the next change of a partition: it is left out, and passed."""
        writer = self._writer
        partition %= len(writer.at)
        for record in self._log.read(partition, writer.at[partition])[:1]:
            self._poison.add(version_of(writer.generation, record.offset))

    def take_back_ledger(self, which: int) -> None:
        """An older ledger is put back under rows that are newer."""
        if self._is_atomic:
            return
        present = self._model.ledgers[-1]
        older = [e for e in self._model.ledgers if e.generation == present.generation]
        chosen = older[which % len(older)]
        self._writer.sink.assign(self._writer.token, {self._topic: chosen})
        self._model.ledgers.append(chosen)
        self.restart()

    def lose_ledger(self) -> None:
        """The ledger is gone and the rows are not."""
        lose_ledger(self._writer.sink)
        self._model.ledgers.clear()
        if self._is_atomic:
            self._model.newest = self._model.rows()
        # Where nothing is held, nothing tells which generation was the last.
        self._seen = {key: self._seen[key] for key in self._visible}
        self.restart()
        self._bury()  # tokens may begin anew

    def back_up(self) -> None:
        copied = backup(self._writer.sink, self._table)
        self._copies.append((copied, self._model.copy()))

    def restore(self, which: int) -> None:
        """Rows and ledger are put back as they were, while nobody writes or repairs."""
        if not self._copies:
            return
        put_back, model = self._copies[which % len(self._copies)]
        put_back()
        self._model = model.copy()
        self._seen, self._visible = {}, set()
        self._found.clear()
        self.restart()
        self._bury()  # tokens may begin anew

    # The end.

    def settle(self) -> None:
        """Left alone, the target comes to hold what the source holds."""
        self.restart()
        for partition in self._writer.at:
            self.read(partition, NO_LIMIT, NO_LIMIT, NO_LIMIT, NO_LIMIT)
        self.search()
        while self._found:
            self.repair()
        self.sweep()
        held = {key: row for key, (row, _) in self._rows().items()}
        assert held == self._log.fold()
        assert held == self._log.rows

    def close(self) -> None:
        self._bury()
        self._writer.sink.close()

    # How.

    def _check(self) -> None:
        """The target holds the newest change of every key that it was given, and nothing else."""
        rows = self._rows()
        assert rows == {
            key: (canonical_row(self._table, change.row or {}), change.version)
            for key, change in self._model.rows().items()
        }
        for key, (_, version) in rows.items():
            seen = self._seen.get(key, 0)
            assert seen < version or (seen == version and key in self._visible)
            self._seen[key] = version
        self._visible = set(rows)

    def _bury(self) -> None:
        if self._old is not None:
            self._old.sink.close()
            self._old = None

    def _opened(self) -> Writer:
        """Open the target as the supervisor does: where the ledger says."""
        sink = self._harness.open({self._topic: self._table})
        claim = sink.claim()
        before, held = self._model.ledger, claim.entries.get(self._topic)
        if before is not None:
            assert held is not None
            assert replace(held, offsets=_reached(held)) == replace(
                before, offsets=_reached(before)
            )
        state = {self._topic: self._log.state()}
        entry = plan([self._topic], claim.entries, state)[self._topic]
        sink.assign(claim.token, {self._topic: entry})
        if before is None or before.generation != entry.generation:
            assert all(it.generation < entry.generation for it in self._model.rows().values())
            self._model.left_out.clear()
            self._poison.clear()
        self._model.ledgers.append(entry)
        at = {p: entry.offsets.get(p, 0) for p in range(entry.partitions)}
        return Writer(sink, claim.token, entry.generation, at)

    def _slices(
        self, partition: int, records: list[Record], max_changes: int, max_bytes: int
    ) -> Iterator[Slice]:
        for stretch in stretches(records, max_changes, max_bytes):
            changes = [self._decoded(record) for record in stretch.records]
            taken = tuple(c for c in changes if c.version not in self._poison)
            self._model.left_out |= {c.key for c in changes if c.version in self._poison}
            yield Slice(self._table, self._topic, partition, stretch.next_offset, taken)

    def _decoded(self, record: Record) -> Change:
        version = version_of(self._writer.generation, record.offset)
        return decode(self._table, record.key, record.value, version)

    def _row(self, key: Key, n: int | None) -> Row:
        return {**dict(zip(self._table.key, key, strict=True)), "n": n}

    def _rows(self) -> dict[Key, tuple[dict[str, Any], int | None]]:
        found = {}
        for row, version in self._writer.sink.rows(self._table):
            values = canonical_row(self._table, row)
            found[tuple(values[name] for name in self._table.key)] = values, version
        return found


def _parts(piece: Slice, cut: int) -> Iterator[Slice]:
    """*piece* as two, the first with *cut* changes; or whole, if it has no more."""
    first, rest = piece.changes[:cut], piece.changes[cut:]
    if first and rest:
        yield replace(piece, changes=first, next_offset=first[-1].offset + 1)
        piece = replace(piece, changes=rest)
    yield piece


def _reached(entry: Entry) -> dict[int, int]:
    """A partition that was never read and one to be read from offset 0 are the same."""
    return {partition: offset for partition, offset in entry.offsets.items() if offset}
