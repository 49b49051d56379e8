"""The pure middle: envelope, batch, ledger, policy, errors."""

import json
import pickle
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc import errors, ledger
from cdc.batch import Record, stretches
from cdc.change import Change, Column, Table, key_text, version_of
from cdc.envelope import decode
from cdc.errors import MalformedRecord, SchemaMoved, TopicChanged
from cdc.ledger import TopicState
from cdc.policy import MAX_REOPENINGS, Retry, Stop, backoff, decide
from cdc.sink import Entry

ITEMS = Table(
    "public",
    "items",
    (Column("id", "bigint"), Column("name", "text"), Column("doc", "jsonb")),
    ("id",),
    as_of_us=1_000,
)


def value(op="u", after=None, ts_us=500):
    return orjson.dumps({"op": op, "after": after, "source": {"ts_us": ts_us}})


@pytest.mark.parametrize("op", ["c", "u", "r"])
def test_an_upsert_carries_the_whole_row(op):
    """Create, update and snapshot read mean the same: this is the row now."""
    row = {"id": 1, "name": "x", "doc": None}
    assert decode(ITEMS, b'{"id":1}', value(op, row), 9) == Change((1,), row, 9, 500)


def test_a_delete_and_a_tombstone_both_mean_gone():
    """Debezium sends one, then the other; compaction may leave only the second."""
    assert decode(ITEMS, b'{"id":1}', value("d"), 9) == Change((1,), None, 9, 500)
    assert decode(ITEMS, b'{"id":1}', None, 9) == Change((1,), None, 9, None)


@pytest.mark.parametrize(
    ("key", "body"),
    [
        (b'{"id":1}', b"not json s3cret"),
        (b'{"id":1}', b'["s3cret"]'),
        (b'{"id":1}', b'{"op":"x","after":{"name":"s3cret"}}'),
        (b'{"id":1}', b'{"op":"c","after":null}'),
        (b'{"other":"s3cret"}', None),
        (b"s3cret", None),
        (None, None),
    ],
)
def test_a_record_that_is_not_debeziums_is_refused_without_quoting_it(key, body):
    """The error names no value of the record."""
    with pytest.raises(MalformedRecord) as caught:
        decode(ITEMS, key, body, 9)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "placeholder",
    [
        "__debezium_unavailable_value",
        ["__debezium_unavailable_value"],
        "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==",
        list(b"__debezium_unavailable_value"),
    ],
)
def test_a_toast_placeholder_never_passes(placeholder):
    """Debezium's word for "not sent" must not become the value of a column."""
    with pytest.raises(MalformedRecord, match="lacks the value of doc"):
        decode(ITEMS, b'{"id":1}', value("u", {"id": 1, "name": "x", "doc": placeholder}), 9)


def test_a_text_that_mentions_the_placeholder_passes():
    """Only a value that is the placeholder is one."""
    row = {"id": 1, "name": "about __debezium_unavailable_value", "doc": None}
    assert decode(ITEMS, b'{"id":1}', value("u", row), 9).row == row


def test_a_new_column_is_news_and_a_dropped_one_is_left_out():
    """Younger than the catalogue: the schema moved. Older: the column is gone since."""
    row = {"id": 1, "name": "x", "doc": None, "extra": 1}
    with pytest.raises(SchemaMoved, match="extra"):
        decode(ITEMS, b'{"id":1}', value("u", row, ts_us=1_000), 9)
    kept = decode(ITEMS, b'{"id":1}', value("u", row, ts_us=999), 9).row
    assert kept == {"id": 1, "name": "x", "doc": None}


SAMPLES = sorted((Path(__file__).parent.parent / "samples").glob("*.json"))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_real_debezium_records_decode(path):
    """Records that a real Debezium wrote become changes with their key and their row."""
    sample = json.loads(path.read_text())
    after = (sample["value"] or {}).get("after")
    columns = tuple(Column(name, "text") for name in after or sample["key"])
    table = Table("app", "t", columns, tuple(sample["key"]))
    raw = sample["value_raw"]
    change = decode(table, sample["key_raw"].encode(), raw.encode() if raw else None, 7)
    assert change.key == tuple(sample["key"].values())
    assert change.row == after


records = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 30) | st.none()), max_size=60)


@given(records, st.integers(1, 8), st.integers(1, 100))
def test_stretches_keep_the_newest_record_of_each_key(history, max_changes, max_bytes):
    """Any cut, applied in order, ends in the fold of the log, and no cut exceeds its limits."""
    log = [
        Record(at * 2, key.encode(), None if size is None else bytes(size))
        for at, (key, size) in enumerate(history)
    ]
    state: dict[bytes | None, Record] = {}
    next_offset = -1
    for stretch in stretches(log, max_changes, max_bytes):
        offsets = [record.offset for record in stretch.records]
        assert offsets == sorted(offsets)
        assert len({record.key for record in stretch.records}) == len(offsets) <= max_changes
        assert next_offset <= offsets[0]
        next_offset = stretch.next_offset
        assert next_offset == offsets[-1] + 1
        state |= {record.key: record for record in stretch.records}
    assert state == {record.key: record for record in log}


