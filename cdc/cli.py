"""The command line: parse, call, print. Results on stdout, logs on stderr."""

from __future__ import annotations

import functools
import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

import cdc
from cdc import logs, wiring
from cdc.config import Config
from cdc.errors import CdcError, ConfigError

F = TypeVar("F", bound=Callable[..., Any])

EXIT_FAILED = 1
EXIT_CONFIG = 2


def told(command: F) -> F:
    """Turn a CdcError into one sentence, its hint and an exit code."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except CdcError as error:
            tell(error)
            sys.exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED)

    return wrapper  # type: ignore[return-value]  # the same signature


def tell(error: CdcError) -> None:
    click.echo(f"error: {error}", err=True)
    if error.hint:
        click.echo(f"  try: {error.hint}", err=True)


config_option = click.option(
    "--config",
    "-c",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("cdc.toml"),
    show_default=True,
    envvar="CDC_CONFIG",
    help="The configuration file.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.group()
@click.version_option(cdc.__version__, prog_name="cdc")
def main() -> None:
    """Keep PostgreSQL tables mirrored in Elasticsearch, Redis and a warehouse."""


@main.command()
@config_option
@click.option("--once", is_flag=True, help="Go to the end of the log as of now, then exit.")
@click.option(
    "--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"])
)
@told
def run(path: Path, log_level: str, *, once: bool) -> None:
    """Apply the log to every sink, until SIGTERM or Ctrl-C."""
    config = wiring.load_config(path)
    logs.configure(log_level)
    failed = _run(config, once=once)
    for error in failed:
        tell(error)
    sys.stdout.flush()
    sys.exit(EXIT_FAILED if failed else 0)


def _run(config: Config, *, once: bool) -> list[CdcError]:
    from cdc import ledger, session, supervisor

    outside = wiring.outside(config)
    # Before Spark is started: nobody should wait ten seconds to hear of a wrong password.
    tables = outside.tables()
    ledger.plan(tables, {}, outside.topics(list(tables)))
    stop = threading.Event()
    spark = session.open_session(config.name, config.spark, wiring.spark_settings(config))
    for number in (signal.SIGTERM, signal.SIGINT):  # after Spark, which installs its own
        signal.signal(number, lambda *_: stop.set())
    try:
        threads = [
            supervisor.SinkThread(spark, config, sink, outside, once=once) for sink in config.sinks
        ]
        supervisor.run(threads, config.run, stop, lambda: outside.topics(list(tables)))
    finally:
        spark.stop()
    return [t.status.error for t in threads if t.status.state == "failed" and t.status.error]


@main.group()
def connectors() -> None:
    """Debezium's connector in Kafka Connect, and the topics it writes to."""


@connectors.command()
@config_option
@json_option
@told
def apply(path: Path, *, as_json: bool) -> None:
    """Create or update topics and connector, and wait until its task runs."""
    from connectors import lifecycle

    _say(lifecycle.apply(wiring.load_config(path)).changes, as_json=as_json)


@connectors.command()
@config_option
@json_option
@told
def status(path: Path, *, as_json: bool) -> None:
    """Show the state of the connector and of every task."""
    from connectors import lifecycle

    found = lifecycle.status(wiring.load_config(path))
    if as_json:
        click.echo(json.dumps(found))
    else:
        _print_status(found)
    if found["state"] != "RUNNING":
        sys.exit(EXIT_FAILED)


@connectors.command()
@config_option
@told
def restart(path: Path) -> None:
    """Restart the connector and its tasks."""
    from connectors import lifecycle

    lifecycle.restart(wiring.load_config(path))
    click.echo("restarted")


@connectors.command()
@config_option
@click.option("--drop-slot", is_flag=True, help="Also drop the replication slot and publication.")
@click.option("--drop-log", is_flag=True, help="Also drop slot, position and topics: begin anew.")
@json_option
@told
def remove(path: Path, *, drop_slot: bool, drop_log: bool, as_json: bool) -> None:
    """Remove the connector. Slot, publication and topics stay unless told otherwise."""
    from connectors import lifecycle

    config = wiring.load_config(path)
    _say(lifecycle.remove(config, drop_slot=drop_slot, drop_log=drop_log), as_json=as_json)


def _say(changes: list[str], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"changes": changes}))
        return
    for change in changes or ["nothing to do"]:
        click.echo(change)


def _print_status(found: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    parts = Table("part", "state", "worker", "reason", title=found["connector"])
    for part in found["parts"]:
        parts.add_row(*(part.get(str(column.header), "") for column in parts.columns))
    console.print(parts)
    topics = Table("topic", "state", "partitions", "end")
    for topic in found["topics"]:
        topics.add_row(*(str(topic.get(str(column.header), "")) for column in topics.columns))
    console.print(topics)
    if found["slot"]:
        click.echo(f"slot {found['slot']['name']}: {found['slot']['lag_bytes']} bytes behind")
    if found["hint"]:
        click.echo(f"try: {found['hint']}")
