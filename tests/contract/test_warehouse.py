"""What is special about the PostgreSQL warehouse."""

from __future__ import annotations

import random
import string
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import psycopg
import pytest
from pydantic import SecretStr

from cdc.change import Change, Column, Slice, Table, version_of
from cdc.errors import SinkUnavailable, SinkUnusable
from cdc.sink import Entry, Refusal, Written
from sinks.warehouse import WarehouseSink, target_name
from sinks.warehouse_copy import Plan
from tests.contract.conftest import TOPIC_ID, topic_of
from tests.support.waiting import wait_until

ORDERS = Table(
    "app", "orders", (Column("id", "integer", nullable=False), Column("n", "integer")), ("id",)
)
NAMED = Table("app", "named", (Column("k", "text", nullable=False), Column("n", "integer")), ("k",))
TOPIC = topic_of(ORDERS)
SECRET = "row value 4711"


def order(key, n):
    return (key,), {"id": key, "n": n}


def gone(*key):
    return key, None


def piece(table, changes, next_offset):
    found = (Change(*change, version_of(1, offset)) for offset, change in sorted(changes.items()))
    return Slice(table, topic_of(table), 0, next_offset, tuple(found))


@pytest.fixture
def writer(postgres_harness):
    return postgres_harness.start(ORDERS)


def on_server(writer, statement):
    with writer.sink._connect() as connection:
        connection.autocommit = True
        connection.execute(f"SET search_path TO {writer.sink._settings.target_schema}")
        return connection.execute(statement)


def offsets(writer):
    """What the ledger says, without a claim."""
    lines = on_server(writer, "SELECT partition, next_offset FROM cdc_ledger WHERE topic <> ''")
    return {partition: at for partition, at in lines.fetchall() if at is not None}


def counted(monkeypatch):
    """A list that grows with every attempt to apply changes, by their number."""
    apply, sizes = Plan.apply, []

    def counting(self, connection, changes, finish):
        sizes.append(len(changes))
        return apply(self, connection, changes, finish)

    monkeypatch.setattr(Plan, "apply", counting)
    return sizes


