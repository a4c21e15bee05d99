"""The units that ranks may divide, with what identifies their cost."""

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.tracing.divided_tail import divided_tails
from shardwright.torch.tracing.trace import trace_step
from shardwright.torch.units.divided_costs import divisible_units


def traced(step):
    """The trace of a step function, and its units."""
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 6)})
    unit_map = UnitMap.of(model, list(model))
    for module in unit_map.modules.values():
        intercept_calls(module)
    x, target = torch.ones(2, 3, 4), torch.zeros(6, dtype=torch.int64)
    trace = trace_step(unit_map, lambda x, target: step(model, x, target), ((x, target), {}))
    return trace, dict(divisible_units(model, trace, divided_tails(trace)))


def test_a_module_called_with_two_shapes_is_timed_by_its_own_call():
    """Bug: it was timed with the arguments of the first call, and remembered as the class of the last."""

    def step(model, x, target):
        (model["body"](x).mean() + model["body"](x[:, :1]).mean()).backward()

    trace, units = traced(step)
    classes = [node.cost_class for node in trace.graph.nodes if node.kind == "unit"]
    assert len(set(classes)) == 2
    assert units["body"].args[0].shape == (2, 3, 4)
    assert units["body"].cost_classes == (classes[0],)
    assert trace.samples[classes[0]].leaves[0].shape == (2, 3, 4)


def test_a_head_has_other_cost_classes_with_another_loss():
    """Bug: what a head had taken with one loss was remembered for all others."""

    def step(model, x, target, **options):
        logits = model["head"](model["body"](x)).view(-1, 6)
        F.cross_entropy(logits, target, **options).backward()

    _, plain = traced(step)
    _, smooth = traced(lambda *args: step(*args, label_smoothing=0.1))
    assert plain["body"].cost_classes == smooth["body"].cost_classes
    assert plain["head"].cost_classes[0] == smooth["head"].cost_classes[0]
    assert len(plain["head"].cost_classes) == 3  # view, cross_entropy
    assert plain["head"].cost_classes != smooth["head"].cost_classes
