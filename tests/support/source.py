"""The way into the log in tests: configurations under a name of their own, and reading the log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from confluent_kafka import Consumer, TopicPartition
from pydantic import SecretStr

from cdc.config import Config, Connect, Kafka, SinkSettings, Source
from connectors import lifecycle, topics
from connectors.postgres import table_topics, topic_of

NOWHERE = 9  # the discard port: nothing listens there


def configured(
    stack: Mapping[str, str],
    name: str,
    *tables: str,
    password: str | None = None,
    **places: Any,
) -> Config:
    return Config(
        name=name,
        source=Source(
            host=stack["CDC_PG_HOST"],
            port=places.get("pg_port", int(stack["CDC_PG_PORT"])),
            database=places.get("database", stack["CDC_PG_DATABASE"]),
            user=places.get("user", stack["CDC_PG_USER"]),
            password=SecretStr(password or stack["CDC_PG_PASSWORD"]),
            tables=tuple(f"{name}.{table}" for table in tables),
        ),
        kafka=Kafka(bootstrap=places.get("kafka", stack["CDC_KAFKA"])),
        connect=Connect(url=places.get("connect", stack["CDC_CONNECT_URL"])),
        sinks=(SinkSettings(name="none", type="none"),),
    )


def with_kafka(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"kafka": config.kafka.model_copy(update=changes)})


Keyed = tuple[dict[str, Any], dict[str, Any] | None]


def read_log(config: Config, table: str, count: int, within_s: float = 30.0) -> list[Keyed]:
    """The first *count* committed records of *table*'s topic, as (key, value), by partition."""
    deadline = time.monotonic() + within_s
    found: list[Keyed] = []
    for keyed in _records(config, table):
        if keyed is not None:
            found.append(keyed)
        if len(found) == count:
            return found
        assert time.monotonic() < deadline, f"{len(found)} of {count} records"
    return found


def rows_in_log(config: Config, table: str) -> set[int]:
    """The ids of the rows that a reader of the whole log ends up with."""
    left = config.kafka.partitions
    held: dict[int, bool] = {}
    for keyed in _records(config, table):
        if keyed is None:
            left -= 1
        else:
            key, value = keyed
            held[key["id"]] = value is not None and value["op"] != "d"
        if not left:
            break
    return {key for key, is_held in held.items() if is_held}


def _records(config: Config, table: str) -> Iterator[Keyed | None]:
    """Committed records of *table*'s topic as they come; None at the end of a partition."""
    topic = topic_of(config, f"{config.name}.{table}")
    state = topics.describe(config, [topic])[topic]
    settings = {
        "bootstrap.servers": config.kafka.bootstrap,
        "group.id": "unused",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 50,
    }
    with closing(Consumer(settings)) as consumer:
        consumer.assign([TopicPartition(topic, at, 0) for at in range(state.partitions)])
        while True:
            record = consumer.poll(30)
            assert record is not None, "kafka is silent"
            if record.error() is not None:
                yield None
                continue
            key, value = record.key(), record.value()
            yield json.loads(key or b"{}"), json.loads(value) if value else None


def is_whole(config: Config) -> bool:
    return lifecycle.is_whole(config, topics.describe(config, table_topics(config)))


def state_of(config: Config) -> str:
    return str(lifecycle.status(config)["state"])
