"""The ranks that share tensors; pending sums taken once, and the last gathers kept.

The gradient of a linear layer's output is used twice, under two views: for the weight, and for the input.
Both need its sum over the ranks. So the sum of a whole stretch of memory is kept as long as that lives, until
someone writes there.

Where tensors between units are cut along the sequence, queries, keys and values of a layer each need all of
one norm's result, and so do their weights' gradients, one after the other. Two tensors are kept, so that
memory stays as small as the cut made it.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm._private import all_gather_single
from shardwright.placement import BetweenUnits, Cut, Placement, Whole
from shardwright.torch._private.tensors import StorageWeakRef, memory_of
from shardwright.torch.tensor_parallel.spec import Transfer, transfer


class _PendingSums:
    """The sums already taken of one rank's partial sums."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[StorageWeakRef, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def knows(self, local: Tensor) -> bool:
        """Whether the sum of this partial sum was taken, and still holds."""
        kept = self._kept.get(memory_of(local))
        if kept is None or local.numel() != kept[1].numel() or local.dtype != kept[1].dtype:
            return False
        return not _is_gone(kept[0])

    def known(self, local: Tensor) -> Tensor | None:
        """The sum over the ranks of a partial sum, if it was taken, and still holds."""
        return _as(self._kept[memory_of(local)][1], local) if self.knows(local) else None

    def total(self, local: Tensor, summed: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum over the ranks of a partial sum."""
        storage = local.untyped_storage()
        if local.numel() * local.element_size() != storage.nbytes() or not local.numel():
            return summed(local)
        known = self.known(local)
        if known is not None:
            return known
        self.forget_dead()
        total = summed(local.as_strided((local.numel(),), (1,), 0))
        self._kept[memory_of(local)] = StorageWeakRef(storage), total  # type: ignore[no-untyped-call]
        return _as(total, local)

    def written(self, memory: int) -> None:
        """Forgets the sum of memory that was written."""
        self._kept.pop(memory, None)

    def forget_dead(self) -> None:
        """Lets go of the sums whose summands are gone."""
        for memory in [memory for memory, (storage, _) in self._kept.items() if _is_gone(storage)]:
            del self._kept[memory]


def _as(total: Tensor, local: Tensor) -> Tensor:
    return total.as_strided(local.shape, local.stride(), local.storage_offset())


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


MOST_KEPT = 2


class _RecentGathers:
    """Whole tensors by this rank's parts. They must not be written to."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], tuple[StorageWeakRef, Tensor]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def knows(self, local: Tensor, spec: Any) -> bool:
        """Whether a tensor is at hand, or its transpose."""
        kept = self._kept.get(_key(local, spec))
        return kept is not None and not kept[0].expired()  # type: ignore[no-untyped-call]

    def whole(self, local: Tensor, spec: Any, gather: Callable[[], Tensor]) -> Tensor:
        """All elements of a tensor."""
        key, order = _key(local, spec), order_of(spec.shape, spec.strides)
        if not self.knows(local, spec):
            made = gather().permute(order)
            self._kept[key] = StorageWeakRef(_own(local).untyped_storage()), made  # type: ignore[no-untyped-call]
        self._kept.move_to_end(key)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return self._kept[key][1].permute([order.index(dim) for dim in range(len(order))])

    def written(self, memory: int) -> None:
        """Forgets what was gathered from memory that was written."""
        for key in [key for key in self._kept if key[0] == memory]:
            del self._kept[key]

    def clear(self) -> None:
        self._kept.clear()


def order_of(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions from the widest stride to the narrowest: the same for a tensor and its transpose."""
    return sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim]))


def _own(local: Tensor) -> Tensor:
    """What this rank has of a part that other ranks share, too."""
    return getattr(local, "_local", local)


def _key(local: Tensor, spec: Any) -> tuple[Any, ...]:
    order, own = order_of(spec.shape, spec.strides), _own(local)
    sizes = tuple([(spec.shape[dim], spec.strides[dim], own.stride(dim)) for dim in order])
    cut, inside = spec.placement, getattr(local, "_spec", None)
    return memory_of(own), own.storage_offset(), sizes, order.index(cut.dim), cut.runs, inside


Decide = Callable[..., Any]

# A script with ever new shapes or scalars must not fill the memory; deciding anew takes a millisecond.
_MAX_DECISIONS = 100_000


class Collectives(Protocol):
    """What a group needs of the ranks' connections. All tensors are contiguous."""

    rank: int
    num_ranks: int

    def all_reduce(self, data: Tensor, operation: Literal["sum", "max", "min"]) -> None:
        """Puts the reduction over all ranks into the tensor."""

    def all_gather(self, output: Tensor, data: Tensor) -> None:
        """Fills the output with the n elements of each rank, rank by rank."""

    def all_to_all(self, output: Tensor, data: Tensor, receives: Sequence[int], sends: Sequence[int]) -> None:
        """Sends so many elements to each rank, in order, and receives so many of each, in order."""


class ProcessGroupCollectives:
    """Collectives of a group of `torch.distributed`."""

    def __init__(self, process_group: dist.ProcessGroup | None = None):
        """Args: process_group: by default the one of all ranks."""
        self._group = process_group
        self.rank = dist.get_rank(process_group)
        self.num_ranks = dist.get_world_size(process_group)

    def all_reduce(self, data: Tensor, operation: Literal["sum", "max", "min"]) -> None:
        dist.all_reduce(data, getattr(dist.ReduceOp, operation.upper()), group=self._group)

    def all_gather(self, output: Tensor, data: Tensor) -> None:
        all_gather_single(output, data, group=self._group)

    def all_to_all(self, output: Tensor, data: Tensor, receives: Sequence[int], sends: Sequence[int]) -> None:
        dist.all_to_all_single(output, data, list(receives), list(sends), group=self._group)


@dataclass(frozen=True, slots=True)
class Prices:
    """What the choice between placements is made with; the same on all ranks.

    Attributes:
        sums_wait: what is left as a partial sum is most likely the gradient of a whole parameter, whose sum
            is taken once a step in any case.
    """

    latency_s: float = 20e-6
    bandwidth_Bps: float = 2e9
    flops_per_s: float = 50e9
    memory_Bps: float = 10e9
    sums_wait: bool = False


@dataclass(slots=True)
class Traffic:
    """What this rank has sent."""

    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)

    def count(self, one: Transfer, itemsize: int) -> None:
        """Adds one change of placement."""
        if one.collective is not None:
            self.calls[one.collective] += 1
            self.sent_bytes[one.collective] += one.num_elements * itemsize

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.calls + other.calls, self.sent_bytes + other.sent_bytes)


