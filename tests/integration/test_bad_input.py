"""Every mistake gives one sentence with a way out, the right exit code, and no traceback."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.pipeline import cdc


@pytest.fixture
def shop(pipeline):
    """A pipeline with one good table, and nothing applied yet."""
    found = pipeline("good")
    found.db.execute(f"CREATE TABLE {found.name}.good (id int PRIMARY KEY)")
    return found


def told(done, code, *words):
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    assert "  try: " in done.stderr
    for word in words:
        assert word in done.stderr


def edited(path, *changes):
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return str(path)


def test_a_missing_configuration_is_told(tmp_path):
    """No file: exit 2."""
    told(cdc("run", "--config", str(tmp_path / "none.toml")), 2, "no such file")


def test_a_broken_configuration_is_told_in_full(tmp_path):
    """All problems at once: exit 2."""
    path = tmp_path / "cdc.toml"
    path.write_text('name = "X"\n[source]\nport = "no"\n')
    told(cdc("run", "--config", str(path)), 2, "name:", "source.port:", "source.tables:", "sinks:")


def test_a_wrong_password_is_told_without_it(shop):
    """The source refuses us: exit 1, and no secret in the text."""
    path = shop.config_path(["redis"])
    for command in (["run", "--once"], ["connectors", "apply"]):
        done = shop.cdc(*command, "--config", str(path), env={"CDC_PG_PASSWORD": "s3cret-wrong"})
        told(done, 1, "password")
        assert "s3cret-wrong" not in done.stderr


def test_a_missing_table_is_told(shop):
    """The table is named."""
    path = edited(shop.config_path(["redis"]), (f"{shop.name}.good", f"{shop.name}.absent"))
    for command in (["run", "--once"], ["connectors", "apply"]):
        told(shop.cdc(*command, "--config", path), 1, f"{shop.name}.absent")


@pytest.mark.parametrize("server", ["CDC_PG_PORT", "CDC_KAFKA", "CDC_CONNECT_URL"])
def test_an_unreachable_server_is_told_with_its_address(shop, server):
    """Nothing listens on port 1: exit 1."""
    address = shop.env[server]
    wrong = address.rsplit(":", 1)[0] + ":1" if ":" in address else "1"
    path = edited(
        shop.config_path(["redis"]),
        (f"port = {address}", "port = 1") if server == "CDC_PG_PORT" else (address, wrong),
    )
    done = shop.cdc("connectors", "apply", "--config", path)
    told(done, 1, ":1" if server != "CDC_PG_PORT" else "1")


def test_an_unreachable_source_or_log_stops_a_run_before_spark_starts(shop):
    """Nobody waits for Spark to hear of a wrong address."""
    path = edited(shop.config_path(["redis"]), (shop.env["CDC_KAFKA"], "127.0.0.1:1"))
    told(shop.cdc("run", "--config", path), 1, "127.0.0.1:1")


def test_a_run_without_topics_says_how_to_create_them(shop):
    """`cdc connectors apply` comes first."""
    path = shop.config_path(["redis"])
    told(shop.cdc("run", "--once", "--config", str(path)), 1, "cdc connectors apply")


def test_no_java_is_told(shop, tmp_path):
    """Without Java: one sentence with what to install."""
    path = shop.config_path(["redis"])
    shop.apply(path)
    env = {"PATH": str(tmp_path), "JAVA_HOME": ""}
    told(shop.cdc("run", "--config", str(path), env=env), 1, "Java")


def test_java_that_is_too_old_is_told(shop, tmp_path):
    """The version found and the version wanted are both named."""
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    path = shop.config_path(["redis"])
    shop.apply(path)
    env = {"PATH": f"{tmp_path}{os.pathsep}{Path(sys.executable).parent}:/bin", "JAVA_HOME": ""}
    told(shop.cdc("run", "--config", str(path), env=env), 1, "11", "17")


def test_a_sink_that_cannot_be_reached_ends_a_single_run_with_its_address(shop):
    """A run to the end of the log does not wait for ever."""
    path = edited(shop.config_path(["redis"]), (shop.env["CDC_REDIS_URL"], "redis://127.0.0.1:1/0"))
    shop.apply(Path(path))
    done = shop.cdc("run", "--once", "--config", path)
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
