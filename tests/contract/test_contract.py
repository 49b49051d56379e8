"""What every target owes the pipeline, on its real server. A target is done when this is green."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import orjson
import pytest

from cdc.batch import Record, stretches
from cdc.change import Column, Table
from cdc.envelope import decode
from cdc.errors import SinkFenced, SinkUnavailable
from cdc.sink import Entry, Written
from sinks.types import canonical
from tests.contract.conftest import TOPIC_ID, canonical_row, topic_of
from tests.support.waiting import wait_until

NOTES = Table(
    "app", "notes", (Column("id", "integer", nullable=False), Column("t", "text")), ("id",)
)
PAIRS = Table(
    "app",
    "pairs",
    (
        Column("a", "text", nullable=False),
        Column("b", "text", nullable=False),
        Column("n", "integer"),
    ),
    ("a", "b"),
)
COUNTS = Table(
    "app", "counts", (Column("id", "integer", nullable=False), Column("n", "integer")), ("id",)
)
NAMED = Table("app", "named", (Column("k", "text", nullable=False), Column("n", "integer")), ("k",))


def note(key, text):
    return (key,), {"id": key, "t": text}


def gone(*key):
    return key, None


def count(key, n):
    return (key,), {"id": key, "n": n}


def texts(writer):
    return {row["id"]: row["t"] for row in writer.held(NOTES).values()}


def counts(writer):
    return {row["id"]: row["n"] for row in writer.held(COUNTS).values()}


def fold(log):
    """What a table of notes holds at the end of *log*."""
    return {row["id"]: row["t"] for row in dict(log).values() if row is not None}


# Rows that are created, changed, deleted and created again.
LOG = (note(1, "a"), note(2, "b"), gone(1), note(3, "c"), note(1, "d"), gone(2))


def test_a_slice_that_comes_twice_happens_once(harness):
    """The second time, every change of a slice is stale and nothing moves."""
    writer = harness.start(NOTES)
    changes = {0: note(1, "a"), 1: note(2, "b"), 2: gone(3)}
    assert writer.write(NOTES, changes) == Written(3, 0)
    assert writer.write(NOTES, changes) == Written(0, 3)
    assert texts(writer) == {1: "a", 2: "b"}


def test_an_older_slice_after_a_newer_one_is_stale(harness):
    """A late slice is success, and changes nothing."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {10: note(1, "new"), 11: note(2, "new")})
    assert writer.write(NOTES, {3: note(1, "old"), 4: note(2, "old")}) == Written(0, 2)
    assert texts(writer) == {1: "new", 2: "new"}


def test_a_row_is_deleted_and_created_again(harness):
    """Upsert, delete and upsert of one key leave the last state, each in its turn."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {0: note(1, "a"), 1: note(2, "stays")})
    assert writer.write(NOTES, {2: gone(1)}) == Written(1, 0)
    assert texts(writer) == {2: "stays"}
    writer.write(NOTES, {3: note(1, "again")})
    assert texts(writer) == {1: "again", 2: "stays"}


def test_a_delete_of_an_absent_key_is_no_error(harness):
    """A key that was never seen can be deleted, beside keys that are written."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {0: gone(7), 1: note(1, "a")})
    writer.write(NOTES, {2: gone(8)})
    assert texts(writer) == {1: "a"}


def test_a_deleted_row_does_not_come_back(harness):
    """An upsert from before the delete is stale, even when it comes after it."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {0: note(1, "a")})
    writer.write(NOTES, {5: gone(1), 6: gone(2)})
    assert writer.write(NOTES, {3: note(1, "late"), 4: note(2, "late")}) == Written(0, 2)
    assert texts(writer) == {}


def test_a_deleted_row_does_not_come_back_when_its_delete_is_forgotten(harness):
    """When the target no longer knows of the delete, the ledger still does."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {0: note(1, "a"), 1: note(2, "stays")})
    writer.write(NOTES, {5: gone(1), 6: gone(3)})
    harness.forget_deletes()
    assert writer.write(NOTES, {3: note(1, "late"), 4: note(3, "late")}) == Written(0, 2)
    assert texts(writer) == {2: "stays"}


