"""The real servers behind the tests: one local stack and one Spark session per test run.

A stack that already runs under $CDC_TEST_STACK_DIR is used and left alone, so that the inner loop
is short; otherwise a fresh one is started, and stopped at the end.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from cdc import session
from cdc.config import Spark
from cdc.jars import cache_dir
from deploy.stack import Ports, Stack

# Properties: how many examples in the inner loop, and how many in `make test`. A failure prints
# its example, and the line that plays it again.
settings.register_profile("dev", max_examples=50, deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=200)
settings.load_profile("dev")


def stack_directory() -> Path:
    return Path(os.environ.get("CDC_TEST_STACK_DIR") or cache_dir() / "test-stack")


@pytest.fixture(scope="session")
def stack():
    """What a client needs to reach the servers, by variable name."""
    servers = Stack(stack_directory(), Ports.free(), start_timeout_s=240)
    if all(server.state == "ready" for server in servers.status()):
        yield servers.env()
        return
    if "CDC_TEST_STACK_DIR" in os.environ:
        pytest.exit(f"the stack in {servers.directory} is not ready, and not ours to reset", 1)
    servers.reset()
    try:
        servers.up()
        yield servers.env()
    finally:
        servers.down()


@pytest.fixture(scope="session")
def spark():
    """One Spark with the pinned jars for all tests that need frames."""
    from sinks import delta

    found = session.open_session("test", Spark(master="local[2]"), delta.spark_conf())
    yield found
    found.stop()
