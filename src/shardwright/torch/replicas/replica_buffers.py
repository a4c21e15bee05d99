"""What replicas give each other besides gradients: buffers, and tensors that an optimizer updates.

Replicas see different data, so their forwards leave different values in buffers, and so may scripts between
steps. Like DistributedDataParallel by default, all replicas begin a batch with the first one's values, and,
where a forward sizes a buffer, with its shapes and types. Until then each has its own: a script may sum what
they have counted.

Replicas may shard the optimizer's work and state (ZeRO-1), with or without sharded parameters::

    gradients summed over the replicas    every replica has all of them
    optimizer.step()                      each updates a part of every parameter, and has state for that alone
    all-gather                            each gets the parts of the others

Here, replicas are ranks with the same rows of parameters: parameters may be sharded within a host, and
optimizer state over all hosts. 16-bit parameters are updated in float32 and then rounded, so that small
updates are not lost. With `offload_optimizer` copies of all parameters, in the host's memory, are updated.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.comm._private import all_gather_single
from shardwright.comm.joining.process_group import tell_all
from shardwright.comm.local_peers import LocalPeers
from shardwright.comm.message_names import Purpose
from shardwright.comm.transport import SmallCollectives
from shardwright.errors import UsageError
from shardwright.torch.parameters.parameter_kinds import BufferKind, is_low
from shardwright.torch.pytorch.modules import ModelTree
from shardwright.torch.tensor_parallel.divide import divided_alike, part_as, put_divided_in_place
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of

log = logging.getLogger(__name__)

_SMALL_BYTES = 2**16


def write_into(tensor: Tensor, values: Tensor) -> None:
    """Gives a tensor other values; once where it is expanded, and has them repeated."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


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
            write_into(buffer, part.view(buffer.shape))

    def _here(self) -> dict[str, Tensor]:
        return {
            name: buffer
            for name, buffer in self._tree.named_buffers().items()
            if not buffer.is_meta and buffer.layout is torch.strided
        }


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


# Elements that are gathered in one message.
_MESSAGE = 4 * 2**20


