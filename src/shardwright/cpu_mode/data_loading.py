"""`DataLoader` without pinned memory, which PyTorch would warn of on a machine without a GPU."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["put_in_force"]


def put_in_force() -> None:
    """Replaces the constructor."""
    cls: Any = DataLoader
    cls.__init__ = _unpinned(cls.__init__)


def _unpinned(init: Callable[..., Any]) -> Callable[..., Any]:
    position = list(inspect.signature(init).parameters).index("pin_memory")

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if len(args) >= position:  # self is not among them
            args = (*args[: position - 1], False, *args[position:])
        kwargs.pop("pin_memory", None)
        kwargs.pop("pin_memory_device", None)
        init(self, *args, **kwargs)

    return __init__
