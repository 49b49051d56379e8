"""Targets for any history: the reference in memory, and two of the real ones."""

from tests.contract.conftest import memory_harness, postgres_harness, redis_harness

__all__ = ["memory_harness", "postgres_harness", "redis_harness"]
