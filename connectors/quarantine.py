"""The quarantine as a compacted topic: kept until dropped, one record per sink and position.

Written by executors before a ledger moves past what was refused, read and emptied by commands.
Beside it: how to find the newest record of some keys in the log.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)

from cdc.batch import Record
from cdc.config import Config, Kafka
from cdc.errors import SourceError, SourceUnavailable
from cdc.quarantine import Kept, decode, encode
from connectors.postgres import MAX_KEPT_BYTES, quarantine_topic

_ANSWER_S = 20.0
_POLL_S = 1.0
_HINT = "is Kafka up? The topic of the quarantine is made by: cdc connectors apply"


def keep(kafka: Kafka, topic: str, records: Sequence[Kept]) -> None:
    """Have *records* durable when this returns. Keeping one again replaces it."""
    _send(kafka, topic, [encode(record) for record in records])


def kept(config: Config) -> list[Kept]:
    """All that is in the quarantine, oldest first."""
    found: dict[bytes, Kept] = {}
    for record in _read(config, quarantine_topic(config), 0, OFFSET_BEGINNING, None):
        found.pop(record.key or b"", None)
        if record.value is not None and record.key is not None:
            found[record.key] = decode(record.value)
    return list(found.values())


def drop(config: Config, ids: Collection[str]) -> None:
    """Take *ids* out of the quarantine for good."""
    _send(config.kafka, quarantine_topic(config), [(each.encode(), None) for each in ids])


def _send(kafka: Kafka, topic: str, pairs: Sequence[tuple[bytes, bytes | None]]) -> None:
    """Have keys and values durable in *topic* when this returns; raise if one is not."""
    producer = Producer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "client.id": "cdc-quarantine",
            "acks": "all",
            "enable.idempotence": True,
            "message.max.bytes": MAX_KEPT_BYTES,
            "message.timeout.ms": round(_ANSWER_S * 1000),
            "allow.auto.create.topics": False,
            "log_level": 0,
        }
    )
    failed: list[KafkaError] = []

    def delivered(error: KafkaError | None, _: Any) -> None:
        if error is not None:
            failed.append(error)

    with _classified(kafka.bootstrap):
        for key, value in pairs:
            producer.produce(topic, value=value, key=key, on_delivery=delivered)
        left = producer.flush(_ANSWER_S)
        if failed:
            raise KafkaException(failed[0])
    if left:
        raise SourceUnavailable(f"{kafka.bootstrap} took no records for {topic}", hint=_HINT)


def newest(
    config: Config, place: tuple[str, int], keys: Collection[bytes], first: int, end: int
) -> Mapping[bytes, Record]:
    """The newest record of each of *keys* in *place*, (topic, partition), from *first* to *end*."""
    found: dict[bytes, Record] = {}
    for record in _read(config, *place, first, end):
        if record.key is not None and record.key in keys:
            found[record.key] = record
    return found


def _read(
    config: Config, topic: str, partition: int, first: int, end: int | None
) -> Iterator[Record]:
    """Records of one partition from *first* to before *end* (None: as it ends now)."""
    bootstrap = config.kafka.bootstrap
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"cdc-{config.name}-reader",  # the client insists; nothing is committed
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "fetch.message.max.bytes": MAX_KEPT_BYTES,
            "allow.auto.create.topics": False,
            "log_level": 0,
        }
    )
    try:
        with _classified(bootstrap):
            place = TopicPartition(topic, partition, first)
            _, high = consumer.get_watermark_offsets(place, timeout=_ANSWER_S)
            stop = high if end is None else min(end, high)
            consumer.assign([place])
            heard = time.monotonic()
            while True:
                message = consumer.poll(_POLL_S)
                if message is None:
                    if time.monotonic() - heard > _ANSWER_S:
                        raise SourceUnavailable(f"{bootstrap} sends nothing of {topic}", hint=_HINT)
                    continue
                heard = time.monotonic()
                error = message.error()
                if error is not None and error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                    return
                if error is not None:
                    raise KafkaException(error)
                offset = message.offset()
                if offset is None or offset >= stop:
                    return
                yield Record(offset, _bytes(message.key()), _bytes(message.value()))
                if offset + 1 >= stop:
                    return
    finally:
        consumer.close()


def _bytes(raw: str | bytes | None) -> bytes | None:
    return raw.encode() if isinstance(raw, str) else raw


@contextmanager
def _classified(bootstrap: str) -> Iterator[None]:
    try:
        yield
    except KafkaException as error:
        code = error.args[0]
        message = f"kafka at {bootstrap}: {code.name()}"
        if code.retriable() or code.code() in _OUT_OF_REACH:
            raise SourceUnavailable(message, hint=_HINT) from None
        raise SourceError(message, hint=_HINT) from None


_OUT_OF_REACH = {
    KafkaError._TRANSPORT,  # noqa: SLF001 - librdkafka's own codes have no other name
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
    KafkaError._TIMED_OUT,  # noqa: SLF001
    KafkaError._MSG_TIMED_OUT,  # noqa: SLF001
    KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - made again by whoever starts the log anew
    KafkaError.UNKNOWN_TOPIC_OR_PART,
}
