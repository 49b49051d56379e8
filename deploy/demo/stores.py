"""The source and its four copies: where they are, what they hold, whether they are equal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from psycopg import sql
from psycopg.rows import dict_row

from cdc import wiring
from cdc.change import Row, Table
from cdc.compare import Difference, compare
from cdc.config import Config
from cdc.errors import CdcError
from deploy.demo.shop import TABLES
from sinks import types
from sinks.delta import DeltaSettings, table_path

CONFIG = """\
name = "shop"

[source]
host = "{CDC_PG_HOST}"
port = {CDC_PG_PORT}
database = "{CDC_PG_DATABASE}"
user = "{CDC_PG_USER}"
password = "${{CDC_PG_PASSWORD}}"
tables = [{tables}]

[kafka]
bootstrap = "{CDC_KAFKA}"

[connect]
url = "{CDC_CONNECT_URL}"

[run]
report_every = "1s"

[[sinks]]
name = "search"
type = "elasticsearch"
url = "{CDC_ES_URL}"

[[sinks]]
name = "cache"
type = "redis"
url = "{CDC_REDIS_URL}"

[[sinks]]
name = "warehouse"
type = "postgres"
host = "{CDC_PG_HOST}"
port = {CDC_PG_PORT}
database = "warehouse"
user = "{CDC_PG_USER}"
password = "${{CDC_PG_PASSWORD}}"

[[sinks]]
name = "lake"
type = "delta"
path = "{lake}"
"""


def config_text(env: Mapping[str, str], lake: Path) -> str:
    return CONFIG.format(tables=", ".join(f'"{table}"' for table in TABLES), lake=lake, **env)


class Stores:
    """Reads each store with its own client; Delta with a reader that is not Spark."""

    def __init__(self, config: Config, tables: Mapping[str, Table]) -> None:
        self._config = config
        self.tables = {table.full_name: table for table in tables.values()}
        self.sinks = {sink.name: sink for sink in config.sinks}

    def count(self, sink: str, table: str) -> int:
        """Rows held now."""
        settings = self.sinks[sink]
        if isinstance(settings, DeltaSettings):
            return _delta_count(self._delta_path(settings, table))
        with closing(wiring.open_sink(settings)) as opened:
            return sum(1 for _ in opened.rows(self.tables[table]))

    def compare(self, sink: str, table: str) -> Difference:
        wanted = self.tables[table]
        with self._source() as source:
            rows = _source_rows(source, wanted)
            return compare(wanted, rows, self._rows(sink, table), types.canonical)

    def say(self, sink: str, table: str) -> str:
        """The comparison as a sentence, or why there is none yet."""
        try:
            return str(self.compare(sink, table))
        except (CdcError, DeltaError) as error:
            return f"cannot be read yet: {type(error).__name__}"

    def is_equal(self, sink: str, table: str) -> bool:
        """Whether they are equal now; a store that cannot be read yet is not."""
        try:
            return self.compare(sink, table).is_equal
        except (CdcError, DeltaError):
            return False

    def _rows(self, sink: str, table: str) -> Iterator[Row]:
        settings = self.sinks[sink]
        if isinstance(settings, DeltaSettings):
            yield from _delta_rows(self._delta_path(settings, table))
            return
        with closing(wiring.open_sink(settings)) as opened:
            for row, _version in opened.rows(self.tables[table]):
                yield row

    def _delta_path(self, settings: DeltaSettings, table: str) -> str:
        return table_path(settings.path, self.tables[table])

    def _source(self) -> psycopg.Connection[Any]:
        source = self._config.source
        return psycopg.connect(
            host=source.host,
            port=source.port,
            dbname=source.database,
            user=source.user,
            password=source.password.get_secret_value(),
            autocommit=True,
        )


def _source_rows(connection: psycopg.Connection[Any], table: Table) -> Iterator[Row]:
    """Every column as text, the one form of PostgreSQL's own that needs no type of ours."""
    columns = sql.SQL(", ").join(
        sql.SQL("{}::text").format(sql.Identifier(column.name)) for column in table.columns
    )
    query = sql.SQL("SELECT {} FROM {}").format(columns, sql.Identifier(table.schema, table.name))
    with connection.cursor(row_factory=dict_row) as cursor:
        yield from cursor.stream(query)


def _delta_count(path: str) -> int:
    actions = DeltaTable(path).get_add_actions(flatten=True)
    return int(sum(actions.column("num_records").to_pylist()))


def _delta_rows(path: str) -> Iterator[Row]:
    for batch in DeltaTable(path).to_pyarrow_dataset().to_batches():
        yield from batch.to_pylist()


def directions(env: Mapping[str, str], password_file: Path, lake: Path) -> list[tuple[str, str]]:
    """How to look into each store, as (store, command)."""
    redis = env["CDC_REDIS_URL"]
    pg = f"PGPASSFILE={password_file} psql -h {env['CDC_PG_HOST']} -p {env['CDC_PG_PORT']}"
    user = env["CDC_PG_USER"]
    look = f"import deltalake; print(deltalake.DeltaTable('{lake}/shop.orders').to_pandas())"
    return [
        ("source", f"{pg} -U {user} -d {env['CDC_PG_DATABASE']} -c 'TABLE shop.orders LIMIT 3'"),
        ("search", f"curl '{env['CDC_ES_URL']}/shop.orders/_search?size=3&pretty'"),
        ("cache", f"redis-cli -u {redis} HGETALL '{{shop.orders:1}}'"),
        ("warehouse", f"{pg} -U {user} -d warehouse -c 'TABLE shop_orders LIMIT 3'"),
        ("lake", f'{sys.executable} -c "{look}"'),
    ]


def passfile_line(env: Mapping[str, str]) -> str:
    parts = ("CDC_PG_HOST", "CDC_PG_PORT", "CDC_PG_USER", "CDC_PG_PASSWORD")
    host, port, user, password = (env[part] for part in parts)
    return f"{host}:{port}:*:{user}:{password}\n"
