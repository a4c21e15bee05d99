"""Intercepts glue: every torch function between units, and every unit call, of a step function.

::

    user's step function                      handler (a Tracer, or the microbatch that is running)
    --------------------                      -----------------------------------------------------
    x = model.wte(ids)         unit call  ->  unit_call(module, args, kwargs)
    x = x + pos                operation  ->  operation(torch.add, (x, pos), {})
    x = model.h[0](x)          unit call  ->  unit_call(...)            inside the unit nothing is intercepted
    model.backward(loss)                  ->  backward(loss)
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch._private.tensors import (
    TorchFunctionMode,
    function_mode_depth,
    pop_function_mode,
    push_function_mode,
)
from shardwright.torch.interception.compiled_code import run_as_written
from shardwright.torch.interception.step_code import in_step_code, writes_text
from shardwright.torch.interception.unit_attributes import (
    COLLECTED,
    Collected,
    TakesFound,
    called_with_hidden,
    has_hidden,
)
from shardwright.torch.pytorch.functions import answer_for_released, is_metadata
from shardwright.torch.pytorch.modules import called_from, forward_hooks_put, has_backward_hooks, user_line
from shardwright.torch.pytorch.tree import map_tree


class Handler(Protocol):
    """Handles the operations and unit calls of a step function.

    Attributes:
        intercepts: calls are intercepted; else the step function runs as it is.
        is_trace: it does not follow a trace, and looks at everything.
    """

    @property
    def intercepts(self) -> bool: ...

    @property
    def is_trace(self) -> bool: ...

    def operation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called for every unit; forward hooks run before and after, the handler calls it without them."""
        ...

    def backward(self, loss: Tensor, gradient: Tensor | None) -> None: ...

    def model_begins(self) -> None:
        """A `ReadingStep` calls the wrapped model, or a part of it that has units inside."""
        ...

    def model_returned(self, result: Any) -> None:
        """The step function has called something of the model, a unit or more, and gets this result."""
        ...


class _Active:
    """The handler of the step function that is running in this thread of control; None inside units."""

    handler: Handler | None = None
    realise: Callable[[Any], Any] | None = None
    batch_runs = False


def active_handler() -> Handler | None:
    """The handler in force; None outside of step functions and inside units."""
    return _Active.handler


def set_active_handler(handler: Handler | None) -> Handler | None:
    """Installs a handler and returns the one before."""
    before, _Active.handler = _Active.handler, handler
    run_as_written(handler is not None and handler.intercepts)
    return before


@contextmanager
def batch_running() -> Iterator[None]:
    """Says that microbatches are computed: also where no handler is in force, as in a backward."""
    before, _Active.batch_runs = _Active.batch_runs, True
    try:
        yield
    finally:
        _Active.batch_runs = before


def batch_is_running() -> bool:
    return _Active.batch_runs


def refuse_inside_step(what: str, remedy: str) -> None:
    """Refuses what belongs to a whole batch where a microbatch is computed."""
    if active_handler() is not None or _Active.batch_runs:
        raise UsageError(
            f"{user_line()}: {what} inside a step function, which runs once for each microbatch: the "
            f"gradients of a batch are there when it has returned. {remedy}"
        )


def refuse_gradient_inside_step() -> None:
    """Refuses that a step function uses the gradient of a parameter behind its backward."""
    clips = called_from("torch.nn.utils.clip_grad")
    refuse_inside_step(
        "gradients are clipped" if clips else "the gradient of a parameter is used",
        "Clip them behind its call, or read p.grad there, on the rank that has p; norm = "
        "torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf) is the norm over all ranks, unclipped.",
    )


class Realised(TorchFunctionMode):
    """Gives real tensors to code that runs in a backward, for the deferred ones that it remembers.

    A step function that recomputes (``torch.utils.checkpoint``) calls units and operations a second time,
    with the arguments of the first: on this rank, stand-ins for tensors that have come in meanwhile.
    """

    def __init__(self, realise: Callable[[Any], Any]):
        super().__init__()
        self._realise = realise

    def __enter__(self) -> "Realised":
        _Active.realise = self._realise
        push_function_mode(self)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        pop_function_mode()
        _Active.realise = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_tree(self._realise, (args, kwargs or {}))
        return func(*args, **kwargs)


class GlueMode(TorchFunctionMode):
    """Hands every torch function to a handler, except questions about shape, type and place."""

    def __init__(self, handler: Handler, asked: Callable[[Any, Any], None] | None = None):
        super().__init__()
        self.handler = handler
        self._asked = asked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = _Active.handler is self.handler
        if not mine or (is_metadata(func) and not (writes_text(func) and in_step_code())):
            if mine and args:
                answer = answer_for_released(func, args[0])
                if answer is not None:
                    return answer
                if self._asked is not None:
                    self._asked(func, args[0])
            return func(*args, **(kwargs or {}))
        return self.handler.operation(func, args, kwargs or {})


class plain_torch:  # noqa: N801  (a context manager)
    """Suspends interception: for the inside of a unit, which runs as if the library were not there."""

    __slots__ = ("_above", "_glue", "_handler")

    def __enter__(self) -> None:
        self._handler = set_active_handler(None)
        self._glue: GlueMode | None = None
        # Modes that the user entered above ours (a default device) stay in force inside the unit.
        self._above: list[TorchFunctionMode] = []
        while self._glue is None and function_mode_depth():
            mode = pop_function_mode()
            if isinstance(mode, GlueMode):
                self._glue = mode
            else:
                self._above.append(mode)
        self._above.reverse()
        for mode in self._above:
            push_function_mode(mode)

    def __exit__(self, *exc_info: object) -> None:
        if self._glue is not None:
            for _ in self._above:
                pop_function_mode()
            push_function_mode(self._glue)
            for mode in self._above:
                push_function_mode(mode)
        set_active_handler(self._handler)


