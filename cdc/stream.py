"""Spark's Kafka source into one sink: the only module that speaks Structured Streaming."""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import orjson
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from cdc import writer
from cdc.batch import Record
from cdc.change import version_of
from cdc.config import Kafka
from cdc.errors import CdcError, QueryLost, from_data
from cdc.ledger import starting_offsets
from cdc.quarantine import too_many
from cdc.sink import FRAME_COLUMNS, Entry, FrameSink, Refusal, Sink, Written
from cdc.writer import Job, Report

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_JAVA_NAME = re.compile(r"\b(?:[a-z]\w*\.)+([A-Z]\w*(?:Exception|Error))\b")


class Stopping(Exception):
    """Said to Spark by a batch that comes after the stop was asked for."""


@dataclass(frozen=True, slots=True)
class BatchDone:
    """A batch that is durable in the sink."""

    reports: list[Report]
    seconds: float


class Stream:
    """One query: opened from a ledger, run until it is stopped or fails.

    Nothing here retries. A failure ends the query, `wait` raises it with its own type, and the
    next query starts from the ledger again.
    """

    def __init__(
        self,
        spark: SparkSession,
        kafka: Kafka,
        job: Job,
        entries: Mapping[str, Entry],
        sink: Sink | FrameSink,
        *,
        on_batch: Callable[[BatchDone], None],
        once: bool,
    ) -> None:
        self._job = job
        self._on_batch = on_batch
        self._failure: CdcError | None = None
        self._stopping = False
        self._in_batch = threading.Lock()
        # Spark insists on a checkpoint; the ledger is the real one, so this one is thrown away.
        self._checkpoint = tempfile.TemporaryDirectory(prefix="cdc-", ignore_cleanup_errors=True)
        apply = (
            partial(_apply_frame, job, sink)
            if isinstance(sink, FrameSink)
            else partial(_apply_rows, job)
        )
        # A pool of its own: within a pool Spark runs one job after the other.
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", job.sink.name)
        self._query: StreamingQuery = (
            _source(spark, kafka, job, entries)
            .writeStream.queryName(f"{job.sink.name}-{job.token}")
            .foreachBatch(partial(self._batch, apply))
            .option("checkpointLocation", self._checkpoint.name)
            .trigger(**_trigger(job, once=once))
            .start()
        )

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; True if the query has ended well. Raises what ended it otherwise."""
        try:
            return bool(self._query.awaitTermination(cast("int", timeout_s)))  # floats do, too
        except PySparkException as error:
            raise self._failure or _from_spark(self._job.sink.name, error) from None

    def read(self) -> dict[str, dict[int, int]]:
        """The next offset to read, per topic and partition, after the last finished batch."""
        progress = self._query.lastProgress
        if progress is None or not progress.sources:
            return {}
        parsed = orjson.loads(progress.sources[0].endOffset or "{}")
        return {
            topic: {int(partition): offset for partition, offset in offsets.items()}
            for topic, offsets in parsed.items()
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Between two batches: nothing is written until the block ends."""
        with self._in_batch:
            yield

    def stop(self, within_s: float) -> None:
        """Let the running batch finish, if it does so in time; then end the query."""
        self._stopping = True
        finished = self._in_batch.acquire(timeout=min(max(0.0, within_s), threading.TIMEOUT_MAX))
        try:
            self._query.stop()
        finally:
            if finished:
                self._in_batch.release()
            self._checkpoint.cleanup()

    def _batch(
        self, apply: Callable[[DataFrame], list[Report]], frame: DataFrame, _batch_id: int
    ) -> None:
        if self._stopping:
            raise Stopping
        with self._in_batch:
            started = time.monotonic()
            try:
                reports = apply(frame)
                failed = [report.error for report in reports if report.error is not None]
                if not failed:
                    self._on_batch(BatchDone(reports, time.monotonic() - started))
            except (PySparkException, Py4JError):
                raise  # Spark's own, a dead worker's too: it comes out of the query by itself
            except Exception as error:  # noqa: BLE001 - it goes home as data
                failed = [writer.as_data(error, self._job.sink.name)]
            if failed:
                self._failure = from_data(failed[0])
                raise self._failure


