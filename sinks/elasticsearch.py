"""Elasticsearch: one index per table behind an alias, every write under its external version.

A table is served by the alias `<prefix><schema>.<table>`; its rows live in a numbered index behind
it, so that a new index can be built and swapped in. Writers use a second, hidden alias that belongs
to the numbered index alone: a deleted index is then an error, never created anew by a write.

The ledger is the index `<prefix>cdc-ledger`, read only by realtime GETs:
- a document per sink has the token and, per topic, what `assign` was told, with the index's UUID;
- a document per sink, topic and partition has the next offset. It counts only while it bears the
  mark of the last `assign`, and only a compare-and-set moves it, so a late writer cannot undo.

A deleted document's version is forgotten after `gc_deletes`. What protects a delete from then on is
the ledger: changes below the next offset are never sent again.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import orjson
from elastic_transport import ConnectionTimeout, SerializationError, TlsError, TransportError
from elasticsearch import ApiError, BadRequestError, ConflictError, Elasticsearch, NotFoundError
from elasticsearch.serializer import JsonSerializer
from pydantic import Field, SecretStr, model_validator

from cdc.change import OFFSET_BITS, Change, Key, Row, Slice, Table, key_text
from cdc.config import Seconds, Secret, SinkSettings, Url
from cdc.errors import SinkError, SinkFenced, SinkUnavailable, SinkUnusable
from cdc.sink import Claim, Entry, Written
from sinks.types import Kind, document_value, elasticsearch_field, from_document, kind

LEDGER = "cdc-ledger"
MAX_ID_BYTES = 512  # Elasticsearch's limit
MAX_NAME_BYTES = 180  # of 255: the prefix and the number come on top
FIELDS_LIMIT = 5_000  # PostgreSQL allows 1,600 columns, and a text column takes two fields
HITS_PER_PAGE = 2_000
PIT_KEEP_ALIVE = "5m"
CHECK_EVERY_S = 1.0
# Each lost race means that somebody else got through, so this many in a row is no race.
ATTEMPTS = 50

_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500
_UNAUTHORIZED = 401
# The kinds that document_value writes differently from what Debezium wrote.
_REWRITTEN = frozenset({Kind.DATE, Kind.TIME, Kind.TIMESTAMP, Kind.JSON, Kind.HSTORE})
_STALE = "version_conflict_engine_exception"
_NO_INDEX = "index_not_found_exception"
_BUSY = "the cluster is overloaded or recovering"
_HINTS = {
    403: "give the user the rights to manage and write the indices of this sink",
    404: "was an index deleted just now? Start again",
    413: "lower batch.max_bytes, or raise http.max_content_length of the server",
}
_REFILL = "nothing to do: when the sink opens again, the index is filled from the log"
_REBUILD = (
    "the index cannot hold this column as it is now: delete the index and start again,"
    " and it is filled from the log with a new mapping"
)


class ElasticsearchSettings(SinkSettings):
    type: Literal["elasticsearch"]
    url: Url = "http://localhost:9200"
    user: str | None = None
    password: Secret = SecretStr("")
    api_key: Secret = SecretStr("")
    ca_path: str | None = None  # certificates to trust, instead of the system's
    timeout: Seconds = 30.0
    index_prefix: str = Field(default="", pattern=r"^([a-z0-9][a-z0-9_.-]*)?$", max_length=60)
    replicas: int = Field(default=1, ge=0)
    refresh_interval: str = Field(default="1s", pattern=r"^(-1|\d+(ms|s|m))$")
    # Must outlast a writer that was paused between its look at the token and its write. Every
    # delete of this time is held in the server's memory, so not days.
    gc_deletes: Seconds = 3600.0

    @model_validator(mode="after")
    def _one_credential(self) -> Self:
        if self.user and self.api_key.get_secret_value():
            raise ValueError("set user and password, or api_key, not both")
        return self


@dataclass(frozen=True, slots=True)
class Target:
    """The index behind an alias, as it was found. *meta* are the notes in its mapping."""

    alias: str
    index: str
    uuid: str
    meta: Mapping[str, Any]


class _Held(NamedTuple):
    """A ledger document and what a compare-and-set of it needs; None: it is not there."""

    source: Mapping[str, Any]
    seq_no: int | None
    primary_term: int | None


class _ExactJson(JsonSerializer):
    """Answers keep every digit: a number of a document need not fit a float."""

    mimetype: ClassVar[str] = "application/json"

    def json_loads(self, data: str | bytes) -> Any:
        return json.loads(data, parse_float=Decimal)


def alias_name(prefix: str, table: Table) -> str:
    """A legal name that no other table has: what is not [a-z0-9_] becomes ~ and its bytes in hex.

    A hyphen is encoded too, so that an alias never looks like the numbered index of another.
    """
    name = f"{_encoded(table.schema)}.{_encoded(table.name)}"
    if name.startswith("_"):  # no index may
        name = f"~5f{name[1:]}"
    if len(name) > MAX_NAME_BYTES:
        digest = hashlib.sha256(name.encode()).hexdigest()
        name = f"{name[: MAX_NAME_BYTES - 66]}~~{digest}"
    return prefix + name


def _encoded(part: str) -> str:
    return re.sub(
        r"[^a-z0-9_]", lambda found: "".join(f"~{byte:02x}" for byte in found[0].encode()), part
    )


def document_id(key: Key) -> str:
    """The `_id` of a row: the key's text, or a digest where that is too long for an `_id`."""
    text = key_text(key)
    if len(text) * 4 > MAX_ID_BYTES and len(raw := text.encode()) > MAX_ID_BYTES:
        return f"sha256:{hashlib.sha256(raw).hexdigest()}"  # no key's text begins with a letter
    return text


