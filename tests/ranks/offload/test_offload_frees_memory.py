"""Offload frees memory: bytes at the allocator of a rank, in the forward and in the backward."""

import gc

import pytest
import torch
from torch import nn

import shardwright.torch as sw
from shardwright.testing import run_ranks

MIB = 2**20
ROWS, WIDTH, LAYERS = 1024, 256, 16  # a tensor of 1 MiB; each layer keeps two


class Seen:
    bytes = []  # noqa: RUF012


def look():
    from shardwright.run.memory import memory_in_use

    Seen.bytes.append(memory_in_use(torch.device("cpu")))


class Look(torch.autograd.Function):
    """Looks at the memory in use when the forward and the backward come by."""

    @staticmethod
    def forward(ctx, x):
        look()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        look()
        return gradient


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = Look.apply(x) if x.requires_grad and type(x) is torch.Tensor else x
        return x + self.linear(x.sin())


def most_bytes(settings, microbatches=1):
    """The most memory in use in the second step, above what is there before it."""
    sw.init(
        {
            "run_dir": "off",
            "profile": "estimated",
            "microbatches": microbatches,
            "activation_loading_horizon": 1,
            **settings,
        }
    )
    try:
        torch.manual_seed(0)
        model = sw.DistributedModel(nn.Sequential(*(Layer() for _ in range(LAYERS))))

        @sw.step
        def train(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        x = torch.randn(ROWS * microbatches, WIDTH)
        train(model, x)
        gc.collect()
        look()
        before = Seen.bytes[-1]
        Seen.bytes.clear()
        train(model, x)
        return max(Seen.bytes) - before
    finally:
        sw.shutdown()


def most(settings, microbatches=1, ranks=1):
    return [found / MIB for found in run_ranks(most_bytes, ranks, settings, microbatches, timeout_s=100)]


def test_one_microbatch_keeps_a_few_units():
    """Without: two tensors of each of 16 layers. With: those of one layer that leaves, one that computes."""
    (plain,) = most({})
    (offloaded,) = most({"offload_activations": True})
    assert plain > 2 * LAYERS - 2
    assert offloaded < 12


@pytest.mark.thorough
def test_stages_keep_a_few_units_of_all_microbatches_in_flight():
    settings = {"pipeline": "1f1b", "activation_checkpointing": "none"}
    plain = most(settings, 4, 2)
    offloaded = most({**settings, "offload_activations": True}, 4, 2)
    in_flight = 2
    assert plain[0] > in_flight * (LAYERS - 2)
    assert offloaded[0] < 20
