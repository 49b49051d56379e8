"""Our configuration -> Debezium's PostgreSQL connector configuration. Pure: no sockets.

The database password travels inside the connector's configuration, so Kafka Connect stores it in
its own topic and gives it back to whoever may read its REST interface: keep that interface private.
A config provider (`${file:...}`) would be better, but it is part of the worker's set-up, which is
not ours. What we print or compare goes through `ConnectorConfig` and `differences`, which mask it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from cdc.config import Config
from cdc.errors import ConfigError

CONNECTOR_CLASS = "io.debezium.connector.postgresql.PostgresConnector"
HIDDEN = "***"

# A larger record stops the connector. Kafka's own limit of 1 MiB is below what one text column may
# hold, and under REPLICA IDENTITY FULL a record carries the row twice.
MAX_RECORD_BYTES = 16 << 20

# What was refused is kept as base64, which makes 4 bytes of 3, with a little beside it.
MAX_KEPT_BYTES = MAX_RECORD_BYTES * 3 // 2

# Often enough that an idle database's slot does not hold much WAL, rare enough to be no load.
HEARTBEAT_INTERVAL_MS = 10_000

# Our note in the connector's own configuration, which Connect and Debezium pass over: the ids of
# the topics that the snapshot went into, or that the log is about to begin anew.
NOTE = "cdc.topic.ids"
ANEW = "anew"

_KAFKA_NAME_LENGTH = 249
_BEYOND_UTF16_UNIT = 0xFFFF


class ConnectorConfig(dict[str, str]):
    """A connector's settings. Its text never shows a secret."""

    def __repr__(self) -> str:
        return repr(masked(self))

    __str__ = __repr__

    @property
    def secrets(self) -> tuple[str, ...]:
        return tuple(value for key, value in self.items() if is_secret(key) and value)


def is_secret(key: str) -> bool:
    return "password" in key.lower()


