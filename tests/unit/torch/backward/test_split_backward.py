"""A split backward gives the gradients of a whole one, and the weights' when they are asked for."""

import copy

import pytest
import torch
from torch import nn

from shardwright.torch.backward.split_backward import put_off_weights, split_modules, unsplit

SPLIT = {
    "linear": (nn.Linear(6, 5), (3, 6)),
    "linear without bias": (nn.Linear(6, 5, bias=False), (2, 3, 6)),
    "one dimension": (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "two dimensions": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0)), (2, 4, 9, 8)),
    "groups without bias": (nn.Conv2d(4, 8, 3, groups=2, dilation=2, bias=False), (2, 4, 9, 9)),
    "three dimensions": (nn.Conv3d(2, 3, 2), (2, 2, 4, 5, 6)),
}
WHOLE = {
    "padding by name": (nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 8, 8)),
    "reflected edges": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 8, 8)),
    "no batch dimension": (nn.Conv2d(4, 6, 3), (4, 8, 8)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3), (2, 4, 8, 8)),
}


def gradients(module, x):
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def backward_twice(module, x, run):
    """Two microbatches, so that gradients are added up."""
    for scale in (1.0, 0.5):
        run((module(x * scale) ** 2).sum())


@pytest.mark.parametrize("name", [*SPLIT, *WHOLE])
def test_gradients_are_those_of_the_plain_module(name):
    torch.manual_seed(0)
    module, shape = {**SPLIT, **WHOLE}[name]
    plain = copy.deepcopy(module).double()
    split = copy.deepcopy(plain)
    split_modules(split)
    x, y = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    y.copy_(x)
    put_off = []

    def run_split(loss):
        with put_off_weights([loss.grad_fn]) as work:
            loss.backward()
        put_off.extend(work)

    backward_twice(plain, x.requires_grad_(), lambda loss: loss.backward())
    backward_twice(split, y.requires_grad_(), run_split)
    assert len(put_off) == (2 if name in SPLIT else 0)
    if name in SPLIT:
        assert all(parameter.grad is None for parameter in split.parameters())
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-12)
    for work in put_off:
        work()
    for found, expected in zip(gradients(split, y), gradients(plain, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SPLIT)
def test_a_whole_backward_and_a_gradient_of_a_gradient_are_those_of_the_plain_module(name):
    torch.manual_seed(0)
    module, shape = SPLIT[name]
    plain = copy.deepcopy(module).double()
    split = copy.deepcopy(plain)
    split_modules(split)
    x = torch.randn(shape, dtype=torch.float64)
    for one in (plain, split):
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(one(given).tanh().sum(), given, create_graph=True)
        (slope.square().sum() + one(given).sum()).backward()
    for found, expected in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SPLIT)
def test_frozen_parts_get_no_gradient(name):
    module, shape = SPLIT[name]
    module = copy.deepcopy(module)
    split_modules(module)
    module.weight.requires_grad_(False)
    x = torch.randn(shape)
    loss = module(x.requires_grad_()).sum()
    with put_off_weights([loss.grad_fn]) as work:
        loss.backward()
    for item in work:
        item()
    assert module.weight.grad is None
    assert module.bias is None or module.bias.grad is not None


def test_a_module_is_given_back_as_it_was():
    module = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(1, 1), nn.ReLU())
    split = split_modules(module)
    assert len(split) == 2
    unsplit(split)
    assert not any("forward" in sub.__dict__ for sub in module.modules())


@pytest.mark.parametrize("of_weight", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_input", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_lies_in_memory_as_its_weight_does(of_weight, of_input):
    module = nn.Conv2d(4, 6, 3).to(memory_format=of_weight)
    split_modules(module)
    x = torch.randn(2, 4, 9, 8).to(memory_format=of_input)
    loss = module(x).square().sum()
    with put_off_weights([loss.grad_fn]) as put_off:
        loss.backward()
    for work in put_off:
        work()
    assert module.weight.grad.stride() == module.weight.stride()
