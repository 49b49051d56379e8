"""How a slice gets into PostgreSQL: COPY's text, and the statements that apply what was copied.

Changes are staged in a temporary table and applied by two guarded statements, whatever their
number. Nothing here knows of ledgers or tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.abc import Query
from psycopg.rows import TupleRow

from cdc.change import Change, Table
from sinks.types import Kind, copy_writer, parse, postgres_column

VERSION = "_cdc_version"
GONE = "_cdc_gone"
_ROWS_PER_COPY = 500  # the server reads one piece while the next is made

_STAGE = sql.SQL("CREATE TEMPORARY TABLE IF NOT EXISTS {stage} ({columns}) ON COMMIT DELETE ROWS")
_COPY = sql.SQL("COPY {stage} ({columns}) FROM STDIN")
_UPSERT = sql.SQL("""
    INSERT INTO {target} AS held ({columns})
    SELECT {columns} FROM {stage} WHERE NOT {gone} ORDER BY {key}
    ON CONFLICT ({key}) DO UPDATE SET {changes}
    WHERE held.{version} < excluded.{version}""")
_DELETE = sql.SQL("""
    DELETE FROM {target} AS held USING {stage} AS stage
    WHERE stage.{gone} AND {same_key} AND held.{version} < stage.{version}""")

_Encoder = Callable[[list[Any]], list[str]]

# Kinds whose text never needs COPY's escapes, and kinds whose JSON value already is that text.
_PLAIN_KINDS = {
    *(Kind.INTEGER, Kind.NUMERIC, Kind.MONEY, Kind.FLOAT, Kind.REAL, Kind.BOOLEAN, Kind.UUID),
    *(Kind.BITS, Kind.DATE, Kind.TIME, Kind.TIMETZ, Kind.TIMESTAMP, Kind.TIMESTAMPTZ),
    *(Kind.INTERVAL, Kind.POINT, Kind.ADDRESS),
}
_TEXT_KINDS = {
    *(Kind.TEXT, Kind.PADDED, Kind.JSON, Kind.HSTORE, Kind.NUMERIC, Kind.MONEY, Kind.UUID),
    *(Kind.TIMETZ, Kind.INTERVAL, Kind.ADDRESS),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is worked out once per table and connection."""

    copy: Query
    upsert: Query
    delete: Query
    columns: tuple[tuple[str, _Encoder], ...]
    key: tuple[str, ...]

    def stage(self, connection: psycopg.Connection[TupleRow], changes: Sequence[Change]) -> None:
        with connection.cursor() as cursor, cursor.copy(self.copy) as copy:
            for at in range(0, len(changes), _ROWS_PER_COPY):
                copy.write(self.lines(changes[at : at + _ROWS_PER_COPY]))

    def lines(self, changes: Sequence[Change]) -> bytes:
        """COPY's text for *changes*: the columns, the version, and whether the row is gone.

        Column by column, because that leaves the work per field to C.
        """
        rows = [
            dict(zip(self.key, change.key, strict=True)) if change.row is None else change.row
            for change in changes
        ]
        columns = [encode([row.get(name) for row in rows]) for name, encode in self.columns]
        versions = [str(change.version) for change in changes]
        gone = ["t" if change.row is None else "f" for change in changes]
        lines = map("\t".join, zip(*columns, versions, gone, strict=True))
        return ("\n".join(lines) + "\n").encode()


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
    is_plain = parsed.kind in _PLAIN_KINDS and not parsed.is_array

    def encode(values: list[Any]) -> list[str]:
        present = [value for value in values if value is not None]
        if is_text and set(map(type, present)) <= {str}:
            fields = present
        else:
            fields = [write(value) for value in present]
        if not is_plain and fields:
            fields = _escaped(fields)
        if len(fields) == len(values):
            return fields
        following = iter(fields)
        return ["\\N" if value is None else next(following) for value in values]

    return encode


def _escaped(fields: list[str]) -> list[str]:
    """Escape what COPY reads as something else; all at once, for mostly there is nothing to do."""
    text = "\0".join(fields)  # PostgreSQL's text holds no NUL
    if not any(special in text for special in "\\\n\r\t"):
        return fields
    text = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return text.replace("\t", "\\t").split("\0")
