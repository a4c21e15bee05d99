"""Random numbers that a script or an optimizer draws for parameters, of which each rank has some."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from stacks import Stack, batches, start, trainer
from torch import nn
from torch.optim import Optimizer

from shardwright.errors import UsageError
from shardwright.testing import run_ranks
from shardwright.torch.optimizer.optimizer_trial import trial


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
        trainer(sw)(model, x)
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
