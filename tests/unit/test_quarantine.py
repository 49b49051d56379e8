"""What a sink cannot take: kept, counted, limited, and brought back. Without a server."""

from __future__ import annotations

import orjson
import pytest

from cdc import pace, quarantine, replay, writer
from cdc.batch import Record
from cdc.change import Change, Column, Slice, Table, version_of
from cdc.config import Batch, Quarantine, SinkSettings
from cdc.errors import SinkBusy, TooManyRefused
from cdc.ledger import TopicState
from cdc.sink import Entry, Refusal, Written
from sinks.memory import MemorySink

ITEMS = Table("app", "items", (Column("id", "integer"), Column("t", "text")), ("id",))
TOPIC = "shop.app.items"


class FussySink(MemorySink):
    """Never takes the texts in *bad*, and is busy when more than *room* changes come at once."""

    def __init__(self, bad=(), room=10**9):
        super().__init__("fussy")
        self.bad = set(bad)
        self.room = room
        self.sizes = []

    def write(self, token, piece):
        self.sizes.append(len(piece.changes))
        if len(piece.changes) > self.room:
            raise SinkBusy("fussy: too much")
        refused = self._refused(piece)
        return Written(0, 0, refused) if refused else super().write(token, piece)

    def repair(self, piece):
        refused = self._refused(piece)
        return Written(0, 0, refused) if refused else super().repair(piece)

    def _refused(self, piece):
        return tuple(
            Refusal(piece.partition, c.offset, "bad text")
            for c in piece.changes
            if c.row is not None and c.row["t"] in self.bad
        )


def record(offset, key, text):
    value = None
    if text is not None:
        after = {"id": key, "t": text}
        value = orjson.dumps({"op": "u", "after": after, "source": {"ts_us": offset}})
    return Record(offset, orjson.dumps({"id": key}), value)


class Bench:
    """A sink with a claim, a quarantine in a dictionary, and the writer between them."""

    def __init__(self, sink, monkeypatch, **limits):
        self.sink = sink
        self.kept = {}
        sink.prepare({TOPIC: ITEMS})
        self.token = sink.claim().token
        sink.assign(self.token, {TOPIC: Entry("A", 1, 1)})
        monkeypatch.setattr(writer, "_open", {})
        monkeypatch.setattr(writer, "_paces", {})
        monkeypatch.setattr(pace, "backoff", lambda *_: 0.0)
        self.job = writer.Job(
            sink=SinkSettings(name="fussy", type="memory"),
            open_sink=lambda _: sink,
            keep=self.keep,
            token=self.token,
            tables={TOPIC: ITEMS},
            generations={TOPIC: 1},
            topic_ids={TOPIC: "A"},
            limits=Batch(max_changes=limits.pop("max_changes", 100)),
            tolerated=Quarantine(**limits),
        )

    def keep(self, records):
        self.kept.update((each.id, each) for each in records)

    def write(self, *records):
        import pyarrow as pa

        rows = {
            "topic": [TOPIC] * len(records),
            "partition": [0] * len(records),
            "offset": [each.offset for each in records],
            "key": pa.array([each.key for each in records], pa.binary()),
            "value": pa.array([each.value for each in records], pa.binary()),
        }
        batches = writer.write(self.job, [pa.RecordBatch.from_pydict(rows)])
        (report,) = writer.reports(row for batch in batches for row in batch.to_pylist())
        return report

    def held(self):
        return {row["id"]: row["t"] for row, _ in self.sink.rows(ITEMS)}

    def reached(self):
        return self.sink.claim().entries[TOPIC].offsets.get(0)


@pytest.fixture
def bench(monkeypatch):
    return lambda sink, **limits: Bench(sink, monkeypatch, **limits)


