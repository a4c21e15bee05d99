"""Sums gradients over replicas, and over stages that hold the same parameter.

Gradients are packed into buckets. A bucket is reduced as soon as the last backward of the batch has filled
it, while the rest of the backward goes on; buckets start in the same order on every rank::

    last backward   │ head │ block 5 │ block 4 │ ...
    bucket 0                 ░░░░░░░░ all-reduce
    bucket 1                           ░░░░░░░░ all-reduce

A parameter that a replica did not use has no gradient there; each bucket carries one flag a parameter, so
that what nobody used keeps no gradient at all. Parameters that no stage used when the plan was made (the head
of another task) are *spare*: all ranks hold them, and find out first which of them have gradients at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch.split_backward import notify_gradients

__all__ = ["GradientReducer", "Reduced", "refuse_accumulation_hooks", "refuse_gradient_hooks"]


@dataclass(frozen=True, slots=True)
class Reduced:
    """A parameter whose gradient is summed over several ranks.

    Attributes:
        parameter: the parameter.
        stages: stages of this rank that use it.
        group: the ranks that hold it, in all replicas.
        late: reduced after the last backward: several stages, or several names, contribute to it.
        spare: no stage used it when the plan was made.
    """

    parameter: nn.Parameter
    stages: frozenset[int]
    group: dist.ProcessGroup
    late: bool = False
    spare: bool = False

    @property
    def signature(self) -> tuple[bool, torch.dtype]:
        """What decides whether it is reduced, and with which others."""
        return self.parameter.requires_grad, self.parameter.dtype


@dataclass(slots=True)
class _Bucket:
    members: list[Reduced]
    group: dist.ProcessGroup
    late: bool
    missing: int = 0
    buffer: Tensor | None = None
    work: dist.Work | None = None


class GradientReducer:
    """Reduces the gradients of one batch.

    Args:
        members: what is reduced while it is trained, in order of registration.
        divisor: gradients are divided by this: the number of replicas.
        bucket_bytes: most bytes in a bucket.
        overlap: reduce during the last backward; else after it.
    """

    def __init__(
        self,
        members: Sequence[Reduced],
        *,
        divisor: int,
        bucket_bytes: int = 25 * 2**20,
        overlap: bool = True,
    ):
        self._members = list(members)
        self._divisor = divisor
        self._bucket_bytes = bucket_bytes
        self._wants_overlap = self._overlap = overlap
        self._signatures: list[tuple[bool, torch.dtype]] | None = None
        self._buckets: list[_Bucket] = []
        self._spare: list[Reduced] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._by_stage: dict[int, list[Reduced]] = {}
        self._stages_left: dict[int, set[int]] = {}
        self._ready: set[int] = set()
        self._earlier: dict[int, Tensor] = {}
        self._next = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self, *, overlap: bool = True) -> None:
        """Prepares for a batch: puts aside what earlier ones left in the gradients, which is summed already.

        Args:
            overlap: parameters are used by the stages that were named; else all wait for the end.
        """
        self._overlap = self._wants_overlap and overlap
        signatures = [member.signature for member in self._members]
        if signatures != self._signatures:
            self._signatures = signatures
            self._fill_buckets([member for member in self._members if member.parameter.requires_grad])
        for member in self._trained:
            gradient = member.parameter.grad
            if gradient is not None:
                self._earlier[id(member.parameter)] = gradient
                member.parameter.grad = None
        self._reset()

    def abort(self) -> None:
        """Leaves a batch that failed: gradients are those of earlier batches, and what this one added."""
        self._remove_hooks()
        for member in self._trained:
            self._add_earlier(member.parameter)
        self._earlier.clear()

    @property
    def _trained(self) -> list[Reduced]:
        return [*self._spare, *(member for bucket in self._buckets for member in bucket.members)]

    def _fill_buckets(self, members: Sequence[Reduced]) -> None:
        """Says what is reduced together: parameters may have been frozen since, or set free."""
        self._spare = [member for member in members if member.spare]
        # The backward reaches the last parameters first.
        self._buckets = _pack([m for m in reversed(members) if not m.spare], self._bucket_bytes)
        self._bucket_of = {id(m.parameter): bucket for bucket in self._buckets for m in bucket.members}
        self._by_stage = {}
        for member in members:
            for stage in member.stages:
                self._by_stage.setdefault(stage, []).append(member)

    def _reset(self) -> None:
        self._next = 0
        self._ready.clear()
        self._stages_left = {id(m.parameter): set(m.stages) for b in self._buckets for m in b.members}
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)
            bucket.buffer = bucket.work = None

    def last_backward(self, stage: int, begins: bool) -> None:
        """Called when the last backward of a stage begins, and when it has ended."""
        if not self._overlap:
            return
        if begins:
            for member in self._by_stage.get(stage, ()):
                if not member.late and self._stages_left[id(member.parameter)] == {stage}:
                    register: Any = member.parameter.register_post_accumulate_grad_hook
                    self._hooks.append(register(self._mark_ready))
            notify_gradients(self._mark_ready)
            return
        self._remove_hooks()
        for member in self._by_stage.get(stage, ()):
            left = self._stages_left[id(member.parameter)]
            left.discard(stage)
            if not left:
                self._mark_ready(member.parameter)

    def finish(self) -> bool:
        """Reduces what is left, puts the sums into the gradients, and tells whether there were any."""
        for bucket in self._buckets:
            if bucket.work is None:
                self._start(bucket)
        spare = _pack(self._used_spare(), self._bucket_bytes)
        for bucket in spare:
            self._start(bucket)
        for bucket in (*self._buckets, *spare):
            assert bucket.work is not None
            bucket.work.wait()
            self._unpack(bucket)
        found = any(member.parameter.grad is not None for member in self._trained)
        for member in self._trained:
            self._add_earlier(member.parameter)
        return found

    def _used_spare(self) -> list[Reduced]:
        """Those of the spare parameters that have a gradient on any rank."""
        if not self._spare:
            return []
        flags = torch.tensor([float(m.parameter.grad is not None) for m in self._spare])
        flags = flags.to(self._spare[0].parameter.device)
        dist.all_reduce(flags, group=self._spare[0].group)
        return [member for member, flag in zip(self._spare, flags.tolist(), strict=True) if flag]

    def _remove_hooks(self) -> None:
        notify_gradients(None)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _mark_ready(self, parameter: Tensor) -> None:
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None or id(parameter) in self._ready:
            return
        self._ready.add(id(parameter))
        bucket.missing -= 1
        while self._next < len(self._buckets):
            upcoming = self._buckets[self._next]
            if upcoming.missing or upcoming.late:
                break
            self._start(upcoming)
            self._next += 1

    def _start(self, bucket: _Bucket) -> None:
        parts: list[Tensor] = []
        flags = []
        for member in bucket.members:
            parameter = member.parameter
            flags.append(0.0 if parameter.grad is None else 1.0)
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if gradient.layout is not torch.strided:
                raise UsageError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and only "
                    "dense ones can be summed over replicas and stages. Build its embedding with "
                    "sparse=False."
                )
            parts.append(gradient.reshape(-1))
        first = parts[0]
        parts.append(torch.tensor(flags, dtype=first.dtype, device=first.device))
        bucket.buffer = torch.cat(parts)
        bucket.work = dist.all_reduce(bucket.buffer, group=bucket.group, async_op=True)

    def _unpack(self, bucket: _Bucket) -> None:
        buffer = bucket.buffer
        assert buffer is not None
        flags = buffer[-len(bucket.members) :].tolist()
        if self._divisor != 1:
            buffer.div_(self._divisor)
        offset = 0
        for member, flag in zip(bucket.members, flags, strict=True):
            parameter = member.parameter
            total = buffer[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
            if parameter.grad is not None:
                parameter.grad.copy_(total)
            elif flag:
                parameter.grad = total.clone()
        bucket.buffer = None

    def _add_earlier(self, parameter: nn.Parameter) -> None:
        earlier = self._earlier.pop(id(parameter), None)
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


def refuse_gradient_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuses hooks that would see parts of a gradient, whose sum is known after the last backward alone.

    Args:
        parameters: those that several stages use, by name.

    Raises:
        UsageError: one of them is trained, and has a hook.
    """
    for name, parameter in parameters.items():
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter.requires_grad and hooks:
            raise UsageError(
                f"the parameter {name} has a hook for its gradient, and is used by several stages, each of "
                "which would give the hook its own part of the gradient. Change gradients between the step "
                "function and optimizer.step(), where they are whole: for example with "
                "torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)."
            )


