"""Places what leaves a unit whose tensors ranks share, and the gradients of what enters it.

::

    x, placed ──► [ unit: parts, pending sums ] ──► y ──► placed
    dx, placed ◄─ [                           ] ◄── dy ◄─ placed

Between units a tensor is whole, an ordinary one that every rank of the group has alike; or it is cut along
the batch or the sequence (`BetweenUnits`); or it stays as the unit has it, for operations that belong to the
unit (`tracing/divided_tail.py`).
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.placement import LEAST_CUT_AGAIN, WHOLE, BetweenUnits, Cut, Placement, Whole
from shardwright.torch.pytorch.tensors import Order
from shardwright.torch.pytorch.tree import flatten, leaves, map_tree
from shardwright.torch.tensor_parallel.divided_tensor import (
    DividedTensor,
    local_of,
    part_in,
    placement_in,
    placement_of,
    whole,
    wrap,
)
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.placing import placed, settled
from shardwright.torch.tensor_parallel.spec import local_shape, spec_of


class _Placed(torch.autograd.Function):
    """A tensor in another placement, with history. Its gradient is that of the tensor, wherever it is."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, target: Whole | Cut, inside: Whole | Cut, apart: int, group: TensorGroup
    ) -> Tensor:
        if group.inner is not None:
            return _placed_twice(tensor, target, inside, apart, group)
        if isinstance(target, Cut):
            return placed(tensor, target, group)
        assert isinstance(tensor, DividedTensor)
        if tensor._spec.is_pending and not tensor._seen:
            settled(tensor)
        elif tensor._spec.is_pending and group.sums.knows(tensor._local):
            return settled(tensor).clone()  # what comes next must not write to the sum that others take
        # The script gets an object of its own, also where this rank has all elements by now.
        return whole(tensor).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None, None, None, None


