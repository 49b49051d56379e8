"""One table: a PostgreSQL type -> its form in each target. Pure functions over JSON values.

A type is PostgreSQL's format_type() text. A value is what Debezium writes with decimals as strings,
times as ISO strings, intervals as ISO 8601, bytes as base64 and JSON as text in a string.

    PostgreSQL             Elasticsearch       warehouse (PostgreSQL)   Delta
    smallint .. bigint     short .. long       the same                 smallint .. bigint
    numeric(p,s)           double              numeric                  decimal(p,s)
    numeric, money         double              numeric                  string
    real, double           float, double       the same                 float, double
    boolean, bit(1)        boolean             boolean, bit varying     boolean, string
    text                   text + keyword      text                     string
    varchar, char, uuid    keyword             the same                 string
    date, timestamp(tz)    date                the same                 string, ISO 8601
    time, interval         keyword             the same                 string, ISO 8601
    json, jsonb            JSON, not indexed   the same                 string
    bytea                  binary              the same                 binary
    T[]                    as T                T[]                      array<T>
    anything else          keyword             text                     string

Why so:
- The mirror has no length limits (`character varying`, not `character varying(20)`): the source
  has checked them, and a limit that is raised there must not stop the copy here.
- Elasticsearch keeps the exact text of a number in _source; only its index rounds to a double.
  What an index cannot hold (NaN, infinity, year 12000) is kept in _source and not indexed.
- Delta keeps dates and times as ISO text: Spark's own types hold neither 'infinity' nor years
  outside 1 to 9999. Within them the text sorts by time, and CAST turns it into a timestamp.
- A decimal(p,s) of Delta has no NaN: the Delta sink stops there, it does not write NULL.
- Lost by Debezium before it reaches us: the zone of timetz, leading zeros of bit varying.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

MAX_KEYWORD = 8191  # characters: Lucene's limit is 32,766 bytes, and UTF-8 needs up to 4 for one
MAX_DECIMAL = 38  # digits of a Spark decimal
_DAY_US = 86_400_000_000
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_CYCLE_YEARS = 400  # the Gregorian calendar repeats
_CYCLE_DAYS = 146_097
_LAST_YEAR = 294_276  # of a timestamp in PostgreSQL
_LAST_DATE_YEAR = 5_874_897  # of a date
_FIRST_YEAR = -4_713  # of both


class Kind(Enum):
    """How the values of a type are written and compared."""

    INTEGER = "integer"
    NUMERIC = "numeric"
    MONEY = "money"
    FLOAT = "float"
    REAL = "real"
    BOOLEAN = "boolean"
    TEXT = "text"
    PADDED = "padded"
    UUID = "uuid"
    ADDRESS = "address"
    BYTES = "bytes"
    BITS = "bits"
    DATE = "date"
    TIME = "time"
    TIMETZ = "timetz"
    TIMESTAMP = "timestamp"
    TIMESTAMPTZ = "timestamptz"
    INTERVAL = "interval"
    JSON = "json"
    HSTORE = "hstore"
    POINT = "point"


class Form(NamedTuple):
    kind: Kind
    elasticsearch: Mapping[str, Any]
    postgres: str
    delta: str


@dataclass(frozen=True, slots=True)
class PgType:
    """A parsed format_type(): `numeric(12,2)[]` is ("numeric", (12, 2), True)."""

    base: str
    limits: tuple[int, ...]
    is_array: bool
    form: Form

    @property
    def kind(self) -> Kind:
        return self.form.kind


_KEYWORD: Mapping[str, Any] = {"type": "keyword", "ignore_above": MAX_KEYWORD}
_TEXT: Mapping[str, Any] = {
    "type": "text",
    "fields": {"keyword": {"type": "keyword", "ignore_above": 256}},
}
_DOUBLE: Mapping[str, Any] = {"type": "double", "ignore_malformed": True}
_FLOAT: Mapping[str, Any] = {"type": "float", "ignore_malformed": True}
_DATE: Mapping[str, Any] = {
    "type": "date",
    "format": "strict_date_optional_time_nanos",
    "ignore_malformed": True,
}
_OPAQUE: Mapping[str, Any] = {"type": "object", "enabled": False}  # takes any JSON, also a number

_UNKNOWN = Form(Kind.TEXT, _KEYWORD, "text", "string")
_FORMS: Mapping[str, Form] = {
    "smallint": Form(Kind.INTEGER, {"type": "short"}, "smallint", "smallint"),
    "integer": Form(Kind.INTEGER, {"type": "integer"}, "integer", "int"),
    "bigint": Form(Kind.INTEGER, {"type": "long"}, "bigint", "bigint"),
    "oid": Form(Kind.INTEGER, {"type": "long"}, "oid", "bigint"),
    "numeric": Form(Kind.NUMERIC, _DOUBLE, "numeric", "string"),
    "money": Form(Kind.MONEY, _DOUBLE, "numeric", "string"),
    "real": Form(Kind.REAL, _FLOAT, "real", "float"),
    "double precision": Form(Kind.FLOAT, _DOUBLE, "double precision", "double"),
    "boolean": Form(Kind.BOOLEAN, {"type": "boolean"}, "boolean", "boolean"),
    "text": Form(Kind.TEXT, _TEXT, "text", "string"),
    "character varying": Form(Kind.TEXT, _KEYWORD, "character varying", "string"),
    "character": Form(Kind.PADDED, _KEYWORD, "bpchar", "string"),
    "bpchar": Form(Kind.PADDED, _KEYWORD, "bpchar", "string"),
    "uuid": Form(Kind.UUID, _KEYWORD, "uuid", "string"),
    "bytea": Form(Kind.BYTES, {"type": "binary"}, "bytea", "binary"),
    "bit": Form(Kind.BITS, _KEYWORD, "bit varying", "string"),
    "bit varying": Form(Kind.BITS, _KEYWORD, "bit varying", "string"),
    "date": Form(Kind.DATE, _DATE, "date", "string"),
    "time without time zone": Form(Kind.TIME, _KEYWORD, "time without time zone", "string"),
    "time with time zone": Form(Kind.TIMETZ, _KEYWORD, "time with time zone", "string"),
    "timestamp without time zone": Form(
        Kind.TIMESTAMP, _DATE, "timestamp without time zone", "string"
    ),
    "timestamp with time zone": Form(Kind.TIMESTAMPTZ, _DATE, "timestamp with time zone", "string"),
    "interval": Form(Kind.INTERVAL, _KEYWORD, "interval", "string"),
    "json": Form(Kind.JSON, _OPAQUE, "json", "string"),
    "jsonb": Form(Kind.JSON, _OPAQUE, "jsonb", "string"),
    "hstore": Form(Kind.HSTORE, _OPAQUE, "text", "string"),
    "point": Form(Kind.POINT, _OPAQUE, "point", "string"),
    "inet": Form(Kind.ADDRESS, _KEYWORD, "inet", "string"),
    "xml": Form(Kind.TEXT, _TEXT, "xml", "string"),
} | {
    name: Form(Kind.TEXT, _KEYWORD, name, "string")
    for name in (
        *("cidr", "macaddr", "macaddr8", "int4range", "int8range", "numrange", "tsrange"),
        *("tstzrange", "daterange", "tsvector"),
    )
}
_SHORT = {"timestamp": "timestamp without time zone", "time": "time without time zone"}
_LIMITS = re.compile(r"\s?\((-?\d+(?:,-?\d+)*)\)")


@lru_cache(maxsize=4096)
def parse(pg_type: str) -> PgType:
    """Read a format_type() text. A type we do not know is text."""
    element = pg_type
    while element.endswith("[]"):
        element = element[:-2]
    found = _LIMITS.search(element)
    limits = tuple(int(part) for part in found[1].split(",")) if found else ()
    base = _LIMITS.sub("", element, count=1)
    if base.startswith("interval"):  # `interval day to second`: a limit of fields
        base = "interval"
    if base.endswith(".hstore"):  # an extension may live in any schema
        base = "hstore"
    base = _SHORT.get(base, base)
    form = _FORMS.get(base, _UNKNOWN)
    if base == "bit" and (limits or (1,)) == (1,):
        form = form._replace(elasticsearch={"type": "boolean"})
    return PgType(base, limits, element != pg_type, form)


def kind(pg_type: str) -> Kind:
    return parse(pg_type).kind


def elasticsearch_field(pg_type: str) -> dict[str, Any]:
    """The mapping of a field. An array is mapped as its element."""
    return dict(parse(pg_type).form.elasticsearch)


def postgres_column(pg_type: str) -> str:
    """The type of a warehouse column: safe to paste into SQL."""
    parsed = parse(pg_type)
    return parsed.form.postgres + ("[]" if parsed.is_array else "")


def delta_column(pg_type: str) -> str:
    """The type of a Delta column, as Spark SQL writes it."""
    parsed = parse(pg_type)
    element = _delta_element(parsed)
    return f"array<{element}>" if parsed.is_array else element


def _delta_element(parsed: PgType) -> str:
    if parsed.kind is Kind.NUMERIC and parsed.limits:
        precision, scale = (*parsed.limits, 0)[:2]
        # numeric(3,5) has two zeros after the point, numeric(5,-2) two zeros before it
        precision, scale = max(precision - min(scale, 0), scale), max(scale, 0)
        if precision <= MAX_DECIMAL:
            return f"decimal({precision},{scale})"
    return parsed.form.delta


def postgres_read_cast(pg_type: str) -> str | None:
    """The cast under which psycopg reads a column without loss; None where it does by itself.

    psycopg's own date, timestamp and interval hold no infinity, no BC and no months.
    """
    parsed = parse(pg_type)
    if parsed.kind in _EXACT_IN_PSYCOPG or parsed.base in {"text", "character varying"}:
        return None
    return "text[]" if parsed.is_array else "text"


_EXACT_IN_PSYCOPG = {
    *(Kind.INTEGER, Kind.NUMERIC, Kind.FLOAT, Kind.REAL, Kind.BOOLEAN),
    *(Kind.PADDED, Kind.UUID, Kind.BYTES),
}


def document_value(pg_type: str, value: Any) -> Any:
    """*value* as it stands in an Elasticsearch document, for orjson.dumps.

    JSON goes in as it is, digit for digit (an orjson.Fragment); times lose the zone they never had.
    """
    if value is None:
        return None
    parsed = parse(pg_type)
    write = _DOCUMENT.get(parsed.kind)
    if write is None:
        return value
    if parsed.is_array and isinstance(value, list):
        return [None if each is None else write(each) for each in value]
    return write(value)


def from_document(pg_type: str, value: Any) -> Any:
    """The inverse of document_value: JSON back as text, the rest as it is.

    Read the document with `json.loads(text, parse_float=Decimal)` to keep every digit.
    """
    if value is None:
        return None
    parsed = parse(pg_type)
    if parsed.kind not in {Kind.JSON, Kind.HSTORE}:
        return value
    if parsed.is_array and isinstance(value, list):
        return [None if each is None else json_text(each) for each in value]
    return json_text(value)


def json_text(value: Any) -> str:
    """Compact JSON; a Decimal is written digit for digit."""
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{json_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(json_text(each) for each in value) + "]"
    return json.dumps(value)


def _fragment(value: Any) -> Any:
    """JSON text as a piece of a document. Of a key that comes twice (type json) the last counts."""
    if not isinstance(value, str):
        return value
    twice = False

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal twice
        found = dict(pairs)
        twice = twice or len(found) < len(pairs)
        return found

    tree = json.loads(value, object_pairs_hook=collect, parse_float=Decimal)
    return orjson.Fragment(json_text(tree) if twice else value)


def _local(value: Any) -> Any:
    """Debezium ends every ISO string with Z, also of types without a zone."""
    return value.removesuffix("Z") if isinstance(value, str) else value


_DOCUMENT: Mapping[Kind, Callable[[Any], Any]] = {
    Kind.DATE: _local,
    Kind.TIME: _local,
    Kind.TIMESTAMP: _local,
    Kind.JSON: _fragment,
    Kind.HSTORE: _fragment,
}


def copy_text(pg_type: str, value: Any) -> str | None:
    """*value* as PostgreSQL's input text, before COPY's own escapes; None is NULL."""
    return None if value is None else copy_writer(pg_type)(value)


@lru_cache(maxsize=4096)
def copy_writer(pg_type: str) -> Callable[[Any], str]:
    """The function that copy_text uses for values that are not None."""
    parsed = parse(pg_type)
    write = _COPY.get(parsed.kind, _plain)
    if parsed.kind is Kind.BITS:
        width = (*parsed.limits, 1)[0] if parsed.base == "bit" else 0
        write = lambda value: _bits(value, width)  # noqa: E731
    if not parsed.is_array:
        return write
    return lambda value: _array_literal(value, write)


def _plain(value: Any) -> str:
    if type(value) is str:
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        return json_text(value)
    return str(value)


def _bytes_text(value: Any) -> str:
    return "\\x" + to_bytes(value).hex()


def _point_text(value: Any) -> str:
    return f"({value['x']!r},{value['y']!r})" if isinstance(value, Mapping) else str(value)


def _bits(value: Any, width: int) -> str:
    """Debezium writes bit(1) as a boolean, and more bits as bytes, the lowest first."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, str) and set(value) <= {"0", "1"} and len(value) == (width or len(value)):
        return value
    number = int.from_bytes(to_bytes(value), "little")
    return format(number, "b").zfill(width)[-width or None :]


