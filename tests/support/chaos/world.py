"""The whole pipeline under test: servers, proxies, load, daemon and witnesses, and their end."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from cdc import wiring
from cdc.change import Table, key_text
from cdc.compare import Difference
from cdc.config import Config
from connectors import catalogue, lifecycle
from deploy.demo.stores import Stores
from deploy.stack import Ports, Stack
from deploy.stack.members import Members
from sinks.delta import DeltaSettings, table_path
from sinks.warehouse import target_name
from tests.support.chaos.daemon import Keeper
from tests.support.chaos.load import KEY_COLUMNS, TABLES, Key, Load
from tests.support.chaos.rules import Store, Violations
from tests.support.chaos.witnesses import Elasticsearch, LogReader, Observer, Redis, is_marker
from tests.support.pipeline import Pipeline
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until

KINDS = ("elasticsearch", "redis", "postgres", "delta")
SETTINGS = """
[run]
report_every = "5s"
retry_at_most_every = "3s"
"""
TIMEOUT = 'timeout = "5s"\n'  # of the clients that have one: a deaf server costs no more
DEAD_S = 30.0
SOURCE_S = 60.0


class World:
    """Made by `world`. *proxies* stand before the sinks; witnesses go around them."""

    def __init__(
        self,
        stack: Stack,
        directory: Path,
        pipeline: Pipeline,
        load: Load,
        *,
        kinds: Sequence[str],
        logs: Path,
    ) -> None:
        self.stack = stack
        self.env = stack.env()
        self.directory = directory
        self.pipeline = pipeline
        self.load = load
        self.violations = Violations()
        self.proxies = {
            "elasticsearch": _proxy(self.env["CDC_ES_URL"]),
            "redis": _proxy(self.env["CDC_REDIS_URL"]),
            "postgres": Proxy(self.env["CDC_PG_HOST"], int(self.env["CDC_PG_PORT"])),
        }
        self.direct_path = pipeline.config_path(kinds, more=SETTINGS)
        self.config: Config = wiring.load_config(self.direct_path)  # around the proxies
        self.place = f"{pipeline.name}_to"
        path = directory / "through.toml"
        path.write_text(self._through(self.direct_path.read_text()))
        self.keeper = Keeper(path, logs, self.env, self.violations)
        self.log = LogReader(self.config, self.violations)
        self.observers: dict[str, Observer] = {}
        self.tables: dict[str, Table] = {}
        self._markers: dict[str, list[Key]] = {}
        self._marks = 0
        others = {"postgres": self._in_warehouse, "delta": self._in_lake}
        self._others = {kind: read for kind, read in others.items() if kind in kinds}
        self._stack_lock = threading.Lock()

    def _through(self, text: str) -> str:
        """The same configuration, with the proxies in front of the sinks."""
        head, *sinks = text.split("[[sinks]]")
        for at, sink in enumerate(self.config.sinks):
            if sink.type not in self.proxies:
                continue
            proxy = self.proxies[sink.type]
            address = f"{proxy.host}:{proxy.port}"
            sinks[at] = (
                sinks[at]
                .replace(self.env["CDC_ES_URL"], f"http://{address}")
                .replace(self.env["CDC_REDIS_URL"], f"redis://{address}/0")
                .replace(f"port = {self.env['CDC_PG_PORT']}", f"port = {proxy.port}")
            )
            if sink.type != "postgres":
                sinks[at] += TIMEOUT
        return "[[sinks]]".join((head, *sinks))

    def begin(self, patience_s: float) -> None:
        """Everything runs when this returns: rows flow, and witnesses watch."""
        lifecycle.apply(self.config)
        self.tables = {t.name: t for t in catalogue.read_tables(self.config).values()}
        self.log.start()
        self.keeper.start()
        wanted = len(TABLES) * self.config.kafka.partitions
        self._markers = wait_until(lambda: self._chosen_markers(wanted), SOURCE_S)
        prefixes = f"{self.place}:", f"{self.place}."
        readers: dict[str, Redis | Elasticsearch] = {
            "redis": Redis(self.env["CDC_REDIS_URL"], prefixes[0], self.tables),
            "elasticsearch": Elasticsearch(self.env["CDC_ES_URL"], prefixes[1], self.tables),
        }
        for name, reader in readers.items():
            self.observers[name] = Observer(Store(name), reader, self.load, self.violations)
            self.observers[name].start()
        self.converge(patience_s)
        self.load.start()

    def end(self) -> None:
        self.load.stop()
        self.keeper.stop()
        for watching in (*self.observers.values(), self.log):
            watching.stop()

    def look(self) -> None:
        """Keep the daemon running; fail if the load or a witness broke down."""
        self.keeper.look()
        for part in (self.load, self.log, *self.observers.values()):
            if part.failure is not None:
                raise part.failure

    # Faults use these.

    def kill_server(self, name: str) -> None:
        """End every process of one server of our own stack, as a power cut would."""
        members, server = Members(self.stack.directory), self.stack.server(name)
        began = time.monotonic()
        for process in members.all(server):
            if process.is_alive:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, 9)
        wait_until(lambda: not members.all(server), DEAD_S)
        if name in self.observers:
            self.observers[name].rules.crash(began, time.monotonic())

    def start_server(self, name: str) -> None:
        with self._stack_lock:  # one at a time anyway; and a crash of another is no failed start
            self.stack.up([name])

    # Convergence.

    def mark(self) -> int:
        """Write the next mark into one row of every partition of every table."""
        self._marks += 1
        number, seen = self._marks, ""

        def write() -> bool:
            nonlocal seen
            try:
                self.load.mark(self._markers, number)
            except psycopg.OperationalError as error:
                seen = str(error)
                return False
            return True

        try:
            wait_until(write, SOURCE_S)
        except AssertionError:
            raise AssertionError(f"the source takes no mark: {seen}") from None
        return number

    def behind(self, mark: int) -> dict[str, str]:
        """Which sinks have not shown *mark* in every partition; empty when all have."""
        rows = [(table, key) for table, keys in self._markers.items() for key in keys]
        found = {}
        if any(self.log.marks.get(row, 0) < mark for row in rows):
            found["the log"] = f"{[self.log.marks.get(row) for row in rows]}"
        for name, observer in self.observers.items():
            held = observer.reader.look(rows)
            if held is None:
                found[name] = "cannot be read"
            elif any(one is None or one[1] < mark for one in held):
                found[name] = f"{[one and one[1] for one in held]}"
        if not found:
            for name, read in self._others.items():
                numbers = read()
                if numbers is None:
                    found[name] = "cannot be read"
                elif len(numbers) < len(rows) or min(numbers) < mark:
                    found[name] = f"{numbers}"
        return found

    def converge(self, within_s: float) -> float:
        """Wait until all sinks have passed a mark written now; how long that took.

        What was deleted for good before the mark must be absent from every sink from then on.
        """
        dead = len(self.load.graveyard)
        began = time.monotonic()
        self._wait_passed(self.mark(), within_s)
        self._bury(dead)
        return time.monotonic() - began

    def _wait_passed(self, mark: int, within_s: float) -> None:
        behind: dict[str, str] = {}

        def passed() -> bool:
            nonlocal behind
            self.look()
            behind = self.behind(mark)
            return not behind

        try:
            wait_until(passed, within_s)
        except AssertionError:
            raise NotConverged(
                f"mark {mark} not passed within {within_s:g} s; behind: {behind};"
                f" the daemon, start {self.keeper.starts}: {self.keeper.daemon.last_words()};"
                f" violations before: {self.violations.all()}"
            ) from None

    def _bury(self, count: int) -> None:
        for observer in self.observers.values():
            observer.rules.bury(self.load.graveyard[:count], time.monotonic())

    def converge_anew(self, ids: Mapping[str, str], within_s: float) -> float:
        """Wait until no topic has its id of *ids* any more, and all copies are equal.

        Rows whose deletes went with the old topics are there until they are swept.
        """
        began = time.monotonic()

        def is_anew() -> bool:
            self.look()
            return not set(ids.values()) & set(self.log.ids.values())

        def differences() -> list[str]:
            self.look()
            return [f"{at}: {it}" for at, it in self.compared().items() if not it.is_equal]

        try:
            wait_until(is_anew, within_s)
            with self.load.at_rest():
                self._wait_passed(self.mark(), within_s)
                wait_until(lambda: not differences(), within_s)
                self._bury(len(self.load.graveyard))
        except AssertionError as error:
            raise NotConverged(
                f"the log was not begun anew: {error}; differences: {differences()}; the daemon:"
                f" {self.keeper.daemon.last_words()}; violations before: {self.violations.all()}"
            ) from None
        return time.monotonic() - began

    def compare(self, within_s: float) -> int:
        """With the load at rest, every row in every sink is as at the source; how many rows."""
        with self.load.at_rest():
            self.converge(within_s)
            rows = 0
            for copy, found in self.compared().items():
                rows += found.rows
                if not found.is_equal:
                    self.violations.add(f"{copy} differs: {found}")
            return rows

    def compared(self) -> dict[str, Difference]:
        """Every table in every sink against the source, as both are now."""
        stores = Stores(self.config, catalogue.read_tables(self.config))
        return {
            f"{table} in {sink}": stores.compare(sink, table)
            for sink in stores.sinks
            for table in self.pipeline.tables
        }

    def _chosen_markers(self, wanted: int) -> dict[str, list[Key]] | None:
        """One marker per partition of every table, as soon as the log has shown them."""
        chosen: dict[tuple[str, int], Key] = {}
        for (table, key), partition in list(self.log.partition_of.items()):
            if is_marker(key):
                chosen.setdefault((table, partition), key)
        if len(chosen) < wanted:
            return None
        return {t: [key for (table, _), key in chosen.items() if table == t] for t in TABLES}

    def _in_warehouse(self) -> list[int] | None:
        numbers = []
        try:
            with psycopg.connect(**self._postgres(), connect_timeout=5) as db:
                for table, keys in self._markers.items():
                    same = " AND ".join(f"{column} = %s" for column in KEY_COLUMNS[table])
                    target = f"{self.place}.{target_name(self.tables[table])}"
                    for key in keys:
                        query = f"SELECT n FROM {target} WHERE {same}"
                        numbers += [row[0] for row in db.execute(query.encode(), key)]
        except psycopg.Error:
            return None
        return numbers

    def _in_lake(self) -> list[int] | None:
        (lake,) = (sink for sink in self.config.sinks if isinstance(sink, DeltaSettings))
        numbers: list[int] = []
        try:
            for table, keys in self._markers.items():
                texts = [key_text(key) for key in keys]
                found = (
                    DeltaTable(table_path(lake.path, self.tables[table]))
                    .to_pyarrow_dataset()
                    .to_table(columns=["n"], filter=pc.field("_cdc_key").isin(texts))
                )
                numbers += found.column("n").to_pylist()
        except (DeltaError, OSError):
            return None
        return numbers

    def _postgres(self) -> dict[str, Any]:
        return {
            "host": self.env["CDC_PG_HOST"],
            "port": self.env["CDC_PG_PORT"],
            "dbname": self.env["CDC_PG_DATABASE"],
            "user": self.env["CDC_PG_USER"],
            "password": self.env["CDC_PG_PASSWORD"],
        }


class NotConverged(AssertionError):
    """A sink did not catch up; the message says which, and what the daemon said last."""


def _proxy(url: str) -> Proxy:
    found = urlsplit(url)
    return Proxy(str(found.hostname), int(found.port or 0))


@contextmanager
def world(
    seed: int,
    rate: float,
    patience_s: float,
    *,
    kinds: Sequence[str] = KINDS,
    kept: Path | None = None,
    logs: Path | None = None,
) -> Iterator[World]:
    """A pipeline on a stack of its own, all of it gone at the end, but for the daemon's *logs*.

    *kinds* are those of the sinks; Redis and Elasticsearch have to be among them. *kept* names a
    stack that runs and is left running: for short turns while working on this.
    """
    with ExitStack() as made:
        directory = Path(tempfile.mkdtemp(prefix="cdc-chaos-"))
        made.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o755)  # servers that refuse root must get in
        stack = Stack(kept or directory / "stack", Ports.free(), start_timeout_s=240)
        if kept is None:
            made.callback(stack.reset)
        stack.up()
        name = f"chaos{os.getpid()}"
        pipeline = Pipeline(stack.env(), directory, name, TABLES)
        pipeline.db.close()  # it would not survive
        load = Load(stack.env(), name, seed, rate)
        load.create()
        found = World(stack, directory, pipeline, load, kinds=kinds, logs=logs or directory)
        if kept is not None:
            made.callback(_remove, found)
        for proxy in found.proxies.values():
            made.enter_context(proxy)
        made.callback(found.end)
        found.begin(patience_s)
        yield found


def _remove(world: World) -> None:
    """Leave a stack that is kept as it was found."""
    world.stack.up()
    world.pipeline.db = psycopg.connect(**world._postgres(), autocommit=True)
    world.pipeline._applied = world.config
    world.pipeline.remove()
