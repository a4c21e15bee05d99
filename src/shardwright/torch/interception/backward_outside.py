"""Refuses backward calls outside steps, whose gradients nothing would sum.

Parameters reveal a backward outside a step in a model of one stage. The model's outputs could not: the loss
may be an attribute of the model, or hidden in an object of the script, and reentrant checkpointing recomputes
in a backward of its own. The watch sees every parameter gradient, those of steps included, so it ends when a
step begins and no graph of an outside call is left.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle, unserializable_hook

from shardwright.errors import UsageError
from shardwright.torch._private import goes_into_gradients
from shardwright.torch.interception.glue import batch_is_running
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.pytorch.tree import leaves

__all__ = ["BackwardWatch", "backward_of_results_refused", "refuse_backward_outside"]


_MARK = "shardwright: called outside of a step"


class _Graph:
    """Lives as long as a node of the graph that a call of the model has left."""


class BackwardWatch:
    """Tells when a backward outside of steps comes to a parameter of a model."""

    def __init__(self, reached: Callable[[], None]):
        self._reached = reached
        self._watched: dict[int, tuple[weakref.ref[nn.Parameter], RemovableHandle]] = {}
        self._graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()

    def watch(self, module: nn.Module, tensors: Any = ()) -> None:
        """Watches the parameters that a module has now, after it was called outside of steps."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in trained:
            known = self._watched.get(id(parameter))
            if known is None or known[0]() is not parameter:
                own = weakref.ref(parameter)
                hook = unserializable_hook(partial(self._on_gradient, own))  # type: ignore[no-untyped-call]
                handle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
                self._watched[id(parameter)] = own, handle
        graph = _Graph()
        self._graphs.add(graph)
        for tensor in (*trained, *leaves(tensors)):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                # A parameter knows its node only as long as a graph has it, and the node what it is told.
                get_gradient_edge(tensor).node.metadata[_MARK] = graph  # type: ignore[index]

    def step_begins(self) -> None:
        """Watches no longer, if no graph of a call outside is left, of which there could be a backward."""
        if not self._graphs:
            for reference, handle in self._watched.values():
                handle.remove()
                parameter = reference()
                if parameter is not None and not parameter._backward_hooks:
                    parameter._backward_hooks = None  # autograd would look for hooks in an empty dictionary
            self._watched.clear()

    def _on_gradient(self, own: "weakref.ref[nn.Parameter]", gradient: Tensor) -> None:
        parameter = own()
        if not batch_is_running() and parameter is not None and goes_into_gradients(parameter):
            self._reached()


def refuse_backward_outside() -> None:
    """Refuses a backward outside of steps."""
    raise UsageError(
        f"{user_line()}: loss.backward() is outside of a step, where replicas do not sum their gradients and "
        "would come apart. Call the model and model.backward(loss) inside a function decorated with @sw.step."
    )


@contextmanager
def backward_of_results_refused() -> Iterator[None]:
    """Inside, a backward of what a step function has returned says where it belongs.

    PyTorch says that a tensor does not require grad, which is true of all that steps return.
    """
    original = torch.autograd.backward

    @wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        except RuntimeError as error:
            if batch_is_running() or "does not require grad" not in str(error):
                raise
            raise UsageError(
                f"{user_line()}: backward is called outside of a step, for a tensor that has no gradients. "
                "What a step function returns is for reading, reduce_mean() too. Call model.backward(loss) "
                "inside the function decorated with @sw.step."
            ) from error

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
