"""Modules, their hooks and tree; the current line of the script.

A forward hook that a step function registers sees one microbatch in a plain loop: it is removed before the
next begins. Over several stages a rank suspends one microbatch and enters another, so each must find the
hooks that it registered itself, and no others::

    microbatch 0:  register, call block 0 ┐                ┌ call block 2, remove
    microbatch 1:                         └ call block 0 ──┘            the hook of 0 must not be called here
"""

import functools
import inspect
import os
import site
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.profiler import record_function

import shardwright
from shardwright.torch._private.modules import is_profiled

_NOT_THE_USERS = ("torch.", "shardwright.", "smdistributed.", "contextlib")


def user_line(inside: FrameType | None = None) -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1) if inside is None else inside
    fallback = ""
    while frame is not None:
        fallback = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if is_the_users(frame):
            return fallback
        frame = frame.f_back  # type: ignore[assignment]
    return fallback


def line_of(function: Callable[..., Any]) -> str:
    """``file:line`` of a function's definition; empty if it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def stacklevel_of_user() -> int:
    """The ``stacklevel`` with which a warning of the caller names the line of `user_line`."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and not is_the_users(frame):
        frame, level = frame.f_back, level + 1
    return level


def is_the_users(frame: FrameType) -> bool:
    """Whether a frame is the user's: neither torch's, nor ours, nor of code in between."""
    module = frame.f_globals.get("__name__", "")
    return not module.startswith(_NOT_THE_USERS) and module not in ("copy", "torch")


def called_from(module: str, function: str = "") -> bool:
    """Whether a function of this module, of this name if one is given, is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module and function in ("", frame.f_code.co_name):
            return True
        frame = frame.f_back
    return False


def is_running(functions: Iterable[Callable[..., Any]]) -> bool:
    """Whether one of these functions, methods, or objects that can be called is among the callers."""
    codes = {_code_of(function) for function in functions} - {None}
    frame: FrameType | None = sys._getframe(1) if codes else None
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def _code_of(function: Any) -> CodeType | None:
    """The code that runs in a call; None where Python does not run it."""
    if isinstance(function, functools.partial):
        return _code_of(function.func)
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)


def outermost_checkpoint() -> FrameType | None:
    """The call of `torch.utils.checkpoint.checkpoint` that we are in; of nested ones, the outermost."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if (
            frame.f_code.co_name == "checkpoint"
            and frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        ):
            found = frame
        frame = frame.f_back
    return found


