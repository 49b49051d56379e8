"""Ports and directories, decided without a socket where one can be avoided."""

import pytest

from cdc.errors import ConfigError
from deploy.stack import settings
from deploy.stack.settings import DEFAULT_PORTS, FREE_PORTS, Ports, Settings, StackError


@pytest.fixture
def all_free(monkeypatch):
    """A machine on which every port is free."""
    monkeypatch.setattr(settings, "port_problem", lambda _: "")


def test_ports_come_from_their_variables():
    """Only what is set is wanted; zero is a wish too."""
    ports = Ports.from_env({"CDC_PG_PORT": "5555", "CDC_REDIS_PORT": "0", "CDC_ES_PORT": " "})
    assert ports.wanted == {"CDC_PG_PORT": 5555, "CDC_REDIS_PORT": 0}


def test_ports_report_every_bad_variable_at_once():
    """One error names each variable that is not a port, with its value."""
    with pytest.raises(ConfigError, match="CDC_PG_PORT=x, CDC_ES_PORT=65536, CDC_REDIS_PORT=-1"):
        Ports.from_env({"CDC_PG_PORT": "x", "CDC_ES_PORT": "65536", "CDC_REDIS_PORT": "-1"})


def test_resolve_prefers_the_setting_then_memory_then_default(all_free):
    """A setting wins over what is remembered, which wins over the default."""
    known = {"CDC_PG_PORT": 1111, "CDC_REDIS_PORT": 2222}
    ports = settings.resolve_ports({"CDC_PG_PORT": 3333}, known)
    assert ports == {**DEFAULT_PORTS, "CDC_PG_PORT": 3333, "CDC_REDIS_PORT": 2222}


def test_resolve_keeps_the_port_of_a_running_server(all_free):
    """Zero does not move a server that runs."""
    ports = settings.resolve_ports(
        {"CDC_PG_PORT": 0}, {"CDC_PG_PORT": 7000}, frozenset({"CDC_PG_PORT"})
    )
    assert ports["CDC_PG_PORT"] == 7000


def test_resolve_picks_distinct_free_ports_and_remembers_them(all_free):
    """Zero picks a port once; the next start with the memory of the first gives the same."""
    wanted = Ports.free().wanted
    first = settings.resolve_ports(wanted, {})
    assert len(set(first.values())) == len(DEFAULT_PORTS)
    assert all(port in FREE_PORTS for port in first.values())
    assert settings.resolve_ports(wanted, first) == first


def test_resolve_picks_anew_when_the_remembered_port_was_taken(monkeypatch):
    """A picked port that someone else took meanwhile is replaced without a word."""
    monkeypatch.setattr(settings, "port_problem", lambda port: "is taken" * (port == 20_001))
    ports = settings.resolve_ports({"CDC_PG_PORT": 0}, {"CDC_PG_PORT": 20_001})
    assert ports["CDC_PG_PORT"] != 20_001


def test_pick_free_gives_up_with_a_sentence(monkeypatch):
    """When nothing is free the error says which settings could help."""
    monkeypatch.setattr(settings, "port_problem", lambda _: "is taken")
    with pytest.raises(StackError, match="no port between 20000 and 32000") as caught:
        settings.pick_free(())
    assert "CDC_PG_PORT" in caught.value.hint


def test_two_servers_cannot_share_a_port():
    """The error names both variables."""
    with pytest.raises(ConfigError, match="CDC_PG_PORT and CDC_REDIS_PORT are both 9"):
        settings.check_distinct({"CDC_PG_PORT": 9, "CDC_REDIS_PORT": 9})


def test_remembered_ports_survive_and_nonsense_does_not(tmp_path):
    """What was written is read back; a torn or foreign file is as good as none."""
    settings.remember_ports(tmp_path, {"CDC_PG_PORT": 7})
    assert settings.remembered_ports(tmp_path) == {"CDC_PG_PORT": 7}
    for text in ("{", "[]", '{"OTHER": 1}', '{"CDC_PG_PORT": null}'):
        (tmp_path / "ports.json").write_text(text)
        assert settings.remembered_ports(tmp_path) == {}
    assert settings.remembered_ports(tmp_path / "nowhere") == {}


def test_settings_default_to_the_cache(monkeypatch, tmp_path):
    """Without CDC_STACK_DIR the stack lives in the cache directory."""
    monkeypatch.setenv("CDC_CACHE", str(tmp_path))
    assert Settings.from_env({}).directory == tmp_path / "stack"
    assert Settings.from_env({"CDC_STACK_DIR": "/x"}).directory.as_posix() == "/x"


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "inf"])
def test_settings_refuse_a_bad_time_limit(text):
    """A time limit that is no positive number of seconds is a configuration error."""
    with pytest.raises(ConfigError, match=f"CDC_STACK_TIMEOUT={text}"):
        Settings.from_env({"CDC_STACK_TIMEOUT": text})


def test_settings_take_a_time_limit_with_its_unit():
    """90s and 90 are the same."""
    assert Settings.from_env({"CDC_STACK_TIMEOUT": "90s"}).start_timeout_s == 90
