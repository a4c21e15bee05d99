"""Optimizers that deal their work out to the ranks, as Muon does: stages have other parameters.

Random numbers that a script or an optimizer draws for parameters, of which each rank has some.
"""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stacks import Stack, batches, start
from stacks import train as squares
from test_joint_updates import DP, train_with
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.errors import UsageError
from shardwright.testing import RanksFailedError, run_ranks
from shardwright.torch.optimizer.optimizer_trial import trial

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
    [(2, DP), (2, SHARED), (4, {"pipeline_parallel_degree": 2, "data_parallel_degree": 2})],
)
def test_what_a_rank_makes_goes_to_the_replicas_of_its_stage(num, config):
    """It went to all ranks, and put weights of one stage in the place of those of another."""

    def difference() -> float:
        return train_with(Pair(), config, Stack)[0]

    for found in run_ranks(difference, num):
        assert found < 1e-10


def test_one_that_is_not_wrapped_is_refused():
    with pytest.raises(RanksFailedError, match=r"DealsOut calls torch\.distributed in its step, over all"):
        run_ranks(train_with, 2, DealsOut, SHARED, Stack, wrapped=False)


def zero(params: Any) -> Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its module uses torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("config", "wrapped"),
    [({}, True), (SHARED, False)],
)
def test_one_with_a_process_group_of_its_own_is_refused(config, wrapped):
    """Ranks waited for one another until the timeout, or trained other weights than a plain loop."""
    with pytest.raises(RanksFailedError, match="ZeroRedundancyOptimizer has a process group of its own"):
        run_ranks(train_with, 2, zero, config, Stack, wrapped=wrapped)


class Langevin(Optimizer):
    """Adds noise to each update, as stochastic gradient Langevin dynamics do."""

    def __init__(self, params: Any, generator: torch.Generator | None = None):
        super().__init__(params, {"lr": 0.05})
        self.generator = generator

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            noise = torch.empty_like(p).normal_(generator=self.generator)
            p.sub_(p.grad, alpha=0.05).add_(noise, alpha=0.1)


@pytest.mark.parametrize("generator", [None, torch.Generator()], ids=["of PyTorch", "of its own"])
def test_an_optimizer_that_draws_needs_the_parameters_of_all_stages(generator):
    before = None if generator is None else generator.get_state()
    assert trial(Langevin([nn.Parameter(torch.ones(3))], generator)).couples
    assert generator is None or torch.equal(generator.get_state(), before), "the trial drew from the script's"


@torch.no_grad()
def shrink_and_perturb(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.mul_(0.9).add_(torch.randn_like(parameter), alpha=0.1)


def test_they_are_those_of_one_process():
    """Bug: each rank drew for its own parameters alone, so that stages had the same noise."""

    def job():
        sw, plain, model = start(Stack, {})
        optimizers = [torch.optim.SGD(plain.parameters(), 0.05), torch.optim.SGD(model.parameters(), 0.05)]
        optimizers[1] = sw.DistributedOptimizer(optimizers[1])
        drawing = sw.DistributedOptimizer(Langevin(model.parameters()))
        x = batches(0, 1)[0]
        sw.step(squares)(model, x)
        plain(x).square().mean().backward()
        with pytest.raises(UsageError, match="draws random numbers"):
            drawing.step()
        for module, optimizer in zip((plain, model.module), optimizers, strict=True):
            torch.manual_seed(1)
            optimizer.step()
            shrink_and_perturb(module)
            module.blocks[0].up.reset_parameters()
            # Bug: PyTorch asks whether a tensor is on the meta device, and draws nothing for it then.
            nn.init.orthogonal_(module.blocks[3].down.weight)
            nn.init.sparse_(module.blocks[0].down.weight, 0.3)
            module.head.reset_parameters()
            with model.gathered(module.blocks[3].up) if module is not plain else nullcontext():
                nn.init.trunc_normal_(module.blocks[3].up.weight)  # draws until all are within bounds
            module.blocks[1].up.reset_parameters()
        state = model.state_dict()
        elsewhere = next(parameter for parameter in model.parameters() if parameter.is_meta)
        with pytest.raises(UsageError, match="needs the values of"):
            nn.init.trunc_normal_(elsewhere)
        return max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())

    assert max(run_ranks(job, 2)) < 1e-12
