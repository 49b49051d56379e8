"""The demo on a terminal: one live table. Without a terminal: plain lines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from deploy.demo.sync import Pair

PLAIN_EVERY_S = 5.0

Counts = Mapping[tuple[str, str], int | None]


class Display:
    """Shows per table and sink: rows, lag, rate, commit-to-visible time."""

    def __init__(self, console: Console, pairs: Iterable[tuple[str, str]]) -> None:
        self._console = console
        self._order = list(pairs)  # (sink, table)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next_plain = 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(
        self,
        pairs: Mapping[tuple[str, str], Pair],
        counts: Counts,
        trouble: Mapping[str, str],
        caption: str,
    ) -> None:
        if self._live:
            self._live.update(self._table(pairs, counts, trouble, caption), refresh=True)
        elif time.monotonic() >= self._next_plain:
            self._next_plain = time.monotonic() + PLAIN_EVERY_S
            self._lines(pairs, counts, trouble, caption)

    def _table(
        self,
        pairs: Mapping[tuple[str, str], Pair],
        counts: Counts,
        trouble: Mapping[str, str],
        caption: str,
    ) -> Table:
        table = Table(title="PostgreSQL → Debezium → Kafka → Spark → four stores", caption=caption)
        table.add_column("table")
        table.add_column("sink")
        for header in ("rows", "lag", "changes/s", "commit to visible"):
            table.add_column(header, justify="right")
        last = ""
        for sink, name in self._order:
            pair = pairs.get((sink, name)) or Pair()
            if last and last != name:
                table.add_section()
            table.add_row(
                name if name != last else "",
                f"[red]{sink}: {trouble[sink]}[/red]" if sink in trouble else sink,
                _number(counts.get((sink, name))),
                _number(pair.lag),
                f"{pair.rate():.0f}",
                _seconds(pair.latency_s),
            )
            last = name
        return table

    def _lines(
        self,
        pairs: Mapping[tuple[str, str], Pair],
        counts: Counts,
        trouble: Mapping[str, str],
        caption: str,
    ) -> None:
        self._console.print(caption, highlight=False)
        for sink, name in self._order:
            pair = pairs.get((sink, name)) or Pair()
            self._console.print(
                f"  {name:<18} {sink:<10} rows {_number(counts.get((sink, name))):>6}"
                f"  lag {_number(pair.lag):>6}  {pair.rate():>5.0f}/s"
                f"  commit to visible {_seconds(pair.latency_s)}",
                highlight=False,
                soft_wrap=True,
            )
        for sink, reason in trouble.items():
            self._console.print(f"  {sink}: {reason}", highlight=False, soft_wrap=True)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
