"""Runs functions on several gloo ranks of this machine, fast enough for hundreds of tests.

A server process imports PyTorch once and forks the ranks of every call from itself, so that a call costs
about a tenth of a second instead of the seconds that new interpreters take::

    import torch
    import torch.distributed as dist

    from shardwright.testing import run_ranks

    def test_the_ranks_agree():
        def total():
            value = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(value)
            return value.item()

        assert run_ranks(total, 4) == [6.0, 6.0, 6.0, 6.0]
"""

from shardwright.testing.client import preload
from shardwright.testing.job import Outcome, RanksFailedError
from shardwright.testing.ranks import run_ranks, run_ranks_outcomes

__all__ = ["Outcome", "RanksFailedError", "preload", "run_ranks", "run_ranks_outcomes"]
