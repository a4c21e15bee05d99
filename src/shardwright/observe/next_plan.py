"""The plan that the next run of a script will get, where measured steps suggest another one."""

from dataclasses import dataclass

from shardwright.plan import Plan

__all__ = ["NextPlan"]


@dataclass(frozen=True, slots=True)
class NextPlan:
    """Another plan than that of a run.

    Attributes:
        plan: it.
        text: how it differs, as a part of a line.
    """

    plan: Plan
    text: str
