"""The way into the log, on real servers: PostgreSQL, Debezium in Kafka Connect, Kafka.

Every test has its own configuration name and schema, and leaves nothing behind.
"""

import json
import socket
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from cdc.config import Connect
from cdc.errors import SourceError, SourceUnavailable
from connectors import catalogue, lifecycle, topics
from connectors.connect import ConnectClient
from connectors.postgres import connector_config, connector_name, slot_name, topic_of
from tests.support.source import NOWHERE, configured, is_whole, read_log, state_of, with_kafka
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs("postgres", "kafka", "connect")

LARGE = "x0123456789abcdef" * 1000


def test_apply_creates_topics_and_a_running_task_once(table):
    """The second apply finds nothing to do."""
    topic = topic_of(table, f"{table.name}.t")
    assert lifecycle.apply(table).changes == [
        f"created connector {connector_name(table)}",
        f"forgot any position of connector {connector_name(table)}",
        f"created topic {topic}",
        f"created topic __debezium-heartbeat.{table.name}",
        f"created topic __cdc-quarantine.{table.name}",
        "noted the ids of the new topics",
        f"started connector {connector_name(table)}",
    ]
    assert lifecycle.apply(table).changes == []
    # The slot is made before the snapshot and read after it.
    wait_until(lambda: catalogue.read_slot(table).active)
    found = lifecycle.status(table)
    assert found["state"] == "RUNNING"
    assert {part["part"]: part["state"] for part in found["parts"]} == {
        "connector": "RUNNING",
        "task 0": "RUNNING",
        "slot": "ACTIVE",
    }
    assert table.source.password.get_secret_value() not in json.dumps(found)


def test_apply_sets_drifted_topics_back_and_refuses_lossy_ones(table, database):
    """Retention is mended; a topic that was not compacted may have lost rows already."""
    topics.ensure_topics(table)
    longer = table.model_copy(
        update={"kafka": table.kafka.model_copy(update={"delete_retention": 5.0})}
    )
    assert len(topics.ensure_topics(longer)) == 2
    assert topics.ensure_topics(longer) == []
    with pytest.raises(SourceError, match="has 2 partitions, not 7") as caught:
        topics.ensure_topics(with_kafka(table, partitions=7))
    assert "kafka.partitions = 2" in caught.value.hint
    with topics._admin(table) as admin:
        topics._alter(admin, topic_of(table, f"{table.name}.t"), {"cleanup.policy": "delete"})
    with pytest.raises(SourceError, match=r"cleanup\.policy=delete"):
        lifecycle.apply(table)


def test_rows_arrive_as_they_are(stack, name, database):
    """Times are ISO text, NULL stays NULL despite a default, generated columns stay out."""
    database.execute(
        """
        CREATE TABLE t (
            id   int PRIMARY KEY,
            d    date,
            t    time,
            tz   timetz,
            ts   timestamp,
            tstz timestamptz,
            num  numeric(12, 2),
            by   bytea,
            txt  text DEFAULT 'filled',
            twice int GENERATED ALWAYS AS (id * 2) STORED
        )
        """
    )
    insert = """
        INSERT INTO t VALUES (
            %s, '2026-01-02', '03:04:05.678901', '03:04:05+02', '2026-01-02 03:04:05.5',
            '2026-01-02 03:04:05.5+02', 2.5, '\\xdead', NULL
        )
        """
    database.execute(insert, (1,))
    config = configured(stack, name, "t")
    lifecycle.apply(config)
    database.execute(insert, (2,))
    records = read_log(config, "t", 2)
    assert {"r", "c"} == {value["op"] for _, value in records}
    for key, value in records:
        assert value["after"] == {
            **key,
            "d": "2026-01-02Z",
            "t": "03:04:05.678901Z",
            "tz": "01:04:05Z",
            "ts": "2026-01-02T03:04:05.5Z",
            "tstz": "2026-01-02T01:04:05.500000Z",
            "num": "2.50",
            "by": "3q0=",
            "txt": None,
        }
    columns = catalogue.read_tables(config)[topic_of(config, f"{name}.t")].columns
    assert set(records[0][1]["after"]) == {column.name for column in columns}


