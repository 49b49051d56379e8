"""A whole pipeline of its own for a test: schema, connector, topics, sinks; removed at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import redis
import requests

from cdc import supervisor, wiring
from cdc.change import Table
from cdc.config import Config
from connectors import catalogue, lifecycle
from deploy.demo.stores import Stores

HEAD = """\
name = "{name}"
[source]
host = "{CDC_PG_HOST}"
port = {CDC_PG_PORT}
database = "{CDC_PG_DATABASE}"
user = "{CDC_PG_USER}"
password = "${{CDC_PG_PASSWORD}}"
tables = [{tables}]
[kafka]
bootstrap = "{CDC_KAFKA}"
[connect]
url = "{CDC_CONNECT_URL}"
"""
SINKS = {
    "elasticsearch": 'url = "{CDC_ES_URL}"\nindex_prefix = "{place}."\nreplicas = 0\n',
    "redis": 'url = "{CDC_REDIS_URL}"\nkey_prefix = "{place}:"\n',
    "postgres": 'host = "{CDC_PG_HOST}"\nport = {CDC_PG_PORT}\ndatabase = "{CDC_PG_DATABASE}"\n'
    'user = "{CDC_PG_USER}"\npassword = "${{CDC_PG_PASSWORD}}"\ntarget_schema = "{place}"\n',
    "delta": 'path = "{lake}"\ntrigger = "1s"\n',
}


class Pipeline:
    """*name* is the namespace of everything this pipeline makes."""

    def __init__(
        self, env: Mapping[str, str], directory: Path, name: str, tables: Sequence[str]
    ) -> None:
        self.env = dict(env)
        self.name = name
        self.tables = [f"{name}.{table}" for table in tables]
        self._directory = directory
        self._places: set[str] = set()
        self._applied: Config | None = None
        os.environ.update(env)
        self.db: psycopg.Connection[Any] = psycopg.connect(
            host=env["CDC_PG_HOST"],
            port=env["CDC_PG_PORT"],
            dbname=env["CDC_PG_DATABASE"],
            user=env["CDC_PG_USER"],
            password=env["CDC_PG_PASSWORD"],
            autocommit=True,
        )
        self.db.execute(f"CREATE SCHEMA {name}")

    def config_path(self, kinds: Sequence[str], place: str = "", more: str = "") -> Path:
        """A configuration with one sink of each kind, which keep their rows under *place*."""
        place = f"{self.name}_{place or 'to'}"
        self._places.add(place)
        lake = self._directory / f"lake-{place}"
        names = ", ".join(f'"{table}"' for table in self.tables)
        text = HEAD.format(name=self.name, tables=names, **self.env) + more
        for kind in kinds:
            head = f'[[sinks]]\nname = "{place}_{kind}"\ntype = "{kind}"\n'
            text += head + SINKS[kind].format(place=place, lake=lake, **self.env)
        path = self._directory / f"{place}.toml"
        path.write_text(text)
        return path

    def apply(self, path: Path) -> Config:
        self._applied = wiring.load_config(path)
        lifecycle.apply(self._applied)
        return self._applied

    @contextmanager
    def running(self, config: Config, spark: Any) -> Iterator[list[supervisor.SinkThread]]:
        """The job in this process, on the tests' own Spark, until the block ends."""
        stop = threading.Event()
        outside = wiring.outside(config)
        tables = outside.tables()
        threads = [
            supervisor.SinkThread(spark, config, sink, outside, once=False) for sink in config.sinks
        ]
        daemon = threading.Thread(
            target=supervisor.run,
            args=(threads, config.run, stop, lambda: outside.topics(list(tables))),
            daemon=True,
        )
        daemon.start()
        try:
            yield threads
        finally:
            stop.set()
            daemon.join(60)
            assert not daemon.is_alive()

    def catalogue(self, config: Config) -> Mapping[str, Table]:
        """The tables by topic, as PostgreSQL describes them now."""
        return catalogue.read_tables(config)

    def differences(self, config: Config) -> dict[str, str]:
        """What differs, by sink and table; empty when every copy is equal."""
        stores = Stores(config, catalogue.read_tables(config))
        return {
            f"{sink} {table}": stores.say(sink, table)
            for sink in stores.sinks
            for table in self.tables
            if not stores.is_equal(sink, table)
        }

    def cdc(self, *arguments: str, env: Mapping[str, str] | None = None) -> Finished:
        return cdc(*arguments, env={**self.env, **(env or {})})

    def remove(self) -> None:
        """Everything this pipeline made, gone."""
        if self._applied is not None:
            lifecycle.remove(self._applied, drop_log=True)
        for schema in (self.name, *self._places):
            self.db.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        self.db.close()
        client = redis.Redis.from_url(self.env["CDC_REDIS_URL"])
        url = self.env["CDC_ES_URL"]
        for place in self._places:
            for key in client.scan_iter(f"{place}:*", count=1000):
                client.delete(key)
            for index in requests.get(
                f"{url}/_cat/indices/{place}.*?h=index", timeout=30
            ).text.split():
                requests.delete(f"{url}/{index}", timeout=30)
            shutil.rmtree(self._directory / f"lake-{place}", ignore_errors=True)
        client.close()


Finished = subprocess.CompletedProcess[str]


def cdc(*arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 240) -> Finished:
    """The command as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "cdc", *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
