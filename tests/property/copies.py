"""Backups of a target, taken and brought back behind its back; and the loss of its ledger."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any

import redis
from psycopg import sql

from cdc.change import Table
from sinks.memory import MemorySink
from sinks.redis import RedisSink, table_head
from sinks.warehouse import WarehouseSink

Restore = Callable[[], None]


@singledispatch
def backup(sink: Any, table: Table) -> Restore:
    """Copy the rows of *table* and the ledger; the answer puts them back."""
    raise NotImplementedError(type(sink).__name__)


@singledispatch
def lose_ledger(sink: Any) -> None:
    """Remove the ledger and leave the rows."""
    raise NotImplementedError(type(sink).__name__)


@backup.register
def _(sink: MemorySink, table: Table) -> Restore:
    rows, entries = dict(sink._held[table.full_name]), dict(sink._entries)

    def restore() -> None:
        sink._held[table.full_name], sink._entries = dict(rows), dict(entries)

    return restore


@lose_ledger.register
def _(sink: MemorySink) -> None:
    sink._entries = {}


def _redis(sink: RedisSink) -> redis.Redis:
    return redis.Redis.from_url(sink._settings.url)  # the sink's own takes all values for text


def _redis_keys(client: redis.Redis, head: str) -> list[bytes]:
    return list(client.scan_iter(f"{head}*", count=1000))


@backup.register
def _(sink: RedisSink, table: Table) -> Restore:
    heads = (sink._ledger, table_head(sink._settings.key_prefix, table))
    with _redis(sink) as client:
        copied = {key: client.dump(key) for head in heads for key in _redis_keys(client, head)}

    def restore() -> None:
        with _redis(sink) as client:
            for head in heads:
                client.delete(b"", *_redis_keys(client, head))
            for key, value in copied.items():
                client.restore(key, 0, value)

    return restore


@lose_ledger.register
def _(sink: RedisSink) -> None:
    with _redis(sink) as client:
        client.delete(*_redis_keys(client, sink._ledger))


@backup.register
def _(sink: WarehouseSink, table: Table) -> Restore:
    copied = []
    with sink._connect() as connection:
        for held in (sink._ledger, sink._target(table)):
            with connection.cursor().copy(sql.SQL("COPY {} TO STDOUT").format(held)) as copy:
                copied.append((held, b"".join(copy)))

    def restore() -> None:
        with sink._connect() as connection:
            for held, lines in copied:
                connection.execute(sql.SQL("DELETE FROM {}").format(held))
                with connection.cursor().copy(sql.SQL("COPY {} FROM STDIN").format(held)) as copy:
                    copy.write(lines)

    return restore


@lose_ledger.register
def _(sink: WarehouseSink) -> None:
    with sink._connect() as connection:
        connection.execute(sql.SQL("DELETE FROM {}").format(sink._ledger))
