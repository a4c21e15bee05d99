"""Which modules are placed whole; the units that ranks may divide, with what identifies their cost.

Hooks that only look on do not see that units are run for a search of placements.

A long trace tells how far it is: 80 layers were traced for minutes without a word.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planner.machines import machines
from torch import Tensor, nn

from shardwright.config import Config
from shardwright.torch.counting.compiled_modules import HookEffects
from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.tensor_parallel.search.dry_run import dry_run
from shardwright.torch.tensor_parallel.search.unit import Unit
from shardwright.torch.tracing.divided_tail import divided_tails
from shardwright.torch.tracing.trace import trace_step
from shardwright.torch.units.divided_costs import divisible_units, observers_aside
from shardwright.torch.units.dry_run import graph_of
from shardwright.torch.units.offline_planner import plan_model
from shardwright.torch.units.unit_choice import ModuleCost, choose_units


def blocks(number: int, *, flops_each: int) -> tuple[nn.Module, dict[str, ModuleCost]]:
    """Blocks of two layers, which do all of the work."""
    model = nn.Sequential(*(Block() for _ in range(number)))
    costs = {"": ModuleCost(calls=1, flops=number * flops_each)}
    for index in range(number):
        costs[f"{index}"] = ModuleCost(calls=1, flops=flops_each)
        for layer in ("up", "down"):
            costs[f"{index}.{layer}"] = ModuleCost(calls=1, flops=flops_each // 2)
    return model, costs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("number", "flops_each", "device", "is_whole"),
    [
        (4, 10**6, "cpu", True),
        (3, 10**6, "cpu", False),  # too few for the stages
        (4, 10**9, "cpu", False),  # their halves can balance something
        (4, 10**9, "cuda", True),
        (4, 10**12, "cuda", False),
        (8, 10**12, "cuda", True),
    ],
)
def test_blocks_with_little_work_stay_whole(
    number: int, flops_each: int, device: str, is_whole: bool
) -> None:
    """Each piece of one costs the host as much as its work takes."""
    model, costs = blocks(number, flops_each=flops_each)
    names = choose_units(model, costs, num_stages=4, device=device)
    layers = [f"{index}.{layer}" for index in range(number) for layer in ("up", "down")]
    assert names == ([str(index) for index in range(number)] if is_whole else layers)


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


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def unit_of(module: nn.Module) -> Unit:
    return Unit(module, (torch.empty(2, 4, device="meta", requires_grad=True),))


def trace_of(hooks: HookEffects) -> Any:
    return SimpleNamespace(samples={"a": SimpleNamespace(hooks=hooks)})


def test_a_hook_that_collects_sees_nothing():
    """Bug: it found tensors without data, on the first rank alone, and counted more calls there."""
    module, seen = block(), []
    module[0].register_forward_hook(lambda module, args, output: seen.append(output))
    unit = unit_of(module)
    with observers_aside(trace_of(HookEffects()), [unit])():
        dry_run(unit, {}, rank=0, num_ranks=2)
    assert seen == []
    dry_run(unit, {}, rank=0, num_ranks=2)
    assert len(seen) == 1  # it is back


class Reads(nn.Module):
    """Its forward needs what a hook has left."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.found: list[Tensor] = []
        self.inner.register_forward_hook(lambda module, args, output: self.found.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return self.found.pop().tanh()


def test_a_hook_that_the_forward_needs_stays():
    unit = unit_of(Reads())
    with observers_aside(trace_of(HookEffects()), [unit])():
        dry_run(unit, {}, rank=0, num_ranks=2)


@pytest.mark.parametrize("inside", [True, False])
def test_whether_hooks_look_on(inside):
    module = block()
    if inside:
        module[2].register_forward_hook(lambda module, args, output: None)
    assert HookEffects().looks_on([module]) is inside


def test_every_call_is_told_and_the_last_one_is_the_end():
    told = []
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    graph = graph_of(
        model,
        ((torch.empty(2, 8),), {}),
        loss=None,
        num_stages=6,
        device=torch.device("cpu"),
        progress=lambda done, total: told.append((done, total)),
    )
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[0] == (1, 7)  # modules
    assert told[-1] == (7 + len(graph.calls), 7 + len(graph.calls))


def test_a_plan_tells_how_far_its_traces_are():
    """`plan` said nothing while it traced 80 layers at four sizes of microbatches."""
    told = []
    plan_model(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))),
        torch.ones(8, 8),
        config=Config(),
        world_size=2,
        cluster=machines(),
        progress=lambda done, total: told.append((done, total)),
    )
    assert told[0] == (1, 7)
    assert told[-1][0] == told[-1][1] > 7 + 6  # each size of microbatches
