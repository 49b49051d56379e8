"""What PostgreSQL's catalogue says of our tables, and of the slot that keeps their changes.

Reads, and changes something only when told to: the replica identity, or slot and publication.
No error holds a password.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from cdc.change import Column, Table
from cdc.config import Config
from cdc.errors import SourceError, SourceUnavailable
from connectors.postgres import publication_name, slot_name, table_topics

_CONNECT_S = 5
_STATEMENT_MS = 15_000
_POLL_S = 0.1

_FULL = "f"  # relreplident of REPLICA IDENTITY FULL

_TABLES = """
    SELECT wanted.name        AS name,
           c.oid              AS oid,
           c.relkind::text    AS kind,
           c.relpersistence::text AS persistence,
           n.nspname          AS schema,
           c.relname          AS relation,
           ARRAY(SELECT DISTINCT part.relreplident::text
                   FROM pg_class part
                  WHERE part.oid = c.oid AND c.relkind = 'r'
                     OR part.oid IN (SELECT relid FROM pg_partition_tree(c.oid) WHERE isleaf)
           ) AS identity,
           EXISTS (SELECT FROM pg_index x
                    WHERE x.indrelid = c.oid AND x.indisreplident AND NOT x.indisprimary
           ) AS other_index
      FROM unnest(%s::text[], %s::text[], %s::text[]) AS wanted (name, schema, relation)
      LEFT JOIN pg_namespace n ON n.nspname = wanted.schema
      LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.relation
"""

# The identity of a partitioned table is that of each partition.
_LEAVES = """
    SELECT n.nspname AS schema, c.relname AS relation
      FROM pg_class c
      JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.oid = %s OR c.oid IN (SELECT relid FROM pg_partition_tree(%s))
"""

_COLUMNS = """
    SELECT a.attrelid                            AS oid,
           a.attname                             AS name,
           format_type(a.atttypid, a.atttypmod)  AS type,
           NOT a.attnotnull                      AS nullable,
           a.attgenerated <> ''                  AS generated,
           a.attstorage <> 'p'                   AS toastable,
           format_type(base.oid, NULL)           AS base
      FROM pg_attribute a
     CROSS JOIN LATERAL (
           WITH RECURSIVE down (oid, next) AS (
                SELECT t.oid, t.typbasetype FROM pg_type t WHERE t.oid = a.atttypid
                 UNION ALL
                SELECT t.oid, t.typbasetype FROM down JOIN pg_type t ON t.oid = down.next)
           SELECT oid FROM down WHERE next = 0) AS base
     WHERE a.attrelid = ANY (%s::oid[])
       AND a.attnum > 0
       AND NOT a.attisdropped
     ORDER BY a.attrelid, a.attnum
"""

# A primary key may INCLUDE further columns; only the first indnkeyatts make the key.
_KEYS = """
    SELECT i.indrelid AS oid, a.attname AS name
      FROM pg_index i
     CROSS JOIN unnest(i.indkey::int2[]) WITH ORDINALITY AS part (attnum, place)
      JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = part.attnum
     WHERE i.indrelid = ANY (%s::oid[])
       AND i.indisprimary
       AND part.place <= i.indnkeyatts
     ORDER BY i.indrelid, part.place
"""

_CLOCK = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS us"

_SLOT = """
    SELECT s.slot_name                                                         AS name,
           s.active                                                            AS active,
           s.wal_status                                                        AS wal_status,
           s.confirmed_flush_lsn::text                                         AS confirmed,
           pg_wal_lsn_diff(pg_current_wal_lsn(), s.confirmed_flush_lsn)::bigint AS lag_bytes,
           pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint         AS held_bytes
      FROM pg_replication_slots s
     WHERE s.slot_name = %s