def test_an_upsert_and_a_delete_of_one_key_come_in_one_batch(harness):
    """In either order the later one counts, with Debezium's own tombstone behind each delete."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {0: note(1, "old"), 1: note(2, "old")})
    history = [note(1, "new"), gone(1), gone(2), note(2, "new"), note(3, "new"), gone(3)]
    records = []
    for (key,), row in history:
        value = {"op": "d" if row is None else "u", "after": row, "source": {"ts_us": 1}}
        values = [orjson.dumps(value), *([None] if row is None else [])]
        key_bytes = orjson.dumps({"id": key})
        records += [(key_bytes, value) for value in values]
    log = [Record(2 + at, *record) for at, record in enumerate(records)]
    (stretch,) = stretches(log, 100, 1_000_000)
    changes = {}
    for offset, key, value in stretch.records:
        change = decode(NOTES, key, value, offset)
        changes[offset] = change.key, change.row
    assert len(changes) == 3
    writer.write(NOTES, changes)
    assert texts(writer) == {2: "new"}


def test_the_log_is_replayed_from_every_earlier_offset(harness):
    """Whether the ledger knows of the replay or was taken back, the end is the same."""
    writer = harness.start(NOTES)
    for offset in range(0, len(LOG), 2):
        writer.write(NOTES, {offset: LOG[offset], offset + 1: LOG[offset + 1]})
    assert writer.write_log(NOTES, LOG).applied == 0
    for start in reversed(range(len(LOG))):
        writer.assign(NOTES, Entry(TOPIC_ID, 1, 2, {0: start}))
        writer.write_log(NOTES, LOG, start)
        assert texts(writer) == fold(LOG)


def test_composite_keys_never_meet(harness):
    """Keys that are equal when they are joined carelessly are different rows."""
    writer = harness.start(PAIRS)
    keys = [("a-b", "c"), ("a", "b-c"), ("a:b", "c"), ("a", "b:c"), ("ab", "c"), ("a", "bc")]
    keys += [('a","b', "c"), ("a", 'b","c'), ("", "ab"), ("ab", "")]
    changes = {n: ((a, b), {"a": a, "b": b, "n": n}) for n, (a, b) in enumerate(keys)}
    writer.write(PAIRS, changes)
    assert {key: row["n"] for key, row in writer.held(PAIRS).items()} == {
        key: n for n, key in enumerate(keys)
    }
    writer.write(PAIRS, {100: gone("a-b", "c")})
    assert writer.held(PAIRS).keys() == {*keys[1:]}


def test_any_text_can_be_a_key(harness):
    """Keys hold whatever PostgreSQL's text holds, and can be deleted again."""
    writer = harness.start(NAMED)
    keys = ["käse", "日本", "😀", "a/b", "../x", "a:b", "{a}", "a}b{", " ", "a b", "tab\tnew\nline"]
    keys += ["", "*", "?[a]", "%2F", "a\\b", "\\N", "'", '"', "_cdc", "NULL", "1", "x" * 600]
    changes = {n: ((key,), {"k": key, "n": n}) for n, key in enumerate(keys)}
    writer.write(NAMED, changes)
    assert {key: row["n"] for (key,), row in writer.held(NAMED).items()} == {
        key: n for n, key in enumerate(keys)
    }
    writer.write(NAMED, {100 + n: gone(key) for n, key in enumerate(keys)})
    assert writer.held(NAMED) == {}


