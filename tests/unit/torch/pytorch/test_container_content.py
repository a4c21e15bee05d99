"""Content of containers: kept, compared by identity, put back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.torch.pytorch.container_content import content_of, has_content, put_content, versions_of

items = st.integers(0, 5)
containers = st.lists(items) | st.dictionaries(items, items) | st.sets(items)


@given(containers, containers)
def test_what_was_kept_is_put_back(before, after):
    if type(before) is not type(after):
        return
    container, content = type(before)(before), content_of(before)
    put_content(container, content_of(after))
    assert container == after
    put_content(container, content)
    assert container == before
    assert has_content(container, content)
    if isinstance(before, dict):
        assert list(container) == list(before)


def test_the_order_of_a_dictionary_counts():
    assert not has_content({1: 1, 2: 2}, {2: 2, 1: 1})


def test_equal_objects_are_not_the_same():
    assert not has_content([torch.ones(1)], [torch.ones(1)])


@pytest.mark.parametrize("value", [None, 1, "text", torch.ones(2), (1, 2)])
def test_other_things_have_no_content(value):
    assert content_of(value) is None
    assert has_content(value, None)


def test_changes_in_place_are_counted():
    one, other = torch.zeros(2), torch.zeros(2)
    before = [versions_of(value) for value in (one, [one, 1], {"a": other}, (other,), 3)]
    one.add_(1)
    after = [versions_of(value) for value in (one, [one, 1], {"a": other}, (other,), 3)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, False, True, True, True]


def test_a_container_that_refuses_to_be_written_is_left_alone():
    class ReadOnly(dict):
        def clear(self):
            raise RuntimeError("cannot be written")

    container = ReadOnly(a=1)
    put_content(container, content_of(container))
    with pytest.raises(RuntimeError):
        put_content(container, {})
