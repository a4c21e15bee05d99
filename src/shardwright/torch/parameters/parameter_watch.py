"""Notices a read of a module's parameter, just before it happens.

Code that computes reads parameters as attributes of modules (``self.weight``), which PyTorch looks up in
``module._parameters``. The watch waits there for the parameter's rows, so that the code finds an ordinary
parameter.
"""

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import nn

__all__ = ["watch_parameters"]

Arrive = Callable[[Any], None]


class _WatchedParameters(dict[str, Any]):
    """The parameters of a module, of which some may be still to come."""

    def __init__(self, plain: MutableMapping[str, Any], to_come: dict[int, Any], arrive: Arrive):
        super().__init__(plain)
        self._to_come = to_come
        self._arrive = arrive

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        if self._to_come:
            self._wait_for(found)
        return found

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def _wait_for(self, parameter: Any) -> None:
        what = self._to_come.get(id(parameter))
        if what is not None:
            self._arrive(what)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def watch_parameters(module: nn.Module, to_come: dict[int, Any], arrive: Arrive) -> None:
    """Has a module wait for its parameters."""
    if module._parameters:
        module.__dict__["_parameters"] = _WatchedParameters(module._parameters, to_come, arrive)
