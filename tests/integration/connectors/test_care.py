"""What the daemon does for its source, on real servers."""

import threading

import pytest
import requests
from structlog.testing import CapturingLogger

from connectors import catalogue, lifecycle, snapshots, topics
from connectors.care import Care, keep
from connectors.connect import ConnectClient
from connectors.postgres import (
    ConnectorConfig,
    connector_name,
    heartbeat_topic,
    publication_name,
    quarantine_topic,
    slot_name,
    table_topics,
    topic_of,
)
from tests.support.source import NOWHERE, configured, is_whole, read_log, rows_in_log, state_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs("postgres", "kafka", "connect")

ROW_VALUE = "alice@example.org"


@pytest.fixture
def connect(stack):
    with ConnectClient(stack["CDC_CONNECT_URL"]) as client:
        yield client


class Cared:
    """A source under care. Looks when told to."""

    def __init__(self, config):
        self.log = CapturingLogger()
        self._care = Care(config, self.log)

    def look(self, times=1):
        for _ in range(times):
            self._care.look()

    def said(self):
        return [call.args[0] for call in self.log.calls]

    def reasons(self, event):
        return [call.kwargs["reason"] for call in self.log.calls if call.args[0] == event]

    def look_until(self, event):
        def look():
            self._care.look()
            return event in self.said()

        wait_until(look)


@pytest.fixture
def log(table, database):
    """A running log of three rows."""
    database.execute("INSERT INTO t (id, large) SELECT generate_series(1, 3), %s", (ROW_VALUE,))
    lifecycle.apply(table)
    wait_until(lambda: is_whole(table))
    return table


@pytest.fixture
def kept(log):
    cared = Cared(log)
    yield cared
    assert ROW_VALUE not in repr(cared.log.calls)


def topic(config):
    return topic_of(config, f"{config.name}.t")


def spec(config):
    return topics.log_topics(config)[:1]


@pytest.mark.parametrize("is_made_again", [False, True])
def test_deleted_topic_is_healed_while_the_connector_runs(log, database, is_made_again):
    """The task goes on writing into the new topic as if nothing were missing; care knows better."""
    logger, stop = CapturingLogger(), threading.Event()
    thread = threading.Thread(target=keep, args=(log, stop, logger))
    thread.start()
    try:
        before = topics.ids(log)[topic(log)]
        topics.remove_topics(log, spec(log))
        if is_made_again:
            topics.ensure_topics(log)
        database.execute("INSERT INTO t VALUES (4)")
        wait_until(lambda: topics.ids(log).get(topic(log), before) != before and is_whole(log))
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert rows_in_log(log, "t") == {1, 2, 3, 4}
    begun = [call.kwargs["reason"] for call in logger.calls if call.args[0] == "resync begun"]
    assert len(begun) == 1
    assert begun[0].startswith(f"topic {topic(log)} was deleted")


def test_healthy_source_is_let_be(log, kept, connect):
    """No restart, no resync, no word."""
    before = topics.ids(log), connect.config(connector_name(log))
    kept.look(3)
    assert kept.said() == []
    assert (topics.ids(log), connect.config(connector_name(log))) == before


def test_failed_task_is_restarted(log, kept, database):
    """PostgreSQL cut it off; nothing is lost, and nothing is read anew."""
    before = topics.ids(log)
    end_reading(log, database)
    wait_until(lambda: state_of(log) == "FAILED")
    database.execute("INSERT INTO t VALUES (4)")
    kept.look_until("source is well")
    assert kept.said() == ["connector restarted", "source is well"]
    (call,) = (call for call in kept.log.calls if call.args[0] == "connector restarted")
    assert "PSQLException" in call.kwargs["reason"]
    assert call.kwargs["hint"]
    assert call.kwargs["attempt"] == 1
    wait_until(lambda: rows_in_log(log, "t") == {1, 2, 3, 4})
    assert topics.ids(log) == before


