"""Pinned Maven artefacts -> checked files in a per-user cache.

A list names every artefact with its sha256; nothing is resolved transitively. The Ivy that pyspark
ships does the fetching, a few processes at once. A file enters the cache by rename and only after
its sha256 was checked, so an interrupted fetch goes on with what is still missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.sax.saxutils import quoteattr

from cdc.errors import CdcError, ConfigError

JAVA_MINIMUM = 17  # Spark 4, Kafka 4 and Debezium 3 all ask for it
PARALLEL = 4  # Ivy processes; more only wait for each other on two cores
BATCH_BYTES = 8_000_000  # per Ivy process: enough to pay for its start, small enough to spread
POLL_S = 0.1

_LINE = re.compile(
    r"(?P<sha256>[0-9a-f]{64})\s+(?P<size>\d+)\s+"
    r"(?P<group>[\w.-]+):(?P<name>[\w.-]+):(?P<version>[\w.-]+)"
    r"(?::(?P<classifier>[\w.-]+))?(?:@(?P<ext>[\w.]+))?"
)
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')

# No root: Ivy's own default. Without POMs there is one request per artefact instead of five.
_IVY_SETTINGS = """\
<ivysettings>
  <settings defaultResolver="public"/>
  <resolvers>
    <ibiblio name="public" m2compatible="true" usepoms="false" useMavenMetadata="false"/>
  </resolvers>
</ivysettings>
"""


class FetchError(CdcError):
    """An artefact could not be had, or is not what the list says."""


class JavaError(CdcError):
    """There is no Java that can be used."""


@dataclass(frozen=True, slots=True)
class Artefact:
    """One file: its Maven coordinate, its size in bytes and the sha256 it must have."""

    group: str
    name: str
    version: str
    sha256: str
    size: int
    classifier: str = ""
    ext: str = "jar"

    @property
    def filename(self) -> str:
        classifier = f"-{self.classifier}" if self.classifier else ""
        return f"{self.name}-{self.version}{classifier}.{self.ext}"

    @property
    def coordinate(self) -> str:
        return f"{self.group}:{self.name}:{self.version}"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a fetch is. *current* is the file that just arrived, or empty."""

    files_done: int
    files_total: int
    bytes_done: int
    bytes_total: int
    current: str = ""


OnProgress = Callable[[Progress], None]
Received = Callable[[Artefact, int], None]
# Yields each artefact with the path of its complete file; reports bytes on the way.
Download = Callable[[Sequence[Artefact], Path, Received], Iterator[tuple[Artefact, Path]]]


def parse(text: str, source: str = "artefact list") -> list[Artefact]:
    """Read lines of `sha256 bytes group:name:version[:classifier][@ext]`; # starts a comment."""
    found = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if not match:
            raise ConfigError(
                f"{source}, line {number}: not an artefact",
                hint="Write: sha256 bytes group:name:version[:classifier][@ext].",
            )
        part = match.groupdict()
        found.append(
            Artefact(
                group=part["group"],
                name=part["name"],
                version=part["version"],
                sha256=part["sha256"],
                size=int(part["size"]),
                classifier=part["classifier"] or "",
                ext=part["ext"] or "jar",
            )
        )
    return found


def read_list(path: Path) -> list[Artefact]:
    return parse(path.read_text(encoding="utf-8"), path.name)


def cache_dir() -> Path:
    """Where fetched files live: $CDC_CACHE, else the user's cache directory.

    Root's home is closed to the unprivileged user that PostgreSQL and Elasticsearch run as, so root
    has its cache in /var/cache.
    """
    if chosen := os.environ.get("CDC_CACHE"):
        return Path(chosen).expanduser().absolute()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).absolute() / "cdc-sync"
    if os.geteuid() == 0:
        return Path("/var/cache/cdc-sync")
    return Path.home() / ".cache" / "cdc-sync"


def spark_jars(on_progress: OnProgress | None = None) -> list[Path]:
    """The jars that the job passes to Spark in `spark.jars`, fetched if they are missing."""
    wanted = read_list(Path(__file__).with_name("spark-jars.txt"))
    return fetch(wanted, cache_dir(), on_progress)


def make_dir(path: Path) -> None:
    """Create *path* and its parents, open for reading whatever the umask is.

    A server that runs as another user must get through.
    """
    for step in (*reversed(path.parents), path):
        with contextlib.suppress(FileExistsError):
            step.mkdir()
            step.chmod(0o755)


def cached_path(artefact: Artefact, cache: Path) -> Path:
    return cache / "artefacts" / artefact.group / artefact.filename


