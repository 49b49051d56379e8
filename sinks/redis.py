"""Redis: one hash per row, replaced as a whole by a script that compares versions.

A row is the hash `<prefix>{<schema>.<table>:<key>}`: a field per column that is not NULL, as text,
and `__cdc_version`. A deleted row leaves its version at `<row>:gone` for `tombstone_ttl`. Both
share one hash tag, so they live in one slot of a Redis Cluster.

The ledger of a sink is the hash `<prefix>cdc:ledger:{<sink>}` with the token and the list of
topics, and beside it one hash per topic. Rows and ledger are as durable as Redis is set up to be;
the ledger is written after the rows, so what a crash or a fail-over loses, it loses from the end.

On a standalone server one call applies many rows, and the script looks at the ledger itself. In a
Cluster every row is a call of its own, and the ledger is looked at before.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import sha1
from importlib.resources import files
from itertools import islice
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import orjson
import redis
from pydantic import Field, SecretStr, field_validator
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    ClusterCrossSlotError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from cdc.change import OFFSET_BITS, Change, Key, Row, Slice, Table, key_text
from cdc.config import Seconds, Secret, SinkSettings, Url
from cdc.errors import SinkError, SinkFenced, SinkUnavailable, SinkUnusable
from cdc.sink import Claim, Entry, Refusal, Written

VERSION = "__cdc_version"
VERSION_DIGITS = 19  # of 2^63: one width, so that the order as text is the order as numbers
# The server does nothing else during a call: 200 rows are about 2 ms, and more gain nothing.
ROWS_PER_CALL = 200
KEYS_PER_SCAN = 1_000
MAX_VALUE_BYTES = 512 << 20  # proto-max-bulk-len, unless it was raised: beyond it Redis hangs up

_REFILL = "nothing to do: when the sink opens again, it is filled from the log"
_RIGHTS = "allow this user the keys of the sink's prefix and @read, @write, @scripting, HELLO, SCAN"
# Codes of answers that pass: code -> what to look at
_PASSING = {
    "ASK": "the cluster is moving slots",
    "BUSY": "another client's script is running",
    "CLUSTERDOWN": "some slots of the cluster have no server",
    "LOADING": "the server is loading its data",
    "MASTERDOWN": "the replica has lost its primary",
    "MISCONF": "the server cannot save to disk and refuses writes",
    "MOVED": "the cluster has moved slots",
    "NOREPLICAS": "the server has too few replicas and refuses writes",
    "OOM": "the server is at maxmemory: raise it, or free some",
    "READONLY": "this server is a replica: a fail-over may be under way, or the url is not right",
    "TRYAGAIN": "the cluster is moving slots",
}
_CODE_OF_TYPE: Mapping[type[ResponseError], str] = {
    MasterDownError: "MASTERDOWN",  # before its base
    ClusterDownError: "CLUSTERDOWN",
    ClusterCrossSlotError: "CROSSSLOT",
    MovedError: "MOVED",  # before its base
    AskError: "ASK",
    TryAgainError: "TRYAGAIN",
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    NoScriptError: "NOSCRIPT",
}


class RedisSettings(SinkSettings):
    type: Literal["redis"]
    url: Url = "redis://localhost:6379/0"
    user: str | None = None
    password: Secret = SecretStr("")
    ca_path: str | None = None  # certificates to trust, instead of the system's
    timeout: Seconds = 30.0
    # Braces would make another hash tag.
    key_prefix: str = Field(default="", pattern=r"^[^{}]*$", max_length=200)
    # Must outlast a writer that was paused, and whatever else could bring an old change back.
    tombstone_ttl: Seconds = Field(default=7 * 86400.0, gt=0)

    @field_validator("url")
    @classmethod
    def _scheme(cls, url: str) -> str:
        if not re.fullmatch(r"rediss?://[^/?#]+(/\d+)?", url):
            raise ValueError('write it like "redis://host:6379/0", or with rediss:// for TLS')
        return url


def table_head(prefix: str, table: Table) -> str:
    """What the keys of all rows of *table* begin with, and no other keys."""
    return f"{prefix}{{{_escaped(table.schema, '%}.:')}.{_escaped(table.name, '%}.:')}:"


def row_key(head: str, key: Key) -> str:
    """The key of a row. The hash tag ends at the first brace, so the key's own are escaped."""
    return f"{head}{_escaped(key_text(key), '%}')}}}"


