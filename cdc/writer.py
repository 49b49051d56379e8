"""On executors: Arrow batches of one partition -> a sink, or -> decoded lines. Failures are data.

Spark keeps only the text of an exception at its borders, so nothing is raised here on purpose: each
task answers with one report per partition, and a report may hold an error.
"""

from __future__ import annotations

import atexit
import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import orjson
import pyarrow as pa

from cdc.batch import Record, Stretch, stretches
from cdc.change import Change, Slice, Table, key_text, version_of
from cdc.config import Batch, Quarantine, SinkSettings
from cdc.envelope import decode
from cdc.errors import CdcError, MalformedRecord, SinkBusy, SinkUnusable
from cdc.pace import Pace, part
from cdc.quarantine import Kept, longest_run, too_many
from cdc.sink import Refusal, Sink

RECORD_COLUMNS = ("topic", "partition", "offset", "key", "value")
REPORT_SCHEMA = "report string"
LINE_SCHEMA = "topic string, partition int, key string, row string, version long, report string"


@dataclass(frozen=True, slots=True)
class Job:
    """All that a task needs to know. Shipped to executors, so it holds settings, not clients."""

    sink: SinkSettings
    open_sink: Callable[[SinkSettings], Sink]
    keep: Callable[[Sequence[Kept]], None]  # durably, in the quarantine
    token: int
    tables: Mapping[str, Table]  # by topic
    generations: Mapping[str, int]  # by topic
    topic_ids: Mapping[str, str]  # by topic
    limits: Batch
    tolerated: Quarantine


@dataclass(slots=True)
class Report:
    """What became of one partition's part of a batch."""

    topic: str
    partition: int
    changes: int = 0
    applied: int = 0
    stale: int = 0
    refused: int = 0
    outdated: int = 0  # lines that a later one of the same batch replaces
    next_offset: int | None = None
    oldest_us: int | None = None  # commit time at the source of the oldest change applied
    error: dict[str, str] | None = None

    def count(self, changes: Sequence[Change], next_offset: int) -> None:
        """Note *changes* as read, and where reading goes on."""
        self.changes += len(changes)
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
            for stretch in stretches(records, job.limits.max_changes, job.limits.max_bytes):
                _write(job, report, stretch)
        except Exception as error:  # noqa: BLE001 - it goes home as data, classified or not
            _forget(job)
            report.error = as_data(error, job.sink.name)
        yield pa.RecordBatch.from_pydict({"report": [orjson.dumps(asdict(report)).decode()]})
        if report.error is not None:
            return


def _write(job: Job, report: Report, stretch: Stretch) -> None:
    """Make *stretch* durable: in the sink, and what it cannot take in the quarantine."""
    refused = _Refused(job, report, stretch)
    changes = _decoded(job, refused)
    table = job.tables[report.topic]
    piece = Slice(table, report.topic, report.partition, stretch.next_offset, tuple(changes))
    sink, pace = _opened(job), _paces.setdefault(job.sink.name, Pace(job.limits.max_changes))
    at = 0
    while True:
        some = part(piece, at, pace.size)
        try:
            written = sink.write(job.token, some)
        except SinkBusy as error:
            pace.slower(len(some.changes), error)
            continue
        pace.faster()
        report.applied += written.applied
        if written.refused:
            refused.keep(written.refused)
            left = tuple(c for c in piece.changes if c.offset not in refused.offsets)
            piece = replace(piece, changes=left)
            continue
        report.stale += written.stale
        at += len(some.changes)
        if at >= len(piece.changes):
            break
    report.count(changes, stretch.next_offset)