def _array_literal(value: Any, write: Callable[[Any], str]) -> str:
    if isinstance(value, str):
        return value
    if write is _plain and value and set(map(type, value)) == {str}:
        text = "\0".join(value)
        if text.count("\0") >= len(value):
            raise ValueError("PostgreSQL's text holds no NUL")
        text = text.replace("\\", "\\\\").replace('"', '\\"').replace("\0", '","')
        return f'{{"{text}"}}'
    parts = []
    for each in value:
        if each is None:
            parts.append("NULL")
        elif isinstance(each, list):
            parts.append(_array_literal(each, write))
        else:
            text = write(each).replace("\\", "\\\\").replace('"', '\\"')
            parts.append(f'"{text}"')
    return "{" + ",".join(parts) + "}"


def _postgres_time(zone: str, of_date: bool) -> Callable[[Any], str]:
    def write(value: Any) -> str:
        if type(value) is str and value[4:5] == "-":  # a year of four digits, in our era
            return value  # PostgreSQL ignores a zone that its type has not
        stamp = _stamp(value, zoned=bool(zone), of_date=of_date)
        if isinstance(stamp, str):
            return stamp
        year, month, day, us = stamp
        era = " BC" if year < 1 else ""
        clock = "" if of_date else f" {_clock(us)}{zone}"
        return f"{year if year > 0 else 1 - year:04d}-{month:02d}-{day:02d}{clock}{era}"

    return write


