"""Finds the rule of an operator.

A rule takes a `Call` and returns a `Form`, or `Candidate` objects, or None where it knows no way to divide
this call. Then, and without a rule, every rank gathers the inputs and does it all.
"""

from collections.abc import Callable
from typing import TypeVar

from shardwright.torch.tensor_parallel.call import Call
from shardwright.torch.tensor_parallel.form import Candidate, Form

__all__ = ["RULES", "Rule", "rule"]

Rule = Callable[[Call], Form | list[Candidate] | None]
_R = TypeVar("_R", bound=Rule)

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[_R], _R]:
    """Makes a function the rule of these operators of `aten`, and of their in-place variants."""

    def register(function: _R) -> _R:
        for name in names:
            RULES[name] = function
        return function

    return register
