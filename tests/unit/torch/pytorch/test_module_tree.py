"""The tree of a model is walked anew where a module was given others, and only there."""

import pytest
import torch
from torch import nn

from shardwright.torch.pytorch.modules import ModelTree, all_modules, all_parameters


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_the_lists_stay_as_long_as_nothing_changes():
    net = model()
    tree = ModelTree(lambda: net)
    modules, parameters = tree.modules, tree.parameters
    net.train(mode=False)
    net[0].weight.data.zero_()
    assert tree.modules is modules
    assert tree.parameters is parameters
    assert modules == list(net.modules())
    assert [id(p) for p in parameters] == [id(p) for p in net.parameters()]


def replace_a_parameter(net: nn.Sequential) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())


def tie(net: nn.Sequential) -> None:
    net[1][0].weight = net[0].weight


def register_a_parameter(net: nn.Sequential) -> None:
    net[1][1].register_parameter("slope", nn.Parameter(net[0].bias.detach().clone()))


def replace_a_module(net: nn.Sequential) -> None:
    net[1][1] = nn.Tanh()


def swap_modules(net: nn.Sequential) -> None:
    net[0], net[1] = net[1], net[0]


def delete_a_module(net: nn.Sequential) -> None:
    del net[1][1]


@pytest.mark.parametrize(
    "change",
    [replace_a_parameter, tie, register_a_parameter, replace_a_module, swap_modules, delete_a_module],
)
def test_changes_are_seen(change):
    net = model()
    tree = ModelTree(lambda: net)
    before = tree.modules
    change(net)
    assert tree.modules is not before
    assert tree.modules == all_modules(net)
    assert [id(p) for p in tree.parameters] == [id(p) for p in all_parameters(net)]


def test_buffers_are_named_as_the_model_names_them():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(4)))
    net[1].register_buffer("tied", net[0].running_mean)
    tree = ModelTree(lambda: net)
    changes = [
        lambda: None,
        lambda: net[1].append(nn.Sequential(net[0], nn.BatchNorm1d(2))),
        lambda: net[1].register_buffer("late", torch.ones(1)),
        lambda: net.pop(0),
    ]
    for change in changes:
        change()
        found, named = tree.named_buffers(), dict(net.named_buffers())
        assert list(found) == list(named)
        assert all(found[name] is buffer for name, buffer in named.items())
