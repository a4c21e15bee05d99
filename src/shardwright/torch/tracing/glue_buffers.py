"""Buffers that code between units changes: running statistics, queues, counters.

In a plain loop each microbatch finds what the one before left. Over stages that holds on one stage only, as
each stage takes the microbatches in order. So such a buffer gets a home: it is read and changed there, and
later stages are sent what they read::

    self.mean.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)     on the stage that makes x
    y = x - self.mean                                           here or on a later stage

After the batch the home's content goes to the other ranks, so all agree between steps.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.torch.parameters.unit_map import UnitMap

_Place = tuple[nn.Module, str]
_FLAG = 64  # elements of a buffer whose content is compared, because `.data.fill_()` leaves no other mark


class BufferWatch:
    """Finds out which buffers outside of units a traced step function changes."""

    def __init__(self, unit_map: UnitMap):
        in_units = {id(sub) for unit in unit_map.modules.values() for sub in unit.modules()}
        self.places: dict[str, list[_Place]] = {}
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._flags: dict[str, Tensor] = {}
        for module in unit_map.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is None or buffer.is_meta or id(module) in in_units:
                    continue
                name = unit_map.parameters[id(buffer)]
                self.places.setdefault(name, []).append((module, key))
                self._before[name] = (buffer, buffer._version)
                if buffer.numel() <= _FLAG:
                    self._flags[name] = buffer.detach().clone()

    def tensors(self) -> dict[str, Tensor]:
        """Buffers by first name."""
        return {name: buffer for name, (buffer, _) in self._before.items()}

    def last(self, name: str) -> Tensor | None:
        """The tensor to which a buffer's name refers now."""
        module, key = self.places[name][0]
        return module._buffers.get(key)

    def changed(
        self, has_value: Callable[[Any], bool], *, under_another_name: Callable[[Tensor], bool]
    ) -> dict[str, bool]:
        """Names of changed buffers, and whether what comes from units went into them."""
        found = {}
        for name, (buffer, version) in self._before.items():
            from_units = has_value(buffer) or has_value(self.last(name)) or under_another_name(buffer)
            if (
                from_units
                or self.last(name) is not buffer
                or buffer._version != version
                or self._is_switched(name, buffer)
            ):
                found[name] = from_units
        return found

    def _is_switched(self, name: str, buffer: Tensor) -> bool:
        before = self._flags.get(name)
        return before is not None and not torch.allclose(before, buffer, rtol=0.0, atol=0.0, equal_nan=True)

    def replaced(self, is_value: Callable[[Any], bool]) -> dict[str, str]:
        """Names of buffers whose place has a value of the graph now; of another shape, with both shapes."""
        found = {}
        for name, (buffer, _) in self._before.items():
            last = self.last(name)
            if last is not buffer and last is not None and is_value(last):
                same = last.shape == buffer.shape and last.dtype == buffer.dtype
                found[name] = "" if same else f"{_described(buffer)} to {_described(last)}"
        return found


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} and {tensor.dtype}"


class GlueBuffers:
    """Changed buffers of a placed model."""

    def __init__(self, model: nn.Module, ranks: Mapping[str, int]):
        self._ranks = ranks
        self._places: dict[str, list[_Place]] = {name: [] for name in ranks}
        self._own: dict[str, Tensor] = {}
        names: dict[int, str] = {}
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                name = names.setdefault(id(buffer), f"{prefix}.{key}" if prefix else key)
                if name in self._places:
                    self._places[name].append((module, key))
                    self._own[name] = buffer

    def now(self, name: str) -> Tensor:
        """The present content of a buffer, on the rank of its home."""
        module, key = self._places[name][0]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer

    def agree(self, pipeline_rank: int, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
        """Gives every rank what the home has; collective over the replica."""
        with torch.no_grad():
            for name, owner in self._ranks.items():
                own = self._own[name]
                if owner == pipeline_rank:
                    own.copy_(self.now(name))
                for module, key in self._places[name]:
                    module._buffers[key] = own
                payload = own.contiguous()
                if payload.numel():
                    dist.broadcast(payload, ranks[owner], group=group)
                if payload is not own:
                    own.copy_(payload)
