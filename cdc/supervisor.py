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
from cdc.errors import CdcError
from cdc.ledger import TopicState, plan
from cdc.logs import logger
from cdc.policy import Stop, decide
from cdc.sink import FrameSink, Sink
from cdc.stream import BatchDone, Stream
from cdc.writer import Job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logger("cdc.supervisor")

POLL_S = 0.2
STOP_GRACE_S = 5.0  # beyond the budget: Spark cancels a batch that would not end by itself
# A run to the end of the log has somebody waiting for it, so it does not retry for ever.
ONCE_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Outside:
    """The world, as functions: what the supervisor may ask for."""

    tables: Callable[[], Mapping[str, Table]]  # the source's catalogue, by topic
    topics: Callable[[list[str]], Mapping[str, TopicState]]
    open_sink: Callable[[SinkSettings], Sink]  # on executors: importable by name
    open_here: Callable[[SinkSettings, SparkSession], Sink | FrameSink]  # on the driver


@dataclass(slots=True)
class SinkState:
    """What is known of one sink; read by the reporter, written by its thread."""

    state: str = "starting"
    error: CdcError | None = None
    applied: Counter[str] = field(default_factory=Counter)  # by table
    stale: Counter[str] = field(default_factory=Counter)
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
        self._failures = 0  # since the last progress
        self._log = log.bind(sink=sink.name)

    def ask_to_stop(self, deadline: float) -> None:
        self._deadline = deadline
        self._asked.set()

    def run(self) -> None:
        started = time.monotonic()
        while not self._asked.is_set():
            try:
                self._follow()
                self.status.state = "stopped" if self._asked.is_set() else "done"
                return
            except CdcError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - unknown: the policy stops the sink
                self._log.error("unexpected failure", error_type=type(error).__name__)
                failure = CdcError(f"{self.settings.name}: unexpected {type(error).__name__}")
            self._failures += 1
            verdict = decide(failure, self._failures, self._config.run.retry_at_most_every)
            patience = ONCE_PATIENCE_S if self._once else float("inf")
            if isinstance(verdict, Stop):
                failure.hint = verdict.hint  # the policy's own, where the error brought none
            if isinstance(verdict, Stop) or time.monotonic() - started > patience:
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

    def _follow(self) -> None:
        """Open the query from the ledger and stay with it to its end."""
        tables = self._outside.tables()
        self._names = {topic: table.full_name for topic, table in tables.items()}
        sink = self._outside.open_here(self.settings, self._spark)
        try:
            sink.prepare(tables)
            claim = sink.claim()
            entries = plan(tables, claim.entries, self._outside.topics(list(tables)))
            self._read = {topic: entry.offsets for topic, entry in entries.items()}
            sink.assign(claim.token, entries)
            job = Job(
                sink=self.settings,
                open_sink=self._outside.open_sink,
                token=claim.token,
                tables=tables,
                generations={topic: entry.generation for topic, entry in entries.items()},
                limits=self._config.batch,
            )
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
            try:
                while not stream.wait(POLL_S):
                    self._read = stream.read() or self._read
                    if self._asked.is_set():
                        return
                self._read = stream.read() or self._read
            finally:
                stream.stop(self._deadline - time.monotonic())
        finally:
            sink.close()

    def _done(self, batch: BatchDone) -> None:
        """Say one line per batch. Called by Spark's thread, before it asks for the next batch."""
        self._failures = 0
        tables: dict[str, dict[str, Any]] = {}
        for topic in sorted({report.topic for report in batch.reports}):
            mine = [report for report in batch.reports if report.topic == topic]
            commits = [report.oldest_us for report in mine if report.oldest_us is not None]
            name = self._names[topic]
            tables[name] = {
                "applied": sum(report.applied for report in mine),
                "stale": sum(report.stale for report in mine),
                "commit_to_applied_s": (
                    round(time.time() - min(commits) / 1e6, 3) if commits else None
                ),
            }
            self.status.applied[name] += tables[name]["applied"]
            self.status.stale[name] += tables[name]["stale"]
        self._log.info("batch applied", tables=tables, seconds=round(batch.seconds, 3))

    def note_lag(self, topics: Mapping[str, TopicState]) -> None:
        """Compare what the log has now with what the last finished batch had read."""
        self.status.lag = {
            self._names[topic]: sum(
                max(0, end - self._read.get(topic, {}).get(partition, state.start[partition]))
                for partition, end in state.end.items()
            )
            for topic, state in topics.items()
            if topic in self._names
        }


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
            thread.note_lag(found)
        status = thread.status
        log.info(
            "progress",
            sink=thread.settings.name,
            state=status.state,
            applied=dict(status.applied),
            stale=dict(status.stale),
            lag=dict(status.lag),
        )
