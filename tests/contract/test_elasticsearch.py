"""What only Elasticsearch does: aliases, index UUIDs, its ledger, its own errors."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from uuid import uuid4

import pytest
from elasticsearch import Elasticsearch
from pydantic import SecretStr, ValidationError

from cdc.change import Change, Column, Slice, Table, version_of
from cdc.errors import SinkBusy, SinkFenced, SinkUnavailable, SinkUnusable
from cdc.sink import Entry, Refusal, Written
from sinks import elasticsearch
from sinks.elasticsearch import ElasticsearchSettings, ElasticsearchSink

pytestmark = pytest.mark.needs("elasticsearch")

TOPIC = "shop.public.orders"
COLUMNS = (Column("id", "text"), Column("amount", "integer"), Column("extra", "jsonb"))
TABLE = Table("public", "orders", COLUMNS, ("id",))


def upsert(key, offset, generation=1, **row):
    return Change((key,), {"id": key, **row}, version_of(generation, offset))


def delete(key, offset):
    return Change((key,), None, version_of(1, offset))


def piece(*changes, next_offset=None, partition=0):
    end = max((change.offset for change in changes), default=-1) + 1
    return Slice(TABLE, TOPIC, partition, next_offset or end, changes)


def opened(sink, table=TABLE, entry=None):
    """Claim and assign, as the driver does; the token."""
    sink.prepare({TOPIC: table})
    claim = sink.claim()
    sink.assign(claim.token, {TOPIC: entry or claim.entries.get(TOPIC) or Entry("life-1", 1, 2)})
    return claim.token


def held(sink):
    return {row["id"]: version for row, version in sink.rows(TABLE)}


@pytest.fixture
def server(stack):
    with Elasticsearch(stack["CDC_ES_URL"], request_timeout=60) as client:
        yield client


@pytest.fixture
def settings(stack, server):
    prefix = f"t{uuid4().hex}-"
    yield ElasticsearchSettings(
        name="search",
        type="elasticsearch",
        url=stack["CDC_ES_URL"],
        index_prefix=prefix,
        replicas=0,
        timeout="60s",
    )
    for index in server.indices.get(index=f"{prefix}*", expand_wildcards="all"):
        server.indices.delete(index=index)


@pytest.fixture
def sink(settings):
    sink = ElasticsearchSink(settings)
    yield sink
    sink.close()


@pytest.fixture
def index(settings):
    return f"{settings.index_prefix}public.orders-000001"


def test_table_is_served_by_an_alias(sink, settings, index, server):
    """Readers see one alias; the numbered index behind it has our settings and mapping."""
    sink.prepare({TOPIC: TABLE})
    found = server.indices.get(index=f"{settings.index_prefix}public.orders")[index]
    assert found["aliases"] == {
        f"{settings.index_prefix}public.orders": {},
        f"{index}~write": {"is_hidden": True},
    }
    assert found["settings"]["index"]["gc_deletes"] == "3600000ms"
    assert found["mappings"]["dynamic"] == "false"
    assert found["mappings"]["properties"]["amount"] == {"type": "integer"}


def test_prepare_adds_the_fields_of_new_columns(sink, index, server):
    """A column that the source has got since is searchable after the next prepare."""
    sink.prepare({TOPIC: TABLE})
    wider = Table("public", "orders", (*COLUMNS, Column("city", "character varying")), ("id",))
    token = opened(sink, wider)
    sink.write(token, piece(upsert("a", 1, city="Oslo")))
    server.indices.refresh(index=index)
    assert server.count(index=index, query={"term": {"city": "Oslo"}})["count"] == 1


def test_prepare_restores_what_an_index_lacks(sink, index, server):
    """An index that came back without our alias or setting gets them again."""
    sink.prepare({TOPIC: TABLE})
    server.indices.delete_alias(index=index, name=f"{index}~write")
    server.indices.put_settings(index=index, settings={"index.gc_deletes": "60s"})
    token = opened(sink)
    assert sink.write(token, piece(upsert("a", 1))) == Written(1, 0)
    state = server.indices.get_settings(index=index)[index]["settings"]["index"]
    assert state["gc_deletes"] == "3600000ms"


def test_prepare_refuses_an_alias_of_two_indices(sink, settings, index, server):
    """Which of two indices should be written is not ours to guess."""
    sink.prepare({TOPIC: TABLE})
    alias = f"{settings.index_prefix}public.orders"
    server.indices.create(index=f"{alias}-000002", aliases={alias: {}})
    with pytest.raises(SinkUnusable, match="exactly one index"):
        sink.prepare({TOPIC: TABLE})


def test_prepare_names_an_index_that_lost_its_alias(sink, settings, index, server):
    """An index without its alias is neither adopted nor overwritten."""
    sink.prepare({TOPIC: TABLE})
    server.indices.delete_alias(index=index, name=f"{settings.index_prefix}public.orders")
    with pytest.raises(SinkUnusable, match="not behind the alias"):
        sink.prepare({TOPIC: TABLE})


def test_recreated_index_has_no_entry(sink, index, server):
    """The ledger of an index that was deleted says nothing of the one that took its place."""
    token = opened(sink)
    sink.write(token, piece(upsert("a", 1)))
    assert sink.claim().entries[TOPIC].offsets == {0: 2}
    server.indices.delete(index=index)
    sink.prepare({TOPIC: TABLE})
    assert sink.claim().entries == {}


def test_recreated_index_stops_the_writer(sink, index, server, monkeypatch):
    """A running writer does not go on in an index that lacks the rows: it must open again."""
    monkeypatch.setattr(elasticsearch, "CHECK_EVERY_S", 0.0)
    token = opened(sink)
    sink.write(token, piece(upsert("a", 1)))
    server.indices.delete(index=index)
    with pytest.raises(SinkUnavailable, match="deleted or replaced"):
        sink.write(token, piece(upsert("b", 2)))
    sink.prepare({TOPIC: TABLE})
    with pytest.raises(SinkUnavailable, match="deleted or replaced"):
        sink.write(token, piece(upsert("b", 2)))
    token = opened(sink)
    assert sink.write(token, piece(upsert("a", 1), upsert("b", 2))) == Written(2, 0)


def test_write_does_not_create_a_deleted_index(sink, index, server):
    """Even when the index goes between the check and the bulk, the bulk does not bring it back."""
    opened(sink)
    server.indices.delete(index=index)
    with pytest.raises(SinkUnavailable, match="deleted or replaced"):
        sink._bulk(piece(upsert("a", 1)), index, [upsert("a", 1)])
    assert not server.indices.get(index=f"{index}*", expand_wildcards="all").body


def test_swapped_alias_has_no_entry(sink, settings, index, server):
    """The ledger belongs to the index that was written, not to the alias."""
    token = opened(sink)
    sink.write(token, piece(upsert("a", 1)))
    alias = f"{settings.index_prefix}public.orders"
    server.indices.create(index=f"{alias}-000002")
    server.indices.update_aliases(
        actions=[
            {"remove": {"index": index, "alias": alias}},
            {"add": {"index": f"{alias}-000002", "alias": alias}},
        ]
    )
    assert sink.claim().entries == {}


def test_rows_outlive_a_lost_ledger(sink, settings, server):
    """Without a ledger all is read again, and never under a generation below the rows' own."""
    token = opened(sink, entry=Entry("life-3", 3, 2))
    sink.write(token, piece(upsert("a", 1, generation=3)))
    server.indices.delete(index=f"{settings.index_prefix}cdc-ledger")
    with pytest.raises(SinkUnavailable, match="is gone"):
        sink.write(token, piece(upsert("a", 2, generation=3)))
    again = ElasticsearchSink(settings)
    again.prepare({TOPIC: TABLE})
    claim = again.claim()
    again.close()
    assert claim.entries == {TOPIC: Entry("life-3", 3, 2)}
    assert claim.token >= token


