"""How a slice gets into PostgreSQL: COPY's text, and the statements that apply what was copied.

Changes are staged in a temporary table and applied by two guarded statements, whatever their
number. Nothing here knows of ledgers or tokens.

A change that the server can never take (SQLSTATE classes 22, 23 and 54) is found by applying ever
smaller stretches between savepoints. An error's own word for the line only says where to look
first: it is in the server's language, and quotes rows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.abc import Query
from psycopg.rows import TupleRow

from cdc.change import Change, Row, Table
from sinks.types import Kind, copy_writer, parse, postgres_column

VERSION = "_cdc_version"
GONE = "_cdc_gone"
_ROWS_PER_COPY = 500  # the server reads one piece while the next is made
_REFUSED_AT_ONCE = 100  # each costs a few round trips, and all of the slice is written again
_NEVER = ("22", "23", "54")  # data exception, integrity constraint, program limit
_COPY_LINE = re.compile(r"^COPY cdc_stage_\d+, line (\d+)(.*)", re.MULTILINE)

_STAGE = sql.SQL("CREATE TEMPORARY TABLE IF NOT EXISTS {stage} ({columns}) ON COMMIT DELETE ROWS")
_COPY = sql.SQL("COPY {stage} ({columns}) FROM STDIN")
_CLEAR = sql.SQL("TRUNCATE {stage}")
_UPSERT = sql.SQL("""
    INSERT INTO {target} AS held ({columns})
    SELECT {columns} FROM {stage} WHERE NOT {gone} ORDER BY {key}
    ON CONFLICT ({key}) DO UPDATE SET {changes}
    WHERE held.{version} < excluded.{version}""")
_DELETE = sql.SQL("""
    DELETE FROM {target} AS held USING {stage} AS stage
    WHERE stage.{gone} AND {same_key} AND held.{version} < stage.{version}""")

Connection = psycopg.Connection[TupleRow]
_Encoder = Callable[[list[Any]], list[str]]

# Kinds whose JSON value already is PostgreSQL's text.
_TEXT_KINDS = {
    *(Kind.TEXT, Kind.PADDED, Kind.JSON, Kind.HSTORE, Kind.NUMERIC, Kind.MONEY, Kind.UUID),
    *(Kind.TIMETZ, Kind.INTERVAL, Kind.ADDRESS),
}


# It tells the server's texts in warnings of its own.
logging.getLogger("psycopg").setLevel(logging.ERROR)


class Unwritable(Exception):
    """A change has no text for COPY: where it stands, in which column, and what Python said."""

    def __init__(self, at: int, column: str, kind: str) -> None:
        super().__init__(f"no text ({kind})" + (f", column {column}" if column else ""))
        self.at = at


Failure = psycopg.Error | Unwritable


@dataclass(frozen=True, slots=True)
class Plan:
    """What is worked out once per table and connection."""

    copy: Query
    upsert: Query
    delete: Query
    clear: Query
    columns: tuple[tuple[str, _Encoder], ...]
    key: tuple[str, ...]

    def apply(
        self, connection: Connection, changes: Sequence[Change], finish: Callable[[], object]
    ) -> int:
        """Stage and apply *changes*, then *finish*, in one round trip; how many were not stale.

        Deletes come first, so that a row may take over what was unique to one that is gone.
        """
        deletes = sum(change.row is None for change in changes)
        upserts = len(changes) - deletes
        upserted = None
        if changes:
            self._stage(connection, changes)
        with connection.pipeline():
            if deletes:
                connection.execute(self.delete, prepare=True)
            if upserts:
                upserted = connection.execute(self.upsert, prepare=True)
            finish()
        return deletes + (0 if upserted is None else upserted.rowcount)

    def refused(
        self, connection: Connection, changes: Sequence[Change], error: Failure
    ) -> list[tuple[Change, str]]:
        """Which of *changes*, of which some failed with *error*, can never be taken, and why.

        Leaves the others applied: roll it back. A change counts as refused if it fails alone, after
        all before it that do not; so it never takes the blame for another.
        """
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")  # or they would fail at the commit

        def attempt(at: int, end: int) -> Failure | None:
            try:
                with connection.transaction():
                    part = changes[at:end]
                    self.apply(connection, part, lambda: connection.execute(self.clear))
            except (psycopg.Error, Unwritable) as failure:
                if not is_refusal(failure):
                    raise
                return failure
            return None

        found = _sift(len(changes), error, attempt)
        return [(changes[at], self._reason(failure)) for at, failure in found]

    def _stage(self, connection: Connection, changes: Sequence[Change]) -> None:
        unwritable = None
        with connection.cursor() as cursor, cursor.copy(self.copy) as copy:
            for at in range(0, len(changes), _ROWS_PER_COPY):
                try:
                    text = self._lines(changes[at : at + _ROWS_PER_COPY])
                except Exception as error:  # noqa: BLE001 - of whatever kind: a value has no text
                    unwritable = self._unwritable(changes, at, error)
                    break
                copy.write(text)
        # Not from inside: psycopg would tell the server, and log what it answers.
        if unwritable is not None:
            raise unwritable

    def _lines(self, changes: Sequence[Change]) -> bytes:
        """COPY's text for *changes*: the columns, the version, and whether the row is gone.

        Column by column, because that leaves the work per field to C.
        """
        rows = [self._row(change) for change in changes]
        columns = [encode([row.get(name) for row in rows]) for name, encode in self.columns]
        versions = [str(change.version) for change in changes]
        gone = ["t" if change.row is None else "f" for change in changes]
        lines = map("\t".join, zip(*columns, versions, gone, strict=True))
        return ("\n".join(lines) + "\n").encode()

    def _row(self, change: Change) -> Row:
        if change.row is not None:
            return change.row
        return dict(zip(self.key, change.key, strict=True))

    def _unwritable(self, changes: Sequence[Change], start: int, error: Exception) -> Unwritable:
        """Which change from *start* on has no text, when several of them failed with *error*."""
        for at in range(start, len(changes)):
            try:
                self._lines(changes[at : at + 1])
            except Exception as alone:  # noqa: BLE001 - its type is told, its text may quote a row
                return Unwritable(at, self._column_without_text(changes[at]), type(alone).__name__)
        return Unwritable(start, "", type(error).__name__)

    def _column_without_text(self, change: Change) -> str:
        for name, encode in self.columns:
            try:
                "".join(encode([self._row(change).get(name)])).encode()
            except Exception:  # noqa: BLE001 - as above
                return name
        return ""

    def _reason(self, error: Failure) -> str:
        """The kind of *error* and where it struck: names of the schema, nothing of a row."""
        if isinstance(error, Unwritable):
            return str(error)
        diag = error.diag
        place = [
            f"{what} {name}"
            for what, name in (
                ("column", diag.column_name or self._column(diag.context or "")),
                ("constraint", diag.constraint_name),
            )
            if name
        ]
        return ", ".join([f"{type(error).__name__} {error.sqlstate}", *place])

    def _column(self, context: str) -> str | None:
        found = _COPY_LINE.search(context)
        names = [name for name, _ in self.columns]
        told = [name for name in names if found and found[2].startswith(f", column {name}:")]
        return max(told, key=len, default=None)


def is_refusal(error: BaseException) -> bool:
    """Whether *error* is about a change that can never be taken, and not about the server."""
    if isinstance(error, psycopg.Error):
        return (error.sqlstate or "").startswith(_NEVER)
    return isinstance(error, Unwritable)


def _sift(
    count: int, error: Failure, attempt: Callable[[int, int], Failure | None]
) -> list[tuple[int, Failure]]:
    """Which of *count* things fail, when all of them together failed with *error*.

    *attempt* tries a stretch of them, and keeps it unless it fails. Whatever is kept is not tried
    again, so that all attempts together cost little more than two of everything.
    """
    found: list[tuple[int, Failure]] = []
    at, end = 0, count
    failure: Failure | None = error  # of the stretch from *at* to *end*, if it is known to fail
    suspect = _suspect(at, error)
    while at < count and len(found) < _REFUSED_AT_ONCE:
        if failure is None:
            cut = end = count
        elif suspect is not None and at < suspect < end:
            cut = suspect
        elif suspect == at:
            cut, suspect = at + 1, None
        else:
            cut = at + max(1, (end - at) // 2)
        failed = attempt(at, cut)
        if failed is None:
            at = cut
            if at >= end:
                failure = None
        elif cut - at == 1:
            found.append((at, failed))
            at, failure = cut, None
        else:
            end, failure, suspect = cut, failed, _suspect(at, failed)
    return found


def _suspect(at: int, error: Failure) -> int | None:
    """Where to look first, when the stretch from *at* on has failed with *error*."""
    if isinstance(error, Unwritable):
        return at + error.at
    found = _COPY_LINE.search(error.diag.context or "")
    return at + int(found[1]) - 1 if found else None


def stage_table(table: Table, stage: sql.Identifier) -> Query:
    """The statement that makes the temporary table for *table*."""
    flag = sql.SQL(" bigint, {} boolean").format(sql.Identifier(GONE))
    return _STAGE.format(stage=stage, columns=definitions(table, flag))


def plan_of(table: Table, target: sql.Identifier, stage: sql.Identifier) -> Plan:
    columns = [*(column.name for column in table.columns), VERSION]
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    parts = {
        "stage": stage,
        "target": target,
        "gone": sql.Identifier(GONE),
        "version": sql.Identifier(VERSION),
        "columns": names,
        "key": sql.SQL(", ").join(map(sql.Identifier, table.key)),
        "changes": sql.SQL(", ").join(
            sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name))
            for name in columns
            if name not in table.key
        ),
        "same_key": sql.SQL(" AND ").join(
            sql.SQL("held.{0} = stage.{0}").format(sql.Identifier(name)) for name in table.key
        ),
    }
    return Plan(
        copy=_COPY.format(stage=stage, columns=names + sql.SQL(", ") + sql.Identifier(GONE)),
        upsert=_UPSERT.format(**parts),
        delete=_DELETE.format(**parts),
        clear=_CLEAR.format(**parts),
        columns=tuple((column.name, _encoder(column.type)) for column in table.columns),
        key=table.key,
    )


def definitions(table: Table, after_version: sql.SQL | sql.Composed) -> sql.Composed:
    columns = [
        sql.SQL("{} {}").format(sql.Identifier(column.name), sql.SQL(postgres_column(column.type)))
        for column in table.columns
    ]
    return sql.SQL(", ").join([*columns, sql.Identifier(VERSION) + after_version])


def _encoder(pg_type: str) -> _Encoder:
    """The function that turns the values of a column into COPY's fields."""
    write, parsed = copy_writer(pg_type), parse(pg_type)
    is_text = parsed.kind in _TEXT_KINDS and not parsed.is_array

    def encode(values: list[Any]) -> list[str]:
        present = [value for value in values if value is not None]
        if is_text and set(map(type, present)) <= {str}:
            fields = present
        else:
            fields = [write(value) for value in present]
        fields = _escaped(fields)
        if len(fields) == len(values):
            return fields
        following = iter(fields)
        return ["\\N" if value is None else next(following) for value in values]

    return encode


def _escaped(fields: list[str]) -> list[str]:
    """Escape what COPY reads as something else; all at once, for mostly there is nothing to do."""
    text = "\0".join(fields)
    if text.count("\0") != max(0, len(fields) - 1):
        raise ValueError("PostgreSQL's text holds no NUL")
    if not any(special in text for special in "\\\n\r\t"):
        return fields
    text = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return text.replace("\t", "\\t").split("\0")
