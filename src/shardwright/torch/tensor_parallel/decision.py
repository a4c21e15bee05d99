"""How an operation runs on the parts of its tensors, once that is decided.

`torch.ops.aten.mm.default(x, y)` takes its arguments apart by the operator's schema each time; `x.mm(y)` has
a parser that was compiled for it, and runs the same kernel.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.placement import WHOLE, Cut, PartialSum, Placement, Whole
from shardwright.torch._private.tensors import memory_of, packed_call
from shardwright.torch.tensor_parallel.call import Call, Candidate, map_tensors, tensors_of
from shardwright.torch.tensor_parallel.divided_tensor import (
    DividedTensor,
    is_nested,
    part_in,
    placement_in,
    wrap,
)
from shardwright.torch.tensor_parallel.placing import (
    CopiedView,
    count_write,
    moved_to,
    note_view,
    overwrite,
    settled,
)
from shardwright.torch.tensor_parallel.redistribution import replaced
from shardwright.torch.tensor_parallel.spec import Spec, in_order, local_shape, put_in_order, spec_of

_SAME_ARGUMENTS = """
add.Tensor add_.Tensor addcdiv_.default addcmul_.default addmm.default bmm.default clone.default cos.default
detach.default div.Tensor div_.Tensor exp.default expand.default lerp_.Scalar masked_fill.Scalar mean.dim
mm.default mul.Tensor mul_.Tensor neg.default permute.default pow.Tensor_Scalar relu.default rsqrt.default
select.int sigmoid.default sin.default sqrt.default squeeze.dim sub.Tensor sub_.Tensor sum.dim_IntList
t.default tanh.default transpose.int unsqueeze.default view.default
""".split()


def _methods() -> dict[Any, Callable[..., Any]]:
    found = {}
    for each in _SAME_ARGUMENTS:
        name, overload = each.split(".")
        found[getattr(getattr(torch.ops.aten, name), overload)] = getattr(torch.Tensor, name)
    # Below autograd, where nobody asks whether a result is a view, these are the same.
    found[torch.ops.aten._unsafe_view.default] = torch.Tensor.view
    return found


METHODS = _methods()
"""Methods of tensors that take the arguments of an operator as they are, and call only that operator.

