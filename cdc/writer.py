"""On executors: Arrow batches of one partition -> a sink, or -> decoded lines. Failures are data.

Spark keeps only the text of an exception at its borders, so nothing is raised here on purpose: each
task answers with one report per partition, and a report may hold an error.
"""

from __future__ import annotations

import atexit
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import orjson
import pyarrow as pa

from cdc.batch import Record, Stretch, stretches
from cdc.change import Change, Slice, Table, key_text, version_of
from cdc.config import Batch, SinkSettings
from cdc.envelope import decode
from cdc.errors import CdcError, MalformedRecord, SinkUnusable
from cdc.sink import Sink

RECORD_COLUMNS = ("topic", "partition", "offset", "key", "value")
REPORT_SCHEMA = "report string"
LINE_SCHEMA = "topic string, partition int, key string, row string, version long, report string"


@dataclass(frozen=True, slots=True)
class Job:
    """All that a task needs to know. Shipped to executors, so it holds settings, not clients."""

    sink: SinkSettings
    open_sink: Callable[[SinkSettings], Sink]
    token: int
    tables: Mapping[str, Table]  # by topic
    generations: Mapping[str, int]  # by topic
    limits: Batch


@dataclass(slots=True)
class Report:
    """What became of one partition's part of a batch."""

    topic: str
    partition: int
    changes: int = 0
    applied: int = 0
    stale: int = 0
    next_offset: int | None = None
    oldest_us: int | None = None  # commit time at the source of the oldest change applied
    error: dict[str, str] | None = None

    def count(self, changes: Iterable[Change], next_offset: int) -> None:
        """Note *changes* as read, and where reading goes on."""
        times = [c.committed_us for c in changes if c.committed_us is not None]
        if self.oldest_us is not None:
            times.append(self.oldest_us)
        self.oldest_us = min(times, default=None)
        self.next_offset = next_offset


def write(job: Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write every partition found in *batches* to the job's sink; yield the reports."""
    for topic, partition, records in _partitions(batches):
        report = Report(topic, partition)
        try:
            sink = _opened(job)
            for stretch in stretches(records, job.limits.max_changes, job.limits.max_bytes):
                changes = tuple(_decoded(job, topic, partition, stretch))
                piece = Slice(job.tables[topic], topic, partition, stretch.next_offset, changes)
                written = sink.write(job.token, piece)
                report.changes += len(changes)
                report.applied += written.applied
                report.stale += written.stale
                report.count(changes, stretch.next_offset)
        except Exception as error:  # noqa: BLE001 - it goes home as data, classified or not
            _forget(job)
            report.error = as_data(error, job.sink.name)
        yield pa.RecordBatch.from_pydict({"report": [orjson.dumps(asdict(report)).decode()]})
        if report.error is not None:
            return


def lines(job: Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Decode every partition found in *batches*: one line per key, then one with the report."""
    for topic, partition, records in _partitions(batches):
        report = Report(topic, partition)
        newest: dict[str, Change] = {}
        try:
            for stretch in stretches(records, job.limits.max_changes, job.limits.max_bytes):
                changes = list(_decoded(job, topic, partition, stretch))
                newest.update((key_text(change.key), change) for change in changes)
                report.count(changes, stretch.next_offset)
        except Exception as error:  # noqa: BLE001 - it goes home as data, classified or not
            report.error = as_data(error, job.sink.name)
        report.changes = len(newest)
        yield _frame(topic, partition, newest, report)


def as_data(error: BaseException, sink: str) -> dict[str, str]:
    """An error as data. An unclassified one gives type and place: its text may quote a row."""
    if isinstance(error, CdcError):
        return error.to_data()
    place = traceback.extract_tb(error.__traceback__)[-1]
    unknown = SinkUnusable(
        f"{sink}: unexpected {type(error).__name__} at {place.name}, line {place.lineno}"
    )
    return unknown.to_data()


def _frame(
    topic: str, partition: int, newest: Mapping[str, Change], report: Report
) -> pa.RecordBatch:
    rows = [None if c.row is None else orjson.dumps(c.row).decode() for c in newest.values()]
    count = len(newest)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([topic] * (count + 1), pa.string()),
            pa.array([partition] * (count + 1), pa.int32()),
            pa.array([*newest, None], pa.string()),
            pa.array([*rows, None], pa.string()),
            pa.array([*(change.version for change in newest.values()), None], pa.int64()),
            pa.array([None] * count + [orjson.dumps(asdict(report)).decode()], pa.string()),
        ],
        names=["topic", "partition", "key", "row", "version", "report"],
    )


def _partitions(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, int, Iterator[Record]]]:
    """A task reads one Kafka partition; grouping keeps that true by construction."""
    rows = (
        row
        for batch in batches
        for row in zip(*(batch.column(name).to_pylist() for name in RECORD_COLUMNS), strict=True)
    )
    for (topic, partition), group in groupby(rows, key=lambda row: (row[0], row[1])):
        yield topic, partition, (Record(row[2], row[3], row[4]) for row in group)


def _decoded(job: Job, topic: str, partition: int, stretch: Stretch) -> Iterator[Change]:
    table, generation = job.tables[topic], job.generations[topic]
    for offset, key, value in stretch.records:
        try:
            yield decode(table, key, value, version_of(generation, offset))
        except MalformedRecord as error:
            raise MalformedRecord(
                f"{topic} partition {partition} offset {offset}: {error}", hint=error.hint
            ) from None


# One open sink per settings and Python worker: workers are reused, connections are worth keeping.
_open: dict[bytes, Sink] = {}


def _opened(job: Job) -> Sink:
    identity = pickle.dumps(job.sink)
    if identity not in _open:
        _open[identity] = job.open_sink(job.sink)
    return _open[identity]


def _forget(job: Job) -> None:
    sink = _open.pop(pickle.dumps(job.sink), None)
    if sink is not None:
        sink.close()


def _close_all() -> None:
    while _open:
        _open.popitem()[1].close()


atexit.register(_close_all)


def reports(rows: Iterable[Any]) -> list[Report]:
    """Bring the reports home from Spark's rows."""
    return [Report(**orjson.loads(row["report"])) for row in rows]