class _Refused:
    """What cannot be taken of one stretch, kept in the quarantine as soon as it is known."""

    def __init__(self, job: Job, report: Report, stretch: Stretch) -> None:
        self.stretch = stretch
        self.report = report
        self.offsets: set[int] = set()
        self._job = job

    def keep(self, refusals: Sequence[Refusal]) -> None:
        """Keep *refusals*. Raises TooManyRefused when they are no single rows."""
        reasons = {refusal.offset: refusal.reason for refusal in refusals}
        records = [record for record in self.stretch.records if record.offset in reasons]
        if len(records) < len(reasons) or reasons.keys() & self.offsets:
            raise SinkUnusable(f"{self._job.sink.name}: refused what it was not given")
        report = self.report
        self._job.keep(kept(self._job, report.topic, report.partition, records, reasons))
        self.offsets |= reasons.keys()
        report.refused += len(reasons)
        run = longest_run([record.offset for record in self.stretch.records], self.offsets)
        if run > self._job.tolerated.max_run:
            what = f"{run} changes of {report.topic} partition {report.partition} in a row"
            raise too_many(self._job.sink.name, what)


def kept(
    job: Job, topic: str, partition: int, records: Iterable[Record], reasons: Mapping[int, str]
) -> list[Kept]:
    """*records* as they go into the quarantine, each with its reason by offset."""
    return [
        Kept(
            sink=job.sink.name,
            topic=topic,
            topic_id=job.topic_ids[topic],
            generation=job.generations[topic],
            partition=partition,
            offset=record.offset,
            table=job.tables[topic].full_name,
            reason=reasons[record.offset],
            kept_us=time.time_ns() // 1000,
            key=record.key,
            value=record.value,
        )
        for record in records
    ]


def lines(job: Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Decode every partition found in *batches*, a stretch at a time; last comes the report.

    A line without a key says that the change of its version is not its key's newest any more.
    """
    for topic, partition, records in _partitions(batches):
        report = Report(topic, partition)
        told: dict[str, int] = {}  # version by key: all that is held of earlier stretches
        try:
            for stretch in stretches(records, job.limits.max_changes, job.limits.max_bytes):
                changes = _decoded(job, _Refused(job, report, stretch))
                newest = {key_text(change.key): change for change in changes}
                outdated = [told[key] for key in newest if key in told]
                report.outdated += len(outdated)
                yield _frame(report, newest, outdated)
                told.update((key, change.version) for key, change in newest.items())
                report.count(changes, stretch.next_offset)
        except Exception as error:  # noqa: BLE001 - it goes home as data, classified or not
            report.error = as_data(error, job.sink.name)
        yield _frame(report, {}, [], orjson.dumps(asdict(report)).decode())


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
    report: Report, newest: Mapping[str, Change], outdated: Sequence[int], *reports: str
) -> pa.RecordBatch:
    rows = [None if c.row is None else orjson.dumps(c.row).decode() for c in newest.values()]
    versions = [*(change.version for change in newest.values()), *outdated]
    after = [None] * (len(outdated) + len(reports))
    count = len(newest) + len(after)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([report.topic] * count, pa.string()),
            pa.array([report.partition] * count, pa.int32()),
            pa.array([*newest, *after], pa.string()),
            pa.array([*rows, *after], pa.string()),
            pa.array([*versions, *([None] * len(reports))], pa.int64()),
            pa.array([*([None] * len(versions)), *reports], pa.string()),
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


def _decoded(job: Job, refused: _Refused) -> list[Change]:
    """The changes of a stretch; what is none goes into the quarantine."""
    topic, partition = refused.report.topic, refused.report.partition
    table, generation = job.tables[topic], job.generations[topic]
    changes: list[Change] = []
    malformed: list[Refusal] = []
    for offset, key, value in refused.stretch.records:
        try:
            changes.append(decode(table, key, value, version_of(generation, offset)))
        except MalformedRecord as error:
            reason = f"{error}; {error.hint}" if error.hint else str(error)
            malformed.append(Refusal(partition, offset, reason))
    if malformed:
        refused.keep(malformed)
    return changes


# One open sink per settings and Python worker: workers are reused, connections are worth keeping.
_open: dict[bytes, Sink] = {}
_paces: dict[str, Pace] = {}  # by sink


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
