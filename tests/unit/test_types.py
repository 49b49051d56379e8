"""The type table: each value keeps its meaning in every form it takes."""

from __future__ import annotations

import base64
import json
import math
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinks.types import (
    MAX_KEYWORD,
    Kind,
    canonical,
    copy_text,
    delta_column,
    document_value,
    elasticsearch_field,
    from_document,
    kind,
    parse,
    postgres_column,
    postgres_read_cast,
)

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@pytest.mark.parametrize(
    ("pg_type", "postgres", "delta", "elasticsearch"),
    [
        ("smallint", "smallint", "smallint", "short"),
        ("integer", "integer", "int", "integer"),
        ("bigint", "bigint", "bigint", "long"),
        ("numeric(12,2)", "numeric", "decimal(12,2)", "double"),
        ("numeric(5)", "numeric", "decimal(5,0)", "double"),
        ("numeric(5,-2)", "numeric", "decimal(7,0)", "double"),
        ("numeric(3,5)", "numeric", "decimal(5,5)", "double"),
        ("numeric(39,2)", "numeric", "string", "double"),
        ("numeric", "numeric", "string", "double"),
        ("money", "numeric", "string", "double"),
        ("real", "real", "float", "float"),
        ("double precision", "double precision", "double", "double"),
        ("boolean", "boolean", "boolean", "boolean"),
        ("text", "text", "string", "text"),
        ("character varying(20)", "character varying", "string", "keyword"),
        ("character(5)", "bpchar", "string", "keyword"),
        ("uuid", "uuid", "string", "keyword"),
        ("bytea", "bytea", "binary", "binary"),
        ("date", "date", "string", "date"),
        ("time(3) without time zone", "time without time zone", "string", "keyword"),
        ("timestamp without time zone", "timestamp without time zone", "string", "date"),
        ("timestamp(3) with time zone", "timestamp with time zone", "string", "date"),
        ("interval day to second(3)", "interval", "string", "keyword"),
        ("jsonb", "jsonb", "string", "object"),
        ("bit(1)", "bit varying", "string", "boolean"),
        ("bit varying(5)", "bit varying", "string", "keyword"),
        ("inet", "inet", "string", "keyword"),
        ("text[]", "text[]", "array<string>", "text"),
        ("numeric(6,2)[]", "numeric[]", "array<decimal(6,2)>", "double"),
        ("public.mood", "text", "string", "keyword"),
        ('"My Type"', "text", "string", "keyword"),
        ("public.mood[]", "text[]", "array<string>", "keyword"),
        ("app.hstore", "text", "string", "object"),
    ],
)
def test_type_has_a_form_in_every_target(pg_type, postgres, delta, elasticsearch):
    """The table says how a type is kept in each of the three targets."""
    assert postgres_column(pg_type) == postgres
    assert delta_column(pg_type) == delta
    assert elasticsearch_field(pg_type)["type"] == elasticsearch


def test_keyword_never_exceeds_what_lucene_takes():
    """A keyword that long in four-byte characters still fits Lucene's limit."""
    assert elasticsearch_field("uuid")["ignore_above"] * 4 <= 32_766
    assert MAX_KEYWORD == 8191


def test_field_is_a_copy():
    """A caller may change the mapping it was given."""
    elasticsearch_field("text")["analyzer"] = "german"
    assert "analyzer" not in elasticsearch_field("text")


def test_parse_reads_limits_and_arrays():
    """The parts of a format_type() text are told apart."""
    parsed = parse("numeric(12,2)[]")
    assert (parsed.base, parsed.limits, parsed.is_array) == ("numeric", (12, 2), True)
    assert kind("timestamp(6) with time zone") is Kind.TIMESTAMPTZ


