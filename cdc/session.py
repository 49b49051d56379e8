"""The Spark session of this process. Settings only; what is done with it lives in stream.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.resources import as_file, files
from typing import TYPE_CHECKING

from cdc import jars
from cdc.config import Spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The default manager forks a process for each permission change on a local file system; progress
# files are disposable here, so the plain one does (measured: 19 ms instead of 60 to 125 a trigger).
_PLAIN_PROGRESS_FILES = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.scheduler.mode": "FAIR",  # one sink's backlog does not queue before another's batch
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 << 20),  # bounds a task's memory
    "spark.sql.streaming.checkpointFileManagerClass": _PLAIN_PROGRESS_FILES,
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.python.worker.reuse": "true",
    "spark.python.daemon.module": "cdc.workers",
    "spark.task.maxFailures": "1",  # failures come home as data; the supervisor decides
}


def open_session(
    name: str,
    settings: Spark,
    extra: Mapping[str, str],
    on_progress: Callable[[jars.Progress], None] | None = None,
) -> SparkSession:
    """Start Spark with the pinned jars. *extra* is what the configured sinks ask for."""
    jars.find_java()
    paths = jars.spark_jars(on_progress)
    # Executors are started with this interpreter, whatever `python3` means on the path.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable

    from pyspark.sql import SparkSession

    with as_file(files("cdc").joinpath("log4j2.properties")) as log_settings:
        options = f"-Dlog4j2.configurationFile={log_settings.as_uri()} -XX:+UseSerialGC"
        builder = (
            SparkSession.builder.appName(f"cdc-{name}")
            .master(settings.master)
            .config("spark.driver.memory", settings.driver_memory)
            .config("spark.driver.extraJavaOptions", options)
            .config("spark.jars", ",".join(str(path) for path in paths))
        )
        for key, value in {**_SETTINGS, **extra, **settings.conf}.items():
            builder = builder.config(key, value)
        return builder.getOrCreate()
