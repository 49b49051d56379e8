"""What is special about Delta Lake."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.change import Column, Table
from cdc.errors import SinkFenced, SinkUnusable
from cdc.sink import Entry, Written
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


def test_value_that_delta_cannot_hold_stops(writer):
    """A decimal has no NaN: the sink stops and names the column, it does not write NULL."""
    with pytest.raises(SinkUnusable, match="amount") as caught:
        writer.write(PRICES, {0: price(1, "1.50"), 1: price(2, "NAN")})
    assert "NAN" not in str(caught.value)
    assert writer.held(PRICES) == {}


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


def interrupted(writer, monkeypatch, happens):
    """Let *happens* take place after the writer has looked at the fence, before Delta begins."""
    merge = writer.sink._merge

    def late(staged, table):
        happens()
        return merge(staged, table)

    monkeypatch.setattr(writer.sink, "_merge", late)


def test_old_holder_cannot_bring_a_row_back(writer, delta_harness, monkeypatch):
    """A batch that was held up while another writer took over and went on is not applied."""

    def taken_over():
        sink = delta_harness.open(writer.tables)
        new = replace(writer, sink=sink, token=sink.claim().token)
        new.write(PRICES, {0: price(1, "1.50")})
        new.write(PRICES, {1: gone(1)})

    interrupted(writer, monkeypatch, taken_over)
    with pytest.raises(SinkFenced):
        writer.write(PRICES, {0: price(1, "1.50")})
    assert writer.held(PRICES) == {}


def test_last_batch_of_an_old_holder_counts(writer, delta_harness, monkeypatch):
    """What was written between a claim and the first batch after it stands in the ledger."""
    sink = delta_harness.open(writer.tables)
    tokens = []
    interrupted(writer, monkeypatch, lambda: tokens.append(sink.claim().token))
    with pytest.raises(SinkFenced):
        writer.write(PRICES, {0: price(1, "1.50"), 1: gone(2)})
    new = replace(writer, sink=sink, token=tokens[0])
    assert new.write(PRICES, {0: price(2, "9.99")}) == Written(0, 1)
    assert new.held(PRICES).keys() == {(1,)}
    again = delta_harness.open(writer.tables).claim()
    assert again.token > tokens[0]
    assert again.entries[TOPIC].offsets == {0: 2}


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
