"""Pinned memory as a tier: its copies on a stream of their own, in any order that events allow.

No GPU is needed: streams of stand-ins hold their work back until they are run, in one order or the other.
"""

import pytest
import torch
from tiers import Cuda, delayed_copies
from torch import nn

from shardwright.torch.offload.saved_storage import PinnedTier
from shardwright.torch.offload.stage_offload import Leaving, StageOffload

WIDTH = 32
DEVICE = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["copies run first", "copies run last"])
def cuda(request, monkeypatch):
    made = Cuda(copies_first=request.param)
    delayed_copies(made, monkeypatch)
    return made


def tier_on(cuda):
    return PinnedTier(DEVICE, cuda=cuda, pins=False)


def test_a_copy_waits_for_what_was_computed_and_is_waited_for(cuda):
    tier = tier_on(cuda)
    memory = torch.zeros(100, dtype=torch.uint8)
    cuda.compute.do(lambda: memory.fill_(7))  # computed when the stream comes to it
    place, copy = tier.write(memory)
    copy.wait()
    cuda.compute.do(lambda: memory.fill_(9))  # memory that was let go of has another owner
    back = torch.zeros(100, dtype=torch.uint8)
    read = tier.read(place, back)
    read.wait()
    seen = []
    cuda.compute.do(lambda: seen.append(int(back[0])))
    assert not copy.is_done
    cuda.run()
    assert seen == [7]
    assert copy.is_done
    assert copy.skip() is False


def test_a_place_is_used_again_behind_what_reads_it(cuda):
    tier = tier_on(cuda)
    first, second = (torch.full((100,), n, dtype=torch.uint8) for n in (1, 2))
    place, _ = tier.write(first)
    back = torch.zeros(100, dtype=torch.uint8)
    tier.read(place, back)
    tier.free(place)
    again, _ = tier.write(second)
    assert again is place
    cuda.run()
    assert int(back[0]) == 1
    assert int(place[0]) == 2


def test_memory_of_other_sizes_is_given_back(cuda):
    """Sequences of other lengths in each batch must not fill the host."""
    tier = tier_on(cuda)
    for size in range(100, 200):
        place, _ = tier.write(torch.zeros(size, dtype=torch.uint8))
        tier.free(place)
    assert sum(p.nbytes for row in tier._free.values() for p in row) < 1000


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(x.sin())


@pytest.mark.parametrize("horizon", [1, 3])
def test_gradients_are_the_same_when_work_runs_at_once(horizon, monkeypatch):
    """With streams that run what they get, as a device does in the end, the values are those without."""
    cuda = Cuda(copies_first=True)
    delayed_copies(cuda, monkeypatch)

    class Prompt(PinnedTier):
        def _copy(self, target, source):
            made = super()._copy(target, source)
            cuda.run()
            return made

    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(6)).double()
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    y = x
    for layer in layers:
        y = layer(y)
    y.square().sum().backward()
    expected = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    offload = StageOffload(
        Prompt(DEVICE, cuda=cuda, pins=False),
        Leaving(horizon),
        horizon=horizon,
        least_bytes=1,
        needed=frozenset,
    )
    y = x
    for layer in layers:
        with offload.keeping(layer):
            y = layer(y)
    offload.offload()
    offload.load()
    y.square().sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(layers.parameters(), expected, strict=True))
