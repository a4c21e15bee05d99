"""A unit on divided tensors with data, as one rank runs it, with nobody to exchange with: for a clock."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from shardwright.placement import BetweenUnits, Placement
from shardwright.torch.pytorch.tensors import AutocastState, autocast_as
from shardwright.torch.pytorch.tree import map_tree
from shardwright.torch.tensor_parallel.boundary import Boundary
from shardwright.torch.tensor_parallel.group import Prices
from shardwright.torch.tensor_parallel.search.dry_run import divide_all, entering_leaf
from shardwright.torch.tensor_parallel.search.material import Material
from shardwright.torch.tensor_parallel.search.no_ranks import groups_without_ranks
from shardwright.torch.tensor_parallel.search.recording import own_call, step_of
from shardwright.torch.tensor_parallel.search.unit import Unit, copy_of

__all__ = ["TimedRun"]


class TimedRun:
    """Runs steps of a copy of a unit on random numbers. What other ranks would send is made up, at once."""

    def __init__(
        self,
        unit: Unit,
        placements: Mapping[str, Placement],
        *,
        rank: int,
        num_ranks: int,
        prices: Prices,
        experts: Set[str] = frozenset(),
        between: BetweenUnits | None = None,
        autocast: AutocastState = (),
    ):
        group = groups_without_ranks(rank, num_ranks, prices, between)
        self._unit, self._material = unit, Material(is_random=True)
        self._boundary = Boundary(group, between)
        self._autocast = autocast
        self._module = copy_of(unit, self._material, self._place)
        divide_all(self._module, placements, experts, group)

    def step(self, now: Callable[[], float]) -> tuple[float, float]:
        """Seconds of a forward, and of a backward, by a clock."""
        args, kwargs = own_call(self._unit, self._material)
        following = None if self._unit.following is None else self._unit.following(self._material)
        times: list[float] = []

        def entering(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [entering_leaf(each.requires_grad_(), self._boundary) for each in tensors]

        with self._material.in_use():
            args, kwargs = map_tree(lambda each: entering_leaf(each, self._boundary), (args, kwargs))
            times.append(now())
            step_of(
                following or self._unit.results,
                self._call,
                args,
                kwargs,
                self._place,
                lambda: times.append(now()),
                entering,
                self._unit.shared,
            )
            times.append(now())
        self._module.zero_grad()
        begun, turned, ended = times
        return turned - begun, ended - turned

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        call = self._unit.call_of(self._module)
        if self._boundary.cuts:
            call = self._boundary.around(self._module, call)
        with autocast_as(self._autocast):
            return call(*args, **kwargs)

    def _place(self, tensors: Sequence[Tensor]) -> None:
        for each in tensors:
            self._boundary.part(each)
