"""One TOML file becomes frozen, checked settings. Every problem is reported at once.

Secrets never stand in the file: `password = "${VAR}"` takes one from the environment and
`password_file = "path"` from a file. What a sink needs is checked by the model beside that sink;
the caller hands those models in, because cdc knows no sink by name.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    SerializeAsAny,
    ValidationError,
    field_validator,
)

from cdc.errors import ConfigError

_DURATION = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_M = TypeVar("_M", bound=BaseModel)


class Outside(str):
    """Text that came from the environment or from a file, as secrets must."""

    __slots__ = ()


def _quantity(units: Mapping[str, float], example: str) -> Callable[[object], object]:
    def parse(value: object) -> object:
        if not isinstance(value, str):
            raise ValueError(f'write it with a unit, like "{example}"')  # noqa: TRY004
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", value.strip())
        if match is None or match[2] not in units:
            raise ValueError(f'"{value}" has no known unit ({", ".join(units)}), like "{example}"')
        return float(match[1]) * units[match[2]]

    return parse


def _secret(value: object) -> object:
    if isinstance(value, str) and value and not isinstance(value, Outside):
        raise ValueError(
            'a secret must not stand in the file: write "${VARIABLE}", or use this key with _file'
        )
    return value


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("use 1 to 40 lower-case letters, digits and _, beginning with a letter")
    return value


def plain_url(value: str) -> str:
    """A URL without a password in it."""
    if not re.match(r"[a-z]+://[^/]", value):
        raise ValueError('write a whole address, like "http://localhost:9200"')
    if "@" in value.split("://", 1)[1].split("/", 1)[0]:
        raise ValueError("user and password do not belong in the address; set them beside it")
    return value.rstrip("/")


Seconds = Annotated[float, BeforeValidator(_quantity(_DURATION, "30s")), Field(ge=0)]
Bytes = Annotated[int, BeforeValidator(_quantity(_SIZE, "8MiB")), Field(gt=0)]
Secret = Annotated[SecretStr, BeforeValidator(_secret)]
Name = Annotated[str, AfterValidator(_name)]
Url = Annotated[str, AfterValidator(plain_url)]


class Settings(BaseModel):
    """The base of every section: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Settings):
    host: str = "localhost"
    port: int = Field(default=5432, gt=0, lt=65536)
    database: str
    user: str
    password: Secret = SecretStr("")
    sslmode: Literal["disable", "prefer", "require", "verify-ca", "verify-full"] = "prefer"
    tables: tuple[str, ...] = Field(min_length=1)

    @field_validator("tables")
    @classmethod
    def _tables(cls, tables: tuple[str, ...]) -> tuple[str, ...]:
        for table in tables:
            if not re.fullmatch(r"[^.]+\.[^.]+", table):
                raise ValueError(f'"{table}" must be written as schema.table')
        if len(set(tables)) < len(tables):
            raise ValueError("a table is listed twice")
        return tables


class Kafka(Settings):
    bootstrap: str = "localhost:9092"
    partitions: int = Field(default=2, gt=0, le=1000)
    replication: int = Field(default=-1, ge=-1)  # -1: as the broker is set up
    delete_retention: Seconds = 7 * 86400.0  # a bootstrap slower than this can miss a delete

    @field_validator("replication")
    @classmethod
    def _replication(cls, value: int) -> int:
        if value == 0:
            raise ValueError("use -1 for the broker's own setting, or a number of copies")
        return value


class Connect(Settings):
    url: Url = "http://localhost:8083"
    timeout: Seconds = 10.0


class Spark(Settings):
    master: str = "local[4]"
    driver_memory: str = Field(default="1g", pattern=r"^\d+[mg]$")
    conf: dict[str, str] = Field(default_factory=dict)


class Batch(Settings):
    max_offsets: int = Field(default=50_000, gt=0)  # read per trigger, over all partitions
    max_changes: int = Field(default=5_000, gt=0)  # in one write
    max_bytes: Bytes = 8 << 20  # in one write


class Quarantine(Settings):
    """Past these limits the sink stops: then the mapping is wrong, or cdc is."""

    max_run: int = Field(default=100, ge=0)  # refused changes, one after the other
    max_ratio: float = Field(default=0.05, ge=0, le=1)  # of all changes, from 1,000 on


