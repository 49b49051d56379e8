"""What the daemon does for its source: it looks every few seconds and keeps the log growing.

A failed connector is restarted. A log that lacks records is begun anew, because nothing else can
make it whole. What a person has paused or stopped is left alone.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from cdc.config import Config
from cdc.errors import CdcError
from cdc.logs import logger
from cdc.policy import backoff
from connectors import catalogue, lifecycle, snapshots, topics
from connectors.catalogue import Slot
from connectors.connect import ConnectClient, ConnectorStatus, Phase, hint_for
from connectors.postgres import (
    ANEW,
    ConnectorConfig,
    connector_name,
    heartbeat_topic,
    note_of,
    noted_ids,
    quarantine_topic,
    table_topics,
)

LOOK_EVERY_S = 2.0
# A position is read from the start of Connect's own topic: not at every look.
_ASK_POSITION_EVERY_S = 10.0
# A snapshot that fails every time, at the same row, must not be tried without end.
_RESYNC_AT_MOST_EVERY_S = 300.0
# A connector that has run for so long has got over what made it fail.
_STEADY_S = 30.0

# The position is not in the slot any more, or the slot is another one, or there are changes from
# when the publication was not there, which PostgreSQL cannot decode: no restart brings them back.
_CHANGES_LOST = re.compile(
    r"no longer available|can no longer (?:get changes|access)|invalidated|Saved offset|Offset LSN"
    r"|has already been removed|publication .* does not exist",
    re.IGNORECASE,
)


class Deed(Enum):
    NOTHING = "nothing"
    LEAVE = "leave"
    RESUME = "resume"
    RESTART = "restart"
    RESYNC = "resync"


class Verdict(NamedTuple):
    """*is_sure*: one look is enough. A server that has just started may not know everything yet."""

    deed: Deed
    reason: str = ""
    hint: str = ""
    is_sure: bool = True


@dataclass(frozen=True, slots=True)
class Seen:
    """The source at one look. *slot* and *phase* are asked only of a connector that stands still.

    *lost* tells what is wrong with a topic, by topic.
    """

    held: ConnectorConfig | None
    status: ConnectorStatus | None
    lost: Mapping[str, str] = field(default_factory=dict)
    slot: Slot | None = None
    phase: Phase = Phase.NOTHING


def judge(seen: Seen) -> Verdict:
    """What is to be done about *seen*."""
    if seen.held is None:
        hint = "run: cdc connectors apply"
        return Verdict(Deed.LEAVE, "there is no connector", hint, is_sure=False)
    if note_of(seen.held) == ANEW:
        return Verdict(Deed.RESYNC, "a resync was begun and not completed")
    state = seen.status.state if seen.status else ""
    if state in ("PAUSED", "STOPPED"):
        return _judge_stopped(seen, state)
    for topic, what in seen.lost.items():
        return Verdict(Deed.RESYNC, f"topic {topic} {what}", is_sure=False)
    if seen.status is not None and state == "FAILED":
        return _judge_failed(seen, seen.status.failure)
    return Verdict(Deed.NOTHING)


def _judge_stopped(seen: Seen, state: str) -> Verdict:
    is_unbegun = seen.slot is None and seen.phase is Phase.NOTHING
    if state == "STOPPED" and is_unbegun and noted_ids(seen.held) and not seen.lost:
        # New topics are noted and nothing has ever been read: the last step of a resync is missing.
        return Verdict(Deed.RESUME, "a resync was begun and not completed")
    return Verdict(
        Deed.LEAVE, f"the connector was {state.lower()} by hand", "run: cdc connectors apply"
    )


def _judge_failed(seen: Seen, failure: str) -> Verdict:
    is_unbegun = seen.slot is None and seen.phase is Phase.NOTHING
    is_gone = seen.slot is None or seen.slot.wal_status == "lost"
    if not is_unbegun and (is_gone or _CHANGES_LOST.search(failure)):
        return Verdict(Deed.RESYNC, f"changes are lost: {failure}")
    if not is_unbegun and seen.phase is not Phase.STREAM:
        return Verdict(Deed.RESYNC, f"the snapshot was cut short: {failure}")
    return Verdict(Deed.RESTART, failure, hint_for(failure))


class Care:
    """Looks, judges and acts, once per `look`; remembers what was said and tried."""

    def __init__(
        self, config: Config, log: BoundLogger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._log = log
        self._clock = clock
        self._said: object = None
        self._suspected: Verdict | None = None
        self._attempts: Counter[Deed] = Counter()
        self._not_before = 0.0
        self._ask_position_at = 0.0
        self._running_since: float | None = None
        self._is_unknown_told = False
        self._proven = ""  # the note whose log is known to hold one snapshot only

    def look(self) -> None:
        """See how the source is, and do what is to be done. Raises nothing."""
        if self._clock() < self._not_before:
            return
        try:
            with ConnectClient(self._config.connect.url, self._config.connect.timeout) as connect:
                seen = self._see(connect)
                verdict = judge(seen)
                if verdict.deed is Deed.NOTHING and _is_running(seen):
                    verdict = self._examine(connect, seen)
                self._settle(connect, seen, verdict)
        except CdcError as error:
            self._running_since = None
            self._say("the source cannot be kept", error=str(error), hint=error.hint)
        except Exception as error:  # noqa: BLE001 - a daemon must not lose its care in silence
            self._say("unexpected failure", error=type(error).__name__, hint="")

    def _see(self, connect: ConnectClient) -> Seen:
        name = connector_name(self._config)
        held = connect.config(name)
        if held is None or note_of(held) == ANEW:
            return Seen(held, None)
        status = connect.status(name)
        found = topics.ids(self._config)
        if {heartbeat_topic(self._config), quarantine_topic(self._config)} - found.keys():
            # Without the first the task waits, and then fails; without the second, sinks do.
            for change in topics.ensure_side_topics(self._config):
                self._log.warning("topic made again", change=change)
        lost = lifecycle.lost_topics(self._config, held, found)
        if status is None or status.state not in ("FAILED", "STOPPED"):
            return Seen(held, status, lost)
        # A failed task may leave a transaction open, and Connect then cannot tell the position.
        is_past = note_of(held) == self._proven
        phase = Phase.STREAM if is_past else connect.phase(name)
        return Seen(held, status, lost, catalogue.read_slot(self._config), phase)

    def _examine(self, connect: ConnectClient, seen: Seen) -> Verdict:
        """Look once into a log that has just got its snapshot."""
        note = note_of(seen.held)
        is_known = note == self._proven or not noted_ids(seen.held)
        if is_known or self._clock() < self._ask_position_at:
            return Verdict(Deed.NOTHING)
        self._ask_position_at = self._clock() + _ASK_POSITION_EVERY_S
        if connect.phase(connector_name(self._config)) is not Phase.STREAM:
            return Verdict(Deed.NOTHING)
        states = topics.describe(self._config, table_topics(self._config))
        if not snapshots.is_single(self._config, states):
            return Verdict(Deed.RESYNC, "the snapshot was cut short and another one taken")
        self._proven = note
        del self._attempts[Deed.RESYNC]
        return Verdict(Deed.NOTHING)

    def _settle(self, connect: ConnectClient, seen: Seen, verdict: Verdict) -> None:
        is_sure = verdict.is_sure or verdict == self._suspected
        self._suspected = verdict
        if verdict.deed is Deed.NOTHING:
            self._rest(seen)
            return
        self._running_since = None
        if not is_sure:
            return
        if verdict.deed is Deed.LEAVE:
            self._say("connector left alone", reason=verdict.reason, hint=verdict.hint)
        else:
            self._act(connect, seen, verdict)

    def _act(self, connect: ConnectClient, seen: Seen, verdict: Verdict) -> None:
        name, deed = connector_name(self._config), verdict.deed
        is_resync = deed is Deed.RESYNC
        self._attempts[deed] += 1
        longest_s = _RESYNC_AT_MOST_EVERY_S if is_resync else self._config.run.retry_at_most_every
        self._not_before = self._clock() + backoff(self._attempts[deed], longest_s)
        if is_resync:
            self._tell("resync begun", verdict)
            done = lifecycle.resync(self._config, seen=note_of(seen.held))
            self._log.info("resync done", steps=done)
        elif deed is Deed.RESUME:
            connect.resume(name)
            self._tell("connector resumed", verdict)
        else:
            connect.restart_failed(name)
            self._tell("connector restarted", verdict)

    def _rest(self, seen: Seen) -> None:
        """Nothing is wrong; after a while of that, earlier trouble is forgotten."""
        if not _is_running(seen):
            return
        if self._said is not None:
            self._said = None
            self._log.info("source is well")
        now = self._clock()
        self._running_since = self._running_since or now
        if not noted_ids(seen.held) and not self._is_unknown_told:
            self._is_unknown_told = True
            self._log.warning("log not known to be whole", hint="run: cdc resync")
        if now - self._running_since >= _STEADY_S:
            del self._attempts[Deed.RESTART], self._attempts[Deed.RESUME]

    def _tell(self, what: str, verdict: Verdict) -> None:
        self._said = what
        self._log.warning(
            what, reason=verdict.reason, hint=verdict.hint, attempt=self._attempts[verdict.deed]
        )

    def _say(self, what: str, **data: str) -> None:
        """Warn once, and again only when it has changed."""
        if (what, data) != self._said:
            self._said = (what, data)
            self._log.warning(what, **data)


def _is_running(seen: Seen) -> bool:
    return seen.status is not None and seen.status.state == "RUNNING"


def keep(config: Config, stop: threading.Event, log: BoundLogger | None = None) -> None:
    """Look after the source until *stop* is set."""
    care = Care(config, log or logger("cdc.care"))
    while not stop.is_set():
        care.look()
        stop.wait(LOOK_EVERY_S)
