"""What a rank's part of a unit takes is measured beside the whole unit.

What the library takes beside computing, by steps of toys.

What a trace has counted once is read by later runs.
"""

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.cluster import Cluster, Device, HostCosts, Link
from shardwright.placement import BetweenUnits, Cut
from shardwright.plan import TensorPrices
from shardwright.torch.batch.batch import Batch
from shardwright.torch.measuring import measure
from shardwright.torch.measuring.host_costs import Toy, fitted, with_host_costs
from shardwright.torch.measuring.last_plan import memory_cache
from shardwright.torch.measuring.measure import TimesParts
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tensor_parallel.group import Prices
from shardwright.torch.tensor_parallel.search.dry_run import Phase
from shardwright.torch.tensor_parallel.search.unit import Unit
from shardwright.torch.tensor_parallel.search.ways import WorkShares
from shardwright.torch.tracing import recording
from shardwright.torch.tracing.trace_data import Sample
from shardwright.torch.units.divided_costs import UnitPart, divided_units
from shardwright.torch.units.dry_run import step_of
from shardwright.torch.units.model_traces import trace_parts

WHOLE_BETWEEN = BetweenUnits.of_batch({}, None, num_ranks=2)
CUTS = {"0.weight": Cut.even(0, 16, num_ranks=2), "2.weight": Cut.even(1, 16, num_ranks=2)}


def timed(
    each: Unit, *, operation_s: float = 1.0, operations: tuple[int, int] = (0, 0), autocast: Any = ()
) -> WorkShares | None:
    """What a part of a unit takes, with operations on divided tensors in forward and backward."""
    timer = timer_of(each, operation_s=operation_s, autocast=autocast)
    return timer(part_of(each), *(Phase(num_divided=number) for number in operations))


def timer_of(each: Unit, *, operation_s: float = 1.0, autocast: Any = (), **more: Any) -> TimesParts:
    samples = {"a class": Sample(each.module, [], flatten(())[1], autocast)}
    device = torch.device("cpu")
    return TimesParts(device=device, share_cores=False, operation_s=operation_s, samples=samples, **more)


def unit(module: nn.Module | None = None) -> Unit:
    module = module or nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False))
    call = (torch.empty(4, 8, device="meta", requires_grad=True),)
    return Unit(module, call, cost_classes=("a class",))


def part_of(each: Unit) -> UnitPart:
    return UnitPart(each, CUTS, frozenset(), rank=1, num_ranks=2, prices=Prices(), between=WHOLE_BETWEEN)


def test_a_part_with_real_numbers_takes_some_time():
    shares = timed(unit(), operation_s=0.0)
    assert shares is not None
    assert 0 < shares.forward < math.inf
    assert 0 < shares.backward < math.inf


def test_random_generators_and_parameters_stay_as_they_were():
    each = unit()
    weights = [parameter.clone() for parameter in each.module.parameters()]
    before = torch.get_rng_state()
    timed(each)
    assert torch.equal(torch.get_rng_state(), before)
    for parameter, weight in zip(each.module.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight)
        assert parameter.grad is None


class Draws(nn.Sequential):
    """Draws from generators that the script has made, and from Python's."""

    generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + torch.rand((), generator=self.generator)
        return super().forward(x) * scale


def test_generators_of_the_script_stay_as_they_were():
    """Bug: on the first rank they went on, and the ranks drew other numbers from there on."""
    each = unit(Draws(*unit().module))
    before, python_before = Draws.generator.get_state(), random.getstate()
    timer = timer_of(each, generators=[Draws.generator])
    assert timer(part_of(each), Phase(), Phase()) is not None
    assert torch.equal(Draws.generator.get_state(), before)
    assert random.getstate() == python_before


def test_what_earlier_runs_have_timed_is_not_timed_again(monkeypatch):
    each = unit()
    first = timer_of(each, operation_s=0.0)
    shares = first(part_of(each), Phase(), Phase())
    monkeypatch.setattr(TimesParts, "_seconds", None)
    later = timer_of(each, remembered=first.found)
    assert later(part_of(each), Phase(), Phase()) == shares
    assert later.found == {}
    other = replace(part_of(each), cuts={"0.weight": CUTS["0.weight"]})
    assert later(other, Phase(), Phase()) is None  # another part
    with_loss = replace(each, cost_classes=("a class", "cross_entropy-1"))
    assert later(part_of(with_loss), Phase(), Phase()) is None


@pytest.mark.parametrize(("most_s", "runs"), [(math.inf, 5), (-1.0, 2)])
def test_large_units_run_less_often(monkeypatch, most_s, runs):
    """Other ranks wait for the first, and take it for lost in the end."""
    steps = []

    def seconds(step, clock):
        steps.append(step)
        return 1.0, 2.0

    monkeypatch.setattr(measure, "_seconds_of_step", seconds)
    monkeypatch.setattr(measure, "_MOST_S", most_s)
    assert timed(unit()) == WorkShares(1.0, 1.0)
    assert len(steps) == 2 * runs


