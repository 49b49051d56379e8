"""Stacks of our own, on free ports, that never meet one that already runs."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cdc.jars import cache_dir
from deploy.stack import Ports, Stack
from deploy.stack.members import Members

ROOT = Path(__file__).parents[3]
WAIT_S = 120
POLL_S = 0.02


def _hear_interrupts():
    """A shell without job control starts what runs in the background deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def new_stack():
    """Make a stack in a directory that every user may enter; all are stopped and deleted."""
    made = []

    def make():
        directory = Path(tempfile.mkdtemp(prefix="cdc-stack-test-"))
        directory.chmod(0o755)
        made.append(Stack(directory / "stack", Ports.free(), start_timeout_s=240))
        return made[-1]

    yield make
    for stack in made:
        stack.reset()
        shutil.rmtree(stack.directory.parent)


@pytest.fixture
def local(new_stack):
    """One stack that nothing runs in yet."""
    return new_stack()


@pytest.fixture
def environ():
    """The environment for a command that works on a given stack."""

    def of(stack, **more):
        ports = {variable: str(port) for variable, port in Ports.free().wanted.items()}
        kept = {k: v for k, v in os.environ.items() if not k.startswith("CDC_")}
        own = {"CDC_STACK_DIR": str(stack.directory), "CDC_CACHE": str(cache_dir())}
        return {**kept, **ports, **own, "PYTHONPATH": str(ROOT), **more}

    return of


@pytest.fixture
def command(environ):
    """Run `python -m deploy.stack ...` on a stack to its end; *via* goes in front."""

    def run(stack, *words, via=(), **more):
        return subprocess.run(
            [*via, sys.executable, "-m", "deploy.stack", *words],
            env=environ(stack, **more),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )

    return run


@pytest.fixture
def runner(environ):
    """Start `python -m deploy.stack ...` and leave it running; killed at the end."""
    started = []

    def run(stack, *words):
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "deploy.stack", *words],
                env=environ(stack),
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=_hear_interrupts,  # noqa: PLW1509  # one call, no locks
            )
        )
        return started[-1]

    yield run
    for child in started:
        child.kill()
        child.wait()
        child.stderr.close()


@pytest.fixture
def processes():
    """Every living process of a stack, by server."""

    def of(stack):
        members = Members(stack.directory)
        found = {name: members.all(stack.server(name)) for name in stack.names}
        return {name: some for name, some in found.items() if some}

    return of


@pytest.fixture
def wait_until():
    """Wait for a condition; fail with what it was last."""

    def wait(condition, what):
        deadline = time.monotonic() + WAIT_S
        while not (last := condition()):
            assert time.monotonic() < deadline, f"never {what}: last seen {last!r}"
            time.sleep(POLL_S)
        return last

    return wait


@pytest.fixture
def kill(wait_until):
    """Kill the main process of a server, as a crash would."""

    def crash(stack, name):
        pid = stack.pid(name)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: stack.pid(name) != pid, f"{name} is dead")
        return pid

    return crash
