"""A whole pipeline under load and a handful of faults: nothing is lost, doubled, stale or back.

`make soak` is the long version of this, with every kind of fault.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import click
import pytest

from tests.support.chaos.run import Report, named, run
from tests.support.chaos.world import world

PATIENCE_S = 300.0
GROUPS = (
    ("kill a worker", "deaf, Elasticsearch"),
    ("kill redis", "cut, the warehouse"),
    ("kill the daemon", "kill connect"),
)


@pytest.mark.timeout(1200)  # on two busy cores; three minutes on idle ones
def test_no_fault_shows_in_any_sink():
    """Each fault heals by itself, no reader ever sees a row go back, and all copies are equal."""
    seed = random.randrange(1 << 31)
    # A stack that already runs makes the inner loop shorter; its servers will be killed.
    kept = os.environ.get("CDC_CHAOS_STACK_DIR")
    report = Report(seed)
    with world(seed, 100.0, PATIENCE_S, kept=Path(kept) if kept else None) as pipeline:
        run(
            *(pipeline, report, named(GROUPS)),
            patience_s=PATIENCE_S,
            compare_every=len(GROUPS) + 1,
            tell=click.echo,
        )
    click.echo("\n".join(report.lines()))
    assert report.violations == []
    assert report.faults == sum(map(len, GROUPS))
    assert report.is_complete
    assert min(report.sightings.values()) > 0
    assert report.records >= report.changes
