"""Kafka Connect over REST. Speaks HTTP and nothing else; raises only errors of `cdc.errors`.

Connect quotes rows in its stack traces. What leaves this module is the kind of failure, and its
sentence only where that is known to speak of servers and not of rows.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import requests

from cdc.errors import SourceError, SourceUnavailable
from connectors.postgres import HIDDEN, ConnectorConfig

_POLL_S = 0.2
# A rebalance after a worker came or went takes a few seconds; Connect answers 409 meanwhile.
_REBALANCE_S = 20.0

_NOT_FOUND, _CONFLICT, _UNPROCESSABLE, _SERVER_ERROR = 404, 409, 422, 500

# In Debezium's position from the first row of a snapshot to the last, and not after it.
_IN_SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True)
class TaskStatus:
    id: int
    state: str
    worker: str
    reason: str = ""  # why it failed; never a row value


@dataclass(frozen=True, slots=True)
class ConnectorStatus:
    """A connector says RUNNING while its task has FAILED: believe *state* only."""

    name: str
    connector: str
    reason: str
    tasks: tuple[TaskStatus, ...]

    @property
    def state(self) -> str:
        """RUNNING only if the connector and at least one task are, and no task is anything else."""
        states = {self.connector, *(task.state for task in self.tasks)}
        if "FAILED" in states:
            return "FAILED"
        if states == {"RUNNING"} and self.tasks:
            return "RUNNING"
        return min(states - {"RUNNING"}, default="UNASSIGNED")

    @property
    def failure(self) -> str:
        """The first reason there is, or nothing."""
        return next(filter(None, [self.reason, *(task.reason for task in self.tasks)]), "")


class Phase(Enum):
    """Position and records are committed together: at STREAM the log holds the whole snapshot."""

    NOTHING = "nothing is committed yet"
    SNAPSHOT = "in the midst of the snapshot"
    STREAM = "past the snapshot"


class ConnectClient:
    """One Connect cluster. Every call ends within *timeout_s*, or within the wait it was given."""

    def __init__(self, url: str, timeout_s: float = 10.0) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._session = requests.Session()
        # An http_proxy meant for the world must not stand between us and our own worker.
        self._session.trust_env = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()

    def plugins(self) -> dict[str, str]:
        """Connector class -> version, of every source connector that the workers can start."""
        answer = self._call("GET", "/connector-plugins")
        return {str(each["class"]): str(each.get("version")) for each in answer or ()}

    def validate(self, config: ConnectorConfig) -> None:
        """Let Connect and the connector check *config*, servers included. Changes nothing."""
        kind = config["connector.class"].rsplit(".", 1)[-1]
        path = f"/connector-plugins/{quote(kind, safe='')}/config/validate"
        # Connect wants a name to validate, and takes it from the path only when it stores.
        answer = self._call("PUT", path, {"name": "cdc_validate", **config}, config.secrets)
        problems = [
            f"{each['value']['name']}: {problem}"
            for each in (answer or {}).get("configs", ())
            for problem in each["value"].get("errors", ())
        ]
        if problems:
            raise _refused(self._url, problems, config.secrets)

    def put(self, name: str, config: ConnectorConfig) -> None:
        """Create the connector, or give it another configuration: Connect restarts it by itself."""
        self._call("PUT", f"{_path(name)}/config", dict(config), config.secrets)

    def create_stopped(self, name: str, config: ConnectorConfig) -> None:
        """Create the connector without starting it."""
        body = {"name": name, "config": dict(config), "initial_state": "STOPPED"}
        self._call("POST", "/connectors", body, config.secrets)

    def config(self, name: str) -> ConnectorConfig | None:
        """The connector's configuration; None if there is no such connector."""
        answer = self._call("GET", f"{_path(name)}/config")
        return None if answer is None else ConnectorConfig(answer)

    def status(self, name: str) -> ConnectorStatus | None:
        answer = self._call("GET", f"{_path(name)}/status")
        if answer is None:
            return None
        return ConnectorStatus(
            name=name,
            connector=str(answer["connector"]["state"]),
            reason=reason_of(answer["connector"].get("trace", "")),
            tasks=tuple(
                TaskStatus(
                    id=int(task["id"]),
                    state=str(task["state"]),
                    worker=str(task.get("worker_id", "")),
                    reason=reason_of(task.get("trace", "")),
                )
                for task in answer["tasks"]
            ),
        )

    def restart(
        self, name: str, config: ConnectorConfig | None = None, within_s: float = 30.0
    ) -> None:
        """Stop the connector and its tasks, failed or not, and start them, maybe with *config*.

        Connect's own restart and PUT leave the old status standing for a moment: a wait for RUNNING
        would end before the new task began. A stopped connector has no task, so nothing is stale.
        """
        self.stop(name)
        try:
            self.wait_stopped(name, within_s)
            if config is not None:
                self.put(name, config)
        finally:
            self.resume(name)

    def restart_failed(self, name: str) -> None:
        """Restart what has failed, in one request: nothing is left stopped if we die meanwhile."""
        self._call("POST", f"{_path(name)}/restart?includeTasks=true&onlyFailed=true")

    def resume(self, name: str) -> None:
        """Start a stopped or paused connector."""
        self._call("PUT", f"{_path(name)}/resume")

    def stop(self, name: str) -> None:
        """Stop the connector's tasks but keep its configuration; its offsets may then be reset."""
        if self._call("PUT", f"{_path(name)}/stop") is None:
            raise _unknown(name, self._url)

    def forget_position(self, name: str) -> None:
        """Forget how far a stopped connector has read; it would begin with a snapshot."""
        self._call("DELETE", f"{_path(name)}/offsets")

    def phase(self, name: str) -> Phase:
        """How far the connector has come, by its committed position."""
        answer = self._call("GET", f"{_path(name)}/offsets")
        found = [each["offset"] for each in (answer or {}).get("offsets", ()) if each["offset"]]
        if not found:
            return Phase.NOTHING
        return Phase.SNAPSHOT if any(_IN_SNAPSHOT in each for each in found) else Phase.STREAM

    def delete(self, name: str) -> bool:
        """Remove the connector and wait until it is gone. False if there was none.

        Its offsets stay in Connect.
        """
        if self._call("DELETE", _path(name)) is None:
            return False
        deadline = time.monotonic() + _REBALANCE_S
        while self.status(name) is not None:
            if time.monotonic() > deadline:
                raise SourceUnavailable(
                    f"connector {name} is deleted, but its task has not stopped",
                    hint="wait until the Connect workers are stable; look again",
                )
            time.sleep(_POLL_S)
        return True

    def wait_running(self, name: str, within_s: float) -> ConnectorStatus:
        """Wait until the connector and its task run. Raises SourceError when one fails."""
        return self._wait(name, within_s, lambda status: status.state == "RUNNING", "run")

    def wait_stopped(self, name: str, within_s: float) -> None:
        """Wait until the connector has no task left."""
        self._wait(name, within_s, lambda s: s.connector == "STOPPED" and not s.tasks, "stop")

    def _wait(
        self,
        name: str,
        within_s: float,
        is_there: Callable[[ConnectorStatus], bool],
        goal: str,
    ) -> ConnectorStatus:
        deadline = time.monotonic() + within_s
        while True:
            status = self.status(name)
            if status is not None and is_there(status):
                return status
            if status is not None and status.state == "FAILED" and goal == "run":
                raise SourceError(
                    f"connector {name} failed: {status.failure}", hint=hint_for(status.failure)
                )
            if time.monotonic() > deadline:
                seen = "was not there" if status is None else f"was {status.state}"
                raise SourceError(
                    f"connector {name} did not {goal} within {within_s:g} s: it {seen}",
                    hint="look at the log of the Connect worker, then try again",
                )
            time.sleep(_POLL_S)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        secrets: tuple[str, ...] = (),
    ) -> Any:
        """The parsed answer; None for 404, and {} where Connect answers with nothing."""
        deadline = time.monotonic() + _REBALANCE_S
        while True:
            answer = self._send(method, path, body)
            if answer.status_code != _CONFLICT or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        if answer.ok:
            return _parsed(answer) if answer.content else {}
        text = _message(answer)
        if answer.status_code == _NOT_FOUND and text:
            return None
        if answer.status_code == _CONFLICT:
            raise SourceUnavailable(
                f"{self._url} is rebalancing", hint="wait until its workers are stable; try again"
            )
        if answer.status_code in (requests.codes.bad_request, _UNPROCESSABLE):
            # First line: how many errors; last line: where the same list is to be had.
            lines = [line for line in text.splitlines() if line.strip()]
            raise _refused(self._url, lines[1:-1] if len(lines) > 2 else lines, secrets)  # noqa: PLR2004
        # A worker that starts knows no path at all at first: its 404 is a page, and no message. One
        # that has lost its group answers 500, its request timed out.
        is_passing = answer.status_code == _NOT_FOUND or answer.status_code >= _SERVER_ERROR
        kind = SourceUnavailable if is_passing else SourceError
        raise kind(
            f"{self._url} answered {answer.status_code}: "
            f"{_scrubbed(_first(text), secrets) or answer.reason}",
            hint="wait if Kafka Connect is starting; otherwise correct connect.url, or look at the "
            "log of its worker",
        )

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> requests.Response:
        try:
            return self._session.request(
                method, self._url + path, json=body, timeout=self._timeout_s, allow_redirects=False
            )
        except requests.Timeout:
            raise SourceUnavailable(
                f"{self._url} did not answer within {self._timeout_s:g} s",
                hint="Kafka Connect is starting, busy or gone; raise connect.timeout if it is slow",
            ) from None
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
            raise SourceUnavailable(
                f"{self._url} refused the connection",
                hint="start Kafka Connect, or correct connect.url",
            ) from None
        except requests.RequestException as error:
            raise SourceError(
                f"{self._url} cannot be asked: {type(error).__name__}", hint="correct connect.url"
            ) from None


