"""A step of a unit on divided tensors, without data to the byte, or with data for a clock."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.placement import WHOLE, BetweenUnits, Cut, Placement, Whole
from shardwright.torch._private.modules import transforms_beside_hooks
from shardwright.torch._private.tensors import memory_of
from shardwright.torch.pytorch.tensors import AutocastState, autocast_as
from shardwright.torch.pytorch.tree import flatten, leaves, map_tree
from shardwright.torch.tensor_parallel.boundary import Boundary
from shardwright.torch.tensor_parallel.divide import divide, settle_gradients
from shardwright.torch.tensor_parallel.divided_tensor import (
    DividedTensor,
    is_nested,
    local_of,
    placement_of,
)
from shardwright.torch.tensor_parallel.group import Prices, TensorGroup, Traffic
from shardwright.torch.tensor_parallel.search.recording import (
    groups_without_ranks,
    own_call,
    recorded,
    step_of,
)
from shardwright.torch.tensor_parallel.search.unit import Following, Material, Unit, copy_of, tensors_in


@dataclass(slots=True)
class Phase:
    """A part of a step on one rank.

    Attributes:
        num_divided: operations on divided tensors, which take Python's time.
    """

    traffic: Traffic = field(default_factory=Traffic)
    num_divided: int = 0


@dataclass(slots=True)
class DryRun:
    """A step of one rank.

    Attributes:
        settling: once a step, gradients get the placements of their parameters.
        kept_bytes: of tensors that the rank keeps from the forward to the backward, parameters apart.
        computed_whole: how often an operation had no rule for its divided inputs, by name.
        inside: placements of what stays as it is between the unit and what follows it.
    """

    forward: Phase = field(default_factory=Phase)
    backward: Phase = field(default_factory=Phase)
    settling: Phase = field(default_factory=Phase)
    kept_bytes: int = 0
    computed_whole: Counter[str] = field(default_factory=Counter)
    inside: list[Placement] = field(default_factory=list)

    @property
    def traffic(self) -> Traffic:
        """Of the whole step, with one microbatch."""
        return self.forward.traffic + self.backward.traffic + self.settling.traffic


@dataclass(frozen=True, slots=True)
class CutTensor:
    """Where a tensor between operations is.

    Attributes:
        cut: among the ranks that share it.
        inside: its part, among the ranks that share that in turn; None: as it is between units.
    """

    cut: Cut
    inside: Whole | Cut | None


class DividedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations on divided tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DividedTensor in types:
            self.number += 1
            return NotImplemented  # the tensor does it
        return func(*args, **(kwargs or {}))


class _Kept:
    """The memory of what autograd keeps.

    What is a partial sum when it is saved is added up in its place by the operation that saves it, as a rule.
    So the tensors are looked at when the forward is over.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self._parameters = {memory_of(local_of(each)) for each in parameters}
        self._tensors: list[Tensor] = []
        self.num_bytes = 0

    def note(self, tensor: Tensor) -> Tensor:
        self._tensors.append(tensor)
        return tensor

    def count(self) -> None:
        sizes: dict[int, int] = {}
        for tensor in self._tensors:
            local = local_of(tensor)
            sizes[memory_of(local)] = local.untyped_storage().nbytes()
            while is_nested(tensor):
                tensor = tensor._local  # type: ignore[attr-defined]
            total = tensor._spec.group.sums.known(local) if isinstance(tensor, DividedTensor) else None
            if total is not None:  # it is there as long as the partial sum
                sizes[memory_of(total)] = total.untyped_storage().nbytes()
        self._tensors.clear()
        self.num_bytes = sum(size for memory, size in sizes.items() if memory not in self._parameters)


def dry_run(
    unit: Unit,
    placements: Mapping[str, Placement],
    *,
    experts: Set[str] = frozenset(),
    rank: int,
    num_ranks: int,
    prices: Prices | None = None,
    between: BetweenUnits | None = None,
) -> DryRun:
    """Runs a forward and a backward, and settles the gradients, as a rank would."""
    step_of_rank = partial(
        RankStep,
        placements=placements,
        experts=experts,
        rank=rank,
        num_ranks=num_ranks,
        prices=prices or Prices(),
        between=between,
    )
    try:
        return _run(step_of_rank(unit, Material()))
    except Exception:
        unit, recording = recorded(unit)
        if "" in unit.kept_whole:
            return DryRun()
        return _run(step_of_rank(unit, recording.material))


def _run(step: "RankStep") -> DryRun:
    found, count, group = DryRun(), DividedOperations(), step.group
    kept = _Kept([*step.module.parameters(), *step.module.buffers()])

    def turn() -> None:
        _end(found.forward, group, count)
        kept.count()

    moments = iter((lambda: None, turn, lambda: _end(found.backward, group, count)))
    hooks = torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor)
    following = step.run(lambda: next(moments)(), [count, hooks, transforms_beside_hooks()])
    with step.material.in_use():
        settle_gradients(step.module.parameters())
    _end(found.settling, group, count)
    found.kept_bytes, found.computed_whole = kept.num_bytes, group.computed_whole
    if group.inner is not None:
        found.computed_whole = found.computed_whole + group.inner.computed_whole
    found.inside = [] if following is None else [placement_of(each) for each in following.inside]
    return found


