"""`torch.profiler` around a step shows the actions of a rank as named ranges."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler_util import Interval

from shardwright.testing import run_ranks


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (1, [{"microbatch 0", "microbatch 1"}]),
        (
            2,
            [
                {"0F0", "0F1", "0SEND_F0", "0SEND_F1", "0RECV_B0", "0RECV_B1", "0B0", "0B1"},
                {"1RECV_F0", "1RECV_F1", "1F0", "1F1", "1B0", "1B1", "1SEND_B0", "1SEND_B1"},
            ],
        ),
    ],
)
def test_actions_are_ranges_of_the_profile(num_ranks: int, names: list[set[str]]) -> None:
    def run() -> tuple[list[str], bool]:
        import shardwright.torch as sw

        sw.init({"microbatches": 2, "pipeline": "gpipe", "profile": "estimated", "run_dir": "off"})
        torch.manual_seed(0)
        model = sw.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))

        @sw.step
        def step(model: nn.Module, x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            model.backward(loss)
            return loss

        step(model, torch.ones(4, 8))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(model, torch.ones(4, 8))
        events = profile.events()
        assert events is not None
        spans = [event for event in events if event.name.startswith("shardwright ")]
        work = [event for event in events if event.name == "aten::addmm"]
        inside = all(any(within(event.time_range, span.time_range) for span in spans) for event in work)
        return sorted(span.name.removeprefix("shardwright ") for span in spans), inside

    def within(inner: Interval, outer: Interval) -> bool:
        return bool(outer.start <= inner.start and inner.end <= outer.end)

    for (found, inside), expected in zip(run_ranks(run, num_ranks), names, strict=True):
        assert found == sorted(expected)
        assert inside, "all matrix products run in a range of ours"
