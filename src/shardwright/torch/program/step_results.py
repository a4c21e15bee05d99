"""The results that a program's step gives to the code around it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tracing.recorded_step import StepResult, UnitCall

__all__ = ["copied_out", "given_back", "leave_stand_ins", "stand_in", "with_stand_ins"]


def stand_in(result: StepResult, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a step that another rank executes."""
    assert result.structure is not None
    if not result.passed:
        return result.structure.rebuild(result.leaves)
    items, filled = flatten((args, kwargs))[0], list(result.leaves)
    for position, source in result.passed:
        filled[position] = items[source]
    return result.structure.rebuild(filled)


def leave_stand_ins(unit: UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Puts into attributes what a unit leaves there that another rank executes."""
    for owner, key, deferred in unit.attributes:
        vars(owner)[key] = deferred
    if unit.passed_attributes:
        items = flatten((args, kwargs))[0]
        for owner, key, place in unit.passed_attributes:
            vars(owner)[key] = items[place]


def given_back(
    result: StepResult, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_free: Callable[[Any], bool]
) -> dict[int, Any]:
    """The arguments that a step gives back as they are, but for tensors of this rank."""
    if not result.passed:
        return {}
    items = flatten((args, kwargs))[0]
    passed = ((position, items[source]) for position, source in result.passed)
    return {position: item for position, item in passed if isinstance(item, DeferredTensor) or is_free(item)}


def with_stand_ins(result: Any, given: Mapping[int, Any]) -> Any:
    """Gives back the stand-ins that a step was given for tensors of other stages, and has given back.

    What came in for them is a leaf of this stage: a later stage of the rank has one of its own, and a step of
    another rank must find what the trace has::

        rank 0   x, bias = block0(x)             x, bias = block2(x, bias)     expects what block0 made
        rank 1              x, bias = block1(x, bias)
                                       └── as its caller gave it: the stand-in

    (`test_plans_at_random`.)
    """
    stand_ins = [(place, item) for place, item in given.items() if isinstance(item, DeferredTensor)]
    if not stand_ins:
        return result
    items, structure = flatten(result)
    for place, item in stand_ins:
        items[place] = item
    return structure.rebuild(items)


def copied_out(result: Any, positions: Iterable[int]) -> Any:
    """Copies a unit's results out of its own memory, where other microbatches would overwrite them."""
    items, structure = flatten(result)
    for position in positions:
        items[position] = items[position].clone()
    return structure.rebuild(items)
