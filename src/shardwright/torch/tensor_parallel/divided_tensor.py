"""The tensor that shows its whole shape, and holds what one rank has of it."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from shardwright.errors import UsageError
from shardwright.placement import WHOLE, Cut, Placement, Whole
from shardwright.torch._private.tensors import disabled_torch_function, new_wrapper
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.redistribution import moved_parts, narrowed, replaced
from shardwright.torch.tensor_parallel.spec import Spec, dense_strides, is_dense, local_shape, spec_of

# Kinds of scalars, in place of their values, in the key of a decision: True == 1 == 1.0 in Python.
_TRUE, _FALSE, _FLOAT, _ZERO, _OTHER = "true", "false", "float", "zero", "other"


class DividedTensor(torch.Tensor):
    """A tensor of which this rank holds a part: a slice, a summand, or (a settled sum) all.

    It dispatches below autograd, so every operation of a forward and of a backward comes by
    `__torch_dispatch__`, with the shapes that the script sees. There a decision, kept by operation, tensors
    and scalars, says how to run the operation on the parts.

    Whatever is whole is an ordinary tensor, and costs nothing.
    """

    _local: Tensor  # what this rank has
    _spec: Spec
    _copy: Any  # `CopiedView`, where `_spec.copied`
    _seen: bool  # a view that is no alias shares this memory
    _aliases: Any  # references to the tensor and its aliases; None: it has none (`placing.py`)

    # Without it every method of a tensor, even `shape`, takes a detour through Python.
    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if len(types) > 1 and any(getattr(each, "outranks_divided", False) for each in types):
            return NotImplemented
        key: list[Any] = [func]
        group = None
        for item in args:
            kind = item.__class__
            if kind is DividedTensor:
                spec = item._spec
                own = spec.group
                if group is None or own.inner is not None:
                    group = own
                local = item._local
                if local.__class__ is DividedTensor:
                    key += (spec, local._spec)
                    continue
                if spec.is_pending:
                    is_known = bool(own.sums) and own.sums.knows(local)
                else:
                    gathers = own.gathers
                    is_known = bool(gathers) and spec.is_cut and gathers.knows(local, spec)
                key.append(spec.with_whole if is_known else spec)
            elif kind is int or item is None:
                key.append(item)
            else:
                key.append(_entry(item))
        if kwargs:
            for name, item in kwargs.items():
                key += (name, _entry(item))
        else:
            kwargs = {}
        if group is None or group.is_inner:
            group = _group_in((args, tuple(kwargs.values())), group)
        if group.inner is not None:
            # What an inner group has at hand differs from rank to rank, and decides nothing here.
            key = [_without_what_is_at_hand_inside(entry) for entry in key]
        decision = group.decisions.get(tuple(key))
        if decision is None:
            decision = group.decide(func, args, kwargs, tuple(key))
        fast = decision.fast
        return decision.run(args, kwargs) if fast is None else fast.run(args, kwargs)

    def alike(self) -> "list[DividedTensor]":
        """The tensor and its aliases."""
        if self._aliases is None:
            return [self]
        return [each for reference in self._aliases if (each := reference()) is not None]

    # ---- the part of a tensor that other ranks share, too ----

    def gathered(self) -> Tensor:
        """A copy of all elements of this part, without history. All ranks that share it call it."""
        return whole(self).clone()

    def replaced_in(
        self,
        group: TensorGroup,
        shape: Sequence[int],
        strides: Sequence[int],
        source: Placement,
        target: Placement,
    ) -> Tensor:
        """What this rank has of a tensor in another placement, of which this is its part: see `replaced`.

        Only parts of this part travel: to the rank that has the same place in its own inner group.
        """
        spec = self._spec
        if spec.copied:
            self._copy.refresh()
        inner = spec.group
        move = moved_parts(spec.placement, source, target, rank=inner.rank, num_ranks=group.num_ranks)
        if move is None or spec.apart:
            return replaced(group, whole(self), shape=shape, strides=strides, source=source, target=target)
        if isinstance(source, Whole) and isinstance(target, Cut):
            return narrowed(group, self, shape, strides, target)
        own_shape = local_shape(tuple(shape), move.whole, inner.rank)
        own_strides = dense_strides(own_shape, strides) if is_dense(shape, strides) else strides
        part = replaced(
            group, self._local, shape=own_shape, strides=own_strides, source=move.source, target=move.target
        )
        size = torch.Size(local_shape(tuple(shape), target, group.rank))
        return wrap(
            part,
            spec_of(inner, move.after, part, shape=size, strides=tuple(dense_strides(size, strides))),
        )

    # ---- what leaves the dispatcher ----

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of all elements, which cannot be written to."""
        values = whole(self.detach() if force else self).numpy()
        values.flags.writeable = False
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def tolist(self) -> Any:
        """All elements, as Python numbers in lists."""
        return whole(self).tolist()

    def data_ptr(self) -> NoReturn:
        """Refused: no memory of this rank holds the tensor."""
        raise UsageError(
            f"data_ptr() of a tensor of shape {tuple(self.shape)} that {self._spec.group.num_ranks} ranks "
            f"share ({self._spec.placement}): no memory holds it all. Keep this module's parameters whole."
        )

    @property
    def data(self) -> Tensor:
        """The same memory without history."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        # The memory becomes that of the value: divided like this tensor, if its shape is the same.
        if not isinstance(value, DividedTensor):
            placement = self._spec.placement if value.shape == self.shape else WHOLE
            value = divided(value.detach(), placement, self._spec.group)
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        for each in (*self.alike(), *value.alike()):
            each._seen = True
        self._local, self._spec = value._local, value._spec

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if has_torch_function_unary(self):  # a mode decides what the copy is, as for other tensors
            given: Tensor = handle_torch_function(DividedTensor.__deepcopy__, (self,), self, memo)
            return given
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError("only tensors without history can be deep-copied: use detach() first")
        with torch.no_grad():
            copy = self.clone()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        else:
            copy.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copy.grad = deepcopy(self.grad, memo)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            f"a tensor of shape {tuple(self.shape)} that {self._spec.group.num_ranks} ranks share cannot be "
            "pickled: each rank has a part. Save model.state_dict(), called on all ranks, and what "
            "optimizer.state_dict() of the wrapped optimizer gives; or use sw.Checkpoints."
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local"], self._spec

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], spec: Spec, size: Any, stride: Any) -> "DividedTensor":
        local = inner["_local"]
        return wrap(
            local,
            spec_of(
                spec.group,
                spec.placement,
                local,
                shape=size,
                strides=stride,
                copied=False,
                apart=spec.apart,
            ),
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DividedTensor({tuple(self.shape)}, {self.dtype}, {self._spec.placement})"


def _entry(item: Any) -> Any:
    """What an argument adds to the key of a decision."""
    if item.__class__ is DividedTensor:
        local = item._local
        return (item._spec, local._spec) if local.__class__ is DividedTensor else item._spec
    if isinstance(item, Tensor):
        return item.shape, item.stride(), item.dtype
    if item is True or item is False:
        return _TRUE if item else _FALSE
    if item.__class__ is float:
        return _FLOAT if item else _ZERO
    if isinstance(item, list | tuple):
        return tuple([_entry(each) for each in item])
    if isinstance(item, complex | torch.Generator | torch.Tag):
        return _OTHER
    return item


def _without_what_is_at_hand_inside(entry: Any) -> Any:
    is_at_hand = entry.__class__ is tuple and len(entry) == 2 and isinstance(entry[0], Spec)
    return entry[0] if is_at_hand and entry[0].group.is_inner else entry


def _group_in(items: Any, found: TensorGroup | None) -> TensorGroup:
    """The group of the tensors among some items; where some are parts of others' group, that one."""
    for item in items:
        if item.__class__ is DividedTensor:
            own = item._spec.group
            found = own if found is None or own.inner is not None else found
        elif isinstance(item, list | tuple):
            found = _group_in(item, found)
    return found  # type: ignore[return-value]