def test_a_refused_change_is_kept_and_the_rest_is_written(bench):
    """Nothing is skipped silently, and one bad row does not hold the others."""
    it = bench(FussySink(bad=["never"]))
    report = it.write(record(0, 1, "a"), record(1, 2, "never"), record(2, 3, "c"))
    assert (report.applied, report.refused, report.error) == (2, 1, None)
    assert it.held() == {1: "a", 3: "c"}
    (found,) = it.kept.values()
    assert (found.id, found.reason) == (f"fussy/{TOPIC}/1/0/1", "bad text")
    assert (found.key, found.value) == record(1, 2, "never")[1:]
    assert it.reached() == 3


def test_the_quarantine_comes_before_the_ledger(bench):
    """If a refused record cannot be kept, the sink's ledger has not passed it."""
    it = bench(FussySink(bad=["never"]))

    def broken(_):
        raise SinkBusy("no quarantine")

    object.__setattr__(it.job, "keep", broken)
    report = it.write(record(0, 1, "never"))
    assert report.error["kind"] == "SinkBusy"
    assert it.reached() is None


def test_a_record_that_cannot_be_decoded_is_kept(bench):
    """Bytes that are no record of Debezium's go aside with their reason; the ledger goes on."""
    it = bench(MemorySink("fussy"))
    report = it.write(record(0, 1, "a"), Record(1, b'{"id":2}', b"garbage s3cret"))
    assert (report.applied, report.refused, report.error) == (1, 1, None)
    (found,) = it.kept.values()
    assert found.value == b"garbage s3cret"
    assert "s3cret" not in found.reason
    assert it.reached() == 2


def test_records_without_a_key_are_all_kept(bench):
    """They have nothing in common, so none of them stands for another."""
    it = bench(MemorySink("fussy"))
    it.write(Record(0, None, b"x"), Record(1, None, b"y"))
    assert sorted(each.offset for each in it.kept.values()) == [0, 1]


def test_a_run_of_refused_changes_stops_the_sink(bench):
    """Then it is the mapping that is wrong, or cdc."""
    it = bench(FussySink(bad=["never"]), max_run=3)
    report = it.write(*(record(n, n, "never") for n in range(9)))
    assert report.error["kind"] == "TooManyRefused"
    assert it.reached() is None


def test_single_bad_rows_are_no_run(bench):
    """Many refused changes with good ones between them do not stop a sink at once."""
    it = bench(FussySink(bad=["never"]), max_run=1)
    report = it.write(*(record(n, n, "never" if n % 2 else "a") for n in range(20)))
    assert (report.applied, report.refused, report.error) == (10, 10, None)


def test_a_busy_sink_gets_less_at_once_and_more_again_later(bench):
    """429 halves what is written at once; success grows it back."""
    it = bench(FussySink(room=30), max_changes=100)
    report = it.write(*(record(n, n, "a") for n in range(100)))
    assert report.error is None
    assert len(it.held()) == 100
    assert it.sink.sizes[:3] == [100, 50, 25]
    it.sink.room = 10**9
    for first in range(100, 1000, 100):
        it.write(*(record(n, n, "a") for n in range(first, first + 100)))
    assert it.sink.sizes[-1] == 100


def test_a_busy_sink_gets_half_of_what_it_was_given(bench):
    """Not half of what it might have been given, which can be as much again."""
    it = bench(FussySink(room=1), max_changes=5000)
    report = it.write(*(record(n, n, "a") for n in range(8)))
    assert report.error is None
    assert it.sink.sizes[:4] == [8, 4, 2, 1]


def test_a_sink_that_stays_busy_is_left_to_the_supervisor(bench):
    """Waiting in place ends; the query ends with an error that is retried."""
    it = bench(FussySink(room=0))
    report = it.write(record(0, 1, "a"))
    assert report.error["kind"] == "SinkBusy"
    assert len(it.sink.sizes) == pace.MAX_WAITS + 1


def test_a_part_of_a_slice_ends_where_it_was_cut():
    """Its ledger may stand behind its last change; the last part's stands at the end."""
    changes = tuple(Change((n,), None, version_of(1, n)) for n in (3, 5, 9))
    piece = Slice(ITEMS, TOPIC, 0, 20, changes)
    ends = [pace.part(piece, at, 2).next_offset for at in (0, 2)]
    assert ends == [6, 20]


