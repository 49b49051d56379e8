"""One thread and one query per sink; restart by policy; a clean stop within a budget."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cdc.change import Table
from cdc.config import Config, Run, SinkSettings
from cdc.errors import CdcError, SourceUnavailable
from cdc.ledger import TopicState, plan
from cdc.logs import logger
from cdc.policy import ONCE_PATIENCE_S, Stop, decide
from cdc.quarantine import Kept, Tolerance
from cdc.sink import Entry, FrameSink, Sink
from cdc.stream import BatchDone, Stream
from cdc.writer import Job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logger("cdc.supervisor")

POLL_S = 0.2
STOP_GRACE_S = 5.0  # beyond the budget: Spark cancels a batch that would not end by itself
STEADY_S = 60.0  # a query that has run for this long was opened well, also if nothing came
ASK_EVERY_S = 3.0  # whether the log is whole, while a sweep is due


@dataclass(frozen=True, slots=True)
class Outside:
    """The world, as functions: what the supervisor may ask for."""

    tables: Callable[[], Mapping[str, Table]]  # the source's catalogue, by topic
    topics: Callable[[list[str]], Mapping[str, TopicState]]
    open_sink: Callable[[SinkSettings], Sink]  # on executors: importable by name
    open_here: Callable[[SinkSettings, SparkSession], Sink | FrameSink]  # on the driver
    keep: Callable[[Sequence[Kept]], None]  # in the quarantine; on executors, too
    # Whether the log of these topics began with a snapshot, and all of it is there.
    is_whole: Callable[[Mapping[str, TopicState]], bool]


@dataclass(slots=True)
class SinkState:
    """What is known of one sink; read by the reporter, written by its thread."""

    state: str = "starting"
    error: CdcError | None = None
    applied: Counter[str] = field(default_factory=Counter)  # by table
    stale: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    lag: Mapping[str, int] = field(default_factory=dict)  # records, by table


class SinkThread(threading.Thread):
    """Keeps one sink in step with the log until told to stop."""

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        sink: SinkSettings,
        outside: Outside,
        *,
        once: bool,
    ) -> None:
        super().__init__(name=f"sink-{sink.name}", daemon=True)
        self.settings = sink
        self.status = SinkState()
        self._spark = spark
        self._config = config
        self._outside = outside
        self._once = once
        self._asked = threading.Event()
        self._deadline = float("inf")
        self._names: dict[str, str] = {}  # table by topic
        self._read: Mapping[str, Mapping[int, int]] = {}  # next offset, by topic and partition
        self._layout: Mapping[str, tuple[str, int]] = {}  # topic id and partitions, as opened
        self._is_elsewhere = threading.Event()  # the log that is read is no longer the log
        self._failures: Counter[type[CdcError]] = Counter()  # since the last progress
        self._failing_since: float | None = None
        limits = config.quarantine
        self._tolerance = Tolerance(sink.name, limits.max_run, limits.max_ratio)
        self._log = log.bind(sink=sink.name)

    def ask_to_stop(self, deadline: float) -> None:
        self._deadline = deadline
        self._asked.set()

    def run(self) -> None:
        while not self._asked.is_set():
            try:
                self._follow()
                if self._is_elsewhere.is_set():
                    self._log.warning("topics were replaced, opening again")
                    continue
                self.status.state = "stopped" if self._asked.is_set() else "done"
                return
            except CdcError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - unknown: the policy stops the sink
                self._log.error("unexpected failure", error_type=type(error).__name__)
                failure = CdcError(f"{self.settings.name}: unexpected {type(error).__name__}")
            self._failures[type(failure)] += 1
            self._failing_since = self._failing_since or time.monotonic()
            attempt = self._failures[type(failure)]
            verdict = decide(failure, attempt, self._config.run.retry_at_most_every)
            patience_s = ONCE_PATIENCE_S if self._once else float("inf")
            if isinstance(verdict, Stop):
                failure.hint = verdict.hint  # the policy's own, where the error brought none
            if isinstance(verdict, Stop) or time.monotonic() - self._failing_since > patience_s:
                self._give_up(failure)
                return
            self.status.state, self.status.error = "retrying", failure
            self._log.warning(
                "retrying", error=str(failure), hint=failure.hint, delay_s=round(verdict.delay_s, 2)
            )
            self._asked.wait(verdict.delay_s)
        self.status.state = "stopped"

    def _give_up(self, failure: CdcError) -> None:
        self.status.state, self.status.error = "failed", failure
        self._log.error("sink stopped", error=str(failure), hint=failure.hint)

    def _progressed(self) -> None:
        self._failures.clear()
        self._failing_since = None

    def _follow(self) -> None:
        """Open the query from the ledger and stay with it to its end."""
        self._is_elsewhere.clear()
        tables = self._outside.tables()
        self._names = {topic: table.full_name for topic, table in tables.items()}
        sink = self._outside.open_here(self.settings, self._spark)
        try:
            sink.prepare(tables)
            claim = sink.claim()
            entries = plan(tables, claim.entries, self._outside.topics(list(tables)))
            self._read = {topic: entry.offsets for topic, entry in entries.items()}
            self._layout = {
                topic: (entry.topic_id, entry.partitions) for topic, entry in entries.items()
            }
            sink.assign(claim.token, entries)
            job = Job(
                sink=self.settings,
                open_sink=self._outside.open_sink,
                keep=self._outside.keep,
                token=claim.token,
                tables=tables,
                generations={topic: entry.generation for topic, entry in entries.items()},
                topic_ids={topic: entry.topic_id for topic, entry in entries.items()},
                limits=self._config.batch,
                tolerated=self._config.quarantine,
            )
            sweep = _Sweep(self._outside, sink, claim.token, tables, entries)
            stream = Stream(
                self._spark,
                self._config.kafka,
                job,
                entries,
                sink,
                on_batch=self._done,
                once=self._once,
            )
            self.status.state, self.status.error = "running", None
            self._log.info("sink opened", token=claim.token, generations=job.generations)
            steady_at = time.monotonic() + STEADY_S
            try:
                is_over = False
                while not is_over:
                    is_over = stream.wait(POLL_S)
                    self._read = stream.read() or self._read
                    if self._asked.is_set() or self._is_elsewhere.is_set():
                        return
                    if time.monotonic() > steady_at:
                        self._progressed()
                    if sweep.is_due(self._read, is_over=is_over):
                        with stream.paused():
                            self._log.info("swept", rows=sweep.run())
            finally:
                stream.stop(self._deadline - time.monotonic())
        finally:
            sink.close()

    def _done(self, batch: BatchDone) -> None:
        """Say one line per batch. Called by Spark's thread, before it asks for the next batch."""
        self._progressed()
        tables: dict[str, dict[str, Any]] = {}
        for topic in sorted({report.topic for report in batch.reports}):
            mine = [report for report in batch.reports if report.topic == topic]
            commits = [report.oldest_us for report in mine if report.oldest_us is not None]
            name = self._names[topic]
            tables[name] = {
                "applied": sum(report.applied for report in mine),
                "stale": sum(report.stale for report in mine),
                "refused": sum(report.refused for report in mine),
                "commit_to_applied_s": (
                    round(time.time() - min(commits) / 1e6, 3) if commits else None
                ),
            }
            self.status.applied[name] += tables[name]["applied"]
            self.status.stale[name] += tables[name]["stale"]
            self.status.refused[name] += tables[name]["refused"]
        self._log.info("batch applied", tables=tables, seconds=round(batch.seconds, 3))
        taken = sum(each["applied"] + each["stale"] for each in tables.values())
        self._tolerance.note(taken, sum(each["refused"] for each in tables.values()))

    def note_log(self, topics: Mapping[str, TopicState]) -> None:
        """Compare what the log has now with what the last finished batch had read."""
        found = {topic: (state.topic_id, state.partitions) for topic, state in topics.items()}
        if any(found.get(topic) != layout for topic, layout in self._layout.items()):
            # Spark knows topics by name: it would read on in the middle of another one, and take
            # up new partitions in which keys of the old ones go on.
            self._is_elsewhere.set()
        self.status.lag = {
            self._names[topic]: sum(
                max(0, end - self._read.get(topic, {}).get(partition, state.start[partition]))
                for partition, end in state.end.items()
            )
            for topic, state in topics.items()
            if topic in self._names
        }