def _postgres_clock(value: Any) -> str:
    return _clock(value) if isinstance(value, int) else str(_local(value))


_COPY: Mapping[Kind, Callable[[Any], str]] = {
    Kind.BYTES: _bytes_text,
    Kind.POINT: _point_text,
    Kind.DATE: _postgres_time("", of_date=True),
    Kind.TIMESTAMP: _postgres_time("", of_date=False),
    Kind.TIMESTAMPTZ: _postgres_time("Z", of_date=False),
    Kind.TIME: _postgres_clock,
}


def to_bytes(value: Any) -> bytes:
    """Bytes from bytes, from PostgreSQL's hex form, or from base64."""
    if isinstance(value, str):
        if value.startswith("\\x"):
            return bytes.fromhex(value[2:])
        return base64.b64decode(value, validate=True)
    return bytes(value)


def canonical(pg_type: str, value: Any) -> Hashable:
    """One value for every form of it: Debezium's JSON, psycopg's, Arrow's, or plain text.

    Equal rows are equal here, and the results can be hashed. NaN equals NaN. The JSON value null
    equals NULL, because a document cannot tell them apart.
    """
    if value is None:
        return None
    parsed = parse(pg_type)
    one = _CANONICAL[parsed.kind]
    if parsed.kind is Kind.BITS and parsed.base == "bit":
        width = (*parsed.limits, 1)[0]
        one = lambda each: _bits(each, width)  # noqa: E731
    if not parsed.is_array:
        return one(value)
    return _canonical_array(_array(value), one)


