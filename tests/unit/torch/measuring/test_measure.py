"""Units are timed in one piece and in two parts.

A plan from a profile says what the profile does not know.

How long the optimizer's update takes: foreseen, measured, written down.
"""

import time

import pytest
import torch
from torch import nn

import shardwright.torch as sw
from shardwright.cluster import Cluster, Device, Link
from shardwright.config import Config
from shardwright.errors import StalePlanError
from shardwright.observe import read_json_lines
from shardwright.planner.profiles import MeasuredProfile
from shardwright.run.context import context
from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.measuring.device_rates import update_costs
from shardwright.torch.measuring.measure import _timing, measure_class
from shardwright.torch.model import distributed_model, steps
from shardwright.torch.optimizer.distributed_optimizer import UpdateClock
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tracing.trace import trace_step
from shardwright.torch.tracing.trace_data import Sample
from shardwright.torch.units.dry_run import trace_model
from shardwright.torch.units.offline_planner import plan_model

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


CLUSTER = Cluster(
    device=Device(name="cpu"),
    ranks_per_node=2,
    cores_per_node=2,
    intra_node=Link(latency_s=1e-5, bandwidth_Bps=4 * 2**30),
    inter_node=Link(latency_s=1e-4, bandwidth_Bps=2**30),
)


@pytest.mark.parametrize("world", [2, 6])
def test_more_ranks_than_were_measured_are_told(world):
    model, batch = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), torch.randn(6, 8)
    graph = trace_model(model, batch)
    profile = MeasuredProfile(
        fingerprint=graph.model_fingerprint, costs={}, cluster=CLUSTER, num_ranks=2, when="now"
    )
    config = Config.parse({"pipeline_parallel_degree": world})

    def plan(measured):
        return plan_model(model, batch, config=config, world_size=world, cluster=CLUSTER, measured=measured)

    told = [why for why in plan(profile).why if "The profile was measured" in why]
    expected = (
        "The profile was measured with 2 ranks: 6 are taken to be on 3 such hosts, with 1.0 GiB/s "
        "between them. Measure on as many to know."
    )
    assert told == ([expected] if world > 2 else [])
    with pytest.raises(StalePlanError):
        plan(profile.model_copy(update={"fingerprint": "another"}))


def test_a_clock_adds_up_until_it_is_asked():
    clock = UpdateClock()
    assert clock.taken() is None
    for _ in range(2):
        clock.run(lambda: time.sleep(0.01), torch.device("cpu"))
    taken = clock.taken()
    assert taken is not None
    assert 0.02 <= taken < 30
    assert clock.taken() is None


class Odd(torch.optim.SGD):
    """An optimizer that cannot be tried."""

    def step(self, closure=None):
        raise RuntimeError("a closure is needed")


def test_the_rate_is_that_of_the_own_optimizer_and_0_where_it_cannot_be_tried(tmp_path):
    sw.init({"run_dir": "off"})
    try:
        drawn = torch.random.get_rng_state()
        adam, each_s = update_costs(context())
        assert torch.equal(torch.random.get_rng_state(), drawn)
        sw.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
        sgd, sgd_each_s = update_costs(context())
        assert each_s > sgd_each_s > 0
        assert 0 < adam < sgd  # which has neither averages nor a root
        for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop):
            context().optimizers.clear()
            sw.DistributedOptimizer(kind([nn.Parameter(torch.zeros(2))], lr=0.1))
            assert min(update_costs(context())) > 0
        context().optimizers.clear()
        sw.DistributedOptimizer(Odd([nn.Parameter(torch.zeros(2))], lr=0.1))
        assert update_costs(context()) == (0.0, 0.0)
    finally:
        sw.shutdown()


@pytest.mark.parametrize("width", [512, 8])  # by bytes alone, the small one would take next to nothing
def test_a_run_writes_down_its_updates_and_its_plan_foresees_them(tmp_path, width):
    sw.init({"run_dir": str(tmp_path), "run_name": "run", "plan_one_stage": True, "report": False})
    try:
        model = sw.DistributedModel(nn.Sequential(*(nn.Linear(width, width) for _ in range(8))))
        optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

        @sw.step
        def train(model, x):
            model.backward(model(x).square().mean())

        for _ in range(4):
            train(model, torch.randn(4, width))
            optimizer.step()
            optimizer.zero_grad()
        prediction = context().plan.prediction
    finally:
        sw.shutdown()
    (folder,) = tmp_path.iterdir()
    found = [record.get("time/update(s)") for record in read_json_lines(folder / "metrics.jsonl")]
    assert found[0] is None
    assert all(seconds > 0 for seconds in found[1:])
    assert 0.1 < prediction.update_s / min(found[1:]) < 10