class _Hooks:
    """Forward hooks of a unit: run on every rank, as glue, so that what they collect is there everywhere."""

    def __init__(self, module: nn.Module):
        self._module = module

    @classmethod
    def of(cls, module: nn.Module) -> "_Hooks | None":
        """None for a module without hooks."""
        return cls(module) if module._forward_hooks or module._forward_pre_hooks else None

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Runs the pre-hooks, which may change the arguments."""
        module = self._module
        for number, hook in list(module._forward_pre_hooks.items()):
            if number in module._forward_pre_hooks_with_kwargs:
                changed = hook(module, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
            else:
                changed = hook(module, args)
                if changed is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)
        return args, kwargs

    def after(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Runs the hooks, which may change the result."""
        module = self._module
        for number, hook in list(module._forward_hooks.items()):
            if number in module._forward_hooks_with_kwargs:
                changed = hook(module, args, kwargs, result)
            else:
                changed = hook(module, args, result)
            if changed is not None and changed is not result:
                if torch.is_grad_enabled() and has_backward_hooks(module):
                    raise UsageError(
                        f"a forward hook changes the result of a {type(module).__name__} that also has a "
                        "backward hook, which would be given the gradient of what the module itself gave, "
                        "before that hook. Change the result inside the module, or where it is used."
                    )
                result = changed
        return result


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Suspends the forward hooks of a unit: they run around its call, as glue.

    No microbatch may be left inside: the hooks would be gone for the others.
    """
    with forward_hooks_put(module, OrderedDict(), OrderedDict()):
        yield


def call_without_hooks(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a unit, but not its forward hooks."""
    if not module._forward_hooks and not module._forward_pre_hooks:
        return module(*args, **kwargs)
    with without_hooks(module):
        return module(*args, **kwargs)


class UnitCall:
    """The class of every unit has it as its last base.

    The first one could not be: an instance changes its class only where that is laid out alike, which it is
    not behind an abstract base, `typing.Generic` or a protocol (``class Block(ABC, nn.Module)``).
    """

    _user_class: type

    def _refuse_remote(self) -> None:
        """Says of a whole unit what its parameters say of themselves: that they are on another rank."""
        assert isinstance(self, nn.Module)
        if self in _UNITS and any(p.is_meta for p in self.parameters()):
            raise UsageError(
                f"{user_line()}: the weights of this {type(self).__name__} are on another rank, because the "
                "model is spread over stages. Call the model inside a function decorated with @sw.step; "
                "model.state_dict(), called on all ranks, gives all of its weights."
            ) from None


def _unit_class(user_class: Any) -> type:
    """A class like the user's, of which calls go to the active handler, hooks included."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        handler = _Active.handler
        if handler is None or self not in _UNITS:
            if _Active.realise is not None:
                args, kwargs = map_tree(_Active.realise, (args, kwargs))
            own = partial(user_class.__call__, self)
            try:
                if has_hidden(kwargs) and not isinstance(self, TakesFound):
                    return called_with_hidden(self, own, *args, **kwargs)
                return own(*args, **kwargs)
            except UsageError:
                self._refuse_remote()
                raise
        hooks = _Hooks.of(self)
        if hooks is not None:
            args, kwargs = hooks.before(args, kwargs)
        collected = Collected.of(self, is_trace=handler.is_trace)
        if collected is None:
            result = handler.unit_call(self, args, kwargs)
        else:
            result = handler.unit_call(self, args, {**kwargs, COLLECTED: collected.given})
            collected.append()
        return result if hooks is None else hooks.after(args, kwargs, result)

    def reduce(self: Any, protocol: Any) -> Any:
        # A pickled unit is an instance of the user's class: whoever loads it need not have Shardwright.
        reduced = user_class.__reduce_ex__(self, protocol)
        swap = {type(self): user_class}
        arguments = tuple(swap.get(item, item) if isinstance(item, type) else item for item in reduced[1])
        return (reduced[0], arguments, *reduced[2:])

    namespace = {
        "__module__": user_class.__module__,
        "__qualname__": user_class.__qualname__,
        "__call__": call,
        "__reduce_ex__": reduce,
        "_user_class": user_class,
    }
    return type(user_class.__name__, (user_class, UnitCall), namespace)


_INTERCEPTED: dict[type, type] = {}
# A copy of a unit, or a slice of an `nn.Sequential`, has the class of the unit and is none.
_UNITS: "weakref.WeakSet[Any]" = weakref.WeakSet()


def intercept_calls(module: nn.Module) -> None:
    """Makes calls of this module go through the active handler.

    The instance gets a subclass of its own class, with the same name: `isinstance` holds, hooks and
    attributes stay.
    """
    user_class = type(module)
    _UNITS.add(module)
    if issubclass(user_class, UnitCall):
        return
    if user_class not in _INTERCEPTED:
        _INTERCEPTED[user_class] = _unit_class(user_class)
    module.__class__ = _INTERCEPTED[user_class]


def has_units_inside(module: nn.Module) -> bool:
    """Whether calls of modules inside this one go through the active handler."""
    return any(inside in _UNITS for inside in module.modules() if inside is not module)


def restore_calls(module: nn.Module) -> None:
    _UNITS.discard(module)
    if isinstance(module, UnitCall):
        module.__class__ = type(module)._user_class