def test_task_that_fails_again_is_restarted_less_and_less_often(log, kept, connect, database):
    """Every attempt is counted, and a restart that helps at last is enough."""
    before = topics.ids(log)
    held = connect.config(connector_name(log))
    del held["name"]
    broken = {**held, "post.processors.reselect.type": "nowhere.Missing"}
    connect.put(connector_name(log), ConnectorConfig(broken))
    wait_until(lambda: state_of(log) == "FAILED")
    wait_until(lambda: kept.look() or len(kept.reasons("connector restarted")) >= 3)
    attempts = [call.kwargs["attempt"] for call in kept.log.calls]
    assert attempts[:3] == [1, 2, 3]
    connect.put(connector_name(log), held)
    database.execute("INSERT INTO t VALUES (4)")
    wait_until(lambda: kept.look() or rows_in_log(log, "t") == {1, 2, 3, 4})
    assert topics.ids(log) == before


def end_reading(config, database):
    wait_until(lambda: catalogue.read_slot(config).active)
    database.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s",
        (slot_name(config),),
    )
    wait_until(lambda: not catalogue.read_slot(config).active)


@pytest.mark.parametrize("what", ["slot", "slot made again", "publication"])
def test_lost_changes_are_healed(log, kept, connect, database, what):
    """What the slot had kept is gone for ever, or cannot be decoded: no restart can help."""
    connector = connector_name(log)
    database.execute("INSERT INTO t VALUES (4)")
    wait_until(lambda: rows_in_log(log, "t") == {1, 2, 3, 4})
    connect.stop(connector)
    connect.wait_stopped(connector, 30)
    wait_until(lambda: not catalogue.read_slot(log).active)
    if what == "publication":
        database.execute(f"DROP PUBLICATION {publication_name(log)}")
    else:
        database.execute("SELECT pg_drop_replication_slot(%s)", (slot_name(log),))
    database.execute("DELETE FROM t WHERE id = 1")
    if what == "slot made again":
        make = "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')"
        database.execute(make, (slot_name(log),))
    database.execute("INSERT INTO t VALUES (5)")
    connect.resume(connector)
    kept.look_until("resync done")
    wait_until(lambda: is_whole(log))
    assert rows_in_log(log, "t") == {2, 3, 4, 5}
    assert kept.reasons("resync begun")[0].startswith("changes are lost")


def test_snapshot_that_was_cut_short_leaves_no_rows_behind(table, connect, database):
    """A row in the first part that is gone before the second snapshot would stay for ever."""
    database.execute("INSERT INTO t SELECT generate_series(1, 30000)")
    lifecycle.apply(table)
    name = topic(table)
    wait_until(lambda: sum(topics.describe(table, [name])[name].end.values()) > 2000)
    assert not is_whole(table)
    (first,) = {key["id"] for key, _ in read_log(table, "t", 1)}
    database.execute("DELETE FROM t WHERE id = %s", (first,))
    connect._call("POST", f"/connectors/{connector_name(table)}/restart?includeTasks=true")
    wait_until(lambda: is_whole(table))
    assert first in rows_in_log(table, "t")
    cared = Cared(table)
    cared.look_until("resync done")
    assert cared.reasons("resync begun") == ["the snapshot was cut short and another one taken"]
    wait_until(lambda: is_whole(table))
    assert first not in rows_in_log(table, "t")
    assert len(rows_in_log(table, "t")) == 29_999
    assert snapshots.is_single(table, topics.describe(table, table_topics(table)))


