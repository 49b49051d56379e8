"""The compacted topics: what is wanted, what is there, and how far each has come.

Sinks are rebuilt from these topics. So nothing here deletes records unless told, and a topic that
may already have lost some is refused, not mended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # it re-exports without saying so
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from cdc.config import Config
from cdc.errors import SourceError, SourceUnavailable
from cdc.ledger import TopicState
from connectors.postgres import (
    MAX_KEPT_BYTES,
    MAX_RECORD_BYTES,
    heartbeat_topic,
    quarantine_topic,
    table_topics,
)

# How long one question to Kafka may take, and how long to look for any broker at all.
_ANSWER_S = 20.0
_REACH_S = 5.0

_POLL_S = 0.2

_HOUR_MS = 3_600_000
_POLICY = "cleanup.policy"

# librdkafka writes to stderr, once a second while a broker is away; our error says it once.
SILENT = logging.getLogger("cdc.librdkafka")
SILENT.addHandler(logging.NullHandler())
SILENT.propagate = False


@dataclass(frozen=True, slots=True)
class TopicSpec:
    name: str
    partitions: int
    replication: int
    settings: Mapping[str, str]


def wanted_topics(config: Config) -> list[TopicSpec]:
    """All our topics: the log, and the quarantine, which outlives it."""
    return [*log_topics(config), quarantine_spec(config)]


def log_topics(config: Config) -> list[TopicSpec]:
    """A topic per table, and one of heartbeats."""
    kafka = config.kafka
    compacted = {
        _POLICY: "compact",
        "delete.retention.ms": str(round(kafka.delete_retention * 1000)),
        # Only closed segments are compacted. With Kafka's own week and 1 GiB a busy table would be
        # replayed with every version of its rows, and a quiet one would never be compacted.
        "segment.ms": str(6 * _HOUR_MS),
        "segment.bytes": str(128 << 20),
        # A bound whatever the dirty ratio says: a deleted row leaves the log, too.
        "max.compaction.lag.ms": str(24 * _HOUR_MS),
    }
    tables = [
        TopicSpec(
            topic,
            kafka.partitions,
            kafka.replication,
            {**compacted, "max.message.bytes": str(MAX_RECORD_BYTES)},
        )
        for topic in table_topics(config)
    ]
    # Debezium writes one small record there every few seconds, always with the same key.
    return [*tables, TopicSpec(heartbeat_topic(config), 1, kafka.replication, compacted)]


def quarantine_spec(config: Config) -> TopicSpec:
    """Kept until dropped by a person, so nothing here may expire."""
    settings = {_POLICY: "compact", "max.message.bytes": str(MAX_KEPT_BYTES)}
    return TopicSpec(quarantine_topic(config), 1, config.kafka.replication, settings)


def check_topics(config: Config) -> None:
    """Fail if Kafka is out of reach or a topic of ours is not as it must be. Changes nothing."""
    with _admin(config) as admin:
        _compare(admin, wanted_topics(config))


def ensure_topics(config: Config) -> list[str]:
    """Create what is missing and set what differs; one sentence for each. Safe to repeat.

    Another partition count would move keys between partitions, and another cleanup policy may
    already have deleted rows: both are refused.
    """
    return _ensure(config, wanted_topics(config))


def ensure_side_topics(config: Config) -> list[str]:
    """The same for all but the tables' own topics, whose rows no new topic would have."""
    tables = table_topics(config)
    return _ensure(config, [spec for spec in wanted_topics(config) if spec.name not in tables])


def make_missing(config: Config) -> list[str]:
    """Create what is missing, and look at nothing else."""
    with _admin(config) as admin:
        wanted = wanted_topics(config)
        found = _descriptions(admin, [spec.name for spec in wanted])
        return _make(admin, [spec for spec in wanted if spec.name not in found])


def _make(admin: AdminClient, missing: list[TopicSpec]) -> list[str]:
    return [
        f"created topic {spec.name}"
        for spec, future in _create(admin, missing)
        if _made(future, spec.name)
    ]


def _ensure(config: Config, wanted: list[TopicSpec]) -> list[str]:
    with _admin(config) as admin:
        missing, drifted = _compare(admin, wanted)
        made = _make(admin, missing)
        for name, settings in drifted.items():
            _alter(admin, name, settings)
            made += [f"set {key} of topic {name} to {value}" for key, value in settings.items()]
        return made


