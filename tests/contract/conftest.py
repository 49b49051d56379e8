"""One harness per kind of target: opens it on its real server, in a namespace of its own."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest

from cdc.change import Change, Slice, Table, key_text, version_of
from cdc.config import Outside
from cdc.errors import SinkUnavailable
from cdc.ledger import TopicState, plan
from cdc.sink import Entry, Written
from sinks.types import canonical
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until

KINDS = ("memory", "elasticsearch", "redis", "postgres", "delta")
TOPIC_ID = "pXdBTQVcQAqTZsQpZ0hYmA"
PARTITIONS = 2
TOO_BIG = 1 << 40  # for an integer column

Log = Sequence[tuple[tuple[Any, ...], Any]]  # key and row of each change; its place is the offset


def _nothing() -> None:
    pass


@dataclass
class Harness:
    """A kind of target. Every sink that `open` gives stands for a process of its own.

    What can happen to a target, beside what we write to it:
    - *lose_ledger*: the ledger is gone, the rows stay;
    - *keep_copy*: take a copy of rows and ledger; what it returns brings that copy back;
    - *forget_deletes*: the target no longer knows what was deleted, as after a long time.
    """

    kind: str
    make: Callable[[], Any]
    apply: Callable[[Any, int, Slice], Written]
    lose_ledger: Callable[[], None]
    keep_copy: Callable[[], Callable[[], None]]
    forget_deletes: Callable[[], None] = _nothing
    never: Any = TOO_BIG  # in an integer column, a value that this kind can never take
    server: tuple[str, int] | None = None
    make_at: Callable[[str, int], Any] | None = None  # a sink that looks for the server there
    opened: list[Any] = field(default_factory=list)

    def open(self, tables: Mapping[str, Table]) -> Any:
        sink = self.make()
        self.opened.append(sink)
        sink.prepare(tables)
        return sink

    def start(self, *tables: Table, generation: int = 1) -> Writer:
        """A writer that holds the claim, with every table's topic assigned and nothing read."""
        topics = {topic_of(table): table for table in tables}
        sink = self.open(topics)
        token = sink.claim().token
        entry = Entry(TOPIC_ID, generation, PARTITIONS)
        sink.assign(token, dict.fromkeys(topics, entry))
        return Writer(self, sink, token, topics, generation)

    def follow(self, table: Table, log: Log, topic_id: str = TOPIC_ID) -> Writer:
        """Do as the daemon does: open from the ledger, read *log* to its end, sweep if need be."""
        topic = topic_of(table)
        sink = self.open({topic: table})
        claim = sink.claim()
        state = TopicState(topic_id, PARTITIONS, {0: 0, 1: 0}, {0: len(log), 1: 0})
        entries = plan([topic], claim.entries, {topic: state})
        sink.assign(claim.token, entries)
        entry = entries[topic]
        writer = Writer(self, sink, claim.token, {topic: table}, entry.generation)
        writer.write_log(table, log, entry.offsets.get(0, 0))
        if entry.unswept:
            sink.sweep(claim.token, topic, table)
        return writer

    @contextmanager
    def losing(self, writer: Writer) -> Iterator[tuple[Writer, Callable[[int], None]]]:
        """The same writer on a line that loses an answer, after as many as it was told to spare.

        Where there is no line, the answer is lost between the sink and whoever called it.
        """
        if self.server is None or self.make_at is None:
            loss = _Loss(self.apply)
            yield replace(writer, harness=replace(self, apply=loss.apply)), loss.spare
            return
        with Proxy(*self.server) as proxy:

            def spare(answers: int) -> None:
                proxy.spared = answers
                proxy.mode = "lose_answers"

            sink = self.make_at(proxy.host, proxy.port)
            try:
                yield replace(writer, sink=sink), spare
            finally:
                sink.close()


@dataclass
class _Loss:
    """Applies, and then fails all the same."""

    inner: Callable[[Any, int, Slice], Written]
    spared: int = 0

    def spare(self, answers: int) -> None:
        self.spared = answers

    def apply(self, sink: Any, token: int, piece: Slice) -> Written:
        written = self.inner(sink, token, piece)
        if self.spared == 0:
            raise SinkUnavailable("the answer was lost")
        return written


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
        piece = self.piece(table, changes, max(changes) + 1, partition)
        return self.harness.apply(self.sink, self.token, piece)

    def write_log(self, table: Table, log: Log, start: int = 0) -> Written:
        """Apply *log* from *start* on, as one slice with the newest change of each key."""
        newest = {log[at][0]: at for at in range(start, len(log))}
        if not newest:
            return Written(0, 0)
        return self.write(table, {at: log[at] for at in newest.values()})

    def repair(
        self,
        table: Table,
        changes: Mapping[int, tuple[tuple[Any, ...], Any]],
        next_offset: int,
        partition: int = 0,
    ) -> Written | None:
        return self.sink.repair(self.piece(table, changes, next_offset, partition))

    def assign(self, table: Table, entry: Entry) -> None:
        self.sink.assign(self.token, {topic_of(table): entry})
        self.generation = entry.generation

    def entry(self, table: Table) -> Entry | None:
        """What the ledger says of *table*; to ask is to claim."""
        claim = self.sink.claim()
        self.token = claim.token
        return claim.entries.get(topic_of(table))

    def piece(
        self,
        table: Table,
        changes: Mapping[int, tuple[tuple[Any, ...], Any]],
        next_offset: int,
        partition: int = 0,
    ) -> Slice:
        return Slice(
            table,
            topic_of(table),
            partition,
            next_offset,
            tuple(
                Change(key, row, version_of(self.generation, offset))
                for offset, (key, row) in sorted(changes.items())
            ),
        )

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

    return memory_harness_of(
        MemorySink(refuses=lambda change: TOO_BIG in (change.row or {}).values())
    )