class Run(Settings):
    stop_within: Seconds = 30.0
    report_every: Seconds = 10.0
    retry_at_most_every: Seconds = 30.0


class SinkSettings(Settings):
    """What every sink has; the model beside each sink adds its own."""

    name: Name
    type: str
    trigger: Seconds = 0.0  # 0: as soon as there is something to do


class Config(Settings):
    name: Name
    source: Source
    kafka: Kafka = Kafka()
    connect: Connect = Connect()
    spark: Spark = Spark()
    batch: Batch = Batch()
    quarantine: Quarantine = Quarantine()
    run: Run = Run()
    sinks: tuple[SerializeAsAny[SinkSettings], ...] = Field(min_length=1)


def load(
    path: Path,
    sink_models: Mapping[str, Callable[[], type[SinkSettings]]],
    env: Mapping[str, str] = os.environ,
) -> Config:
    """Read and check *path*. Raises ConfigError with every problem found."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {(error.strerror or 'cannot be read').lower()}",
            hint="name your configuration with --config; deploy/cdc.example.toml is a start",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: not TOML: {error}", hint="mend the text at that place"
        ) from None
    problems: list[str] = []
    tree = _expand(tree, "", env, path.parent, problems)
    sinks = _sinks(tree.pop("sinks", None), sink_models, problems)
    config = _checked(Config, {**tree, "sinks": sinks or [_ANY_SINK]}, "", problems)
    if problems or config is None:
        listing = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(
            f"{path}: {len(problems)} problem(s):{listing}",
            hint="mend the keys above; deploy/cdc.example.toml shows every option at its default",
        )
    return config


_ANY_SINK = SinkSettings(name="missing", type="missing")  # keeps one problem from causing another


def _sinks(
    trees: Any, models: Mapping[str, Callable[[], type[SinkSettings]]], problems: list[str]
) -> list[SinkSettings]:
    if not isinstance(trees, list) or not trees:
        problems.append("sinks: at least one [[sinks]] section is needed")
        return []
    found: list[SinkSettings] = []
    for at, tree in enumerate(trees):
        kind = tree.get("type") if isinstance(tree, dict) else None
        if not isinstance(kind, str) or kind not in models:
            problems.append(f"sinks.{at}.type: must be one of {', '.join(sorted(models))}")
            continue
        sink = _checked(models[kind](), tree, f"sinks.{at}.", problems)
        if sink is None:
            continue
        if sink.name in (other.name for other in found):
            problems.append(f'sinks.{at}.name: "{sink.name}" is taken by another sink')
        found.append(sink)
    return found


def _checked(model: type[_M], tree: Any, prefix: str, problems: list[str]) -> _M | None:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            where = prefix + ".".join(str(part) for part in problem["loc"])
            problems.append(f"{where.rstrip('.')}: {_sentence(problem)}")
        return None


def _sentence(problem: Any) -> str:
    match problem["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "is not an option; check the spelling"
        case "value_error":
            return str(problem["ctx"]["error"])
        case _:
            return str(problem["msg"][0].lower() + problem["msg"][1:])


def _expand(tree: Any, where: str, env: Mapping[str, str], base: Path, problems: list[str]) -> Any:
    """Replace ${VAR} and read *_file keys, noting what is missing."""
    if isinstance(tree, dict):
        out = {}
        for key, value in tree.items():
            path = f"{where}.{key}" if where else key
            if key.endswith("_file") and isinstance(value, str):
                out[key.removesuffix("_file")] = _read(base / value, path, problems)
            else:
                out[key] = _expand(value, path, env, base, problems)
        return out
    if isinstance(tree, list):
        return [_expand(each, f"{where}.{at}", env, base, problems) for at, each in enumerate(tree)]
    if isinstance(tree, str) and _VARIABLE.search(tree):
        missing = [name for name in _VARIABLE.findall(tree) if name not in env]
        problems += [f"{where}: the environment variable {name} is not set" for name in missing]
        return Outside(_VARIABLE.sub(lambda match: env.get(match[1], ""), tree))
    return tree


def _read(path: Path, where: str, problems: list[str]) -> Outside:
    try:
        return Outside(path.read_text(encoding="utf-8").strip("\r\n"))
    except OSError as error:
        problems.append(f"{where}: {path}: {(error.strerror or 'cannot be read').lower()}")
        return Outside("")