def frames_up_to(module: str) -> list[str] | None:
    """Modules of the callers below the innermost function of this module; None if it is not among them."""
    frame = sys._getframe(1)
    names: list[str] = []
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == module:
            return names
        names.append(name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def custom_function_call() -> int | None:
    """Identity of the innermost running ``apply`` of an ``autograd.Function`` that is not torch's own."""
    frame = sys._getframe(1)
    callee = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "torch.autograd.function" and frame.f_code.co_name == "apply":
            # Recomputation is understood: see `torch/backward/activation_checkpointing.py`.
            return None if callee == "torch.utils.checkpoint" else id(frame)
        callee = name
        frame = frame.f_back  # type: ignore[assignment]
    return None


_FOLDERS = {
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
    os.path.dirname(shardwright.__file__),
}
_NOT_THE_SCRIPTS = (*(f"{folder}{os.sep}" for folder in _FOLDERS), "<frozen ")
_OURS = ("shardwright.", "smdistributed.")


def is_script_file(path: str) -> bool:
    """Whether a file of code is the script's own, or one that it brings along."""
    return not path.startswith(_NOT_THE_SCRIPTS)


def is_script_class(kind: type) -> bool:
    """Whether a class is of such a file, or of none: of a notebook, or of a module in C."""
    if f"{kind.__module__}.".startswith(_OURS) or kind.__module__ == "builtins":
        return False
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return path is None or is_script_file(path)


def range_named(name: object) -> AbstractContextManager[object]:
    """A range ``shardwright NAME`` in the profile, if one is being recorded."""
    return record_function(f"shardwright {name}") if is_profiled() else nullcontext()


OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
"""Attributes for parameters, buffers, modules, hooks and compiled code, and `training`."""


def all_modules(model: nn.Module) -> list[nn.Module]:
    """The module and all inside it, each once, in the order of `torch.nn.Module.modules`.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    >>> all_modules(model) == list(model.modules())
    True
    """
    found: list[nn.Module] = []
    seen: set[int] = set()
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append(module)
        if module._modules:
            pending += [child for child in reversed(module._modules.values()) if child is not None]
    return found


def _prefixes(model: nn.Module) -> list[str]:
    """Of names in what `all_modules` gives, in its order; also where a model gives other names to modules."""
    found: dict[int, str] = {}
    pending = [("", model)]
    while pending:
        prefix, module = pending.pop()
        if id(module) not in found:
            found[id(module)] = prefix
            children = reversed(module._modules.items())
            pending += [(f"{prefix}{name}.", child) for name, child in children if child is not None]
    return list(found.values())


def all_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All parameters, each once, in the order of `torch.nn.Module.parameters`."""
    return _parameters_of(all_modules(model))


def _parameters_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    found = [p for module in modules for p in module._parameters.values() if p is not None]
    return list({id(parameter): parameter for parameter in found}.values())


class ModelTree:
    """The modules and parameters of a model, walked anew only where a module was given others."""

    def __init__(self, model: Callable[[], nn.Module]):
        self._model = model
        self._held: list[Any] = []
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._named_for: list[nn.Module] | None = None
        self._names: list[str] = []

    @property
    def modules(self) -> list[nn.Module]:
        """As `all_modules` gives them; the same list as long as they and the parameters are the same."""
        self._look()
        return self._modules

    @property
    def parameters(self) -> list[nn.Parameter]:
        """As `all_parameters` gives them; the same list as long as they and the modules are the same."""
        self._look()
        return self._parameters

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """As `torch.nn.Module.named_buffers` gives them; a module keeps the name that it had at first."""
        self._look()
        if self._named_for is not self._modules:
            self._named_for = self._modules
            self._names = _prefixes(self._model())
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, module in zip(self._names, self._modules, strict=True):
            if module._buffers:
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        found.setdefault(id(buffer), (prefix + name, buffer))
        return dict(found.values())

    def _look(self) -> None:
        now = self._now()
        if len(now) == len(self._held) and all(map(is_, now, self._held)):
            return
        self._modules = all_modules(self._model())
        self._parameters = _parameters_of(self._modules)
        self._held = self._now()

    def _now(self) -> list[Any]:
        now: list[Any] = [self._model()]
        for module in self._modules:
            children, parameters = module._modules, module._parameters
            if children:
                now += children.values()
            if parameters:
                now += parameters.values()
        return now


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks for the gradients of what it is given and gives."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def hook_registries(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return (
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
    )


def forward_hook_is_running(model: nn.Module) -> bool:
    """Whether a forward hook of a module of the model is among the callers."""
    return is_running(
        hook
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )


class OwnHooks:
    """The hooks of one microbatch."""

    def __init__(self, model: nn.Module):
        self._registries = [registry for module in model.modules() for registry in hook_registries(module)]
        self._own: list[dict[int, Any]] | None = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Has the modules call these hooks; what is registered and removed inside stays with them."""
        outside = [dict(registry) for registry in self._registries]
        if self._own is not None:
            self._put(self._own)
        try:
            yield
        finally:
            self._own = [dict(registry) for registry in self._registries]
            self._put(outside)

    def _put(self, contents: list[dict[int, Any]]) -> None:
        # In place: the handle that removes a hook knows the registry itself.
        for registry, content in zip(self._registries, contents, strict=True):
            if registry.keys() != content.keys():
                registry.clear()
                registry.update(content)


@contextmanager
def forward_hooks_put(
    module: nn.Module, hooks: OrderedDict[int, Any], pre_hooks: OrderedDict[int, Any]
) -> Iterator[None]:
    """Gives a module these forward hooks instead of its own, inside the context."""
    own = module._forward_hooks, module._forward_pre_hooks
    module._forward_hooks, module._forward_pre_hooks = hooks, pre_hooks
    try:
        yield
    finally:
        module._forward_hooks, module._forward_pre_hooks = own


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