def memory_harness_of(sink: Any) -> Harness:
    """The harness of a reference sink, or of one made wrong on purpose."""

    def keep_copy() -> Callable[[], None]:
        copy = deepcopy((sink._held, sink._entries))

        def bring_back() -> None:
            sink._held, sink._entries = deepcopy(copy)

        return bring_back

    def forget_deletes() -> None:
        for held in sink._held.values():
            for key in [key for key, change in held.items() if change.row is None]:
                del held[key]

    def lose_ledger() -> None:
        sink._entries = {}

    return Harness(
        "memory",
        lambda: sink,
        _write,
        lose_ledger=lose_ledger,
        keep_copy=keep_copy,
        forget_deletes=forget_deletes,
    )


class _Indices:
    """The indices of one prefix, from the server's side."""

    def __init__(self, url: str, prefix: str) -> None:
        from elasticsearch import Elasticsearch

        self.client = Elasticsearch(url, request_timeout=60)
        self._prefix = prefix
        self._ledger = f"{prefix}cdc-ledger"

    def found(self) -> dict[str, Any]:
        return dict(self.client.indices.get(index=f"{self._prefix}*", expand_wildcards="all"))

    def remove(self) -> None:
        for index in self.found():
            self.client.indices.delete(index=index)

    def lose_ledger(self) -> None:
        self.client.indices.delete(index=self._ledger)

    def keep_copy(self) -> Callable[[], None]:
        copies = [(index, state, self._documents(index)) for index, state in self.found().items()]

        def bring_back() -> None:
            self.remove()
            for index, state, documents in copies:
                self._create(index, state, documents)

        return bring_back

    def _documents(self, index: str) -> list[dict[str, Any]]:
        from elasticsearch.helpers import scan

        self.client.indices.refresh(index=index)
        documents = []
        for hit in scan(self.client, index=index, version=True):
            document = {name: hit[name] for name in ("_index", "_id", "_source")}
            if index != self._ledger:
                document |= {"version": hit["_version"], "version_type": "external"}
            documents.append(document)
        return documents

    def _create(self, index: str, state: Any, documents: Sequence[dict[str, Any]]) -> None:
        """As the server's own restore does: the same in everything but the index's UUID."""
        from elasticsearch.helpers import bulk

        settings = {
            name: value
            for name, value in state["settings"]["index"].items()
            if name not in ("uuid", "version", "creation_date", "provided_name")
        }
        self.client.indices.create(
            index=index,
            aliases=state["aliases"],
            mappings=state["mappings"],
            settings={"index": settings},
        )
        bulk(self.client, documents)

    def forget_deletes(self) -> None:
        """Let the server forget them, and wait until it has forgotten one that came last."""
        for index in self.found().keys() - {self._ledger}:
            settings = {"index.gc_deletes": "1ms"}
            self.client.indices.put_settings(index=index, settings=settings)
            probe = {"index": index, "id": "probe"}
            delete = self.client.options(ignore_status=404).delete
            delete(**probe, version=2, version_type="external")
            wait_until(lambda index=index: self._takes_probe(index), within_s=60)
            delete(**probe)

    def _takes_probe(self, index: str) -> bool:
        from elasticsearch import ConflictError

        self.client.indices.refresh(index=index)  # the server looks for what it may forget
        probe = {"index": index, "id": "probe", "version": 1, "version_type": "external"}
        try:
            self.client.index(**probe, document={})
        except ConflictError:
            return False
        return True


@pytest.fixture
def elasticsearch_harness(stack: dict[str, str]) -> Iterator[Harness]:
    from sinks.elasticsearch import ElasticsearchSettings, ElasticsearchSink

    prefix = f"contract-{uuid.uuid4().hex[:12]}-"
    url = stack["CDC_ES_URL"]
    settings = ElasticsearchSettings(
        name="search", type="elasticsearch", url=url, index_prefix=prefix, replicas=0
    )
    indices = _Indices(url, prefix)
    yield Harness(
        "elasticsearch",
        lambda: ElasticsearchSink(settings),
        _write,
        lose_ledger=indices.lose_ledger,
        keep_copy=indices.keep_copy,
        forget_deletes=indices.forget_deletes,
        server=(urlsplit(url).hostname or "", urlsplit(url).port or 0),
        make_at=lambda host, port: ElasticsearchSink(
            settings.model_copy(update={"url": f"http://{host}:{port}"})
        ),
    )
    indices.remove()
    indices.client.close()


