"""A log that begins anew: the next generation, all rows again, and a sweep of what has vanished."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from connectors import lifecycle
from connectors.connect import ConnectClient
from connectors.postgres import connector_name
from tests.support.waiting import wait_until

EVERY_KIND = ("elasticsearch", "redis", "postgres", "delta")


@pytest.fixture
def words(pipeline):
    """A pipeline with one table of some hundred rows."""
    found = pipeline("words")
    found.db.execute(f"CREATE TABLE {found.name}.words (id int PRIMARY KEY, word text)")
    found.db.execute(f"ALTER TABLE {found.name}.words REPLICA IDENTITY FULL")
    found.db.execute(
        f"INSERT INTO {found.name}.words SELECT i, 'w' || i FROM generate_series(1, 300) i"
    )
    return found


def test_rows_that_vanished_between_two_lives_of_a_topic_are_swept(words, spark):
    """No record deletes them, so every sink removes them once the new snapshot was applied.

    Then the topic grows a partition, which moves keys: every sink stops, with the way out.
    """
    config = words.apply(words.config_path(EVERY_KIND))
    table = f"{words.name}.words"
    with words.running(config, spark) as threads:
        wait_until(lambda: not words.differences(config), within_s=180)
        with ConnectClient(config.connect.url) as connect:
            connect.stop(connector_name(config))
            connect.wait_stopped(connector_name(config), 30)
        words.db.execute(f"DELETE FROM {table} WHERE id <= 100")
        words.db.execute(f"UPDATE {table} SET word = 'changed' WHERE id > 290")
        assert words.differences(config)
        lifecycle.resync(config)
        wait_until(lambda: not words.differences(config), within_s=180)
        words.db.execute(f"DELETE FROM {table} WHERE id <= 110")
        words.db.execute(f"INSERT INTO {table} VALUES (1, 'again')")
        wait_until(lambda: not words.differences(config), within_s=120)
        assert {thread.status.state for thread in threads} == {"running"}

        admin = AdminClient({"bootstrap.servers": config.kafka.bootstrap})
        (topic,) = words.catalogue(config)
        (grown,) = admin.create_partitions([NewPartitions(topic, 3)]).values()
        grown.result(30)
        wait_until(lambda: {t.status.state for t in threads} == {"failed"}, within_s=120)
        assert all("cdc resync" in thread.status.error.hint for thread in threads)