def test_untouched_large_value_is_in_the_update(table, database):
    """Reselect fetches what the WAL lacks, under REPLICA IDENTITY DEFAULT."""
    database.execute("INSERT INTO t VALUES (1, 1, %s)", (LARGE,))
    lifecycle.apply(table)
    database.execute("UPDATE t SET n = 2")
    (_, first), (_, second) = read_log(table, "t", 2)
    assert (first["op"], second["op"]) == ("r", "u")
    assert second["after"] == {"id": 1, "n": 2, "large": LARGE}


def test_untouched_large_value_of_a_deleted_row_is_a_placeholder(table, database):
    """Reselect cannot find a row that is gone: the delete follows, and readers must expect it."""
    database.execute("INSERT INTO t VALUES (1, 1, %s)", (LARGE,))
    lifecycle.apply(table)
    with database.transaction():
        database.execute("UPDATE t SET n = 2")
        database.execute("DELETE FROM t")
    records = [value for _, value in read_log(table, "t", 4)]
    assert records[1]["after"]["large"] == "__debezium_unavailable_value"
    assert records[2]["op"] == "d"
    assert records[3] is None


def test_full_identity_has_every_value_in_every_update(table, database):
    """Under REPLICA IDENTITY FULL there is no placeholder, even if the row is gone."""
    assert catalogue.set_identity_full(table) == [f"set REPLICA IDENTITY FULL on {table.name}.t"]
    assert catalogue.set_identity_full(table) == []
    assert catalogue.read_catalogue(table).reselected == ()
    database.execute("INSERT INTO t VALUES (1, 1, %s)", (LARGE,))
    lifecycle.apply(table)
    with database.transaction():
        database.execute("UPDATE t SET n = 2")
        database.execute("DELETE FROM t")
    records = [value for _, value in read_log(table, "t", 4)]
    assert records[1]["after"] == {"id": 1, "n": 2, "large": LARGE}


def test_changed_primary_key_is_a_delete_and_a_create(table, database):
    """The old key gets a delete and a tombstone, the new key the row."""
    database.execute("INSERT INTO t VALUES (1, 1, 'a')")
    lifecycle.apply(table)
    database.execute("UPDATE t SET id = 2")
    records = [(key["id"], value and value["op"]) for key, value in read_log(table, "t", 4)]
    assert [op for at, op in records if at == 1] == ["r", "d", None]
    assert [op for at, op in records if at == 2] == ["c"]


def test_truncate_does_not_stop_the_task(table, database):
    """A TRUNCATE is skipped, and what comes after it still arrives."""
    lifecycle.apply(table)
    database.execute("INSERT INTO t VALUES (1)")
    database.execute("TRUNCATE t")
    database.execute("INSERT INTO t VALUES (2)")
    assert {1, 2} == {key["id"] for key, _ in read_log(table, "t", 2)}
    assert state_of(table) == "RUNNING"


def test_idle_slot_moves_on(table, database):
    """Heartbeats acknowledge WAL that other tables write."""
    lifecycle.apply(table)
    database.execute("CREATE TABLE other AS SELECT generate_series(1, 100000) AS i")
    written = database.execute("SELECT pg_current_wal_lsn()").fetchone()[0]
    passed = "SELECT confirmed_flush_lsn >= %s FROM pg_replication_slots WHERE slot_name = %s"
    wait_until(lambda: database.execute(passed, (written, slot_name(table))).fetchone()[0], 60)


def test_describe_ends_at_the_last_stable_offset(table, database):
    """What a reader of committed records can reach, per partition; missing topics are absent."""
    topic = topic_of(table, f"{table.name}.t")
    assert topics.describe(table, [topic]) == {}
    lifecycle.apply(table)
    before = topics.describe(table, [topic, "missing"])
    assert [topic] == list(before)
    assert {0: 0, 1: 0} == before[topic].start == before[topic].end
    database.execute("INSERT INTO t SELECT generate_series(1, 20)")
    read_log(table, "t", 20)
    after = topics.describe(table, [topic])[topic]
    assert after.topic_id == before[topic].topic_id
    assert sum(after.end.values()) >= 20


def test_remove_keeps_the_slot_and_goes_on_where_it_was(table, database):
    """Changes made while there was no connector arrive when it is applied again."""
    lifecycle.apply(table)
    database.execute("INSERT INTO t VALUES (1)")
    read_log(table, "t", 1)
    assert lifecycle.remove(table) == [f"deleted connector {connector_name(table)}"]
    assert state_of(table) == "MISSING"
    assert catalogue.read_slot(table) is not None
    database.execute("INSERT INTO t VALUES (2)")
    assert lifecycle.apply(table).changes == [f"created connector {connector_name(table)}"]
    assert [value["op"] for _, value in read_log(table, "t", 2)] == ["c", "c"]