@pytest.fixture
def redis_harness(stack: dict[str, str]) -> Iterator[Harness]:
    import redis

    from sinks.redis import RedisSettings, RedisSink

    prefix = f"contract:{uuid.uuid4().hex[:12]}:"
    url = stack["CDC_REDIS_URL"]
    settings = RedisSettings(name="cache", type="redis", url=url, key_prefix=prefix)
    client = redis.Redis.from_url(url)

    def found(pattern: str = "*") -> list[bytes]:
        return list(client.scan_iter(match=f"{prefix}{pattern}", count=10_000))

    def remove(pattern: str = "*") -> None:
        if keys := found(pattern):
            client.unlink(*keys)

    def keep_copy() -> Callable[[], None]:
        copy = [(key, max(client.pttl(key), 0), client.dump(key)) for key in found()]

        def bring_back() -> None:
            remove()
            for key, ttl_ms, value in copy:
                client.restore(key, ttl_ms, value)

        return bring_back

    def forget_deletes() -> None:
        for key in found("*}:gone"):
            client.pexpire(key, 1)
        wait_until(lambda: not found("*}:gone"), within_s=20)

    address = urlsplit(url)
    yield Harness(
        "redis",
        lambda: RedisSink(settings),
        _write,
        lose_ledger=lambda: remove("cdc:ledger:*"),
        keep_copy=keep_copy,
        forget_deletes=forget_deletes,
        never=1 << 70,  # Redis itself takes everything, but this is no JSON
        server=(address.hostname or "", address.port or 0),
        make_at=lambda host, port: RedisSink(
            settings.model_copy(update={"url": f"redis://{host}:{port}{address.path}"})
        ),
    )
    remove()
    client.close()


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
    client = psycopg.connect(
        host=settings.host,
        port=settings.port,
        dbname=settings.database,
        user=settings.user,
        password=settings.password.get_secret_value(),
        autocommit=True,
    )

    def run(statement: str, **names: str) -> Any:
        parts = {name: sql.Identifier(*value.split("/")) for name, value in names.items()}
        return client.execute(sql.SQL(statement).format(**parts))

    def keep_copy() -> Callable[[], None]:
        listed = "SELECT tablename FROM pg_tables WHERE schemaname = %s"
        tables = [name for (name,) in client.execute(listed, (schema,))]
        run("CREATE SCHEMA {copies}", copies=f"{schema}_copy")
        pairs = [(f"{schema}_copy/{name}", f"{schema}/{name}") for name in tables]
        for copy, table in pairs:
            run("CREATE TABLE {copy} AS TABLE {table}", copy=copy, table=table)

        def bring_back() -> None:
            with client.transaction():
                for copy, table in pairs:
                    run("TRUNCATE {table}", table=table)
                    run("INSERT INTO {table} TABLE {copy}", copy=copy, table=table)

        return bring_back

    made = Harness(
        "postgres",
        lambda: WarehouseSink(settings),
        _write,
        lose_ledger=lambda: run("DROP TABLE {ledger}", ledger=f"{schema}/cdc_ledger") and None,
        keep_copy=keep_copy,
        server=(settings.host, settings.port),
        make_at=lambda host, port: WarehouseSink(
            settings.model_copy(update={"host": host, "port": port})
        ),
    )
    yield made
    for sink in made.opened:
        sink.close()
    for name in (schema, f"{schema}_copy"):
        run("DROP SCHEMA IF EXISTS {name} CASCADE", name=name)
    client.close()


@pytest.fixture
def delta_harness(spark: Any, tmp_path: Path) -> Harness:
    import pyarrow as pa

    from sinks.delta import DeltaSettings, DeltaSink

    lake = tmp_path / "lake"
    settings = DeltaSettings(name="lake", type="delta", path=str(lake))

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

    def tables() -> list[Path]:
        return [log.parent for log in lake.glob("*/_delta_log")]

    def lose_ledger() -> None:
        """Put tables with the same rows and no history in their place."""
        for path in tables():
            copy = tmp_path / "copies" / path.name
            spark.read.format("delta").load(str(path)).write.format("delta").save(str(copy))
            shutil.rmtree(path)
            copy.rename(path)
        spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()

    def keep_copy() -> Callable[[], None]:
        versions = {
            path: spark.sql(f"DESCRIBE HISTORY delta.`{path}` LIMIT 1").collect()[0]["version"]
            for path in tables()
        }

        def bring_back() -> None:
            for path, version in versions.items():
                spark.sql(f"RESTORE TABLE delta.`{path}` TO VERSION AS OF {version}")

        return bring_back

    return Harness(
        "delta",
        lambda: DeltaSink(settings, spark),
        merge,
        lose_ledger=lose_ledger,
        keep_copy=keep_copy,
    )
