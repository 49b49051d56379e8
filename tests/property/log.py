"""A table at the source and its topic, as Debezium and Kafka would have them. All in memory."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from zlib import crc32

import orjson

from cdc.batch import Record
from cdc.change import Key, Row, Table
from cdc.ledger import TopicState


class Log:
    """*rows* is the table as it is now; the topic tells how it came to be so."""

    def __init__(self, table: Table, partitions: int = 2) -> None:
        self.rows: dict[Key, Row] = {}
        self._table = table
        self._ids = (f"life-{n}" for n in count(1))
        self.recreate(partitions)

    def recreate(self, partitions: int, unseen: Iterable[tuple[Key, Row | None]] = ()) -> None:
        """Another topic of the same name, filled by a snapshot. It says nothing of what is gone.

        *unseen* happens after the last record of the old topic and before the snapshot.
        """
        for key, row in unseen:
            self._set(key, row)
        self._topic_id = next(self._ids)
        self._records: list[list[Record]] = [[] for _ in range(partitions)]
        self._ends = [0] * partitions
        for key, row in self.rows.items():
            self._append(key, _envelope("r", row))
        self.snapshot_ends = dict(enumerate(self._ends))

    def put(self, key: Key, row: Row) -> None:
        self._append(key, _envelope("u" if key in self.rows else "c", row))
        self._set(key, row)

    def delete(self, key: Key) -> None:
        if key in self.rows:
            self._append(key, _envelope("d", None))
            self._append(key, None)
            self._set(key, None)

    def skip(self, partition: int) -> None:
        """An offset without a record: a transaction's marker, or one that was aborted."""
        self._ends[partition % len(self._ends)] += 1

    def compact(self, partition: int, before: int) -> None:
        """Below the offset *before* only the newest record of a key is kept."""
        partition %= len(self._ends)
        records, before = self._records[partition], before % (self._ends[partition] + 1)
        newest = {record.key: record.offset for record in records}
        records[:] = [r for r in records if r.offset >= before or newest[r.key] == r.offset]

    def read(self, partition: int, start: int) -> list[Record]:
        return [record for record in self._records[partition] if record.offset >= start]

    def newest(self, key: Key) -> tuple[int, Record, int]:
        """The partition of *key*, its newest record, and where the log ends there."""
        partition = self._partition(key)
        records = (r for r in self._records[partition] if r.key == self._key(key))
        return partition, max(records), self._ends[partition]

    def fold(self) -> dict[Key, Row]:
        """The rows that remain when every record is applied, one after the other."""
        rows: dict[Key, Row] = {}
        for record in (record for records in self._records for record in records):
            key = tuple(orjson.loads(record.key or b"").values())
            after = orjson.loads(record.value)["after"] if record.value else None
            rows.pop(key, None)
            if after is not None:
                rows[key] = after
        return rows

    def state(self) -> TopicState:
        ends = dict(enumerate(self._ends))
        return TopicState(self._topic_id, len(ends), dict.fromkeys(ends, 0), ends)

    def _set(self, key: Key, row: Row | None) -> None:
        if row is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = row

    def _append(self, key: Key, value: bytes | None) -> None:
        partition = self._partition(key)
        self._records[partition].append(Record(self._ends[partition], self._key(key), value))
        self._ends[partition] += 1

    def _partition(self, key: Key) -> int:
        return crc32(self._key(key)) % len(self._ends)

    def _key(self, key: Key) -> bytes:
        return orjson.dumps(dict(zip(self._table.key, key, strict=True)))


def _envelope(op: str, row: Row | None) -> bytes:
    source = {"connector": "postgresql", "ts_us": 1_794_979_563_449_350, "lsn": 22_696_176}
    return orjson.dumps({"before": None, "after": row, "source": source, "op": op})
