"""Which refusals of PostgreSQL pass by themselves."""

import psycopg
import pytest
from pydantic import SecretStr

from cdc.config import Config, SinkSettings, Source
from cdc.errors import SourceError, SourceUnavailable
from connectors.catalogue import _not_connected

SECRET = "correct horse"
CONFIG = Config(
    name="shop",
    source=Source(database="app", user="reader", password=SecretStr(SECRET), tables=("a.b",)),
    sinks=(SinkSettings(name="search", type="memory"),),
)
FAILED = 'connection failed: connection to server at "127.0.0.1", port 5432 failed: '


@pytest.mark.parametrize(
    "said",
    [
        "FATAL:  the database system is starting up",
        "FATAL:  the database system is not yet accepting connections\nDETAIL:  Recovery.",
        "FATAL:  the database system is shutting down",
        "FATAL:  the database system is in recovery mode",
        "FATAL:  terminating connection due to administrator command",
        "FATAL:  sorry, too many clients already",
        "FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute",
        "FATAL:  la base de donn\u00e9es se lance",
        "Connection refused\n\tIs the server running on that host and accepting connections?",
        "server closed the connection unexpectedly",
        "timeout expired",
        'could not translate host name "db" to address: Name or service not known',
    ],
)
def test_refusal_that_passes_is_unavailable(said):
    """A server that starts, stops or is full will be there again: keep trying."""
    error = _not_connected(CONFIG, psycopg.OperationalError(FAILED + said))
    assert isinstance(error, SourceUnavailable)
    assert error.hint


@pytest.mark.parametrize(
    "said",
    [
        'FATAL:  password authentication failed for user "reader"',
        'FATAL:  Peer authentication failed for user "reader"',
        "fe_sendauth: no password supplied",
        'FATAL:  database "app" does not exist',
        'FATAL:  role "reader" does not exist',
        'FATAL:  role "reader" is not permitted to log in',
        'FATAL:  database "app" is not currently accepting connections',
        'FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "reader", database "app"',
        'FATAL:  permission denied for database "app"',
        "server does not support SSL, but SSL was required",
        "SSL error: certificate verify failed",
    ],
)
def test_refusal_that_stays_is_an_error(said):
    """Trying again changes nothing until a person has acted."""
    error = _not_connected(CONFIG, psycopg.OperationalError(FAILED + said))
    assert type(error) is SourceError
    assert error.hint