def dry_run_of_operation(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    cuts: Mapping[int, CutTensor],
    *,
    rank: int,
    num_ranks: int,
    prices: Prices,
    between: BetweenUnits,
) -> tuple[DryRun, list[CutTensor | None]]:
    """Runs an operation between units, forward and backward, as a rank would."""
    group = groups_without_ranks(rank, num_ranks, prices, between)
    boundary, material, found, count = Boundary(group, between), Material(), DryRun(), DividedOperations()
    items, structure = flatten((args, dict(kwargs)))
    try:
        with material.in_use():
            items = [material.like(each) for each in items]
            for place, where in cuts.items():
                items[place] = _cut_leaf(items[place], where.cut, boundary, where.inside)
            own_args, own_kwargs = structure.rebuild(items)
            with count:
                boundary.watch_gradients((own_args, own_kwargs))
                # A leaf must not be changed in place.
                own_args, own_kwargs = map_tree(_view_of_leaf, (own_args, own_kwargs))
                result = boundary.all_placed(func(*own_args, **own_kwargs), keeps_cuts=True)
                _end(found.forward, group, count)
                results = leaves(result)
                roots = [each for each in results if isinstance(each, Tensor) and each.requires_grad]
                if roots:
                    torch.autograd.backward(roots, [_ones(each, boundary) for each in roots])
            _end(found.backward, group, count)
    except Exception:
        return DryRun(), []
    return found, [_where(each) for each in results]


def divide_all(
    module: nn.Module, placements: Mapping[str, Placement], experts: Set[str], group: TensorGroup
) -> None:
    for is_of_expert in (False, True):
        own = {name: each for name, each in placements.items() if (name in experts) is is_of_expert}
        divide(module, own, group.of_parameter(is_of_expert=is_of_expert))


def _view_of_leaf(item: Any) -> Any:
    return item[...] if isinstance(item, Tensor) and item.requires_grad else item


def _ones(tensor: Tensor, between: Boundary) -> Tensor:
    ones = torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    where = _where(tensor)
    return ones if where is None else _cut_leaf(ones, where.cut, between, where.inside)


def _where(item: Any) -> CutTensor | None:
    cut = placement_of(item)
    if not isinstance(cut, Cut):
        return None
    inside = placement_of(item._local)
    return CutTensor(cut, inside if isinstance(inside, Cut) else WHOLE)


def _end(phase: Phase, group: TensorGroup, count: DividedOperations) -> None:
    phase.traffic, group.traffic = group.traffic, Traffic()
    if group.inner is not None:
        phase.traffic, group.inner.traffic = phase.traffic + group.inner.traffic, Traffic()
    phase.num_divided, count.number = count.number, 0


def entering_leaf(item: Any, between: Boundary) -> Any:
    """A tensor that enters a unit, or the gradient of one that leaves it, as another unit has left it."""
    if not isinstance(item, Tensor) or isinstance(item, nn.Parameter) or not item.requires_grad:
        return item  # most likely a mask or a table, which every rank has
    target = between.placement(item)
    return _cut_leaf(item, target, between) if isinstance(target, Cut) else item


def _cut_leaf(tensor: Tensor, cut: Cut, between: Boundary, inside: Whole | Cut | None = None) -> Tensor:
    with torch.no_grad():
        leaf = between.placed_at(tensor, cut, inside=inside).detach()
    return leaf.requires_grad_(tensor.requires_grad)


class RankStep:
    """Steps of a copy of a unit, as a rank runs them. What other ranks would send is made up, at once."""

    def __init__(
        self,
        unit: Unit,
        material: Material,
        placements: Mapping[str, Placement],
        *,
        rank: int,
        num_ranks: int,
        prices: Prices,
        experts: Set[str] = frozenset(),
        between: BetweenUnits | None = None,
        autocast: AutocastState = (),
    ):
        self.group = groups_without_ranks(rank, num_ranks, prices, between)
        self.material = material
        self._unit, self._autocast = unit, autocast
        self._boundary = Boundary(self.group, between)
        self.module = copy_of(unit, material, self._place)
        with material.in_use():
            divide_all(self.module, placements, experts, self.group)

    def run(
        self, note: Callable[[], None], watches: Sequence[AbstractContextManager[Any]] = ()
    ) -> Following | None:
        """Runs one, and notes its begin, its turn to the backward, its end; gives what follows the unit."""
        args, kwargs = own_call(self._unit, self.material)
        following = None if self._unit.following is None else self._unit.following(self.material)

        def entering(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [entering_leaf(each.requires_grad_(), self._boundary) for each in tensors]

        with self.material.in_use(), ExitStack() as stack:
            args, kwargs = map_tree(lambda each: entering_leaf(each, self._boundary), (args, kwargs))
            for watch in watches:
                stack.enter_context(watch)
            note()
            step_of(
                following or tensors_in,
                self._call,
                args,
                kwargs,
                self._place,
                note,
                entering,
                self._unit.shared,
            )
            note()
        return following

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        call = self._unit.call_of(self.module)
        if self._boundary.cuts:
            call = self._boundary.around(self.module, call)
        with autocast_as(self._autocast):
            return call(*args, **kwargs)

    def _place(self, tensors: Sequence[Tensor]) -> None:
        for each in tensors:
            self._boundary.part(each)