def test_a_column_that_became_null_is_null(harness):
    """An update replaces the whole row: nothing of the old one shines through."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {0: note(1, "a")})
    writer.write(NOTES, {1: note(1, None)})
    assert texts(writer) == {1: None}


def test_an_old_fence_is_refused(harness):
    """Who claims takes over: the writer before can neither write nor assign any more."""
    old = harness.start(NOTES)
    old.write(NOTES, {0: note(1, "a")})
    new = harness.open(old.tables)
    token = new.claim().token
    with pytest.raises(SinkFenced):
        old.write(NOTES, {1: note(1, "zombie")})
    with pytest.raises(SinkFenced):
        old.sink.assign(old.token, {topic_of(NOTES): Entry(TOPIC_ID, 2, 2)})
    after = replace(old, sink=new, token=token)
    after.write(NOTES, {1: note(2, "b")})
    assert texts(after) == {1: "a", 2: "b"}


def test_claims_grow(harness):
    """Every claim has a higher token than the one before, whoever makes it."""
    topics = {topic_of(NOTES): NOTES}
    first, second = harness.open(topics), harness.open(topics)
    tokens = [sink.claim().token for sink in (first, second, first)]
    assert tokens == sorted(set(tokens))


def test_the_ledger_starts_empty(harness):
    """A target that was never read into has no entries."""
    assert harness.open({topic_of(NOTES): NOTES}).claim().entries == {}


def test_the_ledger_is_read_back(harness):
    """What was assigned and written stands in the ledger, also for another process."""
    writer = harness.start(NOTES)
    topic = topic_of(NOTES)
    assert harness.open(writer.tables).claim().entries == {topic: Entry(TOPIC_ID, 1, 2)}
    writer.token = writer.sink.claim().token
    writer.write(NOTES, {4: note(1, "a")}, partition=1)
    found = harness.open(writer.tables).claim()
    assert found.entries == {topic: Entry(TOPIC_ID, 1, 2, {1: 5})}


def test_the_ledger_can_be_assigned_anew(harness):
    """An assignment replaces what the ledger had, offsets and all."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {4: note(1, "a")})
    entries = {topic_of(NOTES): Entry("another", 2, 3, {0: 7, 2: 9})}
    writer.sink.assign(writer.token, entries)
    assert harness.open(writer.tables).claim().entries == entries


def test_the_next_generation_beats_the_last(harness):
    """After the topic was made anew, its low offsets win over the high ones of its last life."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {900: note(1, "old"), 901: note(2, "old")})
    writer.sink.assign(writer.token, {topic_of(NOTES): Entry("another", 2, 2)})
    writer.generation = 2
    assert writer.write(NOTES, {0: note(1, "new"), 1: gone(2)}) == Written(2, 0)
    assert texts(writer) == {1: "new"}


def test_half_a_slice_is_completed_by_its_replay(harness):
    """When a slice was cut by a crash, the whole of it may come again."""
    writer = harness.start(NOTES)
    half = {0: note(1, "a"), 1: note(2, "b")}
    writer.write(NOTES, half)
    assert writer.write(NOTES, {**half, 2: note(3, "c"), 3: gone(1)}).applied == 2
    assert texts(writer) == {2: "b", 3: "c"}


def test_a_lost_answer_loses_and_doubles_nothing(harness):
    """After whichever round trip the line breaks, a replay completes what was begun."""
    writer = harness.start(NOTES)
    with harness.losing(writer) as (losing, spare):
        for loss in range(60):
            at = 3 * loss
            changes = {at: note(1000, str(loss)), at + 1: note(loss, "new"), at + 2: gone(loss - 1)}
            spare(loss)
            try:
                losing.write(NOTES, changes)
                break
            except SinkUnavailable:
                writer.write(NOTES, changes)
            assert texts(writer) == {1000: str(loss), loss: "new"}
    assert 0 < loss < 59
    assert texts(writer) == {1000: str(loss), loss: "new"}
    assert writer.entry(NOTES).offsets == {0: 3 * loss + 3}


def test_ten_thousand_changes_at_once(harness):
    """A slice of full size is written, half of it deleted in one go, and the rest swept."""
    writer = harness.start(NOTES)
    rows = {n: note(n, f"text {n}") for n in range(10_000)}
    assert writer.write(NOTES, rows) == Written(10_000, 0)
    writer.write(NOTES, {10_000 + n: gone(n) for n in range(0, 10_000, 2)})
    assert texts(writer) == {n: f"text {n}" for n in range(1, 10_000, 2)}
    writer.assign(NOTES, Entry("another", 2, 2, unswept=True))
    assert writer.sink.sweep(writer.token, topic_of(NOTES), NOTES) == 5_000
    assert texts(writer) == {}


def test_a_row_of_two_megabytes(harness):
    """One large row is a row like any other."""
    writer = harness.start(NOTES)
    text = "wörter und zeilen\n" * 120_000
    assert len(text.encode()) > 2 << 20
    assert writer.write(NOTES, {0: note(1, text), 1: note(2, "b")}) == Written(2, 0)
    assert texts(writer) == {1: text, 2: "b"}


def test_partitions_have_ledgers_of_their_own(harness):
    """A high offset in one partition makes nothing stale in another."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {50: note(1, "a")}, partition=0)
    assert writer.write(NOTES, {2: note(2, "b")}, partition=1) == Written(1, 0)
    assert texts(writer) == {1: "a", 2: "b"}


