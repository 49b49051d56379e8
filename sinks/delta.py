"""A Delta Lake warehouse: a batch is one MERGE, and the ledger stands in the same commit.

A table lives at `<path>/<schema>.<table>`, with the source's columns and two of ours: `_cdc_key`,
the key as text, and `_cdc_version`. Every commit of ours carries a line of JSON as Delta's user
metadata: the sink, its fencing token, and what the ledger says. The newest such line counts;
commits of others (OPTIMIZE) are passed over, and a RESTORE takes the ledger back with the rows.

A claim changes a table property: Delta lets no MERGE that began before a change of metadata commit
after it. A MERGE that begins later is stopped by Delta's own transaction number, in which the token
comes first: it is skipped as soon as the new holder has written anything. Before that, what an old
holder still writes is the stretch that the new one would write next, and counts in the ledger.
A repair takes the next number without a token, so it is skipped if anything was written since it
looked at the ledger; and so is a batch that a repair came before, which is then tried again.
"""

from __future__ import annotations

import re
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import orjson
from pydantic import Field

from cdc.change import OFFSET_BITS, Change, Row, Slice, Table, key_text
from cdc.change import Column as TableColumn
from cdc.config import Seconds, SinkSettings
from cdc.errors import SinkError, SinkFenced, SinkUnavailable, SinkUnusable
from cdc.sink import Claim, Entry, Refusal, Written
from sinks.delta_log import FENCE, Ledger, Note, at_path, claim_line, ledger_line, quoted
from sinks.types import Kind, delta_column, parse

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

KEY = "_cdc_key"
VERSION = "_cdc_version"
_GONE = "_cdc_gone"
_FRESH = "_cdc_fresh"
_BAD = "_cdc_bad"
_PARTITION = "_cdc_partition"
_OURS = (KEY, VERSION, _GONE, _FRESH, _BAD, _PARTITION)
_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_TXN_ID = "spark.databricks.delta.write.txnAppId"
_TXN_NUMBER = "spark.databricks.delta.write.txnVersion"
_OFFSET_MASK = (1 << OFFSET_BITS) - 1
_ATTEMPTS = 5  # to commit, when others commit at the same time
_REFUSED_AT_ONCE = 1_000  # they come to the driver

_PROPERTIES = {
    # Files are found by key and version; statistics of other columns would cost every write.
    "delta.dataSkippingStatsColumns": f"{KEY},{VERSION}",
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 7 days",  # a commit every few seconds adds up
}
# A MERGE of a few rows is nearly all planning and code generation.
_MERGE_SETTINGS = {
    # The source is materialised before, and read-only from then on: once is enough.
    "spark.databricks.delta.merge.materializeSource": "none",
    "spark.sql.adaptive.enabled": "false",
    "spark.databricks.delta.optimizeWrite.enabled": "false",
    "spark.databricks.delta.autoCompact.enabled": "false",
}
_NEEDS_MAPPING = re.compile(r"[ ,;{}()\n\t=]")
_LOCAL_KINDS = {Kind.DATE, Kind.TIME, Kind.TIMESTAMP}
_JAVA_NAME = re.compile(r"\b(?:[a-z]\w*\.)+([A-Z]\w*(?:Exception|Error))\b")
_CONFLICTS = {
    *("ConcurrentWriteException", "ConcurrentAppendException", "ConcurrentDeleteReadException"),
    *("ConcurrentDeleteDeleteException", "ConcurrentTransactionException"),
    *("MetadataChangedException", "ProtocolChangedException"),
    "DeltaConcurrentModificationException",
}
_PASSING = {
    *("ConnectException", "ConnectTimeoutException", "SocketException", "SocketTimeoutException"),
    *("UnknownHostException", "NoRouteToHostException"),
}


class DeltaSettings(SinkSettings):
    type: Literal["delta"]
    path: str = Field(min_length=1)  # a directory, or a URI that Spark can write to
    trigger: Seconds = 5.0  # each batch is a commit, and many small commits are slow to read


