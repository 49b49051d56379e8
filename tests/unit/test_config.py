"""The configuration: every problem at once, with its path, and secrets only from outside."""

from typing import Literal

import pytest

from cdc import config
from cdc.config import Secret, SinkSettings, Url
from cdc.errors import ConfigError

WHOLE = """
name = "shop"
[source]
database = "shop"
user = "postgres"
password = "${PW}"
tables = ["public.orders"]
[[sinks]]
name = "cache"
type = "toy"
url = "redis://localhost"
"""


class ToySettings(SinkSettings):
    type: Literal["toy"]
    url: Url
    password: Secret | None = None


@pytest.fixture
def load(tmp_path):
    def load(text, **env):
        path = tmp_path / "cdc.toml"
        path.write_text(text)
        return config.load(path, {"toy": lambda: ToySettings}, env)

    return load


def test_a_whole_file_is_loaded_with_defaults(load):
    """What the file does not say has its default."""
    loaded = load(WHOLE, PW="hunter2")
    assert loaded.source.password.get_secret_value() == "hunter2"
    assert loaded.source.port == 5432
    assert loaded.sinks[0] == ToySettings(name="cache", type="toy", url="redis://localhost")


def test_every_problem_is_reported_at_once_with_its_path(load):
    """A user mends the file once, not once per problem."""
    text = WHOLE.replace('database = "shop"', "prot = 1").replace('name = "shop"', 'name = "Shop!"')
    text = text.replace('url = "redis://localhost"', 'url = "localhost"')
    with pytest.raises(ConfigError) as caught:
        load(text)
    message = str(caught.value)
    for expected in (
        "source.password: the environment variable PW is not set",
        "source.database: is required",
        "source.prot: is not an option",
        "name: use 1 to 40 lower-case letters",
        "sinks.0.url: write a whole address",
    ):
        assert expected in message
    assert "5 problem(s)" in message


def test_a_secret_in_the_file_is_refused_and_not_repeated(load):
    """A password written into the file is a problem, and the problem does not print it."""
    with pytest.raises(ConfigError) as caught:
        load(WHOLE.replace("${PW}", "hunter2"))
    assert "source.password: a secret must not stand in the file" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_secret_comes_from_a_file(load, tmp_path):
    """A key with _file is read, relative to the configuration, without the line end."""
    (tmp_path / "pw").write_text("hunter2\n")
    loaded = load(WHOLE.replace('password = "${PW}"', 'password_file = "pw"'))
    assert loaded.source.password.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(loaded)


def test_a_missing_secret_file_is_a_problem_with_its_path(load):
    """The path of the file and of the key are both named."""
    with pytest.raises(ConfigError, match=r"source\.password_file: .*pw: no such file"):
        load(WHOLE.replace('password = "${PW}"', 'password_file = "pw"'))


def test_a_password_in_an_address_is_refused(load):
    """Addresses are logged; so they must not carry secrets."""
    with pytest.raises(ConfigError, match="do not belong in the address"):
        load(WHOLE.replace("redis://localhost", "redis://:hunter2@localhost"), PW="x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7d", 604800.0), ("1.5h", 5400.0), ("30 s", 30.0), ("250ms", 0.25)],
)
def test_durations_have_units(load, text, expected):
    """Durations are written with a unit and become seconds."""
    loaded = load(WHOLE + f'[kafka]\ndelete_retention = "{text}"\n', PW="x")
    assert loaded.kafka.delete_retention == expected


@pytest.mark.parametrize("text", ['"7"', "7", '"7 parsecs"', '"-1s"'])
def test_durations_without_a_known_unit_are_refused(load, text):
    """A bare number could mean anything."""
    with pytest.raises(ConfigError, match=r"kafka\.delete_retention: .*like"):
        load(WHOLE + f"[kafka]\ndelete_retention = {text}\n", PW="x")


def test_two_sinks_of_one_name_are_refused(load):
    """A sink's name is the name of its ledger, so it must be its own."""
    sink = WHOLE[WHOLE.index("[[sinks]]") :]
    with pytest.raises(ConfigError, match=r'sinks\.1\.name: "cache" is taken'):
        load(WHOLE + sink, PW="x")


def test_an_unknown_sink_type_names_the_known_ones(load):
    """The way out is in the message."""
    with pytest.raises(ConfigError, match=r"sinks\.0\.type: must be one of toy"):
        load(WHOLE.replace('type = "toy"', 'type = "mongo"'), PW="x")


@pytest.mark.parametrize("tables", ['["orders"]', '["a.b.c"]', "[]", '["a.b", "a.b"]'])
def test_tables_are_listed_once_as_schema_and_name(load, tables):
    """A table without a schema could be any."""
    with pytest.raises(ConfigError, match=r"source\.tables"):
        load(WHOLE.replace('["public.orders"]', tables), PW="x")


def test_text_that_is_not_toml_says_where(load):
    """A typing error gives its line."""
    with pytest.raises(ConfigError, match=r"not TOML: .*line 2"):
        load("name = 1\nb = = 2")


def test_a_missing_file_is_one_sentence(tmp_path):
    """No traceback, and the way out."""
    with pytest.raises(ConfigError, match="no such file") as caught:
        config.load(tmp_path / "none.toml", {})
    assert "--config" in caught.value.hint


def test_settings_are_frozen(load):
    """What was checked stays as it was checked."""
    loaded = load(WHOLE, PW="x")
    with pytest.raises(ValueError, match="frozen"):
        loaded.name = "other"
