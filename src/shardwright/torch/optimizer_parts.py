"""Replicas share the work and the state of the optimizer (ZeRO-1), also where they do not share parameters.

::

    gradients summed over the replicas    every replica has all of them
    optimizer.step()                      each updates a part of every parameter, and has state for that alone
    all-gather                            each gets the parts of the others

Replicas are ranks that have the same rows of parameters: parameters may be shared inside of a host, and the
optimizer's state over all hosts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.comm._private import all_gather_single
from shardwright.torch._private import put_in_place

__all__ = ["OptimizerParts"]

# Elements that are gathered in one message.
_MESSAGE = 4 * 2**20


class OptimizerParts:
    """The parts of parameters that this rank updates.

    Args:
        group: ranks with the same rows of the same parameters.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._rank = dist.get_rank(group)
        self._num_parts = dist.get_world_size(group)

    @contextmanager
    def shown(
        self, parameters: Sequence[nn.Parameter], state: Mapping[Any, dict[str, Any]]
    ) -> Iterator[None]:
        """Shows parameters as the part of this rank, in one dimension; then all get the parts of all.

        Collective over the group.

        Args:
            parameters: what an optimizer has, the same on all ranks of the group.
            state: of the optimizer; what it has of whole parameters is cut.
        """
        cut = [p for p in parameters if p.is_contiguous() and p.numel() >= self._num_parts]
        wholes = [self._show_part(parameter) for parameter in cut]
        try:
            for parameter, whole in zip(cut, wholes, strict=True):
                self._cut_state(state.get(parameter, {}), whole)
            yield
        finally:
            for parameter, whole in zip(cut, wholes, strict=True):
                cleared = parameter.grad is None
                put_in_place(parameter, whole)
                if cleared:
                    parameter.grad = None
        self._share([parameter for parameter in cut if parameter.requires_grad])

    def _show_part(self, parameter: nn.Parameter) -> nn.Parameter:
        """Puts a part in the place of a parameter; returns an object with what was there."""
        gradient = parameter.grad
        part = nn.Parameter(self._part_of(parameter.detach()), parameter.requires_grad)
        put_in_place(parameter, part)
        if gradient is not None:
            parameter.grad = self._part_of(gradient.contiguous())
        return part

    def _part_of(self, tensor: Tensor) -> Tensor:
        flat = tensor.view(-1)
        size = self._piece(flat.numel())
        return flat[self._rank * size : (self._rank + 1) * size]

    def _piece(self, numel: int) -> int:
        return -(-numel // self._num_parts)

    def _cut_state(self, values: dict[str, Any], whole: Tensor) -> None:
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == whole.shape:
                values[key] = self._part_of(value.contiguous()).clone()

    def _share(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives all ranks the parts of all."""
        for together in _messages(parameters):
            flats = [parameter.detach().view(-1) for parameter in together]
            sizes = [self._piece(flat.numel()) for flat in flats]
            parts = flats[0].new_zeros(self._num_parts, sum(sizes))
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
