"""Has a function of the script reduce gradients over replicas.

The hook takes this replica's gradients of a bucket, and returns a future of the gradients that all replicas
use. It reduces as it likes: in fewer bits, in its own group.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from shardwright.errors import UsageError
from shardwright.torch.replicas.gradient_buckets import Bucket, Reduced, flags_of, gradient_of, hand_out
from shardwright.torch.replicas.replicas import Replicas
from smdistributed.modelparallel.torch.state_mod import current_run


def reduce_by_hook(replicas: Replicas, given: Any, hook: Callable[[Any, Any], Any]) -> None:
    """Has ``hook(given, bucket)`` reduce whole gradients; before the first step."""
    mesh = current_run().mesh
    if current_run().groups.shard is not None:
        raise UsageError(
            "a communication hook reduces whole gradients, and sharded_data_parallel_degree is "
            f"{mesh.shard}: each replica gets the sums of its rows alone. Set it to 1, or register no hook."
        )
    if mesh.share > 1:
        raise UsageError(
            "a communication hook reduces whole gradients, and tensor_parallel_degree is "
            f"{mesh.share}: each rank has parts of them. Set it to 1, or register no hook."
        )
    replicas.reduce_by(partial(HookedBucket, hook=partial(hook, _for_replicas(given, hook))))


def _for_replicas(given: Any, hook: Callable[[Any, Any], Any]) -> Any:
    """What a hook is called with: PyTorch's own take None for all ranks, those of other stages, too."""
    group = current_run().groups.data
    if group is None or dist.get_world_size(group) == dist.get_world_size():
        return given
    if given is None and getattr(hook, "__module__", "") == default_hooks.__name__:
        return group
    if isinstance(given, dist.ProcessGroup) and dist.get_world_size(given) != dist.get_world_size(group):
        raise UsageError(
            f"the communication hook is given a group of {dist.get_world_size(given)} ranks, but "
            f"{dist.get_world_size(group)} have the gradients of this stage. Pass smp.get_dp_process_group()."
        )
    return given


class _GradientsOfBucket:
    """A hook's view of a bucket: the methods of `torch.distributed.GradBucket`."""

    def __init__(self, buffer: Tensor, parameters: Sequence[nn.Parameter], *, index: int, is_last: bool):
        self._buffer = buffer
        self._parameters = list(parameters)
        self._index = index
        self._is_last = is_last

    def buffer(self) -> Tensor:
        """All gradients, in one dimension."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replaces the gradients by another tensor."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of them, in the shapes of the parameters."""
        parts = torch.split(self._buffer, [parameter.numel() for parameter in self._parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def index(self) -> int:
        """Number of the bucket in this batch, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Whether none comes after it."""
        return self._is_last


class HookedBucket(Bucket):
    """A bucket that a hook reduces."""

    def __init__(
        self,
        members: Sequence[Reduced],
        group: dist.ProcessGroup,
        index: int,
        is_last: bool,
        *,
        hook: Callable[[_GradientsOfBucket], Any],
    ):
        super().__init__(members)
        self._group = group
        self._hook = hook
        self._index = index
        self._is_last = is_last
        self._flags: Tensor | None = None
        self._work: dist.Work | None = None
        self._future: Any = None

    def start(self, *, is_last: bool = True) -> None:
        buffer = torch.cat([gradient_of(member).reshape(-1) for member in self.members])
        self._flags = torch.tensor(flags_of(self.members), device=buffer.device)
        for member in self.members:
            member.parameter.grad = None
        self._work = dist.all_reduce(self._flags, group=self._group, async_op=True)
        parameters = [member.parameter for member in self.members]
        bucket = _GradientsOfBucket(buffer, parameters, index=self._index, is_last=self._is_last)
        self._future = self._hook(bucket)
        if not hasattr(self._future, "wait"):
            raise UsageError(
                f"the communication hook returns a {type(self._future).__name__}, but it must return a "
                "torch.futures.Future of the reduced gradients, as hooks of DistributedDataParallel do."
            )

    def abort(self) -> None:
        """Forgets what was started."""
        self._flags = self._work = self._future = None

    def finish(self, divisor: float) -> None:
        """Waits, and writes the hook's result into the gradients."""
        assert self._flags is not None
        assert self._work is not None
        flags, work, future = self._flags, self._work, self._future
        self.abort()
        result = future.wait()
        work.wait()
        reduced = result[0] if isinstance(result, list | tuple) else result
        needed = sum(member.parameter.numel() for member in self.members)
        if not isinstance(reduced, Tensor) or reduced.numel() != needed:
            raise UsageError(
                f"the communication hook gives {_told(reduced)} for a bucket of {needed} gradients. It must "
                "give a tensor of that size."
            )
        reduced = reduced.reshape(-1)
        scale = divisor / dist.get_world_size(self._group)
        if scale != 1:
            reduced = reduced / scale
        hand_out(reduced, self.members, flags.tolist())


def _told(reduced: Any) -> str:
    return f"{reduced.numel()} numbers" if isinstance(reduced, Tensor) else f"a {type(reduced).__name__}"
