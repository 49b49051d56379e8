"""Two sides of a table, row by row and column by column. Pure; the caller brings the rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from cdc.change import Row, Table

Canonical = Callable[[str, Any], Hashable]  # (PostgreSQL type, any form of a value) -> one form


@dataclass(frozen=True, slots=True)
class Difference:
    """How a copy differs from its source. No values: counts, and the names of columns."""

    rows: int  # at the source
    missing: int
    extra: int
    different: int
    columns: tuple[str, ...] = ()  # those in which rows differ

    @property
    def is_equal(self) -> bool:
        return self.missing == self.extra == self.different == 0

    def __str__(self) -> str:
        if self.is_equal:
            return f"{self.rows} rows, all equal"
        columns = f" in {', '.join(self.columns)}" if self.columns else ""
        return (
            f"{self.rows} rows at the source: {self.missing} missing, {self.extra} extra,"
            f" {self.different} different{columns}"
        )


def compare(
    table: Table, source: Iterable[Row], copy: Iterable[Row], canonical: Canonical
) -> Difference:
    """Compare every row and every column of *table*; an absent column is NULL."""
    wanted = {_key(table, row, canonical): row for row in source}
    unseen = set(wanted)
    extra = different = 0
    columns: set[str] = set()
    for row in copy:
        key = _key(table, row, canonical)
        if key not in unseen:  # also a row that came twice
            extra += 1
            continue
        unseen.discard(key)
        differing = _differing(table, wanted[key], row, canonical)
        different += bool(differing)
        columns |= differing
    return Difference(len(wanted), len(unseen), extra, different, tuple(sorted(columns)))


def _key(table: Table, row: Row, canonical: Canonical) -> Hashable:
    types = {column.name: column.type for column in table.columns}
    return tuple(canonical(types[name], row.get(name)) for name in table.key)


def _differing(table: Table, one: Row, other: Row, canonical: Canonical) -> set[str]:
    return {
        column.name
        for column in table.columns
        if canonical(column.type, one.get(column.name))
        != canonical(column.type, other.get(column.name))
    }