"""


# When an update does not touch a large value, Debezium 3.6.3 puts a placeholder in its place and
# the reselect post-processor replaces it. Tried with 40 types: these arrays come out right. Other
# arrays (smallint, real, date, timestamp, numeric, boolean, inet, enum) and bit strings fail when
# the placeholder is converted, and uuid[] silently gets a wrong value.
_RESELECTED_ARRAYS = frozenset(
    {
        "text[]",
        "character varying[]",
        "character[]",
        "integer[]",
        "bigint[]",
        "json[]",
        "jsonb[]",
        "bytea[]",
    }
)
_NOT_RESELECTED = frozenset({"bit", "bit varying"})
# Debezium 3.6.3 has no converter for it and leaves the column out of every record.
_NOT_SENT = frozenset({"interval[]"})


@dataclass(frozen=True, slots=True)
class Slot:
    """*lag_bytes* is WAL not yet confirmed by us, *held_bytes* WAL the server must keep for us."""

    name: str
    active: bool
    wal_status: str | None
    confirmed: str | None
    lag_bytes: int | None
    held_bytes: int | None


@dataclass(frozen=True, slots=True)
class Catalogue:
    tables: dict[str, Table]  # by topic
    generated: tuple[str, ...]  # generated columns, as schema.table.column
    reselected: tuple[str, ...]  # tables whose large values are fetched again, not in the WAL


def read_tables(config: Config) -> dict[str, Table]:
    """Every table of the configuration, by topic. SourceError names all that cannot be synced."""
    return read_catalogue(config).tables


def read_catalogue(config: Config) -> Catalogue:
    """The tables, and what must be left out of their records.

    pgoutput does not send generated columns (before PostgreSQL 18 never, since then only when the
    publication asks), so they are no columns of ours.
    """
    by_table = {table: topic for topic, table in table_topics(config).items()}
    names = list(by_table)
    schemas, relations = zip(*(name.split(".") for name in names), strict=True)
    problems: list[str] = []
    with _connection(config) as connection:
        _check_server(connection)
        as_of_us = _rows(connection, _CLOCK)[0]["us"]
        found = _rows(connection, _TABLES, (names, list(schemas), list(relations)))
        oids = [row["oid"] for row in found if row["oid"] is not None]
        columns = _rows(connection, _COLUMNS, (oids,))
        keys = _rows(connection, _KEYS, (oids,))
    tables: dict[str, Table] = {}
    generated: list[str] = []
    reselected: list[str] = []
    for row in found:
        own = [each for each in columns if each["oid"] == row["oid"]]
        key = tuple(each["name"] for each in keys if each["oid"] == row["oid"])
        unfit = _unfit(row) or _unfit_columns(row, own, key)
        if unfit:
            problems.append(unfit)
            continue
        if row["identity"] != [_FULL] and any(each["toastable"] for each in own):
            reselected.append(row["name"])
        generated += [f"{row['name']}.{each['name']}" for each in own if each["generated"]]
        tables[by_table[row["name"]]] = Table(
            schema=row["schema"],
            name=row["relation"],
            columns=tuple(
                Column(each["name"], each["type"], each["nullable"])
                for each in own
                if not each["generated"]
            ),
            key=key,
            as_of_us=as_of_us,
        )
    if problems:
        raise SourceError(
            f"{_place(config)}: {'; '.join(problems)}",
            hint="mend that in PostgreSQL, or take the table out of source.tables",
        )
    in_order = {topic: tables[topic] for topic in by_table.values()}
    return Catalogue(in_order, tuple(sorted(generated)), tuple(sorted(reselected)))


def read_slot(config: Config) -> Slot | None:
    """The replication slot, or None if there is none."""
    with _connection(config) as connection:
        rows = _rows(connection, _SLOT, (slot_name(config),))
    return Slot(**rows[0]) if rows else None


def set_identity_full(config: Config) -> list[str]:
    """Let PostgreSQL log whole old rows, so that no value is ever missing from an update.

    Costs WAL for every update and delete, and takes a short exclusive lock. One sentence for each.
    """
    done = []
    names = list(config.source.tables)
    schemas, relations = zip(*(name.split(".") for name in names), strict=True)
    with _connection(config) as connection:
        for row in _rows(connection, _TABLES, (names, list(schemas), list(relations))):
            if row["oid"] is None or row["identity"] == [_FULL]:
                continue
            for part in _rows(connection, _LEAVES, (row["oid"], row["oid"])):
                where = sql.Identifier(part["schema"], part["relation"])
                connection.execute(sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL").format(where))
            done.append(f"set REPLICA IDENTITY FULL on {row['name']}")
    return done


def drop_slot(config: Config, within_s: float = 30.0) -> list[str]:
    """Drop slot and publication: what PostgreSQL kept for us is gone. One sentence for each."""
    done = []
    slot, publication = slot_name(config), publication_name(config)
    with _connection(config) as connection:
        deadline = time.monotonic() + within_s
        # The connection of a connector that was just deleted takes a moment to close.
        while (rows := _rows(connection, _SLOT, (slot,))) and rows[0]["active"]:
            if time.monotonic() > deadline:
                raise SourceError(
                    f"{_place(config)}: slot {slot} is still being read",
                    hint="stop the connector that reads it, then try again",
                )
            time.sleep(_POLL_S)
        if rows:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
            done.append(f"dropped slot {slot}")
        named = "SELECT FROM pg_publication WHERE pubname = %s"
        if connection.execute(named, (publication,)).fetchone() is not None:
            connection.execute(sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(publication)))
            done.append(f"dropped publication {publication}")
    return done


def lock_key(config: Config) -> int:
    name = f"cdc resync {config.name}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], signed=True)


@contextmanager
def alone(config: Config) -> Iterator[Callable[[], None]]:
    """Hold the right to begin the log anew, which one process has at a time.

    PostgreSQL takes it back when the connection ends, however that happens; what is given out
    raises if that has happened.
    """
    with _connection(config) as connection:
        asked = "SELECT pg_try_advisory_lock(%s) AS is_mine"
        if not _rows(connection, asked, (lock_key(config),))[0]["is_mine"]:
            raise SourceError(
                "another resync is under way",
                hint="wait for it: cdc connectors status shows how far it is",
            )

        def check() -> None:
            _rows(connection, "SELECT 1")

        yield check


def _check_server(connection: psycopg.Connection[dict[str, Any]]) -> None:
    level = _rows(connection, "SHOW wal_level")[0]["wal_level"]
    if level != "logical":
        raise SourceError(
            f"PostgreSQL runs with wal_level={level}, so there are no changes to read",
            hint="ALTER SYSTEM SET wal_level = 'logical', then restart PostgreSQL",
        )


def _unfit(row: dict[str, Any]) -> str:
    """Why this table cannot be captured; nothing if it can."""
    name = row["name"]
    if row["oid"] is None:
        return f"table {name} does not exist"
    if row["kind"] not in ("r", "p"):
        return f"{name} is not a table"
    if row["persistence"] != "p":
        return f"table {name} is unlogged or temporary: it writes no WAL"
    if "n" in row["identity"]:
        # In a publication, PostgreSQL would refuse the application's own updates of such a table.
        return f"table {name} has REPLICA IDENTITY NOTHING: ALTER TABLE .. REPLICA IDENTITY DEFAULT"
    if "i" in row["identity"] and row["other_index"]:
        # Deletes would carry the columns of that index and not the primary key.
        return f"table {name} has another index as REPLICA IDENTITY: set it to DEFAULT or FULL"
    return ""


def _unfit_columns(row: dict[str, Any], own: list[dict[str, Any]], key: tuple[str, ...]) -> str:
    """Why the columns of this table cannot be captured; nothing if they can."""
    name = row["name"]
    if not key:
        return f"table {name} has no primary key: ALTER TABLE {name} ADD PRIMARY KEY (..)"
    if any(each["generated"] and each["name"] in key for each in own):
        return f"table {name} has a generated column in its primary key"
    unsent = [each["name"] for each in own if each["base"] in _NOT_SENT]
    if unsent:
        return f"table {name}: Debezium cannot send the type of {', '.join(unsent)}"
    lossy = [each["name"] for each in own if _is_lossy(each)]
    if lossy and row["identity"] != [_FULL]:
        return (
            f"table {name} would lose values of {', '.join(lossy)} in updates: "
            f"ALTER TABLE {name} REPLICA IDENTITY FULL"
        )
    return ""


def _is_lossy(column: dict[str, Any]) -> bool:
    """Whether only REPLICA IDENTITY FULL keeps this column's large values in updates."""
    base = column["base"]
    if not column["toastable"] or column["generated"]:
        return False
    return base in _NOT_RESELECTED or (base.endswith("[]") and base not in _RESELECTED_ARRAYS)


