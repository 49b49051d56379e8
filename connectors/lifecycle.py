"""Apply, look at, restart and remove the way into the log. Plain functions for the command line.

Everything is checked before anything is made: an unreachable server leaves nothing half-made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from cdc.config import Config
from cdc.errors import SourceError
from cdc.ledger import TopicState
from connectors import catalogue, topics
from connectors.connect import ConnectClient, ConnectorStatus, hint_for
from connectors.postgres import (
    CONNECTOR_CLASS,
    ConnectorConfig,
    captured,
    connector_config,
    connector_name,
    differences,
    table_topics,
)

# A task starts in seconds; a worker that was just started itself may need most of a minute.
_RUNNING_S = 60.0
_STOPPED_S = 30.0


@dataclass(frozen=True, slots=True)
class Applied:
    """*changes* has one sentence for all that was done; empty when there was nothing to do."""

    changes: list[str] = field(default_factory=list)


def apply(config: Config, within_s: float = _RUNNING_S) -> Applied:
    """Make topics and connector as *config* says, and wait until changes flow. Safe to repeat."""
    name = connector_name(config)
    with _connect(config) as connect:
        found = catalogue.read_catalogue(config)
        wanted = connector_config(config, found.generated)
        if CONNECTOR_CLASS not in connect.plugins():
            raise SourceError(
                f"{config.connect.url} has no Debezium connector for PostgreSQL",
                hint="unpack it into the plugin.path of every Connect worker and restart them",
            )
        topics.check_topics(config)
        held = connect.config(name)
        _check_history(config, is_new=held is None)
        _check_additions(held, wanted)
        differing = differences(held or {}, wanted)
        if differing:
            connect.validate(wanted)

        changes = topics.ensure_topics(config)
        if held is None:
            connect.put(name, wanted)
            changes.append(f"created connector {name}")
        elif differing:
            connect.restart(name, wanted)
            changes += [f"connector {name}: {each}" for each in differing]
        elif _is_failed(connect.status(name)):
            connect.restart(name)
            changes.append(f"restarted connector {name}, which had failed")
        connect.wait_running(name, within_s)
        return Applied(changes)


def status(config: Config) -> dict[str, Any]:
    """How connector, slot and topics are. JSON-able; has no secret and no row value.

    "state" is RUNNING only if the connector and all its tasks are; "parts" has a line for each.
    """
    name = connector_name(config)
    with _connect(config) as connect:
        found = connect.status(name)
    slot = catalogue.read_slot(config)
    states = topics.describe(config, table_topics(config))
    return {
        "connector": name,
        "state": found.state if found else "MISSING",
        "hint": _hint(found),
        "parts": [{"connector": name, **part} for part in _parts(found, slot)],
        "slot": asdict(slot) if slot else None,
        "topics": [
            {"topic": topic, "table": table, **_numbers(states.get(topic))}
            for topic, table in table_topics(config).items()
        ],
    }


def _parts(found: ConnectorStatus | None, slot: catalogue.Slot | None) -> Iterator[dict[str, Any]]:
    yield {
        "part": "connector",
        "state": found.connector if found else "MISSING",
        "reason": found.reason if found else "",
    }
    for task in found.tasks if found else ():
        yield {
            "part": f"task {task.id}",
            "state": task.state,
            "worker": task.worker,
            "reason": task.reason,
        }
    state = "MISSING" if slot is None else "ACTIVE" if slot.active else "INACTIVE"
    yield {"part": "slot", "state": state}


def _numbers(state: TopicState | None) -> dict[str, Any]:
    if state is None:
        return {"state": "MISSING"}
    return {
        "state": "READY",
        "topic_id": state.topic_id,
        "partitions": state.partitions,
        "start": sum(state.start.values()),
        "end": sum(state.end.values()),
    }


def restart(config: Config, within_s: float = _RUNNING_S) -> None:
    """Restart connector and tasks, and wait until they run."""
    with _connect(config) as connect:
        connect.restart(connector_name(config))
        connect.wait_running(connector_name(config), within_s)


def remove(config: Config, *, drop_slot: bool = False, drop_log: bool = False) -> list[str]:
    """Delete the connector; the rest only when told. One sentence for each thing done.

    As it is, PostgreSQL keeps all WAL from here on, and applying again goes on where it was.
    *drop_slot* drops slot and publication and forgets the position; the topics then hold a life of
    the tables that has ended. *drop_log* drops all that and the topics: applying again begins anew.
    """
    name = connector_name(config)
    is_end = drop_slot or drop_log
    done = []
    with _connect(config) as connect:
        held = connect.config(name)
        if is_end:
            catalogue.read_slot(config)  # out of reach: better now than half-way
        if drop_log:
            topics.describe(config, ())
        if is_end and held is not None:
            # Connect remembers a deleted connector's position, and would go on from it.
            connect.stop(name)
            connect.wait_stopped(name, _STOPPED_S)
            connect.forget_offsets(name)
        if connect.delete(name):
            done.append(f"deleted connector {name}")
    if is_end:
        done += catalogue.drop_slot(config)
    if drop_log:
        done += topics.remove_topics(config)
    return done


def _check_history(config: Config, *, is_new: bool) -> None:
    """Refuse to take a snapshot into topics that hold an earlier life of the tables.

    A snapshot says nothing of the rows that were deleted while no slot watched, so every sink
    would keep them; new topics have new ids, which open a new generation in the sinks.
    """
    if not is_new or catalogue.read_slot(config) is not None:
        return
    states = topics.describe(config, table_topics(config))
    full = [topic for topic, state in states.items() if any(state.end.values())]
    if full:
        raise SourceError(
            f"slot and connector are gone, but topic {full[0]} has records from before",
            hint="rows deleted in between would stay in the sinks for ever: "
            "cdc connectors remove --drop-log, then cdc connectors apply",
        )


def _check_additions(held: ConnectorConfig | None, wanted: ConnectorConfig) -> None:
    """Refuse a table that a running connector would join without its existing rows.

    Debezium takes its snapshot once, so only later changes of the new table would arrive.
    """
    new = set() if held is None else captured(wanted) - captured(held)
    if new:
        raise SourceError(
            f"the connector is already past its snapshot, which lacks {', '.join(sorted(new))}",
            hint="cdc connectors remove --drop-log, then cdc connectors apply: all tables are read "
            "anew; or sync the new table under a configuration of its own name",
        )


def _is_failed(found: ConnectorStatus | None) -> bool:
    return found is not None and found.state == "FAILED"


def _hint(found: ConnectorStatus | None) -> str:
    if found is None:
        return "create it with `cdc connectors apply`"
    return hint_for(found.failure) if found.state == "FAILED" else ""


@contextmanager
def _connect(config: Config) -> Iterator[ConnectClient]:
    with ConnectClient(config.connect.url, config.connect.timeout) as client:
        yield client
