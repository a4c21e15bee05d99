"""An evaluation before the first step of training: the plan is for both."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from stacks import Stack, batches, start
from torch import Tensor, nn

from choices import in_sweep
from shardwright.run.context import context
from shardwright.testing import run_ranks

CONFIG = {"pipeline_parallel_degree": 2}
AROUND: dict[str, Any] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def evaluate_and_train(
    around: Any, *, optimizer: bool = True, insists: bool = False
) -> tuple[list[float], list[int], list[float]]:
    """What the plan predicts, and losses of an evaluation and of a step on the same batch."""
    sw, _, model = start(Stack, CONFIG)
    if optimizer:
        sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @sw.step
    def evaluate(model: nn.Module, x: Tensor) -> Tensor:
        assert not (insists and torch.is_grad_enabled())
        return model(x).square().mean()

    @sw.step
    def train(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = []
    with around():
        if around is not nullcontext:
            losses.append(evaluate(model, batches(0, 1)[0]).reduce_mean().item())
    if optimizer:
        losses.append(train(model, batches(0, 1)[0]).reduce_mean().item())
    plan = context().plan
    assert plan is not None
    seconds = [stage.backward_s for stage in plan.prediction.stages]
    activations = [memory.activations_bytes for memory in plan.prediction.memory]
    return seconds, activations, losses


@pytest.mark.parametrize("name", ["no_grad", in_sweep("inference_mode")])
def test_a_plan_made_in_an_evaluation_is_for_training(name):
    """It said that the backward takes no time, and that nothing is kept for it."""
    ((expected, *_), _) = run_ranks(evaluate_and_train, 2, nullcontext)
    for seconds, activations, (of_evaluation, of_training) in run_ranks(evaluate_and_train, 2, AROUND[name]):
        assert sum(seconds) == pytest.approx(sum(expected), rel=0.05)
        assert all(num_bytes > 0 for num_bytes in activations)
        assert of_evaluation == pytest.approx(of_training, rel=1e-12)


def test_without_an_optimizer_the_plan_is_that_of_an_evaluation():
    ((seconds, _, _), _) = run_ranks(evaluate_and_train, 2, torch.no_grad, optimizer=False)
    assert seconds == [0.0, 0.0]


def test_code_that_insists_on_no_gradients_is_planned_without():
    ((seconds, _, (of_evaluation, of_training)), _) = run_ranks(
        evaluate_and_train, 2, torch.no_grad, insists=True
    )
    assert seconds == [0.0, 0.0]
    assert of_evaluation == pytest.approx(of_training, rel=1e-12)
