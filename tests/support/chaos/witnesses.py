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
from cdc.config import Config
from cdc.errors import SourceError
from connectors import topics
from connectors.postgres import table_topics
from sinks.elasticsearch import alias_name, document_id
from sinks.redis import VERSION, row_key, table_head
from tests.support.chaos.load import KEY_COLUMNS, Key, Load, Row
from tests.support.chaos.rules import Store, Topic, Violations

ROWS_PER_LOOK = 24
LOOK_EVERY_S = 0.2
ANSWER_S = 5.0
JOIN_S = 30.0
IDS_EVERY_S = 1.0
Held = tuple[int, int] | None  # version and n of a row


class LogReader:
    """Reads every topic from its start, read_committed, and checks every record.

    When the topics have new ids, their log has a new life, of which nothing is known yet.
    """

    def __init__(self, config: Config, violations: Violations) -> None:
        self._config = config
        self._settings = {
            "bootstrap.servers": config.kafka.bootstrap,
            "group.id": "chaos-log-reader",  # never joined: partitions are assigned
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            "log_level": 0,
        }
        self._names = {topic: table.split(".")[1] for topic, table in table_topics(config).items()}
        self._violations = violations
        self._topics: dict[str, Topic] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-reader", daemon=True)
        self.failure: BaseException | None = None
        self.ids: dict[str, str] = {}  # of the topics that are read now
        self.lives = 0
        self.records = 0
        self.partition_of: dict[Row, int] = {}
        self.marks: dict[Row, int] = {}  # the last n of every marker row

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                found = self._found_ids()
                if found is None:
                    self._stop.wait(IDS_EVERY_S)
                    continue
                self.ids, self.lives = found, self.lives + 1
                self._topics = {topic: Topic(topic) for topic in self._names}
                self._read()
        except Exception as error:
            self.failure = error
            raise

    def _found_ids(self) -> dict[str, str] | None:
        """The ids of all topics; None while one is missing or Kafka is away."""
        try:
            found = topics.ids(self._config)
        except SourceError:
            return None
        mine = {topic: found[topic] for topic in self._names if topic in found}
        return mine if len(mine) == len(self._names) else None

    def _is_over(self) -> bool:
        """Whether the life of the log that is read has ended."""
        return self._found_ids() not in (None, self.ids)

    def _read(self) -> None:
        """Read this life to its end."""
        consumer = Consumer(self._settings)
        partitions = range(self._config.kafka.partitions)
        consumer.assign([TopicPartition(t, p, 0) for t in self._names for p in partitions])
        look_at = time.monotonic() + IDS_EVERY_S
        try:
            while not self._stop.is_set():
                wrong = [self._wrong(record) for record in consumer.consume(500, timeout=0.5)]
                wrong = [sentence for sentence in wrong if sentence]
                if wrong or time.monotonic() > look_at:
                    if self._is_over():
                        return
                    look_at = time.monotonic() + IDS_EVERY_S
                for sentence in wrong:
                    self._violations.add(sentence)
        finally:
            consumer.close()

    def _wrong(self, record: Any) -> str | None:
        error = record.error()
        if error is None:
            return self._check(record)
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            return f"{record.topic()}: the log has lost its records"
        return None  # a broker that is away for a while

    def _check(self, record: Any) -> str | None:
        if record.value() is None:
            return None  # the tombstone that follows each delete
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
        return wrong and f"{wrong} (partition {record.partition()}, {record.offset()})"


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
