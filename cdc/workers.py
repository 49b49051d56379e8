"""The process that forks Spark's Python workers, with everything imported before it forks.

A worker that imports for itself spends seconds of CPU on it, and Spark ends workers that were
idle for a minute: then the first change after a pause would wait that long. Started by Spark as
`python -m cdc.workers`, by the setting spark.python.daemon.module.
"""

import gc
from importlib import import_module

from pyspark import daemon

from cdc import wiring

# What Spark's worker imports once it runs a function over Arrow batches.
_SPARK = ("pyspark.worker", "pyspark.sql.pandas.serializers", "pandas", "pyarrow")

if __name__ == "__main__":
    for name in (*_SPARK, "cdc.writer", *wiring.row_sink_modules()):
        import_module(name)
    # Spark collects garbage after every task; what was imported is none, and looking at all of it
    # again cost more than the task itself.
    gc.collect()
    gc.freeze()
    daemon.manager()
