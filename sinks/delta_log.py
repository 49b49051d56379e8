"""What a Delta table's log says of us: who may write, and what the ledger is.

Every commit of ours carries a line of JSON as its user metadata. The newest counts, commits of
others are passed over, and a RESTORE takes the ledger back with the rows.

A commit that changes rows has a number, which Delta knows, too: it skips one that is not above the
last. Whoever reads the log and takes the next number commits only if nobody else has since.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from cdc.sink import Entry

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FENCE = "cdc.fence"  # the table property that a claim changes
_TOKEN_SHIFT = 40  # the numbers of a holder begin above all those of the holders before


@dataclass(frozen=True, slots=True)
class Note:
    """What the log of one table says of us, up to *version*."""

    version: int  # of the newest commit that was looked at
    token: int = 0
    owner: str = ""
    entry: Entry | None = None
    topic: str = ""
    number: int = 0  # of the newest commit that has one
    is_restored: bool = False  # the rows went back, and nobody has claimed them since

    def next_number(self, token: int = 0) -> int:
        """What the holder of *token* counts on with; without one, whoever mends beside it."""
        return max(self.number, token << _TOKEN_SHIFT) + 1

    def after(self, version: int, found: Mapping[str, Any] | None) -> Note:
        """What is known when one more commit has come."""
        if found is None:
            return replace(self, version=version)
        number = max(self.number, found.get("number", 0))
        is_restored = self.is_restored and "entry" in found  # a claim has none
        note = replace(self, version=version, number=number, is_restored=is_restored)
        if found["token"] >= self.token:
            note = replace(note, token=found["token"], owner=found["owner"])
            if "entry" in found:
                note = replace(note, entry=_entry(found["entry"]), topic=found["topic"])
        elif "entry" in found:
            note = note.with_rest_of(found["topic"], _entry(found["entry"]))
        return note

    def with_rest_of(self, topic: str, late: Entry | None) -> Note:
        """An old holder's last batch was written all the same, so it counts."""
        mine = self.entry
        if mine is None or late is None:
            return replace(self, entry=mine or late, topic=self.topic or topic)
        if (mine.topic_id, mine.generation) != (late.topic_id, late.generation):
            return self
        offsets = dict(mine.offsets)
        for partition, offset in late.offsets.items():
            offsets[partition] = max(offset, offsets.get(partition, 0))
        return replace(self, entry=replace(mine, offsets=offsets))


class Ledger:
    """The log of the table at *path*, read for one sink."""

    def __init__(self, spark: SparkSession, sink: str, path: str) -> None:
        self._spark = spark
        self._sink = sink
        self._path = path
        self._commits = _Commits(spark, path)
        self._known: Note | None = None

    def note(self) -> Note:
        """What the log says now. Reads only the commits that are new to us."""
        note = self._known
        if note is None:
            note = self._from_history(self._commits.newest())
        elif not self._commits.has(note.version):
            note = self._without(note)
        while self._commits.has(following := note.version + 1):
            info = self._commits.info(following)
            if info.get("operation") == "RESTORE":
                note = replace(self._from_history(following), is_restored=True)
            else:
                note = note.after(following, self._ours(info))
        self._known = note
        return note

    def _without(self, known: Note) -> Note:
        """What the log says when the commit that *known* ends with is not there any more."""
        newest = self._commits.newest()
        found = self._from_history(newest)
        if newest < known.version:  # a copy from before stands here now
            return replace(found, is_restored=True)
        # Delta has cleaned up. If nothing of ours came after what we know, we know it still.
        is_news = found.owner or found.token != known.token
        return found if is_news else replace(known, version=newest)

    def _from_history(self, newest: int) -> Note:
        """Read back from *newest* until the last claim, a ledger and a number are found."""
        if newest < 0:
            return Note(newest)
        holder = self._last_claim()
        found: list[tuple[int, Mapping[str, Any]]] = []
        has_holder = has_entry = False
        number = 0
        at = restored = newest
        while at >= 0 and self._commits.has(at) and not (has_holder and has_entry and number):
            info = self._commits.info(at)
            line = self._ours(info)
            if line is not None:
                number = max(number, line.get("number", 0))  # Delta counts what was undone, too
            if line is not None and at <= restored:
                found.append((at, line))
                has_holder = has_holder or line["token"] >= holder
                has_entry = has_entry or "entry" in line
            if info.get("operation") == "RESTORE" and at <= restored:
                to = info.get("operationParameters", {}).get("version")
                # By time instead of by version: start over, which is slow and safe.
                restored = int(to) if str(to).isdigit() else -1
            at -= 1
        note = Note(newest, token=holder)
        for version, line in reversed(found):
            note = note.after(version, line)
        return replace(note, version=newest, number=number)

    def _last_claim(self) -> int:
        properties = self._spark.sql(f"SHOW TBLPROPERTIES {at_path(self._path)}").collect()
        return max(
            (int(row["value"].split(".")[0]) for row in properties if row["key"] == FENCE),
            default=0,
        )

    def _ours(self, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
        try:
            found = orjson.loads(info.get("userMetadata") or "null")
        except orjson.JSONDecodeError:
            return None
        return found if isinstance(found, dict) and found.get("sink") == self._sink else None


class _Commits:
    """The commits of a Delta table, read as files: no Spark job, a few milliseconds each."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        jvm: Any = spark._jvm  # noqa: SLF001 - the file systems that Spark knows, with its settings
        self._jvm = jvm
        self._folder = jvm.org.apache.hadoop.fs.Path(path, "_delta_log")
        configuration = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
        self._files = self._folder.getFileSystem(configuration)

    def has(self, version: int) -> bool:
        return bool(self._files.exists(self._commit(version)))

    def newest(self) -> int:
        if not self._files.exists(self._folder):
            return -1
        names = (status.getPath().getName() for status in self._files.listStatus(self._folder))
        versions = (int(name[:20]) for name in names if re.fullmatch(r"\d{20}\.json", name))
        return max(versions, default=-1)

    def info(self, version: int) -> dict[str, Any]:
        """The commitInfo of a commit, which Delta writes as one of its first lines."""
        io = self._jvm.java.io
        stream = self._files.open(self._commit(version))
        reader = io.BufferedReader(io.InputStreamReader(stream, "UTF-8"))
        try:
            while (line := reader.readLine()) is not None:
                if line.startswith('{"commitInfo"'):
                    found: dict[str, Any] = orjson.loads(line)["commitInfo"]
                    return found
        finally:
            reader.close()
        return {}

    def _commit(self, version: int) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._folder, f"{version:020d}.json")


def claim_line(sink: str, token: int, owner: str) -> dict[str, Any]:
    return {"sink": sink, "token": token, "owner": owner}


def ledger_line(
    claimed: Mapping[str, Any], topic: str, entry: Entry | None, number: int = 0
) -> dict[str, Any]:
    """What a commit says that moves the ledger; *number* if it changes rows, too."""
    data = None if entry is None else asdict(entry)
    if data is not None:
        data["offsets"] = {str(partition): at for partition, at in data["offsets"].items()}
    return {**claimed, "topic": topic, "entry": data, "number": number}


def _entry(data: Mapping[str, Any] | None) -> Entry | None:
    if data is None:
        return None
    offsets = {int(partition): at for partition, at in data["offsets"].items()}
    return Entry(**{**data, "offsets": offsets})


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def at_path(path: str) -> str:
    return f"delta.{quoted(path)}"