def _rows(
    connection: psycopg.Connection[dict[str, Any]], query: str, values: tuple[Any, ...] = ()
) -> list[dict[str, Any]]:
    return connection.execute(query.encode(), values or None).fetchall()


def _place(config: Config) -> str:
    source = config.source
    return f"postgresql://{source.host}:{source.port}/{source.database}"


@contextmanager
def _connection(config: Config) -> Iterator[psycopg.Connection[dict[str, Any]]]:
    """One connection; every error of it becomes one of ours.

    `from None`: psycopg's own error carries the whole connection string, password included.
    """
    source = config.source
    try:
        connection = psycopg.connect(
            host=source.host,
            port=source.port,
            dbname=source.database,
            user=source.user,
            password=source.password.get_secret_value(),
            sslmode=source.sslmode,
            connect_timeout=_CONNECT_S,
            application_name="cdc",
            options=f"-c statement_timeout={_STATEMENT_MS}",
            autocommit=True,
            row_factory=dict_row,
        )
    except psycopg.OperationalError as error:
        raise _not_connected(config, error) from None
    try:
        with connection:
            yield connection
    except psycopg.errors.InsufficientPrivilege as error:
        raise SourceError(
            f"{_place(config)}: {error.diag.message_primary}",
            hint=f"grant {source.user} the right that is missing",
        ) from None
    except psycopg.OperationalError as error:
        raise SourceUnavailable(
            f"{_place(config)} broke off: {error.diag.message_primary or 'connection lost'}",
            hint="wait until PostgreSQL is back, and try again",
        ) from None
    except psycopg.Error as error:
        raise SourceError(
            f"{_place(config)}: {error.diag.message_primary or type(error).__name__}",
            hint="mend that in PostgreSQL",
        ) from None