def spark_conf() -> dict[str, str]:
    """What the session needs to have been started with."""
    return {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.shuffle.partitions": "2",
    }


def table_path(root: str, table: Table) -> str:
    """Where a table lives under *root*. What is not a letter, digit, _ or - becomes ~ and hex."""
    return f"{root.rstrip('/')}/{_path_part(table.schema)}.{_path_part(table.name)}"


def _path_part(name: str) -> str:
    def escape(found: re.Match[str]) -> str:
        return "".join(f"~{byte:02x}" for byte in found[0].encode())

    return re.sub(r"[^A-Za-z0-9_-]", escape, name)


class _Checked(NamedTuple):
    """What is in a batch, before anything is committed."""

    total: int
    fresh: int
    upserts: int  # among the fresh
    refused: tuple[Refusal, ...]

    def written(self, upserted: int) -> Written:
        """The outcome, when that many rows were inserted or updated."""
        applied = self.fresh - self.upserts + upserted
        return Written(applied, self.total - applied)


class DeltaSink:
    def __init__(self, settings: DeltaSettings, spark: SparkSession) -> None:
        self.name = settings.name
        self._root = _as_uri(settings.path)
        self._spark = spark.newSession()  # user metadata is a session's setting
        self._owner = uuid.uuid4().hex
        self._tables: dict[str, Table] = {}
        self._ledgers: dict[str, Ledger] = {}  # by path

    def prepare(self, tables: Mapping[str, Table]) -> None:
        self._check_directory()
        for table in tables.values():
            with self._errors(f"prepare {table.full_name}"):
                self._prepare_table(table)
        self._tables = dict(tables)

    def claim(self) -> Claim:
        notes = {topic: self._note(table) for topic, table in self._tables.items()}
        token = 1 + max((note.token for note in notes.values()), default=0)
        for table in self._tables.values():
            self._commit(table, claim_line(self.name, token, self._owner))
        # Read again: a writer may have finished a batch until the claim was seen.
        found = {topic: self._note(table) for topic, table in self._tables.items()}
        entries = {
            topic: note.entry
            for topic, note in found.items()
            if note.entry is not None and note.topic == topic
        }
        lost = {topic: self._lost(self._tables[topic]) for topic in found.keys() - entries.keys()}
        entries.update((topic, entry) for topic, entry in lost.items() if entry is not None)
        return Claim(token, entries)

    def assign(self, token: int, entries: Mapping[str, Entry]) -> None:
        unknown = entries.keys() - self._tables.keys()
        if unknown:
            raise SinkUnusable(f"{self.name}: {', '.join(sorted(unknown))} was not prepared")
        for topic, table in self._tables.items():
            note, entry = self._held(token, table), entries.get(topic)
            if (note.topic, note.entry) != (topic, entry):
                claimed = claim_line(self.name, token, self._owner)
                self._commit(table, ledger_line(claimed, topic, entry))

    def merge(
        self, token: int, topic: str, table: Table, frame: DataFrame, offsets: Mapping[int, int]
    ) -> Written:
        entry = self._entry(token, topic, table)
        higher = {p: max(at, entry.offsets.get(p, 0)) for p, at in offsets.items()}
        moved = replace(entry, offsets={**entry.offsets, **higher})
        with (
            self._errors(f"merge {table.full_name}"),
            _settings(frame.sparkSession, _MERGE_SETTINGS),
        ):
            staged = _staged(frame, table, entry.generation, entry.offsets).localCheckpoint()
            checked = _checked(staged, table)
        if checked.refused:
            return Written(0, 0, checked.refused)
        if not checked.fresh and moved == entry:
            return Written(0, checked.total)
        doing = f"merge {table.full_name}"
        for _ in range(_ATTEMPTS):
            note = self._held(token, table)
            if note.entry != entry:
                break
            claimed = claim_line(self.name, token, self._owner)
            line = ledger_line(claimed, topic, moved, note.next_number(token))
            upserted = self._try(
                doing, staged.sparkSession, line, partial(self._merge, staged, table)
            )
            if upserted is not None:
                self._held(token, table)  # who was fenced in the middle of it is told now
                return checked.written(upserted)
        raise self._overtaken(doing)

    def repair(self, piece: Slice) -> Written | None:
        table, doing = piece.table, f"repair {piece.table.full_name}"
        for _ in range(_ATTEMPTS):
            note = self._note(table)
            entry = _entry_for(piece, note)
            if entry is None:
                return None
            passed = piece.before(entry.offsets.get(piece.partition, 0))
            if not passed:
                return Written(0, len(piece.changes))
            with self._errors(doing), _settings(self._spark, _MERGE_SETTINGS):
                staged = _staged(self._frame(piece.partition, passed), table).localCheckpoint()
                checked = _checked(staged, table)
            if checked.refused:
                return Written(0, 0, checked.refused)
            # The ledger and its holder stay as they are: the next batch finds its own line here.
            claimed = claim_line(self.name, note.token, note.owner)
            line = ledger_line(claimed, piece.topic, entry, note.next_number())
            upserted = self._try(doing, self._spark, line, partial(self._merge, staged, table))
            if upserted is not None:
                applied = checked.written(upserted).applied
                return Written(applied, len(piece.changes) - applied)
        raise self._overtaken(doing)

    def sweep(self, token: int, topic: str, table: Table) -> int:
        doing = f"sweep {table.full_name}"
        nothing = _staged(self._frame(0, ()), table)
        for _ in range(_ATTEMPTS):
            entry, note = self._entry(token, topic, table), self._held(token, table)
            claimed = claim_line(self.name, token, self._owner)
            swept = replace(entry, unswept=False)
            line = ledger_line(claimed, topic, swept, note.next_number(token))
            older = entry.generation << OFFSET_BITS
            removed = self._try(doing, self._spark, line, partial(self._delete, older, table))
            if removed == 0 and entry.unswept:  # a DELETE of nothing is no commit
                removed = self._try(doing, self._spark, line, partial(self._merge, nothing, table))
            if removed is not None:
                return removed
        raise self._overtaken(doing)

    def rows(self, table: Table) -> Iterator[tuple[Row, int | None]]:
        from pyspark.sql import functions as F  # noqa: N812 - the name everybody knows

        names = [column.name for column in table.columns]
        with self._errors(f"read {table.full_name}"):
            frame = self._spark.read.format("delta").load(self._path(table))
            columns = [F.col(quoted(name)) for name in (*names, VERSION)]
            for *values, version in frame.select(*columns).toLocalIterator():
                yield dict(zip(names, values, strict=True)), version

    def close(self) -> None:
        self._ledgers.clear()

    def _path(self, table: Table) -> str:
        return table_path(self._root, table)

    def _check_directory(self) -> None:
        if not self._root.startswith("file:"):
            return
        path = Path(self._root.removeprefix("file://"))
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise SinkUnusable(
                f"{self.name}: {path} cannot be written: {(error.strerror or 'failed').lower()}",
                hint="give the user that runs cdc the right to write there, or set another path",
            ) from None

    def _prepare_table(self, table: Table) -> None:
        from delta.tables import DeltaTable

        self._check_names(table)
        path = self._path(table)
        wanted = {column.name: delta_column(column.type) for column in table.columns}
        if not DeltaTable.isDeltaTable(self._spark, path):
            columns = {**wanted, KEY: "string", VERSION: "bigint"}
            properties = dict(_PROPERTIES)
            if any(_NEEDS_MAPPING.search(name) for name in wanted):
                properties["delta.columnMapping.mode"] = "name"
            self._spark.sql(
                f"CREATE TABLE IF NOT EXISTS {at_path(path)} ({_definitions(columns)}) USING delta "
                f"TBLPROPERTIES ({_properties(properties)})"
            )
            return
        schema = DeltaTable.forPath(self._spark, path).toDF().schema
        held = {field.name: field.dataType.simpleString() for field in schema}
        if KEY not in held or VERSION not in held:
            raise SinkUnusable(
                f"{self.name}: a Delta table without {KEY} stands at {path}",
                hint="move it away, or set another path",
            )
        for name, type_ in wanted.items():
            if held.get(name, type_) != type_:
                raise SinkUnusable(
                    f"{self.name}: {table.full_name}.{name} is {held[name]} and should be {type_}",
                    hint=f"move {path} away; the table is then filled again",
                )
        missing = {name: type_ for name, type_ in wanted.items() if name not in held}
        if missing:
            self._spark.sql(f"ALTER TABLE {at_path(path)} ADD COLUMNS ({_definitions(missing)})")

    def _check_names(self, table: Table) -> None:
        seen: dict[str, str] = {name: name for name in _OURS}
        for column in table.columns:
            other = seen.setdefault(column.name.lower(), column.name)
            if other != column.name or column.name in _OURS:
                raise SinkUnusable(
                    f"{self.name}: {table.full_name}.{column.name} and {other} are one name here",
                    hint="rename the column at the source",
                )

    def _commit(self, table: Table, line: Mapping[str, Any]) -> None:
        """A commit of metadata alone, which no writer at work can pass."""
        text = orjson.dumps(line).decode()
        fence = {FENCE: f"{line['token']}.{uuid.uuid4().hex}"}
        with (
            self._errors(f"claim {table.full_name}"),
            _settings(self._spark, {_USER_METADATA: text}),
        ):
            self._spark.sql(
                f"ALTER TABLE {at_path(self._path(table))} SET TBLPROPERTIES ({_properties(fence)})"
            )

    def _held(self, token: int, table: Table) -> Note:
        note = self._note(table)
        if note.is_restored:
            raise SinkUnavailable(
                f"{self.name}: {table.full_name} was restored beneath us: its ledger went back"
            )
        if note.token != token or note.owner != self._owner:
            raise SinkFenced(f"{self.name}: token {token} is old, {note.token} has taken over")
        return note

    def _entry(self, token: int, topic: str, table: Table) -> Entry:
        note = self._held(token, table)
        if note.entry is None or note.topic != topic:
            raise SinkUnusable(
                f"{self.name}: the ledger does not know {topic}", hint="start cdc again"
            )
        return note.entry

    def _lost(self, table: Table) -> Entry | None:
        """What rows without a ledger say of themselves."""
        from pyspark.sql import functions as F  # noqa: N812

        with self._errors(f"look for rows of {table.full_name} without a ledger"):
            frame = self._spark.read.format("delta").load(self._path(table))
            newest = frame.agg(F.max(VERSION)).collect()[0][0]
        return None if newest is None else Entry("", newest >> OFFSET_BITS, 0)

    def _frame(self, partition: int, changes: Sequence[Change]) -> DataFrame:
        """*changes* as a batch brings them."""
        import pyarrow as pa

        rows = [None if c.row is None else orjson.dumps(c.row).decode() for c in changes]
        lines = {
            "partition": pa.array([partition] * len(changes), pa.int32()),
            "key": pa.array([key_text(change.key) for change in changes], pa.string()),
            "row": pa.array(rows, pa.string()),
            "version": pa.array([change.version for change in changes], pa.int64()),
        }
        return self._spark.createDataFrame(pa.table(lines))

    def _note(self, table: Table) -> Note:
        """What the table's log says now."""
        path = self._path(table)
        with self._errors(f"read the log of {table.full_name}"):
            ledger = self._ledgers.setdefault(path, Ledger(self._spark, self.name, path))
            return ledger.note()

    def _merge(self, staged: DataFrame, table: Table) -> int | None:
        """Run the MERGE; the number of rows inserted or updated, or None if Delta skipped it."""
        from delta.tables import DeltaTable
        from pyspark.sql import functions as F  # noqa: N812

        session = staged.sparkSession
        names = [*(column.name for column in table.columns), KEY, VERSION]
        values: dict[str, str | Column] = {
            quoted(name): F.col(f"change.{quoted(name)}") for name in names
        }
        is_newer = f"held.{VERSION} < change.{VERSION}"
        metrics = (
            DeltaTable.forPath(session, self._path(table))
            .alias("held")
            .merge(staged.where(_FRESH).alias("change"), f"held.{KEY} = change.{KEY}")
            .whenMatchedDelete(f"{is_newer} AND change.{_GONE}")
            .whenMatchedUpdate(is_newer, values)
            .whenNotMatchedInsert(f"NOT change.{_GONE}", values)
            .execute()
        )
        counts = metrics.collect()
        if not counts:
            return None
        return int(counts[0]["num_updated_rows"]) + int(counts[0]["num_inserted_rows"])

    def _delete(self, older_than: int, table: Table) -> int | None:
        """Run the DELETE; the number of rows, or None if Delta skipped it."""
        where = f"{at_path(self._path(table))} WHERE {VERSION} < {older_than}"
        counts = self._spark.sql(f"DELETE FROM {where}").collect()  # noqa: S608 - a quoted path
        return int(counts[0]["num_affected_rows"]) if counts else None

    def _try(
        self,
        doing: str,
        session: SparkSession,
        line: Mapping[str, Any],
        run: Callable[[], int | None],
    ) -> int | None:
        """Let *run* commit with *line* and under its number; None if another commit came first."""
        settings = {
            **_MERGE_SETTINGS,
            _USER_METADATA: orjson.dumps(line).decode(),
            _TXN_ID: f"cdc.{self.name}",
            _TXN_NUMBER: str(line["number"]),
        }
        try:
            with _settings(session, settings):
                return run()
        except _spark_errors() as error:
            if not _CONFLICTS & {*_causes(error)}:
                raise self._translated(error, doing) from None
        return None

    def _overtaken(self, doing: str) -> SinkUnavailable:
        return SinkUnavailable(f"{self.name}: {doing}: other commits came first, again and again")

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Turn Spark's errors into ours. Its texts may quote rows: only names are kept."""
        try:
            yield
        except _spark_errors() as error:
            raise self._translated(error, doing) from None

    def _translated(self, error: Exception, doing: str) -> SinkError:
        causes = _causes(error)
        message = f"{self.name}: {doing}: {', '.join(causes[:4])}"
        if _CONFLICTS & {*causes} or _PASSING & {*causes}:
            return SinkUnavailable(message)
        return SinkUnusable(message, hint="look for these names in Spark's log for this moment")


