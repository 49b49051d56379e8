"""The connector's configuration: each check names the loss that the setting prevents."""

import re

import pytest
from pydantic import SecretStr

from cdc.config import Config, Connect, Kafka, SinkSettings, Source
from cdc.errors import ConfigError
from connectors.postgres import (
    ANEW,
    NOTE,
    ConnectorConfig,
    captured,
    connector_config,
    connector_name,
    differences,
    heartbeat_topic,
    note_of,
    noted_ids,
    publication_name,
    slot_name,
    table_topics,
    topic_of,
    with_ids,
)

SECRET = "correct horse"


def configured(*tables, name="shop"):
    return Config(
        name=name,
        source=Source(
            database="app", user="reader", password=SecretStr(SECRET), tables=tables or ("a.b",)
        ),
        kafka=Kafka(),
        connect=Connect(),
        sinks=(SinkSettings(name="search", type="memory"),),
    )


@pytest.mark.parametrize(
    ("table", "topic"),
    [
        ("public.orders", "shop.public.orders"),
        ("public.Orders-2", "shop.public.Orders-2"),
        ("my schema.a$b", "shop.my_schema.a_b"),
        ("public.é", "shop.public._"),
        ("public.日本", "shop.public.__"),
        ("public.😀x", "shop.public.__x"),
        ("public." + "x" * 300, ("shop.public." + "x" * 300)[:249]),
    ],
)
def test_topic_is_named_as_debezium_names_it(table, topic):
    """Expected names were printed by Debezium 3.6.3's own SchemaTopicNamingStrategy."""
    assert topic == topic_of(configured(table), table)


@pytest.mark.parametrize(
    "tables",
    [
        ("public.a b", "public.a_b"),
        ("public.é", "public.ü"),
        ("a_b.c", "a.b_c"),
    ],
)
def test_topic_shared_by_two_tables_is_refused(tables):
    """Two tables in one topic would overwrite each other's rows, and Kafka folds . and _."""
    with pytest.raises(ConfigError, match="would share the topic"):
        table_topics(configured(*tables))
    with pytest.raises(ConfigError):
        connector_config(configured(*tables))


def test_names_are_derived_from_the_configuration():
    """Two configurations on one database never share a slot or a publication."""
    config = configured(name="shop")
    assert {"cdc_shop"} == {connector_name(config), slot_name(config), publication_name(config)}
    assert heartbeat_topic(config) == "__debezium-heartbeat.shop"


@pytest.mark.parametrize(
    ("key", "value", "loss"),
    [
        ("plugin.name", "pgoutput", "no other plugin is in every PostgreSQL"),
        ("publication.autocreate.mode", "filtered", "WAL of other tables would be sent"),
        ("decimal.handling.mode", "string", "double loses digits"),
        ("time.precision.mode", "isostring", "one form for all times"),
        ("interval.handling.mode", "string", "months would become microseconds"),
        ("binary.handling.mode", "bytes", "base64 makes untouched TOAST bytea null in 3.6.3"),
        ("key.converter.schemas.enable", "false", "the key would not be the bare key"),
        ("value.converter.schemas.enable", "false", "every record would carry its schema"),
        ("key.converter.replace.null.with.default", "false", "NULL would become the default"),
        ("value.converter.replace.null.with.default", "false", "NULL would become the default"),
        ("tombstones.on.delete", "true", "compaction would keep deleted rows"),
        ("exactly.once.support", "required", "a crash would repeat changes at new offsets"),
        ("transaction.boundary", "poll", "position and records must commit together"),
        ("snapshot.mode", "initial", "a second snapshot says nothing of deleted rows"),
        ("offset.mismatch.strategy", "trust_offset", "a recreated slot would hide a gap"),
        ("slot.drop.on.stop", "false", "changes during a restart would be lost"),
        ("skipped.operations", "t", "a TRUNCATE has no key and would stop the task"),
        ("message.prefix.exclude.list", ".*", "foreign messages have no topic"),
        ("event.converting.failure.handling.mode", "fail", "a bad value would become null"),
        ("include.unknown.datatypes", "true", "columns would be missing"),
        ("errors.max.retries", "0", "a cut snapshot would be followed by another, unseen"),
        ("errors.tolerance", "none", "records would be skipped"),
        ("errors.log.include.messages", "false", "rows would stand in the worker's log"),
        ("poll.interval.ms", "10", "latency"),
        ("post.processors.reselect.reselect.unavailable.values", "true", "TOAST placeholders"),
        ("post.processors.reselect.reselect.null.values", "false", "NULL is a value"),
    ],
)
def test_connector_config_prevents_loss(key, value, loss):
    """Every setting that guards against a loss has the value that does."""
    assert connector_config(configured())[key] == value, loss


def test_connector_config_captures_exactly_the_tables():
    """Debezium ignores case unless told; names are literal, whatever they contain."""
    tables = ("public.orders", "public.a,b", "public.x$y", "public.c d")
    config = connector_config(configured(*tables))
    listed = re.split(r"(?<!\\),", config["table.include.list"])
    assert len(tables) == len(listed)
    for pattern, table in zip(listed, tables, strict=True):
        bare = pattern.removeprefix("(?-i)")
        assert pattern != bare
        assert re.fullmatch(bare, table)
        assert not re.fullmatch(bare, table.upper())
        assert not re.fullmatch(bare, table.replace(".", "x"))
    assert set(tables) == captured(config)


def test_connector_config_leaves_generated_columns_out():
    """A snapshot would send them and the stream would not."""
    assert "column.exclude.list" not in connector_config(configured())
    config = connector_config(configured(), ["a.b.g"])
    assert config["column.exclude.list"] == r"(?-i)a\.b\.g"


def test_connector_config_is_text_only():
    """Connect stores strings; anything else would differ at every comparison."""
    assert all(type(value) is str for value in connector_config(configured()).values())


def test_password_is_sent_and_never_shown():
    """The secret is in the values and in no text made of them."""
    config = connector_config(configured())
    assert config["database.password"] == SECRET
    assert config.secrets == (SECRET,)
    for text in (repr(config), str(config), f"{config}", repr([config]), f"{config!r}"):
        assert SECRET not in text
        assert "***" in text


def test_differences_say_what_changes_without_secrets():
    """One sentence per key; Connect's own "name" is no difference."""
    old = ConnectorConfig({"name": "x", "a": "1", "b": "2", "database.password": "old"})
    new = ConnectorConfig({"a": "1", "c": "3", "database.password": SECRET})
    assert differences(old, new) == [
        "drop b",
        "set c to 3",
        "set database.password to another secret",
    ]
    assert differences({**new, "name": "x"}, new) == []


def test_noted_ids_are_those_that_were_noted():
    """Nothing is known of a connector without a note, or of one that is to begin anew."""
    plain = connector_config(configured())
    noted = with_ids(plain, {"shop.a.b": "x/y+z"})
    assert noted_ids(noted) == {"shop.a.b": "x/y+z"}
    for unknown in (None, {}, plain, {**noted, NOTE: ANEW}):
        assert noted_ids(unknown) == {}
    assert (note_of(None), note_of(plain), note_of({NOTE: ANEW})) == ("", "", ANEW)


def test_differences_tell_the_note_in_words():
    """Ids mean nothing to a reader."""
    plain = connector_config(configured())
    first, second = (with_ids(plain, {"shop.a.b": it}) for it in ("1", "2"))
    assert differences(plain, first) == differences(first, second) == ["note the ids of its topics"]
    assert differences(first, plain) == ["drop its note"]
    assert differences(first, first) == []
