"""One stack: start what does not run, stop exactly what was started, say what is there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cdc.errors import ConfigError
from cdc.jars import cache_dir, fetch, find_java, make_dir
from deploy.stack import process, servers
from deploy.stack.fetch import check_platform
from deploy.stack.members import Members, ServerFailed
from deploy.stack.server import NotReady, Place, Server, make_password, read_password
from deploy.stack.settings import (
    DEFAULT_PORTS,
    HOST,
    START_TIMEOUT_S,
    Ports,
    Settings,
    StackError,
    check_distinct,
    port_problem,
    remember_ports,
    remembered_ports,
    resolve_ports,
)
from deploy.stack.starting import Event, OnEvent, Start

PARTS = ("conf", "data", "log", "run")
# With the name that each has until it is complete.
FILES = ("ports.json", "ports.new", "postgres.password", "postgres.new")


@dataclass(frozen=True, slots=True)
class Status:
    """One server, as it is now."""

    name: str
    title: str
    state: str  # ready | not ready | stopped
    address: str
    pid: int | None
    resident_bytes: int
    detail: str
    log: Path


class Stack:
    """A stack in one directory. Calls from several processes at once wait for each other."""

    def __init__(
        self,
        directory: Path | str,
        ports: Ports | None = None,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        # Resolved, because the mark on a process holds this path.
        self.directory = Path(directory).resolve()
        self._wanted = (ports or Ports()).wanted
        self._start_timeout_s = start_timeout_s
        self._servers = servers.servers()
        self._members = Members(self.directory)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Stack:
        s = Settings.from_env(environ)
        return cls(s.directory, s.ports, start_timeout_s=s.start_timeout_s)

    @property
    def names(self) -> list[str]:
        return list(self._servers)

    def up(self, names: Iterable[str] = (), on_event: OnEvent | None = None) -> None:
        """Start what does not run of *names* (all, if none) and what they need; wait till ready.

        When a server fails, those that this call started are stopped again.
        """
        tell = on_event or _silent
        chosen = self._choose(names)
        check_platform()
        with self._locked(tell):
            is_new = not (self.directory / "run").exists()
            try:
                absent = [s for s in chosen if not self._members.main(s)]
                place = self._settle(absent)
                self._fetch(absent, tell)
                Start(self._members, place, tell, self._start_timeout_s).run(chosen)
            except ServerFailed:
                # Its log is worth keeping.
                raise
            except BaseException:
                if is_new:
                    self._clear()
                raise

    def down(self, names: Iterable[str] = (), on_event: OnEvent | None = None) -> None:
        """Stop *names* (all, if none) and what needs them; never a process of someone else."""
        tell = on_event or _silent
        wanted = {self.server(name).name for name in names}
        chosen = [s for s in self._servers.values() if not wanted or wanted & {s.name, *s.needs}]
        if not self.directory.exists():
            return
        with self._locked(tell):
            self._stop(chosen, tell)

    def reset(self, on_event: OnEvent | None = None) -> None:
        """Stop everything and delete data, settings and logs; the cache stays."""
        if not self.directory.exists():
            return
        tell = on_event or _silent
        with self._locked(tell):
            self._stop(list(self._servers.values()), tell)
            self._clear()

    def status(self) -> list[Status]:
        """Ask every server; takes as long as the slowest answer."""
        place = Place(self.directory, self._known_ports())
        with ThreadPoolExecutor(len(self._servers)) as pool:
            return list(pool.map(lambda s: self._status(s, place), self._servers.values()))

    def env(self) -> dict[str, str]:
        """What a client needs to reach the servers."""
        try:
            password = read_password(self.directory)
        except PermissionError:
            raise StackError(
                f"the stack in {self.directory} belongs to another user",
                hint="Set CDC_STACK_DIR to a directory of your own.",
            ) from None
        except (FileNotFoundError, NotADirectoryError):
            raise StackError(
                f"there is no stack in {self.directory}", hint="Run python -m deploy.stack up."
            ) from None
        ports = self._known_ports()
        return {
            "CDC_PG_HOST": HOST,
            "CDC_PG_PORT": str(ports["CDC_PG_PORT"]),
            "CDC_PG_USER": servers.PG_USER,
            "CDC_PG_PASSWORD": password,
            "CDC_PG_DATABASE": servers.PG_DATABASE,
            "CDC_KAFKA": f"{HOST}:{ports['CDC_KAFKA_PORT']}",
            "CDC_CONNECT_URL": f"http://{HOST}:{ports['CDC_CONNECT_PORT']}",
            "CDC_ES_URL": f"http://{HOST}:{ports['CDC_ES_PORT']}",
            "CDC_REDIS_URL": f"redis://{HOST}:{ports['CDC_REDIS_PORT']}/0",
        }

    def log(self, name: str) -> Path:
        """The file with the output of server *name*."""
        return self._members.log(self.server(name))

    def pid(self, name: str) -> int | None:
        """The main process of server *name*, if it runs."""
        main = self._members.main(self.server(name))
        return main.pid if main else None

    def server(self, name: str) -> Server:
        try:
            return self._servers[name]
        except KeyError:
            raise ConfigError(
                f"there is no server called {name}",
                hint=f"The servers are {', '.join(self._servers)}.",
            ) from None

    def _choose(self, names: Iterable[str]) -> list[Server]:
        chosen = [self.server(name) for name in names] or list(self._servers.values())
        wanted = {name for server in chosen for name in (server.name, *server.needs)}
        return [server for server in self._servers.values() if server.name in wanted]

    def _known_ports(self) -> dict[str, int]:
        known = {**DEFAULT_PORTS, **self._wanted}
        return known | remembered_ports(self.directory)

    def _status(self, server: Server, place: Place) -> Status:
        main = self._members.main(server)
        state, detail = "stopped", ""
        if main:
            try:
                server.check(place)
                state = "ready"
            except NotReady as reason:
                state, detail = "not ready", str(reason)
            except OSError as error:
                state, detail = "not ready", (error.strerror or "I/O error").lower()
        return Status(
            name=server.name,
            title=server.title,
            state=state,
            address=f"{HOST}:{place.ports[server.port] or '?'}",
            pid=main.pid if main else None,
            resident_bytes=process.resident_bytes([main]) if main else 0,
            detail=detail,
            log=self._members.log(server),
        )

    @contextlib.contextmanager
    def _locked(self, tell: OnEvent) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            try:
                lock = self._take_lock(tell)
                held.callback(os.close, lock)
            except OSError as error:
                raise self._unusable(error) from error
            yield

    def _take_lock(self, tell: OnEvent) -> int:
        path = self.directory / "lock"
        while True:
            make_dir(self.directory)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tell(Event("", "waiting", "another command works on this stack"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            # While we waited, the holder may have deleted the file that we now hold.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
            os.close(lock)

    def _unusable(self, error: OSError) -> StackError:
        return StackError(
            f"the directory {self.directory} cannot be used: "
            f"{(error.strerror or 'I/O error').lower()}",
            hint="Set CDC_STACK_DIR to a directory that you may write to.",
        )

    def _settle(self, absent: Sequence[Server]) -> Place:
        """Decide user, Java and ports, and make the directories; starts nothing."""
        user = process.unprivileged_user() if any(s.refuses_root for s in absent) else None
        java = find_java() if any(s.is_java for s in absent) else None
        if user:
            self._check_reach(user, java)
        for server in absent:
            # What a killed server or runner left behind holds ports and data.
            self._members.stop(server)
        ports = self._settle_ports(absent)
        try:
            for part in PARTS:
                make_dir(self.directory / part)
            remember_ports(self.directory, ports)
            make_password(self.directory)
        except OSError as error:
            raise self._unusable(error) from error
        return Place(self.directory, ports, user, java)

    def _check_reach(self, user: process.User, java: Path | None) -> None:
        places = [(self.directory, "CDC_STACK_DIR"), (cache_dir(), "CDC_CACHE")]
        if java:
            places.append((java.resolve(), "JAVA_HOME"))
        for path, setting in places:
            if not process.is_reachable(path, user):
                raise StackError(
                    f"{path} is closed to the user {user.name}, who runs what refuses root",
                    hint=f"Point {setting} to a place that every user may enter.",
                )

    def _settle_ports(self, absent: Sequence[Server]) -> dict[str, int]:
        remembered = remembered_ports(self.directory)
        running = [s for s in self._servers.values() if self._members.main(s)]
        for server in running:
            for variable in server.ports:
                asked, known = self._wanted.get(variable), remembered.get(variable)
                if asked and known and asked != known:
                    raise ConfigError(
                        f"{server.title} runs on port {known}, but {variable}={asked}",
                        hint="Stop the stack first: python -m deploy.stack down.",
                    )
        in_use = frozenset(variable for server in running for variable in server.ports)
        ports = resolve_ports(self._wanted, remembered, in_use)
        check_distinct(ports)
        for server in absent:
            for variable in server.ports:
                if problem := port_problem(ports[variable]):
                    raise StackError(
                        f"port {ports[variable]} for {server.title} {problem}",
                        hint=f"Set {variable} to another port, or to 0 for any free one.",
                    )
        return ports

    def _fetch(self, absent: Sequence[Server], tell: OnEvent) -> None:
        wanted = [artefact for server in absent for artefact in server.artefacts()]
        fetch(wanted, cache_dir(), lambda p: tell(Event("", "fetching", p.current, p)))
        for server in absent:
            server.unpack()

    def _stop(self, chosen: Sequence[Server], tell: OnEvent) -> None:
        def stop(server: Server) -> None:
            tell(Event(server.name, "stopping"))
            self._members.stop(server)
            tell(Event(server.name, "stopped"))

        running = [server for server in chosen if self._members.all(server)]
        # Connect says goodbye to Kafka, so Kafka goes last.
        late = [s for s in running if any(s.name in other.needs for other in running)]
        for group in ([s for s in running if s not in late], late):
            with ThreadPoolExecutor(max(len(group), 1)) as pool:
                list(pool.map(stop, group))

    def _clear(self) -> None:
        """Delete all that a stack writes, and the directory itself if nothing else is in it."""
        for part in PARTS:
            # In one visible step: half of a data directory must not look like one.
            gone = self.directory / f".{part}.gone"
            shutil.rmtree(gone, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                (self.directory / part).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        for file in (*FILES, "lock"):
            (self.directory / file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()


def _silent(event: Event) -> None:
    pass
