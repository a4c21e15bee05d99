"""Steps of optimizers on divided parameters are those on plain ones."""

import copy

import pytest
import torch
from ranks_in_threads import on_ranks
from torch import nn

from choices import some_combinations
from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.divide import divide, settle_gradients
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, whole

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adamw one by one": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True, amsgrad=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.01),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.LayerNorm(10), nn.Linear(10, 6)).double()


def placements(num_ranks):
    return {
        "0.weight": Cut.even(0, 10, num_ranks=num_ranks),
        "0.bias": Cut.even(0, 10, num_ranks=num_ranks),
        "3.weight": Cut.of(1, [(1, 3), (0, 4), (1, 3)]),
    }


def trained(module, optimizer, *, clipped, settle=lambda _: None):
    for step in range(3):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        module(x).pow(2).sum().backward()
        settle(module.parameters())
        if clipped:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5, foreach=clipped == "foreach")
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "clipped", "settled"),
    some_combinations(list(OPTIMIZERS), [None, "foreach", "one by one"], [True, False]),
)
def test_three_steps(name, clipped, settled):
    plain = model()
    copies = [copy.deepcopy(plain) for _ in range(2)]
    trained(plain, OPTIMIZERS[name](list(plain.parameters())), clipped=clipped)

    def on_rank(group):
        own = copies[group.rank]
        divide(own, placements(2), group)
        optimizer = OPTIMIZERS[name](list(own.parameters()))
        trained(own, optimizer, clipped=clipped, settle=settle_gradients if settled else lambda _: None)
        if name.startswith("adamw"):
            # States are divided like their parameters.
            state = optimizer.state[own[0].weight]["exp_avg"]
            assert isinstance(state, DividedTensor)
            assert state._local.numel() * 2 == state.numel()
            if clipped != "one by one":
                assert not [name for name in group.computed_whole if name.startswith(("_foreach", "_fused"))]
        return [whole(each) for each in own.parameters()]

    # Muon goes through 16 bits, where another order of the summands shows.
    tolerance = 5e-3 if name == "muon" else 1e-9
    for found in on_ranks(2, on_rank):
        for have, want in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(have, want.detach(), rtol=tolerance, atol=tolerance)
