"""A pipeline per test, on the shared servers."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import count

import pytest

from tests.support.pipeline import Pipeline

_numbers = count(1)


@pytest.fixture
def pipeline(stack, tmp_path):
    """Make a pipeline for some tables; all it makes is removed after the test."""
    with ExitStack() as made:

        def make(*tables: str) -> Pipeline:
            found = Pipeline(stack, tmp_path, f"it{next(_numbers)}", tables)
            made.callback(found.remove)
            return found

        yield make