def test_the_ratio_of_refused_changes_is_limited():
    """Over many changes, a small part may be bad and a larger one may not."""
    tolerance = quarantine.Tolerance("s", max_run=100, max_ratio=0.05)
    tolerance.note(10, 9)  # too few to tell
    for _ in range(100):
        tolerance.note(98, 2)
    with pytest.raises(TooManyRefused) as caught:
        tolerance.note(1000, 1000)
    assert "cdc quarantine list" in caught.value.hint


def test_a_kept_record_comes_back_as_it_was():
    """Bytes that are no text, and no value at all, survive."""
    for value in (None, b"\xff\x00", b""):
        kept = quarantine.Kept("s", "t", "A", 2, 1, 7, "a.b", "why", 5, b"\xfe", value)
        assert quarantine.decode(quarantine.encode(kept)[1]) == kept


def log_of(*records, end):
    def newest(_place, keys, first, stop):
        return {r.key: r for r in records if r.key in keys and first <= r.offset < stop}

    state = TopicState("A", 1, {0: 0}, {0: end})
    return replay.Log(topics=lambda _: {TOPIC: state}, newest=newest)


def test_a_replay_applies_the_newest_record_of_the_key(bench):
    """Not the one that was kept: the row as it is in the log now, under its own version."""
    it = bench(FussySink(bad=["never", "mended"]))
    records = [record(0, 1, "never"), record(1, 2, "b"), record(2, 1, "mended")]
    for each in records:
        it.write(each)
    it.sink.bad = set()
    done = replay.replay(list(it.kept.values()), {TOPIC: ITEMS}, it.sink, log_of(*records, end=3))
    assert done.applied == list(it.kept)
    assert it.held() == {1: "mended", 2: "b"}
    assert {v & 0xFF for _, v in it.sink.rows(ITEMS)} == {1, 2}


def test_a_replay_leaves_to_the_writer_what_it_has_yet_to_bring(bench):
    """A row does not run ahead of the sink's ledger."""
    it = bench(FussySink(bad=["never"]))
    it.write(record(0, 1, "never"))
    log = log_of(record(0, 1, "never"), record(1, 1, "next"), end=2)
    done = replay.replay(list(it.kept.values()), {TOPIC: ITEMS}, it.sink, log)
    assert done.applied == list(it.kept)
    assert it.held() == {}
    it.write(record(1, 1, "next"))
    assert it.held() == {1: "next"}


def test_a_replay_of_a_row_that_is_gone_leaves_it_gone(bench):
    """Its tombstone may have been compacted away with all before it."""
    it = bench(FussySink(bad=["never"]))
    it.write(record(0, 1, "old"))
    it.write(record(1, 1, "never"))
    done = replay.replay(list(it.kept.values()), {TOPIC: ITEMS}, it.sink, log_of(end=9))
    assert done.applied == list(it.kept)
    assert it.held() == {}


def test_a_replay_that_is_refused_again_stays(bench):
    """With the reason as it is now."""
    it = bench(FussySink(bad=["never", "once"]))
    records = [record(0, 1, "never"), record(1, 2, "once")]
    it.write(*records)
    it.sink.bad = {"never"}
    log = log_of(*records, end=2)
    done = replay.replay(list(it.kept.values()), {TOPIC: ITEMS}, it.sink, log)
    assert list(done.refused.values()) == ["bad text"]
    assert len(done.applied) == 1
    assert it.held() == {2: "once"}


def test_a_replay_from_an_earlier_life_of_the_topic_is_obsolete(bench):
    """Since then the whole log was read again."""
    it = bench(FussySink(bad=["never"]))
    it.write(record(0, 1, "never"))
    log = log_of(end=1)
    other = replay.Log(
        topics=lambda _: {TOPIC: TopicState("B", 1, {0: 0}, {0: 1})}, newest=log.newest
    )
    done = replay.replay(list(it.kept.values()), {TOPIC: ITEMS}, it.sink, other)
    assert (done.obsolete, done.applied) == (list(it.kept), [])
