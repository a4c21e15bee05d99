"""Ranks start warm: the fork server has imported what every test of the package needs."""

import pytest

from shardwright.testing import preload, run_ranks

_ARCHITECTURES = ("gpt2", "gpt_neox", "bloom", "t5")

preload("smdistributed.modelparallel.torch")
preload(*(f"transformers.models.{name}.modeling_{name}" for name in _ARCHITECTURES))


@pytest.fixture(scope="session", autouse=True)
def _fork_server():
    """Starts before the first test, which may count its seconds."""
    run_ranks(int, 1)
