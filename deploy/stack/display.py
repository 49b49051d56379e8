"""What a person sees while the stack starts: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cdc.jars import Progress
from deploy.stack.runner import Status
from deploy.stack.starting import Event

LINE_EVERY_S = 5.0
MEGA = 1_000_000
_STYLE = {
    "ready": "green",
    "failed": "red",
    "not ready": "yellow",
    "starting": "cyan",
    "preparing": "cyan",
    "stopped": "dim",
    "waiting": "dim",
}


class Lines:
    """One line per change of state; a line every few seconds while fetching."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if event.progress:
            self.fetching(event.progress)
        elif event.server and event.state == "waiting":
            return
        else:
            click.echo(" ".join(filter(None, (event.server, event.state, event.detail))), err=True)

    def fetching(self, progress: Progress) -> None:
        with self._lock:
            is_last = progress.files_done == progress.files_total
            if is_last or time.monotonic() - self._last >= LINE_EVERY_S:
                self._last = time.monotonic()
                click.echo(_progress_text(progress), err=True)


class LiveTable:
    """The states of all servers, redrawn in place."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._states: dict[str, Event] = {}
        self._note = ""
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if event.progress:
            self.fetching(event.progress)
            return
        with self._lock:
            if event.server:
                self._states[event.server] = event
                self._note = ""
            else:
                self._note = f"{event.state}: {event.detail}"
            self._draw()

    def fetching(self, progress: Progress) -> None:
        with self._lock:
            self._note = _progress_text(progress)
            self._draw()

    def _draw(self) -> None:
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, event in self._states.items():
            table.add_row(name, _state(event.state), Text(event.detail))
        self._live.update(Group(table, Text(self._note)) if self._note else table)


@contextmanager
def display() -> Iterator[Lines | LiveTable]:
    """Something to pass as on_event; everything goes to stderr."""
    if sys.stderr.isatty():
        with Live(console=Console(stderr=True), transient=True) as live:
            yield LiveTable(live)
    else:
        yield Lines()


def status_table(found: Sequence[Status]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("server", "state", "address", "pid", "memory", ""):
        table.add_column(title, justify="right" if title in ("pid", "memory") else "left")
    for s in found:
        memory = f"{s.resident_bytes // MEGA} MB" if s.resident_bytes else ""
        pid = str(s.pid or "")
        table.add_row(s.title, _state(s.state), s.address, pid, memory, Text(s.detail))
    return table


def _state(state: str) -> Text:
    return Text(state, style=_STYLE.get(state, ""))


def _progress_text(p: Progress) -> str:
    return (
        f"fetching {p.files_done} of {p.files_total} files, "
        f"{p.bytes_done // MEGA} of {p.bytes_total // MEGA} MB"
    )
