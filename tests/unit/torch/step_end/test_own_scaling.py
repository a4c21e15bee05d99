"""What a script does to gradients is looked at in its first updates, and costs nothing behind them."""

from types import SimpleNamespace

import torch
from torch import nn

from shardwright.torch.step_end.training_alike import OwnScaling


def test_updates_behind_a_norm_of_all_ranks_are_counted_too() -> None:
    """Scripts that clip by the norm of the model had all their gradients looked at in every step."""
    context = SimpleNamespace(mesh=SimpleNamespace(world_size=2), links=SimpleNamespace(replica=None))
    scaling, parameter = OwnScaling(context), nn.Parameter(torch.ones(3))  # type: ignore[arg-type]
    parameter.grad = torch.ones(3)
    looked_at = 0

    def parameters():
        nonlocal looked_at
        looked_at += 1
        yield parameter

    for step in range(5):
        scaling.end(parameters())
        parameter.grad *= 0.5
        if step != 1:
            OwnScaling.clipped_together()
        scaling.note(parameters())
        assert scaling.factor == 0.0  # one gradient is not enough to tell
    assert looked_at == 3