class Boundary:
    """Places tensors between the units of one microbatch.

    All ranks of the group call its methods alike.
    """

    def __init__(self, group: TensorGroup, between: BetweenUnits | None = None):
        self.group = group
        self._between = between or BetweenUnits(group.num_ranks)
        self._inside = self._between.inside
        group.shares(self._between)
        if group.inner is not None:
            group.inner.shares(self._inside)

    @property
    def cuts(self) -> bool:
        """Whether some tensors between units are cut."""
        return self._between.cuts

    def placement(self, tensor: Tensor) -> Whole | Cut:
        return self._between.placement(tensor.shape)

    def placement_inside(self, target: Whole | Cut, shape: Sequence[int]) -> Whole | Cut:
        """Where this rank's part of a tensor is, between units, among the ranks that share each part.

        All ranks of the group have their parts cut, or none has. Parts may differ in length: those of
        ``logits[:, :-1]`` do where those of the logits do not.
        """
        inside = self._inside
        if isinstance(target, Whole) or inside.dim is None:
            return WHOLE
        if target.dim != inside.dim:
            return inside.placement(shape)
        lengths = [target.length(rank) for rank in range(self.group.num_ranks)]
        if min(lengths) < LEAST_CUT_AGAIN * inside.num_ranks:
            return WHOLE
        return Cut.even(inside.dim, lengths[self.group.rank], num_ranks=inside.num_ranks)

    # ---- with history ----

    def placed(self, tensor: Tensor) -> Tensor:
        return self.placed_at(tensor, self.placement(tensor))

    def placed_at(self, tensor: Tensor, target: Whole | Cut, *, inside: Whole | Cut | None = None) -> Tensor:
        inside = self.placement_inside(target, tensor.shape) if inside is None else inside
        if self.group.inner is not None:
            if _is_placed_twice(tensor, target, inside, 0, self.group):
                return tensor
            both: Tensor = _Placed.apply(tensor, target, inside, 0, self.group)  # type: ignore[no-untyped-call]
            return both
        is_divided = tensor.__class__ is DividedTensor
        # A settled sum is all there, but no ordinary tensor.
        if placement_of(tensor) == target and is_divided == isinstance(target, Cut):
            return tensor
        found: Tensor = _Placed.apply(tensor, target, inside, 0, self.group)  # type: ignore[no-untyped-call]
        return found

    def all_placed(
        self,
        results: Any,
        made: dict[int, Tensor] | None = None,
        *,
        keeps_cuts: bool = False,
        stays: Collection[int] = (),
    ) -> Any:
        """A tree of results with all divided tensors placed; the tree itself where they are."""
        if results.__class__ is not DividedTensor and isinstance(results, Tensor):
            return results
        items, structure = flatten(results)
        if all(item.__class__ is not DividedTensor for item in items):
            return results
        made = {} if made is None else made
        for place, item in enumerate(items):
            if item.__class__ is DividedTensor:
                cut = placement_in(item, self.group)
                target = cut if keeps_cuts and isinstance(cut, Cut) else None
                if place in stays or (target is not None and self._stays_inside(item)):
                    continue
                if id(item) not in made:
                    made[id(item)] = self.placed_at(item, target or self.placement(item))
                items[place] = made[id(item)]
        return structure.rebuild(items)

    def _stays_inside(self, tensor: DividedTensor) -> bool:
        """Whether a part stays as it is, however it is cut among the ranks that share it."""
        return self.group.inner is None or isinstance(placement_of(part_in(tensor, self.group)), Cut)

    def around(
        self,
        unit: nn.Module,
        call: Callable[..., Any],
        *,
        attributes: Sequence[tuple[nn.Module, str]] = (),
        stays: Collection[int] = (),
    ) -> Callable[..., Any]:
        """Runs a unit so that code outside sees its tensors as they are between units."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self.watch_gradients((args, kwargs))
            if self.cuts and not any(item.__class__ is DividedTensor for item in leaves((args, kwargs))):
                # Nothing tells the unit what its part is. Where something does, whole tensors are cut on the
                # way, for nothing, where they are better cut.
                args, kwargs = map_tree(self._entering, (args, kwargs))
            made: dict[int, Tensor] = {}
            result = self.all_placed(call(*args, **kwargs), made, stays=stays)
            for owner, name in attributes:
                vars(owner)[name] = self.all_placed(vars(owner)[name], made)
            for each in unit.modules():
                for name, buffer in each._buffers.items():
                    if buffer.__class__ is DividedTensor:
                        each._buffers[name] = whole(buffer)
            # Only the last unit's would be there in the backward, and each counts on what it costs alone.
            self.group.forget_gathered()
            return result

        return run

    def watch_gradients(self, arguments: Any) -> None:
        """Has the gradients of arguments placed like these."""
        for item in leaves(arguments):
            # The gradient of a parameter is settled once a step.
            if isinstance(item, Tensor) and item.requires_grad and not isinstance(item, nn.Parameter):
                target = placement_in(item, self.group)
                inside, apart = self._inside_of(item)
                hook = partial(_gradient_placed, target, inside, apart, self.group)
                item.register_hook(hook)  # type: ignore[no-untyped-call]

    def _inside_of(self, tensor: Tensor) -> tuple[Placement, int]:
        """Where a rank's part is among the ranks that share it, and what stands for those of all ranks."""
        part = part_in(tensor, self.group)
        if self.group.inner is None or part.__class__ is not DividedTensor:
            return WHOLE, 0
        return placement_in(part, self.group.inner), part._spec.apart

    def _entering(self, item: Any) -> Any:
        """An argument of a unit: what every rank has anyway is cut, too."""
        is_parameter = isinstance(item, nn.Parameter)
        return self.placed(item) if isinstance(item, Tensor) and not is_parameter else item

    # ---- without history: what is sent from stage to stage ----

    def part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Sizes of what this rank has of a tensor of these sizes; None: all."""
        target = self._between.placement(shape)
        if isinstance(target, Whole):
            return None
        part = local_shape(shape, target, self.group.rank)
        return self._part_inside(part, self.placement_inside(target, shape))

    def _part_inside(self, shape: tuple[int, ...], inside: Whole | Cut) -> tuple[int, ...]:
        inner = self.group.inner
        return shape if inner is None else local_shape(shape, inside, inner.rank)

    def part(self, tensor: Tensor) -> Tensor:
        """What this rank has of a tensor."""
        target = self.placement(tensor)
        if isinstance(target, Whole):
            return whole(tensor)
        if self.group.inner is None:
            return placed(tensor, target, self.group)._local
        inside = self.placement_inside(target, tensor.shape)
        return local_of(_placed_twice(tensor, target, inside, 0, self.group))

    def joined(self, part: Tensor, shape: Sequence[int], order: Order | None = None) -> Tensor:
        """The tensor of which this rank has a part."""
        target = self._between.placement(shape)
        if isinstance(target, Whole):
            return part
        strides = _strides(shape, order)
        inside, inner = self.placement_inside(target, shape), self.group.inner
        if inner is not None and isinstance(inside, Cut):
            size = local_shape(tuple(shape), target, self.group.rank)
            own = spec_of(inner, inside, part, shape=torch.Size(size), strides=_strides(size, order))
            part = wrap(part, own)
        spec = spec_of(self.group, target, part, shape=torch.Size(shape), strides=strides)
        return wrap(part, spec)


def _gradient_placed(
    target: Placement, inside: Placement, apart: int, group: TensorGroup, gradient: Tensor
) -> Tensor | None:
    # What is pending goes to where the tensor is; what is a sum already is whole.
    wanted, own = (each if isinstance(each, Cut) else WHOLE for each in (target, inside))
    if group.inner is not None:
        if _is_placed_twice(gradient, wanted, own, apart, group):
            return None
    elif isinstance(wanted, Cut):
        if placement_of(gradient) == wanted:
            return None
    elif gradient.__class__ is not DividedTensor:
        return None
    if torch.is_grad_enabled() and gradient.requires_grad:
        # Somebody asks for the gradient of a gradient: forces of a potential.
        found: Tensor = _Placed.apply(gradient, wanted, own, apart, group)  # type: ignore[no-untyped-call]
        return found
    if group.inner is not None:
        return _placed_twice(gradient, wanted, own, apart, group)
    return placed(gradient, wanted, group) if isinstance(wanted, Cut) else whole(gradient)


def _is_placed_twice(
    tensor: Tensor, target: Whole | Cut, inside: Whole | Cut, apart: int, group: TensorGroup
) -> bool:
    if isinstance(target, Whole):
        return tensor.__class__ is not DividedTensor
    part = part_in(tensor, group)
    is_inside = placement_of(part) == inside and (part.__class__ is DividedTensor) == isinstance(inside, Cut)
    if is_inside and part.__class__ is DividedTensor:
        is_inside = part._spec.apart == apart
    return placement_in(tensor, group) == target and is_inside


def _placed_twice(
    tensor: Tensor, target: Whole | Cut, inside: Whole | Cut, apart: int, group: TensorGroup
) -> Tensor:
    """A tensor cut over a group, each part over its inner group; without history."""
    assert group.inner is not None
    if isinstance(target, Whole):
        return whole(tensor).detach()
    found = placed(tensor, target, group)
    part = found._local
    if isinstance(inside, Cut):
        inner = placed(part, inside, group.inner)
        part, own = inner, inner._spec
        if own.apart != apart:
            local = inner._local
            shape, strides = own.shape, own.strides
            part = wrap(local, spec_of(group.inner, inside, local, shape=shape, strides=strides, apart=apart))
    elif part.__class__ is DividedTensor:
        part = whole(part)
    if part is found._local:
        return found
    spec = found._spec
    return wrap(part, spec_of(group, target, part, shape=spec.shape, strides=spec.strides))


def _strides(shape: Sequence[int], order: Order | None) -> tuple[int, ...]:
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
