"""What a call of a unit changes of what the unit holds: parameters, buffers, tensors in plain attributes."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from shardwright.errors import TraceError
from shardwright.torch._private import storage_key
from shardwright.torch.unit_map import UnitMap

__all__ = ["UnitState", "refuse_shared"]

_Place = tuple[dict[str, Any], str, bool]  # where it is, its name, whether it is a parameter or buffer


class UnitState:
    """What a unit holds before a call.

    Args:
        unit: the unit.
        twin: a copy of it that runs in its place.
    """

    def __init__(self, unit: nn.Module, twin: nn.Module | None = None):
        self._own = [tensor for _, tensor in _entries(unit)]
        self._before = list(_entries(twin or unit))

    def changed(self, written: Collection[int]) -> list[Tensor]:
        """The unit's tensors that the call has written to, and the parameters and buffers that it replaced.

        Args:
            written: memory that operations of the call have written to (`storage_key`).
        """
        return [
            own
            for own, ((registry, key, registered), before) in zip(self._own, self._before, strict=True)
            if storage_key(before) in written or (registered and registry.get(key) is not before)
        ]


def refuse_shared(unit: nn.Module, changed: Sequence[Tensor], unit_map: UnitMap, line: str) -> None:
    """Refuses that a unit writes to a tensor that is no buffer, and that a module outside of it has as well.

    Args:
        unit: the unit.
        changed: what it has changed.
        unit_map: knows the whole model.
        line: where it is called.

    Raises:
        TraceError: it does.
    """
    plain = [tensor for tensor in changed if type(tensor) is Tensor and id(tensor) not in unit_map.parameters]
    if not plain:
        return
    memories = {storage_key(tensor) for tensor in plain}
    inside = set(unit.modules())
    for name, module in unit_map.model.named_modules():
        for key, tensor in vars(module).items():
            if module not in inside and type(tensor) is Tensor and storage_key(tensor) in memories:
                raise TraceError(
                    f"{line}: {unit_map.units[id(unit)]} writes to a tensor in place that is also the "
                    f"attribute {key} of {name or 'the model'}, and is no buffer: on another stage it would "
                    f"not change. Register it as a buffer in both: register_buffer({key!r}, tensor)."
                )


def _entries(module: nn.Module) -> Iterator[tuple[_Place, Tensor]]:
    for sub in module.modules():
        registries: tuple[dict[str, Any], ...] = (sub._parameters, sub._buffers, vars(sub))
        for registry in registries:
            for key, tensor in registry.items():
                if isinstance(tensor, Tensor):
                    yield (registry, key, registry is not vars(sub)), tensor
