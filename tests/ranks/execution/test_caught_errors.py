"""Tells the other ranks of a step's error, even where the script of the failing rank catches it."""

from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

from choices import in_sweep
from shardwright.testing import run_ranks

MICROBATCHES = 12  # more than a sender may leave unread


class FailsOnce(nn.Module):
    """Fails in the third microbatch of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        import shardwright.torch as sw

        self.calls += not sw.is_tracing()
        if self.calls == 3:
            raise ValueError("an odd batch")
        return x @ self.weight


@pytest.mark.parametrize("pipeline", [in_sweep("gpipe"), "1f1b"])
def test_a_rank_that_waits_for_one_that_caught_its_error_is_told(pipeline: str) -> None:
    """It waited until the timeout, or until the process of the other ended."""

    def run() -> str:
        import shardwright.torch as sw
        from shardwright.comm.joining.process_group import default_store

        sw.init(
            {
                "pipeline_parallel_degree": 2,
                "microbatches": MICROBATCHES,
                "pipeline": pipeline,
                "auto_partition": False,
                "default_partition": 0,
                "profile": "estimated",
                "run_dir": "off",
            }
        )
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), FailsOnce())
        sw.set_partition(net[2], 1)
        model = sw.DistributedModel(net)

        @sw.step
        def step(model: nn.Module, x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            model.backward(loss)
            return loss

        store = default_store()
        try:
            step(model, torch.ones(MICROBATCHES, 8))
        except Exception as error:
            if sw.rank() == 0:
                store.set("told", "")
            else:
                store.wait(["told"], timedelta(seconds=20))
            return f"{type(error).__name__}: {error}"
        return ""

    first, second = run_ranks(run, 2)
    assert first.startswith("PeerLostError: rank 1 failed first (ValueError: an odd batch)")
    assert second.startswith("ValueError: an odd batch")
