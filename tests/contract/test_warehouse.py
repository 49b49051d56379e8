"""What is special about the PostgreSQL warehouse."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import psycopg
import pytest
from pydantic import SecretStr

from cdc.change import Column, Table
from cdc.errors import SinkUnavailable, SinkUnusable
from cdc.sink import Written
from sinks.warehouse import WarehouseSink, target_name

ORDERS = Table(
    "app", "orders", (Column("id", "integer", nullable=False), Column("n", "integer")), ("id",)
)
SECRET = "row value 4711"


def order(key, n):
    return (key,), {"id": key, "n": n}


@pytest.fixture
def writer(postgres_harness):
    return postgres_harness.start(ORDERS)


def on_server(writer, statement):
    with writer.sink._connect() as connection:
        connection.autocommit = True
        connection.execute(f"SET search_path TO {writer.sink._settings.target_schema}")
        return connection.execute(statement)


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


def test_value_that_does_not_fit_is_named_by_its_place(writer):
    """The message has table, partition, column and offset, and nothing of the row."""
    with pytest.raises(SinkUnusable) as caught:
        writer.write(ORDERS, {4: order(1, 1), 5: order(2, SECRET)})
    message = str(caught.value)
    assert SECRET not in message
    assert all(part in message for part in ("app.orders", "partition 0", "offset 5", "column n"))
    assert writer.held(ORDERS) == {}
    assert writer.write(ORDERS, {4: order(1, 1)}) == Written(1, 0)


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
