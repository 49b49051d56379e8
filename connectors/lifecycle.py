"""Apply, look at, restart, remove the way into the log, and begin the log anew as a whole.

Everything is checked before anything is made: an unreachable server leaves nothing half-made.
The log is whole if its topics are those that the connector's snapshot went into. Their ids stand as
a note in the connector's configuration; nothing is noted that is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from cdc.config import Config
from cdc.errors import SourceError
from cdc.ledger import TopicState
from connectors import catalogue, topics
from connectors.connect import ConnectClient, ConnectorStatus, Phase, hint_for
from connectors.postgres import (
    ANEW,
    CONNECTOR_CLASS,
    NOTE,
    ConnectorConfig,
    captured,
    connector_config,
    connector_name,
    differences,
    note_of,
    noted_ids,
    table_topics,
    with_ids,
)

# A task starts in seconds; a worker that was just started itself may need most of a minute.
_RUNNING_S = 60.0
_STOPPED_S = 30.0

_RESYNC = "cdc resync, which takes a new snapshot into new topics"


@dataclass(frozen=True, slots=True)
class Applied:
    """*changes* has one sentence for all that was done; empty when there was nothing to do."""

    changes: list[str] = field(default_factory=list)


def apply(config: Config, within_s: float = _RUNNING_S) -> Applied:
    """Make topics and connector as *config* says, and wait until changes flow. Safe to repeat."""
    name = connector_name(config)
    with _connect(config) as connect:
        wanted = _wanted(config, connect)
        topics.check_topics(config)
        held = connect.config(name)
        if note_of(held) == ANEW or (held is None and not _has_records(config)):
            return Applied(_begin_anew(config, connect, wanted, within_s, note_of(held)))
        _check_additions(held, wanted)
        _check_topics(config, held)
        wanted = _keep_note(config, held, wanted)
        differing = differences(held or {}, wanted)
        if differing:
            connect.validate(wanted)

        changes = topics.ensure_topics(config)
        state = _state(connect.status(name)) if held is not None else "MISSING"
        if held is None:
            _go_on(config, connect, wanted)
            changes.append(f"created connector {name}")
        elif differing:
            connect.restart(name, wanted)
            changes += [f"connector {name}: {each}" for each in differing]
        elif state in ("STOPPED", "PAUSED"):
            _check_phase(connect.phase(name), held)
            connect.resume(name)
            changes.append(f"resumed connector {name}, which was {state.lower()}")
        elif state == "FAILED":
            connect.restart(name)
            changes.append(f"restarted connector {name}, which had failed")
        connect.wait_running(name, within_s)
        return Applied(changes)


def resync(config: Config, seen: str | None = None, within_s: float = _RUNNING_S) -> list[str]:
    """Begin the log anew as a whole: a new snapshot into new topics. One sentence for each step.

    The intent is durable before anything is destroyed, and every step may be repeated: whoever
    comes next completes what a crash has cut short. *seen* is the note that the caller acts upon;
    if another stands there by now, somebody else was quicker, and nothing is done.
    """
    with _connect(config) as connect:
        wanted = _wanted(config, connect)
        topics.ids(config)  # out of reach: better now than half-way
        return _begin_anew(config, connect, wanted, within_s, seen)


def is_applied(config: Config) -> bool:
    """Whether there is a connector, running or not."""
    with _connect(config) as connect:
        return connect.config(connector_name(config)) is not None


def is_whole(config: Config, states: Mapping[str, TopicState]) -> bool:
    """Whether the topics in *states* hold every row of their tables, the snapshot's to the last.

    False, too, when that cannot be known now.
    """
    name = connector_name(config)
    try:
        with _connect(config) as connect:
            ids = noted_ids(connect.config(name))
            if not states or any(ids.get(it) != states[it].topic_id for it in states):
                return False
            return connect.phase(name) is Phase.STREAM
    except SourceError:
        return False


def _begin_anew(
    config: Config,
    connect: ConnectClient,
    wanted: ConnectorConfig,
    within_s: float,
    seen: str | None,
) -> list[str]:
    with catalogue.alone(config) as check:
        if seen is not None and note_of(connect.config(connector_name(config))) != seen:
            return []
        return list(steps(config, connect, wanted, check, within_s))


def steps(
    config: Config,
    connect: ConnectClient,
    wanted: ConnectorConfig,
    check: Callable[[], None],
    within_s: float = _RUNNING_S,
) -> Iterator[str]:
    """The way to a new log, one sentence after each thing done. *check* raises if we are not alone.

    The connector stays stopped until its new topics are there and noted, so that its snapshot is
    the first thing in them; and it finds no slot, because only with a slot of its own making does
    Debezium see the tables exactly as they were where the stream begins.
    """
    name = connector_name(config)
    held = connect.config(name)
    if held is None:
        connect.create_stopped(name, ConnectorConfig({**wanted, NOTE: ANEW}))
        yield f"created connector {name}"
    else:
        # A task that waits for a topic that is gone would not stop for a minute.
        yield from topics.make_missing(config)
        connect.put(name, ConnectorConfig({**wanted, NOTE: ANEW}))
        yield "noted that the log begins anew"
        connect.stop(name)
        connect.wait_stopped(name, _STOPPED_S)
        yield f"stopped connector {name}"
    check()
    connect.forget_position(name)  # which Connect remembers of a deleted connector, too
    yield f"forgot any position of connector {name}"
    yield from catalogue.drop_slot(config)
    check()
    old = topics.ids(config)
    yield from topics.remove_topics(config, topics.log_topics(config))
    yield from topics.ensure_topics(config)
    new = topics.new_ids(config, old)
    check()
    connect.put(name, with_ids(wanted, {topic: new[topic] for topic in table_topics(config)}))
    yield "noted the ids of the new topics"
    connect.resume(name)
    connect.wait_running(name, within_s)
    yield f"started connector {name}"


def status(config: Config) -> dict[str, Any]:
    """How connector, slot and topics are. JSON-able; has no secret and no row value.

    "state" is RUNNING only if the connector and all its tasks are; "parts" has a line for each.
    """
    name = connector_name(config)
    with _connect(config) as connect:
        found = connect.status(name)
        held = connect.config(name)
    slot = catalogue.read_slot(config)
    states = topics.describe(config, table_topics(config))
    lost = lost_topics(config, held, {topic: state.topic_id for topic, state in states.items()})
    return {
        "connector": name,
        "state": _state(found),
        "hint": _hint(found, held, lost),
        "parts": [{"connector": name, **part} for part in _parts(found, slot)],
        "slot": asdict(slot) if slot else None,
        "topics": [
            {"topic": topic, "table": table, **_numbers(states.get(topic), lost.get(topic, ""))}
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


def _numbers(state: TopicState | None, lost: str) -> dict[str, Any]:
    if state is None:
        return {"state": "MISSING"}
    return {
        "state": "RECREATED" if lost else "READY",
        "topic_id": state.topic_id,
        "partitions": state.partitions,
        "start": sum(state.start.values()),
        "end": sum(state.end.values()),
    }


def restart(config: Config, within_s: float = _RUNNING_S) -> None:
    """Restart connector and tasks, and wait until they run."""
    name = connector_name(config)
    with _connect(config) as connect:
        if note_of(connect.config(name)) == ANEW:
            raise SourceError("the log is about to begin anew", hint="complete it: cdc resync")
        connect.restart(name)
        connect.wait_running(name, within_s)


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
            connect.forget_position(name)
        if connect.delete(name):
            done.append(f"deleted connector {name}")
    if is_end:
        done += catalogue.drop_slot(config)
    if drop_log:
        done += topics.remove_topics(config, topics.wanted_topics(config))
    return done


def _wanted(config: Config, connect: ConnectClient) -> ConnectorConfig:
    """The connector as *config* and the tables want it; raises if it could not run."""
    wanted = connector_config(config, catalogue.read_catalogue(config).generated)
    if CONNECTOR_CLASS not in connect.plugins():
        raise SourceError(
            f"{config.connect.url} has no Debezium connector for PostgreSQL",
            hint="unpack it into the plugin.path of every Connect worker and restart them",
        )
    return wanted


def _has_records(config: Config) -> bool:
    states = topics.describe(config, table_topics(config))
    return any(any(state.end.values()) for state in states.values())


def lost_topics(
    config: Config, held: ConnectorConfig | None, found: Mapping[str, str]
) -> dict[str, str]:
    """What is wrong with each topic that lacks records, by topic; *found* are the ids now."""
    ids = noted_ids(held)
    lost = {}
    for topic in table_topics(config):
        if topic not in found:
            lost[topic] = "was deleted"
        elif ids.get(topic, found[topic]) != found[topic]:
            lost[topic] = "was deleted and made anew"
    return lost


def _check_topics(config: Config, held: ConnectorConfig | None) -> None:
    """Refuse to go on with a log that lacks records."""
    lost = lost_topics(config, held, topics.ids(config))
    for topic, what in lost.items():
        raise SourceError(
            f"topic {topic} {what}, so the log lacks what was in it", hint=f"run: {_RESYNC}"
        )
    if held is None and catalogue.read_slot(config) is None:
        # A snapshot says nothing of the rows that were deleted while no slot watched.
        raise SourceError(
            "slot and connector are gone, but the topics have records from before",
            hint=f"rows deleted in between would stay in the sinks for ever; run: {_RESYNC}",
        )


def _keep_note(
    config: Config, held: ConnectorConfig | None, wanted: ConnectorConfig
) -> ConnectorConfig:
    ids = noted_ids(held)
    kept = {topic: ids[topic] for topic in table_topics(config) if topic in ids}
    return with_ids(wanted, kept) if kept else wanted


def _go_on(config: Config, connect: ConnectClient, wanted: ConnectorConfig) -> None:
    """Create a connector that was removed, to go on from the position that Connect remembers."""
    name = connector_name(config)
    connect.create_stopped(name, wanted)
    try:
        _check_phase(connect.phase(name), wanted)
    except SourceError:
        connect.delete(name)
        raise
    connect.resume(name)


def _check_phase(phase: Phase, held: ConnectorConfig) -> None:
    """Refuse a snapshot into topics that have records of another one."""
    is_first = phase is Phase.NOTHING and noted_ids(held)
    if phase is not Phase.STREAM and not is_first:
        raise SourceError(
            "the connector would take a snapshot into topics that have records from before",
            hint=f"rows deleted in between would stay in the sinks for ever; run: {_RESYNC}",
        )


def _check_additions(held: ConnectorConfig | None, wanted: ConnectorConfig) -> None:
    """Refuse a table that a running connector would join without its existing rows.

    Debezium takes its snapshot once, so only later changes of the new table would arrive.
    """
    new = set() if held is None else captured(wanted) - captured(held)
    if new:
        raise SourceError(
            f"the connector is already past its snapshot, which lacks {', '.join(sorted(new))}",
            hint="cdc resync: all tables are read anew; "
            "or sync the new table under a configuration of its own name",
        )


def _state(found: ConnectorStatus | None) -> str:
    return found.state if found else "MISSING"


def _hint(
    found: ConnectorStatus | None, held: ConnectorConfig | None, lost: Mapping[str, str]
) -> str:
    if found is None:
        return "create it with `cdc connectors apply`"
    if lost or note_of(held) == ANEW:
        return f"run: {_RESYNC}"
    return hint_for(found.failure) if found.state == "FAILED" else ""


@contextmanager
def _connect(config: Config) -> Iterator[ConnectClient]:
    with ConnectClient(config.connect.url, config.connect.timeout) as client:
        yield client
