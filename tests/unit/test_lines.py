"""What a frame sink is given: a partition's newest changes, told a stretch at a time."""

from __future__ import annotations

import orjson
import pyarrow as pa
import pytest

from cdc import writer
from cdc.change import Column, Table, version_of
from cdc.config import Batch, Quarantine, SinkSettings

ITEMS = Table("app", "items", (Column("id", "integer"), Column("t", "text")), ("id",))
TOPIC = "shop.app.items"


def job(**limits):
    return writer.Job(
        sink=SinkSettings(name="lake", type="delta"),
        open_sink=lambda _: None,
        keep=lambda _: None,
        token=1,
        tables={TOPIC: ITEMS},
        generations={TOPIC: 1},
        topic_ids={TOPIC: "A"},
        limits=Batch(**limits),
        tolerated=Quarantine(),
    )


def records(texts):
    """One record per text, of the keys 0 to 4 in turn; None is a tombstone."""
    rows = [{"id": at % 5, "t": text} for at, text in enumerate(texts)]
    values = [
        None if row["t"] is None else orjson.dumps({"op": "u", "after": row, "source": {}})
        for row in rows
    ]
    count = len(rows)
    return pa.RecordBatch.from_pydict(
        {
            "topic": [TOPIC] * count,
            "partition": pa.array([3] * count, pa.int32()),
            "offset": list(range(count)),
            "key": [orjson.dumps({"id": row["id"]}) for row in rows],
            "value": pa.array(values, pa.binary()),
        }
    )


@pytest.mark.parametrize("max_changes", [1, 2, 4, 7, 100])
def test_lines_hold_one_stretch_at_a_time(max_changes):
    """However small the stretches, what is left of all lines is the newest change of each key."""
    texts = ["a", "b", None, "d", "e", "f", None, "h", "i", "j", "k", "l"]
    told = list(writer.lines(job(max_changes=max_changes), [records(texts)]))
    assert all(batch.num_rows <= 2 * max_changes for batch in told)
    found = [line for batch in told for line in batch.to_pylist()]
    outdated = {line["version"] for line in found if line["key"] is None} - {None}
    left = {
        line["key"]: (line["version"], orjson.loads(line["row"])["t"] if line["row"] else None)
        for line in found
        if line["key"] is not None and line["version"] not in outdated
    }
    newest = {str(at % 5): (version_of(1, at), text) for at, text in enumerate(texts)}
    assert left == newest
    (report,) = writer.reports(line for line in found if line["report"] is not None)
    assert (report.outdated, report.next_offset) == (len(outdated), len(texts))


def test_lines_end_with_the_failure():
    """What ends a partition is data in its report, after the lines that came before it."""
    before, after = records(["a", "b"]), records(["c"])
    moved = orjson.dumps({"op": "u", "after": {"id": 0, "new": 1}, "source": {}})
    after = after.set_column(4, "value", pa.array([moved], pa.binary()))
    *_, last = writer.lines(job(max_changes=2), [before, after])
    (report,) = writer.reports(last.to_pylist())
    assert report.error["kind"] == "SchemaMoved"
    assert (report.changes, report.next_offset) == (2, 2)
