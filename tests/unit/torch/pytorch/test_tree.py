"""Containers of tensors come back as they were."""

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from shardwright.errors import UsageError
from shardwright.torch.pytorch.tree import flatten, leaves, map_tree

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


def test_structures_differ_where_keys_do():
    assert flatten({"a": 1})[1].key != flatten({"b": 1})[1].key
    assert flatten([1])[1].key != flatten((1,))[1].key


def test_what_holds_itself_is_refused():
    """Bug: a node that leads back to its parent ended in a bare RecursionError."""
    record = Record(value=torch.ones(2))
    record.name = [record]
    with pytest.raises(UsageError, match="Record of the step function holds itself"):
        flatten(record)
