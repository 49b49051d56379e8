"""Debezium's bytes become a Change. Pure: no I/O, and no error text quotes a value."""

from __future__ import annotations

from typing import Any

import orjson

from cdc.change import Change, Key, Table
from cdc.errors import MalformedRecord, SchemaMoved

# What Debezium writes for a large column that an update did not touch: as text, as base64 for
# bytea, in an array of texts, or as its own letters in an array of numbers.
_PLACEHOLDER = "__debezium_unavailable_value"
_PLACEHOLDER_BASE64 = "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="
_PLACEHOLDER_NUMBERS = list(_PLACEHOLDER.encode())
_MARKS = (
    _PLACEHOLDER.encode(),
    _PLACEHOLDER_BASE64.encode(),
    orjson.dumps(_PLACEHOLDER_NUMBERS),
)

_UPSERTS = frozenset({"c", "u", "r"})


def decode(table: Table, key: bytes | None, value: bytes | None, version: int) -> Change:
    """One record -> one change. A delete and a tombstone both mean that the row is gone."""
    if value is None:
        return Change(_key(table, key), None, version)
    envelope = _parse(value, "value")
    source = envelope.get("source")
    committed_us = source.get("ts_us") if isinstance(source, dict) else None
    op = envelope.get("op")
    if op == "d":
        return Change(_key(table, key), None, version, committed_us)
    row = envelope.get("after")
    if op not in _UPSERTS or not isinstance(row, dict):
        raise MalformedRecord("the value is neither an upsert nor a delete of Debezium's")
    if any(mark in value for mark in _MARKS):
        _refuse_placeholders(table, row)
    row = _known_columns(table, row, committed_us)
    return Change(_key(table, key), row, version, committed_us)


def _parse(raw: bytes, part: str) -> dict[str, Any]:
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise MalformedRecord(f"the {part} is not a JSON object")
    return parsed


def _key(table: Table, raw: bytes | None) -> Key:
    if raw is None:
        raise MalformedRecord("the record has no key")
    parsed = _parse(raw, "key")
    if parsed.keys() != set(table.key):
        raise MalformedRecord(
            f"the key does not have the key columns of {table.full_name}: {', '.join(table.key)}",
            hint="was the primary key redefined? Older records in the log have the old key",
        )
    return tuple(parsed[column] for column in table.key)


def _known_columns(table: Table, row: dict[str, Any], committed_us: int | None) -> dict[str, Any]:
    unknown = row.keys() - {column.name for column in table.columns}
    if not unknown:
        return row
    if committed_us is None or committed_us >= table.as_of_us:
        raise SchemaMoved(f"{table.full_name} has new columns: {', '.join(sorted(unknown))}")
    return {name: value for name, value in row.items() if name not in unknown}


def _refuse_placeholders(table: Table, row: dict[str, Any]) -> None:
    held = [
        name
        for name, value in row.items()
        if value in (_PLACEHOLDER, _PLACEHOLDER_BASE64, _PLACEHOLDER_NUMBERS)
        or (isinstance(value, list) and _PLACEHOLDER in value)
    ]
    if held:
        raise MalformedRecord(
            f"{table.full_name}: the log lacks the value of {', '.join(held)}",
            hint=f"ALTER TABLE {table.full_name} REPLICA IDENTITY FULL, then touch the row",
        )