test_rules.py proves it of each.
"""


def direct_call(func: Any) -> Callable[..., Any]:
    """What runs an operator with the least work around it."""
    return METHODS.get(func) or packed_call(func)


class Decision:
    """How an operation runs for certain shapes, placements and scalars.

    Attributes:
        fast: does the same with less work, once the decision has run; None where more is needed.
    """

    def __init__(self, call: Call, candidate: Candidate, args: tuple[Any, ...], *, has_rule: bool):
        """Args: has_rule: the operation's rule knows a way for these arguments."""
        self.func, self.name, self.candidate = call.func, call.name, candidate
        self.fast: FastDecision | None = None
        self._call = direct_call(self.func)
        self._group = call.group
        self._placements = tuple(one.placement for one in call.inputs)
        self._outputs = call.outputs
        self._written = call.written
        self._is_view = call.is_view
        self._returned = returned_arguments(self.func)
        self._names = [argument.name for argument in self.func._schema.arguments]
        changed = {} if candidate.arguments is None else dict(candidate.arguments(self._group.rank))
        self._replaced = [(self._names.index(name), value) for name, value in changed.items()]
        self._num_positional = len(args)
        self._num_tensors = sum(isinstance(each, Tensor) for each in args)
        is_divided = any(isinstance(each, Cut) for each in self._placements)
        self._is_gathered = is_divided and not has_rule and set(candidate.inputs) == {WHOLE}
        # A view for the script, for which the base is gathered or exchanged, or copied.
        is_copied = candidate.copies or (bool(call.inputs) and self._is_moved(0))
        self._copies_base = self._is_view and is_copied
        # After the first run: descriptions of the results, and which of them must be put in order.
        self._specs: list[Spec | None] | None = None
        self._unordered: list[bool] = []

    def _is_moved(self, index: int) -> bool:
        return self.candidate.inputs[index] != self._placements[index]

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the operation; all ranks of the group do so."""
        tensors = tensors_of(args, kwargs)
        for tensor in tensors:
            if isinstance(tensor, DividedTensor) and tensor._spec.copied:
                tensor._copy.refresh()
        if self._is_gathered:
            self._group.computed_whole[self.name] += 1
        parts = [self._part(*each) for each in zip(tensors, self.candidate.inputs, strict=True)]
        results = self.computed(args, kwargs, parts)
        for index in self._written:
            self._wrote(index, tensors[index], parts[index])
        flat = list(results) if isinstance(results, list | tuple) else [results]
        flat = self._agreed(flat, tensors)
        if self._specs is None:
            self._describe(flat, tensors)
        wrapped = [self._wrapped(each, index, args, kwargs, tensors) for index, each in enumerate(flat)]
        return type(results)(wrapped) if isinstance(results, list | tuple) else wrapped[0]

    # ---- the arguments ----

    def _part(self, tensor: Tensor, target: Placement) -> Tensor:
        """What this rank has of an argument in the placement that the candidate wants."""
        source = placement_in(tensor, self._group)
        if self._shares(tensor):
            needs_sum = isinstance(source, PartialSum) and isinstance(target, Whole)
            if needs_sum and not self._written and not self._is_view:
                return settled(tensor)  # type: ignore[arg-type]
        moved = functools.partial(
            replaced,
            self._group,
            part_in(tensor, self._group),
            shape=tensor.shape,
            strides=tensor.stride(),
            source=source,
            target=target,
        )
        if self._goes_to_its_place(tensor, target):
            # Nothing else sees this memory, so the part may take its place.
            part = moved()
            spec = tensor._spec  # type: ignore[attr-defined]
            own = spec_of(
                self._group, target, part, shape=spec.shape, strides=spec.strides, offset=spec.offset
            )
            moved_to(tensor, part, own)  # type: ignore[arg-type]
            return part
        is_gathered = isinstance(source, Cut) and isinstance(target, Whole)
        is_kept = self._group.gathers is not None and not is_nested(tensor)
        if is_gathered and is_kept and not self._written and not self._is_view:
            return self._group.gathers.whole(tensor._local, tensor._spec, moved)  # type: ignore[attr-defined, union-attr]
        return moved()

    def _shares(self, tensor: Any) -> bool:
        """Whether a tensor is one of the group, not of its inner group."""
        return isinstance(tensor, DividedTensor) and tensor._spec.group is self._group

    def _goes_to_its_place(self, tensor: Tensor, target: Placement) -> bool:
        """Whether a sum is scattered to the ranks for all further uses."""
        if not isinstance(tensor, DividedTensor) or not self._shares(tensor) or self._group.between is None:
            return False
        is_scattered = tensor._spec.is_pending and isinstance(target, Cut)
        return is_scattered and not (tensor._seen or self._written or self._is_view or tensor._spec.copied)

    def computed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: list[Tensor]) -> Any:
        """What the operation gives for a rank's parts of its arguments."""
        upcoming = iter(parts)
        own_args = [map_tensors(lambda _: next(upcoming), value) for value in args]
        own_kwargs = {name: map_tensors(lambda _: next(upcoming), value) for name, value in kwargs.items()}
        for place, value in self._replaced:
            if place < len(own_args):
                own_args[place] = value
            else:
                own_kwargs[self._names[place]] = value
        if self.candidate.compute is None:
            return self._call(*own_args, **own_kwargs)
        return self.candidate.compute(self._group, self.func, own_args, own_kwargs)

    def _wrote(self, index: int, tensor: Tensor, part: Tensor) -> None:
        """Looks after those that share the memory of a tensor that was changed in place."""
        if self._is_moved(index):
            if part.shape != tensor.shape:
                raise UsageError(
                    f"{self.func} would resize its output from {tuple(tensor.shape)} to {tuple(part.shape)}, "
                    f"which {self._group.num_ranks} ranks share. Give it an output of the right shape."
                )
            overwrite(tensor, part, self._group)
        elif self._shares(tensor):
            assert isinstance(tensor, DividedTensor)
            count_write(self._group, part)
            if tensor._spec.copied:
                tensor._copy.write_back()

    # ---- the results ----

    def _agreed(self, flat: list[Any], tensors: list[Tensor]) -> list[Any]:
        """The results as all ranks have them; see `NestedDecision`."""
        return flat

    def _wrapped(
        self,
        result: Any,
        index: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        """A result as the script gets it: an argument, a divided tensor, or what it is."""
        name = self._returned[index] if index < len(self._returned) else None
        if name is not None:
            place = self._names.index(name)
            return args[place] if place < len(args) else kwargs[name]
        spec = self._specs[index] if self._specs and isinstance(result, Tensor) else None
        if spec is None:
            return result
        tensor = wrap(put_in_order(result, spec.strides) if self._unordered[index] else result, spec)
        if self._is_view:
            base: Any = tensors[0]
            note_view(tensor, base, self.func)
            if self._copies_base:
                replay = functools.partial(_view_of, self.func, args[1:], kwargs, index)
                tensor._copy = CopiedView(base, replay, result, spec)
            elif base._spec.copied:
                tensor._copy = base._copy
        return tensor

    def _describe(self, flat: list[Any], tensors: list[Tensor]) -> None:
        """Describes the results, after the first run."""
        base = tensors[0] if tensors and self._is_view else None
        if self._shares(base) and not self._copies_base and not is_nested(base):  # type: ignore[arg-type]
            memory = memory_of(base._local)  # type: ignore[union-attr]
            if any(memory_of(each) != memory for each in flat):
                raise RuntimeError(f"{self.func} copied a part of {base!r}, of which others have a view")
        self._specs = []
        for index, result in enumerate(flat):
            meta = self._outputs[index] if index < len(self._outputs) else None
            spec = None
            is_unordered = False
            if meta is not None and (self._shares(base) or self._is_divided(index)):
                is_unordered = base is None and not in_order(result, meta.shape, meta.stride())
                part = put_in_order(result, meta.stride()) if is_unordered else result
                spec = self._spec(part, index, meta, base)
            self._specs.append(spec)
            self._unordered.append(is_unordered)
        self.fast = self._short_way(tensors)

    def _is_divided(self, index: int) -> bool:
        return not isinstance(self.candidate.outputs[index], Whole)

    def _spec(self, part: Tensor, index: int, meta: Tensor, base: Tensor | None) -> Spec:
        placement = self.candidate.outputs[index]
        expected = local_shape(tuple(meta.shape), placement, self._group.rank)
        if tuple(part.shape) != expected:
            raise RuntimeError(
                f"the rule of {self.func} promised a part of shape {expected} of {tuple(meta.shape)} "
                f"({placement}), but made one of {tuple(part.shape)}"
            )
        return spec_of(
            self._group,
            placement,
            part,
            shape=meta.shape,
            strides=meta.stride(),
            offset=int(meta.storage_offset()),
            copied=self._copies_base or (self._shares(base) and base._spec.copied),  # type: ignore[union-attr]
        )

    def _short_way(self, tensors: list[Tensor]) -> "FastDecision | None":
        in_a_list = any(each.type.kind() == "ListType" for each in self.func._schema.returns)
        one_result = len(self._specs or ()) == 1 and not in_a_list  # a split into one piece
        as_they_are = self.candidate.inputs == self._placements and self.candidate.compute is None
        positional = self._num_tensors == len(tensors) and all(
            place < self._num_positional for place, _ in self._replaced
        )
        writes_itself = not self._written or (self._written == {0} and self._names[:1] == self._returned[:1])
        is_copied = any(isinstance(each, DividedTensor) and each._spec.copied for each in tensors)
        if not (one_result and as_they_are and positional and writes_itself) or is_copied:
            return None
        if any(self._unordered) or self._is_gathered:
            return None
        return self._fast_kind(self, self._specs[0], self._replaced)  # type: ignore[index]

    @property
    def _fast_kind(self) -> "type[FastDecision]":
        return FastDecision


class Composed:
    """Runs an operation as those that it is made of, each by its own rule."""

    fast = None

    def __init__(self, func: Any):
        self._func = func

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._func.decompose(*args, **kwargs)


class FastDecision:
    """A decision for an operation that runs on the parts as they are, with one result."""

    __slots__ = ("_call", "_func", "_group", "_is_view", "_replaced", "_spec", "_writes")

    def __init__(self, slow: Decision, spec: Spec | None, replaced_arguments: list[tuple[int, Any]]):
        self._func, self._call = slow.func, slow._call
        self._group = slow._group
        self._replaced = replaced_arguments
        self._spec = spec
        self._is_view = slow._is_view
        self._writes = bool(slow._written)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the operation; all ranks of the group do so."""
        own = [item._local if item.__class__ is DividedTensor else item for item in args]
        for place, value in self._replaced:
            own[place] = value
        result = self._call(*own, **kwargs)
        if self._writes:
            if self._group.writes or self._group.sums or self._group.gathers:
                count_write(self._group, own[0])
            return args[0]
        if self._spec is None:
            return result
        tensor = wrap(result, self._spec)
        if self._is_view:
            note_view(tensor, args[0], self._func)
        return tensor


@functools.cache
def returned_arguments(func: Any) -> list[str | None]:
    """For each result of an operator the argument that it is, if the operator changes that in place."""
    by_set = {}
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            by_set[frozenset(argument.alias_info.before_set)] = argument.name
    return [
        by_set.get(frozenset(each.alias_info.before_set))
        if each.alias_info is not None and each.alias_info.is_write
        else None
        for each in func._schema.returns
    ]


def _view_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int, base: Tensor) -> Tensor:
    results = func(base, *args, **kwargs)
    found: Tensor = results[index] if isinstance(results, list | tuple) else results
    return found
