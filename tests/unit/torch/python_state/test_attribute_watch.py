"""Which attributes that a script sets make it trace again."""

from torch import nn

from shardwright.torch.python_state.attribute_watch import AttributeWatch
from shardwright.torch.pytorch.modules import all_modules


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
