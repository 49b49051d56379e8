"""PostgreSQL to every sink, through the real Debezium, Kafka and Spark."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tests.support.waiting import wait_until

ROW_KINDS = ("elasticsearch", "redis", "postgres")
EVERY_KIND = (*ROW_KINDS, "delta")

TABLES = """
CREATE TABLE {0}.people (
    id bigint PRIMARY KEY, name text, balance numeric(12,2) DEFAULT 5, born date, seen timestamptz,
    tags text[], doc jsonb, photo bytea, active boolean DEFAULT true
);
CREATE TABLE {0}.parts (left_id text, right_id text, amount int, PRIMARY KEY (left_id, right_id));
"""
PEOPLE = """
INSERT INTO {0}.people
SELECT i, 'name ' || i, i * 1.25, date '2000-01-01' + i, now(), ARRAY['a', NULL, 'c,"d'],
       jsonb_build_object('n', i, 'list', '[1, 2.50, null]'::jsonb), '\\x00ff'::bytea, i %% 2 = 0
FROM generate_series(%s::int, %s::int) AS i
"""


@pytest.fixture
def people(pipeline):
    """A pipeline with two tables and a few hundred rows."""
    found = pipeline("people", "parts")
    found.db.execute(TABLES.format(found.name))
    found.db.execute(PEOPLE.format(found.name), (1, 300))
    found.db.execute(
        f"INSERT INTO {found.name}.parts VALUES"
        " ('a-b', 'c', 1), ('a', 'b-c', 2), ('ü/: {}', '', 3)"
    )
    return found


def test_every_sink_follows_the_source(people, spark):
    """Snapshot, inserts, updates, NULLs, deletes, moved keys and a new column reach all four."""
    config = people.apply(people.config_path(EVERY_KIND))
    with people.running(config, spark):
        wait_until(lambda: not people.differences(config), within_s=180)

        schema = people.name
        people.db.execute(PEOPLE.format(schema), (301, 350))
        with people.db.transaction():
            people.db.execute(f"UPDATE {schema}.people SET balance = balance + 1 WHERE id <= 50")
            people.db.execute(f"UPDATE {schema}.people SET name = NULL, doc = NULL WHERE id = 51")
            people.db.execute(f"DELETE FROM {schema}.people WHERE id BETWEEN 60 AND 70")
            people.db.execute(f"UPDATE {schema}.people SET id = id + 10000 WHERE id = 71")
        people.db.execute(f"DELETE FROM {schema}.people WHERE id = 72")
        people.db.execute(PEOPLE.format(schema), (72, 72))
        people.db.execute(f"UPDATE {schema}.parts SET right_id = 'moved' WHERE left_id = 'a'")
        wait_until(lambda: not people.differences(config), within_s=180)

        people.db.execute(f"ALTER TABLE {schema}.parts ADD COLUMN note text DEFAULT 'none'")
        people.db.execute(f"UPDATE {schema}.parts SET amount = amount + 1")
        wait_until(lambda: not people.differences(config), within_s=180)


def test_once_fills_new_sinks_from_the_log_and_repeats_nothing(people, spark):
    """Empty sinks are taken to the end of the log; a second run finds nothing to do."""
    first = people.apply(people.config_path(["redis"], "first"))
    with people.running(first, spark):
        people.db.execute(f"DELETE FROM {people.name}.people WHERE id <= 10")
        wait_until(lambda: not people.differences(first), within_s=120)

    path = people.config_path(ROW_KINDS, "second")
    config = people.apply(path)
    done = people.cdc("run", "--once", "--config", str(path))
    assert done.returncode == 0, done.stderr
    assert people.differences(config) == {}
    assert sum(applied(done.stderr).values()) >= 3 * 293

    again = people.cdc("run", "--once", "--config", str(path))
    assert again.returncode == 0, again.stderr
    assert sum(applied(again.stderr).values()) == 0
    assert people.differences(config) == {}


def test_sigterm_under_load_stops_cleanly_and_loses_nothing(people, spark):
    """The daemon ends with 0 within its budget; the next run goes on from the sinks' ledgers."""
    path = people.config_path(["redis", "postgres"])
    config = people.apply(path)
    daemon = subprocess.Popen(
        [sys.executable, "-m", "cdc", "run", "--config", str(path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in daemon.stderr:
            if "batch applied" in line:
                break
        for start in range(1000, 6000, 1000):
            people.db.execute(PEOPLE.format(people.name), (start, start + 999))
        daemon.send_signal(signal.SIGTERM)
        _, rest = daemon.communicate(timeout=60)
        assert daemon.returncode == 0, rest
    finally:
        if daemon.poll() is None:
            daemon.kill()
            daemon.communicate()
    people.db.execute(f"UPDATE {people.name}.people SET name = 'after' WHERE id % 7 = 0")
    with people.running(config, spark):
        wait_until(lambda: not people.differences(config), within_s=120)


def test_a_sink_that_is_down_does_not_hold_another(people, spark):
    """Each sink follows the log at its own pace; the dead one waits with a reason."""
    more = '[[sinks]]\nname = "dead"\ntype = "redis"\nurl = "redis://127.0.0.1:1/0"\n'
    config = people.apply(people.config_path(["postgres"], more=more))
    alive = config.model_copy(update={"sinks": config.sinks[1:]})
    with people.running(config, spark) as (dead, _):
        wait_until(lambda: not people.differences(alive), within_s=120)
        assert dead.status.state == "retrying"
        assert "127.0.0.1:1" in str(dead.status.error)


def applied(log):
    """Changes applied per sink, from the daemon's log lines."""
    totals: dict[str, int] = {}
    for line in log.splitlines():
        if '"batch applied"' in line:
            event = json.loads(line)
            count = sum(numbers["applied"] for numbers in event["tables"].values())
            totals[event["sink"]] = totals.get(event["sink"], 0) + count
    return totals