def test_single_snapshot_is_found_among_later_changes(stack, name, database):
    """Empty tables, deletes, updates and several tables do not make two of one."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int); CREATE TABLE u (LIKE t INCLUDING ALL)"
    )
    database.execute("INSERT INTO t SELECT generate_series(1, 100)")
    config = configured(stack, name, "t", "u")
    lifecycle.apply(config)
    wait_until(lambda: is_whole(config))
    found = lambda: snapshots._snapshots(config, topics.describe(config, table_topics(config)))  # noqa: E731
    assert len(found()) == 1
    database.execute("UPDATE t SET n = 1")
    database.execute("DELETE FROM t WHERE id <= 50")
    database.execute("INSERT INTO u SELECT generate_series(1, 100)")
    wait_until(lambda: len(rows_in_log(config, "u")) == 100)
    assert len(found()) == 1
    assert snapshots.is_single(config, {})


@pytest.mark.parametrize("last", ["noted that the log", "deleted topic", "noted the ids"])
def test_resync_of_a_killed_process_is_completed(log, kept, connect, last):
    """Whoever began it, the daemon ends it."""
    with catalogue.alone(log) as check:
        for done in lifecycle.steps(log, connect, lifecycle._wanted(log, connect), check):
            if done.startswith(last):
                break
        kept.look(2)
    wait_until(lambda: kept.look() or is_whole(log))
    assert rows_in_log(log, "t") == {1, 2, 3}
    assert state_of(log) == "RUNNING"


def test_resync_under_way_is_not_disturbed(log, kept, connect):
    """While somebody holds the lock the daemon waits, and says so once."""
    with catalogue.alone(log) as check:
        steps = lifecycle.steps(log, connect, lifecycle._wanted(log, connect), check)
        next(steps)
        kept.look()
        next(steps)
        kept.look_until("the source cannot be kept")
        for _ in steps:
            pass
    wait_until(lambda: is_whole(log))
    ids = topics.ids(log)
    wait_until(lambda: kept.look() or "source is well" in kept.said())
    assert topics.ids(log) == ids


@pytest.mark.parametrize("order", ["pause", "stop"])
def test_person_who_stopped_the_connector_is_obeyed(log, kept, connect, order):
    """Not restarted, not even when a topic is gone; told once."""
    connect._call("PUT", f"/connectors/{connector_name(log)}/{order}")
    wait_until(lambda: state_of(log) in ("PAUSED", "STOPPED"))
    topics.remove_topics(log, spec(log))
    kept.look(4)
    assert kept.said() == ["connector left alone"]
    assert topic(log) not in topics.ids(log)
    assert state_of(log) in ("PAUSED", "STOPPED")


def test_missing_connector_is_told_once(table):
    """It was removed by hand, or never made: only a person knows."""
    cared = Cared(table)
    cared.look(4)
    assert cared.said() == ["connector left alone"]
    assert cared.log.calls[0].kwargs["hint"] == "run: cdc connectors apply"


@pytest.mark.parametrize(
    "place", [{"connect": f"http://127.0.0.1:{NOWHERE}"}, {"kafka": f"127.0.0.1:{NOWHERE}"}]
)
def test_unreachable_server_is_told_once_and_changes_nothing(stack, log, place):
    """What cannot be seen is not judged."""
    before = topics.ids(log)
    cared = Cared(configured(stack, log.name, "t", **place))
    cared.look(3)
    assert cared.said() == ["the source cannot be kept"]
    assert topics.ids(log) == before
    assert state_of(log) == "RUNNING"


def test_topics_beside_the_log_are_made_again(log, kept):
    """Without heartbeats the task would fail; neither topic holds rows, so nothing is read anew."""
    before = topics.ids(log)[topic(log)]
    topics.remove_topics(log, topics.wanted_topics(log)[1:])
    kept.look(2)
    assert kept.said() == ["topic made again", "topic made again"]
    assert {heartbeat_topic(log), quarantine_topic(log)} <= topics.ids(log).keys()
    assert topics.ids(log)[topic(log)] == before


def test_log_without_a_note_is_told(log, kept, connect):
    """Nobody can prove it whole, so sinks will not sweep: the way out is named, once."""
    held = connect.config(connector_name(log))
    bare = ConnectorConfig(
        {k: v for k, v in held.items() if not k.startswith("cdc.") and k != "name"}
    )
    connect.restart(connector_name(log), bare)
    connect.wait_running(connector_name(log), 30)
    kept.look(3)
    assert kept.said() == ["log not known to be whole"]
    assert requests.get(log.connect.url, timeout=10).ok