def test_ledger_that_is_older_than_the_rows_does_not_count(sink, settings, index, server):
    """After a ledger was taken back over two generations, no version below the rows' is opened."""
    token = opened(sink, entry=Entry("life-1", 1, 2))
    ledger = f"{settings.index_prefix}cdc-ledger"
    before = server.get(index=ledger, id="search")["_source"]
    sink.assign(token, {TOPIC: Entry("life-3", 3, 2)})
    sink.write(token, piece(upsert("a", 1, generation=3)))
    server.index(index=ledger, id="search", document=before)
    assert sink.claim().entries == {TOPIC: Entry("life-3", 3, 2)}


def test_note_in_the_index_follows_every_assign(sink, settings, server):
    """The generation that a lost ledger leaves behind is that of the last assign, not the first."""
    token = opened(sink, entry=Entry("life-1", 1, 2))
    for entry in (Entry("life-2", 2, 2, unswept=True), Entry("life-1", 1, 2)):
        sink.assign(token, {TOPIC: entry})
    sink.assign(token, {TOPIC: Entry("life-2", 2, 2, unswept=True)})
    server.indices.delete(index=f"{settings.index_prefix}cdc-ledger")
    claim = sink.claim()
    assert claim.entries == {TOPIC: Entry("life-2", 2, 2, unswept=True)}
    sink.assign(claim.token, claim.entries)
    sink.sweep(claim.token, TOPIC, TABLE)
    server.indices.delete(index=f"{settings.index_prefix}cdc-ledger")
    assert sink.claim().entries == {TOPIC: Entry("life-2", 2, 2)}