class _Sweep:
    """Removes rows of older generations, once the snapshot that began this one was applied.

    A snapshot tells nothing of rows that vanished before it, and a topic that did not begin with a
    snapshot tells nothing of rows that still are: so without proof of it nothing is removed.
    """

    def __init__(
        self,
        outside: Outside,
        sink: Sink | FrameSink,
        token: int,
        tables: Mapping[str, Table],
        entries: Mapping[str, Entry],
    ) -> None:
        self._outside = outside
        self._sink = sink
        self._token = token
        self._tables = tables
        self._topics = [topic for topic, entry in entries.items() if entry.unswept]
        self._goal: Mapping[str, TopicState] = {}
        self._next_look = 0.0

    def is_due(self, read: Mapping[str, Mapping[int, int]], *, is_over: bool) -> bool:
        """Whether everything that the log had when it was found whole has been applied."""
        if not self._topics:
            return False
        if not self._goal and (is_over or time.monotonic() >= self._next_look):
            self._next_look = time.monotonic() + ASK_EVERY_S
            self._goal = self._whole_log()
        return bool(self._goal) and all(
            read.get(topic, {}).get(partition, 0) >= end
            for topic, state in self._goal.items()
            for partition, end in state.end.items()
        )

    def _whole_log(self) -> Mapping[str, TopicState]:
        """The topics as they are just after the log was found whole; nothing if it is not."""
        names = list(self._tables)
        try:
            before = self._outside.topics(names)
            is_whole = self._outside.is_whole(before)
            now = self._outside.topics(names)
        except SourceUnavailable:
            return {}
        return now if is_whole and _ids(now) == _ids(before) else {}

    def run(self) -> int:
        swept = sum(
            self._sink.sweep(self._token, topic, self._tables[topic]) for topic in self._topics
        )
        self._topics = []
        return swept


