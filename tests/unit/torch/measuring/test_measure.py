"""Units are timed in one piece and in two parts."""

import time

import pytest
import torch
from torch import nn

import shardwright.torch as sw
from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.measuring.measure import _timing, measure_class
from shardwright.torch.model import distributed_model, steps
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tracing.trace import trace_step
from shardwright.torch.tracing.trace_data import Sample

CPU = torch.device("cpu")


def sample_of(func):
    leaves, structure = flatten(((torch.randn(512, 256, requires_grad=True),), {}))
    return Sample(func=func, leaves=leaves, structure=structure)


def test_the_gradients_of_weights_are_timed_apart():
    # The time for inputs is a difference: on a busy machine, one of several is more than the noise.
    timings = [measure_class(sample_of(nn.Linear(256, 256)), device=CPU) for _ in range(3)]
    assert all(timing.forward_s > 0 and timing.backward_s > 0 for timing in timings)
    assert all(timing.weight_s > 0 for timing in timings)
    assert max(timing.input_s for timing in timings) > 0


@pytest.mark.parametrize("func", [nn.LayerNorm(256), torch.softmax])
def test_what_cannot_be_split_is_timed_in_one_piece(func):
    call = func if isinstance(func, nn.Module) else lambda x: func(x, -1)
    timing = measure_class(sample_of(call), device=CPU)
    assert (timing.input_s, timing.weight_s) == (None, 0.0)
    assert timing.backward_s > 0


def test_what_ran_under_autocast_is_timed_under_it():
    """Float32 weights refused the 16-bit inputs that autocast had made: most costs were estimated."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    unit_map = UnitMap.of(model, ["0", "1"])
    for module in unit_map.modules.values():
        intercept_calls(module)

    def step(x):
        return model(x).sum()

    def step_in_16_bits(x):
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x).sum()

    plain = trace_step(unit_map, step, ((torch.randn(8, 256),), {})).samples
    cast = trace_step(unit_map, step_in_16_bits, ((torch.randn(8, 256),), {})).samples
    assert not plain.keys() & cast.keys()  # not even the first layer, whose input has 32 bits in both
    units = [sample for sample in cast.values() if isinstance(sample.func, nn.Module)]
    assert [sample.leaves[0].dtype for sample in units] == [torch.float32, torch.float16]
    for sample in units:
        assert measure_class(sample, device=CPU).backward_s > 0


def test_what_a_forward_takes_more_counts_where_the_backward_is_split():
    wholes = [(1.0, 2.0, 0.0), (1.0, 2.5, 0.0), (1.5, 2.0, 0.0)]
    parts = [(1.25, 1.5, 1.0)] * 3
    timing = _timing(wholes, parts)
    assert (timing.forward_s, timing.backward_s) == (1.0, 2.0)
    assert (timing.input_s, timing.weight_s) == (1.5 + 0.25, 1.0)
    assert _timing(wholes, []).input_s is None


def test_ranks_that_share_cores_count_the_time_on_them():
    def sleeps(x):
        time.sleep(0.02)
        return x * 2

    assert measure_class(sample_of(sleeps), device=CPU).forward_s > 0.02
    assert measure_class(sample_of(sleeps), device=CPU, share_cores=True).forward_s < 0.01


def test_memory_is_kept_from_the_wrapping_and_given_back_once(monkeypatch):
    """Units were timed with the page faults of a heap that gives memory back: 15 % too slow."""
    calls = []
    monkeypatch.setattr(distributed_model, "keep_freed_memory", lambda: bool(calls.append("keep")) or True)
    monkeypatch.setattr(steps, "give_back_freed_memory", lambda: calls.append("give back"))
    sw.init({"run_dir": "off"})
    try:
        model = sw.DistributedModel(nn.Linear(2, 1))
        assert calls == ["keep"]

        @sw.step
        def evaluate(model, x):
            return model(x)

        with torch.no_grad():
            for _ in range(2):
                evaluate(model, torch.ones(4, 2))
    finally:
        sw.shutdown()
    assert calls == ["keep", "give back"]
