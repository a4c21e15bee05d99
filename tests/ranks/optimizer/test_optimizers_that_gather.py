"""Optimizers that deal their work out to the ranks, as Muon does: stages have other parameters."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stacks import Stack
from test_joint_updates import DP, train_with
from torch import Tensor
from torch.optim import Optimizer

from choices import combinations_of, in_sweep
from shardwright.testing import RanksFailedError, run_ranks

SHARED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class DealsOut(Optimizer):
    """Each rank updates some parameters and sends them to the others, as Muon of Keller Jordan does."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        num, rank = num_ranks(), dist.get_rank() if dist.is_initialized() else 0
        for group in self.param_groups:
            own = group["params"]
            padded = own + [torch.empty_like(own[-1])] * (-len(own) % num)
            for first in range(0, len(own), num):
                if first + rank < len(own):
                    p = own[first + rank]
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])
                self.send(padded[first : first + num], padded[first + rank])

    def send(self, everyone: list[Tensor], own: Tensor) -> None:
        if not dist.is_initialized():
            return
        found = [torch.empty_like(p) for p in everyone]
        for number, p in enumerate(everyone):  # their shapes differ
            found[number].copy_(p)
            dist.broadcast(found[number], number)
            p.copy_(found[number])


class Plain(DealsOut):
    """The same in one process."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class Pair:
    """Makes the optimizer of the ranks first, and then that of the plain loop."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, params: Any) -> DealsOut:
        self.made += 1
        return DealsOut(params) if self.made == 1 else Plain(params)


@pytest.mark.parametrize(
    ("num", "config"),
    [
        in_sweep(2, {}),
        (2, DP),
        (2, SHARED),
        (4, {"pipeline_parallel_degree": 2, "data_parallel_degree": 2}),
        in_sweep(4, {**SHARED, "data_parallel_degree": 4}),
    ],
)
def test_what_a_rank_makes_goes_to_the_replicas_of_its_stage(num, config):
    """It went to all ranks, and put weights of one stage in the place of those of another."""

    def difference() -> float:
        return train_with(Pair(), config, Stack)[0]

    for found in run_ranks(difference, num):
        assert found < 1e-10


@pytest.mark.parametrize("config", [in_sweep({}), SHARED])
def test_one_that_is_not_wrapped_is_refused(config):
    with pytest.raises(RanksFailedError, match=r"DealsOut calls torch\.distributed in its step, over all"):
        run_ranks(train_with, 2, DealsOut, config, Stack, wrapped=False)


def zero(params: Any) -> Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its module uses torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("config", "wrapped"),
    combinations_of([{}, SHARED], [True, False], kept=[({}, True), (SHARED, False)]),
)
def test_one_with_a_process_group_of_its_own_is_refused(config, wrapped):
    """Ranks waited for one another until the timeout, or trained other weights than a plain loop."""
    with pytest.raises(RanksFailedError, match="ZeroRedundancyOptimizer has a process group of its own"):
        run_ranks(train_with, 2, zero, config, Stack, wrapped=wrapped)
