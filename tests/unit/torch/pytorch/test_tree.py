"""Containers of tensors come back as they were; names of functions and modules, for errors.

Which arguments of a call get a gradient.

The tree of a model is walked anew where a module was given others, and only there.

Content of containers: kept, compared by identity, put back.
"""

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.nn.utils.rnn import pack_sequence

from shardwright.errors import UsageError
from shardwright.torch.pytorch import tensors
from shardwright.torch.pytorch.functions import name_of_call, unnoticed_changes
from shardwright.torch.pytorch.modules import ModelTree, all_modules, all_parameters
from shardwright.torch.pytorch.tensors import gradient_nodes, unreached
from shardwright.torch.pytorch.tree import (
    flatten,
    inside_of,
    leaves,
    map_tree,
    put_entries,
    same_entries,
    versions_of,
)

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    value: Any
    name: str = "r"


class Special(OrderedDict):
    """A dict subclass with an attribute, as transformers' ModelOutput is."""


atoms = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3))
trees = st.recursive(
    atoms,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), children, max_size=3),
    ),
    max_leaves=12,
)


@given(trees)
def test_flatten_and_rebuild_are_inverse(tree):
    items, structure = flatten(tree)
    assert structure.rebuild(items) == tree
    assert flatten(tree)[1].key == structure.key


@pytest.mark.parametrize(
    "tree",
    [
        Point(1, [2, 3]),
        Record(value={"a": 1}),
        OrderedDict(b=1, a=2),
        UserDict(a=1, b=[2]),
        Special(loss=1, logits=2),
        {"nested": (Point(1, 2), Record(3))},
        immutable_list([1, immutable_dict(a=2)]),
    ],
)
def test_containers_keep_their_class(tree):
    doubled = map_tree(lambda leaf: leaf * 2, tree)
    assert type(doubled) is type(tree)
    assert leaves(doubled) == [leaf * 2 for leaf in leaves(tree)]


def test_attributes_of_subclasses_survive():
    special = Special(a=1)
    special.note = "kept"
    assert map_tree(lambda leaf: leaf + 1, special).note == "kept"


def test_a_constructor_that_looks_at_its_arguments_is_not_asked_again():
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    items, structure = flatten(packed)
    rebuilt = structure.without_template().rebuild(items)
    assert type(rebuilt) is type(packed)
    assert rebuilt.data is packed.data


def test_what_holds_itself_is_refused():
    """Bug: a node that leads back to its parent ended in a bare RecursionError."""
    record = Record(value=torch.ones(2))
    record.name = [record]
    with pytest.raises(UsageError, match="Record of the step function holds itself"):
        flatten(record)


class SaysItsRange(nn.Module):
    """Reads a value to describe itself, as I-BERT's layers do; in a trace there are no values."""

    def __repr__(self) -> str:
        raise AssertionError


def test_nothing_asks_a_module_how_it_looks():
    module = SaysItsRange()
    assert name_of_call(module) == "module SaysItsRange"
    assert unnoticed_changes(module, (torch.zeros(1),), {}) == ()


def test_what_lies_behind_an_argument_counts_where_it_is_asked_for():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    behind = x * 2
    assert unreached(gradient_nodes([behind, x, y]), [behind * 3]) == {2}
    assert unreached(gradient_nodes([behind, x]), [x * 3]) == {0}


def test_what_ran_before_a_call_is_not_walked_through(monkeypatch):
    """Each of 80 layers walked through all before it."""
    x = torch.ones(2, requires_grad=True)
    for _ in range(1000):
        x = x.sin()
    given, result, walked = gradient_nodes([x]), x.cos(), []

    class Counted(set):
        def add(self, node):
            walked.append(node)
            super().add(node)

    monkeypatch.setattr(tensors, "set", Counted, raising=False)
    assert unreached(given, [result]) == set()
    assert len(walked) == 2


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


items = st.integers(0, 5)
containers = st.lists(items) | st.dictionaries(items, items) | st.sets(items)


@given(containers, containers)
def test_what_was_kept_is_put_back(before, after):
    if type(before) is not type(after):
        return
    container, content = type(before)(before), inside_of(before)
    put_entries(container, inside_of(after))
    assert container == after
    put_entries(container, content)
    assert container == before
    assert same_entries(inside_of(container), content)
    if isinstance(before, dict):
        assert list(container) == list(before)


def test_changes_in_place_are_counted():
    one, other = torch.zeros(2), torch.zeros(2)
    before = [versions_of(value) for value in (one, [one, 1], {"a": other}, (other,), 3)]
    one.add_(1)
    after = [versions_of(value) for value in (one, [one, 1], {"a": other}, (other,), 3)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, False, True, True, True]


def test_a_subclass_is_written_as_its_base():
    """A mapping that forbids ``update`` was left empty."""

    class ReadOnly(dict):
        def clear(self):
            raise RuntimeError("cannot be written")

        update = __setitem__ = clear

    class Ordered(OrderedDict):
        def update(self, *args, **kwargs):
            raise RuntimeError("cannot be written")

    for container in (ReadOnly(a=1), Ordered({"a": 1})):
        put_entries(container, inside_of(container))
        put_entries(container, {"b": 2, "a": 3})
        assert list(container.items()) == [("b", 2), ("a", 3)]
