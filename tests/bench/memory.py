"""`make memory`: the memory of `cdc run --once` with a small backlog and with a large one.

Prints the peak of the whole process family (driver, JVM, Python workers) for each, every page
counted once (PSS). Flat means that the large one needs about what the small one needs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import click

from connectors.topics import describe
from deploy.stack import Ports, Stack
from tests.support.pipeline import Pipeline
from tests.support.waiting import wait_until

SAMPLE_S = 0.5
KINDS = ("elasticsearch", "redis", "postgres", "delta")


@click.command()
@click.option("--small", default=10_000, show_default=True, help="Changes in the small backlog.")
@click.option("--large", default=1_000_000, show_default=True, help="... and in the large one.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Only such a sink.")
@click.option("--stack", "kept", type=click.Path(path_type=Path), help="Use a stack that runs.")
def main(small: int, large: int, kinds: tuple[str, ...], kept: Path | None) -> None:
    """Apply two backlogs to new sinks, and compare the peaks of memory."""
    with tempfile.TemporaryDirectory(prefix="cdc-memory-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        stack = Stack(kept or directory / "stack", Ports.free(), start_timeout_s=240)
        if kept is None:
            stack.up()
        try:
            pipeline = Pipeline(stack.env(), directory, "memory", ["changes"])
            try:
                _measure(pipeline, (small, large), kinds or KINDS)
            finally:
                pipeline.remove()
        finally:
            if kept is None:
                stack.down()


def _measure(pipeline: Pipeline, sizes: tuple[int, int], kinds: tuple[str, ...]) -> None:
    table = f"{pipeline.name}.changes"
    pipeline.db.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, note text)")
    pipeline.db.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    peaks = []
    written = 0
    for size in sizes:
        path = pipeline.config_path(kinds, f"n{size}")
        config = pipeline.apply(path)
        pipeline.db.execute(
            f"INSERT INTO {table} SELECT i, repeat(md5(i::text), 6) FROM generate_series(%s::int,"
            " %s::int) i",
            (written + 1, size),
        )
        written = size
        (topic,) = pipeline.catalogue(config)
        wait_until(lambda t=topic, c=config, n=size: _length(c, t) >= n, within_s=1200)
        peak = _peak([sys.executable, "-m", "cdc", "run", "--once", "--config", str(path)])
        peaks.append(peak)
        click.echo(json.dumps({"changes": size, "peak_mb": round(peak / (1 << 20))}))
    click.echo(json.dumps({"ratio": round(peaks[1] / peaks[0], 2)}))


def _length(config: object, topic: str) -> int:
    state = describe(config, [topic])[topic]  # type: ignore[arg-type]
    return sum(state.end.values()) - sum(state.start.values())


def _peak(command: list[str]) -> int:
    """Run *command* to its end; the most bytes that it and its children had at one time."""
    peak = 0
    over = threading.Event()
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:

        def watch() -> None:
            nonlocal peak
            while not over.wait(SAMPLE_S):
                peak = max(peak, sum(map(_bytes, _family(process.pid))))

        watcher = threading.Thread(target=watch)
        watcher.start()
        code = process.wait()
        over.set()
        watcher.join()
    if code:
        raise SystemExit(f"cdc run ended with {code}")
    return peak


def _family(pid: int) -> list[int]:
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    return found


def _bytes(pid: int) -> int:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


if __name__ == "__main__":
    main()
