"""python -m deploy.stack: parse, call, print."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType

import click
from rich.console import Console

from cdc.errors import CdcError, ConfigError
from deploy.stack import Stack, fetch
from deploy.stack.display import display, status_table
from deploy.stack.process import follow


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """The local stack: PostgreSQL, Kafka, Kafka Connect, Elasticsearch and Redis on loopback.

    Settings are environment variables: CDC_STACK_DIR, CDC_CACHE, CDC_PG_PORT, CDC_KAFKA_PORT,
    CDC_CONNECT_PORT, CDC_ES_PORT, CDC_REDIS_PORT (0 picks a free port), CDC_STACK_TIMEOUT.
    """


@cli.command()
@click.argument("names", nargs=-1)
def up(names: Sequence[str]) -> None:
    """Start the servers (or only NAMES and what they need) and wait until they are ready."""
    stack = Stack.from_env()
    with display() as show:
        stack.up(names, show)
    Console().print(status_table(stack.status()))


@cli.command()
@click.argument("names", nargs=-1)
def down(names: Sequence[str]) -> None:
    """Stop the servers (or only NAMES and what needs them)."""
    with display() as show:
        Stack.from_env().down(names, show)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(as_json: bool) -> None:
    """Show each server: state, address, process, memory. Exit 1 unless all are ready."""
    found = Stack.from_env().status()
    if as_json:
        click.echo(json.dumps([asdict(s) for s in found], indent=2, default=str))
    else:
        Console().print(status_table(found))
    if any(s.state != "ready" for s in found):
        raise SystemExit(1)


@cli.command()
def env() -> None:
    """Print what a client needs, as KEY=value lines."""
    for key, value in Stack.from_env().env().items():
        click.echo(f"{key}={value}")


@cli.command()
@click.argument("name")
@click.option("-n", "--lines", default=40, show_default=True, type=click.IntRange(min=0))
@click.option("-f", "--follow", "is_following", is_flag=True, help="Go on as the log grows.")
def logs(name: str, lines: int, is_following: bool) -> None:
    """Print the end of the log of server NAME."""
    path = Stack.from_env().log(name)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in deque(file, maxlen=lines):
                click.echo(line, nl=False)
            if is_following:
                for line in follow(file):
                    click.echo(line, nl=False)
    except FileNotFoundError:
        raise CdcError(f"{name} has no log", hint="Start it: python -m deploy.stack up") from None


@cli.command()
def reset() -> None:
    """Stop the servers and delete their data; fetched archives stay."""
    with display() as show:
        Stack.from_env().reset(show)


@cli.command("fetch")
def fetch_command() -> None:
    """Fetch everything that the stack and the job need, without starting anything."""
    with display() as show:
        paths = fetch.everything(show.fetching)
    click.echo(f"{len(paths)} files are in {fetch.cache_dir()}")


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except CdcError as error:
        click.echo(f"error: {error}", err=True)
        if error.hint:
            click.echo(f"  {error.hint}", err=True)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {where}{(error.strerror or 'I/O error').lower()}", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _terminated(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise SystemExit(128 + number)


def main() -> None:
    signal.signal(signal.SIGTERM, _terminated)
    with _plain_errors():
        try:
            cli.main(prog_name="python -m deploy.stack", standalone_mode=False)
        except click.exceptions.Abort:
            raise SystemExit(130) from None
        except click.ClickException as error:
            error.show()
            raise SystemExit(error.exit_code) from None
        except BrokenPipeError:
            # `logs NAME | head`: the reader has seen enough.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
