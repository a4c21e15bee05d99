"""What holders held is compared with what they hold, and put back; a walk; a watched dictionary.

Which attributes that a script sets make it trace again.
"""

from typing import Any

import pytest
import torch
from torch import nn

from shardwright.torch.python_state.attribute_watch import AttributeWatch
from shardwright.torch.python_state.snapshot import ALL, Snapshot, WatchedDict, snapshot_of
from shardwright.torch.pytorch.modules import all_modules


class Plain:
    def __init__(self) -> None:
        self.value: Any = 1


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


def watched(model: nn.Module) -> AttributeWatch:
    """After the first step."""
    watch = AttributeWatch()
    watch.step_begins(all_modules(model))
    watch.step_ends()
    return watch


def test_only_what_the_script_sets_counts():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    watch = watched(model)
    assert watch.step_begins(all_modules(model)) == ()
    model[0].calls = 1  # in the step
    watch.step_ends()
    assert watch.step_begins(all_modules(model)) == ()
    model[1].p = 0.2
    with_change = watch.step_begins(all_modules(model))
    assert with_change != ()
    watch.step_ends()
    assert watch.step_begins(all_modules(model)) == with_change  # the same program serves again
    model[1].p = 0.3
    assert watch.step_begins(all_modules(model)) not in ((), with_change)


def test_an_attribute_without_effect_is_forgotten():
    model = nn.Linear(2, 2)
    model.step_number = 0
    watch = watched(model)
    watch.traced("batch", "program")
    traces = 0
    known = {()}
    for step in range(20):
        model.step_number = step
        key = watch.step_begins(all_modules(model))
        if key not in known:
            known.add(key)
            watch.traced("batch", "program")
            traces += 1
        watch.step_ends()
    assert traces <= 4


def test_an_attribute_with_effect_is_kept():
    model = nn.Linear(2, 2)
    model.length = 0
    watch = watched(model)
    watch.traced("batch", "program of 0")
    keys = set()
    for length in range(1, 10):
        model.length = length
        keys.add(watch.step_begins(all_modules(model)))
        watch.traced("batch", f"program of {length}")
        watch.step_ends()
    assert len(keys) == 9
