"""Ranks that time parts of units together make a plan each, and take that of the first."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.run.planning import plan_of_first_rank

log = logging.getLogger("shardwright.torch.units")


def _context(rank: int) -> Any:
    return SimpleNamespace(rank=rank, from_first_rank=lambda make: make() if rank == 0 else "the first's")


def _plan() -> Any:
    log.warning("stays whole on all ranks")
    return "its own"


@pytest.mark.parametrize(("rank", "warned", "plan"), [(0, 1, "its own"), (1, 0, "the first's")])
def test_one_rank_warns(caplog, rank, warned, plan):
    """Bug: every rank of a job had the warnings of the plan on the console."""
    before = logging.getLogger("shardwright").level
    assert plan_of_first_rank(_context(rank), _plan, on_all=True) == plan
    assert len(caplog.records) == warned
    assert logging.getLogger("shardwright").level == before


def test_errors_are_those_of_the_first_rank():
    def fails() -> Any:
        raise ValueError("on this rank alone")

    assert plan_of_first_rank(_context(1), fails, on_all=True) == "the first's"