# libpq tells no SQLSTATE when a connection fails. All else passes: starting up, shutting down,
# full, cut off. Where the server speaks another language, these do not match and we keep trying.
_WRONG_PASSWORD = re.compile(r"authentication failed|no password supplied")
_NOT_LET_IN = re.compile(
    r"does not exist|no pg_hba\.conf entry|permission denied|not permitted to log in"
    r"|not currently accepting connections|does not support SSL|certificate"
)


def _not_connected(config: Config, error: psycopg.OperationalError) -> SourceError:
    place = _place(config)
    text = " ".join(str(error).split())  # of the connection: no row, no password
    _, _, said = text.rpartition("FATAL: ")
    if _WRONG_PASSWORD.search(text):
        return SourceError(
            f"{place} refused the user {config.source.user} with this password",
            hint="correct source.user and source.password, or pg_hba.conf",
        )
    if _NOT_LET_IN.search(text):
        return SourceError(
            f"{place} refused the connection: {said.strip()}",
            hint="correct source.database, source.user and source.sslmode, or pg_hba.conf",
        )
    if said != text:
        return SourceUnavailable(
            f"{place} refused the connection: {said.strip()}",
            hint="wait if PostgreSQL is starting, stopping or full",
        )
    return SourceUnavailable(
        f"{place} is out of reach", hint="start PostgreSQL, or correct source.host and port"
    )
