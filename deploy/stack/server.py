"""What every server of the stack is: the contract with the runner, and where it may put things."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cdc.jars import Artefact
from deploy.stack.process import User


class NotReady(Exception):  # a state that is expected for a while, not an error
    """The server does not do its work yet; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one stack's servers live, and how to run a helper there."""

    directory: Path
    ports: Mapping[str, int]
    user: User | None = None
    java: Path | None = None

    def conf(self, name: str) -> Path:
        return self.directory / "conf" / name

    def data(self, name: str) -> Path:
        return self.directory / "data" / name

    def password(self) -> str:
        return read_password(self.directory)

    def own(self, *paths: Path) -> None:
        """Give *paths* to the unprivileged user, if there is one."""
        if self.user:
            for path in paths:
                os.chown(path, self.user.uid, self.user.gid)


# Runs a command to its end, as the server's user and with its output in the server's log.
RunTool = Callable[[list[str]], None]


class Server:
    """A server knows its own files, settings and protocol; processes belong to the runner.

    Commands run in the stack's directory, so settings hold relative paths where they can.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    port: ClassVar[str]  # the variable of the port that clients use
    ports: ClassVar[tuple[str, ...]]  # the variables of all ports
    needs: ClassVar[tuple[str, ...]] = ()
    is_java: ClassVar[bool] = False
    refuses_root: ClassVar[bool] = False
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def artefacts(self) -> list[Artefact]:
        """What must be in the cache before this server can start."""
        return []

    def unpack(self) -> None:
        """Unpack archives into the cache, or find the program. Safe to repeat."""

    def prepare(self, place: Place, run_tool: RunTool) -> None:
        """Write settings and make the data directory. Safe to repeat, also after a kill."""
        raise NotImplementedError

    def command(self, place: Place) -> list[str]:
        raise NotImplementedError

    def environ(self, place: Place) -> dict[str, str]:  # noqa: ARG002
        return {}

    def check(self, place: Place) -> None:
        """Return when the server does its work; raise NotReady otherwise."""
        raise NotImplementedError


def password_path(directory: Path) -> Path:
    return directory / "postgres.password"


def read_password(directory: Path) -> str:
    return password_path(directory).read_text(encoding="ascii").strip()


def make_password(directory: Path) -> None:
    """Write PostgreSQL's password once, readable only by whoever runs the stack."""
    path = password_path(directory)
    if path.exists():
        return
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    fresh.touch(0o600)
    fresh.write_text(secrets.token_urlsafe(18) + "\n", encoding="ascii")
    fresh.replace(path)


def properties(values: Mapping[str, object]) -> str:
    """Java properties: backslashes and everything outside ASCII must be escaped."""
    return "".join(f"{key}={_escape(str(value))}\n" for key, value in values.items())


def _escape(text: str) -> str:
    escaped = []
    for character in text.replace("\\", "\\\\"):
        if character.isascii():
            escaped.append(character)
        else:
            units = character.encode("utf-16-be").hex()
            escaped += [f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4)]
    return "".join(escaped)
