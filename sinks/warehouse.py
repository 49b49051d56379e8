"""A PostgreSQL warehouse: rows and ledger in one transaction, so a change happens exactly once.

Each source table becomes one table of the target schema, named by `target_name`, with the
source's key and one more column, `_cdc_version`. A slice is copied into a temporary table and
applied by two guarded statements, whatever its size.

The table `cdc_ledger` has one line per sink, topic and partition, and one more per sink (topic '',
partition -1) that hands out the fencing tokens. A writer locks its line before anything else, so
writers of different partitions never wait for each other, and a claim waits for those at work.
A change below the line's next offset is stale: deletes need no tombstone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow
from pydantic import Field, SecretStr

from cdc.change import OFFSET_BITS, Change, Row, Slice, Table
from cdc.config import Seconds, Secret, SinkSettings
from cdc.errors import SinkError, SinkFenced, SinkUnavailable, SinkUnusable
from cdc.sink import Claim, Entry, Refusal, Written
from sinks.types import postgres_column, postgres_read_cast
from sinks.warehouse_copy import (
    GONE,
    VERSION,
    Connection,
    Plan,
    Unwritable,
    definitions,
    is_refusal,
    plan_of,
    stage_table,
)

_NAME_BYTES = 63  # PostgreSQL cuts longer identifiers without an error
_ROWS_PER_FETCH = 5_000

_LEDGER = sql.SQL("""
    CREATE TABLE {ledger} (
        sink text NOT NULL,
        topic text NOT NULL,
        partition integer NOT NULL,
        token bigint NOT NULL,
        topic_id text NOT NULL DEFAULT '',
        generation integer NOT NULL DEFAULT 0,
        partitions integer NOT NULL DEFAULT 0,
        next_offset bigint,
        unswept boolean NOT NULL DEFAULT false,
        PRIMARY KEY (sink, topic, partition)
    )""")
_ADD_UNSWEPT = sql.SQL("ALTER TABLE {ledger} ADD COLUMN unswept boolean NOT NULL DEFAULT false")
# Not less than the time: a ledger that was lost must not hand out a token twice.
_CLAIM = sql.SQL("""
    INSERT INTO {ledger} AS line (sink, topic, partition, token)
    VALUES (%s, '', -1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
    ON CONFLICT (sink, topic, partition)
    DO UPDATE SET token = greatest(line.token + 1, excluded.token)
    RETURNING token""")
_FENCE = sql.SQL("UPDATE {ledger} SET token = %s WHERE sink = %s AND topic <> ''")
_ENTRIES = sql.SQL("""
    SELECT topic, partition, topic_id, generation, partitions, next_offset, unswept
    FROM {ledger} WHERE sink = %s AND topic <> ''""")
_LOCK = sql.SQL("""
    SELECT token, generation, next_offset FROM {ledger}
    WHERE sink = %s AND topic = %s AND partition = %s FOR UPDATE""")
_LOCK_TOPIC = sql.SQL("""
    SELECT token, generation FROM {ledger}
    WHERE sink = %s AND topic = %s ORDER BY partition FOR UPDATE""")
_CLEAR = sql.SQL("DELETE FROM {ledger} WHERE sink = %s AND topic <> ''")
_ASSIGN = sql.SQL("""
    INSERT INTO {ledger}
        (sink, topic, partition, token, topic_id, generation, partitions, next_offset, unswept)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)""")
_MOVE = sql.SQL("""
    UPDATE {ledger} SET next_offset = %s WHERE sink = %s AND topic = %s AND partition = %s""")
_NEWEST = sql.SQL("SELECT max({version}) FROM {target}")
_SWEEP = sql.SQL("DELETE FROM {target} WHERE {version} < %s")
_SWEPT = sql.SQL("UPDATE {ledger} SET unswept = false WHERE sink = %s AND topic = %s")
_HELD = sql.SQL("""
    SELECT attname, format_type(atttypid, atttypmod), coalesce(attnum = ANY (key.indkey), false)
    FROM pg_attribute
    LEFT JOIN pg_index AS key ON key.indrelid = attrelid AND key.indisprimary
    WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped""")
_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")

# A source column may be widened; its mirror follows. Text takes everything.
_WIDER = {
    "smallint": ("integer", "bigint", "numeric"),
    "integer": ("bigint", "numeric"),
    "bigint": ("numeric",),
    "real": ("double precision",),
    "bpchar": ("character varying",),
}

# libpq tells no SQLSTATE when a connection fails. Where the server speaks another language, these
# do not match and the sink keeps trying, with the server's own words in its log.
_NOT_LET_IN = re.compile(
    r"authentication failed|no password supplied|does not exist|no pg_hba\.conf entry"
    r"|permission denied|not permitted to log in|does not support SSL|certificate"
)

# Text as the reader of `rows` expects it. With hash and merge joins off, a delete looks its keys up
# in the index even when nothing is known of the staging table. A writer that was cut off must not
# hold its lock for ever.
_SESSION = (
    "-c DateStyle=ISO -c IntervalStyle=iso_8601 -c TimeZone=UTC -c extra_float_digits=1 "
    "-c bytea_output=hex -c enable_hashjoin=off -c enable_mergejoin=off -c lock_timeout=30s "
    "-c idle_in_transaction_session_timeout=60s -c statement_timeout={timeout_ms}"
)

# Classes: connection, resources, shutdown. States: serialization failure, deadlock, lock not
# available, read-only (the address still points at the old primary), cancelled by a timeout.
_PASSING = ("08", "53", "57P")
_PASSING_STATES = {"40001", "40P01", "55P03", "25006", "25P03", "57014"}


class WarehouseSettings(SinkSettings):
    type: Literal["postgres"]
    host: str = "localhost"
    port: int = Field(default=5432, gt=0, lt=65536)
    database: str
    user: str
    password: Secret = SecretStr("")
    sslmode: Literal["disable", "prefer", "require", "verify-ca", "verify-full"] = "prefer"
    target_schema: str = Field(default="public", min_length=1, max_length=_NAME_BYTES)
    connect_timeout: Seconds = 10.0
    statement_timeout: Seconds = 120.0  # a slice takes well under a second


def target_name(table: Table) -> str:
    """The table's name in the target schema: `app.orders` is kept in `app_orders`.

    No two tables share one: where the schema has an underscore or the name would be cut, eight
    digits of a hash of the whole name are put at its end.
    """
    name = f"{table.schema}_{table.name}"
    if "_" not in table.schema and len(name.encode()) <= _NAME_BYTES:
        return name
    digest = hashlib.sha256(table.full_name.encode()).hexdigest()[:8]
    return f"{name.encode()[: _NAME_BYTES - 9].decode(errors='ignore')}_{digest}"


class WarehouseSink:
    def __init__(self, settings: WarehouseSettings) -> None:
        self.name = settings.name
        self._settings = settings
        self._connection: Connection | None = None
        self._plans: dict[Table, Plan] = {}
        self._tables: dict[str, Table] = {}
        self._ledger = sql.Identifier(settings.target_schema, "cdc_ledger")
        self._lock, self._move = (part.format(ledger=self._ledger) for part in (_LOCK, _MOVE))

    def prepare(self, tables: Mapping[str, Table]) -> None:
        with self._transaction("prepare") as connection:
            connection.execute("SET LOCAL statement_timeout = 0")  # a widened column is rewritten
            connection.execute("SELECT pg_advisory_xact_lock(hashtext('cdc_ledger'))")
            self._prepare_schema(connection)
            names = [target_name(table) for table in tables.values()]
            if len(set(names)) < len(set(tables.values())):
                raise SinkUnusable(f"{self.name}: two source tables share one target table")
            for table in tables.values():
                self._prepare_table(connection, table)
        self._tables = dict(tables)

    def claim(self) -> Claim:
        with self._transaction("claim") as connection:
            claimed = connection.execute(_CLAIM.format(ledger=self._ledger), (self.name,))
            token = int((claimed.fetchone() or (0,))[0])
            connection.execute(_FENCE.format(ledger=self._ledger), (token, self.name))
            lines = connection.execute(
                _ENTRIES.format(ledger=self._ledger), (self.name,)
            ).fetchall()
        entries: dict[str, Entry] = {}
        for topic, partition, topic_id, generation, partitions, next_offset, unswept in lines:
            before = entries[topic].offsets if topic in entries else {}
            offsets = {**before} if next_offset is None else {**before, partition: next_offset}
            entries[topic] = Entry(topic_id, generation, partitions, offsets, unswept)
        return Claim(token, {**self._lost(self._tables.keys() - entries.keys()), **entries})

    def assign(self, token: int, entries: Mapping[str, Entry]) -> None:
        lines = [
            (
                *(self.name, topic, partition, token, entry.topic_id, entry.generation),
                *(entry.partitions, entry.offsets.get(partition), entry.unswept),
            )
            for topic, entry in entries.items()
            for partition in range(entry.partitions)
        ]
        with self._transaction("assign") as connection:
            held = connection.execute(self._lock, (self.name, "", -1)).fetchone()
            self._check(token, held)
            connection.execute(_CLEAR.format(ledger=self._ledger), (self.name,))
            connection.cursor().executemany(_ASSIGN.format(ledger=self._ledger), lines)

    def write(self, token: int, piece: Slice) -> Written:
        line = (self.name, piece.topic, piece.partition)
        reached: int | None = None

        def fresh(connection: Connection) -> list[Change]:
            nonlocal reached
            with connection.pipeline():
                held = connection.execute(self._lock, line, prepare=True).fetchone()
            _, generation, reached = self._check(token, held)
            floor = (generation << OFFSET_BITS) | (reached or 0)
            return [change for change in piece.changes if change.version >= floor]

        def finish(connection: Connection) -> None:
            if reached is None or reached < piece.next_offset:
                connection.execute(self._move, (piece.next_offset, *line), prepare=True)
            connection.commit()

        written = self._apply(piece, fresh, finish)
        return written or Written(0, len(piece.changes))

    def repair(self, piece: Slice) -> Written | None:
        """No tombstone tells of a newer delete: the ledger does, and stands still meanwhile."""

        def newest(connection: Connection) -> list[Change] | None:
            line = (self.name, piece.topic, piece.partition)
            held = connection.execute(self._lock, line).fetchone()
            if held is None or (held[2] or 0) > piece.next_offset:
                return None
            if any(change.generation != held[1] for change in piece.changes):
                return None
            return list(piece.before(held[2] or 0))

        return self._apply(piece, newest, lambda connection: connection.commit())

    def sweep(self, token: int, topic: str, table: Table) -> int:
        with self._transaction(f"sweep {table.full_name}") as connection:
            connection.execute("SET LOCAL statement_timeout = 0")
            # First the line that a claim takes first: else the two could wait for each other.
            self._check(token, connection.execute(self._lock, (self.name, "", -1)).fetchone())
            lines = connection.execute(
                _LOCK_TOPIC.format(ledger=self._ledger), (self.name, topic)
            ).fetchall()
            _, generation = self._check(token, lines[0] if lines else None)
            swept = connection.execute(
                _SWEEP.format(target=self._target(table), version=sql.Identifier(VERSION)),
                (generation << OFFSET_BITS,),
            )
            connection.execute(_SWEPT.format(ledger=self._ledger), (self.name, topic))
            return swept.rowcount

    def rows(self, table: Table) -> Iterator[tuple[Row, int | None]]:
        columns = [
            sql.SQL("{}::{}").format(sql.Identifier(column.name), sql.SQL(cast))
            if (cast := postgres_read_cast(postgres_column(column.type)))
            else sql.Identifier(column.name)
            for column in table.columns
        ]
        query = sql.SQL("SELECT {}, {} FROM {}").format(
            sql.Identifier(VERSION), sql.SQL(", ").join(columns), self._target(table)
        )
        names = [column.name for column in table.columns]
        # Its own connection: who reads may take long, and must not stop who writes.
        with self._errors(f"read {table.full_name}"), self._connect() as connection:
            connection.execute("SET idle_in_transaction_session_timeout = 0")
            with connection.cursor("cdc_rows") as cursor:
                cursor.itersize = _ROWS_PER_FETCH
                cursor.execute(query)
                for version, *values in cursor:
                    yield dict(zip(names, values, strict=True)), version

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._plans.clear()  # their temporary tables end with the connection
        if connection is not None:
            connection.close()

    def _apply(
        self,
        piece: Slice,
        choose: Callable[[Connection], list[Change] | None],
        finish: Callable[[Connection], None],
    ) -> Written | None:
        """Apply what *choose* gives under the ledger's lock, and *finish*; or say what is refused.

        None, and nothing done, if *choose* says so.
        """
        where = f"{piece.table.full_name} partition {piece.partition}"
        with self._transaction(where) as connection:
            plan = self._plan(connection, piece.table)
            changes = choose(connection)
            if changes is None:
                return None
            try:
                applied = plan.apply(connection, changes, lambda: finish(connection))
            except (psycopg.Error, Unwritable) as error:
                if not is_refusal(error):
                    raise
                connection.rollback()
                if choose(connection) is None:
                    return None
                refused = plan.refused(connection, changes, error)
                connection.rollback()
                if not refused:  # it was about the ledger, or has passed
                    raise
                return Written(
                    0, 0, tuple(Refusal(piece.partition, c.offset, why) for c, why in refused)
                )
        return Written(applied, len(piece.changes) - applied)

    def _lost(self, topics: Collection[str]) -> dict[str, Entry]:
        """What rows say of themselves, for *topics* of which the ledger says nothing."""
        found: dict[str, Entry] = {}
        if not topics:
            return found
        with self._transaction("look for rows without a ledger") as connection:
            connection.execute("SET LOCAL statement_timeout = 0")  # no index has the version
            for topic in topics:
                query = _NEWEST.format(
                    target=self._target(self._tables[topic]), version=sql.Identifier(VERSION)
                )
                newest = (connection.execute(query).fetchone() or (None,))[0]
                if newest is not None:
                    found[topic] = Entry("", newest >> OFFSET_BITS, 0)
        return found

    def _target(self, table: Table) -> sql.Identifier:
        return sql.Identifier(self._settings.target_schema, target_name(table))

    def _check(self, token: int, line: TupleRow | None) -> TupleRow:
        if line is None:
            raise SinkUnusable(
                f"{self.name}: the ledger does not know this partition",
                hint="the ledger was changed by hand, or the topic has grown; start cdc again",
            )
        if line[0] != token:
            raise SinkFenced(f"{self.name}: token {token} is old, {line[0]} has taken over")
        return line

    def _prepare_schema(self, connection: Connection) -> None:
        schema = self._settings.target_schema
        known = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,))
        if known.fetchone() is None:
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        held = _held(connection, self._ledger)
        if not held:
            connection.execute(_LEDGER.format(ledger=self._ledger))
        elif "unswept" not in held:  # made before there were sweeps
            connection.execute(_ADD_UNSWEPT.format(ledger=self._ledger))
        right = "SELECT has_database_privilege(current_database(), 'TEMP')"
        if (connection.execute(right).fetchone() or (False,))[0] is not True:
            raise SinkUnusable(
                f"{self.name}: {self._settings.user} may not create temporary tables",
                hint=f"GRANT TEMPORARY ON DATABASE {self._settings.database} "
                f"TO {self._settings.user}",
            )
        self._check_rights(connection, self._ledger, "cdc_ledger")

    def _check_rights(self, connection: Connection, target: sql.Identifier, name: str) -> None:
        row = connection.execute(
            "SELECT " + ", ".join(f"has_table_privilege(%(name)s, '{each}')" for each in _RIGHTS),
            {"name": target.as_string(connection)},
        ).fetchone()
        missing = [right for right, held in zip(_RIGHTS, row or (), strict=True) if not held]
        if missing:
            raise SinkUnusable(
                f"{self.name}: {self._settings.user} lacks {', '.join(missing)} on {name}",
                hint=f"GRANT {', '.join(missing)} ON {name} TO {self._settings.user}",
            )

    def _prepare_table(self, connection: Connection, table: Table) -> None:
        target, name = self._target(table), target_name(table)
        if not table.key:
            raise SinkUnusable(
                f"{self.name}: {table.full_name} has no key", hint="add a primary key to the table"
            )
        if {VERSION, GONE} & {column.name for column in table.columns}:
            raise SinkUnusable(
                f"{self.name}: {table.full_name} has a column named {VERSION} or {GONE}",
                hint="rename the column at the source",
            )
        held = _held(connection, target)
        if not held:
            connection.execute(
                sql.SQL("CREATE TABLE {} ({}, PRIMARY KEY ({}))").format(
                    target,
                    definitions(table, sql.SQL(" bigint NOT NULL")),
                    sql.SQL(", ").join(map(sql.Identifier, table.key)),
                )
            )
            return
        if VERSION not in held or {n for n, (_, is_key) in held.items() if is_key} != {*table.key}:
            raise SinkUnusable(
                f"{self.name}: {name} exists, but without {VERSION} or with another key",
                hint=f"move {name} away, or name another target_schema",
            )
        self._check_rights(connection, target, name)
        for column in table.columns:
            wanted = postgres_column(column.type)
            if column.name not in held:
                change = sql.SQL("ADD COLUMN {} {}").format(
                    sql.Identifier(column.name), sql.SQL(wanted)
                )
            elif (before := held[column.name][0]) == wanted:
                continue
            elif wanted in (*_WIDER.get(before, ()), "text"):
                change = sql.SQL("ALTER COLUMN {0} TYPE {1} USING {0}::{1}").format(
                    sql.Identifier(column.name), sql.SQL(wanted)
                )
            else:
                raise SinkUnusable(
                    f"{self.name}: {name}.{column.name} is {before} and should be {wanted}",
                    hint=f"drop {name} and its lines in cdc_ledger; it is then filled again",
                )
            connection.execute(sql.SQL("ALTER TABLE {} {}").format(target, change))

    def _plan(self, connection: Connection, table: Table) -> Plan:
        found = self._plans.get(table)
        if found is not None:
            return found
        stage = sql.Identifier("pg_temp", f"cdc_stage_{len(self._plans)}")
        connection.execute(stage_table(table, stage))
        connection.commit()
        self._plans[table] = plan = plan_of(table, self._target(table), stage)
        return plan

    def _connect(self) -> psycopg.Connection[TupleRow]:
        settings = self._settings
        try:
            return psycopg.connect(
                host=settings.host,
                port=settings.port,
                dbname=settings.database,
                user=settings.user,
                password=settings.password.get_secret_value() or None,
                sslmode=settings.sslmode,
                connect_timeout=max(1, round(settings.connect_timeout)),
                application_name=f"cdc-{self.name}",
                client_encoding="UTF8",
                keepalives_idle=30,
                tcp_user_timeout=30_000,
                options=_SESSION.format(timeout_ms=round(settings.statement_timeout * 1000)),
            )
        except psycopg.OperationalError as error:
            where = f"{self.name}: PostgreSQL at {settings.host}:{settings.port}"
            text = " ".join(str(error).split())  # of the connection; there is no row in it
            if _NOT_LET_IN.search(text):
                raise SinkUnusable(
                    f"{where} does not let us in: {text}",
                    hint="check user, password, database and sslmode of the sink, "
                    "and pg_hba.conf of the server",
                ) from None
            raise SinkUnavailable(f"{where} is not reachable: {text}") from None

    @contextmanager
    def _transaction(self, doing: str) -> Iterator[Connection]:
        """The connection, in a transaction that is committed at the end or undone."""
        if self._connection is None or self._connection.closed:
            self.close()
            self._connection = self._connect()
        connection = self._connection
        try:
            with self._errors(doing):
                yield connection
                connection.commit()
        except BaseException:
            try:
                connection.rollback()
            except psycopg.Error:
                self.close()
            raise

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Turn the driver's errors into ours. Its texts quote rows, so they stay behind."""
        try:
            yield
        except psycopg.Error as error:
            raise self._translated(error, doing) from None
        except Unwritable as error:
            raise SinkUnusable(f"{self.name}: {doing}: {error}") from None

    def _translated(self, error: psycopg.Error, doing: str) -> SinkError:
        state, diag = error.sqlstate or "", error.diag
        place = [
            f"{what} {value}"
            for what, value in (
                ("table", diag.table_name),
                ("column", diag.column_name),
                ("constraint", diag.constraint_name),
            )
            if value
        ]
        named = f" ({', '.join(place)})" if place else ""
        message = f"{self.name}: {doing}: {type(error).__name__} {state}".rstrip() + named
        is_cut_off = not state and isinstance(error, psycopg.OperationalError)
        if is_cut_off or state.startswith(_PASSING) or state in _PASSING_STATES:
            return SinkUnavailable(message)
        return SinkUnusable(message, hint=_hint(state))


def _hint(state: str) -> str:
    match state[:2]:
        case "28":
            return "check user and password of the sink"
        case "42" if state == "42501":
            return "the sink's user lacks a right; the table or schema must belong to it"
        case "42":
            return "the target was changed by another hand; start cdc again to prepare it anew"
        case "22" | "23":
            return "the target cannot hold a value of the source; compare the two column types"
        case _:
            return "look into the server's log for this moment"


def _held(connection: Connection, target: sql.Identifier) -> dict[str, tuple[str, bool]]:
    """The columns of *target*, each with its type and whether it is part of the key."""
    found = connection.execute(_HELD, (target.as_string(connection),)).fetchall()
    return {
        name: (re.sub(r"^character(?=$|\[)", "bpchar", type_), is_key)
        for name, type_, is_key in found
    }
