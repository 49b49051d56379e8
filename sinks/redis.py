"""Redis: one hash per row, replaced as a whole by a script that compares versions.

A row is the hash `<prefix>{<schema>.<table>:<key>}`: a field per column that is not NULL, as text,
and `__cdc_version`. A deleted row leaves its version at `<row>:gone` for `tombstone_ttl`. Both
share one hash tag, so they live in one slot of a Redis Cluster.

The ledger of a sink is the hash `<prefix>cdc:ledger:{<sink>}` with the token and the list of
topics, and beside it one hash per topic. Rows and ledger are as durable as Redis is set up to be;
the ledger is written after the rows, so what a crash or a fail-over loses, it loses from the end.

On a standalone server one call applies many rows, and the script sees the token. In a Cluster every
row is a call of its own, and the token is checked before and after.
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
from typing import Any, Literal
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
from cdc.sink import Claim, Entry, Written

VERSION = "__cdc_version"
VERSION_DIGITS = 19  # of 2^63: one width, so that the order as text is the order as numbers
# The server does nothing else during a call: 200 rows are about 2 ms, and more gain nothing.
ROWS_PER_CALL = 200
KEYS_PER_SCAN = 1_000

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


_SCRIPTS = {name: _script(name) for name in ("apply", "claim", "assign", "move")}


def _bulk(raw: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(raw), raw)


class _Fields(dict[str, bytes]):
    """Column names, packed once."""

    def __missing__(self, name: str) -> bytes:
        packed = self[name] = _bulk(name.encode())
        return packed


class Packer:
    """Calls of the apply script for one table, as the bytes that go to the server.

    The client's own packing takes four times as long as Redis needs for the rows.
    """

    def __init__(self, settings: RedisSettings, table: Table) -> None:
        self.head = table_head(settings.key_prefix, table)
        self._table = table.full_name
        self._ttl = b"%d" % (settings.tombstone_ttl * 1000)
        self._fields = _Fields()

    def call(self, changes: Sequence[Change], fence: tuple[str, int] | None) -> bytes:
        """One call for *changes*; *fence* is the ledger's key and the token."""
        keys: list[bytes] = []
        arguments: list[bytes] = [_bulk(b"%d" % fence[1] if fence else b""), _bulk(self._ttl)]
        if fence:
            keys.append(_bulk(fence[0].encode()))
        key_count = len(keys) + 2 * len(changes)
        argument_count = 2 + 2 * len(changes)
        for change in changes:
            row = row_key(self.head, change.key).encode()
            keys.append(b"$%d\r\n%b\r\n$%d\r\n%b:gone\r\n" % (len(row), row, len(row) + 5, row))
            if change.row is None:
                arguments.append(b"$%d\r\n%b\r\n$2\r\n-1\r\n" % (VERSION_DIGITS, _version(change)))
                continue
            fields = self._packed(change)
            argument_count += len(fields)
            count = _bulk(b"%d" % len(fields))
            arguments.append(b"$%d\r\n%b\r\n%b" % (VERSION_DIGITS, _version(change), count))
            arguments += fields
        return b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n%b%b%b" % (
            3 + key_count + argument_count,
            _SCRIPTS["apply"][0].encode(),
            _bulk(b"%d" % key_count),
            b"".join(keys),
            b"".join(arguments),
        )

    def _packed(self, change: Change) -> list[bytes]:
        """Names and values by turns; text as it is, all else as JSON, NULL not at all."""
        packed: list[bytes] = []
        fields = self._fields
        assert change.row is not None
        try:
            for name, value in change.row.items():
                if value is None:
                    continue
                raw = value.encode() if type(value) is str else orjson.dumps(value)
                packed.append(fields[name])
                packed.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
        except (TypeError, ValueError):
            raise SinkUnusable(
                f"{self._table}: the row at offset {change.offset} cannot be written as text",
                hint="look at that record in the log; mend the row at the source",
            ) from None
        return packed


def _version(change: Change) -> bytes:
    return b"%0*d" % (VERSION_DIGITS, change.version)


class RedisSink:
    def __init__(self, settings: RedisSettings) -> None:
        self.name = settings.name
        self._settings = settings
        self._ledger = f"{settings.key_prefix}cdc:ledger:{{{settings.name}}}"

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

    def claim(self) -> Claim:
        with self._classified():
            # Not less than the time: a ledger that was lost must not hand out a token twice.
            token = self._run("claim", [self._ledger], [int(time.time())])
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
                    )
            return Claim(int(token), entries)

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
            # Of another generation the ledger says nothing: there the version guard decides.
            first = int(generation) << OFFSET_BITS
            floor = first + int(reached or 0)
            fresh = [c for c in piece.changes if not first <= c.version < floor]
            applied = self._apply(token, piece.table, fresh) if fresh else 0
            if piece.next_offset > int(reached or 0):
                arguments = [token, f"next:{piece.partition}", piece.next_offset]
                self._check(token, self._run("move", [self._ledger, entry], arguments))
            return Written(applied, len(piece.changes) - applied)

    def rows(self, table: Table) -> Iterator[tuple[Row, int | None]]:
        """Every row; one that is deleted meanwhile is left out."""
        head = table_head(self._settings.key_prefix, table)
        seen: set[int] = set()  # SCAN may bring a key twice; hashes, because keys can be long
        with self._classified():
            keys: list[str] = []
            pattern = _glob_escaped(head) + "*}"
            for key in self._client.scan_iter(match=pattern, count=KEYS_PER_SCAN, _type="hash"):
                if hash(key) not in seen:
                    seen.add(hash(key))
                    keys.append(key)
                if len(keys) == KEYS_PER_SCAN:
                    yield from self._hashes(keys)
                    keys = []
            yield from self._hashes(keys)

    def close(self) -> None:
        client = self.__dict__.pop("_client", None)
        if client is not None:
            with suppress(RedisError, RedisClusterException, OSError):
                client.close()

    # The rows.

    def _apply(self, token: int, table: Table, changes: Sequence[Change]) -> int:
        """Apply *changes*; return how many were newer than what was held."""
        client = self._client
        is_cluster = isinstance(client, RedisCluster)
        packer = Packer(self._settings, table)
        if not is_cluster:
            fence = self._ledger, token
            calls = (
                packer.call(changes[at : at + ROWS_PER_CALL], fence)
                for at in range(0, len(changes), ROWS_PER_CALL)
            )
            answers = self._send(client.connection_pool, calls)
        else:
            by_node: dict[Any, list[bytes]] = defaultdict(list)
            for change in changes:
                node = client.get_node_from_key(row_key(packer.head, change.key))
                by_node[node].append(packer.call([change], None))
            answers = []
            for node, its_calls in by_node.items():
                pool = client.get_redis_connection(node).connection_pool
                answers += self._send(pool, its_calls)
        if -1 in answers:
            self._check(token, self._client.hget(self._ledger, "token"))
        return sum(answers)

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

    def _hashes(self, keys: Sequence[str]) -> Iterator[tuple[Row, int | None]]:
        reads = self._client.pipeline(transaction=False)
        for key in keys:
            reads.hgetall(key)
        for row in reads.execute():
            if row:
                version = row.pop(VERSION, None)
                yield row, None if version is None else int(version)

    # The ledger.

    def _entry(self, topic: str) -> str:
        return f"{self._ledger}:{topic}"

    def _topics(self) -> list[str]:
        topics: list[str] = orjson.loads(self._client.hget(self._ledger, "topics") or "[]")
        return topics

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
