"""What is special about Delta Lake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pyarrow as pa
import pytest

from cdc import stream
from cdc.change import Change, Column, Slice, Table, version_of
from cdc.config import Batch, Quarantine
from cdc.errors import SinkFenced, SinkUnavailable, SinkUnusable
from cdc.sink import Entry, Refusal, Written
from cdc.writer import Job
from sinks.delta import DeltaSettings, DeltaSink, table_path
from tests.contract.conftest import TOPIC_ID

PRICES = Table(
    "app",
    "prices",
    (Column("id", "integer", nullable=False), Column("amount", "numeric(12,2)")),
    ("id",),
)
TOPIC = "shop.app.prices"


def price(key, amount):
    return (key,), {"id": key, "amount": amount}


def gone(*key):
    return key, None


@pytest.fixture
def writer(delta_harness):
    return delta_harness.start(PRICES)


def location(writer):
    return table_path(writer.sink._root, PRICES)


def test_value_that_delta_cannot_hold_is_refused(writer):
    """A decimal has no NaN: the change is refused by its column, and nothing is committed."""
    before = writer.sink._note(PRICES).version
    changes = {0: price(1, "1.50"), 7: price(2, "NAN"), 8: price(None, "1.50")}
    refused = writer.write(PRICES, changes, partition=1).refused
    assert sorted(refused) == [
        Refusal(1, 7, "no Delta value, column amount"),
        Refusal(1, 8, "no Delta value, column id"),
    ]
    assert writer.sink._note(PRICES).version == before
    assert writer.write(PRICES, {0: price(1, "1.50")}, partition=1) == Written(1, 0)


def test_batch_of_nothing_moves_the_ledger(writer):
    """When all of a batch was refused and kept elsewhere, reading goes on after it."""
    nothing = Slice(PRICES, TOPIC, 0, 5, ())
    assert writer.harness.apply(writer.sink, writer.token, nothing) == Written(0, 0)
    assert writer.sink._note(PRICES).entry.offsets == {0: 5}


def test_key_that_comes_again_in_a_batch_is_merged_once(writer, spark):
    """A task tells its changes a stretch at a time; of a key that comes again the newest counts."""
    amounts = {0: (1, "1.00"), 1: (2, "2.00"), 2: (1, "1.50"), 3: (3, "3.00"), 4: (1, "1.75")}
    after = [{"id": key, "amount": amount} for key, amount in amounts.values()]
    records = {
        "topic": [TOPIC] * len(after),
        "partition": pa.array([0] * len(after), pa.int32()),
        "offset": list(amounts),
        "key": [orjson.dumps({"id": row["id"]}) for row in after],
        "value": [orjson.dumps({"op": "u", "after": row, "source": {}}) for row in after],
    }
    job = Job(
        sink=DeltaSettings(name="lake", type="delta", path="x"),
        open_sink=None,
        keep=None,
        token=writer.token,
        tables=writer.tables,
        generations={TOPIC: 1},
        topic_ids={TOPIC: TOPIC_ID},
        limits=Batch(max_changes=2),
        tolerated=Quarantine(),
    )
    frame = spark.createDataFrame(pa.table(records)).coalesce(1)
    (report,) = stream._apply_frame(job, writer.sink, frame)
    assert (report.outdated, report.applied, report.next_offset) == (2, 3, 5)
    held = {key: str(row["amount"]) for (key,), row in writer.held(PRICES).items()}
    assert held == {1: "1.75", 2: "2.00", 3: "3.00"}


def test_nothing_newer_makes_no_commit(writer):
    """A batch that was seen before leaves the table's log as it was."""
    changes = {0: price(1, "1.50")}
    writer.write(PRICES, changes)
    before = writer.sink._note(PRICES).version
    assert writer.write(PRICES, changes) == Written(0, 1)
    assert writer.sink._note(PRICES).version == before


def test_commits_of_others_are_passed_over(writer, spark, delta_harness):
    """After OPTIMIZE and a property set by hand, the ledger is still found."""
    writer.write(PRICES, {0: price(1, "1.50")})
    spark.sql(f"OPTIMIZE delta.`{location(writer)}`")
    spark.sql(f"ALTER TABLE delta.`{location(writer)}` SET TBLPROPERTIES ('team' = 'x')")
    assert writer.write(PRICES, {1: price(2, "2.50")}) == Written(1, 0)
    found = delta_harness.open(writer.tables).claim()
    assert found.entries == {TOPIC: Entry(TOPIC_ID, 1, 2, {0: 2})}


