"""One harness per kind of target: opens it on its real server, in a namespace of its own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from cdc.change import Change, Slice, Table, key_text, version_of
from cdc.config import Outside
from cdc.sink import Entry, Written
from sinks.types import canonical

KINDS = ("memory", "elasticsearch", "redis", "postgres", "delta")
TOPIC_ID = "pXdBTQVcQAqTZsQpZ0hYmA"


@dataclass
class Harness:
    """A kind of target. Every sink that `open` gives stands for a process of its own."""

    kind: str
    make: Callable[[], Any]
    apply: Callable[[Any, int, Slice], Written]
    opened: list[Any] = field(default_factory=list)

    def open(self, tables: Mapping[str, Table]) -> Any:
        sink = self.make()
        self.opened.append(sink)
        sink.prepare(tables)
        return sink

    def start(self, *tables: Table, generation: int = 1, partitions: int = 2) -> Writer:
        """A writer that holds the claim, with every table's topic assigned and nothing read."""
        topics = {topic_of(table): table for table in tables}
        sink = self.open(topics)
        token = sink.claim().token
        entry = Entry(TOPIC_ID, generation, partitions)
        sink.assign(token, dict.fromkeys(topics, entry))
        return Writer(self, sink, token, topics)


@dataclass
class Writer:
    harness: Harness
    sink: Any
    token: int
    tables: Mapping[str, Table]
    generation: int = 1

    def write(
        self, table: Table, changes: Mapping[int, tuple[tuple[Any, ...], Any]], partition: int = 0
    ) -> Written:
        """Apply *changes*, offset -> key and row, as one slice that ends after the last offset."""
        piece = Slice(
            table,
            topic_of(table),
            partition,
            max(changes) + 1,
            tuple(
                Change(key, row, version_of(self.generation, offset))
                for offset, (key, row) in sorted(changes.items())
            ),
        )
        return self.harness.apply(self.sink, self.token, piece)

    def held(self, table: Table) -> dict[Any, dict[str, Any]]:
        """What the target has of *table*, by key; every value in its canonical form."""
        found = {}
        for row, _ in self.sink.rows(table):
            values = canonical_row(table, row)
            found[tuple(values[name] for name in table.key)] = values
        return found


def topic_of(table: Table) -> str:
    return f"shop.{table.full_name}"


def canonical_row(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
    return {column.name: canonical(column.type, row.get(column.name)) for column in table.columns}


def _write(sink: Any, token: int, piece: Slice) -> Written:
    return sink.write(token, piece)


@pytest.fixture(params=KINDS)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    made: Harness = request.getfixturevalue(f"{request.param}_harness")
    yield made
    for sink in made.opened:
        sink.close()


@pytest.fixture
def memory_harness() -> Harness:
    from sinks.memory import MemorySink

    sink = MemorySink()
    return Harness("memory", lambda: sink, _write)


@pytest.fixture
def elasticsearch_harness(stack: dict[str, str]) -> Iterator[Harness]:
    import requests

    from sinks.elasticsearch import ElasticsearchSettings, ElasticsearchSink

    prefix = f"contract-{uuid.uuid4().hex[:12]}-"
    url = stack["CDC_ES_URL"]
    settings = ElasticsearchSettings(
        name="search", type="elasticsearch", url=url, index_prefix=prefix, replicas=0
    )
    yield Harness("elasticsearch", lambda: ElasticsearchSink(settings), _write)
    with requests.Session() as http:
        found = http.get(f"{url}/{prefix}*?expand_wildcards=all", timeout=30).json()
        for index in found:
            http.delete(f"{url}/{index}", timeout=30)


@pytest.fixture
def redis_harness(stack: dict[str, str]) -> Iterator[Harness]:
    import redis

    from sinks.redis import RedisSettings, RedisSink

    prefix = f"contract:{uuid.uuid4().hex[:12]}:"
    url = stack["CDC_REDIS_URL"]
    settings = RedisSettings(name="cache", type="redis", url=url, key_prefix=prefix)
    yield Harness("redis", lambda: RedisSink(settings), _write)
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(match=f"{prefix}*"):
            client.delete(key)


@pytest.fixture
def postgres_harness(stack: dict[str, str]) -> Iterator[Harness]:
    import psycopg
    from psycopg import sql

    from sinks.warehouse import WarehouseSettings, WarehouseSink

    schema = f"contract_{uuid.uuid4().hex[:12]}"
    settings = WarehouseSettings(
        name="warehouse",
        type="postgres",
        host=stack["CDC_PG_HOST"],
        port=int(stack["CDC_PG_PORT"]),
        database=stack["CDC_PG_DATABASE"],
        user=stack["CDC_PG_USER"],
        password=Outside(stack["CDC_PG_PASSWORD"]),
        target_schema=schema,
    )
    made = Harness("postgres", lambda: WarehouseSink(settings), _write)
    yield made
    for sink in made.opened:
        sink.close()
    with psycopg.connect(
        host=settings.host,
        port=settings.port,
        dbname=settings.database,
        user=settings.user,
        password=settings.password.get_secret_value(),
        autocommit=True,
    ) as connection:
        connection.execute(
            sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema))
        )


@pytest.fixture
def delta_harness(spark: Any, tmp_path: Any) -> Harness:
    import pyarrow as pa

    from sinks.delta import DeltaSettings, DeltaSink

    settings = DeltaSettings(name="lake", type="delta", path=str(tmp_path / "lake"))

    def merge(sink: Any, token: int, piece: Slice) -> Written:
        changes = piece.changes
        rows = [None if c.row is None else orjson.dumps(c.row).decode() for c in changes]
        lines = pa.table(
            {
                "partition": pa.array([piece.partition] * len(changes), pa.int32()),
                "key": pa.array([key_text(change.key) for change in changes], pa.string()),
                "row": pa.array(rows, pa.string()),
                "version": pa.array([change.version for change in changes], pa.int64()),
            }
        )
        offsets = {piece.partition: piece.next_offset}
        frame = spark.createDataFrame(lines)
        return sink.merge(token, piece.topic, piece.table, frame, offsets)

    return Harness("delta", lambda: DeltaSink(settings, spark), merge)