class UpdatedParts:
    """The parts of parameters that this rank updates.

    Args:
        home: where copies are kept and updated; None: with the parameters.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, in_float32: bool, home: torch.device | None = None
    ):
        self.home = home
        self._in_float32 = in_float32
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self.num_parts = 1 if group is None else dist.get_world_size(group)
        self._masters: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of the copies in float32."""
        return sum(local_of(master).nbytes for master in self._masters.values())

    def own_range(self, tensor: Tensor) -> range | None:
        """The range of a parameter's elements that this rank updates; None for all of them."""
        if not self._is_cut(tensor):
            return None
        numel = local_of(tensor).numel()
        size = self._piece(numel)
        return range(min(self._rank * size, numel), min((self._rank + 1) * size, numel))

    def master(self, parameter: Tensor) -> Tensor | None:
        """The float32 copy of the part that this rank updates, if any."""
        return self._masters.get(id(parameter))

    def set_master(self, parameter: Tensor, master: Tensor) -> None:
        """Restores a float32 copy from its saved one."""
        self._masters[id(parameter)] = master.to(self.home or parameter.device, torch.float32)

    def forget_masters(self) -> None:
        """Has the next update begin from the parameters as they are, without the digits that copies keep."""
        self._masters.clear()

    @property
    def keeps_masters(self) -> bool:
        """Whether parameters in 16 bits are updated in float32."""
        return self._in_float32

    @contextmanager
    def shown(
        self, parameters: Sequence[nn.Parameter], state: Mapping[Any, dict[str, Any]]
    ) -> Iterator[None]:
        """Shows parameters as the parts that this rank updates; afterwards all ranks have all updates.

        Collective over the group.
        """
        shown: list[tuple[nn.Parameter, nn.Parameter, Tensor, bool]] = []
        cut = []
        for parameter in parameters:
            is_cut, is_copied = self._is_cut(parameter), self._has_master(parameter)
            if is_cut or is_copied:
                own = local_of(parameter).detach()
                part = self._part_of(own) if is_cut else own
                shown.append((parameter, self._show(parameter, part, is_cut=is_cut), part, is_copied))
            if is_cut and parameter.requires_grad:
                cut.append(parameter)
        if self.home is not None and torch.cuda.is_available():
            torch.cuda.synchronize()  # gradients are on their way
        try:
            for parameter, whole, part, _ in shown:
                values = state.get(parameter, {})
                if self.home is not None:  # loaded before the model was placed
                    values.update((k, v.to(self.home)) for k, v in values.items() if isinstance(v, Tensor))
                if self._is_cut(whole):
                    self._cut_state(values, whole, part)
            yield
            for parameter, _, part, is_copied in shown:
                if is_copied:
                    part.copy_(local_of(parameter).detach())
        finally:
            for parameter, whole, _, _ in shown:
                cleared = parameter.grad is None
                put_divided_in_place(parameter, whole)
                if cleared:
                    parameter.grad = None
        self._share(cut)

    def _has_master(self, parameter: Tensor) -> bool:
        """Whether a copy is updated; what has no gradient, no optimizer changes."""
        is_copied = self.home is not None or (self._in_float32 and is_low(parameter))
        return is_copied and parameter.grad is not None

    def _is_cut(self, parameter: Tensor) -> bool:
        own = local_of(parameter)
        return self.num_parts > 1 and own.is_contiguous() and own.numel() >= self.num_parts

    def _show(self, parameter: nn.Parameter, part: Tensor, *, is_cut: bool) -> nn.Parameter:
        """Puts something in the place of a parameter; returns an object with what was there."""
        gradient = parameter.grad
        spec = parameter._spec if isinstance(parameter, DividedTensor) else None
        if spec is not None and not is_cut:  # an optimizer may look at all of it
            part = divided_alike(part, spec)
        updated = self._master_of(parameter, part) if self._has_master(parameter) else part
        other = nn.Parameter(updated, parameter.requires_grad)
        put_divided_in_place(parameter, other)
        if gradient is not None:
            if is_cut:
                own = gradient if spec is None else part_as(gradient, spec)
                gradient = self._part_of(own.contiguous())
            parameter.grad = gradient.to(updated.device, updated.dtype, non_blocking=True)
        return other

    def _master_of(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """The part in float32; where somebody has changed the parameter since, what it is now.

        What has more than 16 bits is copied to the host's memory for the update alone.
        """
        known, own = self._masters.get(id(parameter)), local_of(part)
        if self.home is not None:
            own = own.to(self.home, copy=True)
        if not is_low(own):
            return divided_alike(own, part) if isinstance(part, DividedTensor) else own
        if known is None or known.shape != part.shape:
            updated = own.float()
        else:
            updated = part_as(known, part._spec) if isinstance(part, DividedTensor) else known
            changed = own != updated.to(own.dtype)
            if bool(changed.any()):
                updated = torch.where(changed, own.float(), updated)
        master = divided_alike(updated, part) if isinstance(part, DividedTensor) else updated
        self._masters[id(parameter)] = master
        return master

    def _part_of(self, tensor: Tensor) -> Tensor:
        flat = tensor.view(-1)
        size = self._piece(flat.numel())
        return flat[self._rank * size : (self._rank + 1) * size]

    def _piece(self, numel: int) -> int:
        return -(-numel // self.num_parts)

    def _cut_state(self, values: dict[str, Any], whole: Tensor, part: Tensor) -> None:
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == whole.shape != part.shape:
                own = part_as(value, whole._spec) if isinstance(whole, DividedTensor) else value
                values[key] = self._part_of(own.contiguous()).clone()

    def _share(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives all ranks the parts of all."""
        for together in _messages(parameters):
            flats = [local_of(parameter).detach().view(-1) for parameter in together]
            sizes = [self._piece(flat.numel()) for flat in flats]
            parts = flats[0].new_zeros(self.num_parts, sum(sizes))
            start = 0
            for flat, size in zip(flats, sizes, strict=True):
                own = flat[self._rank * size : (self._rank + 1) * size]
                parts[self._rank, start : start + own.numel()] = own
                start += size
            all_gather_single(parts.view(-1), parts[self._rank], group=self._group)
            start = 0
            for flat, size in zip(flats, sizes, strict=True):
                for part, rows in zip(torch.split(flat, size), parts, strict=False):
                    part.copy_(rows[start : start + part.numel()])
                start += size


def _messages(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one type and device that go together."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for alike in by_kind.values():
        together: list[nn.Parameter] = []
        size = 0
        for parameter in alike:
            if together and size + parameter.numel() > _MESSAGE:
                yield together
                together, size = [], 0
            together.append(parameter)
            size += parameter.numel()
        yield together
