"""Reduces gradients over replicas, and over stages that share a parameter.

Gradients are packed into buckets. The reduction of a bucket starts as soon as the batch's last backward has
filled it, and overlaps the rest of the backward. Buckets start in the same order on every rank::

    last backward   │ head │ block 5 │ block 4 │ ...
    bucket 0                 ░░░░░░░░ all-reduce
    bucket 1                           ░░░░░░░░ all-reduce

Parameters that no stage used when the plan was made (the head of another task) are *spare*: all ranks hold
them, and first find out which of them have gradients at all.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.placement import size_of_buckets
from shardwright.torch.backward.split_backward import notify_gradients
from shardwright.torch.replicas.bucket_order import BucketOrder
from shardwright.torch.replicas.gradient_buckets import (
    Bucket,
    BucketMaker,
    Reduced,
    ShardedBucket,
    SummedBucket,
)


class GradientReducer:
    """Reduces the gradients of one batch.

    Attributes:
        digest: of which members it has reduced in the last batch, and which were frozen.
    """

    def __init__(
        self,
        members: Sequence[Reduced],
        *,
        divisor: int,
        bucket_bytes: int = 25 * 2**20,
        sharded_bucket_bytes: int = 25 * 2**20,
        replica_group: dist.ProcessGroup | None = None,
        in_every_backward: bool = False,
        overlap: bool = True,
        make_bucket: BucketMaker | None = None,
        settles: bool = False,
    ):
        self._make_bucket = make_bucket
        self._settles = settles
        self._members = list(members)
        self._parameters = [member.parameter for member in members]
        self._trained: list[Reduced] = []
        self._apart: list[Reduced] = []  # not shared: of the others, earlier gradients are put away already
        self._divisor = divisor
        self._bucket_bytes = bucket_bytes
        self._sharded_bucket_bytes = sharded_bucket_bytes
        self._replica_group = replica_group
        self._wants_overlap = self._overlap = overlap
        self._signatures: list[tuple[bool, torch.dtype]] | None = None
        self.digest = 0
        self._in_every_backward = in_every_backward
        self._buckets: list[Bucket] = []
        self._order = BucketOrder(())
        self._orders_of_stages: dict[int, BucketOrder] = {}
        self._spare: list[Reduced] = []
        self._of_last_bucket: set[int] = set()
        self._by_stage: dict[int, list[Reduced]] = {}
        self._stages_left: dict[int, set[int]] = {}
        self._earlier: dict[int, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self, *, overlap: bool = True) -> None:
        """Prepares for a batch: puts aside what earlier ones left in the gradients."""
        self._overlap = self._wants_overlap and overlap
        signatures = [(p.requires_grad, p.dtype) for p in self._parameters]
        if signatures != self._signatures:
            self._signatures = signatures
            self.digest = crc32(bytes(is_trained for is_trained, _ in signatures))
            self._fill_buckets([member for member in self._members if member.parameter.requires_grad])
        for member in self._apart:
            gradient = member.parameter.grad
            if gradient is not None:
                self._earlier[id(member.parameter)] = gradient
                member.parameter.grad = None
        self._order.begin()
        self._stages_left = {id(m.parameter): set(m.stages) for each in self._buckets for m in each.members}

    @property
    def parameter_ids(self) -> set[int]:
        """The parameters whose gradients it reduces."""
        return {id(member.parameter) for member in self._trained}

    def abort(self) -> None:
        """Abandons a failed batch: gradients are those of earlier batches, plus part of this one."""
        self._remove_hooks()
        for bucket in self._buckets:
            bucket.abort()
        for member in self._apart:
            self._add_earlier(member.parameter)
        self._earlier.clear()

    def _fill_buckets(self, members: Sequence[Reduced]) -> None:
        """Says what is reduced together: parameters may have been frozen since, or set free."""
        self._spare = [member for member in members if member.spare]
        # The backward reaches the last parameters first.
        self._buckets = self._pack([m for m in reversed(members) if not m.spare])
        self._order = BucketOrder(self._buckets)
        self._trained = [*self._spare, *(member for bucket in self._buckets for member in bucket.members)]
        self._apart = [member for member in self._trained if member.sharded is None]
        last = self._buckets[-1].members if self._buckets else ()
        self._of_last_bucket = {id(member.parameter) for member in last}
        self._by_stage = {}
        for member in members:
            for stage in member.stages:
                self._by_stage.setdefault(stage, []).append(member)
        self._orders_of_stages = {}
        for stage in self._by_stage if self._in_every_backward else ():
            own = [bucket for bucket in self._buckets if _is_sharded_in(bucket, stage)]
            self._orders_of_stages[stage] = BucketOrder(own, is_last=False)

    def on_backward(self, stage: int, *, begins: bool, last: bool, whole: bool = True) -> None:
        """Called when a backward of a stage begins, and when it has ended."""
        if last:
            self._on_last_backward(stage, begins=begins)
        elif order := self._orders_of_stages.get(stage):
            if not begins:
                self._remove_hooks()
                order.start_rest()
            elif whole:
                order.begin()
                for member in self._by_stage[stage]:
                    if member.sharded is not None and not member.late:
                        self._watch(member, order)
            else:
                order.begin()

    def _on_last_backward(self, stage: int, *, begins: bool) -> None:
        if not self._overlap:
            return
        if begins:
            for member in self._by_stage.get(stage, ()):
                key = id(member.parameter)
                # The last bucket is full when the backward ends, which is seen without a hook.
                is_watched = not member.late and key not in self._of_last_bucket
                if is_watched and self._stages_left[key] == {stage}:
                    self._watch(member, self._order)
            notify_gradients(self._order.is_there)
            return
        self._remove_hooks()
        for member in self._by_stage.get(stage, ()):
            left = self._stages_left[id(member.parameter)]
            left.discard(stage)
            if not left:
                self._order.is_there(member.parameter)

    def _watch(self, member: Reduced, order: BucketOrder) -> None:
        register: Any = member.holder.register_post_accumulate_grad_hook
        self._hooks.append(register(lambda _: order.is_there(member.parameter)))

    def finish(self, *, loss_scale: float = 1.0) -> bool:
        """Reduces the rest, writes the sums into the gradients, and tells whether there were any."""
        self._order.start_rest()
        spare = self._pack(self._used_spare())
        for bucket in spare:
            bucket.start()
        for bucket in (*self._buckets, *spare):
            bucket.finish(self._divisor * loss_scale)
        found = any(member.has_gradient for member in self._trained)
        for member in self._apart if self._earlier else ():
            self._add_earlier(member.parameter)
        return found

    def _used_spare(self) -> list[Reduced]:
        """Those of the spare parameters that have a gradient on any rank."""
        if not self._spare:
            return []
        flags = torch.tensor([float(m.parameter.grad is not None) for m in self._spare])
        flags = flags.to(self._spare[0].parameter.device)
        if self._spare[0].group is not None:
            dist.all_reduce(flags, group=self._spare[0].group)
        return [member for member, flag in zip(self._spare, flags.tolist(), strict=True) if flag]

    def _remove_hooks(self) -> None:
        notify_gradients(None)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _pack(self, members: Sequence[Reduced]) -> list[Bucket]:
        """Buckets of one group, type and device each, in the order in which they can start."""
        packed: list[list[Reduced]] = []
        last: dict[int, int] = {}
        open_lists: dict[tuple[object, ...], list[Reduced]] = {}
        sizes: dict[int, int] = {}
        totals: Counter[tuple[object, ...]] = Counter()
        for member in members:
            totals[self._kind(member)] += member.num_bytes
        for position, member in enumerate(sorted(members, key=lambda m: m.late)):
            kind = self._kind(member)
            most = self._sharded_bucket_bytes if member.sharded is not None else self._bucket_bytes
            most = size_of_buckets(totals[kind], most=most)
            together = open_lists.get(kind)
            if together is None or sizes[id(together)] + member.num_bytes > most:
                together = open_lists[kind] = []
                sizes[id(together)] = 0
                packed.append(together)
            together.append(member)
            sizes[id(together)] += member.num_bytes
            last[id(together)] = position
        packed.sort(key=lambda together: last[id(together)])
        last_one = len(packed) - 1
        return [self._bucket(each, number, is_last=number == last_one) for number, each in enumerate(packed)]

    def _kind(self, member: Reduced) -> tuple[object, ...]:
        """The key that all members of a bucket share."""
        parameter, cut = member.parameter, member.sharded is not None
        stages = member.stages if cut and self._in_every_backward else None
        return cut, id(member.group), parameter.dtype, parameter.device, member.late, stages

    def _bucket(self, members: Sequence[Reduced], number: int, *, is_last: bool) -> Bucket:
        first, settles = members[0], self._settles
        if first.group is None:
            return Bucket(members, settles=settles)
        if first.sharded is not None:
            return ShardedBucket(members, first.group, self._replica_group, settles=settles)
        if self._make_bucket is None or first.late:
            return SummedBucket(members, first.group, settles=settles)
        return self._make_bucket(members, first.group, number, is_last)

    def _add_earlier(self, parameter: nn.Parameter) -> None:
        earlier = self._earlier.pop(id(parameter), None)
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


def _is_sharded_in(bucket: Bucket, stage: int) -> bool:
    """Whether it has the gradients of sharded parameters of this stage, of no others."""
    return not bucket.late and all(m.sharded is not None and m.stages == {stage} for m in bucket.members)


def refuse_gradient_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuses hooks that would see parts of a gradient, whose sum is known after the last backward alone."""
    for name, parameter in parameters.items():
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter.requires_grad and hooks:
            raise UsageError(
                f"the parameter {name} has a hook for its gradient, and is used by several stages, each of "
                "which would give the hook its own part of the gradient. Change gradients between the step "
                "function and optimizer.step(), where they are whole: for example with "
                "torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)."
            )


def refuse_accumulation_hooks(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Refuses hooks that would see the gradient that one replica has accumulated, of several.

    A hook for the gradient itself stays: it may mask rows of it, which is the same on parts.
    """
    for parameter in parameters:
        if getattr(parameter, "_post_accumulate_grad_hooks", None) and parameter.requires_grad:
            name = next(name for name, other in module.named_parameters() if other is parameter)
            raise UsageError(
                f"the parameter {name} has a hook for its accumulated gradient "
                "(register_post_accumulate_grad_hook), and there are several replicas: the hook would see "
                "that of its own replica, of this batch alone, before it is averaged. Do it between the "
                "step function and optimizer.step(), where gradients are whole: for example with "
                "torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)."
            )
