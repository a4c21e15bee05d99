"""Packs gradients into buckets, each reduced in one message."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.placement import ShardLayout
from shardwright.torch._private.tensors import flattened, unflattened
from shardwright.torch.parameters.parameter_kinds import gradient_dtype
from shardwright.torch.tensor_parallel.divide import divided_alike, settle_gradients
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of
from shardwright.torch.tensor_parallel.spec import Spec

if TYPE_CHECKING:
    from shardwright.comm.collectives.shardwright_process_group import TwoHopSum
    from shardwright.torch.sharding.sharded_parameter import ShardedParameter


@dataclass(frozen=True, slots=True)
class Reduced:
    """A parameter whose gradient is reduced over several ranks.

    Attributes:
        stages: stages of this rank that use it.
        group: the ranks that hold the same elements of it, in all replicas; None where only this one does,
            and others of its tensor-parallel group have other elements, or summands.
        late: reduced after the last backward: several stages, or several names, contribute to it.
        spare: no stage used it when the plan was made.
        sharded: where each rank keeps some rows of it: gets the sum of those.
    """

    parameter: nn.Parameter
    stages: frozenset[int]
    group: dist.ProcessGroup | None
    late: bool = False
    spare: bool = False
    sharded: "ShardedParameter | None" = None

    @property
    def holder(self) -> Tensor:
        """The tensor that gets the gradient of a batch."""
        return self.parameter if self.sharded is None else self.sharded.holder

    @property
    def num_bytes(self) -> int:
        """Of the whole parameter, or of a rank's share of a divided one: the same on all ranks that share it.

        They settle gradients bucket by bucket, so their buckets must be alike where their parts are not.
        """
        spec = self._spec
        return self.parameter.nbytes if spec is None else -(-self.parameter.nbytes // spec.group.num_ranks)

    @property
    def _spec(self) -> Spec | None:
        if self.sharded is not None:
            return self.sharded.spec
        return self.parameter._spec if isinstance(self.parameter, DividedTensor) else None

    @property
    def has_gradient(self) -> bool:
        """Whether the batch has given it one."""
        return self.holder.grad is not None or (
            self.sharded is not None and self.sharded.gradient is not None
        )


class Bucket:
    """Gradients that are reduced together; of this class, over no replicas.

    A parameter that a replica did not use has no gradient there; each bucket carries one flag a parameter, so
    that what nobody used keeps no gradient at all.

    Args:
        settles: adds up first what is pending over a tensor-parallel group.
    """

    def __init__(self, members: Sequence[Reduced], *, settles: bool = False):
        self.members = members
        self._settles = settles

    @property
    def late(self) -> bool:
        """Whether gradients come from elsewhere, too: it never starts by itself."""
        return self.members[0].late

    def start(self, *, is_last: bool = True) -> None:
        """Starts to reduce them."""
        if self._settles:
            settle_gradients(member.holder for member in self.members)

    def let_go(self) -> None:
        """Waits until it holds no more than it does at the end: most hold the same all along."""

    def finish(self, divisor: float) -> None:
        """Waits, and puts the sums, divided, where they belong."""
        for member in self.members if divisor != 1 else ():
            if member.holder.grad is not None:
                local_of(member.holder.grad).div_(divisor)

    def abort(self) -> None:
        """Forgets what was started: a batch has failed."""


BucketMaker = Callable[[Sequence[Reduced], dist.ProcessGroup, int, bool], Bucket]
"""Makes a bucket of whole gradients, given its number, and whether it is the last one."""


class SummedBucket(Bucket):
    """Every rank gets the sum of the whole gradients."""

    def __init__(self, members: Sequence[Reduced], group: dist.ProcessGroup, *, settles: bool = False):
        super().__init__(members, settles=settles)
        self._group = group
        self._buffer: Tensor | None = None
        self._work: dist.Work | None = None
        self._divided_by = 1

    def start(self, *, is_last: bool = True) -> None:
        """Starts to reduce them, once a batch; the gradients are let go, else all would be there twice."""
        assert is_last
        super().start()
        parts = [gradient_of(member) for member in self.members]
        first = parts[0]
        parts.append(torch.tensor(flags_of(self.members), dtype=first.dtype, device=first.device))
        self._buffer = flattened(parts)
        for member in self.members:
            member.parameter.grad = None
        self._divided_by = _divided_before(self._buffer.dtype, self._group)
        if self._divided_by != 1:
            self._buffer.div_(self._divided_by)
        self._work = dist.all_reduce(self._buffer, group=self._group, async_op=True)

    def abort(self) -> None:
        """Forgets what was started."""
        self._work = self._buffer = None

    def finish(self, divisor: float) -> None:
        """Waits, and puts the sums into the gradients."""
        work, buffer = self._work, self._buffer
        assert work is not None
        assert buffer is not None
        self._work = self._buffer = None
        work.wait()
        flags = buffer[-len(self.members) :].tolist()
        divisor /= self._divided_by
        if divisor != 1:
            buffer.div_(divisor)
        hand_out(buffer, self.members, flags)


class ShardedBucket(Bucket):
    """Every rank gets the sum of the rows that it keeps.

    Where gradients are reduced in every backward, replicas of the rows sum them once, in the last.
    """

    def __init__(
        self,
        members: Sequence[Reduced],
        shard_group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None,
        *,
        settles: bool = False,
    ):
        super().__init__(members, settles=settles)
        self._groups = shard_group, replica_group
        self._rank = dist.get_rank(shard_group)
        shapes = tuple(_part_shape(member) for member in members)
        self._layout = ShardLayout(shapes, dist.get_world_size(shard_group))
        self._divided_by = 1
        self._work: list[TwoHopSum] = []
        self._total: Tensor | None = None  # of what was started before, and summed

    def start(self, *, is_last: bool = True) -> None:
        """Starts to reduce them; the whole gradients are let go."""
        super().start()
        if self._work:
            self._total = self._settled()
        layout, first = self._layout, self.members[0].holder
        flags = torch.tensor(flags_of(self.members), dtype=gradient_dtype(first), device=first.device)
        data = flags.new_empty(layout.num_shards, layout.shard_size + len(flags))
        data[:, layout.shard_size :] = flags
        for index, member in enumerate(self.members):
            start, stop = layout.starts[index], layout.starts[index] + layout.piece_sizes[index]
            _cut(gradient_of(member), data[:, start:stop])
            member.holder.grad = None
        self._divided_by = _divided_before(data.dtype, *self._groups)
        if self._divided_by != 1:
            data.div_(self._divided_by)
        self._work = [self._sum(data, is_last)]
        self._total = None  # it is theirs, until they have added it

    def _sum(self, data: Tensor, is_last: bool) -> "TwoHopSum":
        """Starts to sum (shards, n)."""
        # Here, because few runs need it: it brings all collectives of hosts and devices along.
        from shardwright.comm.collectives.shardwright_process_group import TwoHopSum

        shard_group, replica_group = self._groups
        return TwoHopSum(
            data.reshape(-1),
            earlier=self._total,
            shard_group=shard_group,
            replica_group=replica_group if is_last else None,
        )

    def let_go(self) -> None:
        """Waits until the sums of the rows of this rank are all that is left of the gradients."""
        for work in self._work:
            work.wait_for_part()

    def abort(self) -> None:
        """Forgets what was started."""
        self._work = []
        self._total = None

    def finish(self, divisor: float) -> None:
        """Waits, and leaves each parameter the sum for its rows."""
        output, layout = self._settled(), self._layout
        self._total = None
        flags = output[layout.shard_size :].tolist()
        divisor /= self._divided_by
        if divisor != 1:
            output.div_(divisor)
        for index, (member, flag) in enumerate(zip(self.members, flags, strict=True)):
            assert member.sharded is not None
            if flag:
                shape = layout.piece_shape(index, self._rank)
                rows = output[layout.starts[index] :][: prod(shape)].view(shape)
                member.sharded.gradient = rows

    def _settled(self) -> Tensor:
        """Waits for the sum of what was started, and what came before: gradients, then flags."""
        sums = [work.wait() for work in self._work]
        self._work = []
        return sums[0] if len(sums) == 1 else torch.cat(sums)


def _divided_before(dtype: torch.dtype, *groups: dist.ProcessGroup | None) -> int:
    """The divisor of gradients before they are summed over all these groups.

    Scaled losses leave gradients close to 65504, where float16 ends: their mean fits, and no sum.
    """
    if dtype is not torch.float16:
        return 1
    return prod(dist.get_world_size(group) for group in groups if group is not None)


def _part_shape(member: Reduced) -> tuple[int, ...]:
    """Of all rows that the ranks of a shard group have together."""
    assert member.sharded is not None
    return member.sharded.part_shape


def flags_of(members: Sequence[Reduced]) -> list[float]:
    return [0.0 if member.holder.grad is None else 1.0 for member in members]


def gradient_of(member: Reduced) -> Tensor:
    holder = member.holder
    if type(holder.grad) is Tensor and holder.grad.layout is torch.strided:
        return holder.grad.detach()
    gradient = None if holder.grad is None else local_of(holder.grad)
    if gradient is None:
        gradient = torch.zeros_like(local_of(holder), dtype=gradient_dtype(holder))
    if gradient.layout is not torch.strided:
        raise UsageError(
            f"the gradient of a parameter of shape {tuple(holder.shape)} is sparse, and only "
            "dense ones can be summed over replicas and stages. Build its embedding with sparse=False."
        )
    return gradient.detach()


def _cut(gradient: Tensor, pieces: Tensor) -> None:
    """Copies the rows of a gradient to where the pieces go: (shards, elements of a piece)."""
    num_shards, size = pieces.shape
    if gradient.numel() == num_shards * size:
        pieces.copy_(gradient.reshape(num_shards, size))
        return
    flat = gradient.reshape(-1)
    for piece, rows in zip(pieces, torch.split(flat, size), strict=False):
        piece[: rows.numel()] = rows
        piece[rows.numel() :] = 0
    pieces[-(-flat.numel() // size) :] = 0


def hand_out(totals: Tensor, members: Sequence[Reduced], flags: Sequence[float]) -> None:
    """Puts sums into the gradients."""
    owns = [local_of(member.parameter) for member in members]
    for member, own, total, flag in zip(members, owns, unflattened(totals, owns), flags, strict=True):
        if flag:
            parameter = member.parameter
            if not own.is_contiguous():  # a gradient lies in memory as its parameter does
                total = torch.empty_like(own, dtype=total.dtype).copy_(total)
            parameter.grad = (
                divided_alike(total, parameter) if isinstance(parameter, DividedTensor) else total
            )