def bulk_body(table: Table, changes: Sequence[Change]) -> bytes:
    """The lines of a bulk request. Raises SinkUnusable for a value that JSON cannot hold."""
    writers = [(c.name, _writer(c.type)) for c in table.columns if kind(c.type) in _REWRITTEN]
    lines: list[bytes] = []
    for change in changes:
        action = b"delete" if change.row is None else b"index"
        lines.append(
            b'{"%b":{"_id":%b,"version":%d,"version_type":"external"}}'
            % (action, orjson.dumps(document_id(change.key)), change.version)
        )
        if change.row is None:
            continue
        document = dict(change.row)
        try:
            for name, write in writers:
                if name in document:
                    document[name] = write(document[name])
            line = orjson.dumps(document)
        except (TypeError, ValueError):
            raise SinkUnusable(
                f"{table.full_name}: the row at offset {change.offset} cannot be written as JSON",
                hint="look at that record in the log; mend the row at the source",
            ) from None
        # Only between the tokens of a json column: within a string JSON allows no line break.
        lines.append(line.replace(b"\n", b" "))
    lines.append(b"")
    return b"\n".join(lines)


def _writer(pg_type: str) -> Callable[[Any], Any]:
    return _jsonb if pg_type == "jsonb" else partial(document_value, pg_type)


def _jsonb(value: Any) -> Any:
    """As document_value, in a tenth of the time: jsonb, unlike json, has no key twice."""
    if not isinstance(value, str):
        return value
    orjson.loads(value)  # a fragment is not checked, and a broken one would break the whole bulk
    return orjson.Fragment(value)