def tombstone_key(row: str) -> str:
    return f"{row}:gone"


def _escaped(text: str, special: str) -> str:
    for character in special:  # beginning with %, which the others bring in
        if character in text:
            text = text.replace(character, f"%{ord(character):02x}")
    return text


def _glob_escaped(text: str) -> str:
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)


def _script(name: str) -> tuple[str, str]:
    text = files("sinks").joinpath(f"redis_{name}.lua").read_text(encoding="utf-8")
    return sha1(text.encode()).hexdigest(), text  # noqa: S324 - Redis names scripts so


_SCRIPTS = {name: _script(name) for name in ("apply", "claim", "assign", "move", "swept")}


def _bulk(raw: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(raw), raw)


class _Fields(dict[str, bytes]):
    """Column names, packed once."""

    def __missing__(self, name: str) -> bytes:
        packed = self[name] = _bulk(name.encode())
        return packed


class _Unfit(Exception):
    """A row that Redis can never take; the text says why, and quotes no value."""


class Guard(NamedTuple):
    """What must hold when rows are applied: per field of the hash *key*, from and to which number.

    A field that is not there counts as 0.
    """

    key: str
    ranges: tuple[tuple[str, int, int], ...]


class Packer:
    """Calls of the apply script, as the bytes that go to the server.

    The client's own packing takes four times as long as Redis needs for the rows.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self._ttl = _bulk(b"%d" % (settings.tombstone_ttl * 1000))
        self._fields = _Fields()
        self.refused: list[tuple[Change, str]] = []

    def call(self, changes: Iterable[tuple[str, Change]], guard: Guard | None) -> bytes:
        """One call for *changes*, each with the key of its row; what can never be is left out."""
        keys: list[bytes] = []
        arguments = [_bulk(b"%d" % len(guard.ranges if guard else ())), self._ttl]
        if guard:
            keys.append(_bulk(guard.key.encode()))
            for field, lowest, highest in guard.ranges:
                arguments += map(_bulk, (field.encode(), b"%d" % lowest, b"%d" % highest))
        key_count, argument_count = len(keys), len(arguments)
        for key, change in changes:
            try:
                fields = self._packed(change)
            except _Unfit as unfit:
                self.refused.append((change, str(unfit)))
                continue
            row = key.encode()
            keys.append(b"$%d\r\n%b\r\n$%d\r\n%b:gone\r\n" % (len(row), row, len(row) + 5, row))
            count = _bulk(b"%d" % (-1 if fields is None else len(fields)))
            arguments.append(b"$%d\r\n%b\r\n%b" % (VERSION_DIGITS, _version(change), count))
            arguments += fields or ()
            key_count += 2
            argument_count += 2 + len(fields or ())
        return b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n%b%b%b" % (
            3 + key_count + argument_count,
            _SCRIPTS["apply"][0].encode(),
            _bulk(b"%d" % key_count),
            b"".join(keys),
            b"".join(arguments),
        )

    def _packed(self, change: Change) -> list[bytes] | None:
        """Names and values by turns; text as it is, all else as JSON, NULL not at all."""
        if change.row is None:
            return None
        packed: list[bytes] = []
        fields = self._fields
        try:
            for name, value in change.row.items():
                if value is None:
                    continue
                raw = value.encode() if type(value) is str else orjson.dumps(value)
                if len(raw) > MAX_VALUE_BYTES:
                    raise _Unfit(f"too large, column {name}")
                packed.append(fields[name])
                packed.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
        except (TypeError, ValueError):
            raise _Unfit(f"cannot be written as text, column {name}") from None
        return packed


def _version(change: Change) -> bytes:
    return b"%0*d" % (VERSION_DIGITS, change.version)


class RedisSink:
    def __init__(self, settings: RedisSettings) -> None:
        self.name = settings.name
        self._settings = settings
        self._ledger = f"{settings.key_prefix}cdc:ledger:{{{settings.name}}}"
        self._tables: dict[str, Table] = {}  # by topic, as they were prepared

    @cached_property
    def _client(self) -> Any:
        url = urlsplit(self._settings.url)
        options: dict[str, Any] = {
            "host": url.hostname,
            "port": url.port or 6379,
            "username": self._settings.user,
            "password": self._settings.password.get_secret_value() or None,
            "socket_timeout": self._settings.timeout,
            "socket_connect_timeout": self._settings.timeout,
            "retry": Retry(NoBackoff(), 0),  # the policy retries, and nobody else
            "decode_responses": True,
            "encoding_errors": "replace",  # in a value that somebody else wrote
            "protocol": 2,
        }
        if url.scheme == "rediss":
            options |= {"ssl": True, "ssl_ca_certs": self._settings.ca_path}
        client = redis.Redis(db=int(url.path[1:] or 0), **options)
        if not _is_cluster(client):
            return client
        client.close()
        return RedisCluster(**options)

    def prepare(self, tables: Mapping[str, Table]) -> None:
        for table in tables.values():
            if any(column.name == VERSION for column in table.columns):
                raise SinkUnusable(
                    f"{self.name}: {table.full_name} has a column {VERSION}, which is ours",
                    hint="rename the column",
                )
        with self._classified():
            for _, text in _SCRIPTS.values():
                self._client.script_load(text)
        self._tables = dict(tables)

    def claim(self) -> Claim:
        with self._classified():
            # Not less than the time: a ledger that was lost must not hand out a token twice.
            token = self._run("claim", [self._ledger], [time.time_ns() // 1_000_000])
            # From here on nobody else can write the ledger, so these reads belong together.
            entries = {}
            for topic in self._topics():
                held = self._client.hgetall(self._entry(topic))
                if held:
                    entries[topic] = Entry(
                        held["topic_id"],
                        int(held["generation"]),
                        int(held["partitions"]),
                        {
                            int(field.removeprefix("next:")): int(offset)
                            for field, offset in held.items()
                            if field.startswith("next:")
                        },
                        "unswept" in held,
                    )
            return Claim(int(token), {**entries, **self._lost(self._tables.keys() - entries)})

    def assign(self, token: int, entries: Mapping[str, Entry]) -> None:
        with self._classified():
            keys, arguments = [self._ledger], [token, orjson.dumps(list(entries))]
            for topic in dict.fromkeys([*self._topics(), *entries]):
                keys.append(self._entry(topic))
                entry = entries.get(topic)
                fields: dict[str, Any] = {}
                if entry is not None:
                    fields = {
                        "topic_id": entry.topic_id,
                        "generation": entry.generation,
                        "partitions": entry.partitions,
                        **({"unswept": 1} if entry.unswept else {}),
                        **{f"next:{p}": offset for p, offset in entry.offsets.items()},
                    }
                arguments.append(2 * len(fields))
                for field, value in fields.items():
                    arguments += [field, value]
            self._check(token, self._run("assign", keys, arguments))

    def write(self, token: int, piece: Slice) -> Written:
        with self._classified():
            entry = self._entry(piece.topic)
            reads = self._client.pipeline(transaction=False)
            reads.hget(self._ledger, "token")
            reads.hmget(entry, "generation", f"next:{piece.partition}")
            current, (generation, reached) = reads.execute()
            self._check(token, current)
            if generation is None:
                raise SinkUnusable(f"{self.name}: the ledger has no entry for {piece.topic}")
            floor = (int(generation) << OFFSET_BITS) + int(reached or 0)
            fresh = [c for c in piece.changes if c.version >= floor]
            sent = self._apply(piece, fresh, self._fence(token))
            if sent is None:
                raise self._fenced(token)
            if piece.next_offset > int(reached or 0) and not sent.refused:
                arguments = [token, f"next:{piece.partition}", piece.next_offset]
                self._check(token, self._run("move", [self._ledger, entry], arguments))
            return sent._replace(stale=sent.stale + len(piece.changes) - len(fresh))

    def repair(self, piece: Slice) -> Written | None:
        with self._classified():
            entry, place = self._entry(piece.topic), f"next:{piece.partition}"
            generation, reached = self._client.hmget(entry, "generation", place)
            if generation is None or int(reached or 0) > piece.next_offset:
                return None
            if any(change.generation != int(generation) for change in piece.changes):
                return None
            ranges = ("generation", int(generation), int(generation)), (place, 0, piece.next_offset)
            passed = piece.before(int(reached or 0))
            done = self._apply(piece, passed, Guard(entry, ranges))
            left = len(piece.changes) - len(passed)
            return done and done._replace(stale=done.stale + left)

    def sweep(self, token: int, topic: str, table: Table) -> int:
        with self._classified():
            generation = self._client.hget(self._entry(topic), "generation")
            self._check(token, self._client.hget(self._ledger, "token"))
            if generation is None:
                raise SinkUnusable(f"{self.name}: the ledger has no entry for {topic}")
            # Above all older generations and below every change of this one.
            version = (int(generation) << OFFSET_BITS) - 1
            swept = sum(
                self._remove(token, keys, version)
                for keys in self._pages(_glob_escaped(self._head(table)) + "*}", "hash")
            )
            keys = [self._ledger, self._entry(topic)]
            self._check(token, self._run("swept", keys, [token, generation]))
            return swept

    def rows(self, table: Table) -> Iterator[tuple[Row, int | None]]:
        """Every row; one that is deleted meanwhile is left out."""
        seen: set[int] = set()  # SCAN may bring a key twice; hashes, because keys can be long
        with self._classified():
            for keys in self._pages(_glob_escaped(self._head(table)) + "*}", "hash"):
                reads = self._client.pipeline(transaction=False)
                for key in dict.fromkeys(key for key in keys if hash(key) not in seen):
                    seen.add(hash(key))
                    reads.hgetall(key)
                for row in reads.execute():
                    if row:
                        version = row.pop(VERSION, None)
                        yield row, None if version is None else int(version)

    def close(self) -> None:
        client = self.__dict__.pop("_client", None)
        if client is not None:
            with suppress(RedisError, RedisClusterException, OSError):
                client.close()

    # The rows.

    def _head(self, table: Table) -> str:
        return table_head(self._settings.key_prefix, table)

    def _apply(self, piece: Slice, changes: Sequence[Change], guard: Guard) -> Written | None:
        """Apply *changes* while *guard* holds; None if it does not, or no longer."""
        head = self._head(piece.table)
        packer = Packer(self._settings)
        applied = self._call(packer, [(row_key(head, c.key), c) for c in changes], guard)
        if applied is None:
            return None
        refused = tuple(Refusal(piece.partition, c.offset, why) for c, why in packer.refused)
        return Written(applied, len(changes) - applied - len(refused), refused)

    def _remove(self, token: int, keys: Sequence[str], version: int) -> int:
        """Remove those of the rows *keys* that are not above *version*; return how many."""
        reads = self._client.pipeline(transaction=False)
        reads.hget(self._ledger, "token")
        for key in keys:
            reads.hget(key, VERSION)
        current, *versions = reads.execute()
        self._check(token, current)
        old = [
            (key, Change((), None, version))
            for key, held in dict(zip(keys, versions, strict=True)).items()
            if held is not None and int(held) <= version
        ]
        removed = self._call(Packer(self._settings), old, self._fence(token))
        if removed is None:
            raise self._fenced(token)
        return removed

    def _call(
        self, packer: Packer, changes: Sequence[tuple[str, Change]], guard: Guard
    ) -> int | None:
        """How many of *changes* were newer than what was held; None if *guard* does not hold."""
        client = self._client
        is_cluster = isinstance(client, RedisCluster)
        if not is_cluster:
            calls = (
                packer.call(changes[at : at + ROWS_PER_CALL], guard)
                for at in range(0, len(changes), ROWS_PER_CALL)
            )
            answers = self._send(client.connection_pool, calls) if changes else []
        else:
            by_node: dict[Any, list[bytes]] = defaultdict(list)
            for key, change in changes:
                # A guard would be in another slot.
                by_node[client.get_node_from_key(key)].append(packer.call([(key, change)], None))
            answers = []
            for node, its_calls in by_node.items():
                pool = client.get_redis_connection(node).connection_pool
                answers += self._send(pool, its_calls)
        return None if -1 in answers else sum(answers)

    def _send(self, pool: Any, calls: Iterable[bytes]) -> list[int]:
        """Send *calls*, packing one while the server works on another; then read all answers."""
        sent, answers = _exchange(pool, calls)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            self._client.script_load(_SCRIPTS["apply"][1])
            lost = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
            _, again = _exchange(pool, [sent[at] for at in lost])
            for at, answer in zip(lost, again, strict=True):
                answers[at] = answer
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise answer
        return answers

    def _pages(self, pattern: str, type_: str | None = None) -> Iterator[list[str]]:
        """The keys that match *pattern*, many at a time; some may come twice."""
        found = self._client.scan_iter(match=pattern, count=KEYS_PER_SCAN, _type=type_)
        while keys := list(islice(found, KEYS_PER_SCAN)):
            yield keys

    # The ledger.

    def _entry(self, topic: str) -> str:
        return f"{self._ledger}:{topic}"

    def _topics(self) -> list[str]:
        topics: list[str] = orjson.loads(self._client.hget(self._ledger, "topics") or "[]")
        return topics

    def _lost(self, topics: Iterable[str]) -> dict[str, Entry]:
        """Entries for those of *topics* whose rows or deletes are here without a ledger.

        No topic has their empty id, so the generation above the highest that is found is opened,
        all is read again, and what the log no longer has is swept.
        """
        topic_of = {self._head(self._tables[topic]): topic for topic in topics}
        if not topic_of:
            return {}
        prefix = self._settings.key_prefix
        entries: dict[str, Entry] = {}
        for keys in self._pages(_glob_escaped(prefix) + "{*"):
            # No colon is in a head but the one at its end.
            found = [(topic_of.get(k[: k.find(":", len(prefix)) + 1]), k) for k in keys]
            mine = [(topic, key) for topic, key in found if topic is not None]
            for (topic, _), version in zip(mine, self._versions([k for _, k in mine]), strict=True):
                generation = version >> OFFSET_BITS
                if generation > (entries[topic].generation if topic in entries else 0):
                    entries[topic] = Entry("", generation, 0)
        return entries

    def _versions(self, keys: Sequence[str]) -> list[int]:
        """The versions of rows and tombstones; 0 for what is not ours."""
        reads = self._client.pipeline(transaction=False)
        for key in keys:
            if key.endswith("}"):
                reads.hget(key, VERSION)
            else:
                reads.get(key)
        versions = []
        for key, found in zip(keys, reads.execute(raise_on_error=False), strict=True):
            if isinstance(found, ResponseError) and answer_code(found) != "WRONGTYPE":
                raise found
            is_ours = key.endswith(("}", tombstone_key("}"))) and isinstance(found, str)
            versions.append(int(found) if is_ours and found.isdecimal() else 0)
        return versions

    def _fence(self, token: int) -> Guard:
        return Guard(self._ledger, (("token", token, token),))

    def _fenced(self, token: int) -> SinkError:
        try:
            self._check(token, self._client.hget(self._ledger, "token"))
        except SinkError as error:
            return error
        return SinkUnavailable(f"{self.name}: the ledger {self._ledger} has changed")

    def _check(self, token: int, current: str | None) -> None:
        if not current:
            raise SinkUnavailable(f"{self.name}: the ledger {self._ledger} is gone", hint=_REFILL)
        if int(current) != token:
            raise SinkFenced(f"{self.name}: token {token} is old, {current} has taken over")

    def _run(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        digest, text = _SCRIPTS[name]
        try:
            return self._client.evalsha(digest, len(keys), *keys, *arguments)
        except NoScriptError:
            self._client.script_load(text)
            return self._client.evalsha(digest, len(keys), *keys, *arguments)

    # The errors.

    @contextmanager
    def _classified(self) -> Iterator[None]:
        """Only errors of cdc get out. An answer's own text stays here: it may quote a row."""
        url = self._settings.url
        try:
            yield
        except (AuthenticationError, AuthenticationWrongNumberOfArgsError):
            raise SinkUnusable(
                f"{self.name}: {url} does not accept the credentials",
                hint="check user and password",
            ) from None
        except NoPermissionError:
            raise SinkUnusable(
                f"{self.name}: {url} refuses a command or a key to this user", hint=_RIGHTS
            ) from None
        except RedisTimeoutError as error:
            raise SinkUnavailable(
                f"{self.name}: {url} did not answer within {self._settings.timeout:g} s",
                hint="is the server overloaded, or held up by a slow command?",
            ) from error
        except ResponseError as error:
            raise self._answer_error(error) from None
        except (RedisConnectionError, RedisClusterException) as error:
            what = "refused" if isinstance(error.__context__, ConnectionRefusedError) else "broke"
            raise SinkUnavailable(
                f"{self.name}: {url} {what} the connection",
                hint="is Redis up, and is the url right?",
            ) from error
        except RedisError as error:
            raise SinkUnusable(f"{self.name}: {url}: {type(error).__name__}") from None

    def _answer_error(self, error: ResponseError) -> SinkError:
        code = answer_code(error)
        message = f"{self.name}: {self._settings.url} answered {code}"
        if code in _PASSING:
            return SinkUnavailable(message, hint=_PASSING[code])
        if code == "WRONGTYPE":
            return SinkUnusable(
                message, hint="another program uses keys of this sink: set a key_prefix"
            )
        return SinkUnusable(message)