def refuse_accumulation_hooks(module: nn.Module) -> None:
    """Refuses hooks that would see the gradient that one replica has accumulated, of several.

    A hook for the gradient itself stays: it may mask rows of it, which is the same on parts.

    Raises:
        UsageError: a trained parameter has such a hook.
    """
    for parameter in module.parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None) and parameter.requires_grad:
            name = next(name for name, other in module.named_parameters() if other is parameter)
            raise UsageError(
                f"the parameter {name} has a hook for its accumulated gradient "
                "(register_post_accumulate_grad_hook), and there are several replicas: the hook would see "
                "that of its own replica, of this batch alone, before it is averaged. Do it between the "
                "step function and optimizer.step(), where gradients are whole: for example with "
                "torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)."
            )


def _pack(members: Sequence[Reduced], bucket_bytes: int) -> list[_Bucket]:
    """Buckets of one group, type and device each; those that can start early come first."""
    open_buckets: dict[tuple[object, ...], _Bucket] = {}
    sizes: dict[int, int] = {}
    buckets: list[_Bucket] = []
    for member in sorted(members, key=lambda m: m.late):
        parameter = member.parameter
        key = (id(member.group), parameter.dtype, parameter.device, member.late)
        size = parameter.numel() * parameter.element_size()
        bucket = open_buckets.get(key)
        if bucket is None or sizes[id(bucket)] + size > bucket_bytes:
            bucket = _Bucket(members=[], group=member.group, late=member.late)
            open_buckets[key] = bucket
            sizes[id(bucket)] = 0
            buckets.append(bucket)
        bucket.members.append(member)
        sizes[id(bucket)] += size
    return buckets