@pytest.mark.parametrize(
    ("pg_type", "value", "text"),
    [
        ("integer", 7, "7"),
        ("boolean", True, "true"),
        ("numeric", "1.50", "1.50"),
        ("double precision", 0.1, "0.1"),
        ("double precision", "-Infinity", "-Infinity"),
        ("text", "a\tb", "a\tb"),
        ("bytea", "3q2+7w==", r"\xdeadbeef"),
        ("bytea", "", r"\x"),
        ("date", 20455, "2026-01-02"),
        ("date", "-0043-03-15Z", "0044-03-15 BC"),
        ("date", "+12345-01-01Z", "12345-01-01"),
        ("date", -622191234, "-infinity"),
        ("timestamp without time zone", 1767323045678901, "2026-01-02 03:04:05.678901"),
        ("timestamp with time zone", "infinity", "infinity"),
        ("timestamp with time zone", "+12345-01-01T00:00:00Z", "12345-01-01 00:00:00Z"),
        ("time without time zone", "03:04:05Z", "03:04:05"),
        ("time without time zone", 86_400_000_000, "24:00:00"),
        ("interval", "P1Y2M", "P1Y2M"),
        ("jsonb", '{"a": 1}', '{"a": 1}'),
        ("bit(8)", "qg==", "10101010"),
        ("bit(4)", "BQ==", "0101"),
        ("bit varying(5)", "BQ==", "101"),
        ("bit(1)", False, "0"),
        ("point", {"x": 1.5, "y": 2.0, "wkb": "", "srid": None}, "(1.5,2.0)"),
        ("integer[]", [1, None], '{"1",NULL}'),
        ("text[]", ["a b", 'q"', "b\\s", "NULL", ""], r'{"a b","q\"","b\\s","NULL",""}'),
        ("text[]", ["a", None], '{"a",NULL}'),
        ("text[]", [], "{}"),
        ("bytea[]", ["AP8="], r'{"\\x00ff"}'),
        ("public.positive", 5, "5"),
        ("public.pair", {"a": 1}, '{"a":1}'),
        ("text", None, None),
    ],
)
def test_copy_text_is_what_postgresql_reads(pg_type, value, text):
    """A JSON value of Debezium becomes PostgreSQL's own input text."""
    assert copy_text(pg_type, value) == text


@pytest.mark.parametrize(
    ("pg_type", "forms"),
    [
        ("integer", (7, "7", Decimal(7))),
        ("numeric(12,2)", ("1.50", Decimal("1.5"), "1.5", 1.5)),
        ("numeric", ("NAN", "NaN", Decimal("NaN"), math.nan)),
        ("numeric", ("Infinity", Decimal("Infinity"))),
        ("money", ("1234.50", "$1,234.50", Decimal("1234.5"))),
        ("money", ("-0.01", "-$0.01")),
        ("double precision", (1.5, "1.5", Decimal("1.5"))),
        ("double precision", ("NaN", math.nan)),
        ("real", (0.1, "0.1", 0.10000000149011612)),
        ("real", ("-Infinity", -math.inf)),
        ("boolean", (True, "t", "true")),
        ("boolean", (False, "f", "false")),
        ("character(5)", ("ab   ", "ab")),
        (
            "uuid",
            ("A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", UUID("a0eebc999c0b4ef8bb6d6bb9bd380a11")),
        ),
        ("bytea", ("AP8=", b"\x00\xff", bytearray(b"\x00\xff"), r"\x00ff", memoryview(b"\0\xff"))),
        ("date", ("2026-01-02Z", "2026-01-02", date(2026, 1, 2), 20455)),
        ("date", ("-0043-03-15Z", "0044-03-15 BC")),
        ("date", ("-infinity", -622191234)),
        ("time without time zone", ("03:04:05Z", "03:04:05", time(3, 4, 5), 11_045_000_000)),
        ("time with time zone", ("01:04:05Z", "03:04:05+02", "03:04:05+02:00")),
        (
            "timestamp without time zone",
            (
                "2026-01-02T03:04:05.5Z",
                "2026-01-02 03:04:05.5",
                datetime(2026, 1, 2, 3, 4, 5, 500000),  # noqa: DTZ001 - the type has no zone
            ),
        ),
        (
            "timestamp with time zone",
            (
                "2026-01-02T01:04:05Z",
                "2026-01-02 01:04:05+00",
                "2026-01-02 03:04:05+02",
                datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC),
                datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2))),
            ),
        ),
        ("timestamp with time zone", ("infinity", "Infinity")),
        ("timestamp with time zone", ("0000-12-31T23:00:00Z", "0001-01-01 01:00:00+02")),
        ("interval", ("P0Y1M2DT3H4M5.5S", "P1M2DT3H4M5.5S", "1 mon 2 days 03:04:05.5")),
        ("interval", ("P-1Y0M0DT0H0M0S", "P-1Y", "-1 years")),
        ("interval", ("PT-1H", "-01:00:00")),
        ("interval", (timedelta(days=2, seconds=3), "P2DT3S")),
        (
            "jsonb",
            ('{"a": [1, 2.50]}', '{"a":[1,2.5]}', {"a": [1, Decimal("2.5")]}, {"a": [1, 2.5]}),
        ),
        ("jsonb", ("null", None)),
        ("bit(8)", ("qg==", "10101010")),
        ("bit(1)", (True, "1")),
        ("bit varying", ("BQ==", "101", "00101")),
        ("inet", ("::1", "::1/128")),
        ("inet", ("10.0.0.1", "10.0.0.1/32")),
        ("point", ({"x": 1.5, "y": 2.0}, "(1.5,2)", '{"x":1.5,"y":2.0}')),
        ("hstore", ('{"a":"1","b":null}', '"a"=>"1", "b"=>NULL')),
        ("integer[]", ([1, None, 3], "{1,NULL,3}", "[1,null,3]", (1, None, 3))),
        ("text[]", (["a b", "NULL", None, 'q"'], r'{"a b","NULL",NULL,"q\""}')),
        ("text[]", ([], "{}", "[]")),
        ("integer[]", ([[1], [2]], "{{1},{2}}")),
        ("public.positive", (5, "5", Decimal(5))),
    ],
)
def test_canonical_takes_every_form_of_a_value(pg_type, forms):
    """JSON, psycopg, Arrow and text forms of one value are one value, which can be hashed."""
    assert len({canonical(pg_type, form) for form in forms}) == 1