class TensorGroup:
    """The ranks of a tensor-parallel group, as one of them sees it.

    Attributes:
        computed_whole: how often an operation had no rule for its divided inputs, so that every rank did it
            all, by its name.
        cuts: of embedding tables, by their rows, and of tensors that were sliced, by shape and dimension.
            Their gradients come out cut alike.
        between: where tensors between units are; None where all are whole. Where they are cut, parameters are
            gathered as a last resort, and sums go to where tensors are cut.
        gathers: the last ones, where tensors between units are cut; None: nothing is kept.
        is_alone: the other ranks are not there: a search, or a dry run.
        routes_tokens: some module of theirs calls experts of a list; see `nested_decision.py`.
        writes: of memory that copied views stand for: how many views, how many writes (`placing.py`).
        inner: the ranks that share each rank's parts in turn (`nesting.py`); None where each part is one
            rank's own.
        is_inner: it is the inner group of another one.
        experts: these ranks with those of their inner groups, where all of them have different experts.
        grid: the group whose `experts` these ranks are. What they compute with is shared as in that.
        column: of the ranks with experts, those that exchange tokens with this one: in the order of the grid,
            the ranks that have its place in their inner groups.
    """

    def __init__(self, collectives: Collectives, decide: Decide, *, prices: Prices | None = None):
        self.rank = collectives.rank
        self.num_ranks = collectives.num_ranks
        self.collectives = collectives
        self._decide = decide
        self.prices = prices or Prices()
        self.traffic = Traffic()
        self.computed_whole: Counter[str] = Counter()
        self.decisions: dict[tuple[Any, ...], Any] = {}
        self.specs: dict[tuple[Any, ...], Any] = {}
        self.cuts: MutableMapping[tuple[Any, ...], Cut] = {}
        self.writes: dict[int, list[int]] = {}
        self.sums = _PendingSums()
        self.between: BetweenUnits | None = None
        self.gathers: _RecentGathers | None = None
        self.lasting: set[int] = set()
        self.is_alone = False
        self.routes_tokens = False
        self.inner: TensorGroup | None = None
        self.is_inner = False
        self.experts: TensorGroup | None = None
        self.grid: TensorGroup | None = None
        self.column: Sequence[int] = range(self.num_ranks)

    def holds(self, inner: "TensorGroup") -> None:
        """Has each part be shared in turn: the ranks of a grid, this group along one axis of it."""
        self.inner, inner.is_inner = inner, True

    def share_experts(self, experts: "TensorGroup", column: Sequence[int]) -> None:
        """Has all ranks of the grid share experts."""
        self.experts, experts.grid, experts.column = experts, self, column

    def of_parameter(self, *, is_of_expert: bool) -> "TensorGroup":
        return (self.experts if is_of_expert else self.inner) or self

    def route_tokens(self) -> None:
        """Has operations be decided as `nested_decision.py` says, from now on."""
        for each in (self, self.grid, self.grid and self.grid.inner):
            if each is not None:
                each.routes_tokens = True

    def shares(self, between: BetweenUnits) -> None:
        if between.cuts:
            self.between = between
            self.gathers = self.gathers or _RecentGathers()

    def forget_gathered(self) -> None:
        for group in (self, self.inner):
            if group is not None and group.gathers is not None:
                group.gathers.clear()

    def compared(self, texts: Sequence[str], device: torch.device) -> list[int]:
        """For each text 0 if all ranks have the same; else a number that stands for those of all ranks.

        Collective, and none of a step's traffic. A rank that is alone takes the others for like itself.
        """
        if self.is_alone:
            return [0] * len(texts)
        own = torch.tensor([crc32(text.encode()) for text in texts], dtype=torch.int64, device=device)
        all_of_them = own.new_empty(self.num_ranks * len(texts))
        self.collectives.all_gather(all_of_them, own)
        columns = all_of_them.view(self.num_ranks, len(texts)).t().tolist()
        return [0 if len(set(each)) == 1 else 1 + crc32(repr(each).encode()) for each in columns]

    def decide(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any) -> Any:
        """Decides how an operation runs, and keeps the decision under the key."""
        if len(self.decisions) >= _MAX_DECISIONS:
            self.decisions.clear()
        decision = self._decide(self, func, args, kwargs)
        if getattr(decision, "lasts", True):
            self.decisions[key] = decision
        return decision

    def transfer(self, shape: Sequence[int], source: Placement, target: Placement) -> Transfer:
        """What this rank sends when a tensor changes its placement."""
        return transfer(shape, source, target, rank=self.rank, num_ranks=self.num_ranks)

    def time_s(self, shape: Sequence[int], itemsize: int, source: Placement, target: Placement) -> float:
        """Estimated seconds of a change of placement: those of the busiest rank, so that all ranks agree."""
        if source == target or isinstance(source, Whole):
            return 0.0
        each = [
            transfer(shape, source, target, rank=rank, num_ranks=self.num_ranks)
            for rank in range(self.num_ranks)
        ]
        if each[0].collective is None:
            return 0.0
        sent = max(one.num_elements for one in each) * itemsize
        return self.prices.latency_s + sent / self.prices.bandwidth_Bps

    def reduce(self, data: Tensor, operation: Literal["sum", "max", "min"] = "sum") -> Tensor:
        """The sum, maximum or minimum over all ranks; the input may be overwritten."""
        if self.num_ranks == 1:
            return data
        if getattr(data, "_spec", None) is not None:  # a part that other ranks share
            data = data.gathered()  # type: ignore[attr-defined]
        elements = 2 * (self.num_ranks - 1) * data.numel() // self.num_ranks
        self.traffic.count(Transfer("all_reduce", elements), data.element_size())
        data = data.contiguous()
        self.collectives.all_reduce(torch.view_as_real(data) if data.is_complex() else data, operation)
        return data