def _canonical_array(value: Any, one: Callable[[Any], Hashable]) -> Hashable:
    return tuple(
        None
        if each is None
        else _canonical_array(each, one)
        if isinstance(each, (list, tuple))
        else one(each)
        for each in value
    )


def _array(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.startswith("["):
        try:
            return json.loads(value, parse_float=Decimal)
        except ValueError:
            value = value.split("=", 1)[1]  # [0:1]={a,b}
    return _parse_literal(value)


_ELEMENT = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|([^{},"]+))\s*')


def _parse_literal(text: str) -> list[Any]:
    """Read PostgreSQL's array output, `{a,"b c",NULL}`."""
    stack: list[list[Any]] = [[]]
    at = 0
    while at < len(text):
        if text[at] == "{":
            stack.append([])
            at += 1
        elif text[at] == "}":
            done = stack.pop()
            stack[-1].append(done)
            at += 1
        elif text[at] == ",":
            at += 1
        else:
            found = _ELEMENT.match(text, at)
            if found is None:
                raise ValueError("not an array literal")
            quoted, bare = found.groups()
            if quoted is not None:
                stack[-1].append(re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL))
            else:
                stack[-1].append(None if bare.strip().upper() == "NULL" else bare.strip())
            at = found.end()
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError("not an array literal")
    return list(stack[0][0])


def _number(value: Any) -> Hashable:
    number = value if isinstance(value, Decimal) else Decimal(str(value))
    return "NaN" if number.is_nan() else number


def _money(value: Any) -> Hashable:
    if isinstance(value, str):  # PostgreSQL prints -$1,234.50
        value = re.sub(r"[^\d.\-]", "", value)
    return _number(value)


def _float(value: Any) -> Hashable:
    number = float(value)
    return "NaN" if number != number else number  # noqa: PLR0124


def _real(value: Any) -> Hashable:
    number = float(value)
    if number != number or number in {float("inf"), float("-inf")}:  # noqa: PLR0124
        return _float(number)
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _boolean(value: Any) -> Hashable:
    if isinstance(value, str):
        return value.lower() in {"t", "true", "1"}
    return bool(value)


def _padded(value: Any) -> Hashable:
    return str(value).rstrip(" ")


def _uuid(value: Any) -> Hashable:
    return str(value).lower()


def _address(value: Any) -> Hashable:
    """PostgreSQL's cast to text writes the mask of a whole address, its output does not."""
    text = str(value)
    return text.removesuffix("/128" if ":" in text else "/32")


def _varying(value: Any) -> Hashable:
    return _bits(value, 0).lstrip("0")


def _point(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return float(value["x"]), float(value["y"])
    if value.startswith("{"):
        return _point(json.loads(value))
    x, y = value.strip("()").split(",")
    return float(x), float(y)


def _json(value: Any) -> Hashable:
    if isinstance(value, (bytes, str)):
        value = json.loads(value, parse_float=Decimal)
    return _frozen(value)


def _frozen(value: Any) -> Hashable:
    # The names keep {} from [] and true from 1, which Python takes for equal.
    if isinstance(value, Mapping):
        return "object", frozenset((name, _frozen(each)) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return "array", tuple(_frozen(each) for each in value)
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, float):
        return Decimal(str(value))
    return value if isinstance(value, Hashable) else str(value)


_PAIR = re.compile(r'"((?:[^"\\]|\\.)*)"=>(?:"((?:[^"\\]|\\.)*)"|NULL)', re.DOTALL)


def _hstore(value: Any) -> Hashable:
    if isinstance(value, str) and not value.startswith("{"):
        plain = re.compile(r"\\(.)", re.DOTALL)
        value = {
            plain.sub(r"\1", name): None if text is None else plain.sub(r"\1", text)
            for name, text in (found.groups() for found in _PAIR.finditer(value))
        }
    return _json(value)


_TIME = re.compile(
    r"(?P<year>[+-]?\d{4,})-(?P<month>\d\d)-(?P<day>\d\d)"
    r"(?:[T ](?P<clock>\d\d:\d\d(?::\d\d(?:\.\d+)?)?))?"
    r"(?P<zone>Z|[+-]\d\d(?::?\d\d(?::?\d\d)?)?)?(?P<bc> BC)?"
)
_Stamp = tuple[int, int, int, int]  # year (0 is 1 BC), month, day, microseconds of the day


def _stamp(value: Any, *, zoned: bool, of_date: bool) -> _Stamp | str:
    """A moment as its parts, in UTC if *zoned*; or 'infinity', '-infinity'."""
    if isinstance(value, datetime):
        if zoned and value.tzinfo is not None:
            value = value.astimezone(UTC)
        return value.year, value.month, value.day, _clock_us(value.time())
    if isinstance(value, date):
        return value.year, value.month, value.day, 0
    if isinstance(value, int):
        days, us = (value, 0) if of_date else divmod(value, _DAY_US)
        return _bounded((*_calendar(days), us), of_date=of_date)
    if value.lower() in {"infinity", "-infinity"}:
        return str(value.lower())
    found = _TIME.fullmatch(value)
    if found is None:
        raise ValueError("not a date or a time in ISO 8601")
    year = int(found["year"])
    year = 1 - year if found["bc"] else year
    us = _clock_us(found["clock"]) if found["clock"] else 0
    day = (year, int(found["month"]), int(found["day"]))
    if zoned and found["zone"] not in {None, "Z"}:
        days, us = divmod(us - _offset_us(found["zone"]), _DAY_US)
        day = _calendar(_day_number(*day) + days)
    return _bounded((*day, us), of_date=of_date)


def _bounded(stamp: _Stamp, *, of_date: bool) -> _Stamp | str:
    # Debezium writes an infinite date as one that PostgreSQL cannot hold.
    if stamp[0] < _FIRST_YEAR:
        return "-infinity"
    return "infinity" if stamp[0] > (_LAST_DATE_YEAR if of_date else _LAST_YEAR) else stamp


def _day_number(year: int, month: int, day: int) -> int:
    cycles, year = divmod(year - 1, _CYCLE_YEARS)
    return cycles * _CYCLE_DAYS + date(year + 1, month, day).toordinal() - _EPOCH_DAY


def _calendar(days: int) -> tuple[int, int, int]:
    cycles, rest = divmod(days + _EPOCH_DAY - 1, _CYCLE_DAYS)
    found = date.fromordinal(rest + 1)
    return found.year + cycles * _CYCLE_YEARS, found.month, found.day


def _clock_us(value: time | str) -> int:
    if isinstance(value, time):
        seconds = (value.hour * 60 + value.minute) * 60 + value.second
        return seconds * 1_000_000 + value.microsecond
    hour, minute, second = (*value.split(":"), "0")[:3]
    whole, _, fraction = second.partition(".")
    seconds = (int(hour) * 60 + int(minute)) * 60 + int(whole)
    return seconds * 1_000_000 + int(fraction[:6].ljust(6, "0"))


def _offset_us(zone: str) -> int:
    parts = [int(part) for part in re.findall(r"\d\d", zone)]
    hour, minute, second = (*parts, 0, 0)[:3]
    us = ((hour * 60 + minute) * 60 + second) * 1_000_000
    return -us if zone[0] == "-" else us


def _clock(us: int) -> str:
    seconds, fraction = divmod(us, 1_000_000)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{text}.{fraction:06d}" if fraction else text


def _moment(*, zoned: bool, of_date: bool) -> Callable[[Any], Hashable]:
    def one(value: Any) -> Hashable:
        stamp = _stamp(value, zoned=zoned, of_date=of_date)
        if isinstance(stamp, str):
            return stamp
        year, month, day, us = stamp
        text = f"{year:04d}-{month:02d}-{day:02d}"
        return text if of_date else f"{text}T{_clock(us)}{'Z' if zoned else ''}"

    return one


_CLOCK = re.compile(r"(?P<clock>\d\d:\d\d(?::\d\d(?:\.\d+)?)?)(?P<zone>Z|[+-][\d:]+)?")


def _time(value: Any) -> Hashable:
    if isinstance(value, (int, time)):
        return _clock(value if isinstance(value, int) else _clock_us(value))
    found = _CLOCK.fullmatch(value)
    if found is None:
        raise ValueError("not a time of day in ISO 8601")
    return _clock(_clock_us(found["clock"]))


def _timetz(value: Any) -> Hashable:
    if isinstance(value, time):
        value = value.isoformat()
    found = _CLOCK.fullmatch(value)
    if found is None:
        raise ValueError("not a time of day in ISO 8601")
    zone = found["zone"]
    us = _clock_us(found["clock"]) - (0 if zone in {None, "Z"} else _offset_us(zone))
    return _clock(us % _DAY_US) + "Z"


_ISO_PERIOD = re.compile(
    r"P(?:(-?\d+)Y)?(?:(-?\d+)M)?(?:(-?\d+)W)?(?:(-?\d+)D)?"
    r"(?:T(?:(-?\d+)H)?(?:(-?\d+)M)?(?:(-?\d+(?:\.\d+)?(?:E-?\d+)?)S)?)?"
)
_PERIOD_PART = re.compile(r"([+-]?\d+) (year|mon|day)s?|([+-]?)(\d+:\d\d:\d\d(?:\.\d+)?)")


def _interval(value: Any) -> Hashable:
    """Months, days and microseconds: PostgreSQL keeps the three apart, and so do we."""
    if isinstance(value, timedelta):
        return 0, value.days, value.seconds * 1_000_000 + value.microseconds
    if value in {"infinity", "-infinity"}:
        return str(value)
    found = _ISO_PERIOD.fullmatch(value)
    if found is not None:
        years, months, weeks, days, hours, minutes = (int(part or 0) for part in found.groups()[:6])
        us = int(Decimal(found[7] or 0) * 1_000_000)
        us += (hours * 60 + minutes) * 60_000_000
        return years * 12 + months, weeks * 7 + days, us
    totals = {"year": 0, "mon": 0, "day": 0, "us": 0}
    for count, unit, sign, clock in _PERIOD_PART.findall(value):
        if unit:
            totals[unit] += int(count)
        else:
            totals["us"] += -_clock_us(clock) if sign == "-" else _clock_us(clock)
    return totals["year"] * 12 + totals["mon"], totals["day"], totals["us"]


_CANONICAL: Mapping[Kind, Callable[[Any], Hashable]] = {
    Kind.INTEGER: int,
    Kind.NUMERIC: _number,
    Kind.MONEY: _money,
    Kind.FLOAT: _float,
    Kind.REAL: _real,
    Kind.BOOLEAN: _boolean,
    Kind.TEXT: _plain,
    Kind.PADDED: _padded,
    Kind.UUID: _uuid,
    Kind.ADDRESS: _address,
    Kind.BYTES: to_bytes,
    Kind.BITS: _varying,
    Kind.DATE: _moment(zoned=False, of_date=True),
    Kind.TIME: _time,
    Kind.TIMETZ: _timetz,
    Kind.TIMESTAMP: _moment(zoned=False, of_date=False),
    Kind.TIMESTAMPTZ: _moment(zoned=True, of_date=False),
    Kind.INTERVAL: _interval,
    Kind.JSON: _json,
    Kind.HSTORE: _hstore,
    Kind.POINT: _point,
}
