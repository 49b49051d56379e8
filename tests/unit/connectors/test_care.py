"""What is to be done about each state of the source."""

import pytest
from pydantic import SecretStr

from cdc.config import Config, Connect, SinkSettings, Source
from connectors.care import Care, Deed, Seen, judge
from connectors.catalogue import Slot
from connectors.connect import ConnectorStatus, Phase, TaskStatus
from connectors.postgres import ANEW, NOTE, ConnectorConfig, with_ids

BARE = ConnectorConfig({"a": "b"})
NOTED = with_ids(BARE, {"shop.a.b": "id"})
LOST = {"shop.a.b": "was deleted"}
GONE = "stream .. is no longer available on the server. (DebeziumException)"


def status(connector, task=None, reason=""):
    tasks = (TaskStatus(0, task, "w", reason),) if task else ()
    return ConnectorStatus("shop", connector, "", tasks)


RUNNING = status("RUNNING", "RUNNING")
FAILED = status("RUNNING", "FAILED", "KafkaException")


def slot(wal_status="reserved"):
    return Slot(
        "shop", active=False, wal_status=wal_status, confirmed="0/1", lag_bytes=0, held_bytes=0
    )


@pytest.mark.parametrize(
    ("seen", "deed"),
    [
        (Seen(NOTED, RUNNING), Deed.NOTHING),
        (Seen(BARE, RUNNING), Deed.NOTHING),
        # A worker that has just started knows the configuration, and no status.
        (Seen(NOTED, None), Deed.NOTHING),
        (Seen(NOTED, status("RUNNING", "UNASSIGNED")), Deed.NOTHING),
        (Seen(NOTED, status("RUNNING", "RESTARTING")), Deed.NOTHING),
        (Seen(NOTED, status("UNASSIGNED")), Deed.NOTHING),
        (Seen(None, None), Deed.LEAVE),
        (Seen(ConnectorConfig({NOTE: ANEW}), status("STOPPED")), Deed.RESYNC),
        (Seen(ConnectorConfig({NOTE: ANEW}), None), Deed.RESYNC),
        (Seen(NOTED, RUNNING, LOST), Deed.RESYNC),
        (Seen(BARE, RUNNING, LOST), Deed.RESYNC),
        (Seen(NOTED, FAILED, LOST, slot(), Phase.STREAM), Deed.RESYNC),
        # By hand, whatever is missing.
        (Seen(NOTED, status("PAUSED", "PAUSED"), LOST), Deed.LEAVE),
        (Seen(NOTED, status("STOPPED"), {}, slot(), Phase.STREAM), Deed.LEAVE),
        (Seen(NOTED, status("STOPPED"), {}, slot(), Phase.NOTHING), Deed.LEAVE),
        (Seen(NOTED, status("STOPPED"), {}, None, Phase.STREAM), Deed.LEAVE),
        (Seen(NOTED, status("STOPPED"), LOST, None, Phase.NOTHING), Deed.LEAVE),
        (Seen(BARE, status("STOPPED"), {}, None, Phase.NOTHING), Deed.LEAVE),
        # The last step of a resync is missing.
        (Seen(NOTED, status("STOPPED"), {}, None, Phase.NOTHING), Deed.RESUME),
        (Seen(NOTED, FAILED, {}, slot(), Phase.STREAM), Deed.RESTART),
        (Seen(BARE, FAILED, {}, slot(), Phase.STREAM), Deed.RESTART),
        (Seen(NOTED, status("FAILED"), {}, slot(), Phase.STREAM), Deed.RESTART),
        # It has not even begun: a wrong password, a server that was away.
        (Seen(NOTED, FAILED, {}, None, Phase.NOTHING), Deed.RESTART),
        (Seen(NOTED, FAILED, {}, None, Phase.STREAM), Deed.RESYNC),
        (Seen(NOTED, FAILED, {}, slot("lost"), Phase.STREAM), Deed.RESYNC),
        (Seen(NOTED, status("RUNNING", "FAILED", GONE), {}, slot(), Phase.STREAM), Deed.RESYNC),
        # Another snapshot would follow, into topics that hold a part of this one.
        (Seen(NOTED, FAILED, {}, slot(), Phase.SNAPSHOT), Deed.RESYNC),
        (Seen(NOTED, FAILED, {}, slot(), Phase.NOTHING), Deed.RESYNC),
    ],
)
def test_judge_knows_what_heals(seen, deed):
    """A restart heals a failure, a resync heals a gap, and a person's will stands."""
    assert judge(seen).deed is deed


@pytest.mark.parametrize("seen", [Seen(None, None), Seen(NOTED, RUNNING, LOST)])
def test_judge_is_not_sure_of_what_is_absent(seen):
    """A server that has just started may not know everything yet."""
    assert not judge(seen).is_sure


class Log:
    def __init__(self):
        self.lines = []

    def warning(self, event, **data):
        self.lines.append((event, data))

    info = warning


def test_look_survives_what_it_does_not_know(monkeypatch):
    """Care must not end in silence; it says the kind of the failure, once, and no more of it."""
    config = Config(
        name="shop",
        source=Source(database="app", user="reader", password=SecretStr(""), tables=("a.b",)),
        connect=Connect(url="http://nowhere"),
        sinks=(SinkSettings(name="search", type="memory"),),
    )
    log = Log()
    care = Care(config, log)

    def broken(*_):
        raise KeyError("alice@example.org")

    monkeypatch.setattr(care, "_see", broken)
    care.look()
    care.look()
    assert log.lines == [("unexpected failure", {"error": "KeyError", "hint": ""})]
