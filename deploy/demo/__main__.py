"""Start everything, trade, watch, compare, stop everything. Exit 0 only if all copies are equal."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click
import psycopg
from rich.console import Console

from cdc import jars, wiring
from cdc.errors import CdcError, ConfigError
from connectors import catalogue, lifecycle
from deploy.demo.display import Display
from deploy.demo.shop import TABLES, Shop
from deploy.demo.stores import Stores, config_text, directions, passfile_line
from deploy.demo.sync import Sync
from deploy.stack import Ports, Stack
from deploy.stack.display import display as shown

START_WITHIN_S = 300.0  # a busy laptop may need ten times what a quiet one does
CONVERGE_WITHIN_S = 180.0
REFRESH_S = 0.5
COUNT_EVERY_S = 4.0


def main() -> int:
    console = Console(highlight=False)
    try:
        seconds = _seconds(os.environ.get("DEMO_SECONDS", ""))
        return _demo(console, seconds)
    except ConfigError as error:
        _tell(error)
        return 2
    except CdcError as error:
        _tell(error)
        return 1
    except KeyboardInterrupt:
        click.echo("error: interrupted; everything is stopped", err=True)
        return 130


def _seconds(text: str) -> float:
    if not text:
        return float("inf")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:
        raise ConfigError(f"DEMO_SECONDS={text} is not a number of seconds", hint="DEMO_SECONDS=60")
    return seconds


def _demo(console: Console, seconds: float) -> int:
    directory = jars.cache_dir() / "demo"
    stack = Stack(directory, Ports.free(), start_timeout_s=START_WITHIN_S)
    with _running(console, stack):
        env = stack.env()
        lake = directory / "lake"
        shutil.rmtree(lake, ignore_errors=True)
        path = directory / "cdc.toml"
        path.write_text(config_text(env, lake), encoding="utf-8")
        os.environ.update(env)
        config = wiring.load_config(path)
        with _connection(env) as connection:
            shop = Shop(connection)
            console.print("creating the shop ...")
            connection.execute("CREATE DATABASE warehouse")
            shop.create()
            for change in lifecycle.apply(config).changes:
                console.print(f"  {change}")
            stores = Stores(config, catalogue.read_tables(config))
            _say_where(console, env, directory, lake, path)
            with _syncing(path, directory / "cdc-run.log", env) as sync:
                _watch(console, shop, sync, stores, seconds)
                return _settle(console, sync, stores)


@contextmanager
def _running(console: Console, stack: Stack) -> Iterator[None]:
    """A fresh stack; stopped at the end whatever happens."""
    with shown() as on_event:
        stack.reset(on_event)
        try:
            jars.spark_jars(on_event.fetching)
            stack.up(on_event=on_event)
        except BaseException:
            stack.down()
            raise
    try:
        yield
    finally:
        console.print("stopping the servers ...")
        stack.down()


@contextmanager
def _syncing(path: Path, log: Path, env: Mapping[str, str]) -> Iterator[Sync]:
    sync = Sync(path, log, env)
    try:
        yield sync
    finally:
        sync.stop()


def _connection(env: Mapping[str, str]) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(
        host=env["CDC_PG_HOST"],
        port=env["CDC_PG_PORT"],
        dbname=env["CDC_PG_DATABASE"],
        user=env["CDC_PG_USER"],
        password=env["CDC_PG_PASSWORD"],
        autocommit=True,
    )


def _say_where(
    console: Console, env: Mapping[str, str], directory: Path, lake: Path, path: Path
) -> None:
    password_file = directory / "pgpass"
    password_file.touch(mode=0o600)
    password_file.write_text(passfile_line(env), encoding="utf-8")
    console.print(f"\nconfiguration: {path}\nlook into the stores from another terminal:")
    for store, command in directions(env, password_file, lake):
        console.print(f"  {store:<10} {command}", soft_wrap=True, markup=False)
    console.print()


def _watch(console: Console, shop: Shop, sync: Sync, stores: Stores, seconds: float) -> None:
    """Show the sinks fill up, then let the shop trade until Ctrl-C or the end of *seconds*."""
    stop = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    counts: dict[tuple[str, str], int | None] = {}
    traders = threading.Thread(target=shop.trade, args=(stop,), daemon=True)
    counter = threading.Thread(target=_count, args=(stores, counts, stop), daemon=True)
    pairs = [(sink, table) for table in TABLES for sink in stores.sinks]
    ends = float("inf")
    try:
        with Display(console, pairs) as display:
            while not stop.wait(REFRESH_S) and time.monotonic() < ends:
                if not sync.is_running:
                    raise CdcError(
                        f"cdc run ended by itself:\n{sync.last_lines()}", hint=f"see {sync.log}"
                    )
                if not traders.is_alive() and all(sync.pairs[pair].applied for pair in pairs):
                    ends = time.monotonic() + seconds
                    traders.start()
                    counter.start()
                caption = _caption(shop, ends) if traders.is_alive() else "filling the sinks ..."
                display.show(sync.pairs, counts, sync.trouble, caption)
    finally:
        stop.set()
        for thread in (traders, counter):
            if thread.is_alive():
                thread.join(10)
        for number, handler in previous.items():
            signal.signal(number, handler)
    console.print(f"the shop closed after {shop.transactions:,} transactions")


def _caption(shop: Shop, ends: float) -> str:
    left = max(0.0, ends - time.monotonic())
    until = "Ctrl-C to finish" if left == float("inf") else f"{left:.0f} s left"
    return f"{shop.transactions:,} transactions so far, {until}"


def _count(
    stores: Stores, counts: dict[tuple[str, str], int | None], stop: threading.Event
) -> None:
    while True:
        for sink in stores.sinks:
            for table in TABLES:
                counts[sink, table] = stores.count(sink, table)
                if stop.is_set():
                    return
        stop.wait(COUNT_EVERY_S)


def _settle(console: Console, sync: Sync, stores: Stores) -> int:
    """Wait until every copy is equal, stop the sync, and compare all of it once more."""
    console.print("waiting for the sinks ...")
    deadline = time.monotonic() + CONVERGE_WITHIN_S
    waiting = [(sink, table) for sink in stores.sinks for table in TABLES]
    pause = threading.Event()
    while waiting and time.monotonic() < deadline and sync.is_running:
        waiting = [pair for pair in waiting if not stores.is_equal(*pair)]
        pause.wait(REFRESH_S if waiting else 0.0)
    code = sync.stop()
    console.print("comparing every row of every table in every sink with the source:")
    compared = 0
    all_equal = code == 0
    for sink in stores.sinks:
        for table in TABLES:
            found = stores.compare(sink, table)
            compared += found.rows
            all_equal &= found.is_equal
            word = "equal" if found.is_equal else "DIFFERENT"
            console.print(f"  {word:<9} {sink:<10} {table:<17} {found}", soft_wrap=True)
    if code != 0:
        console.print(f"cdc run ended with exit code {code}:\n{sync.last_lines()}", markup=False)
    verdict = "all equal" if all_equal else "NOT EQUAL"
    console.print(f"{verdict}: {compared:,} rows compared in {len(stores.sinks)} sinks")
    return 0 if all_equal else 1


def _tell(error: CdcError) -> None:
    click.echo(f"error: {error}", err=True)
    if error.hint:
        click.echo(f"  try: {error.hint}", err=True)


if __name__ == "__main__":
    sys.exit(main())
