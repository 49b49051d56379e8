"""Whether the log holds one snapshot only.

A task that dies in the midst of its snapshot takes another one when it starts again. A row that was
deleted in between stays in the log from the first one, and no delete of it ever follows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing

import orjson
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from cdc.config import Config
from cdc.errors import SourceUnavailable
from cdc.ledger import TopicState
from connectors.topics import SILENT

_ROUND_S = 20.0
_FETCH_BYTES = 64 << 10  # one record is wanted; a larger one comes all the same

_END = KafkaError._PARTITION_EOF  # noqa: SLF001 - librdkafka's own codes have no other name
_Place = tuple[str, int]  # topic, partition


def is_single(config: Config, states: Mapping[str, TopicState]) -> bool:
    """Whether all snapshot records in the topics of *states* are of the same snapshot.

    Costs a few reads per partition, however long the log is.
    """
    return len(_snapshots(config, states)) <= 1


def _snapshots(config: Config, states: Mapping[str, TopicState]) -> set[int]:
    """The LSN of every snapshot that the first or the last snapshot record of a partition is of.

    In each partition snapshots stand before the stream, each after the one before it: so the last
    record of any snapshot is found by bisection, whatever compaction has left out.
    """
    low = {(topic, part): at for topic, it in states.items() for part, at in it.start.items()}
    high = {(topic, part): at for topic, it in states.items() for part, at in it.end.items()}
    found: set[int] = set()
    with closing(_consumer(config)) as consumer:
        middle = {place: at for place, at in low.items() if at < high[place]}
        while middle:
            for place, record in _records_at(consumer, middle).items():
                lsn = None if record is None else _snapshot_lsn(record)
                if record is None or lsn is None:
                    high[place] = middle[place]
                else:
                    found.add(lsn)
                    low[place] = (record.offset() or 0) + 1
            middle = {
                place: (at + high[place]) // 2 for place, at in low.items() if at < high[place]
            }
    return found


def _snapshot_lsn(record: Message) -> int | None:
    """Where the snapshot began that *record* is of; None if it is a later change."""
    value = record.value()
    change = orjson.loads(value) if value else {}
    return int(change["source"]["lsn"]) if change.get("op") == "r" else None


def _records_at(consumer: Consumer, offsets: Mapping[_Place, int]) -> dict[_Place, Message | None]:
    """The first record at or after each offset; None where there is none."""
    consumer.assign([TopicPartition(*place, at) for place, at in offsets.items()])
    found: dict[_Place, Message | None] = {}
    deadline = time.monotonic() + _ROUND_S
    while len(found) < len(offsets):
        record = consumer.poll(max(0.0, deadline - time.monotonic()))
        if record is None:
            raise SourceUnavailable(
                "kafka did not show the log in time", hint="wait until Kafka is back"
            )
        place = (str(record.topic()), int(record.partition() or 0))
        error = record.error()
        if place in found or (error is not None and error.code() != _END):
            continue
        found[place] = None if error else record
    return found


def _consumer(config: Config) -> Consumer:
    settings = {
        "bootstrap.servers": config.kafka.bootstrap,
        "client.id": "cdc",
        "group.id": "cdc",  # librdkafka wants a name; nothing is committed under it
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        "max.partition.fetch.bytes": _FETCH_BYTES,
        "queued.max.messages.kbytes": 1024,
        "fetch.wait.max.ms": 10,
    }
    return Consumer(settings, logger=SILENT)
