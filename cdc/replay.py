"""Out of the quarantine: the newest record of each kept key goes into the sink, as its own version.

Pure but for the functions that are handed in. An old row can never come back: a record is only
written while the sink's ledger is not past the point up to which it was known to be the newest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cdc.batch import Record
from cdc.change import Change, Slice, Table, version_of
from cdc.envelope import decode
from cdc.errors import MalformedRecord, SinkUnavailable
from cdc.ledger import TopicState
from cdc.quarantine import Kept
from cdc.sink import FrameSink, Sink

# The writer passes us only while it is moving; each time we read on from further ahead.
ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Log:
    """What a replay may ask of the log."""

    topics: Callable[[list[str]], Mapping[str, TopicState]]
    # ((topic, partition), keys, first, end) -> the newest record of each key in that stretch
    newest: Callable[[tuple[str, int], set[bytes], int, int], Mapping[bytes, Record]]


@dataclass(slots=True)
class Replayed:
    """Ids by what became of them. What was *applied* or is *obsolete* may leave the quarantine."""

    applied: list[str] = field(default_factory=list)  # or the sink had something newer already
    obsolete: list[str] = field(default_factory=list)  # the log began anew since, and was read
    refused: dict[str, str] = field(default_factory=dict)  # id -> the reason, as it is now


def replay(
    kept: Sequence[Kept], tables: Mapping[str, Table], sink: Sink | FrameSink, log: Log
) -> Replayed:
    """Try every record of *kept*, which all belong to *sink*, once more."""
    done = Replayed()
    places: dict[tuple[str, int], list[Kept]] = defaultdict(list)
    for each in kept:
        places[each.topic, each.partition].append(each)
    states = log.topics(sorted({topic for topic, _ in places}))
    for (topic, _), mine in places.items():
        state = states.get(topic)
        current = [k for k in mine if state is not None and k.topic_id == state.topic_id]
        done.obsolete += [k.id for k in mine if k not in current]
        if topic not in tables:
            done.refused |= {k.id: "the table is not in source.tables any more" for k in current}
        elif current:
            _partition(current, tables[topic], sink, log, done)
    return done


def _partition(
    kept: Sequence[Kept], table: Table, sink: Sink | FrameSink, log: Log, done: Replayed
) -> None:
    topic, partition = kept[0].topic, kept[0].partition
    for _ in range(ATTEMPTS):
        end = log.topics([topic])[topic].end[partition]
        keys = {k.key for k in kept if k.key is not None}
        first = min(k.offset for k in kept)
        found = log.newest((topic, partition), keys, first, end)
        tried = dict(_changes(kept, table, found, done))
        changes = sorted({c.offset: c for c in tried.values()}.values(), key=lambda c: c.offset)
        reasons = _repaired(sink, Slice(table, topic, partition, end, tuple(changes)))
        if reasons is None:
            continue
        for id_, change in tried.items():
            if change.offset in reasons:
                done.refused[id_] = reasons[change.offset]
            else:
                done.applied.append(id_)
        return
    raise SinkUnavailable(
        f"{sink.name}: {topic} partition {partition} moved on {ATTEMPTS} times during the replay",
        hint="try again when fewer changes come",
    )


def _repaired(sink: Sink | FrameSink, piece: Slice) -> dict[int, str] | None:
    """Repair with all of *piece* that is taken; the reasons for the rest, by offset."""
    reasons: dict[int, str] = {}
    while True:
        left = tuple(change for change in piece.changes if change.offset not in reasons)
        written = sink.repair(replace(piece, changes=left))
        if written is None:
            return None
        if not written.refused:
            return reasons
        reasons |= {refusal.offset: refusal.reason for refusal in written.refused}


def _changes(
    kept: Sequence[Kept], table: Table, found: Mapping[bytes, Record], done: Replayed
) -> Iterator[tuple[str, Change]]:
    """What to write for each kept record, by id."""
    for each in kept:
        # Compaction may have removed a tombstone with all before it: then the row is gone.
        record = found.get(each.key or b"") or Record(each.offset, each.key, None)
        try:
            change = decode(
                table, record.key, record.value, version_of(each.generation, record.offset)
            )
        except MalformedRecord as error:
            done.refused[each.id] = str(error)
            continue
        yield each.id, change