def test_ledger_from_before_sweeps_reads_as_swept(sink, settings, server):
    """An older ledger and an older note have nothing to say of sweeps."""
    opened(sink)
    ledger = f"{settings.index_prefix}cdc-ledger"
    document = server.get(index=ledger, id="search")["_source"]
    del document["topics"][TOPIC]["unswept"]
    server.index(index=ledger, id="search", document=document)
    assert sink.claim().entries == {TOPIC: Entry("life-1", 1, 2)}


def test_sweep_stops_between_two_bulks_when_it_is_fenced(sink, settings, monkeypatch):
    """A sweep that takes long looks at the token again before each of its deletes."""
    monkeypatch.setattr(elasticsearch, "DELETES_PER_BULK", 2)
    token = opened(sink)
    sink.write(token, piece(*(upsert(str(n), n) for n in range(6))))
    sink.assign(token, {TOPIC: Entry("life-2", 2, 2, unswept=True)})
    other, delete = ElasticsearchSink(settings), sink._delete

    def overtaken(*arguments):
        other.claim()
        return delete(*arguments)

    monkeypatch.setattr(sink, "_delete", overtaken)
    with pytest.raises(SinkFenced):
        sink.sweep(token, TOPIC, TABLE)
    assert len(held(sink)) == 4
    assert other.claim().entries[TOPIC].unswept
    other.close()


def test_assign_takes_a_partition_back(sink):
    """Offsets that were reached before an assign do not count after it."""
    token = opened(sink)
    sink.write(token, piece(upsert("a", 1)))
    sink.assign(token, {TOPIC: Entry("life-1", 1, 2)})
    assert sink.claim().entries[TOPIC].offsets == {}


def test_late_writer_cannot_move_the_ledger(sink, settings):
    """A writer whose ledger was set anew during its bulk does not undo that."""
    token = opened(sink)
    before = sink._ledger.place(token, TOPIC, 0)
    other = ElasticsearchSink(settings)
    newer = opened(other, entry=Entry("life-2", 2, 2))
    other.write(newer, piece(upsert("a", 0, generation=2)))
    with pytest.raises(SinkFenced):
        sink._ledger.move(token, before, 99)
    assert other.claim().entries[TOPIC] == Entry("life-2", 2, 2, {0: 1})
    other.close()


def test_two_slices_of_a_partition_meet_and_the_later_one_stays(sink):
    """A lost race for a partition's line is run again, and the line never moves back."""
    token = opened(sink)
    before = sink._ledger.place(token, TOPIC, 0)
    sink.write(token, piece(upsert("a", 5)))
    sink._ledger.move(token, before, 3)
    assert sink.claim().entries[TOPIC].offsets == {0: 6}
    sink._ledger.move(sink.claim().token, before, 9)
    assert sink.claim().entries[TOPIC].offsets == {0: 9}


