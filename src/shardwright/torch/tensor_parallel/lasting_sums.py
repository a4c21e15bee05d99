"""Operations that are decided by their kinds alone, where tokens find their experts.

What an expert gets, and gives, has another length in each step, so that hardly any decision would be met
again; and a decision among prices takes a millisecond. Two kinds need none:

- A sum over the ranks stays one under an operation that is linear in it. Summands are as large as the sum,
  so nothing has to be known of the result beforehand.
- A tensor that is cut along the dimension in which rows are looked up is gathered.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import PARTIAL_SUM, Cut
from shardwright.torch.tensor_parallel.at_hand import at_hand
from shardwright.torch.tensor_parallel.call import name_of
from shardwright.torch.tensor_parallel.copied_view import count_write
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, wrap
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.shared_memory import note_view
from shardwright.torch.tensor_parallel.spec import spec_of

__all__ = ["ByKind", "decided_by_kind"]

# Positional arguments that a result is linear in: it is the sum of all terms, each of them a product.
_LINEAR: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "add": ((0,), (1,)),
    "sub": ((0,), (1,)),
    "mul": ((0, 1),),
    "div": ((0,),),
    "neg": ((0,),),
    "clone": ((0,),),
    "sum": ((0,),),
    "index": ((0,),),
    "index_select": ((0,),),
    "index_add": ((0,), (3,)),
    "index_put": ((0,), (2,)),
    "_index_put_impl": ((0,), (2,)),
    **dict.fromkeys(
        (
            "view _unsafe_view _reshape_alias expand unsqueeze squeeze transpose t permute detach alias"
        ).split(),
        ((0,),),
    ),
}
_NEW = frozenset(["new_zeros", "new_ones", "new_empty", "new_full"])


def decided_by_kind(
    group: TensorGroup, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> "ByKind | None":
    """The decision for an operation of these kinds; None for others."""
    name = name_of(func)
    name = name[:-1] if name.endswith("_") else name
    divided = [place for place, each in enumerate(args) if each.__class__ is DividedTensor]
    if func.namespace != "aten" or not divided or len(list(_divided_in([args, kwargs]))) != len(divided):
        return None  # some are in lists
    specs = [args[place]._spec for place in divided]
    if any(spec.group is not group for spec in specs):
        return None  # those of an inner group alone: what they hold is no summand of the group's
    if any(spec.copied for spec in specs) or kwargs.get("rounding_mode") is not None:
        return None
    if divided == [0] and _is_looked_up(name, args):
        return _LooksUp(group, func)
    if not all(spec.is_pending for spec in specs):
        return None
    if name in _NEW:
        return _MakesNew(group, func)
    terms = _LINEAR.get(name, ())
    if not set(divided) <= {place for term in terms for place in term}:
        return None
    if any(sum(place in divided for place in term) > 1 for term in terms):
        return None  # a product of sums
    if (func._schema.is_mutable and 0 not in divided) or not _lie_alike(args[divided[0]]):
        return None
    return _StaysSum(group, func, terms)


def _divided_in(value: Any) -> Iterator[DividedTensor]:
    if value.__class__ is DividedTensor:
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _divided_in(each)
    elif isinstance(value, Mapping):
        yield from _divided_in(list(value.values()))


def _is_looked_up(name: str, args: tuple[Any, ...]) -> bool:
    """Whether rows are looked up along the dimension that is cut."""
    cut = args[0]._spec.placement
    if not isinstance(cut, Cut) or name not in ("index", "index_select"):
        return False
    if name == "index_select":
        return bool(args[1] % len(args[0].shape) == cut.dim)
    # A mask of two dimensions moves those behind it.
    is_mask = any(each is not None and each.dtype.itemsize == 1 for each in args[1])
    return is_mask or (cut.dim < len(args[1]) and args[1][cut.dim] is not None)


def _lie_alike(tensor: DividedTensor) -> bool:
    """Whether a summand lies in memory as the sum seems to."""
    local = tensor._local
    return local.stride() == tensor.stride() and local.storage_offset() == tensor.storage_offset()


class ByKind:
    """How an operation runs, without prices. It is not kept: see above."""

    fast = None
    lasts = False

    def __init__(self, group: TensorGroup, func: Any):
        self._group = group
        self._func = func

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the operation; all ranks of the group do so."""
        raise NotImplementedError


class _LooksUp(ByKind):
    """Gathers the tensor, unless it is at hand, and looks up on all ranks."""

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._func(at_hand(args[0]), *args[1:], **kwargs)


class _MakesNew(ByKind):
    """Of the tensor, only its type and its device count."""

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._func(args[0]._local, *args[1:], **kwargs)


class _StaysSum(ByKind):
    """Gives a sum over the ranks. What is no sum counts on the first rank."""

    def __init__(self, group: TensorGroup, func: Any, terms: tuple[tuple[int, ...], ...]):
        super().__init__(group, func)
        self._terms = terms

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        group, func = self._group, self._func
        own = [each._local if each.__class__ is DividedTensor else each for each in args]
        for first, *others in self._terms:
            is_sum = any(args[place].__class__ is DividedTensor for place in (first, *others))
            if not is_sum and group.rank:
                own[first] = torch.zeros_like(own[first]) if isinstance(own[first], Tensor) else 0
        result = func(*own, **kwargs)
        if func._schema.is_mutable:
            count_write(group, own[0])
            return args[0]
        is_view = func._schema.returns[0].alias_info is not None
        spec = spec_of(
            group,
            PARTIAL_SUM,
            result,
            shape=result.shape,
            strides=result.stride(),
            offset=result.storage_offset() if is_view else 0,
        )
        tensor = wrap(result, spec)
        if is_view:
            note_view(tensor, args[0], func)
        return tensor
