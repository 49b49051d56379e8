"""The composition root: the only module of cdc that knows sinks and connectors by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc import config as configuration
from cdc.config import Config, SinkSettings
from cdc.quarantine import Kept
from cdc.replay import Log, Replayed
from cdc.replay import replay as replay_one
from cdc.sink import FrameSink, Sink
from cdc.supervisor import Outside

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# type in the config -> module, settings, sink; imported only when a config uses it
_SINKS = {
    "elasticsearch": ("sinks.elasticsearch", "ElasticsearchSettings", "ElasticsearchSink"),
    "redis": ("sinks.redis", "RedisSettings", "RedisSink"),
    "postgres": ("sinks.warehouse", "WarehouseSettings", "WarehouseSink"),
    "delta": ("sinks.delta", "DeltaSettings", "DeltaSink"),
}
_ON_FRAMES = frozenset({"delta"})


def load_config(path: Path) -> Config:
    return configuration.load(path, {kind: _model(kind) for kind in _SINKS})


def _model(kind: str) -> Callable[[], type[SinkSettings]]:
    def model() -> type[SinkSettings]:
        module, settings, _ = _SINKS[kind]
        found: type[SinkSettings] = getattr(import_module(module), settings)
        return found

    return model


def _sink_class(settings: SinkSettings) -> Any:
    module, _, sink = _SINKS[settings.type]
    return getattr(import_module(module), sink)


def open_sink(settings: SinkSettings) -> Sink:
    """Open a sink that takes rows. Called by name on executors."""
    sink: Sink = _sink_class(settings)(settings)
    return sink


def open_here(settings: SinkSettings, spark: SparkSession) -> Sink | FrameSink:
    """Open a sink on the driver."""
    if settings.type in _ON_FRAMES:
        frame_sink: FrameSink = _sink_class(settings)(settings, spark)
        return frame_sink
    return open_sink(settings)


def row_sink_modules() -> list[str]:
    """The modules that executors may need."""
    return [module for kind, (module, _, _) in _SINKS.items() if kind not in _ON_FRAMES]


def spark_settings(config: Config) -> dict[str, str]:
    """What the configured sinks need of the Spark session."""
    wanted: dict[str, str] = {}
    for kind in {sink.type for sink in config.sinks} & _ON_FRAMES:
        wanted |= import_module(_SINKS[kind][0]).spark_conf()
    return wanted


def outside(config: Config) -> Outside:
    from connectors import catalogue, lifecycle, quarantine, topics
    from connectors.postgres import quarantine_topic

    return Outside(
        tables=lambda: catalogue.read_tables(config),
        topics=lambda names: topics.describe(config, names),
        open_sink=open_sink,
        open_here=open_here,
        keep=partial(quarantine.keep, config.kafka, quarantine_topic(config)),
        is_whole=partial(lifecycle.is_whole, config),
    )


def replay(config: Config, kept: Sequence[Kept]) -> Replayed:
    """Try *kept* once more, sink by sink; what may leave the quarantine leaves it."""
    from connectors import catalogue, quarantine, topics

    log = Log(topics=partial(topics.describe, config), newest=partial(quarantine.newest, config))
    tables = catalogue.read_tables(config)
    settings = {sink.name: sink for sink in config.sinks}
    done = Replayed()
    for name in sorted({each.sink for each in kept}):
        mine = [each for each in kept if each.sink == name]
        if name not in settings:
            done.refused |= {each.id: "the sink is not configured any more" for each in mine}
            continue
        with _opened(config, settings[name]) as sink:
            sink.prepare(tables)
            tried = replay_one(mine, tables, sink, log)
        done.applied += tried.applied
        done.obsolete += tried.obsolete
        done.refused |= tried.refused
        quarantine.drop(config, [*tried.applied, *tried.obsolete])
    return done


@contextmanager
def _opened(config: Config, settings: SinkSettings) -> Iterator[Sink | FrameSink]:
    """A sink for a command; one that takes frames gets a Spark of its own."""
    spark: Any = None
    if settings.type in _ON_FRAMES:
        from cdc import session

        spark = session.open_session(config.name, config.spark, spark_settings(config))
    sink = open_here(settings, spark)
    try:
        yield sink
    finally:
        sink.close()
        if spark is not None:
            spark.stop()