def test_replay_is_not_sent(sink, index, server):
    """Below the ledger's next offset nothing is written, not even a row that somebody removed."""
    token = opened(sink)
    sink.write(token, piece(upsert("a", 1)))
    server.delete(index=index, id='["a"]')
    assert sink.write(token, piece(upsert("a", 1))) == Written(0, 1)
    assert held(sink) == {}


def test_delete_of_a_missing_row_keeps_its_version(sink):
    """A delete that finds nothing is applied, and keeps an older upsert out."""
    token = opened(sink)
    assert sink.write(token, piece(delete("a", 5))) == Written(1, 0)
    assert sink.write(token, piece(upsert("a", 4), partition=1)) == Written(0, 1)
    assert held(sink) == {}


def test_long_keys_stay_apart(sink):
    """Keys beyond the limit of an id are written, kept apart, and deleted."""
    token = opened(sink)
    one, other = "é" * 400 + "a", "é" * 400 + "b"
    assert sink.write(token, piece(upsert(one, 1), upsert(other, 2))) == Written(2, 0)
    assert sink.write(token, piece(delete(one, 3))) == Written(1, 0)
    assert held(sink) == {other: version_of(1, 2)}


def test_rows_goes_on_beyond_a_page(sink, monkeypatch):
    """Reading page by page brings each row once, digit for digit."""
    monkeypatch.setattr(elasticsearch, "HITS_PER_PAGE", 3)
    token = opened(sink)
    extra = '{"n":1.10,"big":12345678901234567890.5}'
    sink.write(token, piece(*(upsert(str(n), n, extra=extra) for n in range(9))))
    rows = [row for row, _ in sink.rows(TABLE)]
    assert sorted(row["id"] for row in rows) == [str(n) for n in range(9)]
    assert {row["extra"] for row in rows} == {extra}


def test_row_written_before_the_check_is_not_lost(sink, index, server, monkeypatch):
    """What got into a recreated index unnoticed does not count: the next claim begins anew."""
    monkeypatch.setattr(elasticsearch, "CHECK_EVERY_S", 3600.0)
    token = opened(sink)
    sink.write(token, piece(upsert("a", 1)))
    server.indices.delete(index=index)
    sink.prepare({TOPIC: TABLE})
    sink.write(token, piece(upsert("b", 2)))
    token = opened(sink)
    sink.write(token, piece(upsert("a", 1), upsert("b", 2)))
    assert held(sink) == {"a": version_of(1, 1), "b": version_of(1, 2)}


def test_refused_document_is_named_and_not_quoted(sink):
    """A value that the mapping cannot take: the error's type and the column, and no value."""
    token = opened(sink)
    bad = piece(
        upsert("a", 1, amount=1),
        upsert("planted", 2, amount="planted field [id]"),
        upsert("b", 3, amount=1 << 40),
        upsert("c", 4, extra="{planted"),
    )
    assert sink.write(token, bad) == Written(0, 0, (Refusal(0, 4, "cannot be written as JSON"),))
    bad = piece(*bad.changes[:3])
    reason = "document_parsing_exception, column amount"
    assert sink.write(token, bad) == Written(1, 0, (Refusal(0, 2, reason), Refusal(0, 3, reason)))
    assert sink.write(token, bad) == Written(0, 1, (Refusal(0, 2, reason), Refusal(0, 3, reason)))
    assert sink.write(token, piece(bad.changes[0], next_offset=4)) == Written(0, 1)
    assert sink.claim().entries[TOPIC].offsets == {0: 4}


def test_refusal_of_all_documents_stops(sink, index, server):
    """What is wrong with the index, and not with a document, is no reason to leave rows out."""
    token = opened(sink)
    sink.write(token, piece(upsert("a", 1)))
    server.indices.close(index=index)
    with pytest.raises(SinkUnusable, match="400 index_closed_exception for offset 2"):
        sink.write(token, piece(upsert("b", 2)))


def test_full_disk_is_busy(sink, index, server):
    """The server's answer at its flood stage, item by item: busy, and the ledger stays."""
    token = opened(sink)
    settings = {"index.blocks.read_only_allow_delete": True}
    server.indices.put_settings(index=index, settings=settings)
    with pytest.raises(SinkBusy, match="429 cluster_block_exception for offset 1"):
        sink.write(token, piece(upsert("a", 1)))
    assert sink.claim().entries[TOPIC].offsets == {}


