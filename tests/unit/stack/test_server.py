"""What servers write before they start."""

import pytest

from deploy.stack import servers
from deploy.stack.server import Place, make_password, password_path, properties, read_password
from deploy.stack.settings import DEFAULT_PORTS


def test_properties_escape_what_java_would_misread():
    """Backslashes are doubled, and characters outside ASCII become UTF-16 escapes."""
    assert (
        properties({"a": "x\\y", "b": "é𝄞", "c": 1}) == "a=x\\\\y\nb=\\u00e9\\ud834\\udd1e\nc=1\n"
    )


def test_password_is_made_once_and_closed_to_others(tmp_path):
    """The password stays the same, and only its owner may read it."""
    make_password(tmp_path)
    first = read_password(tmp_path)
    make_password(tmp_path)
    assert read_password(tmp_path) == first
    assert len(first) >= 20
    assert password_path(tmp_path).stat().st_mode & 0o777 == 0o600


def test_no_command_carries_the_password(tmp_path, monkeypatch):
    """Process lists are public, so no server gets the password as an argument."""
    monkeypatch.setattr(servers.fetch, "unpacked", lambda _: tmp_path)
    (tmp_path / "elasticsearch-1").mkdir()
    make_password(tmp_path)
    place = Place(tmp_path, DEFAULT_PORTS, java=tmp_path / "bin" / "java")
    for server in servers.servers().values():
        line = " ".join(server.command(place))
        assert read_password(tmp_path) not in line


def test_each_server_comes_after_those_it_needs():
    """The order of the servers is an order in which they can start."""
    seen = set()
    for server in servers.servers().values():
        assert set(server.needs) <= seen
        seen.add(server.name)


def test_every_port_belongs_to_one_server():
    """Each port variable is used by exactly one server."""
    used = [variable for server in servers.servers().values() for variable in server.ports]
    assert sorted(used) == sorted(DEFAULT_PORTS)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Redis server v=6.2.14 sha=40305114:0 malloc=libc bits=64", (6, 2, 14)),
        ("Redis server v=7.0.15 sha=00000000:0", (7, 0, 15)),
        ("nothing of the kind", ()),
    ],
)
def test_redis_version_is_read(text, version):
    """The version is found in what redis-server prints, or there is none."""
    assert servers.redis_version(text) == version
