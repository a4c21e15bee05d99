"""Broadcasts the first replica's buffers, such as running statistics, before each batch.

Replicas see different data, so their forwards leave different values in buffers, and so may scripts between
steps. Like DistributedDataParallel by default, all replicas begin a batch with the first one's values, and,
where a forward sizes a buffer, with its shapes and types. Until then each has its own: a script may sum what
they have counted.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.joining.process_group import tell_all
from shardwright.comm.local_peers import LocalPeers
from shardwright.comm.message_names import Purpose
from shardwright.comm.transport import SmallCollectives
from shardwright.errors import UsageError
from shardwright.torch.parameters.parameter_kinds import BufferKind
from shardwright.torch.pytorch.modules import ModelTree

log = logging.getLogger(__name__)

_SMALL_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class _Seen:
    """A buffer at one moment. Kernels such as batch_norm write to theirs without counting versions."""

    buffer: Tensor
    version: int
    content: Tensor | None
    kind: BufferKind

    @classmethod
    def of(cls, buffer: Tensor) -> "_Seen":
        content = buffer.detach().clone() if buffer.nbytes <= _SMALL_BYTES else None
        return cls(buffer, _version(buffer), content, BufferKind.of(buffer))

    def is_still(self, buffer: Tensor) -> bool:
        if self.buffer is not buffer or not self.version == _version(buffer) >= 0:
            return False
        if not self.kind.is_of(buffer):
            return False
        return self.content is None or torch.equal(self.content, buffer)


class ReplicaBuffers:
    """Makes replicas agree; their buffers are equal now."""

    def __init__(
        self,
        tree: ModelTree,
        group: dist.ProcessGroup,
        *,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        local: LocalPeers | None,
    ):
        self._tree = tree
        self._group = group
        self._replicas = SmallCollectives(ranks, rank=rank, group=group, local=local)
        self._source = ranks[0]
        self._is_source = rank == ranks[0]
        self._ranks = tuple(ranks)
        self._device = device
        self._seen = {name: _Seen.of(buffer) for name, buffer in self._here().items()}
        self._warned = False

    def agree(self, *, other_parameters: bool = False) -> bool:
        """Gives all replicas the buffers of the first that any of them has changed; collective."""
        # Not without buffers in an evaluation, which one replica alone may make.
        if not self._seen and not torch.is_grad_enabled():
            return False
        with torch.no_grad():
            return self._agree(self._here(), other_parameters)

    def _agree(self, here: dict[str, Tensor], other_parameters: bool) -> bool:
        # The names are those of the last time, the same on all replicas; behind them, whether a forward has
        # given one another shape or type, or made or removed one.
        flags = [name not in here or not seen.is_still(here[name]) for name, seen in self._seen.items()]
        flags.append(here.keys() != self._seen.keys() or any(map(self._is_remade, here.items())))
        changed = torch.tensor([*flags, other_parameters], dtype=torch.int32, device=self._device)
        # One replica alone may have gone a way on which a buffer changes.
        *found, remade, other = self._replicas.gather(changed, Purpose.AGREEMENT).amax(0).tolist()
        wanted = {name for name, flag in zip(self._seen, found, strict=True) if flag}
        if remade:
            names = self._agree_on_kinds(here)
            wanted |= set(names) - self._seen.keys()
            self._seen = {name: self._seen.get(name, _Seen.of(here[name])) for name in names}
        chosen = {name: here[name] for name in self._seen if name in wanted}
        for dtype in sorted({buffer.dtype for buffer in chosen.values()}, key=str):
            self._broadcast([b for b in chosen.values() if b.dtype is dtype and b.numel()])
        self._seen.update((name, _Seen.of(buffer)) for name, buffer in chosen.items())
        return bool(other)

    def _is_remade(self, item: tuple[str, Tensor]) -> bool:
        name, buffer = item
        return not self._seen[name].kind.is_of(buffer)

    def _agree_on_kinds(self, here: Mapping[str, Tensor]) -> list[str]:
        """Gives buffers the shapes and types of the first replica; returns their names in its order."""
        own = {name: BufferKind.of(buffer).to_json() for name, buffer in here.items()}
        said = tell_all(own, group=self._group)
        first = said[0]
        for rank, other in zip(self._ranks, said, strict=True):
            for name in (*first, *other):
                if (name in first) == (name in other):
                    continue
                has, lacks = (self._source, rank) if name in first else (rank, self._source)
                raise UsageError(
                    f"replicas have different buffers: {name} is there on rank {has}, and not on rank "
                    f"{lacks}. A forward that makes a buffer must do so in every replica: register it in "
                    "__init__, for example with torch.zeros(0)."
                )
            parted = next((name for name in first if first[name] != other[name]), None)
            if parted is not None and not self._warned and self._is_source:
                self._warned = True
                log.warning(
                    "the buffer %s has the shape %s on rank %d and %s on rank %d: replicas go on with the "
                    "buffers of the first, as always",
                    *(parted, first[parted][1:], self._source, other[parted][1:], rank),
                )
        for name, buffer in here.items():
            kind = BufferKind.from_json(first[name])
            if kind is not None and not kind.is_of(buffer):
                buffer.data = torch.empty(kind.shape, dtype=kind.dtype, device=buffer.device)
        return list(first)

    def _broadcast(self, buffers: list[Tensor]) -> None:
        if not buffers:
            return
        packed = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(packed, self._source, group=self._group)
        parts = torch.split(packed, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))

    def _here(self) -> dict[str, Tensor]:
        return {
            name: buffer
            for name, buffer in self._tree.named_buffers().items()
            if not buffer.is_meta and buffer.layout is torch.strided
        }


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version
