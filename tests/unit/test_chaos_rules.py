"""The witnesses of the chaos runs see what they are there to see."""

import pytest

from tests.support.chaos.rules import NOT_DURABLE_S, Store, Topic
from tests.support.chaos.run import Report

LSN = 10, 700


@pytest.fixture
def store():
    return Store("cache")


def test_a_row_may_grow_and_stand_still(store):
    """Newer versions, and the same one again, are as they should be."""
    for held in ((5, 50), (5, 50), None, (7, 70)):
        assert store.see("k", held, 0.0, buried=False) is None
    assert store.sightings == 4


@pytest.mark.parametrize("held", [(6, 80), (4, 40)], ids=["version", "both"])
def test_a_version_that_goes_back_is_seen(store, held):
    """Also when the row was away in between."""
    store.see("k", (7, 70), 0.0, buried=False)
    store.see("k", None, 1.0, buried=False)
    assert "back to" in store.see("k", held, 2.0, buried=False)


def test_a_counter_that_goes_back_under_a_newer_version_is_seen(store):
    """A log that repeats itself gives old values new versions."""
    store.see("k", (7, 70), 0.0, buried=False)
    assert "from counter 70 back to 60" in store.see("k", (8, 60), 1.0, buried=False)


def test_a_version_with_two_contents_is_seen(store):
    """A version names one state of one row."""
    store.see("k", (7, 70), 0.0, buried=False)
    assert "now 71" in store.see("k", (7, 71), 1.0, buried=False)


def test_a_buried_row_that_returns_is_seen(store):
    """Absent is right, anything else is not."""
    store.bury(["k"], 0.0)
    assert store.is_buried("k")
    assert store.see("k", None, 1.0, buried=True) is None
    assert "deleted for good" in store.see("k", (9, 9), 1.0, buried=True)


def test_a_crash_takes_only_what_was_not_on_disk(store):
    """What was seen just before it may go; what was seen earlier may not."""
    store.see("k", (5, 50), 0.0, buried=False)
    store.see("k", (6, 60), 10.0, buried=False)
    store.crash(10.0 + NOT_DURABLE_S / 2, 15.0)
    assert store.see("k", (4, 40), 14.0, buried=False) is None  # came across the crash
    assert store.see("k", (5, 50), 20.0, buried=False) is None
    assert "version 5 back to 4" in store.see("k", (4, 40), 21.0, buried=False)


def test_a_crash_keeps_the_graves_that_are_old_enough(store):
    """A delete that was just applied may have been lost with the rest."""
    store.bury(["old"], 0.0)
    store.bury(["new"], 10.0)
    store.crash(10.0, 15.0)
    assert (store.is_buried("old"), store.is_buried("new")) == (True, False)
    store.bury(["old", "new"], 20.0)
    assert store.is_buried("new")


def test_a_log_that_repeats_is_seen():
    """The same change twice, and a change that brings an old counter."""
    topic = Topic("t")
    assert topic.read("k", "c", 1, LSN) is None
    assert topic.read("k", "u", 2, (11, 701)) is None
    assert "repeats" in topic.read("k", "c", 1, LSN)
    assert "from 2 to 2" in topic.read("k", "u", 2, (12, 702))


def test_a_log_with_a_delete_and_a_new_row_is_fine():
    """A delete brings the last counter again, and so does the record of a moved key."""
    topic = Topic("t")
    for op, n, lsn in (("c", 1, 10), ("d", 1, 11), ("c", 2, 12)):
        assert topic.read("k", op, n, (lsn, 700 + lsn)) is None
    assert topic.read("other", "c", 1, (12, 712)) is None


@pytest.mark.parametrize(
    ("is_complete", "violations", "is_clean"),
    [(True, [], True), (False, [], False), (True, ["a row went back"], False)],
)
def test_a_run_is_clean_only_when_whole_and_without_violation(is_complete, violations, is_clean):
    """A run that was cut short has not compared everything, so it proves nothing."""
    report = Report(1, is_complete=is_complete, violations=violations)
    report.converged_s["kill redis"].append(1.0)
    assert report.is_clean is is_clean


def test_a_run_without_a_fault_is_not_clean():
    """Nothing was tried."""
    assert not Report(1, is_complete=True).is_clean