def describe(config: Config, topics: Iterable[str]) -> dict[str, TopicState]:
    """The state of each of *topics* that exists."""
    names = list(topics)
    deadline = time.monotonic() + _REACH_S
    with _admin(config) as admin:
        while True:
            try:
                return _states(admin, names)
            except SourceUnavailable:
                # A partition has no leader for a moment after it was made, or its broker left.
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)


def _states(admin: AdminClient, names: list[str]) -> dict[str, TopicState]:
    found = _descriptions(admin, names)
    places = [TopicPartition(name, part.id) for name, it in found.items() for part in it.partitions]
    start = _offsets(admin, places, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
    end = _offsets(admin, places, OffsetSpec.latest())  # type: ignore[no-untyped-call]
    return {
        name: TopicState(
            topic_id=str(it.topic_id),
            partitions=len(it.partitions),
            start={part.id: start[name, part.id] for part in it.partitions},
            end={part.id: end[name, part.id] for part in it.partitions},
        )
        for name, it in found.items()
        if all((name, part.id) in start and (name, part.id) in end for part in it.partitions)
    }


def ids(config: Config) -> dict[str, str]:
    """The id of each of our topics that exists."""
    with _admin(config) as admin:
        found = _descriptions(admin, [spec.name for spec in wanted_topics(config)])
        return {name: str(it.topic_id) for name, it in found.items()}


def new_ids(config: Config, old: Mapping[str, str]) -> dict[str, str]:
    """The ids of the log's topics, none as in *old*: a broker may be late to know them."""
    deadline = time.monotonic() + _ANSWER_S
    wanted = {spec.name for spec in log_topics(config)}
    while True:
        found = ids(config)
        if wanted <= {name for name, it in found.items() if it != old.get(name)}:
            return found
        if time.monotonic() > deadline:
            raise SourceUnavailable("kafka does not show the new topics yet", hint=_HINT)
        time.sleep(_POLL_S)


def remove_topics(config: Config, specs: Iterable[TopicSpec]) -> list[str]:
    """Delete these topics and all that is in them, and wait until they are gone."""
    with _admin(config) as admin:
        names = list(_descriptions(admin, [spec.name for spec in specs]))
        if not names:
            return []
        gone = []
        for name, future in admin.delete_topics(names, operation_timeout=_ANSWER_S).items():
            if _result(future, f"topic {name}", KafkaError.UNKNOWN_TOPIC_OR_PART, is_none=False):
                gone.append(f"deleted topic {name}")
        deadline = time.monotonic() + _ANSWER_S
        # Deleting is asynchronous; a topic made too early would be the old one, or be refused.
        while left := list(_descriptions(admin, names)):
            if time.monotonic() > deadline:
                raise SourceUnavailable(
                    f"topic {left[0]} is deleted, but not gone yet", hint="wait, and try again"
                )
            time.sleep(_POLL_S)
        return sorted(gone)


def _compare(
    admin: AdminClient, wanted: list[TopicSpec]
) -> tuple[list[TopicSpec], dict[str, dict[str, str]]]:
    """What is missing, and per existing topic the settings that differ."""
    found = _descriptions(admin, [spec.name for spec in wanted])
    held = _settings(admin, found)
    drifted = {}
    for spec in wanted:
        if spec.name not in found:
            continue
        count = len(found[spec.name].partitions)
        if count != spec.partitions:
            raise SourceError(
                f"topic {spec.name} has {count} partitions, not {spec.partitions} as configured",
                hint=f"set kafka.partitions = {count}; another count moves rows between partitions",
            )
        now = held[spec.name]
        if now.get(_POLICY) != spec.settings[_POLICY]:
            raise SourceError(
                f"topic {spec.name} has {_POLICY}={now.get(_POLICY)}, so it may have lost rows",
                hint="begin anew: cdc resync",
            )
        differing = {key: value for key, value in spec.settings.items() if now.get(key) != value}
        if differing:
            drifted[spec.name] = differing
    return [spec for spec in wanted if spec.name not in found], drifted


def _create(admin: AdminClient, missing: list[TopicSpec]) -> list[tuple[TopicSpec, Any]]:
    if not missing:
        return []
    new = [
        NewTopic(
            spec.name,
            num_partitions=spec.partitions,
            replication_factor=spec.replication,
            config=dict(spec.settings),
        )
        for spec in missing
    ]
    futures = admin.create_topics(new, operation_timeout=_ANSWER_S)
    return [(spec, futures[spec.name]) for spec in missing]


def _made(future: Any, name: str) -> bool:
    """False when somebody else was quicker."""
    return _result(future, f"topic {name}", KafkaError.TOPIC_ALREADY_EXISTS, is_none=False)  # type: ignore[no-any-return]


def _alter(admin: AdminClient, name: str, settings: Mapping[str, str]) -> None:
    entries = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        for key, value in settings.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
    for future in admin.incremental_alter_configs([resource]).values():
        _result(future, f"topic {name}")


def _descriptions(admin: AdminClient, topics: Iterable[str]) -> dict[str, Any]:
    names = list(topics)
    if not names:
        return {}
    futures = admin.describe_topics(TopicCollection(names), request_timeout=_ANSWER_S)
    found = {
        name: _result(future, f"topic {name}", KafkaError.UNKNOWN_TOPIC_OR_PART)
        for name, future in futures.items()
    }
    return {name: it for name, it in found.items() if it is not None}


def _settings(admin: AdminClient, names: Iterable[str]) -> dict[str, dict[str, str]]:
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
    if not resources:
        return {}
    futures = admin.describe_configs(resources, request_timeout=_ANSWER_S)
    return {
        resource.name: {
            key: entry.value for key, entry in _result(future, f"topic {resource.name}").items()
        }
        for resource, future in futures.items()
    }


def _offsets(
    admin: AdminClient, places: list[TopicPartition], spec: OffsetSpec
) -> dict[tuple[str, int], int]:
    if not places:
        return {}
    futures = admin.list_offsets(
        dict.fromkeys(places, spec),
        isolation_level=IsolationLevel.READ_COMMITTED,
        request_timeout=_ANSWER_S,
    )
    found = {}
    for place, future in futures.items():
        # A topic that is deleted between two questions is a topic that does not exist.
        it = _result(future, f"topic {place.topic}", KafkaError.UNKNOWN_TOPIC_OR_PART)
        if it is not None:
            found[place.topic, place.partition] = it.offset
    return found


@contextmanager
def _admin(config: Config) -> Iterator[AdminClient]:
    """A client for a Kafka that answers; every error of it becomes one of ours."""
    bootstrap = config.kafka.bootstrap
    try:
        client = AdminClient(
            {
                "bootstrap.servers": bootstrap,
                "client.id": "cdc",
                "socket.connection.setup.timeout.ms": round(_REACH_S * 1000),
                "allow.auto.create.topics": False,
            },
            logger=SILENT,
        )
        client.list_topics(timeout=_REACH_S)
        yield client
    except KafkaException as error:
        raise _translated(error.args[0], f"kafka at {bootstrap}") from None


def _result(future: Any, subject: str, absent: int | None = None, *, is_none: bool = True) -> Any:
    """What *future* brings. The code *absent* gives None (or False), mere success gives True."""
    try:
        value = future.result(timeout=_ANSWER_S + _REACH_S)
    except KafkaException as error:
        if absent is not None and error.args[0].code() == absent:
            return None if is_none else False
        raise _translated(error.args[0], subject) from None
    except TimeoutError:
        raise SourceUnavailable(f"kafka did not answer about {subject}", hint=_HINT) from None
    return value if is_none else True


_HINT = "start Kafka, or correct kafka.bootstrap"
_OUT_OF_REACH: Callable[[int], bool] = frozenset(
    {
        KafkaError._TRANSPORT,  # noqa: SLF001 - librdkafka's own codes have no other name
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError._TIMED_OUT,  # noqa: SLF001
        KafkaError._RESOLVE,  # noqa: SLF001
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.NOT_CONTROLLER,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.OFFSET_NOT_AVAILABLE,
    }
).__contains__


def _translated(error: KafkaError, subject: str) -> SourceError:
    if _OUT_OF_REACH(error.code()):
        return SourceUnavailable(f"{subject} is out of reach ({error.name()})", hint=_HINT)
    return SourceError(
        f"{subject}: {error.str().rstrip('.').lower()}",
        hint="see what Kafka asks for, and apply again",
    )
