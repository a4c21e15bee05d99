"""Offloads what units keep, with a tier that copies when it is told to."""

import gc
import weakref

import pytest
import torch
from tiers import ByHand
from torch import nn

from choices import some_combinations
from shardwright.schedule import Kind
from shardwright.torch.offload.stage_offload import Leaving, StageOffload

WIDTH = 32


class Alive:
    """Storages that a layer keeps and that are alive."""

    def __init__(self):
        self.now = set()

    def note(self, tensor):
        self.now.add(weakref.ref(tensor.untyped_storage(), self.now.discard))


class Layer(nn.Module):
    """Keeps one tensor of its own for its backward, `sin(x)`."""

    def __init__(self, alive=None):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._alive = alive

    def forward(self, x):
        y = x.sin()
        if self._alive is not None:
            self._alive.note(y)
        return x + self.linear(y)


def model(layers=6, alive=None):
    torch.manual_seed(0)
    return nn.ModuleList(Layer(alive) for _ in range(layers)).double()


def inputs():
    torch.manual_seed(1)
    return torch.randn(16, WIDTH, dtype=torch.float64)


def offload_of(tier, *, horizon=1, needed=frozenset(), least_bytes=1):
    return StageOffload(
        tier, Leaving(horizon), horizon=horizon, least_bytes=least_bytes, needed=lambda: needed
    )


def run(layers, x, offload, step=None):
    for layer in layers:
        with offload.keeping(layer):
            x = layer(x)
        if step is not None:
            step()
    return x


def gradients(layers):
    found = [p.grad.clone() for p in layers.parameters()]
    for p in layers.parameters():
        p.grad = None
    return found


def plain_gradients(layers):
    x = inputs()
    for layer in layers:
        x = layer(x)
    x.square().sum().backward()
    return gradients(layers)


@pytest.mark.parametrize(("prompt", "horizon"), some_combinations([True, False], [1, 2, 10]))
def test_gradients_are_the_same(horizon, prompt):
    layers, tier = model(), ByHand()
    expected = plain_gradients(layers)
    offload = offload_of(tier, horizon=horizon)
    loss = run(layers, inputs(), offload, tier.run if prompt else None).square().sum()
    offload.offload()
    offload.load()
    loss.backward()
    assert all(map(torch.equal, gradients(layers), expected))
    offload.end()
    del loss
    gc.collect()
    assert tier.taken == 0


def test_no_more_units_are_here_than_the_horizon_and_one():
    """Copies are as slow as they may be: only who waits for one gets it."""
    alive = Alive()
    layers, tier = model(8, alive), ByHand()
    offload = offload_of(tier, horizon=2)
    most = []
    x = inputs()
    for layer in layers:
        with offload.keeping(layer):
            x = layer(x)
        most.append(len(alive.now))
    assert max(most) == 3  # two are leaving, one is new
    offload.offload()
    assert len(alive.now) <= 3
    tier.run()
    offload.load()
    assert len([entry for entry in tier.log if entry[0] == "write"]) >= 5
    x.sum().backward()
    assert [kind for kind, _ in offload.moved].count(Kind.LOAD) >= 5


def test_a_storage_is_copied_once():
    """A mask that all units keep, and views of one tensor."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, mask):
            first, second = (x.sin() * mask).chunk(2, dim=-1)
            return x + torch.cat([first.exp(), second.exp()], dim=-1) * mask

    torch.manual_seed(0)
    layers, tier = nn.ModuleList(Masked() for _ in range(4)).double(), ByHand()
    x = inputs().requires_grad_()
    mask = (torch.rand(16, WIDTH) > 0.5).double()

    def loss(offload):
        y = x
        for layer in layers:
            if offload is None:
                y = layer(y, mask)
            else:
                with offload.keeping(layer):
                    y = layer(y, mask)
        return y.square().sum()

    loss(None).backward()
    expected, x.grad = x.grad, None
    offload = offload_of(tier, horizon=1)
    made = loss(offload)
    kept = weakref.ref(mask.untyped_storage())
    offload.offload()
    tier.run()
    # x, sin(x), the mask, and of each unit what it made: two halves of exp, each a storage of its own.
    assert len(tier.log) < 4 * 6
    assert len([size for kind, size in tier.log if kind == "write"]) == len(offload._known)
    offload.load()
    made.backward()
    assert torch.equal(x.grad, expected)
    assert kept() is not None


@pytest.mark.parametrize("prompt", [True, False])
def test_a_change_in_place_behind_the_forward_is_found(prompt):
    """The bytes have been copied before the change; plain PyTorch refuses it nevertheless."""

    class Keeper(nn.Module):
        def forward(self, x):
            return x.exp()

    tier = ByHand()
    unit = Keeper()
    x = inputs().requires_grad_()
    offload = offload_of(tier)
    with offload.keeping(unit):
        y = unit(x)
    offload.offload()
    if prompt:
        tier.run()
    z = y * 1.0
    with torch.no_grad():
        y.add_(1.0)
    offload.load()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected"):
        z.sum().backward()


def test_a_tensor_that_changes_between_units_is_copied_again():
    """The second unit keeps the new content of memory of which the first has kept the old one."""

    class Square(nn.Module):
        def forward(self, x):
            self.leaf = x.detach().requires_grad_()
            return self.leaf.square()

    tier = ByHand()
    units, memory = [Square(), Square()], inputs()
    offload = offload_of(tier, horizon=2)
    with offload.keeping(units[0]):
        first = units[0](memory)
    offload.offload()
    tier.run()
    memory.mul_(3.0)
    with offload.keeping(units[1]):
        second = units[1](memory)
    offload.offload()
    tier.run()
    assert len(tier.log) == 2
    offload.load()
    second.sum().backward()
    assert torch.equal(units[1].leaf.grad, 2 * memory)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        first.sum().backward()


def test_a_recomputed_unit_offloads_its_input():
    from torch.utils.checkpoint import checkpoint

    layers, tier = model(4), ByHand()
    expected = plain_gradients(layers)
    offload = offload_of(tier)
    x = inputs().requires_grad_()
    for layer in layers:
        with offload.keeping(layer):
            x = checkpoint(layer, x, use_reentrant=False)
    offload.offload()
    tier.run()
    assert len(tier.log) == 4  # the inputs, and nothing else
    offload.load()
    x.square().sum().backward()
    assert all(map(torch.equal, gradients(layers), expected))


def test_an_abandoned_forward_gives_its_places_back():
    layers, tier = model(4), ByHand()
    offload = offload_of(tier)
    made = run(layers, inputs(), offload)
    offload.end()
    del made
    gc.collect()
    assert tier.taken == 0


def test_a_backward_inside_a_unit_and_a_second_one_behind():
    """Forces, say: `torch.autograd.grad` in the forward goes back through what the unit has just kept."""

    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            energy = self.linear(x.sin()).tanh().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return x + force

    torch.manual_seed(0)
    layers = nn.ModuleList(Force() for _ in range(3)).double()

    def start():
        return inputs().requires_grad_()

    x = start()
    for layer in layers:
        x = layer(x)
    x.square().sum().backward()
    expected = gradients(layers)
    tier = ByHand()
    offload = offload_of(tier)
    loss = run(layers, start(), offload, tier.run).square().sum()
    offload.offload()
    tier.run()
    offload.load()
    loss.backward(retain_graph=True)
    assert all(map(torch.allclose, gradients(layers), expected))
    loss.backward()
    assert all(map(torch.allclose, gradients(layers), expected))
