"""Actions, schedules, placements: the plain objects; the examples in the docstrings.

What the package offers, and what it must not need.
"""

import doctest
import importlib
import pkgutil

import pytest

import shardwright.schedule
from shardwright.errors import ScheduleError
from shardwright.schedule import (
    KINDS,
    Edge,
    Kind,
    Schedule,
    StageCost,
    build_schedule,
    lower,
    place_stages,
)

from .cases import schedule_of


@pytest.mark.parametrize(
    ("stage_ranks", "num_microbatches", "rows", "words"),
    [
        ((), 1, (), "0 stages"),
        ((0,), 0, ((),), "0 microbatches"),
        ((0, 1), 1, ((),), "1 rows"),
        ((-1,), 1, ((),), "one row for each rank"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(stage_ranks, num_microbatches, rows, words):
    with pytest.raises(ScheduleError, match=words):
        Schedule("test", stage_ranks, num_microbatches, rows)


def test_draw_shows_idle_time_long_actions_and_stages_where_they_matter():
    chain = build_schedule("zb_h1", stage_ranks=(0, 1), num_microbatches=2)
    assert chain.draw().splitlines() == [
        "rank 0 | F0 F1 .  B0=== B1===",
        "rank 1 | .  F0 I0 F1 I1 W0 W1",
    ]
    several = build_schedule("1f1b", stage_ranks=(0, 1, 0), num_microbatches=1)
    assert several.draw().splitlines() == [
        "rank 0 | 0F0 .   2F0 2B0==== .   .   0B0====",
        "rank 1 | .   1F0 .   .   .   1B0====",
    ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: place_stages("simple", num_ranks=2), "Choose one of gpipe, 1f1b"),
        (lambda: place_stages("gpipe", num_ranks=0), "0 ranks"),
        (lambda: place_stages("zb_v", num_ranks=2, stages_per_rank=3), "exactly 2 stages"),
        (lambda: place_stages("1f1b", num_ranks=2, stages_per_rank=0), "Give 1 or more"),
        (lambda: StageCost(-1.0, 1.0), "forward_s of a stage is -1.0"),
        (lambda: StageCost(1.0, float("nan")), "backward_s of a stage is nan"),
        (lambda: StageCost(1.0, 1.0, 2.0), r"weight_s \(2.0\) of a stage is larger than backward_s \(1.0\)"),
        (lambda: StageCost(1.0, 1.0).seconds(Kind.SEND_F), "priced by their link"),
        (
            lambda: lower(schedule_of("0F0", "1F0"), [Edge(1, 0)]),
            "edge 1 -> 0 is not possible among 2 stages",
        ),
        (lambda: lower(schedule_of("0F0", "1F0"), [Edge(0, 2)]), "edge 0 -> 2 is not possible"),
        (lambda: lower(schedule_of("0F0", "1F0"), [Edge(0, 1), Edge(0, 1)]), "2 edges join only 1 pairs"),
    ],
)
def test_what_cannot_be_is_refused_with_its_remedy(call, words):
    with pytest.raises(ScheduleError, match=words):
        call()


def test_kinds_are_those_of_the_plan_file():
    from shardwright.plan import SchedulePlan

    assert set(SchedulePlan.model_fields["kind"].annotation.__args__) == set(KINDS)


MODULES = [module.name for module in pkgutil.iter_modules(shardwright.schedule.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"shardwright.schedule.{name}")
    assert doctest.testmod(module).failed == 0
