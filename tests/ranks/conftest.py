"""Ranks start warm: see ``warm_up.py``."""

import pytest

from shardwright.testing import preload, run_ranks

preload("warm_up")


@pytest.fixture(scope="session", autouse=True)
def _fork_server():
    """Starts before the first test, which may count its seconds."""
    run_ranks(int, 1)