def masked(settings: Mapping[str, str]) -> dict[str, str]:
    return {key: HIDDEN if is_secret(key) else value for key, value in settings.items()}


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Say what turns *old* into *new*, one sentence per key, secrets masked."""
    found = []
    for key in sorted({*old, *new} - {"name"}):  # Connect adds "name" by itself
        if key == NOTE:
            if old.get(key, "") != new.get(key, ""):
                found.append("note the ids of its topics" if noted_ids(new) else "drop its note")
        elif key not in new:
            found.append(f"drop {key}")
        elif is_secret(key) and old.get(key) != new[key]:
            found.append(f"set {key} to another secret")
        elif old.get(key) != new[key]:
            found.append(f"set {key} to {new[key]}")
    return found


def note_of(settings: Mapping[str, str] | None) -> str:
    """The note as it stands there, or nothing."""
    return (settings or {}).get(NOTE, "")


def noted_ids(settings: Mapping[str, str] | None) -> dict[str, str]:
    """The topic ids that are known to hold a log from its very beginning; empty if none are."""
    note = note_of(settings)
    return json.loads(note) if note.startswith("{") else {}


def with_ids(settings: Mapping[str, str], ids: Mapping[str, str]) -> ConnectorConfig:
    note = json.dumps(dict(ids), separators=(",", ":"), sort_keys=True)
    return ConnectorConfig({**settings, NOTE: note})


def connector_name(config: Config) -> str:
    return f"cdc_{config.name}"


def slot_name(config: Config) -> str:
    return f"cdc_{config.name}"


def publication_name(config: Config) -> str:
    return f"cdc_{config.name}"


def heartbeat_topic(config: Config) -> str:
    return f"__debezium-heartbeat.{config.name}"


def quarantine_topic(config: Config) -> str:
    return f"__cdc-quarantine.{config.name}"


def topic_of(config: Config, table: str) -> str:
    """The topic of *table* ("schema.table"), named as Debezium 3.6 names it.

    Debezium replaces every UTF-16 unit that Kafka does not take by one _ and cuts at 249.
    """
    raw = f"{config.name}.{table}"
    return re.sub(r"[^a-zA-Z0-9._-]", _underscores, raw)[:_KAFKA_NAME_LENGTH]


def _underscores(illegal: re.Match[str]) -> str:
    return "__" if ord(illegal[0]) > _BEYOND_UTF16_UNIT else "_"


def table_topics(config: Config) -> dict[str, str]:
    """Topic -> table, for every table. Raises ConfigError when two tables would share one."""
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for table in config.source.tables:
        topic = topic_of(config, table)
        # Kafka refuses names that differ only in . and _: its metrics cannot tell them apart.
        folded = topic.replace(".", "_")
        if folded in taken:
            raise ConfigError(
                f'tables "{taken[folded]}" and "{table}" would share the topic {topic}',
                hint="rename one of the two, or sync them under two configurations",
            )
        taken[folded] = table
        found[topic] = table
    return found


def connector_config(config: Config, generated: Iterable[str] = ()) -> ConnectorConfig:
    """The whole connector. *generated* are generated columns, as schema.table.column."""
    table_topics(config)
    settings = ConnectorConfig(
        {
            "connector.class": CONNECTOR_CLASS,
            "tasks.max": "1",
            **_database(config),
            **_capture(config),
            **_VALUES,
            **_RESELECT,
            **_CONVERTERS,
            **_DELIVERY,
        }
    )
    left_out = ",".join(_literally(column) for column in sorted(generated))
    if left_out:
        # pgoutput does not send generated columns, but a snapshot would: without this a column
        # would be there after the snapshot and vanish with the first update.
        settings["column.exclude.list"] = left_out
    return settings


def _database(config: Config) -> dict[str, str]:
    source = config.source
    return {
        "database.hostname": source.host,
        "database.port": str(source.port),
        "database.dbname": source.database,
        "database.user": source.user,
        "database.password": source.password.get_secret_value(),
        "database.sslmode": source.sslmode,
    }


def _capture(config: Config) -> dict[str, str]:
    return {
        "topic.prefix": config.name,
        "table.include.list": ",".join(_literally(table) for table in config.source.tables),
        "plugin.name": "pgoutput",
        "publication.name": publication_name(config),
        # Exactly our tables, and kept in step with table.include.list at every start.
        "publication.autocreate.mode": "filtered",
        # A partitioned table is one table: its changes come under its own name, whatever partition.
        "publish.via.partition.root": "true",
        "slot.name": slot_name(config),
        # The slot is the only thing that keeps changes for us while we are down.
        "slot.drop.on.stop": "false",
        # Never a second snapshot by itself (when_needed): it would say nothing of rows deleted in
        # between, and every sink would keep them for ever.
        "snapshot.mode": "initial",
        # The default trusts the stored position blindly: with a slot that was dropped and made
        # again the gap would be skipped in silence. This one fails the task.
        "offset.mismatch.strategy": "trust_offset",
        # Only what Kafka has may be flushed. The driver's own flush (connector_and_driver) can
        # overtake the stored position, which trust_offset rightly refuses.
        "lsn.flush.mode": "connector",
        # Without heartbeats an idle table holds all WAL that other tables write.
        "heartbeat.interval.ms": str(HEARTBEAT_INTERVAL_MS),
        # A quiet database sends nothing to acknowledge, so say something. Needs no table.
        "heartbeat.action.query": (
            f"SELECT pg_logical_emit_message(false, '{slot_name(config)}_heartbeat', '')"
        ),
        # The application's own logical messages would go to a topic that does not exist.
        "message.prefix.exclude.list": ".*",
        # A TRUNCATE has no key, and a compacted topic refuses records without one.
        "skipped.operations": "t",
        # Sinks delete on the delete record; compaction needs the tombstone to forget the key.
        "tombstones.on.delete": "true",
    }


_VALUES = {
    # Text keeps every digit; the default is bytes, and double loses money.
    "decimal.handling.mode": "string",
    # One readable form for all times instead of days, micro- and nanoseconds since 1970.
    "time.precision.mode": "isostring",
    "interval.handling.mode": "string",
    # JSON has base64 either way. With "base64" 3.6.3 turns a bytea that an update did not touch
    # into null; as bytes it is a placeholder, which the post-processor below knows.
    "binary.handling.mode": "bytes",
    "hstore.handling.mode": "json",
    # The default drops columns of types it does not know: they would be null in every sink.
    "include.unknown.datatypes": "true",
    # The default logs a value it cannot convert and sends null: a wrong row, in silence.
    "event.converting.failure.handling.mode": "fail",
    "event.processing.failure.handling.mode": "fail",
    # Four headers of constants on every record, some 170 bytes that nobody reads.
    "extended.headers.enabled": "false",
}

_RESELECT = {
    # An update leaves unchanged TOAST columns out of the WAL. Debezium would write a placeholder,
    # and compaction would erase the only record that had the value: fetch it from the table. This
    # works for some types only (see catalogue.py). Under REPLICA IDENTITY FULL it is never needed.
    "post.processors": "reselect",
    "post.processors.reselect.type": "io.debezium.processors.reselect.ReselectColumnsPostProcessor",
    "post.processors.reselect.reselect.unavailable.values": "true",
    # NULL is a value. Asking again would cost a query per NULL and answer with a later state.
    "post.processors.reselect.reselect.null.values": "false",
    # "fail" would stop for good at a row that was deleted since, an everyday race. The price: then,
    # and while the connection behind it is broken (seen: 12 s after it was killed), placeholders do
    # reach the log. A reader must refuse one unless a later record of the same key follows.
    "post.processors.reselect.reselect.error.handling.mode": "warn",
}

_CONVERTERS = {
    f"{part}.converter{option}": value
    for part in ("key", "value")
    for option, value in (
        ("", "org.apache.kafka.connect.json.JsonConverter"),
        (".schemas.enable", "false"),  # types come from PostgreSQL's catalogue
        (".replace.null.with.default", "false"),  # the default turns NULL into the column's default
    )
}

_DELIVERY = {
    # After a crash Connect sends a stretch again, at higher offsets: rows would go back in time.
    # With this every poll is one Kafka transaction, together with the position.
    "exactly.once.support": "required",
    "transaction.boundary": "poll",
    # The default of 500 ms is most of the latency.
    "poll.interval.ms": "10",
    # By itself Debezium would try again for ever, with the task RUNNING all the while and nobody
    # told why; and in the midst of a snapshot it would begin another one. Now a failure is seen,
    # and the daemon decides what heals it (see care.py).
    "errors.max.retries": "0",
    # Nothing is skipped, and no row is written to the worker's log.
    "errors.tolerance": "none",
    "errors.log.include.messages": "false",
    "producer.override.max.request.size": str(MAX_RECORD_BYTES),
}


def captured(settings: Mapping[str, str]) -> set[str]:
    """The tables that a connector with these settings captures."""
    listed = re.split(r"(?<!\\),", settings.get("table.include.list", ""))
    return {re.sub(r"\\(.)", r"\1", each.removeprefix("(?-i)")) for each in listed} - {""}


def _literally(name: str) -> str:
    """A regular expression that matches *name* and nothing else.

    Debezium ignores case otherwise, and would capture "Orders" along with "orders".
    """
    return "(?-i)" + re.sub(r"(\W)", r"\\\1", name)
