"""Lists in which forward hooks of modules inside a unit collect what these give.

transformers returns router logits so (``output_router_logits=True``): lists in a context variable, and a hook
of every router that appends to one of them::

    collector.set({"router_logits": []})    around the forward of the model
    x = layers[0](x)                        the hook of layers[0].mlp.gate appends
    x = layers[1](x)                        that of layers[1].mlp.gate, too

Hooks inside a unit run on the rank of the unit alone. To the graph, such lists are one more argument of its
call, empty ones: what hooks have put there is a part of the result (see `python_state/filled_containers.py`),
and every rank appends that to lists of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from shardwright.errors import UsageError
from shardwright.torch.pytorch.module_tree import all_modules

__all__ = ["COLLECTED", "Collected", "called_collecting", "collects"]

COLLECTED = "_shardwright_collected"
"""Name of the argument: name of a context variable -> what is in it, with empty lists."""


class _Known:
    """What traces and the beginnings of batches have seen of hooks."""

    any_collects = False


class Collected(NamedTuple):
    """What the hooks inside a unit collect during one call of it.

    Attributes:
        given: the argument of the call.
        lists: each of its lists, and the one to which that is to be appended.
    """

    given: dict[str, dict[Any, Any]]
    lists: list[tuple[list[Any], list[Any]]]

    @classmethod
    def of(cls, unit: nn.Module, *, is_trace: bool) -> "Collected | None":
        """None where no hook inside the unit has a list to append to, as the code around it has left it."""
        if not (is_trace or _Known.any_collects):
            return None
        given: dict[str, dict[Any, Any]] = {}
        lists: list[tuple[list[Any], list[Any]]] = []
        for name, variable in _variables_inside(unit).items():
            held = variable.get(None)
            around = held if isinstance(held, dict) else {}
            if any(type(each) is list for each in around.values()):
                given[name] = own = {k: [] if type(each) is list else each for k, each in around.items()}
                lists += [(own[key], each) for key, each in around.items() if type(each) is list]
        return cls(given, lists) if lists else None

    def append(self) -> None:
        """Appends what the call has collected to the lists of the code around the unit."""
        for own, around in self.lists:
            around.extend(own)


def called_collecting(unit: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a unit whose hooks collect in the call's argument; also in another thread, in a backward."""
    given = kwargs.pop(COLLECTED)
    variables = _variables_inside(unit)
    with ExitStack() as put_back:
        for name, held in given.items():
            additions = {k: _Additions(each) if type(each) is list else each for k, each in held.items()}
            put_back.callback(variables[name].reset, variables[name].set(additions))
        return call(*args, **kwargs)


def collects(hook: Any) -> bool:
    """Whether a hook uses a context variable."""
    found = any(True for _ in _variables_of(hook))
    _Known.any_collects |= found
    return found


class _Additions:
    """In the place of a list to which hooks append: what is in it already is not known inside a unit."""

    def __init__(self, items: list[Any]):
        self.append = items.append

    def __len__(self) -> int:
        raise UsageError(
            "a forward hook inside a unit asks how much other hooks have collected in a list, which only "
            "code between units knows. Collect less (output_hidden_states=False), or have the hook append "
            "whatever is there already."
        )


def _variables_inside(unit: nn.Module) -> dict[str, ContextVar[Any]]:
    """The context variables that forward hooks of modules inside a unit use, by name."""
    found = {
        variable.name: variable
        for module in all_modules(unit)
        if module._forward_hooks and module is not unit
        for hook in module._forward_hooks.values()
        for variable in _variables_of(hook)
    }
    _Known.any_collects |= bool(found)
    return found


def _variables_of(hook: Any) -> Iterator[ContextVar[Any]]:
    """The context variables among the globals of a function, or in objects that are such globals."""
    function = getattr(hook, "__func__", hook)
    names, variables = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    for name in names.co_names if names is not None else ():
        item = variables.get(name)
        if isinstance(item, ContextVar):
            yield item
        elif not isinstance(item, ModuleType | type):
            held = getattr(item, "__dict__", {})
            yield from (each for each in held.values() if isinstance(each, ContextVar))
