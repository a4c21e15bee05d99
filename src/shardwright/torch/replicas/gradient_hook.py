"""Notes when gradients are done, and in which order.

The hook takes this replica's gradients of a bucket, and returns a future of the gradients that all replicas
use. It reduces as it likes: in fewer bits, in its own group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch.replicas.gradient_buckets import Bucket, flags_of, gradient_of, hand_out

if TYPE_CHECKING:
    from shardwright.torch.replicas.gradient_buckets import Reduced


# Buckets under way: while one is reduced the next is filled. A backward that is faster than the network would
# leave whole gradients of everything waiting.
_MOST_UNDER_WAY = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """A bucket in its turn.

    Attributes:
        late: gradients come from elsewhere, too: it never starts by itself.
    """

    bucket: Bucket
    late: bool = False


class BucketOrder:
    """Starts buckets in one order, each as soon as it has all its gradients."""

    def __init__(self, turns: Sequence[Turn], *, is_last: bool = True):
        self._turns = turns
        self._is_last = is_last
        self._place_of = {
            id(member.parameter): place for place, turn in enumerate(turns) for member in turn.bucket.members
        }
        self._ready: set[int] = set()
        self._missing: list[int] = []
        self._next = 0
        self.begin()

    def begin(self) -> None:
        """No gradients are there."""
        self._ready.clear()
        self._missing = [len(turn.bucket.members) for turn in self._turns]
        self._next = 0

    def is_there(self, parameter: Tensor) -> None:
        """The gradient of a parameter is complete."""
        place = self._place_of.get(id(parameter))
        if place is None or id(parameter) in self._ready:
            return
        self._ready.add(id(parameter))
        self._missing[place] -= 1
        while self._next < len(self._turns):
            if self._missing[self._next] or self._turns[self._next].late:
                break
            self._start_next()

    def start_rest(self) -> None:
        """Starts all that have not been started."""
        while self._next < len(self._turns):
            self._start_next()

    def _start_next(self) -> None:
        turn = self._turns[self._next]
        if self._next >= _MOST_UNDER_WAY:
            self._turns[self._next - _MOST_UNDER_WAY].bucket.let_go()
        self._next += 1
        turn.bucket.start(is_last=self._is_last)


@dataclass(frozen=True, slots=True)
class GradientHook:
    """A hook function, and its state.

    Attributes:
        function: ``function(state, bucket)`` gives a future of a tensor, or of a list with one.
    """

    state: Any
    function: Callable[[Any, Any], Any]


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


class HookedBucket:
    """A bucket that a hook reduces."""

    def __init__(
        self,
        members: "Sequence[Reduced]",
        group: dist.ProcessGroup,
        hook: GradientHook,
        *,
        index: int,
        is_last: bool,
    ):
        self.members = members
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
        self._future = self._hook.function(self._hook.state, bucket)
        if not hasattr(self._future, "wait"):
            raise UsageError(
                f"the communication hook returns a {type(self._future).__name__}, but it must return a "
                "torch.futures.Future of the reduced gradients, as hooks of DistributedDataParallel do."
            )

    def let_go(self) -> None:
        """It holds the same all along."""

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