def test_remove_with_the_slot_needs_new_topics(table, database):
    """A snapshot into old topics would keep deleted rows: refused, until the log goes as well."""
    database.execute("INSERT INTO t VALUES (1)")
    lifecycle.apply(table)
    read_log(table, "t", 1)
    assert f"dropped slot {slot_name(table)}" in lifecycle.remove(table, drop_slot=True)
    assert catalogue.read_slot(table) is None
    with pytest.raises(SourceError, match="have records from before") as caught:
        lifecycle.apply(table)
    assert "cdc resync" in caught.value.hint
    topic = topic_of(table, f"{table.name}.t")
    assert f"deleted topic {topic}" in lifecycle.remove(table, drop_log=True)
    assert lifecycle.remove(table, drop_log=True) == []
    lifecycle.apply(table)
    assert [value["op"] for _, value in read_log(table, "t", 1)] == ["r"]


def test_log_is_whole_when_the_snapshot_is_committed_to_the_last_row(table, database):
    """Not before, not for other topics, and not when nobody can be asked."""
    database.execute("INSERT INTO t SELECT generate_series(1, 30000)")
    topic = topic_of(table, f"{table.name}.t")
    assert not lifecycle.is_whole(table, {})
    lifecycle.apply(table)
    seen = []
    while not seen or not seen[-1][0]:
        # Asked first: rows only come, so a log that was whole then has them all now.
        is_whole = lifecycle.is_whole(table, topics.describe(table, [topic]))
        seen.append((is_whole, sum(topics.describe(table, [topic])[topic].end.values())))
        assert len(seen) < 300
    assert not seen[0][0]
    assert any(0 < end < 30_000 for is_whole, end in seen if not is_whole)
    assert seen[-1][1] >= 30_000
    state = topics.describe(table, [topic])[topic]
    assert not lifecycle.is_whole(table, {topic: replace(state, topic_id="another")})
    assert not lifecycle.is_whole(table, {topic: state, "foreign": state})
    unreachable = Connect(url=f"http://127.0.0.1:{NOWHERE}")
    assert not lifecycle.is_whole(table.model_copy(update={"connect": unreachable}), {topic: state})


def test_new_table_is_refused_after_the_snapshot(stack, table, database):
    """Its existing rows would be missing in the log."""
    lifecycle.apply(table)
    database.execute("CREATE TABLE late (id int PRIMARY KEY)")
    database.execute("INSERT INTO late VALUES (1)")
    both = configured(stack, table.name, "t", "late")
    with pytest.raises(SourceError, match=rf"lacks {table.name}\.late") as caught:
        lifecycle.apply(both)
    assert "cdc resync" in caught.value.hint
    assert state_of(table) == "RUNNING"
    lifecycle.resync(both)
    assert [value["op"] for _, value in read_log(both, "late", 1)] == ["r"]
    wait_until(lambda: is_whole(both))


@pytest.mark.parametrize("is_made_again", [False, True])
def test_lost_slot_fails_the_task_and_is_reported(table, database, is_made_again):
    """The connector says RUNNING, its task has FAILED, and the status says so with a way out."""
    slot, connector = slot_name(table), connector_name(table)
    lifecycle.apply(table)
    database.execute("INSERT INTO t VALUES (1)")
    read_log(table, "t", 1)
    with ConnectClient(table.connect.url) as connect:
        connect.stop(connector)
        connect.wait_stopped(connector, 30)
        wait_until(lambda: not catalogue.read_slot(table).active)
        database.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        database.execute("INSERT INTO t VALUES (2)")
        if is_made_again:
            database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
            database.execute("INSERT INTO t VALUES (3)")
        connect._call("PUT", f"/connectors/{connector}/resume")
        found = wait_until(lambda: (s := connect.status(connector)).state == "FAILED" and s)
        assert found.connector == "RUNNING"
    status = lifecycle.status(table)
    assert status["state"] == "FAILED"
    assert "cdc resync" in status["hint"]
    with pytest.raises(SourceError, match="failed:"):
        lifecycle.apply(table)


