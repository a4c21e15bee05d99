"""Finds the changes that a unit's call makes to its parameters, buffers and tensors in plain attributes."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardwright.torch._private import storage_key
from shardwright.torch.counting.cost_counter import CostCounter
from shardwright.torch.tracing.calls.traced_call import Outcome

__all__ = ["UnitState"]

_Place = tuple[dict[str, Any], str, bool]  # where it is, its name, whether it is a parameter or buffer


class UnitState:
    """The tensors that a unit holds before a call.

    Args:
        unit: the unit.
        twin: a copy of it that runs in its place.
    """

    def __init__(self, unit: nn.Module, twin: nn.Module | None = None):
        self._own = [tensor for _, tensor in _entries(unit)]
        # With their memory: `tensor.data = other` gives a tensor another one.
        self._before = [(*entry, storage_key(entry[1])) for entry in _entries(twin or unit)]

    @property
    def plain(self) -> list[Tensor]:
        """The unit's tensors in plain attributes that were there before the trace."""
        return [tensor for tensor in self._own if type(tensor) is Tensor]

    def with_writes(self, outcome: Outcome, results: Sequence[Any]) -> Outcome:
        """Adds to the outcome of a call what it has changed of the unit.

        Args:
            outcome: with what was counted.
            results: leaves of what the call has returned.
        """
        cost = outcome.cost
        return replace(
            outcome,
            written=self._changed(cost.written),
            written_again=self._in_memory(cost.repeats.again),
            written_once=self._in_memory(cost.repeats.once),
            written_undecided=self._in_memory(cost.repeats.undecided),
            own_results=self._own_results(results, cost),
        )

    def _changed(self, written: Collection[int]) -> list[Tensor]:
        """The unit's tensors that the call has written to, and the parameters and buffers that it replaced.

        Args:
            written: memory that operations of the call have written to (`storage_key`).
        """
        return [
            own
            for own, ((registry, key, registered), before, memory) in zip(
                self._own, self._before, strict=True
            )
            if memory in written
            or storage_key(before) != memory
            or (registered and registry.get(key) is not before)
        ]

    def _in_memory(self, memories: Collection[int]) -> list[Tensor]:
        """The unit's tensors that had this memory before the call."""
        pairs = zip(self._own, self._before, strict=True)
        return [own for own, (_, _, memory) in pairs if memory in memories]

    def _own_results(self, results: Sequence[Any], cost: CostCounter) -> tuple[int, ...]:
        """Positions of the results that lie in memory which the unit holds, and writes to in every call."""
        own = {memory for _, _, memory in self._before if memory in cost.written}
        if not own:
            return ()
        memories = (storage_key(item) if isinstance(item, Tensor) else None for item in results)
        return tuple(
            p
            for p, memory in enumerate(memories)
            if memory is not None and cost.views.get(memory, memory) in own
        )


def _entries(module: nn.Module) -> Iterator[tuple[_Place, Tensor]]:
    for sub in module.modules():
        registries: tuple[dict[str, Any], ...] = (sub._parameters, sub._buffers, vars(sub))
        for registry in registries:
            for key, tensor in registry.items():
                if isinstance(tensor, Tensor):
                    yield (registry, key, registry is not vars(sub)), tensor
