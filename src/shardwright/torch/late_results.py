"""What a step function returns whose own code reads late values, and what it is when the step is over."""

import copy
import functools
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shardwright.torch.late_texts import LateText, filled_in, forget_old_texts, is_marked
from shardwright.torch.late_values import LateValue, Reads, reading
from shardwright.torch.step_output import gather_outputs
from shardwright.torch.tree import flatten, leaves, map_tree

__all__ = ["WithLateValues", "gather_late_outputs"]


class _Returned(NamedTuple):
    """What a call of a step function returns, and what goes to every rank with it.

    Tensors are known by their places, so that those come first which are the same in every call.
    """

    tensors: list[Tensor]
    result: Any
    reads: Reads


class WithLateValues:
    """A step function whose own code may read tensors that are on another rank.

    Args:
        function: the step function.
    """

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with reading() as reads:
            result = self._function(*args, **kwargs)
        tensors, reads.tensors = reads.tensors, []
        return _Returned(tensors, result, reads)


def gather_late_outputs(results: Sequence[_Returned]) -> Any:
    """As `gather_outputs`, with what was read in the place of late values.

    Args:
        results: of a `WithLateValues`, by microbatch.
    """
    for each in results:
        each.reads.arrive(each.tensors)
    # Behind that: a sum over microbatches rests on those that run first, not on those that are first.
    for each in results:
        for value in each.reads.values:
            value.known  # noqa: B018  (makes it)
    gathered = gather_outputs([_with_known_keys(each.result) for each in results])
    outputs = map_tree(_now, gathered)
    forget_old_texts()
    return outputs


def _is_late(item: Any) -> bool:
    return isinstance(item, LateValue | LateText) or is_marked(item)


def _now(item: Any) -> Any:
    if isinstance(item, LateValue | LateText):
        return item.known
    return filled_in(item) if is_marked(item) else item


def _with_known_keys(tree: Any) -> Any:
    """The same, with keys that the microbatches have in common, maybe, now that they are known."""
    items, structure = flatten(tree, is_leaf=_has_late_keys)
    return structure.rebuild([_keys_known(item) if _has_late_keys(item) else item for item in items])


def _has_late_keys(tree: Any) -> bool:
    return isinstance(tree, dict | UserDict) and any(map(_is_late, leaves(list(tree))))


def _keys_known(mapping: Any) -> Any:
    known = copy.copy(mapping)
    known.clear()
    for key, item in mapping.items():
        known[map_tree(_now, key)] = _with_known_keys(item)
    return known
