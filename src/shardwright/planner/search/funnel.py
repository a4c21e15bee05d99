"""The second sieve of a search: plans in the order of their closed forms, until no other can be better.

::

    closed form   0.21   0.22   0.26  │  0.43   0.52      seconds
    plan          0.23   0.21   0.27  │  not made         chain DP and simulated schedule

Making a plan takes up to a minute, its closed form microseconds. They agree within 30 % in nearly all cases.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardwright.errors import PlanError
from shardwright.plan import Plan

__all__ = ["Planned", "Survivors", "plan_survivors"]

_TRUST = 1.5
"""A plan takes no less than its closed form, divided by this."""

Candidate = TypeVar("Candidate")


@dataclass(frozen=True, slots=True)
class Planned(Generic[Candidate]):
    """A plan of a candidate.

    Attributes:
        plan: what chain DP and simulation made of it.
        seconds: what counts of the plan.
        expected_s: the same of the candidate, by closed forms.
    """

    candidate: Candidate
    plan: Plan
    seconds: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class Survivors(Generic[Candidate]):
    """The candidates that closed forms left.

    Attributes:
        planned: their plans, in the order of their closed forms.
        failures: why others have none, in the order of the candidates.
        num_left_out: candidates of which no plan was made, because others are better.
    """

    planned: list[Planned[Candidate]]
    failures: list[PlanError]
    num_left_out: int


def plan_survivors(
    candidates: Sequence[Candidate],
    expected: Sequence[float],
    make: Callable[[Candidate], Iterable[Plan]],
    *,
    seconds: Callable[[Candidate, Plan], float],
    most: int = 1,
) -> Survivors[Candidate]:
    """Plans the candidates that may be among the best; all of them where none can be planned."""
    planned: list[Planned[Candidate]] = []
    failures: dict[int, PlanError] = {}
    order = sorted(range(len(candidates)), key=lambda number: (expected[number], number))
    for place, number in enumerate(order):
        candidate = candidates[number]
        if len(planned) >= most:
            last = sorted(planned, key=lambda each: each.seconds)[most - 1]
            # Where closed forms say too much of all, or too little, that of the best says it, too.
            if expected[number] > _TRUST * max(last.seconds, last.expected_s):
                return Survivors(planned, _in_order(failures), len(order) - place)
        try:
            for plan in make(candidate):
                planned.append(Planned(candidate, plan, seconds(candidate, plan), expected[number]))
        except PlanError as error:
            failures[number] = error
    return Survivors(planned, _in_order(failures), 0)


def _in_order(failures: dict[int, PlanError]) -> list[PlanError]:
    return [failures[number] for number in sorted(failures)]
