"""``smp.tp_register``: which distributed module stands for a class of the script's."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwright.errors import UsageError
from smdistributed.modelparallel.torch.nn.distributed import DistributedModule

_REGISTERED = "_smp_registered"
_ARGUMENTS = "_smp_arguments"

Hook = Callable[..., Any]
_Any = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Registered:
    """What stands for a class.

    Attributes:
        init_hook: translates the arguments of ``__init__``; None: they are the same.
        forward_hook: translates the arguments of ``forward``; None: they are the same.
        return_hook: translates what ``forward`` returns; None: it is the same.
    """

    dist_module: type[DistributedModule]
    init_hook: Hook | None = None
    forward_hook: Hook | None = None
    return_hook: Hook | None = None


def register(module_class: type[nn.Module], what: Registered) -> None:
    """Registers a distributed module for a class."""
    _check(module_class, what)
    if _REGISTERED not in vars(module_class):
        _remember_arguments(module_class)
    setattr(module_class, _REGISTERED, what)


def registered(module_class: type[nn.Module]) -> Registered | None:
    """What is registered for this very class."""
    return vars(module_class).get(_REGISTERED)


def arguments_of(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a module of a registered class was created with."""
    found: tuple[tuple[Any, ...], dict[str, Any]] | None = vars(module).get(_ARGUMENTS)
    if found is None:
        raise UsageError(
            f"a {type(module).__name__} was created before the class was registered with smp.tp_register, so "
            "nobody knows its arguments. Register the class first, then create the model."
        )
    return found


def _remember_arguments(module_class: type[nn.Module]) -> None:
    original = module_class.__init__

    @functools.wraps(original)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        if type(self) is module_class:
            vars(self)[_ARGUMENTS] = (args, kwargs)

    module_class.__init__ = __init__  # type: ignore[method-assign]


def _check(module_class: type[nn.Module], what: Registered) -> None:
    for kind, hook, method in (
        ("init_hook", what.init_hook, module_class.__init__),
        ("forward_hook", what.forward_hook, module_class.forward),
    ):
        if hook is not None:
            _check_hook(module_class, kind, hook, method)
    if what.forward_hook is None:
        _check_forward(module_class, what.dist_module)


def _check_hook(module_class: type[nn.Module], kind: str, hook: Hook, method: Hook) -> None:
    """A hook has the parameters of the method, but for ``self``."""
    expected = list(inspect.signature(method).parameters.values())[1:]
    found = list(inspect.signature(hook).parameters.values())
    if {parameter.kind for parameter in found} & set(_Any):
        return  # it takes whatever comes
    wanted = [(p.name, p.default) for p in expected]
    if [(p.name, p.default) for p in found] != wanted:
        name = kind.removesuffix("_hook").replace("init", "__init__")
        raise UsageError(
            f"the {kind} for {module_class.__name__} has the parameters ({_listed(found)}), but "
            f"{module_class.__name__}.{name} has ({_listed(expected)}). Give the hook the same, in the same "
            "order and with the same defaults, without self."
        )


def _check_forward(module_class: type[nn.Module], dist_module: type[DistributedModule]) -> None:
    """Without a hook, the class takes one tuple, or what the distributed module has in its own, by name."""
    found = list(inspect.signature(module_class.forward).parameters.values())[1:]
    names = tuple(p.name for p in found)
    if len(names) == 1 or any(known[: len(names)] == names for known in dist_module.inputs):
        return
    known = " or ".join(f"({', '.join(each)})" for each in dist_module.inputs) or "one tensor"
    raise UsageError(
        f"{module_class.__name__}.forward has the parameters ({_listed(found)}), but "
        f"smp.nn.{dist_module.__name__} takes {known}. Pass a forward_hook that makes these from those: it "
        "has the parameters of that forward, and returns (args, kwargs)."
    )


def _listed(parameters: list[inspect.Parameter]) -> str:
    return ", ".join(str(parameter) for parameter in parameters)
