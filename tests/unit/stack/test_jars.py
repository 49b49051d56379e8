"""The artefact cache, with a download that is a function."""

import hashlib
from pathlib import Path

import pytest

from cdc import jars
from cdc.errors import ConfigError
from cdc.jars import Artefact, FetchError, cached_path, fetch, parse

SHA = "a" * 64


def artefact(name, content=None):
    content = name.encode() if content is None else content
    return Artefact("org.example", name, "1.0", hashlib.sha256(content).hexdigest(), len(content))


class Repository:
    """A download that serves each artefact's name as its content, unless told otherwise."""

    def __init__(self):
        self.asked = []
        self.content = {}

    def __call__(self, artefacts, work, received):
        for wanted in artefacts:
            self.asked.append(wanted.name)
            path = work / wanted.filename
            path.write_bytes(self.content.get(wanted.name, wanted.name.encode()))
            received(wanted, path.stat().st_size)
            yield wanted, path


@pytest.fixture
def repository():
    return Repository()


def test_parse_reads_classifier_and_extension():
    """A line may name a classifier and an extension; a comment and an empty line are nothing."""
    text = f"# head\n\n{SHA}  12 org.x:a_2.13:1.0:plugin@tar.gz # why\n{SHA} 7 g:b:2\n"
    first, second = parse(text)
    assert first.filename == "a_2.13-1.0-plugin.tar.gz"
    assert (first.size, first.coordinate) == (12, "org.x:a_2.13:1.0")
    assert second.filename == "b-2.jar"


@pytest.mark.parametrize(
    "line", ["g:a:1", f"{SHA} g:a:1", f"{SHA[1:]} 1 g:a:1", f"{SHA} 1 g:a", f"{SHA} 1 ../g:a:1/.."]
)
def test_parse_names_the_bad_line(line):
    """Whatever is not sha256, size and coordinate is refused with its line number."""
    with pytest.raises(ConfigError, match=r"list\.txt, line 2"):
        parse(f"# one\n{line}\n", "list.txt")


@pytest.mark.parametrize(
    "path",
    [
        Path(jars.__file__).with_name("spark-jars.txt"),
        *sorted((Path(jars.__file__).parents[1] / "deploy/stack/jars").glob("*.txt")),
    ],
    ids=lambda path: path.name,
)
def test_every_shipped_list_is_valid(path):
    """Each pinned list parses, names no file twice and has a size for each."""
    found = jars.read_list(path)
    assert found
    assert len({a.filename for a in found}) == len(found)
    assert all(a.size > 0 for a in found)


def test_fetch_returns_cached_files_in_order(tmp_path, repository):
    """The paths come in the order of the list, and a second call downloads nothing."""
    wanted = [artefact("b"), artefact("a"), artefact("b")]
    first = fetch(wanted, tmp_path, download=repository)
    assert [p.read_text() for p in first] == ["b", "a", "b"]
    assert fetch(wanted, tmp_path, download=repository) == first
    assert sorted(repository.asked) == ["a", "b"]


def test_fetch_refuses_a_wrong_sha256(tmp_path, repository):
    """A download that is not what the list says never enters the cache."""
    repository.content["a"] = b"something else"
    with pytest.raises(FetchError, match=r"org\.example:a:1\.0 was refused"):
        fetch([artefact("a")], tmp_path, download=repository)
    assert not cached_path(artefact("a"), tmp_path).exists()
    assert not (tmp_path / "tmp").exists()


def test_fetch_replaces_a_damaged_file(tmp_path, repository):
    """A cached file that was damaged is fetched again, and only that one."""
    wanted = [artefact("a"), artefact("b")]
    fetch(wanted, tmp_path, download=repository)
    cached_path(wanted[1], tmp_path).write_bytes(b"bit rot")
    repository.asked.clear()
    fetch(wanted, tmp_path, download=repository)
    assert repository.asked == ["b"]
    assert cached_path(wanted[1], tmp_path).read_text() == "b"


def test_fetch_goes_on_after_an_interruption(tmp_path, repository):
    """What arrived before a fetch broke is kept; the next one asks only for the rest."""
    wanted = [artefact("a"), artefact("b")]

    def broken(artefacts, work, received):
        stream = repository(artefacts, work, received)
        yield next(stream)
        raise FetchError("the network went away")

    with pytest.raises(FetchError, match="went away"):
        fetch(wanted, tmp_path, download=broken)
    (arrived,) = repository.asked
    repository.asked.clear()
    fetch(wanted, tmp_path, download=repository)
    assert repository.asked == [name for name in ("a", "b") if name != arrived]


