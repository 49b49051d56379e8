"""The command line: parse, call, print. Results on stdout, logs on stderr."""

from __future__ import annotations

import functools
import json
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

import cdc
from cdc import logs, wiring
from cdc.config import Config
from cdc.errors import CdcError, ConfigError, TopicMissing
from cdc.quarantine import Kept

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
    from connectors import care, lifecycle

    outside = wiring.outside(config)
    # Before Spark is started: nobody should wait ten seconds to hear of a wrong password.
    tables = outside.tables()
    try:
        ledger.plan(tables, {}, outside.topics(list(tables)))
    except TopicMissing:
        # A daemon makes a log again that was lost; the first one is made by a person.
        if once or not lifecycle.is_applied(config):
            raise
    stop = threading.Event()
    if not once:
        threading.Thread(target=care.keep, args=(config, stop), name="care", daemon=True).start()
    spark = session.open_session(config.name, config.spark, wiring.spark_settings(config))
    for number in (signal.SIGTERM, signal.SIGINT):  # after Spark, which installs its own
        signal.signal(number, lambda *_: stop.set())
    try:
        threads = [
            supervisor.SinkThread(spark, config, sink, outside, once=once) for sink in config.sinks
        ]
        supervisor.run(threads, config.run, stop, lambda: outside.topics(list(tables)))
    finally:
        stop.set()
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


@main.command()
@config_option
@json_option
@told
def resync(path: Path, *, as_json: bool) -> None:
    """Begin the log anew: a new snapshot of every table into new topics.

    Needed when the log has lost records, and to add a table. Sinks read all again by themselves,
    and then remove the rows that are gone. May be repeated if it was cut short.
    """
    from connectors import lifecycle

    _say(lifecycle.resync(wiring.load_config(path)), as_json=as_json)


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


@main.group()
def quarantine() -> None:
    """Records that a sink could not take: kept with their reasons, until replayed or dropped."""


sink_option = click.option("--sink", "sinks", multiple=True, help="Only of this sink.")
table_option = click.option("--table", "tables", multiple=True, help="Only of this table.")
all_option = click.option("--all", "is_all", is_flag=True, help="All that is kept.")
ids_argument = click.argument("ids", nargs=-1)


@quarantine.command("list")
@config_option
@sink_option
@table_option
@json_option
@told
def quarantine_list(
    path: Path, sinks: tuple[str, ...], tables: tuple[str, ...], *, as_json: bool
) -> None:
    """List what is kept, oldest first. No row values."""
    from connectors import quarantine as store

    found = [
        each
        for each in store.kept(wiring.load_config(path))
        if (not sinks or each.sink in sinks) and (not tables or each.table in tables)
    ]
    if as_json:
        click.echo(json.dumps([each.described() for each in found]))
        return
    if not found:
        click.echo("the quarantine is empty")
        return
    shown = Table("id", "table", "kept at", "reason")
    for each in found:
        shown.add_row(each.id, each.table, each.kept_at, each.reason)
    Console(width=None if sys.stdout.isatty() else 160).print(shown)
    click.echo(f"{len(found)} kept; cdc quarantine show ID shows a record, replay tries it again")


@quarantine.command("show")
@config_option
@json_option
@click.argument("id_", metavar="ID")
@told
def quarantine_show(path: Path, id_: str, *, as_json: bool) -> None:
    """Show one record: position, reason, and key and value as they stood in the log."""
    (found,) = _chosen(wiring.load_config(path), (id_,), is_all=False)
    body = found.described() | {
        "key": found.key and found.key.decode(errors="replace"),
        "value": found.value and found.value.decode(errors="replace"),
    }
    if as_json:
        click.echo(json.dumps(body))
        return
    for name, value in body.items():
        click.echo(f"{name + ':':12} {'(none)' if value is None else value}")


@quarantine.command("replay")
@config_option
@ids_argument
@all_option
@json_option
@told
def quarantine_replay(path: Path, ids: tuple[str, ...], *, is_all: bool, as_json: bool) -> None:
    """Try again: write the newest record of each kept key, unless the sink has a newer one.

    Safe beside a running daemon. What is taken leaves the quarantine; the rest stays.
    """
    config = wiring.load_config(path)
    chosen = _chosen(config, ids, is_all=is_all)
    done = wiring.replay(config, chosen)
    if as_json:
        click.echo(json.dumps(asdict(done)))
    else:
        click.echo(
            f"{len(done.applied)} taken, {len(done.obsolete)} obsolete,"
            f" {len(done.refused)} refused again"
        )
        for id_, reason in done.refused.items():
            click.echo(f"  {id_}: {reason}")
    if done.refused:
        sys.exit(EXIT_FAILED)


@quarantine.command("drop")
@config_option
@ids_argument
@all_option
@json_option
@told
def quarantine_drop(path: Path, ids: tuple[str, ...], *, is_all: bool, as_json: bool) -> None:
    """Forget records for good. The sinks keep what they have of these rows."""
    from connectors import quarantine as store

    config = wiring.load_config(path)
    chosen = _chosen(config, ids, is_all=is_all)
    store.drop(config, [each.id for each in chosen])
    _say([f"dropped {each.id}" for each in chosen], as_json=as_json)


def _chosen(config: Config, ids: tuple[str, ...], *, is_all: bool) -> list[Kept]:
    from connectors import quarantine as store

    if bool(ids) == is_all:
        raise ConfigError("name the records, or say --all", hint="cdc quarantine list shows ids")
    found = {each.id: each for each in store.kept(config)}
    missing = [id_ for id_ in ids if id_ not in found]
    if missing:
        raise CdcError(
            f"the quarantine has no {', '.join(missing)}", hint="cdc quarantine list shows ids"
        )
    return list(found.values()) if is_all else [found[id_] for id_ in ids]