def _entry_for(piece: Slice, note: Note) -> Entry | None:
    """The ledger's entry, unless it says that the table may hold newer things than *piece*."""
    entry = note.entry
    if entry is None or note.topic != piece.topic:
        return None
    if entry.offsets.get(piece.partition, 0) > piece.next_offset:
        return None
    is_other = any(change.generation != entry.generation for change in piece.changes)
    return None if is_other else entry


def _spark_errors() -> tuple[type[Exception], ...]:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    return PySparkException, Py4JError


def _causes(error: Exception) -> list[str]:
    return list(dict.fromkeys([type(error).__name__, *_JAVA_NAME.findall(str(error))]))


def _as_uri(path: str) -> str:
    return path if re.match(r"[a-z][a-z0-9+.-]*:", path) else f"file://{Path(path).absolute()}"


def _staged(
    frame: DataFrame,
    table: Table,
    generation: int = 0,
    offsets: Mapping[int, int] = MappingProxyType({}),
) -> DataFrame:
    """The changes as columns of the table, each with the columns whose value did not fit.

    A change is fresh if it is of *generation* and not below the partition's next offset. Every
    value is taken as text first and then cast by try_cast, because an error of Spark's own cast
    quotes the value, in logs as well.
    """
    from pyspark.sql import functions as F  # noqa: N812

    numbered = f"struct<{', '.join(f'c{at}: string' for at in range(len(table.columns)))}>"
    base = generation << OFFSET_BITS
    floors = ", ".join(f"{p}, {base + offset}L" for p, offset in offsets.items())
    floor = f"coalesce(try_element_at(map({floors}), partition), {base}L)" if floors else f"{base}L"
    parsed = frame.select(
        F.col("partition").alias(_PARTITION),
        F.col("key").alias(KEY),
        F.col("version").alias(VERSION),
        F.expr("row IS NULL").alias(_GONE),
        F.expr(f"version >= {floor}").alias(_FRESH),
        F.from_json("row", _text_schema(table)).cast(numbered).alias("row"),
    )
    texts = [f"row.c{at}" for at in range(len(table.columns))]
    values = [_value(column.type, text) for column, text in zip(table.columns, texts, strict=True)]
    bad = [
        f"IF({_lost(column, text, value, is_key=column.name in table.key)}, {at}, NULL)"
        for at, (column, text, value) in enumerate(zip(table.columns, texts, values, strict=True))
        if value != text or column.name in table.key
    ]
    return parsed.select(
        *(_PARTITION, KEY, VERSION, _GONE, _FRESH),
        F.expr(
            f"IF({_GONE}, array(), filter(array({', '.join(bad)}), at -> at IS NOT NULL))"
        ).alias(_BAD),
        *(
            F.expr(value).alias(column.name)
            for column, value in zip(table.columns, values, strict=True)
        ),
    )


