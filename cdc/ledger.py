"""Where a query starts: the sink's ledger against the topics as they are now. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson

from cdc.errors import TopicChanged, TopicMissing
from cdc.sink import Entry

START_AGAIN = "run: cdc resync, which takes a new snapshot into new topics"
EARLIEST = -2  # Spark's word for the first offset that is still there


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic as Kafka describes it. *end* is the last stable offset, per partition."""

    topic_id: str
    partitions: int
    start: Mapping[int, int]
    end: Mapping[int, int]


def plan(
    topics: Iterable[str], held: Mapping[str, Entry], found: Mapping[str, TopicState]
) -> dict[str, Entry]:
    """Decide, per topic, the generation and the next offsets. Fails closed when keys have moved."""
    return {topic: _entry(topic, held.get(topic), found.get(topic)) for topic in topics}


def _entry(topic: str, held: Entry | None, state: TopicState | None) -> Entry:
    if state is None:
        raise TopicMissing(f"the topic {topic} does not exist", hint="run: cdc connectors apply")
    if held is None:
        return Entry(state.topic_id, 1, state.partitions)
    if held.topic_id != state.topic_id:
        # Offsets mean something only inside one life of a topic.
        return Entry(state.topic_id, held.generation + 1, state.partitions, unswept=True)
    if held.partitions != state.partitions:
        raise TopicChanged(
            f"{topic} has {state.partitions} partitions and the ledger knows {held.partitions}:"
            " keys have moved between partitions",
            hint=START_AGAIN,
        )
    for partition, next_offset in held.offsets.items():
        if not state.start[partition] <= next_offset <= state.end[partition]:
            raise TopicChanged(
                f"{topic} partition {partition} holds offsets {state.start[partition]} to"
                f" {state.end[partition]}, the ledger asks for {next_offset}",
                hint=START_AGAIN,
            )
    return held


def starting_offsets(entries: Mapping[str, Entry]) -> str:
    """Spark's startingOffsets option for *entries*."""
    return orjson.dumps(
        {
            topic: {str(p): entry.offsets.get(p, EARLIEST) for p in range(entry.partitions)}
            for topic, entry in entries.items()
        }
    ).decode()
