"""Runs one program over tensors on several ranks; each number comes from the rank that holds it.

It follows every operation, and knows which ranks hold the values of each tensor:

- a result computed from a rank's tensors belongs to that rank; one computed from none, to all ranks;
- a number (a one-element tensor) that the program reads, or that meets tensors of other ranks, is broadcast;
- whole tensors of several ranks cannot meet in one operation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.comm.identity.purpose import Purpose
from shardwright.comm.identity.rank_set import listed
from shardwright.errors import UsageError
from shardwright.torch._private import weak_storage
from shardwright.torch.parameters.remote import RemoteTensor, without_values
from shardwright.torch.pytorch.operator_schema import (
    map_arguments,
    one_by_one,
    takes_several,
    tensors_in,
    written_tensors,
)
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.pytorch.tree import leaves, map_tree
from shardwright.torch.randomness.rng import draw_as_elsewhere
from shardwright.torch.run.context import Context

__all__ = ["Holding", "JointProgram"]

_REMEDY = (
    "Train by replicas alone (pipeline_parallel_degree 1; with sharded_data_parallel_degree they share the "
    "memory), or with another optimizer."
)


_aten = torch.ops.aten
# Comparisons, and what each is with left and right exchanged.
_MIRRORED = {
    _aten.eq.Tensor: _aten.eq.Tensor,
    _aten.ne.Tensor: _aten.ne.Tensor,
    _aten.lt.Tensor: _aten.gt.Tensor,
    _aten.gt.Tensor: _aten.lt.Tensor,
    _aten.le.Tensor: _aten.ge.Tensor,
    _aten.ge.Tensor: _aten.le.Tensor,
}


@dataclass(frozen=True, slots=True)
class Holding:
    """The ranks that hold the values of a tensor.

    Attributes:
        name: of the parameter that it is, or belongs to.
        ranks: world ranks of this replica.
    """

    name: str
    ranks: frozenset[int]


class JointProgram(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, all ranks of a pipeline run the same operations.

    Args:
        context: the run.
        whose: what runs, for errors.
    """

    def __init__(self, context: Context, whose: str):
        super().__init__()  # type: ignore[no-untyped-call]
        self._context = context
        self._whose = whose
        self._all_ranks = frozenset(context.pipeline_ranks)
        self._held: dict[Any, Holding] = {}  # by `weak_storage`

    def holds(self, tensors: Sequence[Tensor | None], holding: Holding) -> None:
        """Records which ranks hold these tensors."""
        for tensor in tensors:
            if tensor is not None and (key := weak_storage(tensor)) is not None:
                self._held[key] = holding

    def has_values(self, tensor: Tensor) -> bool:
        """Whether this rank has the values of a tensor."""
        holding = self._holding(tensor)
        return holding is None or self._context.rank in holding.ranks

    def forget(self) -> None:
        """Forgets tensors that no longer exist."""
        self._held = {key: holding for key, holding in self._held.items() if not key.expired()}

    def tell_numbers(self, groups: Sequence[dict[str, Any]]) -> None:
        """Gives all ranks the numbers in parameter groups that one rank has; collective over the replica."""
        options = [
            (group, name, value) for group in groups for name, value in group.items() if name != "params"
        ]
        numbers = [item for *_, value in options for item in leaves(value) if self._is_number_of_a_rank(item)]
        values = self._values(numbers, "numbers of groups") if numbers else {}
        for group, name, value in options:
            if any(id(item) in values for item in leaves(value)):
                group[name] = map_tree(lambda item: values.get(id(item), item), value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if takes_several(func):
            return one_by_one(lambda *own, **options: self._run(func, own, options), args, kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _MIRRORED:
            func, args = self._in_one_order(func, args)
        written = written_tensors(func, args, kwargs)
        args, kwargs, holdings = self._brought_together(func, args, kwargs, written)
        if not holdings:
            if torch.Tag.nondeterministic_seeded in func.tags:
                self._refuse_draw(func)
            return func(*args, **kwargs)
        ranks = _common(holdings)
        holding = Holding(holdings[0].name, ranks)
        is_here = self._context.rank in ranks
        if torch.Tag.data_dependent_output in func.tags:
            return self._told(func(*args, **kwargs) if is_here else None, holding, func)
        if torch.Tag.dynamic_output_shape in func.tags:
            self._refuse_shape(func, holding)
        self.holds([item for item in written if not isinstance(item, RemoteTensor)], holding)
        if not is_here:
            draw_as_elsewhere(func, args, kwargs, self._context.device)
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("meta")
            return without_values(func, args, kwargs, name=holding.name, holders=sorted(ranks))
        result = func(*args, **kwargs)
        self.holds(tensors_in((result,)), holding)
        return result

    def _in_one_order(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """A comparison that is the same on all ranks: Python asks a stand-in first, left or right."""
        left, right = (self._holding(item) for item in args)
        if left is None or right is None or min(left.ranks) <= min(right.ranks):
            return func, args
        return _MIRRORED[func], (args[1], args[0])

    def _brought_together(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Holding]]:
        """The arguments, with the values of numbers that ranks need and do not have; and who has the rest.

        They need them where tensors of several ranks meet: each rank that has a whole tensor, or one that is
        written. What everybody has stays everybody's when a number is added to it.
        """
        tensors = tensors_in((*args, *kwargs.values()))
        holdings = [self._holding(tensor) for tensor in tensors]
        of_ranks = [holding for holding in holdings if holding is not None]
        if not of_ranks or len(tensors) == 1:
            return args, kwargs, of_ranks
        changed = {id(tensor) for tensor in written}
        numbers, rest = [], []
        for tensor, holding in zip(tensors, holdings, strict=True):
            if id(tensor) in changed or (holding is not None and not _is_number(tensor)):
                rest.append(holding)
            elif holding is not None:
                numbers.append(tensor)
        common = _common(of_ranks)
        if common and all(common >= (self._all_ranks if who is None else who.ranks) for who in rest):
            return args, kwargs, of_ranks
        if numbers:
            values = self._values(numbers, str(func))
            args, kwargs = map_arguments(lambda tensor: values.get(id(tensor), tensor), args, kwargs)
        of_ranks = [holding for holding in rest if holding is not None]
        common = _common(of_ranks)
        if of_ranks and not (common and all(common >= holding.ranks for holding in of_ranks)):
            self._refuse(func, of_ranks)
        return args, kwargs, of_ranks

    def _holding(self, tensor: Tensor) -> Holding | None:
        if isinstance(tensor, RemoteTensor):
            return Holding(tensor.first_name, frozenset(tensor.holders))
        key = weak_storage(tensor)
        return None if key is None else self._held.get(key)

    def _is_number_of_a_rank(self, item: Any) -> bool:
        return isinstance(item, Tensor) and _is_number(item) and self._holding(item) is not None

    def _values(self, numbers: Sequence[Tensor], what: str) -> dict[int, Tensor]:
        """The values of numbers by their id, each from its first rank; collective over the replica."""
        distinct = list({id(number): number for number in numbers}.values())
        holdings = [holding for number in distinct if (holding := self._holding(number)) is not None]
        zero = torch.zeros((), dtype=torch.float64, device=self._context.device)
        mine = [
            number.detach().double().reshape(()) if min(holding.ranks) == self._context.rank else zero
            for number, holding in zip(distinct, holdings, strict=True)
        ]
        told = self._from_holders(torch.stack(mine), holdings, what)
        return {
            id(number): value.to(number.dtype).reshape(number.shape)
            for number, value in zip(distinct, told, strict=True)
        }

    def _told(self, value: Any, holding: Holding, func: Any) -> Any:
        """A number that the program reads, on all ranks."""
        kinds: list[type] = [bool, int, float]
        own = [0.0, 0.0] if value is None else [float(value), float(kinds.index(type(value)))]
        row = torch.tensor(own, dtype=torch.float64, device=self._context.device)
        told, kind = self._from_holders(row, [holding, holding], str(func)).tolist()
        return kinds[int(kind)](told)

    def _from_holders(self, numbers: Tensor, holdings: Sequence[Holding], what: str) -> Tensor:
        """Numbers (n,), each from its first rank.

        Raises:
            UsageError: ranks are at different places of the program.
        """
        replica = self._context.links.replica
        assert replica is not None
        sources = [min(holding.ranks) for holding in holdings]
        place = float(crc32(f"{what} {sources}".encode()))
        row = torch.cat([numbers, numbers.new_tensor([place])])
        if len(set(sources)) == 1:  # who does not wait for others is ahead of them
            replica.broadcast([row], sources[0], Purpose.UPDATE)
            told, places = row[:-1], row[-1:]
        else:
            rows = replica.gather(row, Purpose.UPDATE)
            of_sources = [self._context.pipeline_ranks.index(source) for source in sources]
            told, places = rows[of_sources, range(len(sources))], rows[:, -1]
        if any(other != place for other in places.tolist()):
            raise UsageError(
                f"{user_line()}: ranks compute different things in {self._whose}, which runs over the "
                "parameters of all stages on all ranks. It must not ask which rank it is on; and one that "
                "computes from parameters in its __init__ is made before the first call of a step function."
            )
        return told

    def _refuse_shape(self, func: Any, holding: Holding) -> NoReturn:
        raise UsageError(
            f"{user_line()}: {self._whose} computes in {func} what has another shape for other values of "
            f"{holding.name}, which other ranks do not have. {_REMEDY}"
        )

    def _refuse_draw(self, func: Any) -> NoReturn:
        raise UsageError(
            f"{user_line()}: {self._whose} draws random numbers in {func} that belong to no parameter, and "
            "runs over the parameters of all stages on all ranks, which would draw others. Draw them like a "
            f"parameter (torch.rand_like). {_REMEDY}"
        )

    def _refuse(self, func: Any, holdings: Sequence[Holding]) -> NoReturn:
        first = holdings[0]
        other = next(holding for holding in holdings if holding.ranks != first.ranks)
        raise UsageError(
            f"{user_line()}: {self._whose} brings together values of {first.name} (rank "
            f"{listed(sorted(first.ranks))}) and of {other.name} (rank {listed(sorted(other.ranks))}) in "
            f"{func}. Over the stages of a pipeline it can have numbers of all of them, such as norms, but "
            f"not whole tensors. {_REMEDY}"
        )


def _is_number(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and not tensor.is_complex()


def _common(holdings: Sequence[Holding]) -> frozenset[int]:
    """The ranks that have all of them."""
    if not holdings:
        return frozenset()
    first = holdings[0].ranks
    if all(holding.ranks == first for holding in holdings):
        return first
    return frozenset.intersection(*(holding.ranks for holding in holdings))
