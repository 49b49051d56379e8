"""A pipeline per test, on the shared servers."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

import pytest

from tests.support.pipeline import Pipeline


@pytest.fixture
def pipeline(stack, tmp_path):
    """Make a pipeline for some tables; all it makes is removed after the test."""
    with ExitStack() as made:

        def make(*tables: str) -> Pipeline:
            found = Pipeline(stack, tmp_path, f"it{secrets.token_hex(4)}", tables)
            made.callback(found.remove)
            return found

        yield make