def test_tables_do_not_mix(harness):
    """Equal keys of several tables, also of one name in two schemas, are different rows."""
    other = replace(NOTES, schema="app_notes", name="x")
    same_name = replace(NOTES, schema="other")
    tables = (NOTES, other, same_name)
    writer = harness.start(*tables)
    for n, table in enumerate(tables):
        writer.write(table, {0: note(1, f"of {n}")})
    for n, table in enumerate(tables):
        assert [row["t"] for row in writer.held(table).values()] == [f"of {n}"]


def test_a_new_column_is_added(harness):
    """When the source has a new column, the target gets it; old rows have NULL there."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {0: note(1, "a")})
    wider = replace(NOTES, columns=(*NOTES.columns, Column("n", "bigint")))
    writer.sink.prepare({topic_of(NOTES): wider})
    writer.write(wider, {1: ((2,), {"id": 2, "t": "b", "n": 5})})
    assert {row["id"]: row["n"] for row in writer.held(wider).values()} == {1: None, 2: 5}


def test_a_dropped_column_is_gone(harness):
    """When the source has dropped a column, a row that is written anew has nothing of it."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {0: note(1, "a"), 1: note(2, "b")})
    narrow = replace(NOTES, columns=(NOTES.columns[0], Column("n", "integer")))
    writer.sink.prepare({topic_of(NOTES): narrow})
    writer.write(narrow, {2: count(1, 5), 3: count(3, 7)})
    assert {row["id"]: row["n"] for row in writer.held(narrow).values()} == {1: 5, 2: None, 3: 7}
    (raw,) = (row for row, _ in writer.sink.rows(narrow) if canonical("integer", row["id"]) == 1)
    assert "t" not in raw


TYPES = {
    "smallint": (-32768, 32767),
    "integer": (-2147483648, 2147483647),
    "bigint": (-9223372036854775808, 9223372036854775807),
    "numeric(12,2)": ("1234567890.12", "-0.10"),
    "numeric": ("1000000000000000000000000000000.000000000000000000001", "NAN"),
    "double precision": (0.1, "NaN", "-Infinity", 1e300),
    "real": (0.1, "Infinity", -3.4e38),
    "boolean": (True, False),
    "text": ("", "tab\t new\nline \\ \\N \r 'quote' \"double\" käse 😀", "x" * 40_000),
    "character varying(20)": ("abc", "\\"),
    "character(5)": ("ab   ",),
    "uuid": ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",),
    "bytea": ("", "3q2+7w==", "AP8="),
    "date": ("2026-01-02Z", "0044-03-15Z"),
    "time without time zone": ("03:04:05.678901Z", "00:00:00Z"),
    "time with time zone": ("01:04:05.678901Z",),
    "timestamp without time zone": ("2026-01-02T03:04:05.678901Z", "0001-01-01T00:00:00Z"),
    "timestamp with time zone": ("2026-01-02T01:04:05.678901Z", "infinity", "-infinity"),
    "interval": ("P0Y1M2DT3H4M5.5S", "P-1Y0M0DT0H0M0S"),
    "json": ('{"a": 1, "b": [true, null]}', "[]", "7", '"text"'),
    "jsonb": ('{"big": 12345678901234567890.123, "a": {"b": [1, 2.50, "x"]}}', "1", '"1"'),
    "integer[]": ([1, None, 3], []),
    "text[]": (["a b", None, 'q"uote', "back\\slash", "NULL", "", "{}", ","],),
    "numeric(6,2)[]": (["1.50", None],),
    "boolean[]": ([True, None, False],),
    "inet": ("10.0.0.1/8", "::1"),
    "money": ("12.34", "-0.01"),
    "public.mood": ("happy",),
}


