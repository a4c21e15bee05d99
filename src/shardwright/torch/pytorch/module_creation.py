"""Modules that are created inside of a ``with`` statement."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torch import nn

__all__ = ["CreationWatch"]

_Setting = TypeVar("_Setting")


class CreationWatch(Generic[_Setting]):
    """Tells of each module whose constructor begins inside of a ``with`` statement."""

    def __init__(self, begins: Callable[[nn.Module, _Setting], None]):
        self._begins = begins
        self._settings: list[_Setting] = []
        self._original: Any = None

    @contextmanager
    def inside(self, setting: _Setting) -> Iterator[None]:
        """Watches until the statement ends."""
        if not self._settings:
            self._original = nn.Module.__init__
            nn.Module.__init__ = self._constructor()  # type: ignore[method-assign]
        self._settings.append(setting)
        try:
            yield
        finally:
            self._settings.pop()
            if not self._settings:
                nn.Module.__init__ = self._original  # type: ignore[method-assign]

    def _constructor(self) -> Any:
        original = self._original

        def __init__(module: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(module, *args, **kwargs)
            self._begins(module, self._settings[-1])

        return __init__
