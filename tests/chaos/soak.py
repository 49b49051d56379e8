"""`make soak`: faults for as long as it is told, and a report. Exit 0 only without a violation."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from tests.support.chaos.faults import FAULTS, Fault
from tests.support.chaos.run import Report, rounds, run
from tests.support.chaos.world import KINDS, world

COMPARE_EVERY = 10  # rounds


@click.command()
@click.option("--minutes", type=float, default=30.0, show_default=True, envvar="SOAK_MINUTES")
@click.option("--seed", type=int, default=None, help="The same seed gives the same faults.")
@click.option("--rate", type=float, default=150.0, show_default=True, help="Changes a second.")
@click.option("--only", multiple=True, help="Only faults whose name contains this.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report here.")
@click.option("--logs", type=click.Path(path_type=Path), help="Keep the daemon's logs here.")
@click.option(
    "--patience",
    type=float,
    default=240.0,
    show_default=True,
    help="Seconds within which all sinks must have caught up after a fault.",
)
@click.option("--without", multiple=True, help="Leave out this kind of sink.")
@click.option("--stack", "kept", type=click.Path(path_type=Path), help="Use a stack that runs.")
def main(
    *,
    minutes: float,
    seed: int | None,
    rate: float,
    only: tuple[str, ...],
    json_path: Path | None,
    logs: Path | None,
    kept: Path | None,
    without: tuple[str, ...],
    patience: float,
) -> None:
    """Hurt a whole pipeline under load, and watch that it never shows."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # a clean end for both
    seed = random.randrange(1 << 31) if seed is None else seed
    click.echo(f"seed {seed}; starting the servers ...")
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
    chosen = [f for f in FAULTS.values() if not only or any(part in f.name for part in only)]
    kinds = [kind for kind in KINDS if kind not in without]
    report = Report(seed)
    with world(seed, rate, patience, kinds=kinds, kept=kept, logs=logs) as found:
        click.echo("all sinks follow; faults begin: time, faults so far, time to converge, faults")
        groups = _until(time.monotonic() + 60 * minutes, rounds(random.Random(seed), chosen))
        try:
            run(
                *(found, report, groups),
                patience_s=patience,
                compare_every=COMPARE_EVERY,
                tell=click.echo,
            )
        except KeyboardInterrupt:
            click.echo("interrupted")
    click.echo("\n".join(report.lines()))
    if json_path:
        json_path.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if report.is_clean else 1)


def _until(deadline: float, groups: Iterator[list[Fault]]) -> Iterator[list[Fault]]:
    for group in groups:
        if time.monotonic() > deadline:
            return
        yield group


if __name__ == "__main__":
    main()
