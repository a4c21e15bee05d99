"""The ranks that train on different data: those of a script, or the replicas of a pipeline.

::

    smdistributed.dataparallel or Horovod alone     all ranks of the job
    beside smp.init or shardwright's init           the ranks with this one's layers, one in each replica
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.joining.process_group import tell_all
from shardwright.comm.launchers import detect
from shardwright.comm.transport import sums_over
from shardwright.errors import UsageError
from shardwright.run.context import context, is_initialized


@dataclass(frozen=True, slots=True)
class DataRanks:
    """Ranks with different data.

    Attributes:
        local_rank: this rank on its host, from 0.
        group: for collectives; None where this rank is alone.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    world_ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    def sums(self, tensors: list[Tensor], *, divisor: int = 1) -> list[Tensor]:
        """The sums over all ranks, in memory of their own; collective. Whole numbers round towards 0."""
        if divisor != 1 and not all(map(_is_divisible, tensors)):
            whole = iter(self.sums([each for each in tensors if not _is_divisible(each)]))
            others = iter(self.sums([each for each in tensors if _is_divisible(each)], divisor=divisor))
            return [
                next(others) if _is_divisible(each) else next(whole).div(divisor, rounding_mode="trunc")
                for each in tensors
            ]
        if self.size == 1:
            return [tensor / divisor if divisor != 1 else tensor.clone() for tensor in tensors]
        return sums_over(self.group, tensors, divisor=divisor)

    def extreme(self, tensor: Tensor, *, largest: bool) -> Tensor:
        """The largest or smallest entries over all ranks, element by element; collective."""
        return self._reduced(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN)

    def product(self, tensor: Tensor) -> Tensor:
        """The products of the entries of all ranks, element by element; collective."""
        return self._reduced(tensor, dist.ReduceOp.PRODUCT)

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        found = tensor.clone()
        if self.size > 1:
            dist.all_reduce(found, op=operation, group=self.group)
        return found

    def broadcast(self, tensors: list[Tensor], root: int) -> list[Tensor]:
        """The tensors of one rank, on all; collective."""
        if not 0 <= root < self.size:
            raise UsageError(f"root rank {root} does not exist: there are {self.size} ranks, from 0.")
        found = [tensor.clone() for tensor in tensors]
        if self.size > 1:
            works = [
                dist.broadcast(tensor, self.world_ranks[root], group=self.group, async_op=True)
                for tensor in found
            ]
            for work in works:
                if work is not None:
                    work.wait()
        return found

    def gathered(self, tensor: Tensor) -> Tensor:
        """The rows of all ranks, by rank; collective. Ranks may have different numbers of rows."""
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        if self.size == 1:
            return rows.clone()
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = len(rows)
        (counts,) = self.sums([counts])
        most = int(counts.max())
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)])

    def own_rows(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The sum over all ranks of a tensor shaped as by `gathered`, and of it this rank's rows; collective.

        Args:
            shape: what this rank gave to `gathered`.
        """
        count = shape[0] if len(shape) else 1
        before = int(self.gathered(torch.tensor(count))[: self.rank].sum())
        (total,) = self.sums([tensor])
        return total[before : before + count].reshape(tuple(shape))

    def sum_at(self, tensor: Tensor, root: int) -> Tensor:
        """The sum over all ranks at one of them, and zeros elsewhere; collective."""
        (total,) = self.sums([tensor])
        return total if self.rank == root else total.zero_()

    def objects(self, value: Any) -> list[Any]:
        """The objects of all ranks, by rank, of kinds that `codec` takes; collective."""
        return tell_all(value, group=self.group, objects=True) if self.size > 1 else [value]


def _is_divisible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Joined:
    ranks: DataRanks | None = None


def have_joined() -> bool:
    """Whether `data_ranks` gives an answer."""
    return is_initialized() or _Joined.ranks is not None


def join() -> None:
    """Joins all ranks that the launcher has started; nothing happens beside a run that has joined them.

    Raises:
        LaunchError: variables of the launcher contradict each other, or the ranks could not meet.
    """
    if have_joined():
        return
    from smdistributed.dataparallel.torch.torch_smddp import BACKEND  # registers it

    environment = detect(os.environ)
    if environment.world_size > 1 and not dist.is_initialized():
        dist.init_process_group(BACKEND)
    _Joined.ranks = DataRanks(
        rank=environment.rank,
        size=environment.world_size,
        local_rank=environment.local_rank,
        local_size=environment.local_world_size,
        world_ranks=tuple(range(environment.world_size)),
        group=dist.group.WORLD if environment.world_size > 1 else None,
    )


def leave() -> None:
    """Forgets the ranks, so that `join` may be called again."""
    if _Joined.ranks is not None and dist.is_initialized():
        dist.destroy_process_group()
    _Joined.ranks = None


def data_ranks() -> DataRanks:
    """The ranks with different data."""
    if is_initialized():
        run = context()
        return DataRanks(
            rank=run.data_rank,
            size=run.mesh.data,
            local_rank=run.local_rank,
            local_size=run.local_size,
            world_ranks=run.holders,
            group=run.groups.data,
        )
    if _Joined.ranks is None:
        raise UsageError("the ranks have not joined. Call init() of this library first, once on every rank.")
    return _Joined.ranks


# ---- what every interface has under these names ----


def rank() -> int:
    """This rank, from 0; beside ``smp.init`` among the replicas."""
    return data_ranks().rank


def size() -> int:
    """Number of ranks; beside ``smp.init`` of replicas."""
    return data_ranks().size


def local_rank() -> int:
    """This rank on its host, from 0."""
    return data_ranks().local_rank


def local_size() -> int:
    """Ranks on this host."""
    return data_ranks().local_size
