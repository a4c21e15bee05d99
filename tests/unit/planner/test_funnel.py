"""The order in which candidates are planned, and when no more are."""

from math import inf

import pytest
from planned import planned

from shardwright.errors import InfeasiblePlanError, PlanError
from shardwright.planner.degrees import plan_survivors


def sieve(expected, actual, **options):
    """Numbers of the candidates that were planned, in that order, and what came of it."""
    asked = []

    def make(number):
        asked.append(number)
        if isinstance(actual[number], PlanError):
            raise actual[number]
        return (planned(),)

    survivors = plan_survivors(
        range(len(expected)), expected, make, seconds=lambda number, plan: actual[number], **options
    )
    return asked, survivors


def test_candidates_are_planned_in_the_order_of_their_closed_forms_until_none_can_be_better() -> None:
    asked, survivors = sieve([2.0, 1.0, 1.4, 1.6], [2.0, 1.0, 1.4, 1.6])
    assert asked == [1, 2]
    assert survivors.num_left_out == 2
    assert [each.seconds for each in survivors.planned] == [1.0, 1.4]


def test_what_closed_forms_say_too_little_of_lets_more_through() -> None:
    asked, _ = sieve([1.0, 1.6, 2.9, 3.1], [2.0, 2.1, 2.0, 2.0])
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("fits", [True, False])
def test_what_will_not_fit_is_planned_where_nothing_else_can_be(fits: bool) -> None:
    first = 1.0 if fits else InfeasiblePlanError("too large")
    asked, survivors = sieve([1.0, inf], [first, 1.0])
    assert asked == ([0] if fits else [0, 1])
    assert survivors.num_left_out == int(fits)
