"""Ranks start warm: the fork server has imported what every test of the package needs."""

import pytest

from shardwright.testing import preload, run_ranks

preload("smdistributed.modelparallel.torch", "transformers.models.gpt2.modeling_gpt2")


@pytest.fixture(scope="session", autouse=True)
def _fork_server():
    """Starts before the first test, which may count its seconds."""
    run_ranks(int, 1)
