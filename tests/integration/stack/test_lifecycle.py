"""Start, crash, stop: with the two servers that start in a second."""

import os
import signal
import socket
import subprocess
import sys

import psycopg
import pytest
import redis

from deploy.stack import Ports, Stack, StackError, process

FEW = ("redis", "postgres")


def pids(stack):
    return {name: stack.pid(name) for name in stack.names}


def connect(stack, **other):
    env = stack.env()
    return psycopg.connect(
        host=env["CDC_PG_HOST"],
        port=env["CDC_PG_PORT"],
        user=env["CDC_PG_USER"],
        dbname=env["CDC_PG_DATABASE"],
        **{"password": env["CDC_PG_PASSWORD"], **other},
    )


def test_up_twice_changes_nothing(local):
    """The second start finds everything ready and leaves each process alone."""
    local.up(FEW)
    first = pids(local)
    assert all(first[name] for name in FEW)
    events = []
    local.up(FEW, events.append)
    assert pids(local) == first
    assert {event.state for event in events} <= {"waiting", "ready"}


def test_up_restarts_only_the_server_that_died(local, kill):
    """After a crash of one server the others keep their processes."""
    local.up(FEW)
    before = pids(local)
    kill(local, "redis")
    assert {s.name: s.state for s in local.status()}["redis"] == "stopped"
    local.up(FEW)
    after = pids(local)
    assert after["postgres"] == before["postgres"]
    assert after["redis"] not in (None, before["redis"])


def test_crashed_postgres_recovers_with_its_rows(local, kill, wait_until):
    """A killed PostgreSQL comes back with what was committed."""
    local.up(["postgres"])
    with connect(local) as connection:
        connection.execute("CREATE TABLE kept (id int)")
    kill(local, "postgres")
    local.up(["postgres"])
    with connect(local) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)


def test_data_survives_down_and_not_reset(local, processes):
    """Stopping keeps data and ports; reset deletes both and everything else."""
    local.up(["redis"])
    url = local.env()["CDC_REDIS_URL"]
    with redis.Redis.from_url(url) as client:
        client.set("a", "1")
    local.down()
    assert processes(local) == {}
    local.up(["redis"])
    assert local.env()["CDC_REDIS_URL"] == url
    with redis.Redis.from_url(url) as client:
        assert client.get("a") == b"1"
    local.reset()
    assert not local.directory.exists()
    assert processes(local) == {}


def test_down_without_a_stack_is_harmless(local):
    """Stopping what never ran does nothing and makes nothing."""
    local.down()
    local.reset()
    assert not local.directory.exists()


def test_down_of_one_server_leaves_the_others(local):
    """A name stops that server only."""
    local.up(FEW)
    postgres = local.pid("postgres")
    local.down(["redis"])
    assert pids(local) == {**dict.fromkeys(local.names), "postgres": postgres}


def test_down_stops_what_a_killed_runner_started(local, runner, command, processes, wait_until):
    """The runner is killed in the middle of `up`; a fresh `down` ends exactly what it left."""
    child = runner(local, "up", *FEW)
    wait_until(lambda: processes(local), "a server started")
    child.kill()
    child.wait()
    answer = command(local, "down")
    assert answer.returncode == 0, answer.stderr
    assert processes(local) == {}


def test_up_goes_on_after_the_runner_was_killed(local, runner, wait_until):
    """A start that was killed while PostgreSQL was being made is completed by the next one."""
    child = runner(local, "up", "postgres")
    wait_until((local.directory / "data" / "postgres.new").exists, "initdb began")
    child.kill()
    child.wait()
    local.up(["postgres"])
    with connect(local) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_down_finds_a_server_that_was_never_recorded(local, processes):
    """Between start and record there is a moment; the mark covers it."""
    local.up(["redis"])
    (local.directory / "run" / "redis.json").unlink()
    assert processes(local)
    local.down()
    assert processes(local) == {}


def test_down_never_touches_a_process_with_a_reused_pid(local):
    """A record that now points to a stranger's pid stops nobody."""
    local.up(["redis"])
    local.down()
    stranger = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        real = process.Process.of(stranger.pid)
        forged = process.Process(real.pid, real.started - 100, real.boot)
        process.record(local.directory / "run" / "redis.json", forged)
        local.down()
        assert stranger.poll() is None
        local.up(["redis"])
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_interrupted_up_leaves_nothing(local, runner, processes):
    """Ctrl-C in the middle of a first start stops what was started and deletes what was made."""
    child = runner(local, "up", *FEW)
    for line in child.stderr:
        if line.startswith("postgres preparing"):
            break
    child.send_signal(signal.SIGINT)
    assert child.wait(120) == 130
    assert "Traceback" not in child.stderr.read()
    assert processes(local) == {}
    assert not local.directory.exists()


