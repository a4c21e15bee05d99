"""What a step does otherwise than its trace, or with what other ranks do not have, is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.testing import RanksFailedError, run_ranks

QUIET = {"run_dir": "off", "profile": "estimated", "microbatches": 2}


def four_layers() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]


def reads_then_takes_a_weight() -> None:
    import shardwright.torch as sw

    sw.init(QUIET)
    model = sw.DistributedModel(nn.Sequential(*four_layers()))

    @sw.step
    def train(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(x).square().mean()
        model.backward(loss)
        loss.item()
        return loss, model.module[0][0].weight.norm()

    train(model, torch.ones(8, 4))


def test_a_parameter_behind_a_value_that_was_read() -> None:
    """Without a refusal each rank computes with what it has: the weight, or a parameter without values."""
    with pytest.raises(RanksFailedError, match=r"a parameter is used by the step function, behind a value"):
        run_ranks(reads_then_takes_a_weight, 2)


class DetachesInTraces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        import shardwright.torch as sw

        return F.linear(x.detach() if sw.is_tracing() else x, self.weight)


def detaches_in_traces() -> None:
    import shardwright.torch as sw

    sw.init(QUIET)
    layers = (nn.Linear(4, 4), nn.Linear(4, 4), DetachesInTraces(), DetachesInTraces())
    model = sw.DistributedModel(nn.Sequential(*layers))

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    train(model, torch.ones(8, 4))


def test_a_unit_that_detaches_in_the_trace_alone() -> None:
    """The stage before it waits for no gradient, and would train without."""
    with pytest.raises(RanksFailedError, match=r"in microbatch 0 one does. Detach it in all microbatches"):
        run_ranks(detaches_in_traces, 2)
