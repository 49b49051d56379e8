"""What leaves the Connect client: states that can be believed, reasons without rows."""

import pytest

from connectors.connect import ConnectorStatus, TaskStatus, hint_for, reason_of

ROW_VALUE = "alice@example.org"


def status(connector, *tasks):
    return ConnectorStatus(
        "shop", connector, "", tuple(TaskStatus(at, state, "w") for at, state in enumerate(tasks))
    )


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (status("RUNNING", "RUNNING"), "RUNNING"),
        (status("RUNNING", "FAILED"), "FAILED"),
        (status("RUNNING", "RUNNING", "FAILED"), "FAILED"),
        (status("FAILED"), "FAILED"),
        (status("RUNNING"), "UNASSIGNED"),
        (status("RUNNING", "UNASSIGNED"), "UNASSIGNED"),
        (status("PAUSED", "PAUSED"), "PAUSED"),
        (status("STOPPED"), "STOPPED"),
        (status("RUNNING", "RESTARTING"), "RESTARTING"),
    ],
)
def test_state_is_running_only_if_every_task_is(found, state):
    """A connector says RUNNING while its task has FAILED."""
    assert state == found.state


PLAIN = """\
org.apache.kafka.connect.errors.ConnectException: An exception occurred.
\tat io.debezium.pipeline.ErrorHandler.setProducerThrowable(ErrorHandler.java:67)
Caused by: org.postgresql.util.PSQLException: FATAL: role "x" does not exist
\t... 9 more
"""
QUOTES_A_ROW = f"""\
org.apache.kafka.connect.errors.DataException: bad value {ROW_VALUE}
\tat a.b.C
Caused by: io.debezium.DebeziumException: no row Struct{{mail={ROW_VALUE}}}
"""
QUOTES_A_VALUE = f"""\
org.postgresql.util.PSQLException: ERROR: invalid input syntax for type integer: "{ROW_VALUE}"
  Detail: Key (mail)=({ROW_VALUE}) exists
"""
LOST_SLOT = """\
io.debezium.DebeziumException: The connector is trying to read change stream starting at \
PostgresOffsetContext [a=[b], c], but this is no longer available on the server. \
Reconfigure the connector to use a snapshot mode when needed.
\tat a.b.C
"""
LOST = (
    "The connector is trying to read change stream starting at the stored position, "
    "but this is no longer available on the server. (DebeziumException)"
)


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        ("", ""),
        (PLAIN, 'FATAL: role "x" does not exist (PSQLException <- ConnectException)'),
        (QUOTES_A_ROW, "DebeziumException <- DataException"),
        (QUOTES_A_VALUE, "PSQLException"),
        (LOST_SLOT, LOST),
    ],
)
def test_reason_names_the_cause_and_no_row(trace, reason):
    """Sentences pass only if they are known to speak of servers."""
    assert reason == reason_of(trace)
    assert ROW_VALUE not in reason_of(trace)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ('FATAL: password authentication failed for user "x"', "source.password"),
        ('ERROR: replication slot "cdc_x" is active for PID 7', "another connector"),
        ("Topic a.b not present in metadata after 60000 ms.", "cdc resync"),
        ("stream .. is no longer available on the server.", "cdc resync"),
        ('ERROR: publication "x" does not exist', "cdc resync"),
        ("NullPointerException", "log of the Connect worker"),
    ],
)
def test_hint_says_what_to_do(reason, words):
    """Every failure has a next step."""
    assert words in hint_for(reason)