@pytest.mark.parametrize(
    ("pg_type", "one", "other"),
    [
        ("text", "", None),
        ("text", "a ", "a"),
        ("numeric", "0.1", "0.10000000000000000001"),
        ("jsonb", "1", '"1"'),
        ("jsonb", "1", "true"),
        ("jsonb", "[]", "{}"),
        ("jsonb", "9007199254740993", "9007199254740992"),
        ("bytea", "", None),
        ("interval", "P1M", "P30D"),
        ("interval", "P1D", "PT24H"),
        ("text[]", ["NULL"], [None]),
        ("text[]", ["a,b"], ["a", "b"]),
        ("timestamp with time zone", "infinity", "-infinity"),
        ("time without time zone", "00:00:00", "24:00:00"),
        ("bit(8)", "00000101", "00000100"),
        ("date", "0044-03-15", "0044-03-15 BC"),
    ],
)
def test_canonical_keeps_different_values_apart(pg_type, one, other):
    """What PostgreSQL tells apart stays apart."""
    assert canonical(pg_type, one) != canonical(pg_type, other)


@settings(deadline=None)  # machines are busy at times
@given(st.lists(st.none() | TEXT))
def test_text_array_survives_its_literal(values):
    """Any list of texts comes back from PostgreSQL's array literal."""
    assert canonical("text[]", copy_text("text[]", values)) == tuple(values)


@settings(deadline=None)  # machines are busy at times
@given(st.binary())
def test_bytes_survive_every_form(value):
    """Base64 and PostgreSQL's hex are the same bytes."""
    sent = base64.b64encode(value).decode()
    assert canonical("bytea", sent) == canonical("bytea", copy_text("bytea", sent)) == value


@settings(deadline=None)  # machines are busy at times
@given(st.integers(-1_700_000, 2_000_000_000))
def test_days_survive_the_calendar(days):
    """A number of days and its text are one date, in any year that PostgreSQL has."""
    text = copy_text("date", days)
    assert canonical("date", text) == canonical("date", days)


@settings(deadline=None)  # machines are busy at times
@given(st.datetimes(timezones=st.timezones()))
def test_timestamps_are_compared_in_utc(moment):
    """A zoned time is the same moment as text and as an object."""
    try:
        utc = moment.astimezone(UTC)
    except OverflowError:
        return
    assert canonical("timestamp with time zone", utc.isoformat()) == canonical(
        "timestamp with time zone", moment
    )


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.decimals(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=8,
)


@settings(deadline=None)  # machines are busy at times
@given(JSON)
def test_json_survives_a_document(tree):
    """JSON goes into a document digit for digit, and comes back equal."""
    text = from_document("jsonb", tree)
    if text is None:
        return
    document = orjson.dumps({"j": document_value("jsonb", text)})
    back = json.loads(document, parse_float=Decimal)["j"]
    assert canonical("jsonb", from_document("jsonb", back)) == canonical("jsonb", text)


def test_document_keeps_big_numbers():
    """Digits that no float holds are in the document as they were."""
    text = '{"big": 12345678901234567890.123}'
    assert orjson.dumps(document_value("jsonb", text)).decode() == text


def test_document_keeps_the_last_of_two_equal_keys():
    """The type json allows a key twice, Elasticsearch does not; jsonb keeps the last, so do we."""
    assert orjson.dumps(document_value("json", '{"a": 1, "a": 2.50}')) == b'{"a":2.50}'


def test_document_times_have_the_zone_of_their_type():
    """The Z that Debezium writes everywhere stays only where it means something."""
    assert document_value("date", "2026-01-02Z") == "2026-01-02"
    assert document_value("timestamp without time zone", "2026-01-02T03:04:05Z")[-1] != "Z"
    assert document_value("timestamp with time zone", "2026-01-02T03:04:05Z")[-1] == "Z"
    assert document_value("date[]", ["2026-01-02Z", None]) == ["2026-01-02", None]


def test_read_cast_spares_what_psycopg_reads_exactly():
    """Only types that lose something in psycopg are read as text."""
    assert postgres_read_cast("bigint") is None
    assert postgres_read_cast("text[]") is None
    assert postgres_read_cast("timestamp with time zone") == "text"
    assert postgres_read_cast("jsonb[]") == "text[]"
    assert postgres_read_cast("public.mood") == "text"