def _checked(staged: DataFrame, table: Table) -> _Checked:
    """Count what is in a batch, and bring home which of it would lose a value."""
    from pyspark.sql import functions as F  # noqa: N812

    is_bad = f"{_FRESH} AND size({_BAD}) > 0"
    total, fresh, upserts, bad = staged.agg(
        F.count("*"),
        F.expr(f"count_if({_FRESH})"),
        F.expr(f"count_if({_FRESH} AND NOT {_GONE})"),
        F.expr(f"count_if({is_bad})"),
    ).collect()[0]
    found = staged.where(is_bad).select(_PARTITION, VERSION, _BAD).limit(_REFUSED_AT_ONCE)
    refused = tuple(
        Refusal(partition, version & _OFFSET_MASK, _reason(table, columns))
        for partition, version, columns in (found.collect() if bad else ())
    )
    return _Checked(total, fresh, upserts, refused)


def _reason(table: Table, columns: Sequence[int]) -> str:
    names = [table.columns[at].name for at in columns]
    return f"no Delta value, {'column' if len(names) == 1 else 'columns'} {', '.join(names)}"


def _text_schema(table: Table) -> StructType:
    from pyspark.sql.types import StringType, StructField, StructType

    return StructType([StructField(column.name, StringType()) for column in table.columns])


