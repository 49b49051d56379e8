"""The local stack without Docker and without root: five real servers on loopback.

    python -m deploy.stack up | down | status | env | logs NAME | reset | fetch

Everything a stack writes lies under one directory ($CDC_STACK_DIR), so two stacks with different
directories and ports run side by side. The archives are shared in the cache.
"""

from deploy.stack.runner import Stack, Status
from deploy.stack.settings import Ports, StackError
from deploy.stack.starting import Event

__all__ = ["Event", "Ports", "Stack", "StackError", "Status"]
