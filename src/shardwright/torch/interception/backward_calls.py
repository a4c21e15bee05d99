"""Backward and update calls: routed in a step function, refused where they belong elsewhere.

PyTorch does not show ``torch.autograd.backward`` to function modes. Unintercepted, it would run through only
the part of the graph on this rank.

Parameters reveal a backward outside a step in a model of one stage. The model's outputs could not: the loss
may be an attribute of the model, or hidden in an object of the script, and reentrant checkpointing recomputes
in a backward of its own. The watch sees every parameter gradient, those of steps included, so it ends when a
step begins and no graph of an outside call is left.

An update's call in a step function would be made once for each microbatch and each trace, and before all
gradients are there.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle, unserializable_hook

from shardwright.errors import TraceError, UsageError
from shardwright.torch._private.modules import goes_into_gradients
from shardwright.torch.interception.glue import (
    active_handler,
    batch_is_running,
    plain_torch,
    refuse_inside_step,
)
from shardwright.torch.pytorch.functions import OF_GRADIENT, gradient_of_backward
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import leaves


def backward_intercepted(original: Callable[..., None]) -> Callable[..., None]:
    """A `torch.autograd.backward` that goes to the active handler."""

    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        handler = active_handler()
        if handler is None:
            original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        if len(roots) != 1:
            raise UsageError(
                f"torch.autograd.backward is called with {len(roots)} tensors in a step function. Add the "
                "losses and call model.backward(loss) once."
            )
        given = grad_tensors if isinstance(grad_tensors, Tensor | None) else grad_tensors[0]
        gradient = gradient_of_backward(given, retain_graph, create_graph, inputs)
        with plain_torch():
            handler.backward(roots[0], gradient)

    return backward


def tensor_backward_intercepted(original: Callable[..., None]) -> Callable[..., None]:
    """A `Tensor.backward` that goes to the active handler."""

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        handler = active_handler()
        if handler is None:
            original(loss, *args, **kwargs)
            return
        with plain_torch():
            handler.backward(loss, gradient_of_backward(*args, **kwargs))

    return backward


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


_CALLS: dict[type, tuple[str, tuple[str, ...]]] = {
    Optimizer: ("optimizer", ("zero_grad",)),  # for step() there is a hook of PyTorch
    LRScheduler: ("scheduler", ("step",)),
    torch.amp.GradScaler: ("scaler", ("step", "update", "unscale_")),
    nn.Module: ("model", ("zero_grad",)),
}


def refuse_updates_inside_steps(cleanup: ExitStack) -> None:
    """Has optimizers, schedulers and scalers of all classes so far refuse their calls; until the run ends."""
    for base, (spoken, names) in _CALLS.items():
        for kind in {base, *(() if base is nn.Module else _subclasses(base))}:
            for name in names:
                method = vars(kind).get(name)
                if callable(method) and not hasattr(method, "_refuses_inside_steps"):
                    setattr(kind, name, _refusing(method, f"{spoken}.{name}() is called"))
                    cleanup.callback(setattr, kind, name, method)


def _refusing(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        refuse_inside_step(what, "Call it in the training loop.")
        return method(*args, **kwargs)

    refusing._refuses_inside_steps = True  # type: ignore[attr-defined]
    return refusing


def _subclasses(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def refuse_gradient_of(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """Refuses to look behind a backward at the gradient that it gave to a tensor that is no parameter."""
    if func in OF_GRADIENT and isinstance(args[0], Tensor) and args[0].requires_grad:
        raise UsageError(
            f"{user_line()}: the gradient of a tensor is used behind backward(), in a step function or "
            "in the forward of a module. A backward runs stage by stage, when everything has been "
            "computed, so it is not there yet. torch.autograd.grad(y.sum(), x, create_graph=True) gives it "
            "at once."
        )


def refuse_no_tensor(loss: Any) -> None:
    """Refuses a loss that is no tensor, such as a number read from it."""
    if isinstance(loss, Tensor):
        return
    is_number = isinstance(loss, int | float)
    given = (
        f"the {type(loss).__name__} {loss}" if is_number else f"an object of the type {type(loss).__name__}"
    )
    line = "output.loss" if isinstance(getattr(loss, "loss", None), Tensor) else "loss"
    hint = " Numbers, as of loss.item(), are for printing and adding up." if is_number else ""
    raise UsageError(
        f"{user_line()}: model.backward gets {given}, but needs the loss itself, a tensor that knows what it "
        f"was computed from. Write model.backward({line}).{hint}"
    )


def refuse_second_backward(already: bool) -> None:
    if already:
        raise UsageError(
            f"{user_line()}: backward is called a second time in one step function. Add the losses and call "
            "backward once."
        )


def refuse_untrained(trained: bool) -> None:
    """Refuses a loss without a gradient."""
    if not trained:
        raise TraceError(
            f"{user_line()}: the loss does not depend on any trained parameter of the model, so there is "
            "nothing to train. Compute it from what the model returns, without detach() or no_grad(), with "
            "parameters that require gradients. A function that evaluates, too, asks first: "
            "if model.training: model.backward(loss)"
        )


def refuse_several_numbers(loss: Tensor, gradient: Tensor | None) -> None:
    if gradient is None and loss.numel() != 1:
        raise UsageError(
            f"{user_line()}: the loss has shape {tuple(loss.shape)}. Reduce it to one number, for example "
            "with loss.mean()."
        )
