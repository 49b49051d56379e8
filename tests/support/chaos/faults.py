"""The faults. Each is a small function that returns when its fault is over, with a name.

*touches* says what a fault needs for itself: faults that touch nothing in common may overlap.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from connectors import topics
from tests.support.chaos.daemon import TAKEN_OVER, Daemon
from tests.support.chaos.load import TABLES
from tests.support.chaos.world import World
from tests.support.waiting import wait_until

OPENED_S = 180.0
ENDED_S = 120.0
DOWN_S = (0.0, 3.0)  # how long a killed server stays away
TROUBLE_S = (1.0, 8.0)  # how long a network misbehaves; clients give up after 5
HEAVY_S = 3.0
AGAIN = 0.3  # how often a daemon that was killed is killed again ...
START_S = (0.0, 20.0)  # ... while it starts

Act = Callable[[World, random.Random], None]
ProxyMode = Literal["cut", "deaf", "slow", "lose_answers"]


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    act: Act
    touches: frozenset[str]
    weight: int = 2  # how often it is chosen, against the others
    renews: bool = False  # the log must be begun anew, by the daemon and by nobody else


def kill_daemon(world: World, chance: random.Random) -> None:
    """The driver dies; its JVM ends by itself a moment later. Sometimes the next one dies, too."""
    first = world.keeper.daemon
    first.kill()
    if chance.random() < AGAIN:
        wait_until(lambda: world.keeper.daemon is not first, OPENED_S)
        _pause(chance.uniform(*START_S))
        world.keeper.daemon.kill()


def kill_worker(world: World, chance: random.Random) -> None:
    """One of Spark's Python workers dies, in the middle of whatever it does."""
    workers = wait_until(world.keeper.daemon.workers, OPENED_S)
    with suppress(ProcessLookupError):
        os.kill(chance.choice(sorted(workers)), signal.SIGKILL)


def kill_server(name: str, world: World, chance: random.Random) -> None:
    world.kill_server(name)
    _pause(chance.uniform(*DOWN_S))
    world.start_server(name)


def kill_connect_in_heavy_load(world: World, chance: random.Random) -> None:
    """Connect dies while counters are updated as fast as can be; what it re-sends must not show."""
    world.load.heavy(on=True)
    try:
        _pause(chance.uniform(HEAVY_S / 2, HEAVY_S))
        world.kill_server("connect")
        _pause(chance.uniform(0, HEAVY_S / 2))
    finally:
        world.load.heavy(on=False)
    world.start_server("connect")


def trouble(kind: str, mode: ProxyMode, world: World, chance: random.Random) -> None:
    """The network before one sink misbehaves for some seconds."""
    world.proxies[kind].mode = mode
    try:
        _pause(chance.uniform(*TROUBLE_S))
    finally:
        world.proxies[kind].mode = "pass"


def second_daemon(world: World, _: random.Random) -> None:
    """A second daemon on the same sinks: the first one must stop, and say why."""
    first, second = world.keeper.start_another()
    try:
        _wait_opened(second, len(world.config.sinks))
        _wait_ended(world, first)
    finally:
        first.stop()


def zombie(world: World, chance: random.Random) -> None:
    """A daemon sleeps, another takes over, the first wakes up: what it still writes is refused."""
    first = world.keeper.daemon
    first.signal_family(signal.SIGSTOP)
    first, second = world.keeper.start_another()
    try:
        _wait_opened(second, len(world.config.sinks))
        _pause(chance.uniform(*DOWN_S))
        first.signal_family(signal.SIGCONT)
        _wait_ended(world, first)
    finally:
        first.signal_family(signal.SIGCONT)
        first.stop()


def recreate_topic(world: World, chance: random.Random) -> None:
    """A topic is deleted and made again beneath the connector: the log has lost its beginning."""
    chosen = chance.choice(topics.log_topics(world.config)[: len(TABLES)])
    topics.remove_topics(world.config, [chosen])
    topics.ensure_topics(world.config)


def _wait_opened(daemon: Daemon, count: int) -> None:
    """Wait until all *count* sinks of *daemon* have their claims."""

    def opened() -> bool:
        daemon.look()
        return len(daemon.opened_sinks) == count

    wait_until(opened, OPENED_S)


def _wait_ended(world: World, daemon: Daemon) -> None:
    wait_until(lambda: daemon.exit_code is not None, ENDED_S)
    daemon.look()
    for words in daemon.stopped_sinks:
        if TAKEN_OVER not in words:
            world.violations.add(f"a daemon that was replaced stopped for another reason: {words}")


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


SERVERS = ("elasticsearch", "redis", "kafka", "connect", "postgres")
PROXIES = {"elasticsearch": "Elasticsearch", "redis": "Redis", "postgres": "the warehouse"}
MODES: dict[ProxyMode, str] = {
    "cut": "cut", "deaf": "deaf", "slow": "slow", "lose_answers": "lost answers"
}  # fmt: skip
SOURCE = frozenset({"daemon", "kafka", "connect", "postgres"})
EVERYTHING = frozenset({"daemon", *SERVERS})


def _all() -> list[Fault]:
    # A Connect worker without Kafka cannot be started.
    needs = {"kafka": {"kafka", "connect"}}
    return [
        Fault("kill the daemon", kill_daemon, frozenset({"daemon"})),
        Fault("kill a worker", kill_worker, frozenset({"daemon"}), 6),
        *(
            Fault(f"kill {name}", partial(kill_server, name), frozenset(needs.get(name, {name})), 1)
            for name in SERVERS
            if name != "connect"
        ),
        Fault("kill connect", kill_connect_in_heavy_load, frozenset({"connect"}), 1),
        *(
            Fault(f"{say}, {title}", partial(trouble, kind, mode), frozenset({kind}))
            for kind, title in PROXIES.items()
            for mode, say in MODES.items()
        ),
        Fault("recreate a topic", recreate_topic, SOURCE, 1, renews=True),
        Fault("a second daemon", second_daemon, EVERYTHING, 1),
        Fault("a zombie daemon", zombie, EVERYTHING, 1),
    ]


FAULTS = {fault.name: fault for fault in _all()}