def test_fetch_clears_what_a_killed_fetch_left(tmp_path, repository):
    """Half a download of a killed process is deleted, not mistaken for a file."""
    (tmp_path / "tmp" / "old").mkdir(parents=True)
    (tmp_path / "tmp" / "old" / "a-1.0.jar.part").write_text("ha")
    fetch([artefact("a")], tmp_path, download=repository)
    assert not (tmp_path / "tmp").exists()


def test_fetch_works_beside_a_download_that_lost_its_parent(tmp_path, repository, monkeypatch):
    """An orphan that keeps writing what we try to delete does not stop the next fetch."""
    (tmp_path / "tmp" / "old").mkdir(parents=True)
    monkeypatch.setattr(jars.shutil, "rmtree", lambda *_, **__: None)
    fetch([artefact("a")], tmp_path, download=repository)
    assert cached_path(artefact("a"), tmp_path).read_text() == "a"


def test_fetch_reports_progress_to_the_end(tmp_path, repository):
    """Progress only grows and ends with every file and every byte."""
    seen = []
    fetch([artefact("a"), artefact("bb")], tmp_path, seen.append, download=repository)
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)
    last = seen[-1]
    assert (last.files_done, last.files_total, last.bytes_done, last.bytes_total) == (2, 2, 3, 3)


def test_fetch_says_what_to_do_when_the_cache_is_no_directory(tmp_path, repository):
    """A cache that cannot be written gives one sentence that names it and the setting."""
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="cannot be used") as caught:
        fetch([artefact("a")], tmp_path / "file", download=repository)
    assert "CDC_CACHE" in caught.value.hint


def test_batches_spread_large_files_and_keep_all():
    """Large files travel alone, small ones share, and none is lost."""
    sizes = [50, 9_000_000, 100_000_000, 3_000_000, 60]
    wanted = [Artefact("g", f"n{i}", "1", SHA, size) for i, size in enumerate(sizes)]
    parts = jars.batches(wanted)
    assert [[a.size for a in part] for part in parts] == [
        [100_000_000],
        [9_000_000],
        [3_000_000, 60, 50],
    ]


def test_ivy_module_asks_for_exactly_one_file():
    """The module for Ivy carries classifier and extension and resolves nothing further."""
    text = jars.ivy_module([Artefact("g", "n", "1", SHA, 1, "plugin", "tar.gz")])
    assert 'm:classifier="plugin"' in text
    assert 'ext="tar.gz"' in text
    assert 'transitive="false"' in text


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ('Picked up JAVA_TOOL_OPTIONS: -Dx=1\nopenjdk version "25-ea" 2025-09-16', 25),
        ("bash: java: command not found", None),
    ],
)
def test_java_version_reads_every_style(text, version):
    """Old and new version strings give the major version; anything else gives none."""
    assert jars.java_version(text) == version


def fake_java(directory, version):
    program = directory / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return program


def test_find_java_takes_java_home_first(tmp_path, monkeypatch):
    """JAVA_HOME wins over PATH."""
    program = fake_java(tmp_path, "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert jars.find_java() == program


def test_find_java_refuses_an_old_one(tmp_path, monkeypatch):
    """A Java that is too old is named with its version and what is needed."""
    fake_java(tmp_path, "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(jars.JavaError, match="is Java 11, but 17 or newer"):
        jars.find_java()


def test_find_java_says_where_it_looked(tmp_path, monkeypatch):
    """Without any Java the error says where it looked and what to install."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(jars.JavaError, match="no java on PATH") as caught:
        jars.find_java()
    assert "Install Java 17" in caught.value.hint


def test_cache_dir_prefers_the_setting(monkeypatch):
    """CDC_CACHE wins, then XDG_CACHE_HOME, then the home directory of an ordinary user."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.delenv("CDC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert jars.cache_dir() == Path("/home/x/.cache/cdc-sync")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert jars.cache_dir() == Path("/xdg/cdc-sync")
    monkeypatch.setenv("CDC_CACHE", "/mine")
    assert jars.cache_dir() == Path("/mine")