def test_restart_goes_on_where_it_was(table, database):
    """After a restart the task runs, and nothing comes twice."""
    database.execute("INSERT INTO t VALUES (1)")
    lifecycle.apply(table)
    lifecycle.restart(table)
    assert state_of(table) == "RUNNING"
    database.execute("INSERT INTO t VALUES (2)")
    assert sorted(key["id"] for key, _ in read_log(table, "t", 2)) == [1, 2]


def test_changed_configuration_is_in_force_when_apply_returns(table, database):
    """Every difference is said, and the running task is one that began with the new settings."""
    lifecycle.apply(table)
    connector = connector_name(table)
    with ConnectClient(table.connect.url) as connect:
        older = connect.config(connector)
        del older["name"]
        older["poll.interval.ms"] = "500"
        older["max.batch.size"] = "100"
        connect.restart(connector, older)
        connect.wait_running(connector, 30)
        assert lifecycle.apply(table).changes == [
            f"connector {connector}: drop max.batch.size",
            f"connector {connector}: set poll.interval.ms to 10",
        ]
        assert connect.status(connector).state == "RUNNING"
    assert lifecycle.apply(table).changes == []
    database.execute("INSERT INTO t VALUES (1)")
    read_log(table, "t", 1)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"connect": f"http://127.0.0.1:{NOWHERE}"}, "refused the connection"),
        ({"kafka": f"127.0.0.1:{NOWHERE}"}, "out of reach"),
        ({"pg_port": NOWHERE}, "out of reach"),
    ],
)
def test_unreachable_server_leaves_nothing_half_made(stack, table, capfd, place, words):
    """One sentence, a hint, within seconds; no topic, no connector, no slot."""
    broken = configured(stack, table.name, "t", **place)
    begun = time.monotonic()
    with pytest.raises(SourceUnavailable, match=words) as caught:
        lifecycle.apply(broken)
    assert time.monotonic() - begun < 15
    assert caught.value.hint
    assert capfd.readouterr().err == ""
    found = lifecycle.status(table)
    assert found["state"] == "MISSING"
    assert found["slot"] is None
    assert {"MISSING"} == {topic["state"] for topic in found["topics"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"password": "wrong-but-secret"}, "refused the user"),
        ({"database": "no_such_database"}, "no_such_database"),
    ],
)
def test_refused_login_is_said_without_the_secret(stack, table, change, words):
    """A wrong password is no outage: it is not retried."""
    broken = configured(stack, table.name, "t", **change)
    with pytest.raises(SourceError, match=words) as caught:
        catalogue.read_tables(broken)
    assert not isinstance(caught.value, SourceUnavailable)
    assert caught.value.hint
    assert "wrong-but-secret" not in repr(caught.value)
    assert caught.value.__cause__ is None


def test_connect_refuses_a_bad_configuration_without_the_secret(table):
    """Connect's own messages are listed; the password is in none of them."""
    config = connector_config(table)
    config["database.password"] = "wrong-but-secret"
    config["snapshot.mode"] = "wrong-but-secret"
    with ConnectClient(table.connect.url) as connect:
        for refuse in (connect.validate, lambda it: connect.put(connector_name(table), it)):
            with pytest.raises(SourceError, match=r"snapshot.mode|connection") as caught:
                refuse(config)
            assert "wrong-but-secret" not in str(caught.value)
        assert connect.config(connector_name(table)) is None
        assert connect.status(connector_name(table)) is None
        assert connect.delete(connector_name(table)) is False
        with pytest.raises(SourceError, match="knows no connector"):
            connect.restart(connector_name(table))


