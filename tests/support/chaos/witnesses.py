"""Who watches while the faults happen: one reads the log, one looks into Redis and Elasticsearch.

Both go straight to the servers, not through the proxies. A server that cannot be reached is no
violation; what it shows when it can be, may be one.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import redis
import requests
from confluent_kafka import Consumer, KafkaError, TopicPartition
from redis.backoff import NoBackoff
from redis.retry import Retry

from cdc.change import Table
from sinks.elasticsearch import alias_name, document_id
from sinks.redis import VERSION, row_key, table_head
from tests.support.chaos.load import KEY_COLUMNS, Key, Load, Row
from tests.support.chaos.rules import Store, Topic, Violations

ROWS_PER_LOOK = 24
LOOK_EVERY_S = 0.2
ANSWER_S = 5.0
JOIN_S = 30.0
Held = tuple[int, int] | None  # version and n of a row


class LogReader:
    """Reads every topic from its start, read_committed, and checks every record."""

    def __init__(
        self, bootstrap: str, topics: Mapping[str, str], partitions: int, violations: Violations
    ) -> None:
        self._settings = {
            "bootstrap.servers": bootstrap,
            "group.id": "chaos-log-reader",  # never joined: partitions are assigned
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            "log_level": 0,
        }
        self._names = dict(topics)  # topic -> table
        self._partitions = partitions
        self._violations = violations
        self._topics: dict[str, Topic] = {}
        self._again = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-reader", daemon=True)
        self.failure: BaseException | None = None
        self.records = 0
        self.partition_of: dict[Row, int] = {}
        self.marks: dict[Row, int] = {}  # the last n of every marker row

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def begin_anew(self) -> None:
        """The topics have a new life: nothing of the old one counts."""
        self._again.set()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._again.clear()
                self._topics = {topic: Topic(topic) for topic in self._names}
                self._read()
        except Exception as error:
            self.failure = error
            raise

    def _read(self) -> None:
        consumer = Consumer(self._settings)
        consumer.assign(
            [TopicPartition(t, p, 0) for t in self._names for p in range(self._partitions)]
        )
        try:
            while not (self._stop.is_set() or self._again.is_set()):
                for record in consumer.consume(500, timeout=0.5):
                    if record.error() is None:
                        self._check(record)
                    elif record.error().code() == KafkaError._AUTO_OFFSET_RESET:
                        self._violations.add(f"{record.topic()}: the log has lost its records")
        finally:
            consumer.close()

    def _check(self, record: Any) -> None:
        if record.value() is None:
            return  # the tombstone that follows each delete
        table = self._names[record.topic()]
        key: Key = tuple(orjson.loads(record.key())[name] for name in KEY_COLUMNS[table])
        value = orjson.loads(record.value())
        op, source = value["op"], value["source"]
        n = (value["before"] if op == "d" else value["after"])["n"]
        self.records += 1
        self.partition_of[table, key] = record.partition()
        if is_marker(key):
            self.marks[table, key] = n
        wrong = self._topics[record.topic()].read(
            str(key), op, n, (source.get("lsn"), source.get("txId"))
        )
        if wrong is not None:
            self._violations.add(f"{wrong} (partition {record.partition()}, {record.offset()})")


def is_marker(key: Key) -> bool:
    return key[0] == "marker" or (isinstance(key[0], int) and key[0] < 0)


class Redis:
    """Rows of the Redis sink, read by their keys."""

    def __init__(self, url: str, prefix: str, tables: Mapping[str, Table]) -> None:
        self._heads = {name: table_head(prefix, table) for name, table in tables.items()}
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
        )

    def look(self, rows: Sequence[Row]) -> list[Held] | None:
        reads = self._client.pipeline(transaction=False)
        for table, key in rows:
            reads.hmget(row_key(self._heads[table], key), VERSION, "n")
        try:
            found = reads.execute()
        except redis.RedisError:
            return None
        return [None if version is None else (int(version), int(n)) for version, n in found]

    def close(self) -> None:
        self._client.close()


class Elasticsearch:
    """Rows of the Elasticsearch sink, by realtime GETs."""

    def __init__(self, url: str, prefix: str, tables: Mapping[str, Table]) -> None:
        self._url = f"{url}/_mget"
        self._aliases = {name: alias_name(prefix, table) for name, table in tables.items()}
        self._http = requests.Session()

    def look(self, rows: Sequence[Row]) -> list[Held] | None:
        wanted = [
            {"_index": self._aliases[table], "_id": document_id(key), "_source": ["n"]}
            for table, key in rows
        ]
        try:
            answer = self._http.post(self._url, json={"docs": wanted}, timeout=ANSWER_S)
        except requests.RequestException:
            return None
        if not answer.ok:
            return None
        found = answer.json()["docs"]
        if any("error" in document for document in found):
            return None
        return [
            (document["_version"], document["_source"]["n"]) if document["found"] else None
            for document in found
        ]

    def close(self) -> None:
        self._http.close()


class Observer:
    """Polls random rows of one store for as long as it lives."""

    def __init__(
        self, rules: Store, reader: Redis | Elasticsearch, load: Load, violations: Violations
    ) -> None:
        self.rules = rules
        self.reader = reader
        self.failure: BaseException | None = None
        self._load = load
        self._violations = violations
        self._random = random.Random(load.seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"see-{rules.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        self.reader.close()

    def _run(self) -> None:
        try:
            while not self._stop.wait(LOOK_EVERY_S):
                self._look()
        except Exception as error:
            self.failure = error
            raise

    def _look(self) -> None:
        rows = self._load.sample(self._random, ROWS_PER_LOOK)
        buried = [self.rules.is_buried(row) for row in rows]
        now = time.monotonic()
        found = self.reader.look(rows)
        if found is None:
            return
        for row, held, is_buried in zip(rows, found, buried, strict=True):
            wrong = self.rules.see(row, held, now, buried=is_buried)
            if wrong is not None:
                self._violations.add(wrong)