def _value(pg_type: str, text: str) -> str:
    """SQL that makes a Delta value of *text*, or NULL if it is none."""
    parsed = parse(pg_type)
    element_type = delta_column(pg_type).removeprefix("array<").removesuffix(">")

    def one(text: str) -> str:
        if parsed.kind is Kind.BYTES:
            return f"try_to_binary({text}, 'base64')"
        if parsed.kind in _LOCAL_KINDS:  # Debezium ends them with a Z that means nothing
            return f"trim(TRAILING 'Z' FROM {text})"
        return text if element_type == "string" else f"try_cast({text} AS {element_type})"

    if not parsed.is_array:
        return one(text)
    return f"transform({_array(text)}, each -> {one('each')})"


def _array(text: str) -> str:
    return f"from_json({text}, 'array<string>')"


def _lost(column: TableColumn, text: str, value: str, *, is_key: bool) -> str:
    """SQL that says whether *value* is NULL where *text* is not."""
    lost = f"{text} IS NOT NULL AND {value} IS NULL"
    if parse(column.type).is_array:
        count = "size(filter({}, each -> each IS NOT NULL))"
        lost = f"{text} IS NOT NULL AND ({value} IS NULL"
        lost += f" OR {count.format(_array(text))} <> {count.format(value)})"
    return f"{text} IS NULL OR ({lost})" if is_key else lost


@contextmanager
def _settings(session: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Have *settings* in *session* for a while."""
    before = {name: session.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, old)


def _definitions(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{quoted(name)} {type_}" for name, type_ in columns.items())


def _properties(properties: Mapping[str, str]) -> str:
    return ", ".join(f"'{name}' = '{value}'" for name, value in properties.items())