def test_common_types_come_back_equal(harness):
    """Every value of every common type is held without loss, by the canonical comparison."""
    columns = tuple(Column(f"c{n}", pg_type) for n, pg_type in enumerate(TYPES))
    table = Table("app", "types", (Column("id", "integer", nullable=False), *columns), ("id",))
    count = max(len(values) for values in TYPES.values())
    rows = [
        {"id": at}
        | {
            column.name: values[at] if at < len(values) else None
            for column, values in zip(columns, TYPES.values(), strict=True)
        }
        for at in range(count + 1)
    ]
    writer = harness.start(table)
    writer.write(table, {at: ((row["id"],), row) for at, row in enumerate(rows)})
    assert writer.held(table) == {(row["id"],): canonical_row(table, row) for row in rows}


def test_rows_carry_their_version(harness):
    """A row that is read for comparison says which change it came from, if it says anything."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {3: note(1, "a"), 8: note(2, "b")})
    versions = {canonical("integer", row["id"]): v for row, v in writer.sink.rows(NOTES)}
    assert {key: v and v & 0xFFFF for key, v in versions.items() if v is not None} == {1: 3, 2: 8}


def test_a_refused_change_leaves_the_ledger(harness):
    """What can never be taken is told by its place; without it, the rest of the slice is taken."""
    writer = harness.start(COUNTS)
    writer.write(COUNTS, {0: count(1, 1), 1: count(2, 2)})
    changes = {2: count(1, 10), 3: count(2, harness.never), 4: count(3, 3), 5: gone(4)}
    (refusal,) = writer.write(COUNTS, changes).refused
    assert (refusal.partition, refusal.offset) == (0, 3)
    assert refusal.reason
    assert str(harness.never) not in refusal.reason
    assert writer.entry(COUNTS).offsets == {0: 2}
    del changes[3]
    assert writer.write(COUNTS, changes).refused == ()
    assert counts(writer) == {1: 10, 2: 2, 3: 3}
    assert writer.entry(COUNTS).offsets == {0: 6}


def test_all_that_is_refused_is_told_in_the_end(harness):
    """Told one by one or all at once, nothing is left out that could be taken."""
    writer = harness.start(COUNTS)
    changes = {n: count(n, harness.never if n % 3 else n) for n in range(9)}
    refused = set()
    while told := writer.write(COUNTS, changes).refused:
        assert {refusal.offset for refusal in told} <= changes.keys()
        for refusal in told:
            refused.add(refusal.offset)
            del changes[refusal.offset]
    assert refused == {1, 2, 4, 5, 7, 8}
    assert counts(writer) == {0: 0, 3: 3, 6: 6}


def test_a_repair_brings_in_what_was_left_out(harness):
    """Below the ledger's next offset, under its own version, and the ledger does not move."""
    writer = harness.start(COUNTS)
    writer.write(COUNTS, {0: count(1, 1), 6: count(2, 2)})
    beside = replace(writer, sink=harness.open(writer.tables))
    left_out = {2: count(3, 3), 4: gone(1)}
    assert beside.repair(COUNTS, left_out, next_offset=7) == Written(2, 0)
    assert counts(writer) == {2: 2, 3: 3}
    assert beside.repair(COUNTS, {1: count(2, 0)}, next_offset=9) == Written(0, 1)
    assert counts(writer) == {2: 2, 3: 3}
    assert writer.write(COUNTS, {7: count(3, 30)}) == Written(1, 0)
    assert writer.entry(COUNTS).offsets == {0: 8}
    (refusal,) = beside.repair(COUNTS, {5: count(5, harness.never)}, next_offset=8).refused
    assert (refusal.partition, refusal.offset) == (0, 5)
    assert counts(writer) == {2: 2, 3: 30}


