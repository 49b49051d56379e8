"""Rounds of faults: inject, wait until all sinks have caught up, compare now and then; and tell."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.support.chaos.faults import FAULTS, Fault
from tests.support.chaos.world import NotConverged, World

LOOK_EVERY_S = 0.3
SPREAD_S = 3.0  # within which the faults of a round begin
Tell = Callable[[str], None]


@dataclass
class Report:
    """What a run did and found. `violations` must be empty."""

    seed: int
    converged_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: float = 0.0
    changes: int = 0
    records: int = 0
    sightings: dict[str, int] = field(default_factory=dict)
    compared_rows: int = 0
    comparisons: int = 0
    daemon_starts: int = 0
    is_complete: bool = False  # to the last comparison: what was cut short proves nothing
    violations: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return self.is_complete and self.faults > 0 and not self.violations

    @property
    def faults(self) -> int:
        return sum(map(len, self.converged_s.values()))

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "complete": self.is_complete,
            "seconds": round(self.seconds),
            "faults": self.faults,
            "changes_written": self.changes,
            "log_records_read": self.records,
            "sightings": self.sightings,
            "comparisons": self.comparisons,
            "rows_compared": self.compared_rows,
            "daemon_starts": self.daemon_starts,
            "by_kind": {
                name: {
                    "faults": len(times),
                    "converged_s": {
                        "min": round(min(times), 1),
                        "median": round(statistics.median(times), 1),
                        "max": round(max(times), 1),
                    },
                }
                for name, times in sorted(self.converged_s.items())
            },
            "violations": self.violations,
        }

    def lines(self) -> Iterator[str]:
        found = self.as_json()
        yield f"{'fault':<28} {'count':>5}   time to converge: min, median, max (s)"
        for name, one in found["by_kind"].items():
            low, middle, high = one["converged_s"].values()
            yield f"{name:<28} {one['faults']:>5}   {low:>8.1f} {middle:>8.1f} {high:>8.1f}"
        yield f"{'all':<28} {self.faults:>5}"
        yield ""
        yield f"seed             {self.seed}"
        yield f"time             {self.seconds / 60:.1f} min"
        yield f"changes written  {self.changes:,}; read back from the log {self.records:,}"
        yield f"rows looked at   {', '.join(f'{n:,} in {s}' for s, n in self.sightings.items())}"
        yield f"rows compared    {self.compared_rows:,} in {self.comparisons} comparisons"
        yield f"daemon starts    {self.daemon_starts}"
        yield f"violations       {len(self.violations)}{'' if self.is_complete else ' (cut short)'}"
        yield from (f"  {sentence}" for sentence in self.violations)


def rounds(chance: random.Random, faults: Sequence[Fault]) -> Iterator[list[Fault]]:
    """Groups of faults that may overlap, without end; every kind comes before any comes again."""
    while True:
        left = [fault for fault in faults for _ in range(fault.weight)]
        chance.shuffle(left)
        while left:
            wanted, group = chance.choice((1, 2, 3, 4)), []
            touched: set[str] = set()
            for fault in list(left):
                if len(group) < wanted and not touched & fault.touches:
                    group.append(fault)
                    left.remove(fault)
                    touched |= fault.touches
            yield group


def run(
    world: World,
    report: Report,
    groups: Iterator[list[Fault]],
    *,
    patience_s: float,
    compare_every: int,
    tell: Tell,
) -> None:
    """Inject each of *groups*; stop early when a sink does not catch up. Fills *report*."""
    chance = random.Random(report.seed)
    began = time.monotonic()
    try:
        for number, group in enumerate(groups, 1):
            names = ", ".join(fault.name for fault in group)
            ids, lives = world.log.ids, world.log.lives
            inject(world, group, chance)
            if any(fault.renews for fault in group):
                took = world.converge_anew(ids, patience_s)
            else:
                took = world.converge(patience_s)
                if world.log.lives > lives:
                    world.violations.add(f"the log was begun anew without need, after {names}")
            for fault in group:
                report.converged_s[fault.name].append(took)
            tell(f"{time.monotonic() - began:6.0f} s  {report.faults:>4}  {took:5.1f} s  {names}")
            if number % compare_every == 0:
                _compare(world, report, patience_s)
        _compare(world, report, patience_s)
        report.is_complete = True
    except NotConverged as error:
        world.violations.add(f"after {names}: {error}")
    finally:
        report.seconds = time.monotonic() - began
        report.changes, report.records = world.load.changes, world.log.records
        report.sightings = {name: o.rules.sightings for name, o in world.observers.items()}
        report.daemon_starts = world.keeper.starts
        report.violations = world.violations.all()


def inject(world: World, group: Sequence[Fault], chance: random.Random) -> None:
    """Start the faults within some seconds of each other; return when all are over."""
    plans = [(fault, chance.uniform(0, SPREAD_S), chance.getrandbits(32)) for fault in group]
    with ThreadPoolExecutor(len(plans)) as pool:
        jobs = [pool.submit(_later, world, *plan) for plan in plans]
        while not all(job.done() for job in jobs):
            world.look()
            threading.Event().wait(LOOK_EVERY_S)
        for job in jobs:
            job.result()


def _later(world: World, fault: Fault, delay_s: float, seed: int) -> None:
    threading.Event().wait(delay_s)
    fault.act(world, random.Random(seed))


def _compare(world: World, report: Report, patience_s: float) -> None:
    report.compared_rows += world.compare(patience_s)
    report.comparisons += 1


def named(names: Sequence[Sequence[str]]) -> Iterator[list[Fault]]:
    """Groups of faults by their names."""
    for group in names:
        yield [FAULTS[name] for name in group]
