"""Which stage computes which node of a graph."""

import pytest
import torch
from torch import nn

from shardwright.errors import TraceError
from shardwright.model_graph import ModelGraph
from shardwright.runtime.homes import home_stages
from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.tracing.trace import trace_step

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
        with pytest.raises(TraceError, match=r"test_homes\.py:\d+: norm changes its buffers"):
            home_stages(graph, placed, (0, 1, 0))
    else:
        assert home_stages(graph, placed, (0, 1, 0)) == list(stages)
