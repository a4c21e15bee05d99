"""Finds modules whose code creates buffers or changes their shape or type: each is one unit.

    if self.seen.numel() == 0:          the first microbatch
        self.seen.resize_(now.shape)
    self.seen.copy_(...)                all others

Such code reads the shape, so later microbatches take another path than the trace, which runs the first.
"""

from typing import Any

from torch import nn

__all__ = ["RemadeInForward"]


class RemadeInForward:
    """Watches one forward of a model; give it every call of a module.

    Attributes:
        writers: names of the modules whose code does it.
    """

    def __init__(self) -> None:
        self.writers: set[str] = set()
        self._known: dict[str, Any] = {}

    def enter(self, name: str, module: nn.Module, *, around: str | None) -> None:
        """A module is called."""
        now = _kinds_inside(name, module)
        if around is not None and any(self._known.get(place, kind) != kind for place, kind in now.items()):
            self.writers.add(around)
        self._known.update(now)

    def leave(self, name: str, module: nn.Module) -> None:
        """It has returned, as those that it has called have before."""
        now = _kinds_inside(name, module)
        if any(place not in self._known or self._known[place] != kind for place, kind in now.items()):
            self.writers.add(name)
        self._known.update(now)


def _kinds_inside(name: str, module: nn.Module) -> dict[str, Any]:
    """The kinds of the buffers that a module and those inside it have registered."""
    return {
        f"{path}.{key}": None if buffer is None else (buffer.shape, buffer.dtype)
        for path, sub in module.named_modules(prefix=name)
        for key, buffer in sub._buffers.items()
    }
