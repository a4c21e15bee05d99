"""Tensors that code between units leaves in attributes of a unit's modules.

Hooks run around a unit, and some store a computed weight on it (`weight_norm`, `spectral_norm`, pruning). A
network that computes another network's weights does so too::

    for layer, weight in zip(self.layers, self.make_weights(z)):
        layer.weight = weight           a value of the graph, like any other
        x = layer(x)                    reads it

To the graph, such a tensor is one more argument, passed by name, and it may come from another stage. The
unit's call removes it again; the attribute holds it only during the call.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch.interception.collected_outputs import COLLECTED, called_collecting
from shardwright.torch.pytorch.slots import ABSENT

__all__ = [
    "FOUND",
    "FoundPlace",
    "TakesFound",
    "call_copy",
    "called_with_hidden",
    "found_in",
    "found_places",
    "has_hidden",
    "refuse_replaced",
    "with_found",
]

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
    """The places of the attributes with these paths."""
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
