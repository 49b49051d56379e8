"""All five servers, once: ready, small enough, repaired one by one, gone without a trace."""

import os

import psycopg
import pytest
import requests
from confluent_kafka.admin import AdminClient

from cdc.jars import cache_dir, spark_jars

GIB = 1 << 30


@pytest.mark.timeout(900)
def test_whole_stack_lives_and_leaves(local, kill, processes):
    """Every server works within 4 GB, comes back alone after a crash, and goes at the end."""
    local.up()
    env = local.env()
    assert all(server.state == "ready" for server in local.status())
    assert sum(server.resident_bytes for server in local.status()) < 4 * GIB

    plugins = requests.get(f"{env['CDC_CONNECT_URL']}/connector-plugins", timeout=30).json()
    assert "io.debezium.connector.postgresql.PostgresConnector" in {p["class"] for p in plugins}
    health = requests.get(f"{env['CDC_ES_URL']}/_cluster/health", timeout=30).json()
    assert health["status"] in ("green", "yellow")
    topics = AdminClient({"bootstrap.servers": env["CDC_KAFKA"]}).list_topics(timeout=30).topics
    assert "cdc-connect-offset" in topics
    with psycopg.connect(
        host=env["CDC_PG_HOST"],
        port=env["CDC_PG_PORT"],
        user=env["CDC_PG_USER"],
        password=env["CDC_PG_PASSWORD"],
        dbname=env["CDC_PG_DATABASE"],
    ) as connection:
        assert connection.execute("SELECT current_database()").fetchone() == ("shop",)
    if os.geteuid() == 0:
        for one in processes(local)["elasticsearch"]:
            assert os.stat(f"/proc/{one.pid}").st_uid != 0  # noqa: PTH116

    elasticsearch_count = len(processes(local)["elasticsearch"])
    before = {name: local.pid(name) for name in local.names}
    for name in ("kafka", "elasticsearch"):
        kill(local, name)
    local.up()
    after = {name: local.pid(name) for name in local.names}
    changed = {name for name in local.names if before[name] != after[name]}
    assert changed == {"kafka", "elasticsearch"}
    assert all(server.state == "ready" for server in local.status())
    # Its launcher was killed, not the server behind it: that one must be gone too.
    assert len(processes(local)["elasticsearch"]) == elasticsearch_count

    local.down()
    assert processes(local) == {}


def test_spark_jars_are_in_the_cache():
    """The jars for the job are fetched, seven of them, below the cache directory."""
    found = spark_jars()
    assert len(found) == 7
    assert all(path.is_file() and cache_dir() in path.parents for path in found)
