"""Recognising processes: none is ever mistaken for another."""

import dataclasses
import os
import signal
import subprocess
import sys

import pytest

from deploy.stack import process
from deploy.stack.process import Process, User


@pytest.fixture
def sleeper(tmp_path):
    """A marked process of the stack in tmp_path that would run for ever."""
    found = process.start(
        [sys.executable, "-c", "import signal; signal.pause()"],
        name="redis",
        directory=tmp_path,
        log=tmp_path / "log",
        environ={},
        user=None,
    )
    yield found
    process.stop([found], signal.SIGKILL, 10)


def test_process_is_itself():
    """The process that runs this test is alive."""
    me = Process.of(os.getpid())
    assert me is not None
    assert me.is_alive


def test_process_with_a_reused_pid_is_another(tmp_path, sleeper):
    """Same pid, other start time or other boot: the recorded process is gone."""
    for other in (
        dataclasses.replace(sleeper, started=sleeper.started - 1),
        dataclasses.replace(sleeper, boot="another"),
    ):
        assert not other.is_alive
        process.record(tmp_path / "p.json", other)
        assert process.recorded(tmp_path / "p.json") is None
        assert process.stop([other], signal.SIGKILL, 0)
    assert sleeper.is_alive


def test_record_brings_back_the_living_process(tmp_path, sleeper):
    """A record leads to its process from any other program."""
    process.record(tmp_path / "p.json", sleeper)
    assert process.recorded(tmp_path / "p.json") == sleeper


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "started": 1, "boot": ""}']
)
def test_torn_record_is_no_process(tmp_path, text):
    """A record that a crash left half-written means that nothing is known."""
    (tmp_path / "p.json").write_text(text)
    assert process.recorded(tmp_path / "p.json") is None


def test_mark_finds_the_process_and_only_it(tmp_path, sleeper):
    """The mark leads to one server of one stack, not to another name or directory."""
    assert process.marked("redis", tmp_path) == [sleeper]
    assert process.marked("postgres", tmp_path) == []
    assert process.marked("redis", tmp_path / "x") == []
    assert process.marked("redis", tmp_path.parent) == []


def test_exported_directory_is_no_mark(tmp_path):
    """A shell that exported CDC_STACK_DIR is not taken for a server."""
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"],
        env={"CDC_STACK_DIR": str(tmp_path)},
    )
    try:
        assert process.marked("redis", tmp_path) == []
    finally:
        bystander.kill()
        bystander.wait()


def test_stop_asks_first(sleeper):
    """A process that follows the first signal is not killed."""
    assert process.stop([sleeper], signal.SIGTERM, 10)
    assert not sleeper.is_alive


def test_stop_kills_what_does_not_listen(tmp_path):
    """A process that ignores the first signal is killed when its time is over."""
    ready = tmp_path / "ready"
    code = (
        "import pathlib, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"pathlib.Path({str(ready)!r}).touch(); signal.pause()"
    )
    deaf = process.start(
        [sys.executable, "-c", code],
        name="redis",
        directory=tmp_path,
        log=tmp_path / "log",
        environ={},
        user=None,
    )
    while not ready.exists():
        assert deaf.is_alive
    assert not process.stop([deaf], signal.SIGTERM, 0.1)
    assert not deaf.is_alive


def test_zombie_is_dead():
    """A process that ended but was not waited for does not count as alive."""
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    try:
        found = Process.of(child.pid)
        child.stdout.read()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert Process.of(child.pid) is None
        assert found is None or not found.is_alive
    finally:
        child.stdout.close()
        child.wait()


def test_reach_needs_every_directory_on_the_way(tmp_path):
    """One closed directory on the way closes everything below it."""
    nobody = User(65534, 65534, "nobody")
    closed = tmp_path / "closed"
    below = closed / "below"
    below.mkdir(parents=True)
    closed.chmod(0o700)
    assert not process.is_reachable(below, nobody)
    assert process.is_reachable(below, User(os.getuid(), os.getgid(), "me"))


def test_root_needs_another_user(monkeypatch):
    """As root the servers that refuse root get another user; root itself is not accepted."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("CDC_STACK_USER", "root")
    with pytest.raises(process.StackError, match="root is no other user"):
        process.unprivileged_user()
    monkeypatch.setenv("CDC_STACK_USER", "no-such-user")
    with pytest.raises(process.StackError, match="no-such-user is no other user"):
        process.unprivileged_user()


def test_ordinary_user_drops_nothing(monkeypatch):
    """Without root there is no other user to become."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert process.unprivileged_user() is None