def test_a_repair_gives_way_to_a_writer_that_has_passed(harness):
    """What it knows to be the newest may no longer be: nothing is done, and that is said."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {0: note(1, "a"), 5: gone(2)})
    late = {1: note(2, "late")}
    assert writer.repair(NOTES, late, next_offset=5) is None
    assert writer.repair(NOTES, late, next_offset=0) is None
    writer.assign(NOTES, Entry("another", 2, 2))
    beside = replace(writer, generation=1)
    assert beside.repair(NOTES, late, next_offset=9) is None
    writer.sink.assign(writer.token, {})
    assert writer.repair(NOTES, late, next_offset=9) is None
    assert texts(writer) == {1: "a"}


def test_a_repair_never_undoes_a_delete(harness):
    """A delete that the writer applies at the same moment stays, whoever comes first."""
    writer = harness.start(NOTES)
    beside = replace(writer, sink=harness.open(writer.tables))

    def repair(offset):
        try:
            beside.repair(NOTES, {offset: note(offset, "left out")}, next_offset=offset + 2)
        except SinkUnavailable:
            return  # it has met the writer, and would come again

    def write(offset, change):
        try:
            return writer.write(NOTES, {offset: change})
        except SinkUnavailable:
            return None

    with ThreadPoolExecutor(1) as pool:
        for offset in range(0, 9 if harness.kind == "delta" else 60, 3):
            writer.write(NOTES, {offset + 1: gone(-1)})
            repaired = pool.submit(repair, offset)
            wait_until(lambda at=offset: write(at + 2, gone(at)), within_s=60)
            repaired.result()
    assert texts(writer) == {}


def test_a_repair_leaves_to_the_writer_what_is_still_to_come(harness):
    """What the ledger has not come to is brought by whoever writes, once and in its turn."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {3: note(1, "a")})
    ahead = {2: note(2, "left out"), 5: note(1, "to come")}
    assert writer.repair(NOTES, ahead, next_offset=6) == Written(1, 1)
    assert texts(writer) == {1: "a", 2: "left out"}
    assert writer.write(NOTES, {5: note(1, "to come")}) == Written(1, 0)


def test_a_sweep_removes_only_older_generations(harness):
    """What the log of this generation has said stays, and so does the ledger's place in it."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {n: note(n, "old") for n in range(5)})
    writer.assign(NOTES, Entry("another", 2, 2, unswept=True))
    writer.write(NOTES, {1: note(1, "new"), 2: gone(2), 3: note(5, "new")})
    assert writer.entry(NOTES) == Entry("another", 2, 2, {0: 4}, unswept=True)
    assert writer.sink.sweep(writer.token, topic_of(NOTES), NOTES) == 3
    assert texts(writer) == {1: "new", 5: "new"}
    assert writer.entry(NOTES) == Entry("another", 2, 2, {0: 4})
    assert writer.sink.sweep(writer.token, topic_of(NOTES), NOTES) == 0
    assert writer.write(NOTES, {4: note(6, "goes on")}) == Written(1, 0)
    assert writer.entry(NOTES) == Entry("another", 2, 2, {0: 5})


def test_a_swept_row_can_come_again(harness):
    """The first offset of the generation still wins over what was swept, if it was left out."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {7: note(1, "old")})
    writer.assign(NOTES, Entry("another", 2, 2, {0: 3}, unswept=True))
    assert writer.sink.sweep(writer.token, topic_of(NOTES), NOTES) == 1
    assert writer.repair(NOTES, {0: note(1, "left out")}, next_offset=3) == Written(1, 0)
    assert texts(writer) == {1: "left out"}


def test_a_sweep_is_fenced(harness):
    """Who was replaced removes nothing, and does not say that it is done."""
    old = harness.start(NOTES)
    old.write(NOTES, {0: note(1, "a")})
    old.assign(NOTES, Entry("another", 2, 2, unswept=True))
    new = replace(old, sink=harness.open(old.tables))
    assert new.entry(NOTES).unswept
    with pytest.raises(SinkFenced):
        old.sink.sweep(old.token, topic_of(NOTES), NOTES)
    assert texts(new) == {1: "a"}
    assert new.entry(NOTES).unswept