def answer_code(error: ResponseError) -> str:
    """The code of a server's error. A script's error has the code of the failed command inside."""
    for kind, code in _CODE_OF_TYPE.items():  # the client cuts the code from these
        if isinstance(error, kind):
            return code
    text = str(error)
    found = re.search(r"@user_script: ?\d+: -?([A-Z]+)\b", text) or re.match(r"-?([A-Z]+)\b", text)
    return found[1] if found else "ERR"


def _exchange(pool: Any, calls: Iterable[bytes]) -> tuple[list[bytes], list[Any]]:
    """Send every call, then read every answer; an error that the server answers is an answer."""
    connection = pool.get_connection()
    sent: list[bytes] = []
    answers: list[Any] = []
    try:
        for call in calls:
            connection.send_packed_command([call], check_health=False)
            sent.append(call)
        for _ in sent:
            try:
                answers.append(connection.read_response())
            except ResponseError as error:
                answers.append(error)
    except BaseException:
        connection.disconnect()  # an answer that was not read must not meet another question
        raise
    finally:
        pool.release(connection)
    return sent, answers


def _is_cluster(client: Any) -> bool:
    try:
        hello = client.execute_command("HELLO")
    except ResponseError:  # an older server or a proxy: one address for all keys
        return False
    return "cluster" in (hello.values() if isinstance(hello, dict) else hello)
