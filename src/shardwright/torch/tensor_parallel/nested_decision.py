"""Operations decided by their kinds alone, and on tensors whose parts other ranks share in turn.

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

from shardwright.placement import PARTIAL_SUM, WHOLE, Cut, Placement
from shardwright.torch.tensor_parallel.call import Call, Candidate, name_of, tensors_of
from shardwright.torch.tensor_parallel.decision import Decision, FastDecision
from shardwright.torch.tensor_parallel.divided_tensor import (
    DividedTensor,
    part_in,
    placement_in,
    placement_of,
    whole,
    wrap,
)
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.placing import at_hand, count_write, moved_to, note_view
from shardwright.torch.tensor_parallel.redistribution import agreed_placement, own_placement
from shardwright.torch.tensor_parallel.spec import spec_of

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
) -> "_ByKind | None":
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


class _ByKind:
    """How an operation runs, without prices. It is not kept: see above."""

    fast = None
    lasts = False

    def __init__(self, group: TensorGroup, func: Any):
        self._group = group
        self._func = func

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the operation; all ranks of the group do so."""
        raise NotImplementedError


class _LooksUp(_ByKind):
    """Gathers the tensor, unless it is at hand, and looks up on all ranks."""

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._func(at_hand(args[0]), *args[1:], **kwargs)


class _MakesNew(_ByKind):
    """Of the tensor, only its type and its device count."""

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._func(args[0]._local, *args[1:], **kwargs)


class _StaysSum(_ByKind):
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


class _DisagreeError(Exception):
    """Ranks of the group have views of their parts that their inner groups place in different ways."""


class NestedDecision(Decision):
    """A decision of a group whose ranks share their parts with an inner group.

    The first run compares what the ranks of the group have: they must have all parts placed alike. Parts of
    equal shapes are. Parts that are cut along the dimension of the outer cut may be cut in different ways, as
    those of ``logits[:, :-1]`` are, and are marked (`Spec.apart`). Where others are not placed alike, the
    inner groups gather what the operation gives, now and from now on; and of a view, the group gathers what
    it is a view of.
    """

    def __init__(self, call: Call, candidate: Candidate, args: tuple[Any, ...], *, has_rule: bool):
        super().__init__(call, candidate, args, has_rule=has_rule)
        self._operation = call
        self._instead: Decision | None = None
        # Tensors whose parts the operation may add up over the inner group, in their place.
        self._pending: list[int] = []
        self._gathers = False
        # Of those watched, the parts that ranks have cut in different ways.
        self._apart: dict[int, int] = {}

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the operation; all ranks of both groups do so."""
        if self._instead is not None:
            return self._instead.run(args, kwargs)
        tensors = tensors_of(args, kwargs)
        if self._gathers:
            self._gather_pending(tensors)
        elif self._specs is None:
            pending = (index for index, each in enumerate(tensors) if _is_pending(each, self._group))
            self._pending = [index for index in pending if index not in self._written]
        try:
            return super().run(args, kwargs)
        except _DisagreeError:
            candidate = Candidate((WHOLE,) * len(tensors), (WHOLE,) * len(self._outputs))
            self._instead = Decision(self._operation, candidate, args, has_rule=True)
            return self._instead.run(args, kwargs)

    def _agreed(self, flat: list[Any], tensors: list[Tensor]) -> list[Any]:
        if self._specs is None and not self._agree(flat, tensors):
            if self._is_view and not self._copies_base:
                raise _DisagreeError
            self._gathers = True
            self._gather_pending(tensors)
        if self._gathers:
            return [each.gathered() if self._is_new(index, each) else each for index, each in enumerate(flat)]
        if self._apart:
            watched = self._watched(flat, tensors)
            for place, number in self._apart.items():
                _mark(watched[place][0], number)
        return flat

    def _agree(self, flat: list[Any], tensors: list[Tensor]) -> bool:
        """Whether all ranks have the results, and the tensors afterwards, placed as they must; collective."""
        group = self._group
        if not any(isinstance(part_in(each, group), DividedTensor) for each in tensors):
            return True
        assert group.inner is not None
        ranks = group.inner.num_ranks
        placements = [(placement_of(part), outer) for part, outer in self._watched(flat, tensors)]
        alike = repr([agreed_placement(inner, outer) for inner, outer in placements])
        own = [own_placement(inner, outer, inner_ranks=ranks) for inner, outer in placements]
        differs, *apart = group.compared([alike, *own], tensors[0].device)
        self._apart = {place: number for place, number in enumerate(apart) if number}
        return not differs

    def _watched(self, flat: list[Any], tensors: list[Tensor]) -> list[tuple[Any, Placement]]:
        """Parts of results, and of what was pending, with outer placements: as many on all ranks."""
        results = [
            (each, self.candidate.outputs[index]) if self._is_new(index, each) else (None, WHOLE)
            for index, each in enumerate(flat)
        ]
        pending = (tensors[index] for index in self._pending)
        return [
            *results,
            *((part_in(each, self._group), placement_in(each, self._group)) for each in pending),
        ]

    def _is_new(self, index: int, result: Any) -> bool:
        is_argument = index < len(self._returned) and self._returned[index] is not None
        return isinstance(result, DividedTensor) and not is_argument

    def _gather_pending(self, tensors: list[Tensor]) -> None:
        for index in self._pending:
            part = part_in(tensors[index], self._group)
            # Nothing adds up in its place what others see.
            if isinstance(part, DividedTensor) and not (part._seen or tensors[index]._seen):  # type: ignore[attr-defined]
                spec, data = part._spec, whole(part)
                own = spec_of(
                    spec.group, WHOLE, data, shape=spec.shape, strides=spec.strides, offset=spec.offset
                )
                moved_to(part, data, own)

    def _short_way(self, tensors: list[Tensor]) -> "FastDecision | None":
        return None if self._gathers or self._apart else super()._short_way(tensors)

    @property
    def _fast_kind(self) -> type[FastDecision]:
        return _NestedFastDecision


class _NestedFastDecision(FastDecision):
    """The same where tensors of the inner group may be among the arguments: they stay as they are."""

    __slots__ = ()

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the operation; all ranks of both groups do so."""
        group = self._group
        own = [part_in(item, group) if item.__class__ is DividedTensor else item for item in args]
        for place, value in self._replaced:
            own[place] = value
        result = self._call(*own, **kwargs)
        if self._writes:
            if args[0].__class__ is DividedTensor:
                count_write(group, own[0])
            return args[0]
        if self._spec is None:
            return result
        tensor = wrap(result, self._spec)
        if self._is_view:
            note_view(tensor, args[0], self._func)
        return tensor


def _mark(part: DividedTensor, apart: int) -> None:
    """Says how ranks of an outer group have their parts cut: see `Spec`."""
    spec = part._spec
    if spec.apart != apart:
        part._spec = spec_of(
            spec.group,
            spec.placement,
            part._local,
            shape=spec.shape,
            strides=spec.strides,
            offset=spec.offset,
            copied=spec.copied,
            apart=apart,
        )


def _is_pending(tensor: Tensor, group: TensorGroup) -> bool:
    part = part_in(tensor, group)
    return isinstance(part, DividedTensor) and part._spec.is_pending