def test_forbidden_write_stops(sink, index, server):
    """What is not on the short list is not retried: it stops the sink with a hint."""
    token = opened(sink)
    server.indices.put_settings(index=index, settings={"index.blocks.write": True})
    with pytest.raises(SinkUnusable, match="403 cluster_block_exception") as caught:
        sink.write(token, piece(upsert("a", 1)))
    assert "rights" in caught.value.hint


def test_too_large_a_request_is_cut_until_one_row_is_left(sink):
    """Two rows beyond the server's 100 MiB come again in halves; one alone can never be taken."""
    token = opened(sink)
    large = upsert("a", 1, note="x" * (100 << 20))
    with pytest.raises(SinkBusy, match="too large"):
        sink.write(token, piece(large, upsert("b", 2)))
    assert sink.write(token, piece(large)) == Written(0, 0, (Refusal(0, 1, "too large"),))
    assert sink.claim().entries[TOPIC].offsets == {}
    assert held(sink) == {}


def test_claims_at_once_get_different_tokens(sink, settings):
    """Two drivers that start together never hold the same token."""
    sink.prepare({TOPIC: TABLE})

    def claim(_):
        sink = ElasticsearchSink(settings)
        try:
            return sink.claim().token
        finally:
            sink.close()

    with ThreadPoolExecutor(6) as pool:
        tokens = list(pool.map(claim, range(18)))
    assert len(set(tokens)) == 18


def test_write_needs_an_entry(sink):
    """Rows of a topic that was never assigned are refused."""
    sink.prepare({TOPIC: TABLE})
    token = sink.claim().token
    with pytest.raises(SinkUnusable, match="no entry"):
        sink.write(token, piece(upsert("a", 1)))
    with pytest.raises(SinkUnusable, match="not prepared"):
        sink.assign(token, {"another": Entry("life-1", 1, 1)})


def test_closed_port_is_unavailable(settings):
    """Nobody listens: one sentence with the address, to be retried."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can take it
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        sink = ElasticsearchSink(settings.model_copy(update={"url": url}))
        with pytest.raises(SinkUnavailable, match=f"{url} refused the connection"):
            sink.claim()
        sink.close()


def test_deaf_server_is_unavailable(settings):
    """A server that takes the connection and says nothing does not hold the sink for ever."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        sink = ElasticsearchSink(settings.model_copy(update={"url": url, "timeout": 0.2}))
        with pytest.raises(SinkUnavailable, match=r"did not answer within 0\.2 s"):
            sink.claim()
        sink.close()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, SinkUnusable),
        (403, SinkUnusable),
        (400, SinkUnusable),
        (429, SinkBusy),
        (503, SinkUnavailable),
    ],
)
def test_answers_are_classified_by_status(settings, status, kind):
    """Busy is retried, all else stops; neither the reason nor a secret gets into the message."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = b'{"error":{"type":"some_exception","reason":"planted-reason"}}'
            self.send_response(status)
            self.send_header("X-Elastic-Product", "Elasticsearch")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_POST = do_GET  # noqa: N815 - the names that http.server looks for

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as answering:
        Thread(target=answering.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{answering.server_port}"
        update = {"url": url, "user": "u", "password": SecretStr("planted-secret")}
        sink = ElasticsearchSink(settings.model_copy(update=update))
        with pytest.raises(kind) as caught:
            sink.write(1, piece(upsert("a", 1)))
        sink.close()
        answering.shutdown()
    assert "planted" not in f"{caught.value}{caught.value.hint}"
    assert caught.value.hint or status == 400


@pytest.mark.parametrize(
    "wrong",
    [
        {"index_prefix": "Shop"},
        {"index_prefix": "_a"},
        {"url": "http://u:p@h:9200"},
        {"refresh_interval": "often"},
    ],
)
def test_settings_refuse_what_cannot_work(wrong):
    """An address or a prefix that could not work is refused with the configuration."""
    with pytest.raises(ValidationError):
        ElasticsearchSettings(name="search", type="elasticsearch", **wrong)
