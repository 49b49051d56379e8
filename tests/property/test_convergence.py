"""For any history, any split, any replay and any crash, the target equals the fold of the log.

A script is a list of steps, each the name of a method of World and its arguments. Numbers that
choose among things are taken modulo what there is, so that every script can be played.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cdc.sink import Written
from sinks.memory import MemorySink
from tests.contract.conftest import memory_harness_of
from tests.property.world import World

# Equal when they are joined carelessly, or special to some target.
KEYS = st.sampled_from([("a-b", "c"), ("a", "b-c"), ("{é}", "\\N")])
NUMBERS = st.integers(-1, 9) | st.none()
ANY = st.integers(0, 30)
FEW = st.integers(1, 6)


LIMITS = (FEW, st.integers(1, 3), st.integers(1, 500), st.integers(0, 2))
UNSEEN = st.lists(st.tuples(KEYS, NUMBERS), max_size=3)
# Step -> how often, and its arguments. A mishap does harm only to what is there.
STEPS = {
    "put": (6, KEYS, NUMBERS),
    "delete": (3, KEYS),
    "read": (9, ANY, *LIMITS),
    "replay": (2, ANY, ANY, *LIMITS),
    "recreate": (1, st.integers(1, 2), UNSEEN),
    "skip": (1, ANY),
    "compact": (1, ANY, ANY),
    "restart": (1,),
    "sweep": (1,),
    "search": (1,),
    "repair": (1,),
    "crash": (1, ANY, FEW, ANY),
    "zombie": (1, KEYS, NUMBERS),
    "refuse": (1, ANY),
    "take_back_ledger": (1, ANY),
    "lose_ledger": (1,),
    "back_up": (1,),
    "restore": (1, ANY),
}
NAMES = st.sampled_from([name for name, (times, *_) in STEPS.items() for _ in range(times)])
ARGUMENTS = {name: st.tuples(*arguments) for name, (_, *arguments) in STEPS.items()}


@st.composite
def scripts(draw):
    """Of any length, where a plain list would mostly be short."""
    names = (draw(NAMES) for _ in range(draw(st.integers(0, 50))))
    return [(name, *draw(ARGUMENTS[name])) for name in names]


SCRIPTS = scripts()


def play(harness, script):
    with closing(World(harness)) as world:
        for name, *arguments in script:
            getattr(world, name)(*arguments)
        world.settle()


def holds(harness, **more):
    """Play many scripts. The harness is no argument of theirs: it outlives each of them."""

    @settings(**more)
    @given(SCRIPTS)
    def any_script(script):
        play(harness, script)

    any_script()


def test_the_reference_equals_the_fold_of_the_log(memory_harness):
    """In bulk, against the sink that says what the contract means."""
    holds(memory_harness)


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_a_real_target_equals_the_fold_of_the_log(request, kind):
    """The same, on real servers: a step takes milliseconds there, so fewer scripts are played."""
    harness = request.getfixturevalue(f"{kind}_harness")
    holds(harness, max_examples=settings.default.max_examples // 10)


class AppliesAll(MemorySink):
    """Looks at no version."""

    def _apply(self, piece, changes):
        self._held[piece.table.full_name] |= {change.key: change for change in changes}
        return Written(len(changes), 0)


class ForgetsDeletes(MemorySink):
    """Keeps nothing of a deleted row."""

    def _apply(self, piece, changes):
        written = super()._apply(piece, changes)
        held = self._held[piece.table.full_name]
        for key in [key for key, change in held.items() if change.row is None]:
            del held[key]
        return written


class ComparesOffsets(MemorySink):
    """Takes an offset for a version."""

    def _apply(self, piece, changes):
        held = self._held[piece.table.full_name]
        fresh = [c for c in changes if c.key not in held or held[c.key].offset < c.offset]
        held |= {change.key: change for change in fresh}
        return Written(len(fresh), len(changes) - len(fresh))


class MovesAhead(MemorySink):
    """Says in its ledger that it was further than it was."""

    def write(self, token, piece):
        written = super().write(token, piece)
        super().write(token, replace(piece, changes=(), next_offset=piece.next_offset + 1))
        return written


class HasNoFence(MemorySink):
    """Lets everybody write."""

    def _check(self, token):
        pass


class SweepsNothing(MemorySink):
    """Keeps the rows of older generations, and says so nowhere."""

    def sweep(self, _token, topic, _table):
        self._entries[topic] = replace(self._entries[topic], unswept=False)
        return 0


class SweepsAll(MemorySink):
    """Removes what the snapshot brought, as well."""

    def sweep(self, token, topic, table):
        swept = super().sweep(token, topic, table)
        self._held[table.full_name].clear()
        return swept


class BeginsAgain(MemorySink):
    """Having lost its ledger, takes the first generation for the next one."""

    def _lost(self):
        return {}


class RepairsLate(MemorySink):
    """Applies what was found in the log long ago, wherever the writer is now."""

    def repair(self, piece):
        return self._apply(piece, piece.changes)


@pytest.mark.parametrize("careless", MemorySink.__subclasses__(), ids=lambda it: it.__name__)
def test_the_property_sees_what_a_careless_sink_does(careless):
    """Each of these sinks is wrong in one way, and some script shows it."""
    sink = careless()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        holds(
            memory_harness_of(sink),
            max_examples=1000,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
        )
