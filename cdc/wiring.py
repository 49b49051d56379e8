"""The composition root: the only module of cdc that knows sinks and connectors by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc import config as configuration
from cdc.config import Config, SinkSettings
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
    from connectors import catalogue, topics

    return Outside(
        tables=lambda: catalogue.read_tables(config),
        topics=lambda names: topics.describe(config, names),
        open_sink=open_sink,
        open_here=open_here,
    )