def test_autocast_is_that_of_the_call():
    """Bug: no unit was timed that gets numbers in 16 bits from one before it."""
    each = unit()
    each.args = (torch.empty(4, 8, dtype=torch.bfloat16, device="meta", requires_grad=True),)
    assert timed(each) is None
    assert timed(each, autocast=(("cpu", True, torch.bfloat16),)) is not None


class Raises(nn.Sequential):
    """Takes no random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("odd numbers")


def test_what_does_not_run_on_random_numbers_is_told_by_its_work():
    assert timed(unit(Raises(*unit().module))) is None


@pytest.mark.parametrize("timed", [None, WorkShares(0.75, 0.5)])
def test_seconds_follow_from_what_was_timed_and_work_from_the_operations(timed):
    each = unit()
    by_id = {id(each.module.get_parameter(name)): cut for name, cut in CUTS.items()}
    found = divided_units(
        {"a": each},
        {"a": "a"},
        {"a": WorkShares(0.5, 0.5)},
        by_id,
        frozenset(),
        Prices(),
        WHOLE_BETWEEN,
        lambda part, forward, backward: timed,
    )["a"]
    prices = TensorPrices(latency_s=0.0, bandwidth_Bps=1e30, flops_per_s=1.0, memory_Bps=1.0)
    taken_s = found.forward.seconds(8.0, prices, 1.0, operation_s=0.0)
    assert taken_s == pytest.approx(4.0 if timed is None else 6.0)
    assert found.forward.share == 0.5


COSTS = HostCosts(step_s=2e-3, action_s=3e-4, unit_s=2e-5, operation_s=1e-5)


def step_s(toy: Toy, costs: HostCosts = COSTS) -> float:
    script_s = costs.script_s(units=toy.units, operations=toy.operations)
    return costs.step_s + toy.microbatches * (2 * costs.action_s + script_s)


def test_costs_are_told_apart():
    toys = [Toy(2, 0, 2), Toy(2, 0, 6), Toy(18, 0, 4), Toy(2, 32, 4)]
    found = fitted({toy: step_s(toy) for toy in toys})
    assert found.step_s == pytest.approx(COSTS.step_s)
    assert found.action_s == pytest.approx(COSTS.action_s)
    assert found.unit_s == pytest.approx(COSTS.unit_s)
    assert found.operation_s == pytest.approx(COSTS.operation_s)


@pytest.mark.parametrize(
    ("profile", "device", "share"), [("estimated", "cpu", 1), ("measured", "cuda", 1), ("measured", "cpu", 2)]
)
def test_costs_stay_what_is_usual_where_they_are_not_measured(profile, device, share):
    """Tests of placements rest on fixed prices."""
    link = Link(latency_s=1e-5, bandwidth_Bps=1e9)
    cluster = Cluster(device=Device(name="x"), ranks_per_node=2, intra_node=link, inter_node=link)
    run = SimpleNamespace(
        config=SimpleNamespace(profile=profile),
        device=SimpleNamespace(type=device),
        mesh=SimpleNamespace(share=share),
    )
    assert with_host_costs(run, cluster) is cluster


CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    return memory_cache(SimpleNamespace(device=CPU))


def nodes_of(memory):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    parts = {1: Batch(((torch.ones(2, 8),), {}))}
    trace = trace_parts(model, step_of(model, None), parts, device=CPU, num_stages=4, memory=memory)[1]
    return [
        (n.name, n.cost_class, n.work_bytes, n.weight_bytes, n.split_work_bytes) for n in trace.graph.nodes
    ]


def test_the_second_run_counts_nothing_and_knows_the_same(cache, monkeypatch):
    """Half of a trace was spent on counting, in each run anew."""
    memory = cache.read()
    first = nodes_of(memory)
    cache.write(memory)
    monkeypatch.setattr(recording, "working_memory", lambda *args, **kwargs: pytest.fail("it was counted"))
    assert nodes_of(cache.read()) == first
    assert any(work_bytes for _, _, work_bytes, _, _ in first)


class Counted(nn.Module):
    """Counts how often it runs."""

    runs = 0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        Counted.runs += 1
        return self.inner(x)


def test_units_run_no_more_often_than_counting_takes():
    """Once to choose units, once for each size; a class that is not known twice more, also in two parts."""
    model = nn.Sequential(*(Counted() for _ in range(3)))
    sizes = {m: Batch(((torch.ones(4 // m, 8),), {})) for m in (1, 2)}
    memory, runs = {}, []
    for _ in range(2):
        Counted.runs = 0
        trace_parts(model, step_of(model, None), sizes, device=CPU, num_stages=3, memory=memory)
        runs.append(Counted.runs)
    classes = 2 * len(sizes)  # what takes the batch keeps less than what takes the results of others
    assert runs == [3 * (1 + len(sizes)) + 2 * classes, 3 * (1 + len(sizes))]