class ElasticsearchSink:
    def __init__(self, settings: ElasticsearchSettings) -> None:
        self.name = settings.name
        self._settings = settings
        self._ledger = settings.index_prefix + LEDGER
        self._targets: dict[str, Target] = {}  # by topic; as prepare or claim found them
        self._checked: dict[tuple[str, str], float] = {}  # (index, UUID) -> when it was seen

    @cached_property
    def _client(self) -> Elasticsearch:
        settings = self._settings
        options: dict[str, Any] = {}
        if settings.user:
            options["basic_auth"] = (settings.user, settings.password.get_secret_value())
        if settings.api_key.get_secret_value():
            options["api_key"] = settings.api_key.get_secret_value()
        if settings.ca_path:
            options["ca_certs"] = settings.ca_path
        return Elasticsearch(
            settings.url,
            request_timeout=settings.timeout,
            max_retries=0,  # the policy retries, and nobody else
            retry_on_timeout=False,
            serializers={_ExactJson.mimetype: _ExactJson()},
            **options,
        )

    def prepare(self, tables: Mapping[str, Table]) -> None:
        with self._classified():
            self._create_ledger()
            for topic, table in tables.items():
                self._targets[topic] = self._prepared(table)

    def claim(self) -> Claim:
        with self._classified():
            self._create_ledger()
            for _ in range(ATTEMPTS):
                (held,) = self._get(self.name)
                # Not less than the time: a ledger that was lost must not hand out a token twice.
                token = max(held.source.get("token", 0) + 1, int(time.time()))
                if self._put(self.name, {**held.source, "token": token}, held):
                    return Claim(token, self._entries(held.source))
            raise self._contended()

    def assign(self, token: int, entries: Mapping[str, Entry]) -> None:
        with self._classified():
            for _ in range(ATTEMPTS):
                (held,) = self._get(self.name)
                self._check(token, held.source)
                topics = {}
                for topic, entry in entries.items():
                    target = self._target(topic, held.source)
                    self._note(target, entry)
                    topics[topic] = {
                        "alias": target.alias,
                        "index": target.index,
                        "uuid": target.uuid,
                        "topic_id": entry.topic_id,
                        "generation": entry.generation,
                        "partitions": entry.partitions,
                        "offsets": {str(p): offset for p, offset in entry.offsets.items()},
                    }
                document = {"token": token, "mark": uuid.uuid4().hex, "topics": topics}
                if self._put(self.name, document, held):
                    return
            raise self._contended()

    def write(self, token: int, piece: Slice) -> Written:
        with self._classified():
            ledger, line = self._get(self.name, self._line(piece.topic, piece.partition))
            entry = self._check(token, ledger.source, piece.topic)
            reached = _reached(ledger.source, line.source, entry, piece.partition) or 0
            # Of another generation the ledger says nothing: there the version guard decides.
            first = entry["generation"] << OFFSET_BITS
            fresh = [c for c in piece.changes if not first <= c.version < first + reached]
            stale = len(piece.changes) - len(fresh)
            if fresh:
                self._same_index(entry["index"], entry["uuid"])
                stale += self._bulk(piece, entry["index"], fresh)
            if piece.next_offset > reached:
                self._move(token, piece, ledger, line)
            return Written(len(piece.changes) - stale, stale)

    def rows(self, table: Table) -> Iterator[tuple[Row, int | None]]:
        rewritten = _rewritten(table)
        alias = alias_name(self._settings.index_prefix, table)
        with self._classified():
            found = self._look(alias)
            if found is None:
                raise SinkUnusable(
                    f"{self.name}: there is no index {alias}", hint="start the sink once: cdc run"
                )
            for hit in self._hits(found[0].index):
                row = hit["_source"]
                for name, pg_type in rewritten:
                    if name in row:
                        row[name] = from_document(pg_type, row[name])
                yield row, hit["_version"]

    def close(self) -> None:
        client = self.__dict__.pop("_client", None)
        if client is not None:
            client.close()

    # The indices.

    def _prepared(self, table: Table) -> Target:
        alias = alias_name(self._settings.index_prefix, table)
        fields = {c.name: elasticsearch_field(c.type) for c in table.columns}
        found = self._look(alias)
        if found is None:
            self._create(alias, f"{alias}-000001", fields)
            found = self._look(alias)
        if found is None:
            raise SinkUnusable(
                f"{self.name}: the index {alias}-000001 exists, but not behind the alias {alias}",
                hint="point the alias at it, or delete it: then it is filled from the log",
            )
        target, state = found
        indices = self._client.indices
        known = state["mappings"].get("properties", {})
        missing = {name: field for name, field in fields.items() if name not in known}
        if missing:
            indices.put_mapping(index=target.index, properties=missing)
        # What follows is for an index that was restored, or made by hand.
        if _write_alias(target.index) not in state["aliases"]:
            alias_of = {"index": target.index, "alias": _write_alias(target.index)}
            indices.update_aliases(actions=[{"add": {**alias_of, "is_hidden": True}}])
        if state["settings"]["index"].get("gc_deletes") != self._gc_deletes:
            settings = {"index.gc_deletes": self._gc_deletes}
            indices.put_settings(index=target.index, settings=settings)
        return target

    @property
    def _gc_deletes(self) -> str:
        return f"{int(self._settings.gc_deletes * 1000)}ms"

    def _create(self, alias: str, index: str, fields: Mapping[str, Any]) -> None:
        self._create_unless_there(
            index,
            aliases={alias: {}, _write_alias(index): {"is_hidden": True}},
            settings={
                "index.number_of_replicas": self._settings.replicas,
                "index.refresh_interval": self._settings.refresh_interval,
                "index.gc_deletes": self._gc_deletes,
                "index.mapping.total_fields.limit": FIELDS_LIMIT,
            },
            # A field that the mapping does not know stays in the document and breaks nothing.
            mappings={"dynamic": False, "properties": fields},
        )

    def _create_ledger(self) -> None:
        if not self._client.indices.exists(index=self._ledger):
            self._create_unless_there(
                self._ledger,
                settings={
                    "index.hidden": True,
                    "index.number_of_shards": 1,
                    "index.auto_expand_replicas": "0-1",
                    "index.refresh_interval": "-1",  # nobody searches it
                },
                mappings={"dynamic": False},
            )

    def _create_unless_there(self, index: str, **body: Any) -> None:
        try:
            self._client.indices.create(index=index, **body)
        except BadRequestError as error:
            if _error_type(error) != "resource_already_exists_exception":
                raise

    def _look(self, alias: str) -> tuple[Target, Mapping[str, Any]] | None:
        """The one index behind *alias* and its state, or None when the alias does not exist."""
        try:
            answer = self._client.indices.get(index=alias)
        except NotFoundError:
            return None
        if len(answer) != 1 or alias in answer:
            raise SinkUnusable(
                f"{self.name}: {alias} must be an alias of exactly one index",
                hint=f"look at GET _alias/{alias}",
            )
        ((index, state),) = answer.items()
        meta = state["mappings"].get("_meta", {})
        return Target(alias, index, state["settings"]["index"]["uuid"], meta), state

    def _target(self, topic: str, ledger: Mapping[str, Any]) -> Target:
        """What prepare or claim has seen: an index that came later has not got the rows."""
        if topic in self._targets:
            return self._targets[topic]
        known = ledger.get("topics", {}).get(topic)
        if known is None:
            raise SinkUnusable(f"{self.name}: {topic} was not prepared")
        return Target(known["alias"], known["index"], known["uuid"], {})

    def _note(self, target: Target, entry: Entry) -> None:
        """Write the generation into the index itself: it must outlive a ledger that gets lost.

        Without it a later start would count from 1 again, below the versions that are held here.
        """
        note = {
            "topic_id": entry.topic_id,
            "generation": entry.generation,
            "partitions": entry.partitions,
        }
        if target.meta.get("cdc") != note:
            self._client.indices.put_mapping(index=target.index, meta={**target.meta, "cdc": note})

    def _same_index(self, index: str, uuid: str) -> None:
        """An index that was recreated or restored since the ledger was set has not got the rows.

        Not asked with every write: what slips through is found by the next claim.
        """
        now = time.monotonic()
        if now < self._checked.get((index, uuid), -CHECK_EVERY_S) + CHECK_EVERY_S:
            return
        answer = self._client.indices.get_settings(
            index=index, name="index.uuid", ignore_unavailable=True
        )
        state = answer.get(index)
        if state is None or state["settings"]["index"]["uuid"] != uuid:
            raise self._replaced(index)
        self._checked[index, uuid] = now

    # The rows.

    def _bulk(self, piece: Slice, index: str, changes: Sequence[Change]) -> int:
        """Write *changes*; return how many were stale. Raises unless every one is accounted for."""
        answer = self._client.perform_request(
            "POST",
            f"/{_write_alias(index)}/_bulk",
            params={
                "require_alias": "true",
                "filter_path": "errors,items.*.status,items.*.error.type",
            },
            headers={"accept": "application/json", "content-type": "application/x-ndjson"},
            body=bulk_body(piece.table, changes),
        ).body
        if not answer["errors"]:  # a delete that found nothing is no error: its version is kept
            return 0
        stale = 0
        busy: SinkError | None = None
        for change, item in zip(changes, answer["items"], strict=True):
            (outcome,) = item.values()
            failure = outcome.get("error")
            if failure is None:
                continue
            if failure["type"] == _STALE:
                stale += 1
                continue
            error = self._item_error(index, change, outcome["status"], failure["type"])
            if not isinstance(error, SinkUnavailable):
                raise error
            busy = busy or error
        if busy is not None:
            raise busy
        return stale

    def _item_error(self, index: str, change: Change, status: int, error_type: str) -> SinkError:
        # The reason is left out on purpose: it quotes values.
        if error_type == _NO_INDEX:
            return self._replaced(index)
        message = f"{self.name}: {index} answered {status} {error_type} for offset {change.offset}"
        if _is_busy(status):
            return SinkUnavailable(message, hint=_BUSY)
        return SinkUnusable(message, hint=_REBUILD if "parsing" in error_type else "")

    def _hits(self, index: str) -> Iterator[dict[str, Any]]:
        client = self._client
        client.indices.refresh(index=index)
        pit = client.open_point_in_time(index=index, keep_alive=PIT_KEEP_ALIVE)["id"]
        after: Any = None
        try:
            while True:
                answer = client.search(
                    pit={"id": pit, "keep_alive": PIT_KEEP_ALIVE},
                    size=HITS_PER_PAGE,
                    version=True,
                    sort=[{"_shard_doc": "asc"}],
                    search_after=after,
                    track_total_hits=False,
                )
                if answer["timed_out"] or answer["_shards"]["failed"]:
                    raise SinkUnavailable(f"{self.name}: some shards of {index} did not answer")
                pit = answer["pit_id"]
                hits = answer["hits"]["hits"]
                yield from hits
                if len(hits) < HITS_PER_PAGE:
                    return
                after = hits[-1]["sort"]
        finally:
            with suppress(ApiError, TransportError):
                client.close_point_in_time(id=pit)

    # The ledger.

    def _line(self, topic: str, partition: int) -> str:
        return f"{self.name}:{topic}:{partition}"

    def _get(self, *ids: str) -> list[_Held]:
        held = []
        for document in self._client.mget(index=self._ledger, ids=ids)["docs"]:
            failure = document.get("error", {}).get("type", _NO_INDEX)
            if failure != _NO_INDEX:
                raise SinkUnavailable(f"{self.name}: {self._ledger} answered {failure}", hint=_BUSY)
            if document.get("found"):
                place = document["_seq_no"], document["_primary_term"]
                held.append(_Held(document["_source"], *place))
            else:
                held.append(_Held({}, None, None))
        return held

    def _put(self, document_id: str, source: Mapping[str, Any], held: _Held) -> bool:
        """Replace *held* by *source*, unless somebody else did so first."""
        condition: dict[str, Any] = {"op_type": "create"}
        if held.seq_no is not None:
            condition = {"if_seq_no": held.seq_no, "if_primary_term": held.primary_term}
        try:
            self._client.index(index=self._ledger, id=document_id, document=source, **condition)
        except ConflictError:
            return False
        return True

    def _entries(self, ledger: Mapping[str, Any]) -> dict[str, Entry]:
        """What is known of each topic, as far as its index is still the one that was written."""
        recorded = ledger.get("topics", {})
        entries: dict[str, Entry] = {}
        for topic in {**recorded, **self._targets}:
            known = recorded.get(topic)
            found = self._look(self._target(topic, ledger).alias)
            if found is None:
                continue
            target = self._targets[topic] = found[0]
            if known is not None and known["uuid"] == target.uuid:
                lines = [self._line(topic, p) for p in range(known["partitions"])]
                reached = {
                    p: _reached(ledger, line.source, known, p)
                    for p, line in enumerate(self._get(*lines))
                }
                offsets = {p: offset for p, offset in reached.items() if offset is not None}
                entries[topic] = Entry(
                    known["topic_id"], known["generation"], known["partitions"], offsets
                )
            elif note := target.meta.get("cdc"):
                # Rows without a ledger, as after a restore: all of the log again, and no version
                # below those that are held.
                entries[topic] = Entry(**note)
        return entries

    def _check(
        self, token: int, ledger: Mapping[str, Any], topic: str | None = None
    ) -> Mapping[str, Any]:
        """Raise unless *token* may write; return the entry of *topic*."""
        current = ledger.get("token")
        if current is None:
            raise SinkUnavailable(f"{self.name}: the ledger {self._ledger} is gone", hint=_REFILL)
        if current != token:
            raise SinkFenced(f"{self.name}: token {token} is old, {current} has taken over")
        entry: Mapping[str, Any] | None = ledger.get("topics", {}).get(topic)
        if entry is None and topic is not None:
            raise SinkUnusable(f"{self.name}: the ledger has no entry for {topic}")
        return entry or {}

    def _move(self, token: int, piece: Slice, ledger: _Held, line: _Held) -> None:
        mark = ledger.source["mark"]
        line_id = self._line(piece.topic, piece.partition)
        for _ in range(ATTEMPTS):
            if self._put(line_id, {"mark": mark, "next": piece.next_offset}, line):
                return
            ledger, line = self._get(self.name, line_id)
            entry = self._check(token, ledger.source, piece.topic)
            if ledger.source["mark"] != mark:
                raise SinkFenced(f"{self.name}: the ledger was set anew during a write")
            reached = _reached(ledger.source, line.source, entry, piece.partition)
            if reached is not None and reached >= piece.next_offset:
                return
        raise self._contended()

    # The errors.

    def _replaced(self, index: str) -> SinkError:
        return SinkUnavailable(
            f"{self.name}: the index {index} was deleted or replaced since the sink was opened",
            hint=_REFILL,
        )

    def _contended(self) -> SinkError:
        return SinkUnavailable(f"{self.name}: the ledger {self._ledger} is written by many at once")

    @contextmanager
    def _classified(self) -> Iterator[None]:
        """Only errors of cdc get out. An answer's own text stays here: it may quote a row."""
        url = self._settings.url
        try:
            yield
        except TlsError as error:
            raise SinkUnusable(
                f"{self.name}: {url} has no certificate that is trusted here",
                hint="set ca_path to the certificate of its authority",
            ) from error
        except ConnectionTimeout as error:
            raise SinkUnavailable(
                f"{self.name}: {url} did not answer within {self._settings.timeout:g} s",
                hint="is the cluster healthy? GET _cluster/health says so",
            ) from error
        except SerializationError:
            raise SinkUnusable(
                f"{self.name}: {url} does not answer like Elasticsearch", hint="check the url"
            ) from None
        except TransportError as error:
            what = "refused" if _is_refusal(error) else "broke"
            raise SinkUnavailable(
                f"{self.name}: {url} {what} the connection",
                hint="is Elasticsearch up, and is the url right?",
            ) from error
        except ApiError as error:
            raise self._api_error(error) from None

    def _api_error(self, error: ApiError) -> SinkError:
        status, url = error.meta.status, self._settings.url
        if status == _UNAUTHORIZED:
            return SinkUnusable(
                f"{self.name}: {url} does not accept the credentials",
                hint="check user and password, or api_key",
            )
        message = f"{self.name}: {url} answered {status} {_error_type(error)}"
        if _is_busy(status):
            return SinkUnavailable(message, hint=_BUSY)
        return SinkUnusable(message, hint=_HINTS.get(status, ""))


def _write_alias(index: str) -> str:
    return f"{index}~write"


def _rewritten(table: Table) -> list[tuple[str, str]]:
    return [(c.name, c.type) for c in table.columns if kind(c.type) in _REWRITTEN]


def _reached(
    ledger: Mapping[str, Any], line: Mapping[str, Any], entry: Mapping[str, Any], partition: int
) -> int | None:
    """The next offset: the partition's own line, if it was written since the last assign."""
    if line.get("mark") == ledger["mark"]:
        return int(line["next"])
    offset: int | None = entry["offsets"].get(str(partition))
    return offset


def _is_busy(status: int) -> bool:
    return status == _TOO_MANY_REQUESTS or status >= _SERVER_ERROR


def _error_type(error: ApiError) -> str:
    body = error.body
    failure = body.get("error") if isinstance(body, dict) else None
    return str(failure.get("type")) if isinstance(failure, dict) else "without a reason"


def _is_refusal(error: BaseException | None) -> bool:
    """Whether a refused connection is at the bottom of *error*."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        inner = error.errors[0] if isinstance(error, TransportError) and error.errors else None
        error = inner or error.__cause__ or error.__context__
    return False