json_keys = st.lists(
    st.integers(-20, 20) | st.text('a1-,"[]é', max_size=4) | st.booleans(), min_size=1, max_size=3
)


@given(json_keys, json_keys)
def test_key_text_is_injective(one, other):
    """Two keys share their text only if they are the same key, types included."""
    same = [(type(v), v) for v in one] == [(type(v), v) for v in other]
    assert (key_text(tuple(one)) == key_text(tuple(other))) == same


def test_versions_order_by_generation_then_offset():
    """Any offset of a later life of the topic is newer, and the largest fits 63 bits."""
    assert version_of(1, 2**48 - 1) < version_of(2, 0) < version_of(2, 1)
    assert version_of(2**15 - 1, 2**48 - 1) == 2**63 - 1
    for bad in [(0, 0), (2**15, 0), (1, -1), (1, 2**48)]:
        with pytest.raises(ValueError, match="out of range"):
            version_of(*bad)


def topic(topic_id="A", partitions=2, start=0, end=100):
    every = range(partitions)
    return TopicState(topic_id, partitions, dict.fromkeys(every, start), dict.fromkeys(every, end))


def test_a_topic_never_read_starts_at_the_beginning():
    """A new sink fills itself from the log."""
    planned = ledger.plan(["t"], {}, {"t": topic()})
    assert planned == {"t": Entry("A", 1, 2)}
    assert json.loads(ledger.starting_offsets(planned)) == {"t": {"0": -2, "1": -2}}


def test_a_known_topic_goes_on_where_the_ledger_says():
    """The ledger, and nothing else, decides."""
    held = {"t": Entry("A", 3, 2, {0: 40})}
    planned = ledger.plan(["t"], held, {"t": topic()})
    assert planned == held
    assert json.loads(ledger.starting_offsets(planned)) == {"t": {"0": 40, "1": -2}}


def test_a_recreated_topic_opens_the_next_generation():
    """The same name with another id is another log: offsets start again, versions do not."""
    held = {"t": Entry("A", 3, 2, {0: 40, 1: 50})}
    assert ledger.plan(["t"], held, {"t": topic("B")}) == {"t": Entry("B", 4, 2, unswept=True)}


@pytest.mark.parametrize(
    "state", [topic(partitions=3), topic(end=39), topic(start=41)], ids=["more", "short", "cut"]
)
def test_a_log_that_does_not_fit_the_ledger_fails_closed(state):
    """Moved keys and lost records stop the sink, with the way to start again."""
    with pytest.raises(TopicChanged) as caught:
        ledger.plan(["t"], {"t": Entry("A", 1, 2, {0: 40})}, {"t": state})
    assert "cdc resync" in caught.value.hint


def test_a_missing_topic_says_how_to_create_it():
    """No topic, no start."""
    with pytest.raises(errors.SourceError) as caught:
        ledger.plan(["t"], {}, {})
    assert "cdc connectors apply" in caught.value.hint


EVERY_ERROR = sorted(errors._family(errors.CdcError).values(), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", EVERY_ERROR)
def test_errors_survive_process_borders(kind):
    """An error comes back with type, message and hint, pickled or as data."""
    error = kind("what", hint="do this")
    for copy in (pickle.loads(pickle.dumps(error)), errors.from_data(error.to_data())):
        assert (type(copy), str(copy), copy.hint) == (kind, "what", "do this")


RETRIED = {
    errors.SinkUnavailable,
    errors.SinkBusy,
    errors.SourceUnavailable,
    errors.TopicMissing,
}
REOPENED = {errors.SchemaMoved, errors.QueryLost}


@pytest.mark.parametrize("kind", EVERY_ERROR)
def test_only_the_short_list_is_retried(kind):
    """Unreachable is retried for ever, reopening helps soon or never, all else stops."""
    first = decide(kind("x"), 1, 30)
    later = decide(kind("x"), MAX_REOPENINGS + 1, 30)
    assert isinstance(first, Retry) == (kind in RETRIED | REOPENED)
    assert isinstance(later, Retry) == (kind in RETRIED)
    if isinstance(later, Stop):
        assert later.hint


def test_backoff_doubles_up_to_its_limit():
    """The pause grows with each failure and never beyond the limit."""
    pauses = [backoff(attempt, 30, jitter=lambda: 1.0) for attempt in (1, 2, 3, 7, 100)]
    assert pauses == [0.5, 1.0, 2.0, 30, 30]
    assert backoff(3, 30, jitter=lambda: 0.0) == 1.0
