"""What holders held is compared with what they hold, and put back; a walk; a watched dictionary."""

from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.torch.python_state.snapshot import ALL, Snapshot, WatchedDict, snapshot_of, walk


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class Plain:
    def __init__(self) -> None:
        self.value: Any = 1


CHANGES = {
    "an attribute": (Plain, lambda item: setattr(item, "value", 2)),
    "a new attribute": (Plain, lambda item: setattr(item, "other", 2)),
    "a slot": (Slotted, lambda item: setattr(item, "value", 2)),
    "an empty slot": (Slotted, lambda item: delattr(item, "value")),
    "a list": (lambda: [1, 2], lambda item: item.pop()),
    "a dictionary": (lambda: OrderedDict(a=1, b=2), lambda item: item.move_to_end("a")),
    "a set": (lambda: {1}, lambda item: item.add(2)),
    "a deque": (lambda: deque([1], maxlen=1), lambda item: item.append(2)),
    "a module": (nn.Identity, lambda item: setattr(item, "value", 2)),
}


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_what_has_changed_is_seen_and_put_back(make, change):
    holder = make()
    snapshot = Snapshot()
    before = snapshot.add(holder)
    assert snapshot.changed == []
    change(holder)
    if not isinstance(holder, OrderedDict):  # whose order alone is another
        assert {id(each) for each, _ in snapshot.changed} == {id(holder)}
    snapshot.put_back()
    assert snapshot.changed == []
    again = Snapshot().add(holder)
    assert list(again.items()) == list(before.items())


def test_an_attribute_changes_with_what_is_in_it():
    module = nn.Identity()
    module.seen, module.kept, module.scale = [], {"table": torch.zeros(2)}, torch.ones(1)
    snapshot = snapshot_of(module)
    module.seen.append(1)
    module.kept["table"].add_(1)
    assert {key for holder, key in snapshot.changed if holder is module} == {"seen", "kept"}
    module.scale = torch.ones(1)
    assert [(key, item) for _, key, item in snapshot.new_tensors] == [("scale", module.scale)]
    snapshot.put_back()
    assert module.seen == []


def test_a_container_that_ends_as_it_began_has_changed_in_between():
    plain, stack = Plain(), [1]
    plain.value = stack
    snapshot = Snapshot()
    snapshot.add(plain)
    snapshot.follow_size(stack)
    stack.append(2)
    snapshot.look()
    stack.pop()
    assert snapshot.changed == [(plain, "value")]


def test_a_walk_comes_by_once_and_no_further_than_it_may():
    plain = Plain()
    plain.value = {"own": plain, "deep": [[[1]]]}
    found = [item for item, _ in walk([(plain, 3)])]
    assert found == [plain, plain.value, plain.value["deep"]]
    assert [entries for _, entries in walk([([0] * 10_001, 3)])] == [None]  # that is data


READS = {
    "an entry": (lambda d: d["a"], ["a"]),
    "whether it is there": (lambda d: "c" in d, ["c"]),
    "with a default": (lambda d: d.get("b"), ["b"]),
    "taken out": (lambda d: d.pop("a"), ["a"]),
    "all": (list, [ALL]),
    "merged": (lambda d: {**d}, [ALL]),
    "how many": (len, [ALL]),
    "values": (lambda d: d.values(), [ALL]),
    "a comparison": (lambda d: d == {}, [ALL]),
    "its own": (lambda d: [d.__setitem__("a", 3), d["a"]], []),
}


@pytest.mark.parametrize(("read", "expected"), READS.values(), ids=READS)
def test_a_watched_dictionary_tells_what_is_read(read, expected):
    told, original = [], {"a": 1, "b": 2}
    watched = WatchedDict(original, lambda holder, key: told.append((holder is original, key)), original)
    read(watched)
    assert [key for _, key in told][:1] == expected
    assert all(is_original for is_original, _ in told)
