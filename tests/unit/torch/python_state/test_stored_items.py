"""Which look-ups of an attribute are for putting an item into it, and nothing else."""

import sys
from typing import Any

import pytest

from shardwright.torch.python_state.stored_items import stores_item


class Holder:
    def __init__(self) -> None:
        self.items, self.index, self.seen = [0, 0, 0, 0], 1, []

    def __getattribute__(self, key: str) -> Any:
        if key == "items":
            object.__getattribute__(self, "seen").append(stores_item(sys._getframe(1)))
        return object.__getattribute__(self, key)


def by_variable(holder: Holder, i: int) -> None:
    holder.items[i] = 1


def by_attribute(holder: Holder, i: int) -> None:
    holder.items[holder.index + i * 0] = 1


def from_behind(holder: Holder, i: int) -> None:
    holder.items[-i] = 1


def added(holder: Holder, i: int) -> None:
    holder.items[i] += 1


def read(holder: Holder, i: int) -> int:
    return holder.items[i]


def as_index(holder: Holder, i: int) -> None:
    {}[holder.items[i]] = 1


def named(holder: Holder, i: int) -> None:
    items = holder.items
    items[i] = items[0]


def stored_itself(holder: Holder, i: int) -> None:
    {}[i] = holder.items


def deleted(holder: Holder, i: int) -> None:
    del holder.items[i]


@pytest.mark.parametrize("function", [by_variable, by_attribute, from_behind])
def test_only_an_item_is_put(function):
    holder = Holder()
    function(holder, 1)
    assert holder.seen == [True]


@pytest.mark.parametrize("function", [added, read, as_index, named, stored_itself, deleted])
def test_more_is_done_with_the_list(function):
    holder = Holder()
    function(holder, 1)
    assert holder.seen == [False]
