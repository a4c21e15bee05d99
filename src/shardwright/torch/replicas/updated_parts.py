"""The tensors that an optimizer updates instead of parameters: parts of them, and float32 copies.

Replicas may shard the optimizer's work and state (ZeRO-1), with or without sharded parameters::

    gradients summed over the replicas    every replica has all of them
    optimizer.step()                      each updates a part of every parameter, and has state for that alone
    all-gather                            each gets the parts of the others

Here, replicas are ranks with the same rows of parameters: parameters may be sharded within a host, and
optimizer state over all hosts. 16-bit parameters are updated in float32 and then rounded, so that small
updates are not lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.comm._private import all_gather_single
from shardwright.torch.parameters.precision import is_low
from shardwright.torch.tensor_parallel.divide import divided_alike, part_as, put_divided_in_place
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of

# Elements that are gathered in one message.
_MESSAGE = 4 * 2**20


class UpdatedParts:
    """The parts of parameters that this rank updates."""

    def __init__(self, group: dist.ProcessGroup | None, *, in_float32: bool):
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
        self._masters[id(parameter)] = master

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
        shown: list[tuple[nn.Parameter, nn.Parameter, Tensor]] = []
        cut = []
        for parameter in parameters:
            is_cut = self._is_cut(parameter)
            if is_cut or self._has_master(parameter):
                own = local_of(parameter).detach()
                part = self._part_of(own) if is_cut else own
                shown.append((parameter, self._show(parameter, part, is_cut=is_cut), part))
            if is_cut and parameter.requires_grad:
                cut.append(parameter)
        try:
            for parameter, whole, part in shown:
                if self._is_cut(whole):
                    self._cut_state(state.get(parameter, {}), whole, part)
            yield
            for parameter, _, part in shown:
                if part.dtype is not parameter.dtype:
                    part.copy_(local_of(parameter).detach())
        finally:
            for parameter, whole, _ in shown:
                cleared = parameter.grad is None
                put_divided_in_place(parameter, whole)
                if cleared:
                    parameter.grad = None
        self._share(cut)

    def _has_master(self, parameter: Tensor) -> bool:
        """Whether a copy is updated; what has no gradient, no optimizer changes."""
        return self._in_float32 and is_low(parameter) and parameter.grad is not None

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
            parameter.grad = gradient.to(updated.dtype)
        return other

    def _master_of(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """The part in float32; where somebody has changed the parameter since, what it is now."""
        known, own = self._masters.get(id(parameter)), local_of(part)
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
