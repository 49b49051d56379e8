"""Elasticsearch: one index per table behind an alias, every write under its external version.

A table is served by the alias `<prefix><schema>.<table>`; its rows live in a numbered index behind
it, so that a new index can be built and swapped in. Writers use a second, hidden alias that belongs
to the numbered index alone: a deleted index is then an error, never created anew by a write.

A deleted document's version is forgotten after `gc_deletes`. What protects a delete from then on is
the ledger (sinks.elasticsearch_ledger): changes below the next offset are never sent again. The
mapping of each index has a note of the topic, too, which outlives a ledger that gets lost.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property, partial
from itertools import islice
from typing import Any, ClassVar, Literal, Self

import orjson
from elastic_transport import ConnectionTimeout, SerializationError, TlsError, TransportError
from elasticsearch import ApiError, Elasticsearch, NotFoundError
from elasticsearch.serializer import JsonSerializer
from pydantic import Field, SecretStr, model_validator

from cdc.change import Change, Key, Row, Slice, Table, key_text
from cdc.config import Seconds, Secret, SinkSettings, Url
from cdc.errors import SinkBusy, SinkError, SinkUnavailable, SinkUnusable
from cdc.sink import Claim, Entry, Refusal, Written
from sinks.elasticsearch_ledger import (
    BUSY_HINT,
    LEDGER,
    NO_INDEX,
    REFILL_HINT,
    Ledger,
    Topics,
    create_index,
    error_type,
)
from sinks.types import Kind, document_value, elasticsearch_field, from_document, kind

MAX_ID_BYTES = 512  # Elasticsearch's limit
MAX_NAME_BYTES = 180  # of 255: the prefix and the number come on top
FIELDS_LIMIT = 5_000  # PostgreSQL allows 1,600 columns, and a text column takes two fields
HITS_PER_PAGE = 2_000
PIT_KEEP_ALIVE = "5m"
CHECK_EVERY_S = 1.0
DELETES_PER_BULK = 1_000

_OK = 200
_BAD_REQUEST = 400
_UNAUTHORIZED = 401
_TOO_LARGE = 413
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500
# The kinds that document_value writes differently from what Debezium wrote.
_REWRITTEN = frozenset({Kind.DATE, Kind.TIME, Kind.TIMESTAMP, Kind.JSON, Kind.HSTORE})
_STALE = "version_conflict_engine_exception"
_HINTS = {
    403: "give the user the rights to manage and write the indices of this sink",
    404: "was an index deleted just now? Start again",
}
# In a reason that quotes values, too; so what is found counts only if it is the name of a column.
_FIELD = re.compile(r"\bfield \[([^\]]+)\]")


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


def bulk_body(table: Table, changes: Sequence[Change]) -> tuple[bytes, list[Change]]:
    """The lines of a bulk request, and the changes that JSON cannot hold: they are left out."""
    writers = [(c.name, _writer(c.type)) for c in table.columns if kind(c.type) in _REWRITTEN]
    lines: list[bytes] = []
    unwritable: list[Change] = []
    for change in changes:
        action = b"delete" if change.row is None else b"index"
        head = _head(action, document_id(change.key), change.version)
        if change.row is None:
            lines.append(head)
            continue
        document = dict(change.row)
        try:
            for name, write in writers:
                if name in document:
                    document[name] = write(document[name])
            line = orjson.dumps(document)
        except (TypeError, ValueError):
            unwritable.append(change)
            continue
        # Only between the tokens of a json column: within a string JSON allows no line break.
        lines += head, line.replace(b"\n", b" ")
    lines.append(b"")
    return b"\n".join(lines), unwritable


def _head(action: bytes, document_id: str, version: int) -> bytes:
    return b'{"%b":{"_id":%b,"version":%d,"version_type":"external"}}' % (
        action,
        orjson.dumps(document_id),
        version,
    )


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
        self._ledger = Ledger(self.name, settings.index_prefix + LEDGER, lambda: self._client)
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
            self._ledger.create()
            for topic, table in tables.items():
                self._targets[topic] = self._prepared(table)

    def claim(self) -> Claim:
        with self._classified():
            self._ledger.create()
            token, document = self._ledger.claim()
            return Claim(token, self._entries(document))

    def assign(self, token: int, entries: Mapping[str, Entry]) -> None:
        def topics(known: Topics) -> Topics:
            assigned = {}
            for topic, entry in entries.items():
                target = self._target(topic, known)
                self._note(topic, target, entry)
                assigned[topic] = {
                    "alias": target.alias,
                    "index": target.index,
                    "uuid": target.uuid,
                    "topic_id": entry.topic_id,
                    "generation": entry.generation,
                    "partitions": entry.partitions,
                    "offsets": {str(p): offset for p, offset in entry.offsets.items()},
                    "unswept": entry.unswept,
                }
            return assigned

        with self._classified():
            self._ledger.assign(token, topics)

    def write(self, token: int, piece: Slice) -> Written:
        with self._classified():
            place = self._ledger.place(token, piece.topic, piece.partition)
            fresh = [c for c in piece.changes if c.version >= place.floor]
            sent = Written(0, 0)
            if fresh:
                self._same_index(place.index, place.uuid)
                sent = self._bulk(piece, place.index, fresh)
            if piece.next_offset > (place.reached or 0) and not sent.refused:
                self._ledger.move(token, place, piece.next_offset)
            return sent._replace(stale=sent.stale + len(piece.changes) - len(fresh))

    def repair(self, piece: Slice) -> Written | None:
        with self._classified():
            place = self._ledger.look(piece.topic, piece.partition)
            if place is None or (place.reached or 0) > piece.next_offset:
                return None
            if any(change.generation != place.generation for change in piece.changes):
                return None
            passed = piece.before(place.reached or 0)
            left = len(piece.changes) - len(passed)
            if not passed:
                return Written(0, left)
            self._same_index(place.index, place.uuid)
            # A delete that the writer sends from now on is newer, and its version is remembered.
            done = self._bulk(piece, place.index, passed)
            return done._replace(stale=done.stale + left)

    def sweep(self, token: int, topic: str, table: Table) -> int:
        with self._classified():
            place = self._ledger.place(token, topic, partition=0)
            old = (
                hit["_id"]
                for hit in self._hits(place.index, source=False)
                if hit["_version"] < place.lowest
            )
            swept = 0
            while chunk := list(islice(old, DELETES_PER_BULK)):
                self._ledger.check(token, place.mark)
                self._same_index(place.index, place.uuid)
                # Above all older generations and below every change of this one.
                swept += self._delete(place.index, chunk, place.lowest - 1)
            self._ledger.swept(token, topic, place.mark)
            self._note_swept(table, place.index)
            return swept

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
        create_index(
            self._client,
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

    def _target(self, topic: str, known: Topics) -> Target:
        """What prepare or claim has seen: an index that came later has not got the rows."""
        if topic in self._targets:
            return self._targets[topic]
        if topic not in known:
            raise SinkUnusable(f"{self.name}: {topic} was not prepared")
        return Target(known[topic]["alias"], known[topic]["index"], known[topic]["uuid"], {})

    def _entries(self, document: Mapping[str, Any]) -> dict[str, Entry]:
        """What is known of each topic, as far as its index is still the one that was written."""
        topics: Topics = document.get("topics", {})
        entries: dict[str, Entry] = {}
        for topic in {**topics, **self._targets}:
            found = self._look(self._target(topic, topics).alias)
            if found is None:
                continue
            target = self._targets[topic] = found[0]
            known, note = topics.get(topic), target.meta.get("cdc")
            is_current = known is not None and known["uuid"] == target.uuid
            if known is not None and is_current and not _is_later(note, known):
                entries[topic] = self._ledger.entry(document, topic)
            elif note:
                # Rows without their ledger, as after a restore: all of the log again, and no
                # version below those that are held.
                entries[topic] = Entry(**note)
        return entries

    def _note(self, topic: str, target: Target, entry: Entry) -> None:
        """Write the generation into the index itself: it must outlive a ledger that gets lost.

        Without it a later start would count from 1 again, below the versions that are held here.
        """
        note = {
            "topic_id": entry.topic_id,
            "generation": entry.generation,
            "partitions": entry.partitions,
            "unswept": entry.unswept,
        }
        if target.meta.get("cdc") != note:
            self._targets[topic] = self._noted(target, note)

    def _note_swept(self, table: Table, index: str) -> None:
        found = self._look(alias_name(self._settings.index_prefix, table))
        if found is not None and found[0].index == index and "cdc" in found[0].meta:
            self._noted(found[0], {**found[0].meta["cdc"], "unswept": False})

    def _noted(self, target: Target, note: Mapping[str, Any]) -> Target:
        meta = {**target.meta, "cdc": note}
        self._client.indices.put_mapping(index=target.index, meta=meta)
        return replace(target, meta=meta)

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

    def _bulk(self, piece: Slice, index: str, changes: Sequence[Change]) -> Written:
        """Write *changes*. Raises unless each is applied, stale or refused."""
        body, unwritable = bulk_body(piece.table, changes)
        if unwritable:
            return _refused(piece, unwritable, "cannot be written as JSON")
        try:
            answer = self._send(index, body)
        except ApiError as error:
            if error.meta.status != _TOO_LARGE:
                raise
            if len(changes) > 1:
                raise SinkBusy(f"{self.name}: {len(body)} bytes are too large a request") from None
            return _refused(piece, changes, "too large")
        if not answer["errors"]:  # a delete that found nothing is no error: its version is kept
            return Written(len(changes), 0)
        return self._outcome(piece, index, changes, answer["items"])

    def _outcome(
        self, piece: Slice, index: str, changes: Sequence[Change], items: Sequence[Any]
    ) -> Written:
        stale, refused = 0, []
        passing: SinkError | None = None
        for change, item in zip(changes, items, strict=True):
            (outcome,) = item.values()
            failure = outcome.get("error")
            if failure is None:
                continue
            if failure["type"] == _STALE:
                stale += 1
            elif _is_refused(outcome, index):
                reason = _reason(piece.table, failure)
                refused.append(Refusal(piece.partition, change.offset, reason))
            else:
                error = self._item_error(index, outcome, f" for offset {change.offset}")
                if not isinstance(error, SinkUnavailable):
                    raise error
                passing = passing or error
        if passing is not None:
            raise passing
        return Written(len(changes) - stale - len(refused), stale, tuple(refused))

    def _delete(self, index: str, ids: Sequence[str], version: int) -> int:
        """Delete what is older than *version*; return how many there were."""
        body = b"\n".join([*(_head(b"delete", each, version) for each in ids), b""])
        deleted = 0
        for item in self._send(index, body)["items"]:
            (outcome,) = item.values()
            failure = outcome.get("error")
            if failure is not None and failure["type"] != _STALE:
                raise self._item_error(index, outcome, "")
            deleted += outcome["status"] == _OK
        return deleted

    def _send(self, index: str, body: bytes) -> Mapping[str, Any]:
        fields = ("_index", "status", "error.type", "error.reason")
        answer: Mapping[str, Any] = self._client.perform_request(
            "POST",
            f"/{_write_alias(index)}/_bulk",
            params={
                "require_alias": "true",
                "filter_path": ",".join(["errors", *(f"items.*.{field}" for field in fields)]),
            },
            headers={"accept": "application/json", "content-type": "application/x-ndjson"},
            body=body,
        ).body
        return answer

    def _item_error(self, index: str, outcome: Mapping[str, Any], where: str) -> SinkError:
        # The reason is left out on purpose: it quotes values.
        status, type_ = outcome["status"], outcome["error"]["type"]
        if type_ == NO_INDEX:
            return self._replaced(index)
        return _error_of(status, f"{self.name}: {index} answered {status} {type_}{where}")

    def _hits(self, index: str, *, source: bool = True) -> Iterator[dict[str, Any]]:
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
                    source=source,
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

    # The errors.

    def _replaced(self, index: str) -> SinkError:
        return SinkUnavailable(
            f"{self.name}: the index {index} was deleted or replaced since the sink was opened",
            hint=REFILL_HINT,
        )

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
            what = "refused" if _is_nobody_there(error) else "broke"
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
        return _error_of(status, f"{self.name}: {url} answered {status} {error_type(error)}")


def _write_alias(index: str) -> str:
    return f"{index}~write"


def _rewritten(table: Table) -> list[tuple[str, str]]:
    return [(c.name, c.type) for c in table.columns if kind(c.type) in _REWRITTEN]


def _is_later(note: Mapping[str, Any] | None, known: Mapping[str, Any]) -> bool:
    """Whether the ledger is older than the rows, so that its generation would be stale."""
    return note is not None and bool(note["generation"] > known["generation"])


def _refused(piece: Slice, changes: Sequence[Change], reason: str) -> Written:
    return Written(0, 0, tuple(Refusal(piece.partition, c.offset, reason) for c in changes))


def _is_refused(outcome: Mapping[str, Any], index: str) -> bool:
    """Whether the index itself has looked at the document and does not take it.

    What fails before, as for a closed index, is answered under the alias's name.
    """
    return bool(outcome["status"] == _BAD_REQUEST and outcome["_index"] == index)


def _reason(table: Table, failure: Mapping[str, Any]) -> str:
    """The type of *failure*, and the column if it tells one; never its text."""
    found = _FIELD.search(failure["reason"])
    is_column = found is not None and any(column.name == found[1] for column in table.columns)
    return f"{failure['type']}, column {found[1]}" if found and is_column else failure["type"]


def _error_of(status: int, message: str) -> SinkError:
    if status == _TOO_MANY_REQUESTS:
        return SinkBusy(message, hint=BUSY_HINT)
    if status >= _SERVER_ERROR:
        return SinkUnavailable(message, hint=BUSY_HINT)
    return SinkUnusable(message, hint=_HINTS.get(status, ""))


def _is_nobody_there(error: BaseException | None) -> bool:
    """Whether a refused connection is at the bottom of *error*."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        inner = error.errors[0] if isinstance(error, TransportError) and error.errors else None
        error = inner or error.__cause__ or error.__context__
    return False
