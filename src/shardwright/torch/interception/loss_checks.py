"""Checks that a loss can be trained on, with the same words in a trace, after it and on one rank."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardwright.errors import TraceError, UsageError
from shardwright.torch.pytorch.functions import OF_GRADIENT
from shardwright.torch.pytorch.source_line import user_line

__all__ = [
    "refuse_gradient_of",
    "refuse_no_tensor",
    "refuse_second_backward",
    "refuse_several_numbers",
    "refuse_untrained",
]


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
    """Refuses a second backward in one step function."""
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
    """Refuses a loss of several numbers whose gradient is not given."""
    if gradient is None and loss.numel() != 1:
        raise UsageError(
            f"{user_line()}: the loss has shape {tuple(loss.shape)}. Reduce it to one number, for example "
            "with loss.mean()."
        )