def _source(spark: SparkSession, kafka: Kafka, job: Job, entries: Mapping[str, Entry]) -> DataFrame:
    options = {
        "kafka.bootstrap.servers": kafka.bootstrap,
        "subscribe": ",".join(sorted(entries)),
        "startingOffsets": starting_offsets(entries),
        # What a crashed Connect worker had not committed was never part of the log.
        "kafka.isolation.level": "read_committed",
        "failOnDataLoss": "true",
        "maxOffsetsPerTrigger": str(job.limits.max_offsets),
        # A poll answers at once instead of waiting for company; large polls save round trips.
        "kafka.fetch.max.wait.ms": "10",
        "kafka.max.poll.records": "5000",
    }
    return spark.readStream.format("kafka").options(**options).load().select(*writer.RECORD_COLUMNS)


def _trigger(job: Job, *, once: bool) -> dict[str, Any]:
    if once:
        return {"availableNow": True}  # to the end of the log as of the start
    return {"processingTime": f"{round(job.sink.trigger * 1000)} milliseconds"}


def _apply_rows(job: Job, frame: DataFrame) -> list[Report]:
    write = partial(_write, job)
    return writer.reports(frame.mapInArrow(write, writer.REPORT_SCHEMA).collect())


def _write(job: Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return writer.write(job, batches)


def _lines(job: Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return writer.lines(job, batches)


def _apply_frame(job: Job, sink: FrameSink, frame: DataFrame) -> list[Report]:
    lines = frame.mapInArrow(partial(_lines, job), writer.LINE_SCHEMA).persist()
    try:
        reports = writer.reports(lines.where("report is not null").select("report").collect())
        if any(report.error is not None for report in reports):
            return reports
        for topic in sorted({report.topic for report in reports}):
            mine = [report for report in reports if report.topic == topic]
            offsets = {r.partition: r.next_offset for r in mine if r.next_offset is not None}
            changes = lines.where(lines.topic == topic).where("report is null")
            if any(report.outdated for report in mine):
                changes = _newest(changes)
            written, refused = _merge(job, sink, topic, offsets, changes=changes, records=frame)
            mine[0].applied, mine[0].stale = written.applied, written.stale
            mine[0].refused += refused
        return reports
    finally:
        lines.unpersist()


def _newest(lines: DataFrame) -> DataFrame:
    """One line per key, where tasks told some of them again in a later stretch."""
    place = ["partition", "version"]
    outdated = lines.where("key is null").select(*place)
    # Versions alone, fewer than a batch has records: small enough for every task to have them all.
    return lines.where("key is not null").join(outdated.hint("broadcast"), place, "left_anti")


def _merge(
    job: Job,
    sink: FrameSink,
    topic: str,
    offsets: Mapping[int, int],
    *,
    changes: DataFrame,
    records: DataFrame,
) -> tuple[Written, int]:
    """Merge *changes*; what is refused goes into the quarantine, as it stands in *records*."""
    refused: list[Refusal] = []
    while True:
        frame = changes.where(_beyond(refused, job.generations[topic])).select(*FRAME_COLUMNS)
        written = sink.merge(job.token, topic, job.tables[topic], frame, offsets)
        if not written.refused:
            return written, len(refused)
        refused += written.refused
        for partition in sorted({refusal.partition for refusal in written.refused}):
            reasons = {r.offset: r.reason for r in written.refused if r.partition == partition}
            found = _originals(records, topic, partition, reasons)
            job.keep(writer.kept(job, topic, partition, found, reasons))
        if len(refused) > job.tolerated.max_run:
            raise too_many(job.sink.name, f"{len(refused)} changes of one batch of {topic}")


def _originals(
    records: DataFrame, topic: str, partition: int, offsets: Iterable[int]
) -> list[Record]:
    wanted = f"partition = {partition} AND offset IN ({', '.join(map(str, offsets))})"
    return [
        Record(row["offset"], _bytes(row["key"]), _bytes(row["value"]))
        for row in records.where(records["topic"] == topic).where(wanted).collect()
    ]


def _bytes(raw: bytearray | None) -> bytes | None:
    return None if raw is None else bytes(raw)


def _beyond(refused: Sequence[Refusal], generation: int) -> str:
    """SQL that leaves *refused* out."""
    places = [f"({r.partition}, {version_of(generation, r.offset)}L)" for r in refused]
    return f"(partition, version) NOT IN ({', '.join(places)})" if places else "true"


def _from_spark(sink: str, error: Exception) -> QueryLost:
    """Spark's own failure. Its text may quote anything: only the names of its causes are kept."""
    causes = list(dict.fromkeys(_JAVA_NAME.findall(str(error))))
    return QueryLost(f"{sink}: Spark ended the query: {', '.join(causes) or type(error).__name__}")
