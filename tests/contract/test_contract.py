"""What every target owes the pipeline, on its real server. A target is done when this is green."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.change import Column, Table
from cdc.errors import SinkFenced
from cdc.sink import Entry, Written
from sinks.types import canonical
from tests.contract.conftest import TOPIC_ID, canonical_row, topic_of

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
NAMED = Table("app", "named", (Column("k", "text", nullable=False), Column("n", "integer")), ("k",))


def note(key, text):
    return (key,), {"id": key, "t": text}


def gone(*key):
    return key, None


def texts(writer):
    return {row["id"]: row["t"] for row in writer.held(NOTES).values()}


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


def test_two_thousand_changes_at_once(harness):
    """A slice of ordinary size, written, then half of it deleted in one go."""
    writer = harness.start(NOTES)
    rows = {n: note(n, f"text {n}") for n in range(2000)}
    assert writer.write(NOTES, rows) == Written(2000, 0)
    writer.write(NOTES, {2000 + n: gone(n) for n in range(0, 2000, 2)})
    assert texts(writer) == {n: f"text {n}" for n in range(1, 2000, 2)}


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
