"""Hooks of units while these are measured: what scripts see of them, and what is part of the computation."""

import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune

import shardwright.torch as sw
from shardwright.torch.batch.batch import Batch
from shardwright.torch.measuring.measure import measure_class
from shardwright.torch.units.model_traces import trace_parts

CPU = torch.device("cpu")
WIDTH = 64


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.second(torch.dropout(self.norm(self.first(x)), 0.5, True) * random.random())


def samples_of(unit):
    """What there is to be timed of a model of two units, this one first."""
    model = nn.Sequential(unit, Unit())
    return list(traced(model).samples.values())


def traced(model):
    batch = Batch(((torch.randn(8, WIDTH),), {}))

    def step(x):
        return model(x).sum()

    return trace_parts(model, step, {1: batch}, device=CPU, num_stages=2, memory={})[1]


def measured(unit):
    """The samples of a unit and of what is inside it are timed; those of its whole first."""
    found = samples_of(unit)
    timed = [sample for sample in found if sample.func is unit or sample.func in list(unit.modules())]
    assert timed
    return [measure_class(sample, device=CPU) for sample in timed]


def test_a_script_can_tell_that_a_unit_is_timed():
    """By a hook that it needs: others do not run, and a line of the log says so."""
    marks = []
    unit = whole(Unit())
    unit.norm.double()
    unit.norm.register_forward_pre_hook(lambda module, given: (given[0].double(),))
    unit.norm.register_forward_hook(
        lambda module, given, result: marks.append(sw.is_tracing()) or result.float()
    )
    (sample, *_) = (sample for sample in samples_of(unit) if sample.func is unit)
    marks.clear()
    assert measure_class(sample, device=CPU).backward_s > 0
    assert set(marks) == {True}


def test_what_hooks_compute_is_missing_in_the_times_which_the_log_says(caplog):
    caplog.set_level("INFO")
    unit = whole(Unit())
    unit.second.register_forward_hook(lambda module, given, result: result * 2)
    measured(unit)
    (line,) = {record.message for record in caplog.records if "hooks" in record.message}
    assert line == "Unit: forward hooks inside it are neither timed nor counted"


def whole(unit):
    """Has a unit placed whole, so that the modules inside it are called inside it."""
    unit.register_full_backward_hook(lambda *given: None)
    return unit


def test_hooks_that_only_look_on_do_not_run():
    """A script's counter had 262 instead of 6 after two steps."""
    count = dict.fromkeys(["before", "after", "backward before", "backward", "any module"], 0)

    def counts(name):
        def hook(*given):
            count[name] += 1

        return hook

    unit = whole(Unit())
    for module in (unit, unit.second):
        module.register_forward_pre_hook(counts("before"))
        module.register_forward_hook(counts("after"), with_kwargs=True)
        module.register_full_backward_pre_hook(counts("backward before"))
        module.register_full_backward_hook(counts("backward"))
    samples = [sample for sample in samples_of(unit) if sample.func in list(unit.modules())]
    count.update(dict.fromkeys(count, 0))  # a trace runs them
    handle = register_module_forward_hook(counts("any module"))
    try:
        assert [measure_class(sample, device=CPU).backward_s > 0 for sample in samples]
    finally:
        handle.remove()
    assert set(count.values()) == {0}
    assert len(unit._forward_hooks) == len(unit.second._forward_hooks) == 1
    unit(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
    assert count == {"before": 2, "after": 2, "backward before": 2, "backward": 2, "any module": 0}


@pytest.mark.parametrize("of_unit", [True, False])
def test_a_hook_that_changes_the_type_belongs_to_the_computation(of_unit):
    """Of the unit itself it runs around it: the unit is timed without; inside, the rest needs it."""
    count = [0]

    def doubled(module, given):
        count[0] += 1
        return (given[0].double(),)

    unit = whole(Unit())
    unit.norm.double()
    unit.norm.register_forward_pre_hook(doubled)
    unit.norm.register_forward_hook(lambda module, given, result: result.float())
    if of_unit:
        unit.register_forward_pre_hook(lambda module, given: (given[0] * 1,))
    assert measured(unit)[0].backward_s > 0
    assert count[0] > 0


def normed(linear):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(linear)


def pruned(linear):
    return prune.l1_unstructured(linear, "weight", amount=0.5)


@pytest.mark.parametrize("wrap", [normed, pruned])
def test_hooks_of_pytorch_run(wrap):
    """They compute the weight: without them there would be none, or one that gets no gradient."""
    unit = whole(Unit())
    wrap(unit.second)
    seen = []

    class Sees(nn.Module):
        def forward(self, x):
            y = unit_second(x)
            seen.append(unit_second.weight.requires_grad)
            return y

    unit_second, unit.second = unit.second, Sees()
    unit.second.inner = unit_second
    assert measured(unit)[0].backward_s > 0
    assert seen
    assert all(seen)


def test_nothing_of_the_model_changes():
    unit = whole(Unit())
    unit.first.register_forward_hook(lambda module, given, result: setattr(module, "seen", result.detach()))
    samples = samples_of(unit)
    state = {name: tensor.clone() for name, tensor in unit.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in unit.named_modules()}
    for sample in samples:
        measure_class(sample, device=CPU)
    assert all(torch.equal(tensor, state[name]) for name, tensor in unit.state_dict().items())
    assert attributes == {name: dict(vars(module)) for name, module in unit.named_modules()}
    assert unit.calls == 0
