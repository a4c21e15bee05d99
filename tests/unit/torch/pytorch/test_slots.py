"""Content of containers: kept, compared by identity, put back."""

from collections import OrderedDict

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.torch.pytorch.tree import inside_of, put_entries, same_entries, versions_of

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