def is_intact(artefact: Artefact, path: Path) -> bool:
    """Say whether *path* holds exactly *artefact*; a missing file does not."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == artefact.sha256
    except FileNotFoundError:
        return False


def fetch(
    artefacts: Sequence[Artefact],
    cache: Path,
    on_progress: OnProgress | None = None,
    *,
    download: Download | None = None,
) -> list[Path]:
    """Return the cached file of each artefact, in order; fetch what is missing or damaged.

    Safe to call from several processes at once: one fetches, the others wait and find the files.
    """
    missing = _missing(artefacts, cache)
    if missing:
        with cache_lock(cache):
            missing = _missing(missing, cache)
            _fetch_missing(missing, cache, on_progress, download or ivy)
    return [cached_path(artefact, cache) for artefact in artefacts]


def _missing(artefacts: Sequence[Artefact], cache: Path) -> list[Artefact]:
    try:
        return [a for a in dict.fromkeys(artefacts) if not is_intact(a, cached_path(a, cache))]
    except OSError as error:
        raise _unusable(cache, error) from error


@contextlib.contextmanager
def cache_lock(cache: Path) -> Iterator[None]:
    """Hold the cache for changes; whoever else wants to change it waits."""
    with contextlib.ExitStack() as held:
        try:
            make_dir(cache)
            lock = held.enter_context((cache / "fetch.lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise _unusable(cache, error) from error
        yield


def _unusable(cache: Path, error: OSError) -> FetchError:
    reason = (error.strerror or "I/O error").lower()
    return FetchError(
        f"the cache directory {cache} cannot be used: {reason}",
        hint="Set CDC_CACHE to a directory that you may write to and that has 1 GB free.",
    )


def _fetch_missing(
    missing: Sequence[Artefact], cache: Path, on_progress: OnProgress | None, download: Download
) -> None:
    meter = _Meter(missing, on_progress)
    scratch = cache / "tmp"
    try:
        # The lock is ours, so whatever lies here was left behind by a fetch that was killed. An
        # Ivy of its may still write for a while, into a directory that nobody else uses.
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(exist_ok=True)
        with ThreadPoolExecutor(PARALLEL) as pool:
            jobs = [
                pool.submit(_fetch_batch, batch, cache, scratch, meter, download)
                for batch in batches(missing)
            ]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                meter.stop.set()
                pool.shutdown(cancel_futures=True)
                raise
    except OSError as error:
        raise _unusable(cache, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def batches(artefacts: Sequence[Artefact]) -> list[list[Artefact]]:
    """Cut the work into parts of about BATCH_BYTES, the largest files first."""
    parts: list[list[Artefact]] = []
    filled = BATCH_BYTES
    for artefact in sorted(artefacts, key=lambda a: -a.size):
        if filled >= BATCH_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append(artefact)
        filled += artefact.size
    return parts


def _fetch_batch(
    batch: Sequence[Artefact], cache: Path, scratch: Path, meter: _Meter, download: Download
) -> None:
    work = Path(tempfile.mkdtemp(dir=scratch))
    for artefact, path in download(batch, work, meter.received):
        if meter.stop.is_set():
            return
        if not is_intact(artefact, path):
            raise FetchError(
                f"{artefact.coordinate} was refused: its sha256 is not {artefact.sha256[:12]}…",
                hint="Run the command again; if it is refused again, what stands between you and "
                "the artefact repository changes files.",
            )
        target = cached_path(artefact, cache)
        make_dir(target.parent)
        # The archive may be unpacked by, or a jar be read by, the unprivileged user of a server.
        path.chmod(0o644)
        path.replace(target)
        meter.finished(artefact)


class _Meter:
    """Adds up what several downloads report; calls back one at a time."""

    def __init__(self, artefacts: Sequence[Artefact], on_progress: OnProgress | None) -> None:
        self.stop = threading.Event()
        self._wanted = len(artefacts)
        self._bytes_total = sum(a.size for a in artefacts)
        self._bytes: dict[Artefact, int] = {}
        self._done = 0
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def received(self, artefact: Artefact, byte_count: int) -> None:
        if self.stop.is_set():
            raise FetchError("the fetch was stopped", hint="Run the command again to go on.")
        with self._lock:
            if self._bytes.get(artefact) != byte_count:
                self._bytes[artefact] = byte_count
                self._report("")

    def finished(self, artefact: Artefact) -> None:
        with self._lock:
            self._bytes[artefact] = artefact.size
            self._done += 1
            self._report(artefact.filename)

    def _report(self, current: str) -> None:
        if self._on_progress:
            done = sum(self._bytes.values())
            total = self._bytes_total
            self._on_progress(Progress(self._done, self._wanted, done, total, current))


def ivy(
    artefacts: Sequence[Artefact], work: Path, received: Received
) -> Iterator[tuple[Artefact, Path]]:
    """Download with the Ivy that pyspark ships; $CDC_IVY_SETTINGS names other Ivy settings."""
    settings = work / "ivysettings.xml"
    settings.write_text(_IVY_SETTINGS, encoding="utf-8")
    wanted = work / "ivy.xml"
    wanted.write_text(ivy_module(artefacts), encoding="utf-8")
    cache = work / "cache"
    command = [
        *(str(find_java()), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx128m"),
        *("-cp", str(_ivy_jar()), "org.apache.ivy.Main"),
        *("-settings", os.environ.get("CDC_IVY_SETTINGS") or str(settings)),
        *("-ivy", str(wanted), "-cache", str(cache)),
    ]
    log = work / "ivy.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    left = list(artefacts)
    try:
        is_running = True
        while left and is_running:
            is_running = process.poll() is None
            for artefact in tuple(left):
                path = _ivy_path(artefact, cache)
                if path.exists():
                    left.remove(artefact)
                    yield artefact, path
                else:
                    received(artefact, _size(path.with_name(path.name + ".part")))
            if is_running:
                time.sleep(POLL_S)
    finally:
        process.kill()
        process.wait()
    if left:
        raise _not_fetched(left, log)


def ivy_module(artefacts: Sequence[Artefact]) -> str:
    """The ivy.xml that asks for exactly these files."""
    rows = []
    for a in artefacts:
        classifier = f" m:classifier={quoteattr(a.classifier)}" if a.classifier else ""
        rows.append(
            f"    <dependency org={quoteattr(a.group)} name={quoteattr(a.name)}"
            f' rev={quoteattr(a.version)} transitive="false" conf="default->*">\n'
            f"      <artifact name={quoteattr(a.name)} type={quoteattr(a.ext)}"
            f" ext={quoteattr(a.ext)}{classifier}/>\n"
            "    </dependency>"
        )
    dependencies = "\n".join(rows)
    return f"""\
