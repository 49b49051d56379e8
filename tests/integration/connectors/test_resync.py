"""The log begins anew as a whole, whatever state it was in, and whoever is killed on the way."""

import json
from contextlib import closing
from itertools import islice

import pytest

from cdc.errors import SourceError, SourceUnavailable
from connectors import catalogue, lifecycle, topics
from connectors.connect import ConnectClient
from connectors.postgres import (
    ANEW,
    NOTE,
    ConnectorConfig,
    connector_name,
    note_of,
    noted_ids,
    quarantine_topic,
    slot_name,
    table_topics,
    topic_of,
)
from tests.support.source import configured, is_whole, read_log, rows_in_log, state_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs("postgres", "kafka", "connect")


@pytest.fixture
def connect(stack):
    with ConnectClient(stack["CDC_CONNECT_URL"]) as client:
        yield client


@pytest.fixture
def log(table, database):
    """A running log of three rows."""
    database.execute("INSERT INTO t SELECT generate_series(1, 3)")
    lifecycle.apply(table)
    wait_until(lambda: is_whole(table))
    return table


def topic(config):
    return topic_of(config, f"{config.name}.t")


def steps_of(config, connect):
    with catalogue.alone(config) as check:
        yield from lifecycle.steps(config, connect, lifecycle._wanted(config, connect), check)


def cut_short(config, connect, count):
    """Do the first *count* steps of a resync and no more, as if killed there; None: all."""
    with closing(steps_of(config, connect)) as steps:
        return list(islice(steps, count))


def test_resync_brings_every_row_into_new_topics(log, database):
    """New ids, a snapshot of what is there now, changes after it; the quarantine stays."""
    before = topics.ids(log)
    database.execute("DELETE FROM t WHERE id = 3")
    lifecycle.resync(log)
    after = topics.ids(log)
    assert before[topic(log)] != after[topic(log)]
    assert before[quarantine_topic(log)] == after[quarantine_topic(log)]
    wait_until(lambda: is_whole(log))
    database.execute("INSERT INTO t VALUES (4)")
    records = {key["id"]: value["op"] for key, value in read_log(log, "t", 3)}
    assert records == {1: "r", 2: "r", 4: "c"}
    assert lifecycle.apply(log).changes == []


def test_resync_makes_a_log_where_there_is_none(table, database):
    """A removed connector, a lost slot and missing topics are no obstacle."""
    database.execute("INSERT INTO t VALUES (1)")
    assert f"created connector {connector_name(table)}" in lifecycle.resync(table)
    assert [value["op"] for _, value in read_log(table, "t", 1)] == ["r"]
    lifecycle.remove(table, drop_slot=True)
    lifecycle.resync(table)
    wait_until(lambda: is_whole(table))
    assert rows_in_log(table, "t") == {1}


def test_resync_cut_short_after_any_step_is_completed(log, connect, database):
    """Each run starts in the state that the one before it was killed in."""
    rows = {1, 2, 3}
    for count in range(1, 20):
        done = cut_short(log, connect, count)
        if done[-1].startswith("started"):
            break
        assert not is_whole(log), done
        rows.add(100 + count)
        database.execute("INSERT INTO t VALUES (%s)", (100 + count,))
    assert len(rows) > 8
    wait_until(lambda: is_whole(log))
    assert rows_in_log(log, "t") == rows


@pytest.mark.parametrize("step", ["forgot any position", "noted the ids", "noted that the log"])
def test_resync_cut_short_is_completed_by_apply(log, connect, step):
    """Nobody needs to know what was under way; and a restart does not go on with the old log."""
    whole = cut_short(log, connect, None)
    count = next(at for at, done in enumerate(whole, 1) if done.startswith(step))
    cut_short(log, connect, count)
    if note_of(connect.config(connector_name(log))) == ANEW:
        with pytest.raises(SourceError, match="about to begin anew"):
            lifecycle.restart(log)
        assert "cdc resync" in lifecycle.status(log)["hint"]
    assert lifecycle.apply(log).changes
    wait_until(lambda: is_whole(log))
    assert rows_in_log(log, "t") == {1, 2, 3}


def test_two_resyncs_do_not_meet(log, connect):
    """The second one is refused and changes nothing; the lock goes with its holder."""
    before = topics.ids(log)
    with catalogue.alone(log), pytest.raises(SourceError, match="another resync") as caught:
        lifecycle.resync(log)
    assert caught.value.hint
    assert topics.ids(log) == before
    assert noted_ids(connect.config(connector_name(log))) == {topic(log): before[topic(log)]}
    assert is_whole(log)


def test_resync_stops_when_it_is_alone_no_more(log, connect, database):
    """Without its lock it must not delete what another one may just have made."""
    before = topics.ids(log)
    holder = (
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory'"
        " AND (classid::bigint << 32 | objid::bigint) = %s"
    )
    steps = steps_of(log, connect)
    while not next(steps).startswith("stopped"):  # before anything is destroyed
        pass
    (pid,) = database.execute(holder, (catalogue.lock_key(log),)).fetchone()
    database.execute("SELECT pg_terminate_backend(%s)", (pid,))
    with pytest.raises(SourceUnavailable, match="broke off"):
        next(steps)
    assert topics.ids(log) == before
    assert catalogue.read_slot(log) is not None
    lifecycle.resync(log)


