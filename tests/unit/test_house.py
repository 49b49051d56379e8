"""Rules of the house that no linter knows."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from cdc import config, wiring

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "deploy" / "cdc.example.toml"


def load_example(monkeypatch):
    monkeypatch.setenv("CDC_PG_PASSWORD", "x")
    return wiring.load_config(EXAMPLE)


def test_the_example_shows_every_option_at_its_default(monkeypatch):
    """Each option of each section stands in the example, and means what leaving it out means."""
    loaded = load_example(monkeypatch)
    tree = tomllib.loads(EXAMPLE.read_text())
    comments = EXAMPLE.read_text()
    sections = [(name, getattr(loaded, name)) for name in ("source", "kafka", "connect", "spark")]
    sections += [(name, getattr(loaded, name)) for name in ("batch", "quarantine", "run")]
    sections += [(f"sinks.{sink.name}", sink) for sink in loaded.sinks]
    for where, section in sections:
        shown = next(
            (sink for sink in tree["sinks"] if where == f"sinks.{sink['name']}"), None
        ) or tree.get(where, {})
        for name, option in type(section).model_fields.items():
            assert name in shown or f"# {name} = " in comments, f"{where}.{name} is not shown"
            if name in shown and not option.is_required() and name != "password":
                default = option.get_default(call_default_factory=True)
                assert getattr(section, name) == default, f"{where}.{name} is not its default"


def test_the_example_has_every_sink(monkeypatch):
    """A sink that cannot be seen cannot be used."""
    assert {sink.type for sink in load_example(monkeypatch).sinks} == set(wiring._SINKS)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def modules(package):
    return [p for p in sorted((ROOT / package).glob("*.py")) if p.name != "__init__.py"]


CROSSES = {"wiring.py", "cli.py"}


@pytest.mark.parametrize(
    ("path", "foreign"),
    [
        *((path, ("sinks", "connectors", "deploy")) for path in modules("cdc")),
        *((path, ("connectors", "deploy")) for path in modules("sinks")),
        *((path, ("sinks", "deploy", "pyspark")) for path in modules("connectors")),
    ],
    ids=lambda value: f"{value.parent.name}/{value.name}" if isinstance(value, Path) else "",
)
def test_imports_go_one_way(path, foreign):
    """The core knows no sink, sinks know no connector, and only the wiring crosses."""
    if path.name in CROSSES:
        return
    crossing = [name for name in imports(path) if name.split(".")[0] in foreign]
    assert crossing == []


def test_a_sink_that_takes_rows_knows_no_spark():
    """Only the frame sink speaks Spark."""
    for path in modules("sinks"):
        if not path.name.startswith("delta"):
            assert not [name for name in imports(path) if name.startswith("pyspark")], path.name


def test_settings_refuse_what_they_do_not_know():
    """Every section is frozen and closed."""
    for model in (config.Config, *config.Settings.__subclasses__()):
        assert model.model_config.get("extra") == "forbid"
        assert model.model_config.get("frozen") is True


def test_every_test_that_the_readme_names_is_there():
    """The table of what happens if points at tests, and a renamed one would be a broken promise."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "README.md").read_text(encoding="utf-8")))
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    found = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    assert named
    assert named - found == set()