def test_restored_table_heals_by_replay(writer, spark):
    """RESTORE takes the ledger back with the rows, so what was undone is read again."""
    writer.write(PRICES, {0: price(1, "1.50")})
    version = writer.sink._note(PRICES).version
    writer.write(PRICES, {1: price(2, "2.50")})
    spark.sql(f"RESTORE TABLE delta.`{location(writer)}` TO VERSION AS OF {version}")
    claimed = writer.sink.claim()
    assert claimed.entries[TOPIC].offsets == {0: 1}
    writer.token = claimed.token
    assert writer.write(PRICES, {1: price(2, "2.50")}) == Written(1, 0)
    assert writer.held(PRICES).keys() == {(1,), (2,)}


def interrupted(sink, monkeypatch, happens):
    """Let *happens* take place after the sink has looked at the log, before Delta begins."""
    merge = sink._merge
    todo = [happens]

    def late(staged, table):
        while todo:
            todo.pop()()
        return merge(staged, table)

    monkeypatch.setattr(sink, "_merge", late)


def test_old_holder_cannot_bring_a_row_back(writer, delta_harness, monkeypatch):
    """A batch that was held up while another writer took over and went on is not applied."""

    def taken_over():
        sink = delta_harness.open(writer.tables)
        new = replace(writer, sink=sink, token=sink.claim().token)
        new.write(PRICES, {0: price(1, "1.50")})
        new.write(PRICES, {1: gone(1)})

    interrupted(writer.sink, monkeypatch, taken_over)
    with pytest.raises(SinkFenced):
        writer.write(PRICES, {0: price(1, "1.50")})
    assert writer.held(PRICES) == {}


def test_last_batch_of_an_old_holder_counts(writer, delta_harness, monkeypatch):
    """What was written between a claim and the first batch after it stands in the ledger."""
    sink = delta_harness.open(writer.tables)
    tokens = []
    interrupted(writer.sink, monkeypatch, lambda: tokens.append(sink.claim().token))
    with pytest.raises(SinkFenced):
        writer.write(PRICES, {0: price(1, "1.50"), 1: gone(2)})
    new = replace(writer, sink=sink, token=tokens[0])
    assert new.write(PRICES, {0: price(2, "9.99")}) == Written(0, 1)
    assert new.held(PRICES).keys() == {(1,)}
    again = delta_harness.open(writer.tables).claim()
    assert again.token > tokens[0]
    assert again.entries[TOPIC].offsets == {0: 2}


def left_out(changes, next_offset):
    found = (Change(*change, version_of(1, offset)) for offset, change in sorted(changes.items()))
    return Slice(PRICES, TOPIC, 0, next_offset, tuple(found))


def test_repair_disturbs_no_writer(writer, delta_harness, monkeypatch):
    """A repair beside a batch: both are applied, and neither moves the other's ledger."""
    beside = delta_harness.open(writer.tables)
    writer.write(PRICES, {0: price(1, "1.50"), 5: price(2, "2.50")})
    found = []
    piece = left_out({3: price(3, "3.50"), 4: price(2, "0.00")}, next_offset=6)
    interrupted(writer.sink, monkeypatch, lambda: found.append(beside.repair(piece)))
    assert writer.write(PRICES, {6: price(4, "4.50")}) == Written(1, 0)
    assert found == [Written(1, 1)]
    assert writer.held(PRICES).keys() == {(1,), (2,), (3,), (4,)}
    assert writer.sink._note(PRICES).entry.offsets == {0: 7}
    assert beside.repair(left_out({3: price(3, "9.50")}, next_offset=6)) is None


def test_repair_that_a_batch_came_before_decides_again(writer, spark, delta_harness, monkeypatch):
    """A delete that the writer applied in the middle of a repair is not undone.

    The batch looked at the log before the repair did, with a commit of others in between.
    """
    beside = delta_harness.open(writer.tables)
    writer.write(PRICES, {3: price(1, "1.50")})
    merge, done, found = writer.sink._merge, [], []

    def late(staged, table):
        others = spark.newSession()  # without the batch's settings
        others.sql(f"ALTER TABLE delta.`{location(writer)}` SET TBLPROPERTIES ('team' = 'x')")
        interrupted(beside, monkeypatch, lambda: done.append(merge(staged, table)))
        found.append(beside.repair(left_out({2: price(3, "3.50")}, next_offset=4)))
        return done[0]

    monkeypatch.setattr(writer.sink, "_merge", late)
    assert writer.write(PRICES, {6: gone(3)}) == Written(1, 0)
    assert found == [None]
    assert writer.held(PRICES).keys() == {(1,)}