def _ids(states: Mapping[str, TopicState]) -> dict[str, str]:
    return {topic: state.topic_id for topic, state in states.items()}


def run(
    threads: Sequence[SinkThread],
    settings: Run,
    stop: threading.Event,
    topics: Callable[[], Mapping[str, TopicState]],
) -> None:
    """Run every sink until *stop* is set or all have ended; then stop what still runs, in time."""
    for thread in threads:
        thread.start()
    next_report = time.monotonic() + settings.report_every
    while any(thread.is_alive() for thread in threads) and not stop.wait(POLL_S):
        if time.monotonic() >= next_report:
            next_report += settings.report_every
            _report(threads, topics)
    deadline = time.monotonic() + settings.stop_within
    for thread in threads:
        thread.ask_to_stop(deadline)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()) + STOP_GRACE_S)
        if thread.is_alive():
            thread.status.state = "failed"
            thread.status.error = CdcError(
                f"{thread.settings.name}: did not stop within {settings.stop_within:g} s",
                hint="nothing is lost: the next start goes on from the sink's ledger",
            )
    _report(threads, topics)


def _report(threads: Sequence[SinkThread], topics: Callable[[], Mapping[str, TopicState]]) -> None:
    try:
        found = topics()
    except CdcError as error:
        log.warning("the log cannot be seen", error=str(error), hint=error.hint)
        found = None
    for thread in threads:
        if found is not None:
            thread.note_log(found)
        status = thread.status
        log.info(
            "progress",
            sink=thread.settings.name,
            state=status.state,
            applied=dict(status.applied),
            stale=dict(status.stale),
            refused=dict(status.refused),
            lag=dict(status.lag),
        )
