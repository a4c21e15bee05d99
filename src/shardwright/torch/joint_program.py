"""Runs one program over tensors that several ranks hold: numbers come from the rank that has them.

It follows every operation, and knows of each tensor which ranks have its values:

- what is computed from tensors of a rank is that rank's; what is computed from none of them, everybody's;
- a number that the program reads, or that meets what another rank holds, is told to all ranks;
- whole tensors of several ranks cannot meet in one operation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.comm.purpose import Purpose
from shardwright.errors import UsageError
from shardwright.torch._private import weak_storage
from shardwright.torch.context import Context
from shardwright.torch.operator_schema import (
    map_arguments,
    one_by_one,
    takes_several,
    tensors_in,
    written_tensors,
)
from shardwright.torch.remote import RemoteTensor, without_values
from shardwright.torch.source_line import user_line
from shardwright.torch.tree import leaves, map_tree

__all__ = ["Holding", "JointProgram"]

_REMEDY = (
    "Train by replicas alone (pipeline_parallel_degree 1; with sharded_data_parallel_degree they share the "
    "memory), or with another optimizer."
)


@dataclass(frozen=True, slots=True)
class Holding:
    """Who has the values of a tensor.

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
        self._held: dict[Any, Holding] = {}  # by `weak_storage`

    def holds(self, tensors: Sequence[Tensor | None], holding: Holding) -> None:
        """Takes note of who has tensors that are here."""
        for tensor in tensors:
            if tensor is not None and (key := weak_storage(tensor)) is not None:
                self._held[key] = holding

    def has_values(self, tensor: Tensor) -> bool:
        """Whether this rank has the values of a tensor."""
        holding = self._holding(tensor)
        return holding is None or self._context.rank in holding.ranks

    def forget(self) -> None:
        """Lets go of what it knows of tensors that are no more."""
        self._held = {key: holding for key, holding in self._held.items() if not key.expired()}

    def numbers_in(self, tree: Any) -> Any:
        """The same, with the values of all numbers that one rank has; collective over the replica."""
        items = [item for item in leaves(tree) if self._is_number_of_a_rank(item)]
        values = self._values(items, "a number of a group") if items else {}
        return map_tree(lambda item: values.get(id(item), item), tree)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if takes_several(func):
            return one_by_one(lambda *own, **options: self._run(func, own, options), args, kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs, holdings = self._brought_together(func, args, kwargs)
        if not holdings:
            return func(*args, **kwargs)
        ranks = _common(holdings)
        holding = Holding(holdings[0].name, ranks)
        is_here = self._context.rank in ranks
        if torch.Tag.data_dependent_output in func.tags:
            return self._told(func(*args, **kwargs) if is_here else None, holding, func)
        if torch.Tag.dynamic_output_shape in func.tags:
            self._refuse_shape(func, holding)
        written = written_tensors(func, args, kwargs)
        self.holds([item for item in written if not isinstance(item, RemoteTensor)], holding)
        if not is_here:
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("meta")
            return without_values(func, args, kwargs, name=holding.name, holders=sorted(ranks))
        result = func(*args, **kwargs)
        self.holds(tensors_in((result,)), holding)
        return result

    def _brought_together(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Holding]]:
        """The arguments, with the values of numbers where tensors of several ranks meet, and who has them."""
        tensors = tensors_in((*args, *kwargs.values()))
        holdings = [self._holding(tensor) for tensor in tensors]
        of_ranks = [holding for holding in holdings if holding is not None]
        if len(of_ranks) == len(tensors) < 2:
            return args, kwargs, of_ranks
        written = {id(tensor) for tensor in written_tensors(func, args, kwargs)}
        meet = not _common(of_ranks)
        # What everybody has stays everybody's when a number is added to it.
        everybodys = any(h is None and id(t) in written for t, h in zip(tensors, holdings, strict=True))
        if of_ranks and (meet or everybodys):
            numbers = [t for t in tensors if self._is_number_of_a_rank(t) and id(t) not in written]
            values = self._values(numbers, str(func)) if numbers else {}
            args, kwargs = map_arguments(lambda tensor: values.get(id(tensor), tensor), args, kwargs)
            of_ranks = [
                holding
                for tensor in tensors
                if id(tensor) not in values and (holding := self._holding(tensor)) is not None
            ]
        if of_ranks and not _common(of_ranks):
            self._refuse(func, of_ranks)
        return args, kwargs, of_ranks

    def _holding(self, tensor: Tensor) -> Holding | None:
        if isinstance(tensor, RemoteTensor):
            return Holding(tensor.first_name, frozenset(tensor.holders))
        key = weak_storage(tensor)
        return None if key is None else self._held.get(key)

    def _is_number_of_a_rank(self, item: Any) -> bool:
        return isinstance(item, Tensor) and item.dim() == 0 and self._holding(item) is not None

    def _values(self, numbers: Sequence[Tensor], what: str) -> dict[int, Tensor]:
        """The values of numbers by their id, each from its first rank; collective over the replica."""
        distinct = list({id(number): number for number in numbers}.values())
        holdings = [self._holding(number) for number in distinct]
        sources = [min(holding.ranks) for holding in holdings if holding is not None]
        zero = torch.zeros((), dtype=torch.float64, device=self._context.device)
        mine = [
            number.detach().double() if source == self._context.rank else zero
            for number, source in zip(distinct, sources, strict=True)
        ]
        rows = self._gathered(torch.stack(mine), sources, what)
        return {
            id(number): rows[self._place(source), number_in_row].to(number.dtype)
            for number_in_row, (number, source) in enumerate(zip(distinct, sources, strict=True))
        }

    def _told(self, value: Any, holding: Holding, func: Any) -> Any:
        """A number that the program reads, on all ranks."""
        source = min(holding.ranks)
        kinds: list[type] = [bool, int, float]
        own = [0.0, 0.0] if value is None else [float(value), float(kinds.index(type(value)))]
        row = torch.tensor(own, dtype=torch.float64, device=self._context.device)
        told, kind = self._gathered(row, [source], str(func))[
            self._context.pipeline_ranks.index(source)
        ].tolist()
        return kinds[int(kind)](told)

    def _place(self, rank: int) -> int:
        return self._context.pipeline_ranks.index(rank)

    def _gathered(self, row: Tensor, sources: Sequence[int], what: str) -> Tensor:
        """Rows of all ranks of the replica: (ranks, numbers).

        Raises:
            UsageError: ranks are at different places of the program.
        """
        assert self._context.replica is not None
        place = float(crc32(f"{what} {sources}".encode()))
        with_place = torch.cat([row, row.new_tensor([place])])
        rows = self._context.replica.gather(with_place, Purpose.UPDATE)
        if any(other != place for other in rows[:, -1].tolist()):
            raise UsageError(
                f"{user_line()}: ranks compute different things in {self._whose}, which runs over the "
                "parameters of all stages on all ranks. It must not ask which rank it is on, nor draw "
                "random numbers to decide what it does."
            )
        return rows[:, :-1]

    def _refuse_shape(self, func: Any, holding: Holding) -> NoReturn:
        raise UsageError(
            f"{user_line()}: {self._whose} computes in {func} what has another shape for other values of "
            f"{holding.name}, which other ranks do not have. {_REMEDY}"
        )

    def _refuse(self, func: Any, holdings: Sequence[Holding]) -> NoReturn:
        first = holdings[0]
        other = next(h for h in holdings if not h.ranks & first.ranks)
        raise UsageError(
            f"{user_line()}: {self._whose} brings together values of {first.name} (rank "
            f"{min(first.ranks)}) and of {other.name} (rank {min(other.ranks)}) in {func}. Over the stages "
            "of a pipeline it can have numbers of all of them, such as norms, but not whole tensors. "
            f"{_REMEDY}"
        )


def _common(holdings: Sequence[Holding]) -> frozenset[int]:
    """The ranks that have all of them."""
    if not holdings:
        return frozenset()
    first = holdings[0].ranks
    if all(holding.ranks == first for holding in holdings):
        return first
    return frozenset.intersection(*(holding.ranks for holding in holdings))
