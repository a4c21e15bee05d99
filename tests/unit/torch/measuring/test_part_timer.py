"""What a rank's part of a unit takes is measured beside the whole unit."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.placement import BetweenUnits, Cut
from shardwright.plan import TensorPrices
from shardwright.torch.measuring import measure
from shardwright.torch.measuring.measure import TimesParts
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tensor_parallel.group import Prices
from shardwright.torch.tensor_parallel.search import Phase, Unit, WorkShares
from shardwright.torch.tracing.trace_data import Sample
from shardwright.torch.units.divided_costs import UnitPart, divided_units

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