def test_a_row_of_an_older_generation_does_not_come_in(harness):
    """What nobody would sweep any more is stale, also where nothing is held."""
    writer = harness.start(NOTES, generation=2)
    assert replace(writer, generation=1).write(NOTES, {9: note(1, "old")}) == Written(0, 1)
    assert texts(writer) == {}


def test_a_lost_ledger_costs_a_replay(harness):
    """Rows without a ledger are no reason to take every later change for an old one."""
    writer = harness.start(NOTES, generation=3)
    writer.write_log(NOTES, LOG)
    harness.lose_ledger()
    log = [*LOG, note(1, "after"), gone(3), note(2, "again")]
    found = harness.follow(NOTES, log)
    assert texts(found) == fold(log)
    log.append(note(1, "later"))
    assert found.write(NOTES, {len(log) - 1: log[-1]}) == Written(1, 0)
    assert texts(found) == fold(log)


def test_a_lost_ledger_lets_no_old_writer_in(harness):
    """A writer that slept while the ledger was lost and made anew finds itself replaced."""
    old = harness.start(NOTES)
    old.write(NOTES, {0: note(1, "a")})
    harness.lose_ledger()
    new = harness.open(old.tables)
    new.assign(new.claim().token, {topic_of(NOTES): Entry("another", 2, 2)})
    with pytest.raises((SinkFenced, SinkUnavailable)):  # Delta sees that it was taken back
        old.write(NOTES, {1: note(1, "zombie")})


def test_a_lost_ledger_is_not_forgotten_with_the_last_row(harness):
    """The deletes that a target keeps are of a generation, too."""
    writer = harness.start(NOTES, generation=3)
    writer.write(NOTES, {0: note(1, "a")})
    writer.write(NOTES, {1: gone(1)})
    harness.lose_ledger()
    log = [note(1, "a"), gone(1), note(1, "again")]
    assert texts(harness.follow(NOTES, log)) == {1: "again"}


def test_a_lost_ledger_and_a_topic_made_anew(harness):
    """Low offsets of a new life win over the rows that are held, and what is gone is swept."""
    writer = harness.start(NOTES, generation=3)
    writer.write(NOTES, {800: note(1, "old"), 801: note(2, "old")})
    harness.lose_ledger()
    log = [note(1, "new"), note(3, "new")]
    assert texts(harness.follow(NOTES, log, topic_id="another")) == {1: "new", 3: "new"}


def test_a_ledger_lost_before_a_sweep(harness):
    """What was to be swept is swept all the same."""
    writer = harness.start(NOTES)
    writer.write(NOTES, {0: note(1, "old"), 1: note(2, "old")})
    writer.assign(NOTES, Entry("another", 2, 2, unswept=True))
    log = [note(1, "new")]
    writer.write_log(NOTES, log)
    harness.lose_ledger()
    assert texts(harness.follow(NOTES, log, topic_id="another")) == {1: "new"}


def test_an_older_copy_heals_by_replay(harness):
    """A target that was taken back to a backup, ledger and all, goes on from there."""
    writer = harness.start(NOTES)
    writer.write_log(NOTES, LOG[:3])
    bring_back = harness.keep_copy()
    for offset, change in enumerate(LOG[3:], 3):
        writer.write(NOTES, {offset: change})
    assert texts(writer) == fold(LOG)
    bring_back()
    assert texts(writer) == fold(LOG[:3])
    log = [*LOG, note(4, "after")]
    assert texts(harness.follow(NOTES, log)) == fold(log)


def test_an_older_copy_of_an_older_generation_heals_by_replay(harness):
    """Also when the topic was made anew since the backup."""
    writer = harness.start(NOTES)
    writer.write_log(NOTES, LOG)
    bring_back = harness.keep_copy()
    log = [note(1, "new"), note(7, "new"), gone(1)]
    assert texts(harness.follow(NOTES, log, topic_id="another")) == {7: "new"}
    bring_back()
    assert texts(harness.follow(NOTES, log, topic_id="another")) == {7: "new"}
