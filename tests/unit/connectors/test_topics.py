"""The topics that are wanted."""

import pytest
from pydantic import SecretStr

from cdc.config import Config, Kafka, SinkSettings, Source
from cdc.errors import ConfigError
from connectors.topics import wanted_topics


def configured(*tables, **kafka):
    return Config(
        name="shop",
        source=Source(database="app", user="reader", password=SecretStr(""), tables=tables),
        kafka=Kafka(**kafka),
        sinks=(SinkSettings(name="search", type="memory"),),
    )


def test_every_table_has_one_compacted_topic_and_heartbeats_have_theirs():
    """Nobody else creates topics: the broker does not, and Connect is not asked to."""
    topics = wanted_topics(configured("public.a", "public.b", partitions=4))
    assert [(topic.name, topic.partitions) for topic in topics] == [
        ("shop.public.a", 4),
        ("shop.public.b", 4),
        ("__debezium-heartbeat.shop", 1),
        ("__cdc-quarantine.shop", 1),
    ]
    assert {"compact"} == {topic.settings["cleanup.policy"] for topic in topics}
    assert {-1} == {topic.replication for topic in topics}


def test_tombstones_stay_as_long_as_configured():
    """A bootstrap slower than this can miss a delete."""
    (topic, *_) = wanted_topics(configured("public.a", delete_retention="36h"))
    assert topic.settings["delete.retention.ms"] == str(36 * 3600 * 1000)


def test_compaction_really_happens():
    """The open segment is never compacted, so it is closed by size and by time."""
    (topic, *_) = wanted_topics(configured("public.a"))
    assert int(topic.settings["segment.ms"]) < int(topic.settings["max.compaction.lag.ms"])
    assert int(topic.settings["segment.bytes"]) < 1 << 30


def test_large_rows_fit():
    """One text column may be larger than Kafka's limit of 1 MiB."""
    (topic, *_) = wanted_topics(configured("public.a"))
    assert int(topic.settings["max.message.bytes"]) > 8 << 20


def test_tables_that_share_a_topic_are_refused():
    """The check stands before anything is created."""
    with pytest.raises(ConfigError):
        wanted_topics(configured("public.a b", "public.a_b"))
