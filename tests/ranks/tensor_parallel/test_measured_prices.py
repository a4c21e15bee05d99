"""What ranks measure before a plan is made: how long an operation on divided tensors takes."""

from typing import Any

import torch
from torch import nn

import shardwright.torch as sw
from shardwright.run.context import context
from shardwright.testing import run_ranks
from shardwright.torch.measuring import planning
from shardwright.torch.measuring.device_rates import measured_operation_s


def measured() -> float:
    sw.init({"run_dir": "off", "tensor_parallel_degree": 2})
    found = measured_operation_s(context())
    sw.shutdown()
    return found


def test_all_ranks_take_one_price_of_an_operation():
    first, second = run_ranks(measured, 2, timeout_s=60)
    # Python's own time: no machine is so fast, or so busy, that it were outside of this.
    assert 1e-6 < first == second < 5e-3


def evaluated_first() -> tuple[list[float], list[bool]]:
    with_gradients: list[bool] = []
    division_of = planning.division_of

    def noted(*args: Any, **kwargs: Any) -> Any:
        with_gradients.append(torch.is_grad_enabled())
        return division_of(*args, **kwargs)

    planning.division_of = noted  # type: ignore[attr-defined]
    sw.init({"run_dir": "off", "tensor_parallel_degree": 2, "microbatches": 1, "measure_s": 0.2})
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.ones(4, 64)
    expected = plain(x).square().mean().item()
    model = sw.DistributedModel(plain)
    sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @sw.step
    def evaluate(model, x):
        return model(x).square().mean()

    losses = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            losses.append(evaluate(model, x).reduce_mean().item() / expected)
    planning.division_of = division_of  # type: ignore[attr-defined]
    return losses, with_gradients


def test_the_first_step_may_be_an_evaluation():
    """The prices are those of a training step: measuring them needs gradients, where the script has none."""
    found = run_ranks(evaluated_first, 2, timeout_s=120)
    for losses, _ in found:
        assert all(abs(ratio - 1) < 1e-5 for ratio in losses)
    # Bug: parts of units were run without a backward, and layers shared as if there were none.
    # Parts are timed on both ranks, which will compute at the same time.
    assert [modes for _, modes in found] == [[True], [True]]
