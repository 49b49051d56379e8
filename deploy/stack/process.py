"""Processes that outlive their starter and are found again: start, recognise, stop.

A process is ours when its pid, its start time and the machine's boot are the recorded ones, or when
its environment carries our mark. The mark also finds what a killed runner had no time to record,
and the children of a server. PostgreSQL's children write over their environment: they are known by
where they work and by the program they run. Nothing is ever stopped by name.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from deploy.stack.settings import StackError

MARK = "CDC_STACK_MEMBER"
POLL_S = 0.05
FOLLOW_S = 0.2
PROC = Path("/proc")
# A Popen that is forgotten while its process lives warns; one that is never asked leaves a zombie.
_children: list[subprocess.Popen[bytes]] = []


@atexit.register
def _disown() -> None:
    """Let the servers outlive this interpreter without a warning that they do."""
    for child in _children:
        if child.poll() is None:
            child.returncode = 0


@dataclass(frozen=True, slots=True)
class Process:
    """A process, not to be confused with a later one that has the same pid."""

    pid: int
    started: int  # clock ticks after boot
    boot: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The living process with this pid; a zombie is dead."""
        try:
            text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The second field is the name in brackets and may hold anything, even a bracket.
        fields = text.rpartition(")")[2].split()
        if fields[0] in "ZX":
            return None
        return cls(pid, int(fields[19]), boot_id())

    @property
    def is_alive(self) -> bool:
        return Process.of(self.pid) == self


@dataclass(frozen=True, slots=True)
class User:
    """Whom a server runs as."""

    uid: int
    gid: int
    name: str


def boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def unprivileged_user() -> User | None:
    """Who runs the servers that refuse root: None when we are not root ourselves."""
    if os.geteuid() != 0:
        return None
    name = os.environ.get("CDC_STACK_USER") or "nobody"
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        entry = None
    if entry is None or entry.pw_uid == 0:
        raise StackError(
            f"PostgreSQL and Elasticsearch refuse to run as root, and {name} is no other user",
            hint="Name an unprivileged user in CDC_STACK_USER, or do not run this as root.",
        )
    return User(entry.pw_uid, entry.pw_gid, name)


def is_reachable(path: Path, user: User) -> bool:
    """Say whether *user* may enter every directory on the way to *path* (groups are ignored)."""
    for step in (path, *path.parents):
        try:
            status = step.stat()
        except FileNotFoundError:
            continue
        allowed = 0o100 if status.st_uid == user.uid else 0o001
        if not status.st_mode & allowed:
            return False
    return True


def mark(name: str, directory: Path) -> str:
    return f"{MARK}={name}:{directory}"


def wait_exit(process: Process, timeout_s: float) -> int | None:
    """Wait for a process that this interpreter started; kill it when the time is over."""
    (child,) = (child for child in _children if child.pid == process.pid)
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        child.kill()
        child.wait()
        _children.remove(child)


def start(
    command: Sequence[str],
    *,
    name: str,
    directory: Path,
    log: Path,
    environ: Mapping[str, str],
    user: User | None,
) -> Process:
    """Start *command* in a session of its own, marked, with its output in *log*."""
    key, _, value = mark(name, directory).partition("=")
    with log.open("ab") as out:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**environ, key: value},
            cwd=directory,
            start_new_session=True,
            user=user.uid if user else None,
            group=user.gid if user else None,
            extra_groups=[] if user else None,
        )
    _children.append(child)
    return Process.of(child.pid) or Process(child.pid, 0, "")


def marked(name: str, directory: Path) -> list[Process]:
    """Every living process that carries the mark of this server of this stack."""
    wanted = os.fsencode(mark(name, directory))
    return _find(lambda entry: wanted in (entry / "environ").read_bytes().split(b"\0"))


def working_in(directory: Path, programs: Path) -> list[Process]:
    """Every living process that runs a program from below *programs* in *directory*."""
    return _find(
        lambda entry: (
            (entry / "cwd").readlink() == directory
            and (entry / "exe").readlink().is_relative_to(programs)
        )
    )


def _find(is_wanted: Callable[[Path], bool]) -> list[Process]:
    found = []
    for entry in PROC.iterdir():
        # A process that is not ours to look at, or gone by now, is no member.
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and is_wanted(entry)
                and (process := Process.of(int(entry.name)))
            ):
                found.append(process)
    return found


def stop(processes: Iterable[Process], first: signal.Signals, timeout_s: float) -> bool:
    """Ask with *first*, wait, then kill; return whether asking was enough."""
    left = _send(processes, first)
    left = _wait(left, timeout_s)
    if not left:
        return True
    _wait(_send(left, signal.SIGKILL), timeout_s)
    return False


def _send(processes: Iterable[Process], number: signal.Signals) -> list[Process]:
    sent = []
    for process in processes:
        if process.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
                sent.append(process)
    return sent


def _wait(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    deadline = time.monotonic() + timeout_s
    left = list(processes)
    while True:
        for child in _children:
            child.poll()
        left = [process for process in left if process.is_alive]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)


def record(path: Path, process: Process) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(process)), encoding="utf-8")
    fresh.replace(path)


def recorded(path: Path) -> Process | None:
    """The process in the record, if it is still the same one and alive."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        process = Process(int(data["pid"]), int(data["started"]), str(data["boot"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return process if process.is_alive else None


def resident_bytes(processes: Iterable[Process]) -> int:
    """Memory of these processes and all their descendants; shared pages count once each."""
    parents: dict[int, int] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    family = {process.pid for process in processes}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return sum(_resident(pid) for pid in family)


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError):
        pages = int((PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def follow(file: TextIO) -> Iterator[str]:
    """Yield lines as they are appended to *file*, without end."""
    while True:
        line = file.readline()
        if line:
            yield line
        else:
            time.sleep(FOLLOW_S)
