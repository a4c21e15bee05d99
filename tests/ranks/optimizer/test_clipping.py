"""Clipping by PyTorch's own functions, in a script that knows nothing of stages."""

import logging
from typing import Any

import pytest
import torch
from stacks import Stack, apart, batches, start
from stacks import train as squares
from torch import nn
from torch.nn.utils import clip_grad_norm_

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks


def clipped(config, *, norm_type=2.0, choose=None, dtype=torch.float64, unrelated=False):
    """Both norms, and names of gradients that differ, after clipping a plain and a wrapped model."""
    sw, plain, model = start(Stack, config)
    plain.to(dtype), model.to(dtype)
    train = sw.step(squares)
    for module in (plain, model.module):  # used by two stages
        module.blocks[3].up.weight = module.blocks[0].up.weight
    x = batches(0, 1)[0].to(dtype)
    train(model, x)
    for part in x.tensor_split(4):
        (plain(part).square().mean() / 4).backward()
    norms = []
    for owner in (plain, model.module):
        parameters = owner.parameters() if choose is None else choose(owner)
        norms.append(clip_grad_norm_(parameters, 0.01, norm_type).item())
    if unrelated:
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        norms += [clip_grad_norm_(other.parameters(), 1e9).item() - 6**0.5] if sw.pp_rank() else []
    return norms, apart(plain, model)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_the_norm_is_that_of_all_stages(norm_type):
    for (expected, norm), differing in run_ranks(clipped, 2, {}, norm_type=norm_type):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert differing == []


def the_head(module: nn.Module) -> Any:
    return module.head.parameters()


def test_some_parameters_are_clipped_that_one_rank_has():
    for (expected, norm), differing in run_ranks(clipped, 2, {}, choose=the_head):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert differing == []


def test_a_norm_that_is_not_finite_is_an_error_on_all_ranks():
    def job():
        sw, _, model = start(Stack, {})
        train = sw.step(squares)
        train(model, batches(0, 1)[0])
        if sw.pp_rank() == 1:
            next(model.local_parameters()).grad.fill_(float("nan"))
        total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
        assert total != total
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    with pytest.raises(RanksFailedError, match="of the gradients of all stages is nan"):
        run_ranks(job, 2)


def clipped_one_by_one(choose, *, own_groups=False):
    """Names of gradients that differ after clipping each parameter of a plain and a wrapped model."""
    sw, plain, model = start(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), {})
    optimizers = []
    for owner in (plain, model):
        groups = [{"params": [p]} for p in owner.parameters()] if own_groups else owner.parameters()
        optimizers.append(torch.optim.SGD(groups, lr=0.05))
    train = sw.step(squares)
    wrapped = sw.DistributedOptimizer(optimizers[1])
    x = batches(0, 1)[0]
    train(model, x)
    for part in x.tensor_split(4):
        (plain(part).square().mean() / 4).backward()
    for owner, optimizer in ((plain, optimizers[0]), (model, wrapped)):
        for parameters in choose(owner, optimizer):
            clip_grad_norm_(parameters, 1e-3)
    return apart(plain, model)


def each_that_is_here(model, optimizer):
    return optimizer.param_groups[0]["params"]


def test_parameters_that_are_clipped_one_by_one_must_be_the_same_on_all_ranks():
    """Each was scaled by the norm of itself and of another one, where ranks have equally many."""
    with pytest.raises(RanksFailedError, match=r"clips the gradient of \d\.weight alone, and another rank"):
        run_ranks(clipped_one_by_one, 2, each_that_is_here)


def by_a_norm(parameters):
    norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
    for p in parameters:
        p.grad.mul_((0.01 / norm).clamp(max=1.0))


def by_pytorch(parameters):
    clip_grad_norm_(parameters, 0.01)


def by_a_constant(parameters):
    for p in parameters:
        p.grad.div_(3)


def told(clip, accumulated=1):
    """What is said of three updates."""
    sw, _, model = start(Stack, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright.torch.step_end.training_alike").addHandler(handler)
    train = sw.step(squares)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(accumulated):
            train(model, batches(0, 1)[0])
        clip(list(model.parameters()) if clip is by_modules else _with_gradients(model))
        optimizer.step()
    return said


def _with_gradients(model):
    return [p for p in model.parameters() if p.grad is not None]


def by_modules(parameters):
    """An actor and a critic, each on a stage of its own."""
    for part in (parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]):
        clip_grad_norm_(part, 0.01)


def test_a_norm_of_the_script_over_one_ranks_gradients_is_refused():
    """Each rank scaled by the norm of its own stages, silently; later with a warning behind the update."""
    with pytest.raises(RanksFailedError, match=r"(?s)test_clipping.py:\d+: .*norm 0.01. That is clipping by"):
        run_ranks(told, 2, by_a_norm, 1)


def by_parts(parameters):
    for p in parameters:
        p.grad.mul_(0.1 if sw.rank() == 0 else 0.5)


def test_other_factors_of_stages_are_told_once():
    """They may be meant so: a smaller rate for the first layers."""
    said = run_ranks(told, 2, by_parts)
    assert [len(each) for each in said] == [1, 0]
    assert "That of all ranks: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)" in said[0][0]


@pytest.mark.parametrize(
    "clip",
    [
        by_pytorch,
        by_a_constant,
        by_modules,
    ],
)
def test_gradients_that_all_ranks_scale_alike_are_no_news(clip):
    assert run_ranks(told, 2, clip) == [[], []]
