"""Buffers of replicas, such as running statistics: those of the first replica, after each step.

Replicas see other data, so their forwards leave other things in buffers, and so may scripts between steps. As
in DistributedDataParallel, with its default, all go on with what the first one has.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["ReplicaBuffers"]


_SMALL_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class _Seen:
    """A buffer at one moment. Kernels such as batch_norm write to theirs without counting versions."""

    buffer: Tensor
    version: int
    content: Tensor | None

    @classmethod
    def of(cls, buffer: Tensor) -> "_Seen":
        content = buffer.detach().clone() if buffer.nbytes <= _SMALL_BYTES else None
        return cls(buffer, _version(buffer), content)

    def is_still(self, buffer: Tensor) -> bool:
        return self.is_unwritten(buffer) and (self.content is None or torch.equal(self.content, buffer))

    def is_unwritten(self, buffer: Tensor) -> bool:
        """By the version alone: scripts count it as they write, but for writes through ``.data``."""
        return self.buffer is buffer and self.version == _version(buffer) >= 0


class ReplicaBuffers:
    """Makes replicas agree.

    Args:
        module: the whole model; what is on the meta device belongs to other stages.
        group: the ranks that hold the same stages.
        source: world rank of the first of them.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, *, source: int):
        self._module = module
        self._group = group
        self._source = source
        self._seen: dict[str, _Seen] = {}

    def note(self) -> None:
        """Takes what is there for equal on all replicas."""
        self._seen = {name: _Seen.of(buffer) for name, buffer in self._here()}

    def agree_on_what_scripts_set(self) -> None:
        """`agree`, before a batch, if the script of any replica has set a buffer since; collective."""
        here = list(self._here())
        if not here:
            return
        unwritten = all(name in self._seen and self._seen[name].is_unwritten(buffer) for name, buffer in here)
        found = torch.tensor(not unwritten, dtype=torch.int32, device=here[0][1].device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        if found.item():
            self.agree()

    @torch.no_grad()
    def agree(self) -> None:
        """Gives all replicas the buffers of the first that any of them has changed; collective."""
        here = list(self._here())
        if not here:
            return
        device = here[0][1].device
        changed = torch.tensor(
            [name not in self._seen or not self._seen[name].is_still(buffer) for name, buffer in here],
            dtype=torch.int32,
            device=device,
        )
        # One replica alone may have gone a way on which a buffer changes.
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self._group)
        wanted = {name: buffer for (name, buffer), flag in zip(here, changed.tolist(), strict=True) if flag}
        for dtype in sorted({buffer.dtype for buffer in wanted.values()}, key=str):
            self._broadcast([buffer for buffer in wanted.values() if buffer.dtype is dtype])
        self._seen.update((name, _Seen.of(buffer)) for name, buffer in wanted.items())

    def _broadcast(self, buffers: list[Tensor]) -> None:
        packed = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(packed, self._source, group=self._group)
        parts = torch.split(packed, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))

    def _here(self) -> Iterable[tuple[str, Tensor]]:
        return (
            (name, buffer)
            for name, buffer in self._module.named_buffers()
            if not buffer.is_meta and buffer.numel() and buffer.layout is torch.strided
        )


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version
