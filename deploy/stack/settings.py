"""Where a stack lives and which ports it uses: the environment, read once, checked at once.

A port is taken from its variable, else from what the stack remembers, else from the defaults, which
keep clear of the standard ports. 0 means: pick a free one and remember it.
"""

from __future__ import annotations

import errno
import json
import os
import random
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cdc.errors import CdcError, ConfigError
from cdc.jars import cache_dir

HOST = "127.0.0.1"
START_TIMEOUT_S = 120.0  # per server; Elasticsearch needs 25 s on two idle cores
STOP_TIMEOUT_S = 30.0
PORT_MAXIMUM = 65535
# Below the range from which the kernel hands out ports for outgoing connections.
FREE_PORTS = range(20_000, 32_000)

DEFAULT_PORTS = {
    "CDC_PG_PORT": 15432,
    "CDC_KAFKA_PORT": 19092,
    "CDC_KAFKA_CONTROLLER_PORT": 19093,
    "CDC_CONNECT_PORT": 18083,
    "CDC_ES_PORT": 19200,
    "CDC_ES_TRANSPORT_PORT": 19300,
    "CDC_REDIS_PORT": 16379,
}


class StackError(CdcError):
    """The stack cannot do what was asked, here and now."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The wanted ports by variable name; a variable that is absent was not set."""

    wanted: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def free(cls) -> Ports:
        """Every port picked anew: a stack that never collides with another."""
        return cls(dict.fromkeys(DEFAULT_PORTS, 0))

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Ports:
        wanted: dict[str, int] = {}
        problems = []
        for variable in DEFAULT_PORTS:
            text = environ.get(variable, "").strip()
            if not text:
                continue
            if text.isascii() and text.isdigit() and int(text) <= PORT_MAXIMUM:
                wanted[variable] = int(text)
            else:
                problems.append(f"{variable}={text}")
        if problems:
            raise ConfigError(
                f"not a port: {', '.join(problems)}",
                hint=f"Use a number from 1 to {PORT_MAXIMUM}, or 0 for any free port.",
            )
        return cls(wanted)


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a stack is told from outside."""

    directory: Path
    ports: Ports = field(default_factory=Ports)
    start_timeout_s: float = START_TIMEOUT_S

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        environ = os.environ if environ is None else environ
        chosen = environ.get("CDC_STACK_DIR")
        directory = Path(chosen).expanduser().absolute() if chosen else cache_dir() / "stack"
        text = environ.get("CDC_STACK_TIMEOUT", "").strip() or str(START_TIMEOUT_S)
        try:
            timeout_s = float(text.removesuffix("s"))
        except ValueError:
            timeout_s = 0.0
        # The comparison is false for nan.
        if not 0.0 < timeout_s < float("inf"):
            raise ConfigError(
                f"not a duration: CDC_STACK_TIMEOUT={text}", hint="Give seconds, such as 120."
            )
        return cls(directory, Ports.from_env(environ), timeout_s)


def resolve_ports(
    wanted: Mapping[str, int], remembered: Mapping[str, int], in_use: frozenset[str] = frozenset()
) -> dict[str, int]:
    """Decide every port. Those *in_use* by running servers stay as they are remembered."""
    ports: dict[str, int] = {}
    avoid = {*wanted.values(), *remembered.values()}
    for variable, default in DEFAULT_PORTS.items():
        asked = wanted.get(variable)
        known = remembered.get(variable)
        if variable in in_use and known:
            ports[variable] = known
        elif asked == 0:
            is_good = known in FREE_PORTS and not port_problem(known or 0)
            ports[variable] = known if known and is_good else pick_free(avoid)
            avoid.add(ports[variable])
        else:
            ports[variable] = asked or known or default
    return ports


def check_distinct(ports: Mapping[str, int]) -> None:
    seen: dict[int, str] = {}
    for variable, port in ports.items():
        if port in seen:
            raise ConfigError(
                f"{seen[port]} and {variable} are both {port}", hint="Give each its own port."
            )
        seen[port] = variable


def port_problem(port: int) -> str:
    """Why a server could not listen on *port*; empty when it could."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the servers do: connections of a server that just stopped are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return "is taken" if error.errno == errno.EADDRINUSE else "cannot be used by this user"
    return ""


def pick_free(avoid: Collection[int]) -> int:
    for port in random.sample(FREE_PORTS, len(FREE_PORTS)):
        if port not in avoid and not port_problem(port):
            return port
    raise StackError(
        f"no port between {FREE_PORTS.start} and {FREE_PORTS.stop} is free",
        hint="Name ports that are free: " + ", ".join(DEFAULT_PORTS) + ".",
    )


def remembered_ports(directory: Path) -> dict[str, int]:
    try:
        data = json.loads((directory / "ports.json").read_text(encoding="utf-8"))
        return {name: int(data[name]) for name in DEFAULT_PORTS if name in data}
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return {}


def remember_ports(directory: Path, ports: Mapping[str, int]) -> None:
    target = directory / "ports.json"
    fresh = target.with_suffix(".new")
    fresh.write_text(json.dumps(dict(ports), indent=2) + "\n", encoding="utf-8")
    fresh.replace(target)