@pytest.fixture
def worker():
    """An HTTP server that gives scripted answers: (status, body); the last one repeats."""
    script = []

    class Scripted(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = script.pop(0) if len(script) > 1 else script[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", script
        server.shutdown()
        thread.join()


def test_rebalance_is_waited_out(worker):
    """Connect answers 409 while its workers sort themselves out."""
    url, script = worker
    script += [(409, b'{"message": "rebalance"}'), (409, b"{}"), (200, b'{"a": "1"}')]
    with ConnectClient(url) as connect:
        assert connect.config("x") == {"a": "1"}


def test_foreign_server_is_recognised(worker):
    """Something else than Connect behind the address is said so, not a traceback."""
    url, script = worker
    script += [(200, b"<html>")]
    with (
        ConnectClient(url) as connect,
        pytest.raises(SourceError, match="not answer with JSON"),
    ):
        connect.config("x")
    script[:] = [(500, b'{"message": "first line\\nsecond line"}')]
    with ConnectClient(url) as connect, pytest.raises(SourceError, match=r"500: first line$"):
        connect.config("x")


def test_worker_that_starts_is_not_believed(worker):
    """Before it knows any path it answers 404 with a page: no connector was removed."""
    url, script = worker
    script += [(404, b"<html><title>Error 404 Not Found</title></html>")]
    with (
        ConnectClient(url) as connect,
        pytest.raises(SourceUnavailable, match="404: Not Found"),
    ):
        connect.config("x")
    script[:] = [(404, b'{"error_code":404,"message":"Connector x not found"}')]
    with ConnectClient(url) as connect:
        assert connect.config("x") is None
    script[:] = [(500, b'{"error_code":500,"message":"Request timed out"}')]
    with ConnectClient(url) as connect, pytest.raises(SourceUnavailable, match="500"):
        connect.config("x")


def test_silent_worker_times_out():
    """A port that accepts and never answers is out of reach after the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with ConnectClient(url, 0.3) as connect, pytest.raises(SourceUnavailable, match=r"0\.3 s"):
            connect.plugins()


def test_unfit_tables_are_named_all_at_once(stack, name, database):
    """Missing, keyless, unlogged, no identity, lossy arrays: each with its reason."""
    database.execute(
        """
        CREATE TABLE keyless (id int);
        CREATE UNLOGGED TABLE fast (id int PRIMARY KEY);
        CREATE TABLE mute (id int PRIMARY KEY);
        ALTER TABLE mute REPLICA IDENTITY NOTHING;
        CREATE TABLE lossy (id int PRIMARY KEY, tags uuid[]);
        CREATE TABLE unsent (id int PRIMARY KEY, spans interval[]);
        CREATE VIEW seen AS SELECT 1 AS id
        """
    )
    names = ("missing", "keyless", "fast", "mute", "lossy", "unsent", "seen")
    with pytest.raises(SourceError) as caught:
        lifecycle.apply(configured(stack, name, *names))
    text = str(caught.value)
    for part in (
        f"table {name}.missing does not exist",
        f"table {name}.keyless has no primary key",
        f"table {name}.fast is unlogged",
        f"table {name}.mute has REPLICA IDENTITY NOTHING",
        f"ALTER TABLE {name}.lossy REPLICA IDENTITY FULL",
        "cannot send the type of spans",
        f"{name}.seen is not a table",
    ):
        assert part in text
    assert caught.value.hint


def test_catalogue_reads_columns_and_key_in_order(stack, name, database):
    """Dropped and generated columns are not there; INCLUDE columns are no part of the key."""
    database.execute(
        """
        CREATE TABLE t (
            a numeric(12, 2) NOT NULL,
            gone int,
            "B c" text NOT NULL,
            d timestamptz,
            e int GENERATED ALWAYS AS (1) STORED,
            PRIMARY KEY ("B c", a) INCLUDE (d)
        );
        ALTER TABLE t DROP COLUMN gone
        """
    )
    config = configured(stack, name, "t")
    found = catalogue.read_catalogue(config)
    (read,) = found.tables.values()
    assert read.key == ("B c", "a")
    assert [(column.name, column.type, column.nullable) for column in read.columns[:2]] == [
        ("a", "numeric(12,2)", False),
        ("B c", "text", False),
    ]
    assert [column.name for column in read.columns] == ["a", "B c", "d"]
    assert found.generated == (f"{name}.t.e",)
    now = database.execute("SELECT extract(epoch FROM now()) * 1e6").fetchone()[0]
    assert 0 <= now - read.as_of_us < 60e6


def test_partitioned_table_is_one_table(stack, name, database):
    """Rows of every partition come under the root's name."""
    database.execute(
        """
        CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (0) TO (10);
        CREATE TABLE t_high PARTITION OF t FOR VALUES FROM (10) TO (20);
        INSERT INTO t VALUES (1), (11)
        """
    )
    config = configured(stack, name, "t")
    lifecycle.apply(config)
    database.execute("INSERT INTO t VALUES (2), (12)")
    assert {1, 2, 11, 12} == {key["id"] for key, _ in read_log(config, "t", 4)}