<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="cdc" module="fetch"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
{dependencies}
    <conflict manager="all"/>
  </dependencies>
</ivy-module>
"""


def _ivy_path(artefact: Artefact, cache: Path) -> Path:
    return cache / artefact.group / artefact.name / f"{artefact.ext}s" / artefact.filename


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _not_fetched(left: Sequence[Artefact], log: Path) -> FetchError:
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    text = log.read_text(encoding="utf-8", errors="replace")
    telling = re.search(r"(UnknownHost|ConnectException|SSL\w+|timed out|not found).*", text)
    reason = f" ({telling.group(0).strip()[:120]})" if telling else ""
    return FetchError(
        f"{left[0].coordinate}{more} could not be fetched{reason}",
        hint="Check the network and run the command again: what has arrived is kept. Behind a "
        "proxy set JAVA_TOOL_OPTIONS=-Dhttps.proxyHost=…, for a mirror CDC_IVY_SETTINGS.",
    )


def _ivy_jar() -> Path:
    spec = find_spec("pyspark")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for jar in sorted(Path(place, "jars").glob("ivy-*.jar")):
            return jar
    raise FetchError("pyspark has no Ivy", hint="Install the project's dependencies: uv sync.")


def find_java() -> Path:
    """The java of $JAVA_HOME, else of PATH; raise JavaError when it is missing or too old."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home, "bin"))) if home else shutil.which("java")
    where = f"in JAVA_HOME={home}" if home else "on PATH"
    wish = f"Install Java {JAVA_MINIMUM} or newer, or point JAVA_HOME to one."
    if not found:
        raise JavaError(f"there is no java {where}", hint=wish)
    try:
        answer = subprocess.run(
            [found, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"{found} does not start", hint=wish) from error
    version = java_version(answer.stderr + answer.stdout)
    if version is None:
        raise JavaError(f"{found} does not say its version", hint=wish)
    if version < JAVA_MINIMUM:
        raise JavaError(
            f"{found} is Java {version}, but {JAVA_MINIMUM} or newer is needed", hint=wish
        )
    return Path(found)


def java_version(text: str) -> int | None:
    """The major version in what `java -version` prints; 1.8 is 8."""
    match = _JAVA_VERSION.search(text)
    return int(match.group(1)) if match else None
