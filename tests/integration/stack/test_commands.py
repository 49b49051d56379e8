"""The command line: what it prints, how it exits, whom it runs servers as."""

import json
import os
import pwd
import shutil
import sys
from pathlib import Path

import pytest

from deploy.stack import process

is_root = os.geteuid() == 0
NOBODY = 65534


def test_up_prints_a_table_with_addresses(local, command):
    """The table names each server with its state and address."""
    answer = command(local, "up", "redis")
    assert answer.returncode == 0, answer.stderr
    address = local.env()["CDC_REDIS_URL"].removeprefix("redis://").removesuffix("/0")
    (line,) = (line for line in answer.stdout.splitlines() if line.startswith("Redis"))
    assert "ready" in line
    assert address in line


def test_status_tells_ready_from_stopped(local, command):
    """As JSON each server has a state and a pid, and the exit code is 1 unless all are ready."""
    local.up(["redis"])
    answer = command(local, "status", "--json")
    assert answer.returncode == 1
    found = {server["name"]: server for server in json.loads(answer.stdout)}
    assert found["redis"]["state"] == "ready"
    assert found["redis"]["pid"] == local.pid("redis")
    assert found["redis"]["resident_bytes"] > 0
    assert found["kafka"]["state"] == "stopped"
    assert found["kafka"]["pid"] is None


def test_env_prints_lines_that_a_shell_can_take(local, command):
    """Every line is KEY=value, and the lines are what the library returns."""
    local.up(["redis"])
    answer = command(local, "env")
    assert dict(line.split("=", 1) for line in answer.stdout.splitlines()) == local.env()
    assert set(local.env()) == {
        *("CDC_PG_HOST", "CDC_PG_PORT", "CDC_PG_USER", "CDC_PG_PASSWORD", "CDC_PG_DATABASE"),
        *("CDC_KAFKA", "CDC_CONNECT_URL", "CDC_ES_URL", "CDC_REDIS_URL"),
    }


def test_logs_prints_the_last_lines(local, command):
    """The number of lines is obeyed, and the lines are the end of the file."""
    local.up(["redis"])
    answer = command(local, "logs", "redis", "-n", "2")
    assert answer.stdout.splitlines() == local.log("redis").read_text().splitlines()[-2:]


@pytest.mark.parametrize(
    "mistake",
    [
        (["up", "mysql"], {}, 2, "no server called mysql"),
        (["logs", "mysql"], {}, 2, "no server called mysql"),
        (["logs", "redis"], {}, 1, "redis has no log"),
        (["env"], {}, 1, "there is no stack in"),
        (["up"], {"CDC_PG_PORT": "many"}, 2, "CDC_PG_PORT=many"),
        (["up"], {"CDC_PG_PORT": "25001", "CDC_ES_PORT": "25001"}, 2, "are both 25001"),
        (["up"], {"CDC_STACK_TIMEOUT": "soon"}, 2, "CDC_STACK_TIMEOUT=soon"),
        (["up"], {"JAVA_HOME": "/nowhere"}, 1, "no java in JAVA_HOME=/nowhere"),
        (["up", "redis"], {"CDC_STACK_DIR": "/dev/null/x"}, 1, "/dev/null/x cannot be used"),
        (["up", "kafka"], {"CDC_CACHE": "/dev/null/x"}, 1, "/dev/null/x cannot be used"),
        (["frobnicate"], {}, 2, "No such command"),
    ],
)
def test_mistake_is_one_sentence(local, command, mistake):
    """Every mistake gives a sentence and its exit code, never a traceback, and leaves nothing."""
    words, more, code, says = mistake
    answer = command(local, *words, **more)
    assert answer.returncode == code, answer.stderr
    assert says in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not local.directory.exists()


def test_old_java_is_refused(local, command, tmp_path):
    """A Java before 17 is named with its version."""
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    program.chmod(0o755)
    answer = command(local, "up", "kafka", JAVA_HOME=str(tmp_path))
    assert answer.returncode == 1
    assert "is Java 11, but 17 or newer is needed" in answer.stderr
    assert not local.directory.exists()


def owner(pid):
    return os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116


@pytest.mark.skipif(not is_root, reason="only root has privileges to drop")
def test_root_drops_privileges_for_postgres(local):
    """As root, PostgreSQL runs as an unprivileged user that owns its data."""
    local.up(["postgres"])
    expected = process.unprivileged_user()
    assert expected is not None
    assert owner(local.pid("postgres")) == expected.uid != 0
    assert (local.directory / "data" / "postgres").stat().st_uid == expected.uid


@pytest.mark.skipif(not is_root, reason="only root can close a directory to the servers' user")
def test_closed_directory_is_named(local, command):
    """As root, a directory that the servers' user cannot enter is refused with the setting."""
    local.directory.parent.chmod(0o700)
    answer = command(local, "up", "postgres")
    assert answer.returncode == 1
    assert "is closed to the user" in answer.stderr
    assert "CDC_STACK_DIR" in answer.stderr
    assert not local.directory.exists()


@pytest.fixture
def ordinary():
    """A prefix that runs a command as an ordinary user who owns nothing."""
    if not is_root:
        pytest.skip("the whole run is by an ordinary user already")
    if not shutil.which("setpriv"):
        pytest.skip("setpriv is not installed")
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    user = process.User(NOBODY, NOBODY, pwd.getpwuid(NOBODY).pw_name)
    if not process.is_reachable(Path(sys.executable).resolve(), user):
        # Root's own Python may lie in root's home: let the user read there, and only read.
        prefix += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return prefix


def test_ordinary_user_runs_the_stack(local, command, ordinary):
    """An ordinary user starts, sees and stops servers of its own."""
    os.chown(local.directory.parent, NOBODY, NOBODY)
    more = {"HOME": str(local.directory.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    answer = command(local, "up", "redis", "postgres", via=ordinary, **more)
    assert answer.returncode == 0, answer.stderr
    assert owner(local.pid("postgres")) == owner(local.pid("redis")) == NOBODY
    answer = command(local, "down", via=ordinary, **more)
    assert answer.returncode == 0, answer.stderr
    assert local.pid("postgres") is None


def test_ordinary_user_cannot_use_a_read_only_directory(local, command, ordinary):
    """A directory that may not be written to is named, with the setting."""
    more = {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    answer = command(local, "up", "redis", via=ordinary, **more)
    assert answer.returncode == 1
    assert f"{local.directory} cannot be used: permission denied" in answer.stderr
    assert "CDC_STACK_DIR" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_ordinary_user_cannot_stop_the_stack_of_another(local, command, ordinary):
    """A stack that belongs to someone else is refused in a sentence and keeps running."""
    local.up(["redis"])
    more = {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    for word in ("down", "reset"):
        answer = command(local, word, via=ordinary, **more)
        assert answer.returncode == 1, (word, answer.stderr)
        assert "Traceback" not in answer.stderr
    assert local.pid("redis")
