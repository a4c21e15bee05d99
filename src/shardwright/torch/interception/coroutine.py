"""A step function that can be suspended and resumed, with PyTorch's thread-local state.

::

    x = model.module.wte(ids)      a unit                 its call goes to the handler as it is
    x = model.module.body(x)       has units inside       what runs between them is code of the model
    x = model.module.head(x)       has parameters         no unit, where no trace has come by
    x = model.module.double(x)     has neither            code of the step function, as x * 2 is
    loss = model(batch, labels)    the model itself       code of the step function, where its own code reads
                                                          values: the losses of detection in transformers
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import greenlet
import torch
from torch import nn

from shardwright.torch._private.modules import put_saved_tensor_hooks, take_saved_tensor_hooks
from shardwright.torch._private.tensors import (
    TorchFunctionMode,
    function_mode_depth,
    pop_function_mode,
    push_function_mode,
)
from shardwright.torch.interception.glue import Handler, active_handler, has_units_inside, set_active_handler
from shardwright.torch.interception.step_code import code_of_model, in_step_code
from shardwright.torch.pytorch.modules import all_modules
from shardwright.torch.pytorch.tensors import AutocastState, autocast_state


@dataclass(slots=True)
class _ThreadState:
    """PyTorch's state of a thread that a step function may change: it must not leak into other microbatches.

    ``with torch.autocast(...):`` around a model call, for example, is left in the middle when its stage ends.
    """

    grad_enabled: bool
    autocast: AutocastState
    autocast_cache: bool
    modes: tuple[TorchFunctionMode, ...]
    saved_tensor_hooks: list[Any]
    handler: Handler | None

    @classmethod
    def capture(cls) -> "_ThreadState":
        """Takes the present state, and leaves no function mode active."""
        modes = []
        while function_mode_depth():
            modes.append(pop_function_mode())
        return cls(
            grad_enabled=torch.is_grad_enabled(),
            autocast=autocast_state(),
            autocast_cache=torch.is_autocast_cache_enabled(),
            modes=tuple(reversed(modes)),
            saved_tensor_hooks=take_saved_tensor_hooks(),
            handler=active_handler(),
        )

    def restore(self) -> None:
        """Makes it the present state; no function mode may be active."""
        torch.set_grad_enabled(self.grad_enabled)
        for device, enabled, dtype in self.autocast:
            if torch.is_autocast_enabled(device) or enabled:
                # Casts that one microbatch cached belong to its graph.
                torch.clear_autocast_cache()
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        for mode in self.modes:
            push_function_mode(mode)
        put_saved_tensor_hooks(self.saved_tensor_hooks)
        set_active_handler(self.handler)


class Coroutine:
    """Runs a function until it pauses.

    Example:
        >>> coroutine = Coroutine(lambda: (coroutine.pause(), "done")[1])
        >>> coroutine.resume(), coroutine.finished
        (None, False)
        >>> coroutine.resume(), coroutine.finished
        (None, True)
        >>> coroutine.result
        'done'
    """

    __slots__ = ("_greenlet", "_state", "result")

    def __init__(self, function: Callable[[], Any]):
        self._greenlet = greenlet.greenlet(self._run)
        self._state: _ThreadState | None = None
        self.result: Any = function

    @property
    def finished(self) -> bool:
        return bool(self._greenlet.dead)

    def _run(self) -> None:
        self.result = self.result()

    def resume(self) -> None:
        """Enters the function, or continues after its last `pause`; raises its errors."""
        outer = _ThreadState.capture()
        if self._state is None:
            outer.restore()
        else:
            self._state.restore()
        try:
            self._greenlet.switch()
        finally:
            self._state = _ThreadState.capture()
            outer.restore()
            if self._greenlet.dead:
                self._state = None  # it holds on to whatever handled the step function

    def pause(self) -> None:
        """Called inside the function: returns to the caller of `resume`."""
        parent = self._greenlet.parent
        assert parent is not None
        parent.switch()

    def close(self) -> None:
        """Ends a function that will not be resumed: its `finally` blocks run."""
        if self._greenlet and not self._greenlet.dead:
            outer = _ThreadState.capture()
            if self._state is not None:
                self._state.restore()
            try:
                self._greenlet.throw(greenlet.GreenletExit)
            finally:
                _ThreadState.capture()
                outer.restore()


@contextmanager
def model_calls_marked(model: nn.Module, *, but_its_own: bool = False) -> Iterator[None]:
    """Tells the active handler when a `ReadingStep` calls a module of the model, and what it gave."""
    original = nn.Module.__call__
    own: set[int] = set()

    def is_of_model(module: nn.Module) -> bool:
        if has_units_inside(module):
            return True
        if not own:
            own.update(map(id, all_modules(model)))
        return id(module) in own and any(True for _ in module.parameters())

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handler = active_handler()
        if handler is None or not in_step_code() or not is_of_model(module):
            return original(module, *args, **kwargs)
        if but_its_own and model in (module, *module.children()):
            return original(module, *args, **kwargs)
        handler.model_begins()
        with code_of_model():
            result = original(module, *args, **kwargs)
        handler.model_returned(result)
        return result

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
