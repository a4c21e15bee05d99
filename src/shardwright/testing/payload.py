"""Packs a function and its arguments for the ranks."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwright.comm.joining.run_secret import Seal, packed
from shardwright.errors import UsageError

__all__ = ["PAYLOAD", "payload", "value_place"]

PAYLOAD = "what ranks run"


def value_place(rank: int) -> str:
    """What the result of a rank is called where it is sealed."""
    return f"what rank {rank} returns or raises"


def payload(thing: object, *, function: Callable[..., Any], seal: Seal) -> bytes:
    """Pickles a function with its dependencies."""
    cloudpickle = _cloudpickle()
    module = _module_of(function)
    # A rank need not, and often could not, import a test module: it is not on the path, and imports much.
    by_value = module is not None and _is_a_script(module)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled = packed(thing, seal, PAYLOAD, dumps=cloudpickle.dumps)
    except Exception as error:
        raise UsageError(
            f"{_name(function)} cannot travel to the ranks: {type(error).__name__}: {error}. The function, "
            "its arguments and the variables that it uses must be picklable. Create what is not inside the "
            "function."
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return pickled


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise UsageError("run_ranks needs cloudpickle: pip install 'shardwright[testing]'.") from error
    return cloudpickle


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name(function: Callable[..., Any]) -> str:
    return getattr(_innermost(function), "__qualname__", repr(function))


def _module_of(function: Callable[..., Any]) -> ModuleType | None:
    function = _innermost(function)
    name = getattr(function, "__module__", None) or type(function).__module__
    return sys.modules.get(name)


def _is_a_script(module: ModuleType) -> bool:
    """Whether a module is neither installed nor part of the interpreter."""
    top = module.__name__.partition(".")[0]
    path = Path(getattr(module, "__file__", None) or "<built in>")
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not (installed or top in sys.stdlib_module_names or top in ("shardwright", "__main__"))
