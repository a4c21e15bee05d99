"""Which stage runs what, and what the programs of a batch have in common: pure data, no framework.

Which stage computes which node of a graph.
"""

from types import SimpleNamespace

import pytest
import torch
from graphs import GraphBuilder
from torch import nn

from shardwright.errors import TraceError, TraceMismatchError
from shardwright.model_graph import ModelGraph, TensorSpec
from shardwright.plan import SchedulePlan
from shardwright.runtime.batch_schedules import (
    BatchSchedules,
    check_one_order,
    homes_of_buffers,
    merged_edges,
)
from shardwright.runtime.homes import Crossing, assign, gradients_of, home_stages
from shardwright.schedule import Kind
from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.tracing.trace import trace_step

PLAN = SimpleNamespace(
    stages=[SimpleNamespace(units=("a",)), SimpleNamespace(units=("b", "c"))], stage_ranks=(0, 1)
)


def graph_of(*names, parameters=()):
    """Units called one after the other, each on what the one before gave; an operation behind them."""
    builder = GraphBuilder()
    for parameter in parameters:
        builder.parameter(parameter, 40)
    value = builder.unit(names[0], parameters=parameters if names[0] == "spare" else ())
    for name in names[1:]:
        value = builder.unit(name, [value], parameters=parameters if name == "spare" else ())
    builder.op("add", [value])
    return builder.graph()


def test_calls_in_the_order_of_the_plan_have_its_stages():
    found = assign(graph_of("a", "b", "c"), PLAN)
    assert found.stage_ranks == (0, 1)
    assert found.stage_of_call == {0: 0, 1: 1, 2: 1}
    assert found.homes == (0, 1, 1, 1)


def test_calls_in_another_order_make_a_stage_of_each_run_on_one_rank():
    found = assign(graph_of("b", "a", "c"), PLAN)
    assert found.stage_ranks == (1, 0, 1)
    assert found.homes == (0, 1, 2, 2)


@pytest.mark.parametrize(("holders", "rank"), [(None, 0), ((0,), 0), ((1,), 1), ((0, 1), 0)])
def test_a_unit_without_a_stage_runs_where_its_parameters_are(holders, rank):
    graph = graph_of("a", "spare", parameters=("w",))
    found = assign(graph, PLAN, None if holders is None else {"w": holders})
    assert found.stage_ranks[found.stage_of_call[1]] == rank


def crossing(num_bytes, *, has_gradient):
    return Crossing(0, 0, 1, TensorSpec((), "float32", num_bytes), has_gradient)


def program(stage_ranks=(0, 1), state=(), crossings=(), offloads=()):
    crossings = dict(crossings)
    gradients = gradients_of(crossings)
    return SimpleNamespace(
        stage_ranks=stage_ranks,
        state=dict(state),
        crossings=crossings,
        gradients=gradients,
        offloads=frozenset(offloads),
    )


def test_edges_of_a_batch_are_those_of_its_largest_microbatch():
    small = program(crossings={(0, 1): (crossing(4, has_gradient=False),)})
    large = program(crossings={(0, 1): (crossing(8, has_gradient=True), crossing(2, has_gradient=False))})
    (edge,) = merged_edges([small, large, program()])
    assert (edge.source, edge.target, edge.num_bytes, edge.gradient_bytes) == (0, 1, 10, 8)
    (alone,) = merged_edges([small])
    assert not alone.has_gradient


def test_a_batch_has_one_order_and_one_home_for_each_buffer():
    check_one_order([program(), program()])
    with pytest.raises(TraceMismatchError, match="different orders, 0 -> 1 and 1 -> 0"):
        check_one_order([program(), program(stage_ranks=(1, 0))])
    assert homes_of_buffers([program(state={"x": 0}), program(state={"y": 1})]) == {"x": 0, "y": 1}
    with pytest.raises(TraceMismatchError, match="change the buffer x on different ranks, 0 and 1"):
        homes_of_buffers([program(state={"x": 0}), program(state={"x": 1})])


def test_stages_that_offload_have_copies_in_the_schedule():
    schedules = BatchSchedules(SchedulePlan(kind="1f1b", microbatches=2), None)
    plain, offloads = program(), program(offloads=(0,))
    found = schedules.of_batch([plain, offloads], trains=True)  # microbatches may take different paths
    assert [str(a) for a in found.actions[0] if a.kind is Kind.OFFLOAD] == ["0OFFLOAD0", "0OFFLOAD1"]
    assert Kind.OFFLOAD not in {action.kind for action in found.actions[1]}
    assert not schedules.of_batch([plain, plain], trains=True).has_host_copies
    assert not schedules.of_batch([offloads, offloads], trains=False).has_host_copies


WIDTH = 4


def graph_of_norm_called_twice(*, train: bool) -> ModelGraph:
    model = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "norm": nn.BatchNorm1d(WIDTH)}).train(train)
    unit_map = UnitMap.of(model, list(model))
    for module in unit_map.modules.values():
        intercept_calls(module)

    def step(x):
        before = model["norm"](x)
        return model["norm"](model["first"](before))

    return trace_step(unit_map, step, ((torch.ones(2, WIDTH),), {})).graph


@pytest.mark.parametrize(
    ("train", "stages", "is_refused"),
    [(True, (0, 1, 2), True), (True, (0, 0, 0), False), (False, (0, 1, 2), False)],
)
def test_a_unit_that_changes_its_buffers_is_called_on_one_stage(train, stages, is_refused):
    """Other microbatches came in between: an evaluation inside of a step had other running statistics."""
    graph = graph_of_norm_called_twice(train=train)
    placed = dict(zip(graph.calls, stages, strict=True))
    if is_refused:
        with pytest.raises(TraceError, match=r"test_assignment\.py:\d+: norm changes its buffers"):
            home_stages(graph, placed, (0, 1, 0))
    else:
        assert home_stages(graph, placed, (0, 1, 0)) == list(stages)
