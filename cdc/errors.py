"""Every error that leaves cdc. Each says what happened, and its hint says what to do next.

    CdcError
    ├── ConfigError            the configuration cannot be used; all problems at once    exit 2
    ├── SourceError            PostgreSQL, Kafka or Kafka Connect                        exit 1
    │   ├── SourceUnavailable  not reachable, for now                                    → retry
    │   ├── QueryLost          Spark ended the query for reasons of its own              → reopen
    │   │   └── TopicMissing   deleted, or not made yet                            → retry
    │   ├── TopicChanged       the topic is not the one the ledger knows                 → stop
    │   └── MalformedRecord    a record that is not what Debezium writes           → quarantine
    └── SinkError
        ├── SinkUnavailable    refused, reset, timed out, fail-over                      → retry
        │   └── SinkBusy       too much at once: 429, or a request too large   → retry with less
        ├── SchemaMoved        rows carry a column the sink does not know yet            → reopen
        ├── SinkFenced         another writer has taken over                             → stop
        ├── TooManyRefused     more than single rows cannot be taken                     → stop
        └── SinkUnusable       wrong password, missing right, wrong version, unknown     → stop

No message ever holds a row value, a key or a secret: table, partition, offset, counts.
Errors cross process borders as data (`to_data`, `from_data`), because Spark keeps only their text.
"""

from __future__ import annotations

from typing import Any


class CdcError(Exception):
    """The base of all. *hint* is the next thing to do, as a sentence."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self).__name__, str(self), self.hint)

    def to_data(self) -> dict[str, str]:
        return {"kind": type(self).__name__, "message": str(self), "hint": self.hint}


class ConfigError(CdcError):
    pass


class SourceError(CdcError):
    pass


class SourceUnavailable(SourceError):
    pass


class TopicMissing(SourceUnavailable):
    pass


class QueryLost(SourceError):
    pass


class TopicChanged(SourceError):
    pass


class MalformedRecord(SourceError):
    pass


class SinkError(CdcError):
    pass


class SinkUnavailable(SinkError):
    pass


class SinkBusy(SinkUnavailable):
    pass


class SchemaMoved(SinkError):
    pass


class SinkFenced(SinkError):
    pass


class TooManyRefused(SinkError):
    pass


class SinkUnusable(SinkError):
    pass


def _family(root: type[CdcError]) -> dict[str, type[CdcError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _family(child)
    return found


def _rebuild(kind: str, message: str, hint: str) -> CdcError:
    return _family(CdcError).get(kind, CdcError)(message, hint=hint)


def from_data(data: dict[str, str]) -> CdcError:
    """Bring an error home that crossed a border as data."""
    return _rebuild(data["kind"], data["message"], data["hint"])