def test_sweep_removes_older_generations_with_its_ledger(writer, delta_harness):
    """Rows that the new generation did not bring are removed, once, by the holder."""
    writer.write(PRICES, {0: price(1, "1.50"), 1: price(2, "2.50")})
    writer.sink.assign(writer.token, {TOPIC: Entry("another", 2, 2, unswept=True)})
    writer.generation = 2
    writer.write(PRICES, {0: price(2, "2.75")})
    assert writer.sink.sweep(writer.token, TOPIC, PRICES) == 1
    assert writer.held(PRICES).keys() == {(2,)}
    claim = delta_harness.open(writer.tables).claim()
    assert claim.entries == {TOPIC: Entry("another", 2, 2, {0: 1})}
    with pytest.raises(SinkFenced):
        writer.sink.sweep(writer.token, TOPIC, PRICES)


def test_sweep_of_nothing_is_noted_all_the_same(writer):
    """Delta makes no commit of a DELETE that finds nothing; the ledger moves nevertheless."""
    writer.sink.assign(writer.token, {TOPIC: Entry("another", 2, 2, unswept=True)})
    assert writer.sink.sweep(writer.token, TOPIC, PRICES) == 0
    assert writer.sink._note(PRICES).entry == Entry("another", 2, 2)


def clean_up(spark, path):
    """Do what Delta does after `logRetentionDuration`: a checkpoint stands for older commits."""
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('team' = 'x')")
    logs = spark._jvm.org.apache.spark.sql.delta.DeltaLog
    logs.forTable(spark._jsparkSession, path).checkpoint()
    logs.clearCache()
    for commit in sorted(Path(path.removeprefix("file://")).glob("_delta_log/*.json"))[:-1]:
        commit.unlink()


def test_lost_ledger_is_read_from_the_rows(writer, spark, delta_harness):
    """After its commits were cleaned up, a writer goes on, and the next one begins anew."""
    writer.write(PRICES, {0: price(1, "1.50")})
    clean_up(spark, location(writer))
    assert writer.write(PRICES, {1: price(2, "2.50")}) == Written(1, 0)
    clean_up(spark, location(writer))
    claim = delta_harness.open(writer.tables).claim()
    assert claim.token > writer.token
    assert claim.entries == {TOPIC: Entry("", 1, 0)}


def test_writer_notices_a_restore_beneath_it(writer, spark):
    """The ledger went back with the rows: going on would leave a hole, so it is opened again."""
    writer.write(PRICES, {0: price(1, "1.50")})
    version = writer.sink._note(PRICES).version
    writer.write(PRICES, {1: price(2, "2.50")})
    spark.sql(f"RESTORE TABLE delta.`{location(writer)}` TO VERSION AS OF {version}")
    with pytest.raises(SinkUnavailable, match="restored"):
        writer.write(PRICES, {2: price(3, "3.50")})


def test_directory_that_cannot_be_written_stops_with_a_hint(spark, tmp_path):
    """Where no table can be made, the sink says so before it is used."""
    (tmp_path / "file").write_text("")
    settings = DeltaSettings(name="lake", type="delta", path=str(tmp_path / "file" / "lake"))
    with pytest.raises(SinkUnusable, match="cannot be written") as caught:
        DeltaSink(settings, spark).prepare({TOPIC: PRICES})
    assert "right to write" in caught.value.hint


def test_columns_that_differ_in_case_are_refused(delta_harness):
    """Delta takes names in any case for one; two such columns cannot both be kept."""
    twice = replace(PRICES, columns=(*PRICES.columns, Column("Amount", "text")))
    with pytest.raises(SinkUnusable, match="one name"):
        delta_harness.open({TOPIC: twice})


def test_column_names_may_hold_anything(delta_harness):
    """Spaces, quotes and dots in a column's name are kept."""
    odd = 'a b.c"`(x)=é'
    table = replace(PRICES, columns=(*PRICES.columns, Column(odd, "text")))
    writer = delta_harness.start(table)
    writer.write(table, {0: ((1,), {"id": 1, "amount": None, odd: "kept"})})
    assert [row[odd] for row in writer.held(table).values()] == ["kept"]


def test_paths_never_meet():
    """Names that differ have directories that differ, all of plain letters."""
    names = ["a", "A", "a b", "a~20b", "a/b", "..", "ä", "a.b"]
    paths = {table_path("file:///lake", replace(PRICES, name=name)) for name in names}
    assert len(paths) == len(names)
    assert all(path.startswith("file:///lake/app.") and path.count("/") == 4 for path in paths)