def test_resync_acts_only_upon_the_note_that_was_seen(log, connect):
    """Whoever comes second finds the work done."""
    before = topics.ids(log)
    assert lifecycle.resync(log, seen=ANEW) == []
    assert lifecycle.resync(log, seen="") == []
    assert topics.ids(log) == before
    assert lifecycle.resync(log, seen=note_of(connect.config(connector_name(log))))
    assert topics.ids(log) != before


@pytest.mark.parametrize("is_made_again", [False, True])
def test_apply_refuses_a_log_that_lacks_records(log, is_made_again):
    """A topic that was deleted has lost its rows, made again or not; the way out is named."""
    topics.remove_topics(log, [topics.log_topics(log)[0]])
    if is_made_again:
        topics.ensure_topics(log)
    assert not is_whole(log)
    status = lifecycle.status(log)
    assert status["topics"][0]["state"] == ("RECREATED" if is_made_again else "MISSING")
    assert "cdc resync" in status["hint"]
    with pytest.raises(SourceError, match=r"was deleted.* lacks") as caught:
        lifecycle.apply(log)
    assert "cdc resync" in caught.value.hint
    assert (topic(log) in topics.ids(log)) is is_made_again
    lifecycle.resync(log)
    wait_until(lambda: is_whole(log))
    assert rows_in_log(log, "t") == {1, 2, 3}


def test_new_topics_begin_with_a_snapshot_though_an_old_position_survives(log):
    """Connect remembers the position of a deleted connector, and would go on from it."""
    lifecycle.remove(log)
    topics.remove_topics(log, topics.log_topics(log))
    assert catalogue.read_slot(log) is not None
    assert f"forgot any position of connector {connector_name(log)}" in lifecycle.apply(log).changes
    wait_until(lambda: is_whole(log))
    assert rows_in_log(log, "t") == {1, 2, 3}


def test_lost_position_is_refused_when_the_topics_have_records(log, connect):
    """The snapshot that would follow says nothing of rows deleted since."""
    connector = connector_name(log)
    connect.stop(connector)
    connect.wait_stopped(connector, 30)
    connect.forget_position(connector)
    connect.delete(connector)
    with pytest.raises(SourceError, match="would take a snapshot") as caught:
        lifecycle.apply(log)
    assert "cdc resync" in caught.value.hint
    assert state_of(log) == "MISSING"


def test_nothing_is_noted_that_is_not_known(log, connect, database):
    """A connector of an older version, or one that was removed, stays without a note."""
    connector = connector_name(log)
    held = connect.config(connector)
    older = ConnectorConfig({k: v for k, v in held.items() if k not in ("name", NOTE)})
    connect.restart(connector, older)
    connect.wait_running(connector, 30)
    assert lifecycle.apply(log).changes == []
    assert not is_whole(log)
    lifecycle.remove(log)
    lifecycle.apply(log)
    assert note_of(connect.config(connector)) == ""
    assert not is_whole(log)


def test_stopped_connector_is_resumed_by_apply(log, connect, database):
    """Apply ends with changes flowing."""
    connect.stop(connector_name(log))
    connect.wait_stopped(connector_name(log), 30)
    assert lifecycle.apply(log).changes == [
        f"resumed connector {connector_name(log)}, which was stopped"
    ]
    database.execute("INSERT INTO t VALUES (4)")
    wait_until(lambda: rows_in_log(log, "t") == {1, 2, 3, 4})


def test_table_that_leaves_takes_its_note_along(stack, name, database):
    """What is noted is of the tables that are synced."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
    both, one = configured(stack, name, "t", "u"), configured(stack, name, "t")
    lifecycle.apply(both)
    assert (
        f"connector {connector_name(one)}: note the ids of its topics"
        in lifecycle.apply(one).changes
    )
    wait_until(lambda: is_whole(one))
    assert not is_whole(both)
    topics.remove_topics(both, topics.log_topics(both))


def test_resync_is_a_command(pipeline):
    """It says what it did, in words or as JSON."""
    shop = pipeline("t")
    shop.db.execute(f"CREATE TABLE {shop.name}.t (id int PRIMARY KEY)")
    path = shop.config_path(["redis"])
    config = shop.apply(path)
    said = shop.cdc("resync", "-c", str(path), "--json")
    assert said.returncode == 0, said.stderr
    changes = json.loads(said.stdout)["changes"]
    assert changes[0] == "noted that the log begins anew"
    assert changes[-1] == f"started connector {connector_name(config)}"
    assert f"dropped slot {slot_name(config)}" in changes
    assert {f"created topic {each}" for each in table_topics(config)} <= set(changes)
    assert shop.env["CDC_PG_PASSWORD"] not in said.stdout + said.stderr
