"""The supervisor's verdicts, without Spark: what fails before a query is opened."""

from types import SimpleNamespace

from cdc.config import Quarantine, Run
from cdc.errors import CdcError
from cdc.policy import UNKNOWN_HINT
from cdc.supervisor import Outside, SinkThread


def test_a_sink_that_stops_always_says_what_to_do():
    """An error that brings no hint of its own is told with the policy's."""

    def tables():
        raise CdcError("nobody classified this")

    settings = SimpleNamespace(name="cache")
    outside = Outside(tables, None, None, None, None, None)
    config = SimpleNamespace(run=Run(), quarantine=Quarantine())
    thread = SinkThread(None, config, settings, outside, once=False)
    thread.start()
    thread.join(10)
    assert thread.status.state == "failed"
    assert thread.status.error.hint == UNKNOWN_HINT
