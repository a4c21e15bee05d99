"""One microbatch of a rank that holds the whole model: nothing is intercepted but its backward."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch.backward.evaluated_values import Shadows
from shardwright.torch.interception.backward_calls import (
    refuse_second_backward,
    refuse_several_numbers,
    refuse_untrained,
)
from shardwright.torch.interception.glue import (
    call_without_hooks,
    plain_torch,
    set_active_handler,
)
from shardwright.torch.offload.stage_offload import StageOffload
from shardwright.torch.pytorch.functions import gradient_of_backward
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.replicas.reducer import GradientReducer

__all__ = ["PlainMicrobatch", "tensor_backward"]


class PlainMicrobatch:
    """The handler of a step function that is run as it is, for one microbatch.

    Args:
        factor: gives the factor on the gradient of a loss.

    Attributes:
        loss: what ``backward`` was called with; None as long as it was not.
        backward_s: when that began and ended.
        waited_s: seconds for which copies were waited for, before and in it.
        memory: bytes in use at these moments; empty where nobody asked.
    """

    def __init__(
        self,
        factor: Callable[..., float],
        reducer: GradientReducer | None,
        *,
        first: bool,
        last: bool,
        in_use: Callable[[], int] | None = None,
        look: Callable[[Tensor], None] | None = None,
        offload: StageOffload | None = None,
        offloaded: frozenset[nn.Module] = frozenset(),
        shadows: Shadows | None = None,
    ):
        self._shadows = shadows
        self._offload = offload
        self._offloaded = offloaded
        self._factor = factor
        self._look_at_loss = look
        self._opens = reducer if first else None
        self._reducer = reducer
        self._is_last = last
        self.loss: Tensor | None = None
        self.backward_s = (0.0, 0.0)
        self.waited_s = (0.0, 0.0)
        self.memory: list[int] = []
        self._in_use = in_use

    is_trace = True  # there may be none

    @property
    def intercepts(self) -> bool:
        """Units are called one by one where they offload what they keep: compiled, but not what is around."""
        return self._offload is not None

    def operation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a torch function: nothing is intercepted on a single rank."""
        return func(*args, **kwargs)

    def unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a unit; units are intercepted on a single rank where they offload what they keep."""
        before = set_active_handler(None)
        try:
            if self._offload is None or module not in self._offloaded:
                return call_without_hooks(module, *args, **kwargs)
            with self._offload.keeping(module):
                return call_without_hooks(module, *args, **kwargs)
        finally:
            set_active_handler(before)

    def backward(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Runs autograd, with the loss scaled by how much the microbatch counts."""
        refuse_second_backward(self.loss is not None)
        refuse_untrained(loss.requires_grad)
        refuse_several_numbers(loss, gradient)
        self.loss = loss.detach()
        if self._look_at_loss is not None:
            self._look_at_loss(loss)
        begin_s = self._moment()
        factor = self._factor(loss, given=gradient is not None)
        if self._opens is not None:
            self._opens.begin()
        if self._reducer is not None:
            self._reducer.on_backward(0, begins=True, last=self._is_last)
        with self._brought_back():
            if factor != 0:  # nothing in it counts: it may be NaN
                start = torch.ones_like(loss) if gradient is None else gradient
                torch.autograd.backward(loss, start * factor)
        if self._reducer is not None:
            self._reducer.on_backward(0, begins=False, last=self._is_last)
        self.backward_s = (begin_s, self._moment())

    @contextmanager
    def _brought_back(self) -> Iterator[None]:
        """Surrounds the backward: what was offloaded comes back ahead of its use."""
        if self._offload is None:
            yield
            return
        self._offload.offload()
        waited_s = self._offload.waited_s
        self._offload.load()
        yield
        self.waited_s = waited_s, self._offload.waited_s - waited_s
        self._offload.end()

    def model_begins(self) -> None:
        """Does nothing: the whole model is here."""

    def model_returned(self, result: Any) -> None:
        """Every value is here; an evaluation may be followed from it."""
        if self._shadows is not None:
            self._shadows.begin(leaves(result))

    def _moment(self) -> float:
        """The present time; records the memory in use."""
        now_s = time.perf_counter()
        if self._in_use is not None:
            self.memory.append(self._in_use())
        return now_s


class tensor_backward:  # noqa: N801  (a context manager)
    """Makes ``loss.backward()`` inside a step function mean ``model.backward(loss)``."""

    def __init__(self, handler: PlainMicrobatch):
        self._handler = handler
        self._original = Tensor.backward

    def __enter__(self) -> None:
        handler = self._handler

        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            with plain_torch():
                handler.backward(loss, gradient_of_backward(*args, **kwargs))

        Tensor.backward = backward  # type: ignore[assignment,method-assign]

    def __exit__(self, *exc_info: object) -> None:
        Tensor.backward = self._original  # type: ignore[method-assign]
