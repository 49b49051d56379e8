"""The ledger of an Elasticsearch sink: documents of one hidden index, read only by realtime GETs.

- A document per sink has the token and, per topic, what `assign` was told, with the index's UUID.
- A document per sink, topic and partition has the next offset: the line. It counts only while it
  bears the mark of the last `assign`, and only a compare-and-set moves it, so a late writer cannot
  undo.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from elasticsearch import ApiError, BadRequestError, ConflictError, Elasticsearch

from cdc.change import OFFSET_BITS
from cdc.errors import SinkError, SinkFenced, SinkUnavailable, SinkUnusable
from cdc.sink import Entry

LEDGER = "cdc-ledger"
# Each lost race means that somebody else got through, so this many in a row is no race.
ATTEMPTS = 50
NO_INDEX = "index_not_found_exception"
BUSY_HINT = "the cluster is overloaded or recovering"
REFILL_HINT = "nothing to do: when the sink opens again, the index is filled from the log"

Known = Mapping[str, Any]  # what the ledger has of one topic
Topics = Mapping[str, Known]


class Held(NamedTuple):
    """A document and what a compare-and-set of it needs; None: it is not there."""

    source: Mapping[str, Any]
    seq_no: int | None
    primary_term: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """What the ledger says of one partition, as of one moment."""

    topic: str
    partition: int
    mark: str
    index: str
    uuid: str
    generation: int
    reached: int | None  # the next offset to read
    line: Held

    @property
    def floor(self) -> int:
        """The lowest version that was not written yet; below it nothing is sent again."""
        return self.lowest + (self.reached or 0)

    @property
    def lowest(self) -> int:
        """The lowest version of the generation."""
        return self.generation << OFFSET_BITS


class Ledger:
    """*client* gives the connection, which the sink opens and closes."""

    def __init__(self, sink: str, index: str, client: Callable[[], Elasticsearch]) -> None:
        self.index = index
        self._sink = sink
        self._client = client

    def create(self) -> None:
        if not self._client().indices.exists(index=self.index):
            create_index(
                self._client(),
                self.index,
                settings={
                    "index.hidden": True,
                    "index.number_of_shards": 1,
                    "index.auto_expand_replicas": "0-1",
                    "index.refresh_interval": "-1",  # nobody searches it
                },
                mappings={"dynamic": False},
            )

    def claim(self) -> tuple[int, Mapping[str, Any]]:
        """Take the next token; return it, and the sink's document."""
        for _ in range(ATTEMPTS):
            (held,) = self._get(self._sink)
            # Not less than the time: a ledger that was lost must not hand out a token twice.
            token = max(held.source.get("token", 0) + 1, time.time_ns() // 1_000_000)
            document = {**held.source, "token": token}
            if self._put(self._sink, document, held):
                return token, document
        raise self._contended()

    def assign(self, token: int, topics: Callable[[Topics], Topics]) -> None:
        """Replace what is known of all topics by what *topics* makes of it."""
        for _ in range(ATTEMPTS):
            held = self._held(token)
            known = topics(held.source.get("topics", {}))
            document = {"token": token, "mark": uuid.uuid4().hex, "topics": known}
            if self._put(self._sink, document, held):
                return
        raise self._contended()

    def entry(self, document: Mapping[str, Any], topic: str) -> Entry:
        """What *document* and the lines say of *topic*."""
        known = document["topics"][topic]
        partitions = range(known["partitions"])
        lines = self._get(*(self._line(topic, partition) for partition in partitions))
        reached = {
            partition: _reached(document, topic, partition, line)
            for partition, line in zip(partitions, lines, strict=True)
        }
        return Entry(
            known["topic_id"],
            known["generation"],
            known["partitions"],
            {partition: offset for partition, offset in reached.items() if offset is not None},
            known.get("unswept", False),
        )

    def place(self, token: int, topic: str, partition: int) -> Place:
        """Where the writer with *token* stands. Raises SinkFenced if it was replaced."""
        held, line = self._get(self._sink, self._line(topic, partition))
        self._check(token, held.source)
        place = _place(held.source, topic, partition, line)
        if place is None:
            raise SinkUnusable(f"{self._sink}: the ledger has no entry for {topic}")
        return place

    def look(self, topic: str, partition: int) -> Place | None:
        """Where whoever writes now stands; None if nobody has begun."""
        held, line = self._get(self._sink, self._line(topic, partition))
        return _place(held.source, topic, partition, line)

    def move(self, token: int, place: Place, next_offset: int) -> None:
        """Say *next_offset* for the partition, if that is further than what it says now."""
        line_id = self._line(place.topic, place.partition)
        mark, line = place.mark, place.line
        for _ in range(ATTEMPTS):
            if self._put(line_id, {"mark": mark, "next": next_offset}, line):
                return
            now = self.place(token, place.topic, place.partition)
            self._check_mark(mark, now.mark)
            if now.reached is not None and now.reached >= next_offset:
                return
            line = now.line
        raise self._contended()

    def check(self, token: int, mark: str) -> None:
        """Raise unless *token* may still write, and nothing was assigned since *mark*."""
        self._check_mark(mark, self._held(token).source.get("mark"))

    def swept(self, token: int, topic: str, mark: str) -> None:
        """Note that *topic* has no rows of older generations. The mark stays, and so do lines."""
        for _ in range(ATTEMPTS):
            held = self._held(token)
            self._check_mark(mark, held.source.get("mark"))
            topics = held.source["topics"]
            known = {**topics[topic], "unswept": False}
            document = {**held.source, "topics": {**topics, topic: known}}
            if self._put(self._sink, document, held):
                return
        raise self._contended()

    def _line(self, topic: str, partition: int) -> str:
        return f"{self._sink}:{topic}:{partition}"

    def _held(self, token: int) -> Held:
        (held,) = self._get(self._sink)
        self._check(token, held.source)
        return held

    def _check(self, token: int, document: Mapping[str, Any]) -> None:
        current = document.get("token")
        if current is None:
            raise SinkUnavailable(
                f"{self._sink}: the ledger {self.index} is gone", hint=REFILL_HINT
            )
        if current != token:
            raise SinkFenced(f"{self._sink}: token {token} is old, {current} has taken over")

    def _check_mark(self, mark: str, current: str | None) -> None:
        if current != mark:
            raise SinkFenced(f"{self._sink}: the ledger was set anew during a write")

    def _contended(self) -> SinkError:
        return SinkUnavailable(f"{self._sink}: the ledger {self.index} is written by many at once")

    def _get(self, *ids: str) -> list[Held]:
        if not ids:
            return []
        held = []
        for document in self._client().mget(index=self.index, ids=ids)["docs"]:
            failure = document.get("error", {}).get("type", NO_INDEX)
            if failure != NO_INDEX:
                raise SinkUnavailable(
                    f"{self._sink}: {self.index} answered {failure}", hint=BUSY_HINT
                )
            if document.get("found"):
                place = document["_seq_no"], document["_primary_term"]
                held.append(Held(document["_source"], *place))
            else:
                held.append(Held({}, None, None))
        return held

    def _put(self, document_id: str, source: Mapping[str, Any], held: Held) -> bool:
        """Replace *held* by *source*, unless somebody else did so first."""
        condition: dict[str, Any] = {"op_type": "create"}
        if held.seq_no is not None:
            condition = {"if_seq_no": held.seq_no, "if_primary_term": held.primary_term}
        try:
            self._client().index(index=self.index, id=document_id, document=source, **condition)
        except ConflictError:
            return False
        return True


def _place(document: Mapping[str, Any], topic: str, partition: int, line: Held) -> Place | None:
    known = document.get("topics", {}).get(topic)
    if known is None:
        return None
    return Place(
        topic,
        partition,
        document["mark"],
        known["index"],
        known["uuid"],
        known["generation"],
        _reached(document, topic, partition, line),
        line,
    )


def _reached(document: Mapping[str, Any], topic: str, partition: int, line: Held) -> int | None:
    """The next offset: the partition's own line, if it was written since the last assign."""
    if line.source.get("mark") == document["mark"]:
        return int(line.source["next"])
    offset: int | None = document["topics"][topic]["offsets"].get(str(partition))
    return offset


def create_index(client: Elasticsearch, index: str, **body: Any) -> None:
    """Create *index*, unless it is there."""
    try:
        client.indices.create(index=index, **body)
    except BadRequestError as error:
        if error_type(error) != "resource_already_exists_exception":
            raise


def error_type(error: ApiError) -> str:
    body = error.body
    failure = body.get("error") if isinstance(body, dict) else None
    return str(failure.get("type")) if isinstance(failure, dict) else "without a reason"