# Sentences that speak of servers, slots, topics and rights. Everything else may quote a row.
_SAFE = re.compile(
    r"""
      FATAL:\s
    | ERROR:\s(?:replication\sslot|publication|permission\sdenied|must\sbe|relation|schema
                |all\sreplication\sslots|logical\sdecoding|cannot\s(?:read\sfrom|use)|column\s")
    | (?:The\s)?[Cc]onnection\s(?:to|attempt|refused|reset)
    | Topic\s\S+\snot\spresent\sin\smetadata
    | The\smessage\sis\s\d+\sbytes
    | The\srequest\sincluded\sa\smessage\slarger
    | (?:Creation|Failed\sto\sstart|Unable\sto\s(?:create|obtain))\b.*\breplication\b
    | The\sconnector\sis\strying\sto\sread
    | Saved\soffset
    | Replication\sslot\b
    | Offset\sLSN\b
    | Slot\b
    | The\sdb\shistory
    | Compacted\stopic\scannot\saccept
    | One\sor\smore\srecords\shave\sbeen\srejected
    | Unable\sto\screate\s(?:filtered\s)?publication
    | No\stable\sfilters\sfound
    | Database\sversion
    """,
    re.VERBOSE,
)
# Debezium prints its whole position into one sentence, and then advises to lose deletes.
_POSITION = re.compile(r"PostgresOffsetContext \[.*\](?=,)")
_ADVICE = re.compile(r"\s*Reconfigure the connector to use a snapshot mode.*")
_THROWN = re.compile(r"(?:Caused by: )?([\w.$]+(?:Exception|Error))(?:: (.*))?")


