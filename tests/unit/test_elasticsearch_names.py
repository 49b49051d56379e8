"""Names, ids and bulk lines for Elasticsearch: pure."""

import json
import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.change import Change, Column, Table, version_of
from sinks import elasticsearch, types
from sinks.elasticsearch import alias_name, bulk_body, document_id

NAMES = st.text(min_size=1, max_size=63).filter(lambda name: len(name.encode()) <= 63)
NEAR = st.text(alphabet="aA-_.~01", min_size=1, max_size=5)
PLACES = st.tuples(NAMES | NEAR, NAMES | NEAR)


def alias_of(schema, name, prefix=""):
    return alias_name(prefix, Table(schema, name, (), ()))


@given(PLACES, PLACES)
def test_alias_belongs_to_one_table(one, other):
    """Two tables never share an alias, nor is an alias the numbered index of another table."""
    assert (alias_of(*one) == alias_of(*other)) == (one == other)
    assert alias_of(*one) != f"{alias_of(*other)}-000001"


@given(PLACES)
def test_alias_is_legal(place):
    """An index may have the name: lower case, no forbidden sign, no leading _ - + or dot."""
    name = f"{alias_of(*place)}-000001~write"
    assert re.fullmatch(r"[a-z0-9~][a-z0-9_.~-]*", name)
    assert len(name) + 60 <= 255


def test_alias_is_readable():
    """An ordinary table has the name that one would guess."""
    assert alias_of("public", "order_lines", "shop-") == "shop-public.order_lines"


def test_document_id_of_a_long_key_is_a_digest():
    """Beyond 512 bytes the id is a digest, different for keys that differ at the very end."""
    short, one, other = (("x" * 508,), ("é" * 255 + "a",), ("é" * 255 + "b",))
    assert document_id(short) == f'["{short[0]}"]'
    assert document_id(one) != document_id(other)
    assert document_id(one).startswith("sha256:")


def test_rewritten_kinds_are_those_of_the_type_table():
    """The fast path leaves alone exactly the kinds that document_value leaves alone."""
    assert set(types._DOCUMENT) == elasticsearch._REWRITTEN


def test_bulk_body_carries_versions_and_whole_rows():
    """Every line has id and external version; JSON goes in as JSON; a delete has no document."""
    table = Table("public", "t", (Column("id", "integer"), Column("j", "jsonb")), ("id",))
    changes = (
        Change((1,), {"id": 1, "j": '{"a": 1.10}'}, version_of(1, 7)),
        Change(("a", 2), None, version_of(1, 8)),
    )
    body, unwritable = bulk_body(table, changes)
    index, document, delete, end = body.split(b"\n")
    meta = {"version": version_of(1, 7), "version_type": "external"}
    assert orjson.loads(index) == {"index": {"_id": "1", **meta}}
    assert document == b'{"id":1,"j":{"a": 1.10}}'
    assert orjson.loads(delete)["delete"]["_id"] == '["a",2]'
    assert end == b""
    assert unwritable == []


@given(st.recursive(st.none() | st.booleans() | st.integers(0, 9) | st.text(), st.lists))
def test_jsonb_goes_in_as_document_value_has_it(tree):
    """The short way for jsonb writes what the type table writes."""
    text = json.dumps(tree)
    short, long = elasticsearch._jsonb(text), types.document_value("jsonb", text)
    assert orjson.dumps([short]) == orjson.dumps([long])


@pytest.mark.parametrize("pg_type", ["json", "jsonb", "json[]"])
def test_bulk_body_keeps_a_document_on_one_line(pg_type):
    """JSON with line breaks between its tokens does not break the lines of the request."""
    table = Table("public", "t", (Column("j", pg_type),), ("j",))
    text = '{\n  "a": "x\\n",\r\n  "b": [1,\n2]}'
    value = [text] if pg_type.endswith("[]") else text
    body, _ = bulk_body(table, (Change((1,), {"j": value}, version_of(1, 7)),))
    assert body.count(b"\n") == 2
    found = orjson.loads(body.split(b"\n")[1])["j"]
    assert found in ({"a": "x\n", "b": [1, 2]}, [{"a": "x\n", "b": [1, 2]}])


def test_bulk_body_leaves_out_what_json_cannot_hold():
    """A value that is not what its type promises is told apart, and the other rows stay whole."""
    table = Table("public", "t", (Column("id", "integer"), Column("j", "jsonb")), ("id",))
    good, broken = (
        Change((n,), {"id": n, "j": text}, version_of(1, n)) for n, text in ((1, "{}"), (2, "{x"))
    )
    body, unwritable = bulk_body(table, (good, broken))
    assert unwritable == [broken]
    assert body == bulk_body(table, (good,))[0]
