"""One stack: what runs, starting what does not, stopping exactly what was started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from cdc.errors import ConfigError
from cdc.jars import Progress, cache_dir, fetch, find_java, make_dir
from deploy.stack import process, servers
from deploy.stack.fetch import check_platform
from deploy.stack.process import Process
from deploy.stack.servers import NotReady, Place, Server
from deploy.stack.settings import (
    HOST,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Ports,
    Settings,
    StackError,
    check_distinct,
    is_free,
    remember_ports,
    remembered_ports,
    resolve_ports,
)

POLL_S = 0.2
LOG_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Event:
    """Something a person who waits would like to see."""

    server: str  # empty: about the stack as a whole
    state: str  # waiting fetching unpacking preparing starting ready stopping stopped failed
    detail: str = ""
    progress: Progress | None = None


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


OnEvent = Callable[[Event], None]


class Stack:
    """A stack in one directory. Calls from several processes at once wait for each other."""

    def __init__(
        self,
        directory: Path | str,
        ports: Ports | None = None,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.directory = Path(directory).absolute()
        self._wanted = (ports or Ports()).wanted
        self._start_timeout_s = start_timeout_s
        self._servers = servers.servers()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Stack:
        settings = Settings.from_env(environ)
        return cls(
            settings.directory, settings.ports, start_timeout_s=settings.start_timeout_s
        )

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
        is_new = not self.directory.exists()
        try:
            with self._locked(tell):
                alive = {s.name: found for s in chosen if (found := self._main(s))}
                absent = [s for s in chosen if s.name not in alive]
                place = self._place(absent, alive)
                self._fetch(absent, tell)
                self._start_all(chosen, alive, place, tell)
        except BaseException:
            if is_new and not any(self._processes(s) for s in self._servers.values()):
                shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def down(self, names: Iterable[str] = (), on_event: OnEvent | None = None) -> None:
        """Stop *names* (all, if none) and what needs them; never a process of someone else."""
        tell = on_event or _silent
        wanted = set(names)
        self._check_names(wanted)
        chosen = [
            s for s in self._servers.values() if not wanted or wanted & {s.name, *s.needs}
        ]
        if not self.directory.exists():
            return
        with self._locked(tell):
            # Connect says goodbye to Kafka, so it goes first.
            late = [s for s in chosen if any(s.name in other.needs for other in chosen)]
            for group in ([s for s in chosen if s not in late], late):
                with ThreadPoolExecutor(max(len(group), 1)) as pool:
                    list(pool.map(lambda server: self._stop(server, tell), group))

    def reset(self, on_event: OnEvent | None = None) -> None:
        """Stop everything and delete data, settings and logs; the cache stays."""
        self.down(on_event=on_event)
        if not self.directory.exists():
            return
        with self._locked(on_event or _silent):
            for part in ("data", "conf", "run", "log"):
                _remove_tree(self.directory / part)
            for file in ("ports.json", "postgres.password"):
                (self.directory / file).unlink(missing_ok=True)

    def status(self) -> list[Status]:
        """Ask every server; takes as long as the slowest answer."""
        ports = self._ports()
        place = Place(self.directory, ports, None, None, _no_run)
        with ThreadPoolExecutor(len(self._servers)) as pool:
            return list(pool.map(lambda s: self._status(s, place), self._servers.values()))

    def env(self) -> dict[str, str]:
        """What a client needs to reach the servers."""
        try:
            password = servers.password_path(self.directory).read_text(encoding="ascii").strip()
        except FileNotFoundError:
            raise StackError(
                f"there is no stack in {self.directory}", hint="Start it: python -m deploy.stack up"
            ) from None
        except PermissionError:
            raise StackError(
                f"the stack in {self.directory} belongs to another user",
                hint="Set CDC_STACK_DIR to a directory of your own.",
            ) from None
        ports = self._ports()
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
        self._check_names({name})
        return self.directory / "log" / f"{name}.log"

    def pid(self, name: str) -> int | None:
        """The main process of server *name*, if it runs."""
        self._check_names({name})
        found = self._main(self._servers[name])
        return found.pid if found else None

    # ---- choosing ----

    def _check_names(self, names: Iterable[str]) -> None:
        if unknown := sorted(set(names) - set(self._servers)):
            raise ConfigError(
                f"there is no server called {', '.join(unknown)}",
                hint=f"The servers are {', '.join(self._servers)}.",
            )

    def _choose(self, names: Iterable[str]) -> list[Server]:
        wanted = set(names) or set(self._servers)
        self._check_names(wanted)
        for name in tuple(wanted):
            wanted.update(self._servers[name].needs)
        return [server for server in self._servers.values() if server.name in wanted]

    def _ports(self) -> dict[str, int]:
        remembered = remembered_ports(self.directory)
        return resolve_ports(self._wanted, remembered, frozenset(remembered))

    # ---- what runs ----

    def _record(self, server: Server) -> Path:
        return self.directory / "run" / f"{server.name}.json"

    def _main(self, server: Server) -> Process | None:
        return process.recorded(self._record(server))

    def _processes(self, server: Server) -> list[Process]:
        """The recorded process and everything that carries its mark."""
        found = process.marked(server.name, self.directory)
        main = self._main(server)
        return found if main is None or main in found else [main, *found]

    def _status(self, server: Server, place: Place) -> Status:
        main = self._main(server)
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
            address=f"{HOST}:{place.ports[server.port]}",
            pid=main.pid if main else None,
            resident_bytes=process.resident_bytes([main]) if main else 0,
            detail=detail,
            log=self.log(server.name),
        )

    # ---- starting ----

    @contextlib.contextmanager
    def _locked(self, tell: OnEvent) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            try:
                make_dir(self.directory)
                lock = held.enter_context((self.directory / "lock").open("a"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    tell(Event("", "waiting", "another command works on this stack"))
                    fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                raise self._unusable(error) from error
            yield

    def _unusable(self, error: OSError) -> StackError:
        return StackError(
            f"the directory {self.directory} cannot be used: "
            f"{(error.strerror or 'I/O error').lower()}",
            hint="Set CDC_STACK_DIR to a directory that you may write to.",
        )

    def _place(self, absent: Sequence[Server], alive: Mapping[str, Process]) -> Place:
        """Settle user, Java and ports, and make the directories; starts nothing."""
        user = process.unprivileged_user() if any(s.refuses_root for s in absent) else None
        java = find_java() if any(s.is_java for s in absent) else None
        if user:
            for path, setting in (
                (self.directory, "CDC_STACK_DIR"),
                (cache_dir(), "CDC_CACHE"),
                *([(java.resolve(), "JAVA_HOME")] if java else []),
            ):
                if not process.is_reachable(path, user):
                    raise StackError(
                        f"{path} is closed to the user {user.name}, who runs the servers that "
                        "refuse root",
                        hint=f"Point {setting} to a place that every user may enter.",
                    )
        for server in absent:
            # What a killed server or runner left behind holds ports and data.
            process.stop(self._processes(server), server.stop_signal, STOP_TIMEOUT_S)
        ports = self._settle_ports(absent, alive)
        try:
            for part in ("data", "conf", "run", "log"):
                make_dir(self.directory / part)
            remember_ports(self.directory, ports)
            servers.make_password(self.directory)
        except OSError as error:
            raise self._unusable(error) from error
        return Place(self.directory, ports, user, java, self._run_tool)

    def _settle_ports(
        self, absent: Sequence[Server], alive: Mapping[str, Process]
    ) -> dict[str, int]:
        remembered = remembered_ports(self.directory)
        running = [
            s for s in self._servers.values() if s.name in alive or (self._main(s) is not None)
        ]
        in_use = frozenset(variable for s in running for variable in s.ports)
        for server in running:
            for variable in server.ports:
                asked, known = self._wanted.get(variable), remembered.get(variable)
                if asked and known and asked != known:
                    raise ConfigError(
                        f"{server.title} runs on port {known}, but {variable}={asked}",
                        hint="Stop the stack first: python -m deploy.stack down",
                    )
        ports = resolve_ports(self._wanted, remembered, in_use)
        check_distinct(ports)
        for server in absent:
            for variable in server.ports:
                if not is_free(ports[variable]):
                    raise StackError(
                        f"port {ports[variable]} for {server.title} is taken",
                        hint=f"Set {variable} to another port, or to 0 for any free one.",
                    )
        return ports

    def _fetch(self, absent: Sequence[Server], tell: OnEvent) -> None:
        wanted = [artefact for server in absent for artefact in server.artefacts()]
        fetch(wanted, cache_dir(), lambda p: tell(Event("", "fetching", p.current, p)))
        for server in absent:
            server.unpack()

    def _start_all(
        self,
        chosen: Sequence[Server],
        alive: Mapping[str, Process],
        place: Place,
        tell: OnEvent,
    ) -> None:
        halt = threading.Event()
        jobs: dict[str, Future[None]] = {}
        absent = [server for server in chosen if server.name not in alive]
        with ThreadPoolExecutor(len(chosen)) as pool:
            try:
                for server in chosen:
                    needs = [jobs[name] for name in server.needs]
                    jobs[server.name] = pool.submit(
                        self._bring_up, server, alive.get(server.name), needs, place, tell, halt
                    )
                wait(jobs.values(), return_when=FIRST_EXCEPTION)
                self._raise_first(jobs.values())
            except BaseException:
                halt.set()
                pool.shutdown()
                for server in reversed(absent):
                    self._stop(server, tell)
                raise

    def _raise_first(self, jobs: Iterable[Future[None]]) -> None:
        failures = [error for job in jobs if job.done() and (error := job.exception())]
        for error in failures:
            if not isinstance(error, _Halted):
                raise error

    def _bring_up(
        self,
        server: Server,
        running: Process | None,
        needs: Sequence[Future[None]],
        place: Place,
        tell: OnEvent,
        halt: threading.Event,
    ) -> None:
        tell(Event(server.name, "waiting"))
        wait(needs)
        if halt.is_set() or any(need.exception() for need in needs):
            raise _Halted
        began = time.monotonic()
        try:
            if running is None:
                tell(Event(server.name, "preparing"))
                self._turn_log(server)
                server.prepare(place)
                if halt.is_set():
                    raise _Halted
                running = self._launch(server, place)
                tell(Event(server.name, "starting"))
            self._await_ready(server, running, place, halt)
        except OSError as error:
            raise StackError(
                f"{server.title} cannot be started: {error}",
                hint=f"Its files are under {self.directory}.",
            ) from error
        tell(Event(server.name, "ready", f"{time.monotonic() - began:.1f} s"))

    def _launch(self, server: Server, place: Place) -> Process:
        started = process.start(
            server.command(place),
            name=server.name,
            directory=self.directory,
            log=self.log(server.name),
            environ={**_base_environ(self.directory), **server.environ(place)},
            user=place.user if server.refuses_root else None,
        )
        process.record(self._record(server), started)
        return started

    def _await_ready(
        self, server: Server, running: Process, place: Place, halt: threading.Event
    ) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            try:
                server.check(place)
                return
            except NotReady as reason:
                last = str(reason)
            if not running.is_alive:
                raise self._failed(server, f"{server.title} stopped while it was starting")
            if time.monotonic() > deadline:
                raise self._failed(
                    server,
                    f"{server.title} was not ready after {self._start_timeout_s:.0f} s: {last}",
                )
            if halt.wait(POLL_S):
                raise _Halted

    def _failed(self, server: Server, message: str) -> StackError:
        log = self.log(server.name)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "".join(f"\n    {line[:300]}" for line in lines[-LOG_TAIL_LINES:])
        return StackError(f"{message}; the end of {log}:{tail}", hint=f"Read {log}.")

    def _turn_log(self, server: Server) -> None:
        log = self.log(server.name)
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
        log.touch()

    def _run_tool(self, server: Server, command: list[str], environ: Mapping[str, str]) -> None:
        user = process.unprivileged_user() if server.refuses_root else None
        tool = process.start(
            command,
            name=server.name,
            directory=self.directory,
            log=self.log(server.name),
            environ={**_base_environ(self.directory), **environ},
            user=user,
        )
        if process.wait_exit(tool, self._start_timeout_s) != 0:
            raise self._failed(server, f"{server.title} could not be prepared")

    # ---- stopping ----

    def _stop(self, server: Server, tell: OnEvent) -> None:
        found = self._processes(server)
        if found:
            tell(Event(server.name, "stopping"))
            main = self._main(server)
            first = [main] if main else found
            process.stop(first, server.stop_signal, STOP_TIMEOUT_S)
            process.stop(self._processes(server), server.stop_signal, STOP_TIMEOUT_S)
        self._record(server).unlink(missing_ok=True)
        tell(Event(server.name, "stopped"))


class _Halted(Exception):  # noqa: N818  # another server failed: not an error of this one
    pass


def _silent(event: Event) -> None:
    pass


def _no_run(server: Server, command: list[str], environ: Mapping[str, str]) -> None:
    raise AssertionError(server.name, command, environ)


def _base_environ(directory: Path) -> dict[str, str]:
    """A short environment: what the shell exports must not change a server."""
    kept = ("PATH", "LANG", "TZ")
    return {
        "HOME": str(directory),
        "LC_ALL": "C.UTF-8",
        **{name: os.environ[name] for name in kept if name in os.environ},
    }


def _remove_tree(path: Path) -> None:
    """Delete in one visible step: a half-deleted data directory must not look like data."""
    gone = path.with_name(f".{path.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if path.exists():
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