def test_two_runners_at_once_start_one_stack(local, runner, processes):
    """Two commands race; both succeed and each server runs once."""
    children = [runner(local, "up", *FEW) for _ in range(2)]
    assert [child.wait(120) for child in children] == [0, 0]
    assert {name: len(found) for name, found in processes(local).items()}["redis"] == 1


def test_two_stacks_run_side_by_side(new_stack):
    """Stacks with their own directories do not see each other."""
    one, other = new_stack(), new_stack()
    one.up(["redis"])
    other.up(["redis"])
    assert one.env()["CDC_REDIS_URL"] != other.env()["CDC_REDIS_URL"]
    one.down()
    assert other.pid("redis")


def test_taken_port_is_named_and_nothing_starts(local, processes):
    """The error names the port and the setting, before any server was started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stack = Stack(local.directory, Ports({**Ports.free().wanted, "CDC_REDIS_PORT": port}))
        with pytest.raises(StackError, match=f"port {port} for Redis is taken") as caught:
            stack.up(FEW)
    assert "CDC_REDIS_PORT" in caught.value.hint
    assert processes(local) == {}
    assert not local.directory.exists()


def test_server_that_dies_while_starting_shows_its_log(local, processes):
    """The error has the end of the log, and the servers that did start are stopped again."""
    local.up(["postgres"])
    local.down()
    (local.directory / "data" / "postgres" / "PG_VERSION").write_text("9.1\n")
    with pytest.raises(StackError, match="PostgreSQL stopped while it was starting") as caught:
        local.up(FEW)
    assert "not compatible with this version" in str(caught.value)
    assert str(local.log("postgres")) in caught.value.hint
    assert processes(local) == {}


def test_first_start_that_fails_keeps_the_log(local, processes):
    """When a server of a new stack fails, the log that the error names is there to be read."""
    hurried = Stack(local.directory, Ports.free(), start_timeout_s=0.05)
    with pytest.raises(StackError, match="PostgreSQL") as caught:
        hurried.up(["postgres"])
    assert str(local.log("postgres")) in caught.value.hint
    assert local.log("postgres").exists()
    assert processes(local) == {}


def test_failed_up_leaves_servers_that_ran_before(local):
    """A failure of one server does not stop another that an earlier call started."""
    local.up(FEW)
    redis_pid = local.pid("redis")
    local.down(["postgres"])
    (local.directory / "data" / "postgres" / "PG_VERSION").write_text("9.1\n")
    with pytest.raises(StackError):
        local.up(FEW)
    assert local.pid("redis") == redis_pid


def test_hung_server_is_reported_within_the_limit(local):
    """A server that lives but does not answer is an error with the last thing seen."""
    local.up(["redis"])
    os.kill(local.pid("redis"), signal.SIGSTOP)
    hurried = Stack(local.directory, Ports.free(), start_timeout_s=0.1)
    with pytest.raises(StackError, match=r"Redis was not ready after 0\.1 s"):
        hurried.up(["redis"])
    os.kill(local.pid("redis"), signal.SIGCONT)


def test_postgres_checks_the_password_and_is_logical(local):
    """The wrong password is refused, the right one finds wal_level logical."""
    local.up(["postgres"])
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        connect(local, password="wrong")
    with connect(local) as connection:
        assert connection.execute("SHOW wal_level").fetchone() == ("logical",)
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
        assert connection.execute("SHOW max_replication_slots").fetchone() == ("20",)


def test_password_stays_out_of_logs_and_process_lists(local, processes):
    """Neither a log nor an argument nor an environment holds the password."""
    local.up(FEW)
    secret = local.env()["CDC_PG_PASSWORD"].encode()
    for log in (local.directory / "log").iterdir():
        assert secret not in log.read_bytes()
    for found in processes(local).values():
        for one in found:
            for file in ("cmdline", "environ"):
                with open(f"/proc/{one.pid}/{file}", "rb") as opened:  # noqa: PTH123
                    assert secret not in opened.read()