def wrap(local: Tensor, spec: Spec) -> DividedTensor:
    """The tensor of this description, with this part."""
    tensor = new_wrapper(
        DividedTensor,
        spec.shape,
        strides=spec.strides,
        storage_offset=spec.offset,
        dtype=spec.dtype,
        device=spec.device,
    )
    tensor._local = local
    tensor._spec = spec
    tensor._seen = False
    tensor._aliases = None
    return tensor  # type: ignore[no-any-return]


def divided(data: Tensor, placement: Placement, group: TensorGroup) -> DividedTensor:
    """Divides a tensor that every rank has. Each keeps a copy of its part."""
    shape, strides = data.shape, data.stride()
    part = replaced(group, data, shape=shape, strides=strides, source=WHOLE, target=placement)
    part = part.clone() if part.numel() == 0 or part.stride() == strides else part.contiguous()
    return wrap(part, spec_of(group, placement, part, shape=shape, strides=strides))


def placement_of(tensor: Tensor) -> Placement:
    """Where the elements of a tensor are; those of an ordinary one are everywhere."""
    return tensor._spec.placement if tensor.__class__ is DividedTensor else WHOLE


def local_of(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor; where other ranks share that, too, what it has of that."""
    while isinstance(tensor, DividedTensor):
        tensor = tensor._local
    return tensor


def is_nested(tensor: Tensor) -> bool:
    """Whether other ranks share this rank's part of a tensor, too."""
    return tensor.__class__ is DividedTensor and tensor._local.__class__ is DividedTensor


def specs_of(tensor: Tensor) -> tuple[Spec, ...]:
    """The descriptions of a tensor and of this rank's part of it, as far as ranks share those."""
    found: tuple[Spec, ...] = ()
    while isinstance(tensor, DividedTensor):
        found, tensor = (*found, tensor._spec), tensor._local
    return found


def is_in(tensor: Tensor, group: TensorGroup) -> bool:
    """Whether the ranks of a group share a tensor; not where those of its inner group alone do."""
    return tensor.__class__ is DividedTensor and tensor._spec.group is group


def placement_in(tensor: Tensor, group: TensorGroup) -> Placement:
    """Where a tensor's elements are among the ranks of a group; those of any other tensor are everywhere."""
    return tensor._spec.placement if is_in(tensor, group) else WHOLE  # type: ignore[attr-defined]


def part_in(tensor: Tensor, group: TensorGroup) -> Tensor:
    """What this rank has of a tensor of a group; any other tensor, also one of its inner group, as it is."""
    return tensor._local if is_in(tensor, group) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """All elements of a tensor, without history. All ranks of its group, and of an inner one, call it."""
    if not isinstance(tensor, DividedTensor):
        return tensor.detach()
    data = all_parts(tensor)
    return whole(data) if data.__class__ is DividedTensor else data


def all_parts(tensor: DividedTensor) -> Tensor:
    """All elements of a tensor as an inner group shares them. All ranks of its group call it."""
    spec = tensor._spec
    if spec.copied:
        tensor._copy.refresh()
    if isinstance(spec.placement, Whole):
        return tensor._local
    return replaced(
        spec.group, tensor._local, shape=spec.shape, strides=spec.strides, source=spec.placement, target=WHOLE
    )