def is_waiting(writer, what):
    """Whether a session waits for a lock of this test's ledger, with *what* in its query."""
    waiting = on_server(
        writer, "SELECT query FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    ).fetchall()
    schema = writer.sink._settings.target_schema
    return any(schema in query and what in query for (query,) in waiting)


def test_wrong_password_stops_with_a_hint(writer):
    """A refused login is not retried, and says what to look at."""
    settings = writer.sink._settings.model_copy(update={"password": SecretStr("wrong")})
    with pytest.raises(SinkUnusable, match="does not let us in") as caught:
        WarehouseSink(settings).prepare({})
    assert "password" in caught.value.hint


def test_closed_port_is_unavailable(writer):
    """A server that does not answer may come back."""
    settings = writer.sink._settings.model_copy(update={"port": 1})
    with pytest.raises(SinkUnavailable, match="not reachable"):
        WarehouseSink(settings).claim()


def test_value_that_does_not_fit_is_refused_by_its_place(writer):
    """The refusal has partition, offset, SQLSTATE and column, and nothing of the row."""
    written = writer.write(ORDERS, {4: order(1, 1), 5: order(2, SECRET), 6: gone(3)}, partition=1)
    assert written == Written(0, 0, (Refusal(1, 5, "InvalidTextRepresentation 22P02, column n"),))
    assert writer.held(ORDERS) == {}
    assert offsets(writer) == {}
    assert writer.write(ORDERS, {4: order(1, 1), 6: gone(3)}, partition=1) == Written(2, 0)


def test_every_refusal_of_a_slice_is_found_at_once(writer):
    """Bad changes of several kinds, at both ends and side by side, are told together."""
    bad = {0: SECRET, 1: 1 << 31, 700: {"a": 1}, 701: SECRET, 1999: [1]}
    changes = {n: order(n, bad.get(n, n)) for n in range(2000)}
    refused = writer.write(ORDERS, changes).refused
    assert [refusal.offset for refusal in refused] == [*bad]
    assert all("column n" in refusal.reason for refusal in refused)
    for n in bad:
        del changes[n]
    assert writer.write(ORDERS, changes) == Written(1995, 0)


def test_row_too_big_for_the_key_is_found_among_many(postgres_harness, monkeypatch):
    """The upsert names no line; the change that fails is found all the same, in few attempts."""
    writer = postgres_harness.start(NAMED)
    big = "".join(random.Random(7).choices(string.ascii_letters, k=6000))
    changes = {n: ((f"k{n}",), {"k": f"k{n}", "n": n}) for n in range(1500)}
    changes[1234] = ((big,), {"k": big, "n": 1})
    attempts = counted(monkeypatch)
    refused = writer.write(NAMED, changes).refused
    assert refused == (Refusal(0, 1234, "ProgramLimitExceeded 54000, constraint app_named_pkey"),)
    assert len(attempts) <= 15
    assert sum(attempts) < 3.1 * len(changes)
    assert writer.held(NAMED) == {}
    del changes[1234]
    assert writer.write(NAMED, changes) == Written(1499, 0)


def test_constraint_of_the_owner_refuses_only_what_breaks_it(writer):
    """Two rows that cannot stand together: the later one is refused, the earlier is not."""
    on_server(writer, "ALTER TABLE app_orders ADD UNIQUE (n) DEFERRABLE INITIALLY DEFERRED")
    refused = writer.write(ORDERS, {0: order(9, 7), 1: order(5, 8), 2: order(1, 7)}).refused
    assert refused == (Refusal(0, 2, "UniqueViolation 23505, constraint app_orders_n_key"),)
    assert writer.write(ORDERS, {0: order(9, 7), 1: order(5, 8)}) == Written(2, 0)


def test_row_may_take_over_what_was_unique_to_one_that_is_gone(writer):
    """Deletes go first, so a constraint of the owner's sees the rows as the source has them."""
    on_server(writer, "ALTER TABLE app_orders ADD UNIQUE (n)")
    writer.write(ORDERS, {0: order(1, 7)})
    assert writer.write(ORDERS, {1: order(2, 7), 2: gone(1)}) == Written(2, 0)


def test_value_that_has_no_text_is_refused(postgres_harness):
    """What cannot even be written down for the server is refused with its column."""
    table = replace(ORDERS, columns=(*ORDERS.columns, Column("b", "bytea"), Column("t", "text[]")))
    writer = postgres_harness.start(table)
    rows = [{"b": "AP8="}, {"b": "not base64"}, {"t": ["a", "b\0c"]}, {"t": ["d", "e\\f"]}]
    changes = {n: ((n,), {"id": n, **row}) for n, row in enumerate(rows)}
    refused = writer.write(table, changes).refused
    assert [(each.offset, each.reason) for each in refused] == [
        (1, "no text (Error), column b"),
        (2, "no text (ValueError), column t"),
    ]
    assert writer.write(table, {0: changes[0], 3: changes[3]}) == Written(2, 0)
    assert [row["t"] for row in writer.held(table).values()] == [None, ("d", "e\\f")]


@pytest.mark.parametrize("value", ["1\t1\tf\n2", "\\N", "1\0", "\\.\n", "\r", "1\n1"])
def test_text_in_a_number_cannot_move_its_neighbours(writer, value):
    """What COPY takes for the end of a field or a line is refused with its own change."""
    changes = {0: order(1, 10), 1: order(2, value), 2: order(3, 30)}
    assert [refusal.offset for refusal in writer.write(ORDERS, changes).refused] == [1]
    del changes[1]
    assert writer.write(ORDERS, changes) == Written(2, 0)
    assert [row["n"] for row in writer.held(ORDERS).values()] == [10, 30]


def test_value_that_looks_like_an_error_puts_no_blame_on_others(postgres_harness):
    """A value that quotes the server's words for another line is refused itself."""
    table = replace(ORDERS, columns=(*ORDERS.columns, Column("j", "jsonb")))
    writer = postgres_harness.start(table)
    changes = {n: ((n,), {"id": n, "n": n, "j": "{}"}) for n in range(5)}
    changes[3][1]["j"] = "\nCOPY cdc_stage_0, line 1, column n: x"
    written = writer.write(table, changes)
    assert [refusal.offset for refusal in written.refused] == [3]


def test_no_warning_of_the_driver_quotes_a_row(writer, caplog):
    """Two bad changes at once, one for the server and one for us: neither is logged."""
    changes = {n: order(n, n) for n in range(1200)}
    changes[0], changes[1100] = order(0, SECRET), order(1100, "a\0" + SECRET)
    assert len(writer.write(ORDERS, changes).refused) == 2
    assert SECRET not in caplog.text


def test_repair_puts_back_what_was_left_out(writer):
    """A change below the ledger is applied under its own version, and the ledger stays."""
    writer.write(ORDERS, {0: order(1, 1), 5: order(2, 2)})
    left_out = piece(ORDERS, {3: order(3, 3), 2: order(2, 9)}, next_offset=6)
    assert writer.sink.repair(left_out) == Written(1, 1)
    assert {key: row["n"] for (key,), row in writer.held(ORDERS).items()} == {1: 1, 2: 2, 3: 3}
    assert offsets(writer) == {0: 6}
    assert writer.sink.repair(left_out) == Written(0, 2)


def test_repair_tells_what_is_refused_still(writer):
    """A change that still does not fit is told, not raised, and nothing of its slice is kept."""
    writer.write(ORDERS, {0: order(1, 1), 5: order(5, 5)})
    again = piece(ORDERS, {0: order(1, 2), 3: order(3, SECRET)}, next_offset=6)
    written = writer.sink.repair(again)
    assert [refusal.offset for refusal in written.refused] == [3]
    assert writer.held(ORDERS).keys() == {(1,), (5,)}


def test_repair_waits_for_the_writer_and_then_sees_its_delete(writer, postgres_harness):
    """No tombstone is kept, so a repair that was overtaken by a delete does nothing."""
    sink = postgres_harness.open(writer.tables)
    left_out = piece(ORDERS, {3: order(3, 3)}, next_offset=6)
    with writer.sink._connect() as busy, ThreadPoolExecutor() as pool:
        busy.execute(f"SET search_path TO {sink._settings.target_schema}")
        # as a writer does that is at work on the offsets up to 9
        busy.execute("UPDATE cdc_ledger SET next_offset = 9 WHERE topic <> '' AND partition = 0")
        repair = pool.submit(sink.repair, left_out)
        wait_until(lambda: is_waiting(writer, "next_offset"))
        busy.commit()
        assert repair.result(60) is None
    assert writer.held(ORDERS) == {}


def test_sweep_waits_for_writers_and_stops_claims(writer):
    """While rows are swept nobody takes over, and no writer of the topic is at work."""
    writer.write(ORDERS, {0: order(1, 1)})
    with writer.sink._connect() as busy, ThreadPoolExecutor() as pool:
        busy.execute(f"SET search_path TO {writer.sink._settings.target_schema}")
        busy.execute("SELECT FROM cdc_ledger WHERE partition = 1 FOR UPDATE")
        sweep = pool.submit(writer.sink.sweep, writer.token, TOPIC, ORDERS)
        wait_until(lambda: is_waiting(writer, "ORDER BY partition"))
        with pytest.raises(psycopg.errors.LockNotAvailable):
            on_server(writer, "SELECT FROM cdc_ledger WHERE topic = '' FOR UPDATE NOWAIT")
        busy.rollback()
        assert sweep.result(60) == 0


def test_ledger_from_before_sweeps_gets_their_column(writer, postgres_harness):
    """An older ledger reads as swept, and can be assigned anew."""
    writer.write(ORDERS, {0: order(1, 1)})
    on_server(writer, "ALTER TABLE cdc_ledger DROP COLUMN unswept")
    sink = postgres_harness.open(writer.tables)
    claim = sink.claim()
    assert claim.entries == {TOPIC: Entry(TOPIC_ID, 1, 2, {0: 1})}
    unswept = {TOPIC: Entry("another", 2, 2, unswept=True)}
    sink.assign(claim.token, unswept)
    assert sink.claim().entries == unswept


def test_lost_ledger_is_read_from_the_rows(writer):
    """Rows without a ledger tell their generation, so that the next one can be opened."""
    writer.sink.assign(writer.token, {TOPIC: Entry(TOPIC_ID, 3, 2)})
    writer.generation = 3
    writer.write(ORDERS, {0: order(1, 1)})
    on_server(writer, "DELETE FROM cdc_ledger")
    assert writer.sink.claim().entries == {TOPIC: Entry("", 3, 0)}


def test_lost_connection_is_unavailable_and_mended(writer):
    """After the server has cut the connection, the next write opens another."""
    writer.write(ORDERS, {0: order(1, 1)})
    pid = writer.sink._connection.info.backend_pid
    on_server(writer, f"SELECT pg_terminate_backend({pid}, 5000)")
    with pytest.raises(SinkUnavailable):
        writer.write(ORDERS, {1: order(1, 2)})
    assert writer.write(ORDERS, {1: order(1, 2)}) == Written(1, 0)


def test_widened_column_is_widened(writer):
    """When the source makes an integer a bigint, the mirror follows and keeps its rows."""
    writer.write(ORDERS, {0: order(1, 1)})
    wide = replace(ORDERS, columns=(ORDERS.columns[0], Column("n", "bigint")))
    writer.sink.prepare({"shop.app.orders": wide})
    writer.write(wide, {1: order(2, 1 << 40)})
    assert {row["n"] for row in writer.held(wide).values()} == {1, 1 << 40}


def test_column_of_another_type_stops(writer):
    """A change of type that cannot be followed is refused before anything is written."""
    other = replace(ORDERS, columns=(ORDERS.columns[0], Column("n", "date")))
    with pytest.raises(SinkUnusable, match="is integer and should be date"):
        writer.sink.prepare({"shop.app.orders": other})


def test_foreign_table_is_left_alone(postgres_harness):
    """A table that is not ours is neither written nor changed."""
    writer = postgres_harness.start()
    on_server(writer, "CREATE TABLE app_orders (id integer PRIMARY KEY, n integer)")
    with pytest.raises(SinkUnusable, match="_cdc_version"):
        writer.sink.prepare({"shop.app.orders": ORDERS})


def test_missing_right_is_named(postgres_harness):
    """A right that is missing is found before the first write."""
    writer = postgres_harness.start(ORDERS)
    role = f"reader_{writer.sink._settings.target_schema}"
    schema = writer.sink._settings.target_schema
    on_server(writer, f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    try:
        on_server(writer, f"GRANT USAGE ON SCHEMA {schema} TO {role}")
        on_server(writer, f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}")
        settings = writer.sink._settings.model_copy(
            update={"user": role, "password": SecretStr("x")}
        )
        with (
            closing(WarehouseSink(settings)) as sink,
            pytest.raises(SinkUnusable, match="lacks INSERT, UPDATE, DELETE") as caught,
        ):
            sink.prepare({"shop.app.orders": ORDERS})
        assert caught.value.hint.startswith("GRANT INSERT, UPDATE, DELETE")
    finally:
        on_server(writer, f"DROP OWNED BY {role}")
        on_server(writer, f"DROP ROLE {role}")


def test_ledger_and_rows_move_together(writer):
    """When the ledger cannot move, no row has moved either."""
    on_server(writer, "ALTER TABLE cdc_ledger ADD CHECK (coalesce(next_offset, 0) < 10)")
    with pytest.raises(SinkUnusable, match="23514"):
        writer.write(ORDERS, {20: order(1, 1)})
    assert writer.held(ORDERS) == {}


def test_names_never_meet():
    """Tables whose names are equal when joined carelessly have tables of their own."""
    names = [("a", "b_c"), ("a_b", "c"), ("a", "x" * 63), ("a", "x" * 62), ("a_b", "x" * 62)]
    found = {target_name(replace(ORDERS, schema=schema, name=name)) for schema, name in names}
    assert len(found) == len(names)
    assert all(len(name) <= 63 for name in found)
    assert target_name(ORDERS) == "app_orders"


def test_only_known_errors_leave(writer):
    """A driver error without a known state is classified, not passed on."""
    with pytest.raises(SinkUnusable), writer.sink._errors("test"):
        raise psycopg.DataError(SECRET)