def reason_of(trace: str) -> str:
    """The deepest cause in a Java stack trace, as one sentence without row values."""
    kinds: list[str] = []
    sentence = ""
    for line in trace.splitlines():
        match = _THROWN.fullmatch(line.strip()) if not line.startswith("\t") else None
        if match is None:
            continue
        kind = match[1].rsplit(".", 1)[-1]
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
        if match[2] and _SAFE.match(match[2]):
            sentence = _ADVICE.sub("", _POSITION.sub("the stored position", match[2].strip()))
    chain = " <- ".join(reversed(kinds))
    return f"{sentence} ({chain})" if sentence else chain


_HINTS = (
    (r"password authentication", "correct source.user or source.password, then apply again"),
    (
        r"slot.*\b(?:active|in use)\b",
        "another connector reads this slot: stop it, or give this configuration another name",
    ),
    (r"not present in metadata", "a topic is gone, and what it held: cdc resync"),
    (
        r"permission|must be",
        "grant the source user REPLICATION, SELECT on the tables, and their ownership",
    ),
    (
        r"larger|bytes when serialized",
        "a row is larger than the topic takes: raise max.message.bytes there and on the broker",
    ),
    (
        r"\bslot\b|\boffset\b|\blsn\b|no longer available",
        "the slot was lost, and changes with it: cdc resync",
    ),
    (r"publication .* does not exist", "changes cannot be decoded without it: cdc resync"),
)


def hint_for(reason: str) -> str:
    """What to do about a failed task."""
    for pattern, hint in _HINTS:
        if re.search(pattern, reason, re.IGNORECASE):
            return hint
    return "look at the log of the Connect worker for the whole trace; then restart the connector"


def _path(name: str) -> str:
    return f"/connectors/{quote(name, safe='')}"


def _first(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _parsed(answer: requests.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        raise SourceError(
            f"{answer.url.split('?')[0]} did not answer with JSON",
            hint="connect.url must be the REST address of Kafka Connect",
        ) from None


def _message(answer: requests.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return ""
    return str(body.get("message", "")) if isinstance(body, dict) else ""


def _scrubbed(text: str, secrets: tuple[str, ...]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def _refused(url: str, problems: list[str], secrets: tuple[str, ...]) -> SourceError:
    listing = "; ".join(dict.fromkeys(_scrubbed(_first(each), secrets) for each in problems))
    hint = "correct the configuration as Connect asks"
    if "exactly" in listing.lower():
        hint = "set exactly.once.source.support=enabled on every Connect worker and restart them"
    return SourceError(f"{url} refused the connector: {listing}", hint=hint)


def _unknown(name: str, url: str) -> SourceError:
    return SourceError(
        f"{url} knows no connector {name}", hint="create it with `cdc connectors apply`"
    )
