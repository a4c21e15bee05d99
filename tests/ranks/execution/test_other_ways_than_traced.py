"""What a step does otherwise than its trace is refused; one that reads nothing costs nothing more."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stacks import train as squares
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks

QUIET = {"run_dir": "off", "profile": "estimated", "microbatches": 2}


def four_layers() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]


def reads_then_takes_a_weight() -> None:
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
        return F.linear(x.detach() if sw.is_tracing() else x, self.weight)


def detaches_in_traces() -> None:
    sw.init(QUIET)
    layers = (nn.Linear(4, 4), nn.Linear(4, 4), DetachesInTraces(), DetachesInTraces())
    model = sw.DistributedModel(nn.Sequential(*layers))
    train = sw.step(squares)
    train(model, torch.ones(8, 4))


def test_a_unit_that_detaches_in_the_trace_alone() -> None:
    """The stage before it waits for no gradient, and would train without."""
    with pytest.raises(RanksFailedError, match=r"in microbatch 0 one does. Detach it in all microbatches"):
        run_ranks(detaches_in_traces, 2)


def test_a_step_that_reads_nothing_takes_no_further_messages() -> None:
    """Only a mark of each microbatch, which the next batch overwrites."""

    def run() -> tuple[int, int]:
        from shardwright.comm.joining.store import ValueBoard
        from shardwright.torch.execution.agreement import Agreement

        asked = [0, 0]
        for kind, name, place in ((Agreement, "on_any", 0), (ValueBoard, "put", 1)):
            plain = getattr(kind, name)

            def counted(*args: Any, plain: Any = plain, place: int = place) -> Any:
                asked[place] += number > 0
                return plain(*args)

            setattr(kind, name, counted)
        sw.init(QUIET)
        model = sw.DistributedModel(nn.Sequential(*four_layers()))
        train = sw.step(squares)
        for number in range(3):  # noqa: B007  (read above)
            train(model, torch.ones(8, 4))
        return asked[0], asked[1]

    assert run_ranks(run, 2) == [(0, 0), (0, 0)]
