"""Tensors that units get by attributes, and lists in which hooks collect outputs.

transformers returns router logits so (``output_router_logits=True``): lists in a context variable, and a hook
of every router that appends to one of them::

    collector.set({"router_logits": []})    around the forward of the model
    x = layers[0](x)                        the hook of layers[0].mlp.gate appends
    x = layers[1](x)                        that of layers[1].mlp.gate, too

Hooks inside a unit run on the rank of the unit alone. To the graph, such lists are one more argument of its
call, empty ones: what hooks have put there is a part of the result (see `python_state/filled_containers.py`),
and every rank appends that to lists of its own.

Hooks run around a unit, and some store a computed weight on it (`weight_norm`, `spectral_norm`, pruning). A
network that computes another network's weights does so too::

    for layer, weight in zip(self.layers, self.make_weights(z)):
        layer.weight = weight           a value of the graph, like any other
        x = layer(x)                    reads it

To the graph, such a tensor is one more argument, passed by name, and it may come from another stage. The
unit's call removes it again; the attribute holds it only during the call.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch.pytorch.modules import all_modules
from shardwright.torch.pytorch.tree import ABSENT

COLLECTED = "_shardwright_collected"
"""Name of the argument: name of a context variable -> what is in it, with empty lists."""


class _Known:
    """What traces and the beginnings of batches have seen of hooks."""

    any_collects = False


class Collected(NamedTuple):
    """What the hooks inside a unit collect during one call of it.

    Attributes:
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


FOUND = "_shardwright_found"
"""Name of the argument: path of an attribute, seen from the unit -> tensor."""

FoundPlace = tuple[str, dict[str, Any], str]
"""Path of an attribute, what holds it (the attributes of a module, or its parameters), and its name."""


def found_in(unit: nn.Module, is_value: Callable[[Any], bool]) -> dict[str, Tensor]:
    """The tensors in attributes of a unit's modules that are values of the graph, by path."""
    return {
        f"{name}.{key}" if name else key: item
        for name, module in unit.named_modules()
        for holder in _holders(module)
        for key, item in holder.items()
        if isinstance(item, Tensor) and is_value(item)
    }


def found_places(unit: nn.Module, paths: Iterable[str]) -> tuple[FoundPlace, ...]:
    return tuple(_place(unit, path) for path in paths)


def with_found(kwargs: dict[str, Any], places: Iterable[FoundPlace]) -> dict[str, Any]:
    """Arguments by name of a unit, and what is in these attributes now."""
    return {**kwargs, FOUND: {path: holder.get(key) for path, holder, key in places}}


class TakesFound:
    """Mixed into the class of a unit that takes the argument off by itself, further inside."""


def has_hidden(kwargs: Mapping[str, Any]) -> bool:
    """Whether there are arguments by name that the forward of a unit does not know."""
    return FOUND in kwargs or COLLECTED in kwargs


def called_with_hidden(unit: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a unit with its attributes set, and what its hooks collect kept, by the call's arguments."""
    if COLLECTED in kwargs:
        call = partial(called_collecting, unit, call)
    return _called_with_found(unit, call, *args, **kwargs) if FOUND in kwargs else call(*args, **kwargs)


def _called_with_found(unit: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = {path: item for path, item in kwargs.pop(FOUND).items() if isinstance(item, Tensor)}
    places = found_places(unit, found)
    before = [holder.get(key, ABSENT) for _, holder, key in places]
    for path, holder, key in places:
        holder[key] = found[path]
    try:
        return call(*args, **kwargs)
    finally:
        for (path, holder, key), item in zip(places, before, strict=True):
            if holder.get(key) is not found[path]:
                continue  # the unit has left something else there
            if item is ABSENT:
                del holder[key]
            else:
                holder[key] = item


def call_copy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function, or a copy of a unit: that is of the user's class, and does not know hidden ones."""
    if has_hidden(kwargs) and isinstance(func, nn.Module):
        return called_with_hidden(func, func, *args, **kwargs)
    return func(*args, **kwargs)


def refuse_replaced(units: Mapping[str, nn.Module], is_value: Callable[[Any], bool]) -> None:
    """Refuses that parameters and buffers of units are computed tensors when the step function ends."""
    for path, unit in units.items():
        for name, module in unit.named_modules(prefix=path):
            for kind, holder in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key in [key for key, item in holder.items() if is_value(item)]:
                    raise UsageError(
                        f"the step function leaves a tensor that it has computed outside of {path} in the "
                        f"place of the {kind} {name}.{key}, which only the rank of {path} has. Compute it in "
                        f"the forward of {path}, or change it in place (buffer.mul_(0.9).add_(x)); a tensor "
                        "for this microbatch alone goes into an attribute that is no parameter or buffer."
                    )


def _holders(module: nn.Module) -> tuple[dict[str, Any], ...]:
    # Parameters and buffers, too: a hook may replace them for the length of a call.
    return module._parameters, module._buffers, vars(module)


def _place(unit: nn.Module, path: str) -> FoundPlace:
    prefix, _, key = path.rpartition(".")
    holders = _holders(unit.get_submodule(prefix))
    return path, next((holder for holder in holders if key in holder), holders[-1]), key
